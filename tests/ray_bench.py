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

from gpusched.addons.ray.cluster_plan import own_address
from gpusched.addons.ray.keeper import end_leftovers
from gpusched.addons.ray.link import RayBridge, RayChannel
from gpusched.addons.ray.site import RayFolder, RayMember, ray_environment, raylet_command, raylet_environment
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
        self.bridge: RayBridge | None = None
        members = [
            RayMember("head", "n1", address, address, port, port),
            RayMember("node", "n2", address, address, port, port + 100),
        ]
        agent = [sys.executable, "-c", AGENT, str(self.spool)]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.raylets: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)
        for folder, member in zip(self.folders, members, strict=True):
            folder.save(member)
            env = raylet_environment(folder, member, agent, {**os.environ, "PYTHONPATH": path})
            self.raylets.append(start_raylet(folder, raylet_command(folder, member), env))
        argv = [sys.executable, "-m", "gpusched.addons.ray.bridge", str(self.root), "n1"]
        self.bridge = RayBridge(argv, ray_environment(self.folders[0], os.environ))

    @classmethod
    def get(cls) -> OneMachineRay:
        if cls._made is None:
            cls._made = cls()
        return cls._made

    def close(self) -> None:
        if self.bridge is not None:
            self.bridge.close()
        for raylet in self.raylets:
            raylet.kill()
            raylet.wait()
        for folder in self.folders:
            end_leftovers(folder)
            shutil.rmtree(folder.session_root, ignore_errors=True)
        shutil.rmtree(self.root)


def start_raylet(folder: RayFolder, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start Ray, again where it gives up: on a busy machine its own helpers may take longer than it allows."""
    for _ in range(5):
        with open(folder.log, "wb") as log:
            started = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

        def is_over(process: subprocess.Popen[bytes] = started) -> bool:
            return process.poll() is not None or is_up(folder)

        wait_until(is_over, 120.0, what="a raylet")
        if is_up(folder):
            return started
        end_leftovers(folder)
    raise AssertionError(f"Ray does not start: {Path(folder.log).read_text()[-1000:]}")


def is_up(folder: RayFolder) -> bool:
    return "Ray runtime started" in Path(folder.log).read_text()


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
        bridge = self.ray.bridge
        assert bridge is not None
        channel = RayChannel(bridge, "n2")
        return RemoteEngine(channel, session=self.sessions, clock=WallClock(), pace=self.pace)

    def save(self, run: str, at: float) -> None:
        super().save(run, at)
        # Its node tells of it with the next report.
        wait_until(lambda: self.engine.checkpoints().get(run) == at, what="the report of a checkpoint")
