"""`gpusched demo`: it shows a job, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import wait_until

PROGRAM = [sys.executable, "-c", "import sys; from gpusched.cli.admin import main; sys.exit(main())", "demo"]


def begin(folder: Path, **options: object) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GPUSCHED_")}
    env |= {"TMPDIR": str(folder), "GPUSCHED_FAKE_GPUS": "1x8GiB", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(PROGRAM, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload,no-any-return]


def daemons_in(folder: Path) -> list[str]:
    """Processes whose environment names this folder: the daemon, and supervisors of its jobs."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if f"GPUSCHED_HOME={folder}".encode() in environment:
                found.append(entry)
    return found


def assert_nothing_is_left(folder: Path) -> None:
    wait_until(lambda: not daemons_in(folder), what="no process of the demonstration")
    assert os.listdir(folder) == []


def test_a_demonstration_runs_a_job_and_leaves_nothing(tmp_path: Path) -> None:
    process = begin(tmp_path)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "training step 3 of 3" in text
    assert "# It works." in text
    assert_nothing_is_left(tmp_path)


TO_ALL = "with its commands, as a terminal does"


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        pytest.param(signal.SIGINT, True, id=f"2 {TO_ALL}"),
        # Each way to be told is among these two, and what becomes of a signal is the same for all.
        pytest.param(signal.SIGTERM, False, id="15 alone"),
        pytest.param(signal.SIGHUP, True, id=f"1 {TO_ALL}", marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, False, id="2 alone", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, True, id=f"15 {TO_ALL}", marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, False, id="1 alone", marks=pytest.mark.nightly),
    ],
)
def test_a_demonstration_that_is_told_to_end_leaves_nothing(
    tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    process = begin(tmp_path, start_new_session=True)
    assert process.stdout is not None
    while "training step 1 of 3" not in (line := process.stdout.readline()):
        assert line, "the demonstration ended early"
    (os.killpg if to_all else os.kill)(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert_nothing_is_left(tmp_path)


def test_a_demonstration_whose_reader_has_gone_leaves_nothing(tmp_path: Path) -> None:
    process = begin(tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) != 0
    assert_nothing_is_left(tmp_path)
