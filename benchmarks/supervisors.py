"""CPU time that supervisors and the fork server spend on one run, beside that of bare spawns.

python -m benchmarks supervisors          as root also for runs of another user
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.engine import SLOTS, bench_engine, make_ticket, to_start
from benchmarks.harness import machine, show
from gpusched.engine.local import LocalEngine
from gpusched.model.execution import RunEnded, RunLost, RunNeverStarted, RunStarted, Ticket
from gpusched.model.value import replace

FLOOR = """
import os, resource, sys, time
kind, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
for number in range(count):
    if kind == "spawn":
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    else:
        fd = os.open(f"{folder}/floor-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(fd, b"x" * 300)
        os.fsync(fd)
        os.close(fd)
own, job = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
print(*((used.ru_utime + used.ru_stime) / count * 1e3 for used in (own, job)))
"""
OTHER_USER = "nobody"


def main(runs: int = 1000, rounds: int = 5) -> None:
    """Print the figures: those of gpusched leave out the job's own process, which the floor has in it."""
    print(machine())
    users = [pwd.getpwuid(os.getuid())]
    if os.getuid() == 0:
        users.append(pwd.getpwnam(OTHER_USER))
    for user in users:
        spawned, synced, served, own = [], [], [], []
        with bench_engine() as (engine, folder), tempfile.TemporaryDirectory() as floors:
            os.chmod(folder, 0o755)
            for tick in range(rounds):
                spawned.append(sum(_floor("spawn", runs, floors)))
                synced.append(_floor("sync", runs, f"{floors}")[0])
                supervisors_ms, jobs_ms = _drain(engine, [*_tickets(folder, tick * runs, runs, user)])
                served.append(supervisors_ms)
                own.append(jobs_ms)
        show("floor: spawn and await true", spawned, "ms CPU")
        show("floor: make, write, fsync and close a file", synced, "ms CPU")
        show(f"supervisors and fork server, a run of {user.pw_name}'s", served, "ms CPU")
        show("    beside it, the process of the run", own, "ms CPU")
        ratios = [run / floor for run, floor in zip(served, spawned, strict=True)]
        show("    ratio of supervisors to spawning", ratios, "")


def _floor(kind: str, count: int, folder: str) -> tuple[float, float]:
    """Milliseconds of CPU time each, of a bare Python and of its children."""
    command = [sys.executable, "-I", "-S", "-c", FLOOR, kind, str(count), folder]
    own, children = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(own), float(children)


def _tickets(folder: str, first: int, count: int, user: pwd.struct_passwd) -> Iterator[Ticket]:
    for number in range(first + 1, first + count + 1):
        ticket = make_ticket(f"{number}.1", folder, "/bin/true")
        checkpoints = f"{folder}/checkpoints/{number}"
        env = {**ticket.env, "GPUSCHED_CHECKPOINT_DIR": checkpoints}
        yield replace(ticket, uid=user.pw_uid, user=user.pw_name, checkpoint_dir=checkpoints, env=env)


class Meter:
    """CPU time of processes while they live; a supervisor that ends is counted up to the last look."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def add(self, pid: int) -> None:
        """Count what this process uses from now on, if it is not counted yet."""
        if pid not in self._first:
            self._first[pid] = self._last[pid] = _cpu_s(pid)

    def look(self) -> float:
        """Seconds of all so far."""
        for pid in self._first:
            try:
                self._last[pid] = _cpu_s(pid)
            except OSError:
                continue
        return sum(self._last.values()) - sum(self._first.values())


def _cpu_s(pid: int) -> float:
    """Source: clock_getcpuclockid(3); to the nanosecond, where /proc/PID/stat counts ticks."""
    return time.clock_gettime((~pid << 3) | 2)


def _drain(engine: LocalEngine, tickets: list[Ticket]) -> tuple[float, float]:
    """Milliseconds of CPU time a run: of those who serve it, and its own."""
    runs = len(tickets)
    waiting = iter(tickets)
    meter = Meter()
    assert engine.server_pid is not None
    meter.add(engine.server_pid)
    first = [next(waiting) for _ in range(SLOTS)]
    folders = {ticket.run: ticket.checkpoint_dir for ticket in first}
    engine.reconcile(to_start(first))
    ended, jobs_s = 0, 0.0
    while ended < runs:
        engine.wait(5.0)
        ends = []
        for event in engine.events():
            if isinstance(event, RunStarted):
                meter.add(event.supervisor_pid)
            elif isinstance(event, RunLost | RunNeverStarted):
                raise RuntimeError(event.detail)
            elif isinstance(event, RunEnded):
                if event.exit_code != 0:
                    raise RuntimeError(f"{event.run}: {event.launch_error or event.exit_code}")
                ends.append(event.run)
                jobs_s += event.cpu_s or 0.0
        before, ended = ended, ended + len(ends)
        if before // 100 != ended // 100:
            meter.look()
        # As the daemon does: recorded ends go along with the next starts, which may have their folders.
        next_ones = [
            replace(ticket, spare_checkpoint_dir=folders.pop(end)) for end, ticket in zip(ends, waiting, strict=False)
        ]
        folders |= {ticket.run: ticket.checkpoint_dir for ticket in next_ones}
        engine.reconcile(to_start(next_ones), ends)
    return meter.look() / runs * 1e3, jobs_s / runs * 1e3


if __name__ == "__main__":
    main()
