"""The engine's contract over real Ray: a head and a node of it on this machine, and an agent behind a relay."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine_bench import LocalBench, WallClock
from support import claim_ports, wait_until

from gpusched.cli.admin.cluster_plan import own_address
from gpusched.engine.ray.keeper import end_leftovers
from gpusched.engine.ray.link import RayBridge, RayChannel
from gpusched.engine.ray.site import RayFolder, RayMember, ray_environment, raylet_command, raylet_environment
from gpusched.engine.remote.remote_engine import LinkPace, RemoteEngine
from gpusched.errors import GpuschedError

AGENT = """
import asyncio, sys
from functools import partial
from engine_bench import BOOT, WallClock
from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.agent_server import AgentServer, agent_of_spool
from gpusched.engine.remote.command_channel import standard_streams

async def main():
    spool = open(sys.argv[1]).read()
    make = partial(LocalEngine, spool, boot_id=BOOT, clock=WallClock())
    agent = agent_of_spool(spool, make, boot_id=BOOT, clock=WallClock())
    await AgentServer(agent, standard_streams()).serve()

asyncio.run(main())
"""


class OneMachineRay:
    """Two raylets on this machine, for all tests of a process."""

    _made: OneMachineRay | None = None

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ray-bench-"))
        os.environ["GPUSCHED_HOME"] = str(self.root)
        address, port = own_address(None), claim_ports((*range(30), *range(100, 130)))
        self.spool = self.root / "spool"
        self.folders = [RayFolder(str(self.root), name) for name in ("n1", "n2")]
        self.folders[0].make_token()
        members = [
            RayMember("head", "n1", address, address, port, port),
            RayMember("node", "n2", address, address, port, port + 100),
        ]
        agent = [sys.executable, "-c", AGENT, str(self.spool)]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.raylets = []
        for folder, member in zip(self.folders, members, strict=True):
            folder.save(member)
            env = raylet_environment(folder, member, agent, {**os.environ, "PYTHONPATH": path})
            with open(folder.log, "wb") as log:
                started = subprocess.Popen(
                    raylet_command(folder, member), env=env, stdout=log, stderr=log, start_new_session=True
                )
            self.raylets.append(started)
            wait_until(lambda log=folder.log: "Ray runtime started" in Path(log).read_text(), 120.0, what="a raylet")
        argv = [sys.executable, "-m", "gpusched.engine.ray.bridge", str(self.root), "n1"]
        self.bridge = RayBridge(argv, ray_environment(self.folders[0], os.environ))
        atexit.register(self.close)

    @classmethod
    def get(cls) -> OneMachineRay:
        if cls._made is None:
            cls._made = cls()
        return cls._made

    def close(self) -> None:
        self.bridge.close()
        for raylet in self.raylets:
            raylet.kill()
            raylet.wait()
        for folder in self.folders:
            end_leftovers(folder)
            shutil.rmtree(folder.session_root)
        shutil.rmtree(self.root)


class RayBench(LocalBench):
    """Real processes behind an agent that Ray carries frames to."""

    pace = LinkPace(poll_s=0.1, report_s=0.05)

    def __init__(self, folder: Path) -> None:
        self.ray = OneMachineRay.get()
        self.ray.spool.write_text(str(folder / "spool"))
        self.sessions = 0
        super().__init__(folder)

    @staticmethod
    def missing() -> str | None:
        if importlib.util.find_spec("ray") is None:
            return "Ray is not installed: pip install '.[ray]'"
        try:
            own_address(None)
        except GpuschedError as error:
            return error.message
        return None

    def make(self) -> RemoteEngine:  # type: ignore[override]
        self.sessions += 1
        channel = RayChannel(self.ray.bridge, "n2")
        return RemoteEngine(channel, session=self.sessions, clock=WallClock(), pace=self.pace)

    def save(self, run: str, at: float) -> None:
        super().save(run, at)
        # Its node tells of it with the next report.
        wait_until(lambda: self.engine.checkpoints().get(run) == at, what="the report of a checkpoint")
