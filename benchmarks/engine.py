"""The local engine alone: short runs per second, start latency, memory of a supervisor.

python -m benchmarks.engine
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from benchmarks.harness import fsync_floor, machine, memory_kib, show
from gpusched.engine.launchers import ForkServer, Launcher
from gpusched.engine.local import LocalEngine
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    StopOrder,
    Ticket,
)
from gpusched.model.job import Launch

Starts = Callable[[str, str, int], Launcher]
SLOTS = 8
RUNNING = 8
FLOOR = """
import os, sys, time
slots, count, fork = (int(word) for word in sys.argv[1:])
def spawn():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
def once():
    pid = os.fork()
    if pid == 0:
        spawn()
        os._exit(0)
    os.waitpid(pid, 0)
began = time.perf_counter()
workers = []
for _ in range(slots):
    pid = os.fork()
    if pid == 0:
        for _ in range(count // slots):
            once() if fork else spawn()
        os._exit(0)
    workers.append(pid)
for pid in workers:
    os.waitpid(pid, 0)
print(count / (time.perf_counter() - began))
"""


class WallClock:
    """The real one."""

    def now(self) -> float:
        """UTC epoch seconds."""
        return time.time()


def main(runs: int = 1000, rounds: int = 5, repeats: int = 200) -> None:
    """Print all figures, each next to its floor."""
    print(machine())
    with bench_engine() as (engine, folder):
        show("floor: write and fsync", fsync_floor(folder))
        spawned, forked, through = [], [], []
        for turn in range(rounds):
            spawned.append(_floor(runs, fork=False))
            forked.append(_floor(runs, fork=True))
            through.append(_drain(engine, folder, turn, runs))
        show(f"floor: spawn true, {SLOTS} at a time", spawned, "runs/s")
        show(f"floor: fork, spawn true, {SLOTS} at a time", forked, "runs/s")
        show(f"{runs} x true through {SLOTS} slots", through, "runs/s")
        show("ticket to first instruction, kept supervisor", latencies(engine, folder, repeats, idle_s=0.02))
        show("ticket to first instruction, new supervisor", latencies(engine, folder, repeats // 40, idle_s=2.5))
        show(f"PSS of a supervisor, {RUNNING} running", _memory(engine, folder), "MB")
        _idle(engine)
    print(machine())


@contextmanager
def bench_engine(launcher: Starts = ForkServer) -> Iterator[tuple[LocalEngine, str]]:
    """An engine with a spool of its own, and a folder for what its runs write."""
    folder = tempfile.mkdtemp(prefix="gpusched-bench-")
    engine = LocalEngine(f"{folder}/spool", boot_id="bench", clock=WallClock(), launcher=launcher)
    try:
        yield engine, folder
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


def to_start(tickets: Iterable[Ticket]) -> list[OpenRun]:
    """Runs that are to start, as the daemon wants them."""
    return [
        OpenRun(ticket.run, "bench", None, None, limit=LimitOrder(ticket.time_limit_s), ticket=ticket)
        for ticket in tickets
    ]


def make_ticket(run: str, folder: str, *argv: str, stdout: str = "/dev/null") -> Ticket:
    """A ticket like that of a small job."""
    return Ticket(
        run=run,
        uid=os.getuid(),
        user=pwd.getpwuid(os.getuid()).pw_name,
        launch=Launch(
            argv=argv,
            script_sha=None,
            script_name=None,
            env_sha="",
            work_dir=folder,
            umask=0o022,
            stop_signal=int(signal.SIGTERM),
        ),
        script=None,
        # About what a user's shell exports.
        env={
            **dict.fromkeys(("HOME", "USER", "LOGNAME", "SHELL"), "/bin/sh"),
            "PATH": "/usr/bin:/bin",
            **{f"VARIABLE_{number}": "x" * 60 for number in range(40)},
        },
        stdout_path=stdout,
        stderr_path=None,
        append=False,
        time_limit_s=3600.0,
        grace_s=10.0,
        leftover_grace_s=1.0,
    )


def _events(engine: LocalEngine) -> list[EngineEvent]:
    engine.wait(5.0)
    return engine.events()


def _floor(count: int, fork: bool) -> float:
    command = [sys.executable, "-I", "-S", "-c", FLOOR, str(SLOTS), str(count), str(int(fork))]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def _drain(engine: LocalEngine, folder: str, turn: int, runs: int) -> float:
    tickets = (make_ticket(f"{1 + turn * runs + number}.1", folder, "/bin/true") for number in range(runs))
    began = time.perf_counter()
    engine.reconcile(to_start([next(tickets) for _ in range(SLOTS)]))
    ended = 0
    while ended < runs:
        ends = [event.run for event in _events(engine) if isinstance(event, RunEnded | RunLost | RunNeverStarted)]
        ended += len(ends)
        engine.reconcile(to_start([ticket for _, ticket in zip(ends, tickets, strict=False)]))
        engine.reconcile((), ends)
    return runs / (time.perf_counter() - began)


def latencies(engine: LocalEngine, folder: str, repeats: int, idle_s: float) -> list[float]:
    """Milliseconds until `date` reads the clock, which is the first thing it does."""
    path = os.path.join(folder, "date")
    samples = []
    for number in range(repeats):
        time.sleep(idle_s)
        ticket = make_ticket(f"{500_000 + number}.{int(idle_s * 100)}", folder, "/bin/date", "+%s.%N", stdout=path)
        asked = time.time()
        engine.reconcile(to_start([ticket]))
        while not any(isinstance(event, RunEnded) for event in _events(engine)):
            continue
        engine.reconcile((), [ticket.run])
        with open(path, encoding="ascii") as file:
            samples.append((float(file.read()) - asked) * 1e3)
    return samples


def _memory(engine: LocalEngine, folder: str) -> list[float]:
    tickets = [make_ticket(f"{700_000 + number}.1", folder, "/bin/sleep", "600") for number in range(RUNNING)]
    engine.reconcile(to_start(tickets))
    supervisors: list[int] = []
    while len(supervisors) < RUNNING:
        supervisors += [event.supervisor_pid for event in _events(engine) if isinstance(event, RunStarted)]
    sizes = [memory_kib(pid) / 1024 for pid in supervisors]
    if engine.server_pid is not None:
        print(f"PSS of the fork server: {memory_kib(engine.server_pid) / 1024:.2f} MB")
    for ticket in tickets:
        engine.order(ticket.run, StopOrder("cancel"))
    end_all(engine, RUNNING)
    engine.reconcile((), [ticket.run for ticket in tickets])
    return sizes


def end_all(engine: LocalEngine, runs: int) -> None:
    """Wait until so many have ended. Raises: RuntimeError for one that was not started or was lost."""
    ended = 0
    while ended < runs:
        for event in _events(engine):
            if isinstance(event, RunLost | RunNeverStarted):
                raise RuntimeError(event.detail)
            ended += isinstance(event, RunEnded)


def _idle(engine: LocalEngine, calls: int = 10_000) -> None:
    began = time.perf_counter()
    for _ in range(calls):
        engine.events()
    print(f"events() with nothing to say: {(time.perf_counter() - began) / calls * 1e6:.1f} us")


if __name__ == "__main__":
    main()
