"""The supervisor of a process that ran before it was a job, without a daemon: whom it counts in, and whom never."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.engine.supervisor.adopted import AdoptedSupervisor
from gpusched.engine.supervisor.run_control import Home
from gpusched.engine.supervisor.supervisor import Supervisor, supervisor_of

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


def supervisor(folder: Path, pid: int, **facts: Any) -> AdoptedSupervisor:
    found = proctree.read_process(pid)
    ticket = {
        "run": "1.1",
        "script": None,
        "uid": os.getuid(),
        "user": "eva",
        "adopt": {"pid": pid, "start_ticks": found.start_ticks if found else 0},
        "time_limit_s": None,
        "notice": None,
        **facts,
    }
    made = supervisor_of(ticket, Home(str(folder), "boot", -1, 1))
    assert isinstance(made, AdoptedSupervisor)
    made.births = {pid: ticket["adopt"]["start_ticks"]}
    return made


def test_only_a_ticket_that_says_so_adopts() -> None:
    assert type(supervisor_of({"run": "1.1", "script": None, "adopt": None}, Home("/", "b", -1, 1))) is Supervisor


def test_a_process_once_seen_below_stays_part_of_the_run(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    made = supervisor(tmp_path, process.pid)
    assert len(made.look()) == 3
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"alone\n"
    # Its parent is gone, and so it is below the process no more.
    assert grandchild not in proctree.descendants(process.pid)
    assert set(made.look()) == {process.pid, grandchild}
    os.kill(grandchild, 9)
    wait_until(lambda: set(made.look()) == {process.pid}, what="it to be gone")


def test_a_reused_pid_is_another_process(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    made = supervisor(tmp_path, process.pid, adopt={"pid": process.pid, "start_ticks": 1})
    assert made.look() == {}
    assert made.start() == f"process {process.pid} had ended before it was adopted"


def test_a_process_of_another_user_is_refused(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    made = supervisor(tmp_path, process.pid, uid=os.getuid() + 1)
    assert made.look() == {}
    made = supervisor(tmp_path, process.pid, uid=os.getuid() + 1)
    assert made.start() == f"process {process.pid} no longer belongs to eva"


def test_the_exit_code_is_unknown(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    made = supervisor(tmp_path, process.pid)
    made.status = 0
    assert made.how_it_ended() == (None, None)
