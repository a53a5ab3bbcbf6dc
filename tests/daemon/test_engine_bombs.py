"""Jobs that fork without end: every one of their processes is found and ended in time, and the run ends as TIMEOUT.

The bombs are bounded: so many processes at a time, for so long, whatever their user may.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import ENDS, Does, LocalBench

from gpusched.model.execution import RunEnded, RunLost

PROCESSES = 100
"""Alive at once. Each is replaced by a child of its own as fast as the machine can fork."""
MOST_MORE = 4000
"""Threads of the machine more than at its start, with dead ones that nobody has reaped; above it the bomb waits."""
LONGEST_S = 90
"""Then a bomb ends by itself, should nothing else end it."""
BOMB = f"""
import os, signal, sys, time
until = time.monotonic() + {LONGEST_S}
if "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
leaves = "leaves" in sys.argv
load = os.open("/proc/loadavg", os.O_RDONLY)
def threads():
    return int(os.pread(load, 64, 0).split()[3].split(b"/")[1])
most = threads() + {MOST_MORE}
for _ in range({PROCESSES}):
    if os.fork() == 0:
        while time.monotonic() < until:
            if leaves and os.getsid(0) != os.getpid():
                os.setsid()
            if threads() > most:
                time.sleep(0.1)
            elif os.fork():
                os._exit(0)
        os._exit(0)
print("ready", flush=True)
if "waits" in sys.argv:
    time.sleep({LONGEST_S})
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def explode(bench: LocalBench, *words: str, limit_s: float | None) -> RunEnded:
    argv = (sys.executable, "-I", "-S", "-c", BOMB, *words)
    # A bomb whose script has ended is a leftover, and still within its grace at the time limit.
    bench.start("1.1", Does(), argv=argv, time_limit_s=limit_s, grace_s=0.5, leftover_grace_s=3.0)
    end = bench.end_of("1.1")
    assert bench.processes() == []
    return end


@pytest.mark.parametrize(
    "words",
    [
        ("ignores", "leaves", "waits"),  # which is harder to end than the others
        pytest.param(("waits",), marks=pytest.mark.nightly),
        pytest.param(("ignores",), marks=pytest.mark.nightly),
        pytest.param(("ignores", "leaves"), marks=pytest.mark.nightly),
    ],
)
def test_a_fork_bomb_ends_at_its_limit(bench: LocalBench, words: tuple[str, ...]) -> None:
    end = explode(bench, *words, limit_s=1.0)
    assert end.stopped_by == "timeout"


def test_a_fork_bomb_with_a_killed_supervisor_is_ended(bench: LocalBench) -> None:
    bench.start("1.1", argv=(sys.executable, "-I", "-S", "-c", BOMB, "ignores", "waits"))
    started = bench.ready("1.1")
    os.kill(started.supervisor_pid, signal.SIGKILL)
    assert isinstance(bench.until("1.1", *ENDS), RunLost)
    assert bench.processes() == []
