"""A question of docs/contributing.md: without a function that the answer names, a cancelled job is not killed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import copy_package, wait_until

JOB = """
import os, signal, sys, time

def told(number, frame):
    open("told", "w").close()
    time.sleep(3)
    open("survived", "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, told)
open("begun", "w").close()
while not os.path.exists("cancelled"):
    time.sleep(0.02)
time.sleep(4)
open("untouched", "w").close()
"""
"""Lives on for longer than its grace, whether it is told to end or not."""

NOTHING_KILLED = '{"cancelled": [], "signalled": [], "ended": [], "missing": []}'

ANSWERS = [
    ("daemon/verbs/cancel.py", "apply", NOTHING_KILLED, {"untouched"}),
    ("engine/supervisor/run_control.py", "stop", "None", {"untouched"}),
    ("engine/supervisor/processes.py", "deliver", "False", set()),
    ("engine/supervisor/run_control.py", "kill", "None", {"told", "survived"}),
    ("engine/supervisor/processes.py", "kill", "None", {"told", "survived"}),
]


def without(folder: Path, path: str, name: str, answer: str) -> None:
    """Copy the package to a folder, with a function that does nothing."""
    copy_package(folder)
    file = folder / "gpusched" / path
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    found.body = ast.parse(f"def f(): return {answer}").body[0].body  # type: ignore[attr-defined]
    file.write_text(ast.unparse(tree), encoding="utf-8")


def left_by_a_cancelled_job(daemon: Daemon) -> set[str]:
    """What a job whose grace is one second has written by its end."""
    job_id = daemon.submit(sys.executable, "-c", JOB, grace_s=1)
    wait_until((daemon.home / "begun").exists, what="the job to begin")
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [int(job_id)]})
    (daemon.home / "cancelled").touch()
    daemon.wait(job_id)
    return {name for name in ("told", "survived", "untouched") if (daemon.home / name).exists()}


def test_a_cancelled_job_is_told_and_then_killed(make_daemon: Callable[..., Daemon]) -> None:
    assert left_by_a_cancelled_job(make_daemon()) == {"told"}


@pytest.mark.nightly
@pytest.mark.parametrize(("path", "name", "answer", "left"), ANSWERS, ids=[f"{row[0]}:{row[1]}" for row in ANSWERS])
def test_a_job_is_killed_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_daemon: Callable[..., Daemon],
    path: str,
    name: str,
    answer: str,
    left: set[str],
) -> None:
    without(tmp_path / "copy", path, name, answer)
    monkeypatch.chdir(tmp_path / "copy")  # python -m looks there first
    daemon = make_daemon(start=False)
    daemon.env["PYTHONPATH"] = str(tmp_path / "copy")
    daemon.start()
    assert left_by_a_cancelled_job(daemon) == left
