"""Starts through agents of other nodes, which run here: short runs per second, and how long a gang takes to start.

python -m benchmarks.agents
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine import SLOTS, WallClock, bench_engine, make_ticket, to_start
from benchmarks.harness import Bench, machine, scheduler, show
from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.command_channel import CommandChannel
from gpusched.engine.remote.remote_engine import RemoteEngine
from gpusched.model.execution import RunEnded

AGENT = """#!/bin/sh
export GPUSCHED_HOME={folder}/$1 GPUSCHED_FAKE_GPUS=4x24GiB
mkdir -m 700 -p $GPUSCHED_HOME
exec {python} -c 'import sys; sys.argv[0] = "gpusched"; from gpusched.cli.admin import main; sys.exit(main())' agent $1
"""
RANKS, NODES = 8, 2


def main(runs: int = 1000, rounds: int = 3, gangs: int = 10) -> None:
    """Print all figures, each next to the same without an agent."""
    print(machine())
    alone, behind = [], []
    with bench_engine() as (engine, folder), agents() as command:
        remote = RemoteEngine(CommandChannel(f"{command} n2", "n2"), session=1, clock=WallClock(), node="n2")
        try:
            remote.adopt([])
            # The first round pays for imports and the first supervisors.
            drain(remote, folder, 0, SLOTS)
            for turn in range(1, rounds + 1):
                alone.append(drain(engine, folder, turn, runs))
                behind.append(drain(remote, folder, turn, runs))
        finally:
            remote.close()
    show(f"floor: {runs} x true through {SLOTS} slots of an engine", alone, "runs/s")
    show(f"{runs} x true through {SLOTS} slots of an agent", behind, "runs/s")
    with agents() as command:
        nodes = ", ".join(f'"g{number}"' for number in range(1, NODES + 1))
        config = f'[gpu]\nfree_polls = 1\n[cluster]\nnodes = [{nodes}]\nconnect = "{command} {{node}}"\n'
        with scheduler(config, "4x24GiB") as bench:
            names = [f"g{number}" for number in range(1, NODES + 1)]
            head = [
                node["name"] for node in bench.client.call("GET", "/v1/cluster")["nodes"] if node["name"] not in names
            ]
            floor = [_start_s(bench, {"nodelist": head, "ntasks": RANKS // NODES}) for _ in range(gangs)]
            wide = {"nodelist": names, "nodes": NODES, "ntasks_per_node": RANKS // NODES, "gpus_per_node": 4}
            started = [_start_s(bench, wide) for _ in range(gangs)]
    show(f"floor: submission to the last of {RANKS // NODES} ranks on the head", floor, "s")
    show(f"submission to the last of {RANKS} ranks on {NODES} nodes", started, "s")
    print(machine())


@contextmanager
def agents() -> Iterator[str]:
    """A command that starts the agent of the node in its first argument, with a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="gpusched-agents-"))
    command = folder / "agent"
    command.write_text(AGENT.format(folder=folder, python=sys.executable))
    command.chmod(0o755)
    try:
        yield str(command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drain(engine: LocalEngine | RemoteEngine, folder: str, turn: int, runs: int) -> float:
    tickets = (make_ticket(f"{1 + turn * runs + number}.1", folder, "/bin/true") for number in range(runs))
    began = time.perf_counter()
    engine.reconcile(to_start([next(tickets) for _ in range(SLOTS)]))
    left = runs
    while left:
        engine.wait(5.0)
        ended = [event.run for event in engine.events() if isinstance(event, RunEnded)]
        left -= len(ended)
        engine.reconcile((), ended)
        more = [ticket for _, ticket in zip(ended, tickets, strict=False)]
        if more:
            engine.reconcile(to_start(more))
    return runs / (time.perf_counter() - began)


def _start_s(bench: Bench, where: dict[str, object]) -> float:
    """Seconds until the last rank of a job has written a file."""
    folder = Path(tempfile.mkdtemp(prefix="gpusched-gang-"))
    env = {"PATH": os.environ["PATH"]}
    argv = ["sh", "-c", ": > rank.$RANK"]
    spec = {"env": env, "work_dir": str(folder), "argv": argv, "cpus": 0, "stdout": "/dev/null", **where}
    began = time.perf_counter()
    job = bench.client.call("POST", "/v1/jobs", {"spec": spec})["job"]["id"]
    count = RANKS if where.get("nodes") else RANKS // NODES
    while len(list(folder.iterdir())) < count:
        time.sleep(0.002)
        if time.perf_counter() - began > 30:
            raise SystemExit(f"job {job} has started {len(list(folder.iterdir()))} of {count} ranks")
    took_s = time.perf_counter() - began
    bench.client.call("GET", f"/v1/wait?ids={job}&timeout_s=30")
    shutil.rmtree(folder)
    return took_s


if __name__ == "__main__":
    main()
