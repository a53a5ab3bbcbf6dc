"""The supervisor of a process that ran before it was a job, without a daemon: whom it counts in, and whom never."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.engine.supervisor.adopted import AdoptedProcesses
from gpusched.engine.supervisor.processes import RunProcesses
from gpusched.engine.supervisor.supervisor import Home, supervisor_of

ORPHANS = (
    "import os, subprocess, sys\n"
    "inner = subprocess.Popen([sys.executable, '-c', "
    "\"import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); input()\"], "
    "stdin=subprocess.PIPE)\n"
    "input()\ninner.stdin.close()\ninner.wait()\nprint('alone', flush=True)\ninput()\n"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    yield made
    os.killpg(made.pid, 9)
    made.communicate()


def adopted(pid: int, **facts: Any) -> AdoptedProcesses:
    found = proctree.read_process(pid)
    start_ticks = found.start_ticks if found else 0
    ticket = {"uid": os.getuid(), "user": "eva", "adopt": {"pid": pid, "start_ticks": start_ticks}, **facts}
    made = AdoptedProcesses(ticket)
    made.births = {pid: ticket["adopt"]["start_ticks"]}
    return made


def test_only_a_ticket_that_says_so_adopts() -> None:
    made = supervisor_of({"run": "1.1", "script": None, "adopt": None}, Home("/", "b", -1))
    assert type(made.processes) is RunProcesses


def test_a_process_once_seen_below_stays_part_of_the_run(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    made = adopted(process.pid)
    assert len(made.look()) == 3
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"alone\n"
    # Its parent is gone, and so it is below the process no more.
    assert grandchild not in proctree.descendants(process.pid)
    assert set(made.look()) == {process.pid, grandchild}
    os.kill(grandchild, 9)
    wait_until(lambda: set(made.look()) == {process.pid}, what="it to be gone")


def test_a_reused_pid_is_another_process(process: subprocess.Popen[bytes]) -> None:
    made = adopted(process.pid, adopt={"pid": process.pid, "start_ticks": 1})
    assert made.look() == {}
    assert made.take_over() == f"process {process.pid} had ended before it was adopted"


def test_a_process_of_another_user_is_refused(process: subprocess.Popen[bytes]) -> None:
    made = adopted(process.pid, uid=os.getuid() + 1)
    assert made.look() == {}
    made = adopted(process.pid, uid=os.getuid() + 1)
    assert made.take_over() == f"process {process.pid} no longer belongs to eva"


def test_the_exit_code_is_unknown(process: subprocess.Popen[bytes]) -> None:
    made = adopted(process.pid)
    made.status = 0
    assert made.exit() == (None, None)
