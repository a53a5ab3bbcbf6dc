"""What Ray costs: starts per second through an agent behind it, beside Ray's own, and its memory on head and node.

python -m benchmarks ray
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.agents import agents, drain
from benchmarks.engine import SLOTS, WallClock, bench_engine, make_ticket, to_start
from benchmarks.harness import cpu_s, machine, memory_kib, show, wait_for
from gpusched.addons.ray.cluster_plan import own_address
from gpusched.addons.ray.keeper import end_leftovers, ray_processes
from gpusched.addons.ray.link import RayBridge, RayChannel
from gpusched.addons.ray.site import (
    RayFolder,
    RayMember,
    check_ray,
    ray_environment,
    raylet_command,
    raylet_environment,
)
from gpusched.engine.remote.remote_engine import RemoteEngine
from gpusched.errors import GpuschedError
from gpusched.model.execution import RunStarted

_PORT = 23460
_UP_S = 180.0
_SETTLED_S = 20.0
_RUNNING = 100
_OWN = """
import os, subprocess, sys, time
import ray
gcs, address, runs, slots, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
ray.init(gcs, namespace="bench", log_to_driver=False, configure_logging=False, _node_ip_address=address)
node = next(one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeName"] == "n2")
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
@ray.remote(num_cpus=0, max_concurrency=slots, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
class Spawner:
    def none(self):
        pass
    def true(self):
        subprocess.run(["/bin/true"])
actor = Spawner.remote()
ray.get(actor.true.remote())
for _ in range(rounds):
    for method, count in ((actor.none, runs), (actor.true, runs)):
        began = time.perf_counter()
        ray.get([method.remote() for _ in range(count)])
        print(count / (time.perf_counter() - began), flush=True)
sys.stdout.flush()
os._exit(0)
"""


def main(runs: int = 500, rounds: int = 3) -> None:
    """Print all figures; nothing where Ray is not installed."""
    try:
        check_ray()
    except GpuschedError as error:
        print(f"left out: {error.message}")
        return
    print(machine())
    with agents() as command, two_raylets([command, "n2"]) as (folders, members):
        argv = [sys.executable, "-m", "gpusched.addons.ray.bridge", os.environ["GPUSCHED_HOME"], "n1"]
        bridge = RayBridge(argv, ray_environment(folders[0], os.environ))
        try:
            with bench_engine() as (engine, folder):
                remote = RemoteEngine(RayChannel(bridge, "n2"), session=1, clock=WallClock(), node="n2")
                try:
                    remote.adopt([])
                    drain(remote, folder, 0, SLOTS)
                    _memory("idle", folders, bridge)
                    alone, behind = [], []
                    spent: dict[str, float] = defaultdict(float)
                    for turn in range(1, rounds + 1):
                        alone.append(drain(engine, folder, turn, runs))
                        before = _cpu(folders[1], bridge)
                        behind.append(drain(remote, folder, turn, runs))
                        for part, used_s in _cpu(folders[1], bridge).items():
                            spent[part] += used_s - before.get(part, 0.0)
                    calls, spawned = _own(folders[0], members[0], runs, rounds)
                    show(f"floor: {runs} x true through {SLOTS} slots of an engine", alone, "runs/s")
                    show(f"floor: {runs} x nothing, calls of an actor of Ray", calls, "calls/s")
                    show(f"floor: {runs} x true in an actor of Ray with {SLOTS} threads", spawned, "runs/s")
                    show(f"{runs} x true through {SLOTS} slots of an agent behind Ray", behind, "runs/s")
                    each = {part: used_s / (runs * rounds) * 1e3 for part, used_s in spent.items()}
                    parts = ", ".join(f"{part} {used_ms:.2f}" for part, used_ms in each.items())
                    print(f"CPU time of the way there and back: {sum(each.values()):.2f} ms a run ({parts})")
                    _start(remote, folder, 1 + (rounds + 1) * runs)
                    _memory(f"with {_RUNNING} runs", folders, bridge)
                finally:
                    remote.close()
        finally:
            bridge.close()
    print(machine())


@contextmanager
def two_raylets(agent: list[str]) -> Iterator[tuple[list[RayFolder], list[RayMember]]]:
    """A head `n1` and a node `n2` on this machine. Args: agent: command of the node's agent."""
    root = Path(tempfile.mkdtemp(prefix="gpusched-ray-"))
    before, os.environ["GPUSCHED_HOME"] = os.environ.get("GPUSCHED_HOME"), str(root)
    address = own_address(None)
    folders = [RayFolder(str(root), name) for name in ("n1", "n2")]
    members = [
        RayMember("head", "n1", address, address, _PORT, _PORT),
        RayMember("node", "n2", address, address, _PORT, _PORT + 100),
    ]
    raylets = []
    try:
        folders[0].make_token()
        for folder, member in zip(folders, members, strict=True):
            folder.save(member)
            with open(folder.log, "wb") as log:
                env = raylet_environment(folder, member, agent, os.environ)
                raylets.append(subprocess.Popen(raylet_command(folder, member), env=env, stdout=log, stderr=log))
            try:
                wait_for(lambda folder=folder: _is_up(folder), _UP_S, "Ray")  # type: ignore[misc]
            except TimeoutError:
                said = Path(folder.log).read_text(errors="replace").strip().splitlines()[-1:]
                raise SystemExit(f"Ray of {member.name} does not come up: {' '.join(said)}") from None
        yield folders, members
    finally:
        for raylet in raylets:
            raylet.kill()
            raylet.wait()
        for folder in folders:
            end_leftovers(folder)
            shutil.rmtree(folder.session_root, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
        if before is None:
            del os.environ["GPUSCHED_HOME"]
        else:
            os.environ["GPUSCHED_HOME"] = before


def _is_up(folder: RayFolder) -> bool:
    # Asking the head takes a second of CPU time, which what starts needs for itself.
    return "Ray runtime started" in Path(folder.log).read_text(errors="replace")


def _own(folder: RayFolder, head: RayMember, runs: int, rounds: int) -> tuple[list[float], list[float]]:
    """Ray's calls per second without work, and with a process each."""
    argv = [sys.executable, "-c", _OWN, head.gcs, head.address, str(runs), str(SLOTS), str(rounds)]
    env = ray_environment(folder, os.environ)
    done = subprocess.run(argv, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    found = [float(line) for line in done.stdout.split()]
    return found[::2], found[1::2]


def _cpu(node: RayFolder, bridge: RayBridge) -> dict[str, float]:
    """Seconds of CPU time that each part between the engine's caller and the supervisors has used."""
    found = {"head": time.process_time(), "bridge": cpu_s(bridge.pid or 0)}
    for process in _of(node):
        if _kind(process) == "relay":
            found["relay"] = cpu_s(process.pid)
            # The fork server, its child, is there without Ray too.
            found["agent"] = sum(cpu_s(child.pid) for child in process.children())
    return found


def _start(engine: RemoteEngine, folder: str, first: int) -> None:
    """Start runs that last, and wait until they do."""
    tickets = [make_ticket(f"{first + number}.1", folder, "/bin/sleep", "600") for number in range(_RUNNING)]
    engine.reconcile(to_start(tickets))
    left = _RUNNING
    while left:
        engine.wait(5.0)
        left -= sum(isinstance(event, RunStarted) for event in engine.events())


def _memory(when: str, folders: list[RayFolder], bridge: RayBridge) -> None:
    """Print PSS of what Ray runs, and beside it what the daemon and the node run because of it."""
    time.sleep(_SETTLED_S)
    for folder, name in zip(folders, ("head", "node"), strict=True):
        sizes: dict[str, float] = defaultdict(float)
        for process in _of(folder):
            sizes[_kind(process)] += memory_kib(process.pid) / 1024
        if name == "head" and bridge.pid is not None:
            sizes["bridge"] = memory_kib(bridge.pid) / 1024
        parts = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(sizes.items(), key=lambda one: -one[1]))
        print(f"memory of the {name} {when}: PSS {sum(sizes.values()):.0f} MB ({parts})")


def _of(folder: RayFolder) -> list[psutil.Process]:
    """Ray's processes of a machine; its workers do not name the folder and are children of those that do."""
    found = {process.pid: process for process in ray_processes(folder)}
    for process in list(found.values()):
        for child in process.children():
            if child.name().startswith("ray::"):
                found[child.pid] = child
    return list(found.values())


def _kind(process: psutil.Process) -> str:
    words = process.cmdline()
    for kind, sign in (
        ("directory", "gcs_server"),
        ("raylet", "raylet/raylet"),
        ("relay", "AgentRelay"),
        ("ray start", "ray.scripts.scripts"),
        ("dashboard agent", "ashboardAgent"),
        ("dashboard agent", "dashboard/agent"),
        ("runtime environments", "untimeEnvAgent"),
        ("runtime environments", "runtime_env"),
        ("dashboard", "dashboard.py"),
        ("monitor", "monitor.py"),
        ("idle worker", "ray::IDLE"),
    ):
        if any(sign in word for word in words):
            return kind
    return words[0][:30] if words else process.name()


if __name__ == "__main__":
    main()
