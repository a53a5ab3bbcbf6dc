"""Steps over the socket: who is in which job is what the kernel says, never what a request says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from people import ANN, BOB, NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.errors import Forbidden, GpuschedError, NotFound, UsageError

ASK = """
import json, os, sys, time
from gpusched.client import connect
from gpusched.errors import GpuschedError
client = connect()
for line in sys.argv[1:]:
    method, path, body = json.loads(line)
    if method == "WAIT":
        while not os.path.exists(path):
            time.sleep(0.02)
        continue
    try:
        print(json.dumps(client.call(method, path, body)), flush=True)
    except GpuschedError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message}), flush=True)
"""
"""A program that asks the daemon what its arguments say."""
BEGIN = {"name": "train", "command": "python train.py", "tasks": 1}


def asks(*requests: tuple[str, str, Any], python: str = sys.executable) -> list[str]:
    return [python, "-c", ASK, *map(json.dumps, requests)]


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_process_of_a_job_begins_and_ends_a_step_of_it(daemon: Daemon) -> None:
    used = {"user_cpu_s": 1.5, "system_cpu_s": 0.25, "peak_mem_mib": 64.5, "mean_mem_mib": 32.25}
    end = {"step": 0, "exit_code": 3, **used}
    job = daemon.submit(
        *asks(("POST", "/v1/steps", BEGIN), ("GET", "/v1/steps?open=1", None), ("POST", "/v1/steps/end", end))
    )
    daemon.wait(job)
    begun, listed, ended = answers(daemon.output(job))
    assert (begun["step"]["step"], ended["step"]) == (0, {"step": 0, "state": "FAILED"})
    (row,) = listed["steps"]
    assert {name: row[name] for name in used} == dict.fromkeys(used)
    assert (row["id"], row["state"], row["name"], row["command"]) == (f"{job}.0", "RUNNING", "train", "python train.py")
    (row,) = daemon.call("GET", f"/v1/steps?ids={job}")["steps"]
    assert (row["state"], row["exit_code"], row["signal"]) == ("FAILED", 3, None)
    assert {name: row[name] for name in used} == used
    assert row["start_at"] <= row["end_at"]
    assert daemon.call("GET", "/v1/steps?open=1")["steps"] == []


def test_a_step_whose_process_ends_without_a_word_is_ended_while_its_job_goes_on(daemon: Daemon) -> None:
    words = " ".join(f"'{word}'" for word in asks(("POST", "/v1/steps", BEGIN)))
    job = daemon.submit("/bin/sh", "-c", f"{words}; sleep 600")
    wait_until(lambda: states(daemon, job) == ["CANCELLED"], what="the step to end")
    assert daemon.state(job) == "RUNNING"


def states(daemon: Daemon, job: str) -> list[str]:
    return [row["state"] for row in daemon.call("GET", f"/v1/steps?ids={job}")["steps"]]


def test_a_process_of_no_job_begins_and_ends_no_step(daemon: Daemon) -> None:
    job = daemon.submit(*asks(("POST", "/v1/steps", BEGIN), ("WAIT", str(daemon.home / "go"), None)))
    wait_until(lambda: states(daemon, job) == ["RUNNING"], what="the step")
    for path, body in (("/v1/steps", BEGIN), ("/v1/steps/end", {"step": 0, "exit_code": 0})):
        with pytest.raises(NotFound, match="belongs to no job"):
            daemon.call("POST", path, body)
    assert states(daemon, job) == ["RUNNING"]
    (daemon.home / "go").touch()
    daemon.wait(job)
    assert states(daemon, job) == ["CANCELLED"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/steps", {**BEGIN, "tasks": 0}),
        ("/v1/steps", {**BEGIN, "nodes_min": 0}),
        ("/v1/steps", {**BEGIN, "nodes_min": 3, "nodes_max": 2}),
        ("/v1/steps", {**BEGIN, "nodelist": "n1"}),
        ("/v1/steps", {**BEGIN, "distribution": "plane=0"}),
        ("/v1/steps", {**BEGIN, "distribution": "arbitrary"}),
        ("/v1/steps", {**BEGIN, "hosts": ["n1"]}),
        ("/v1/steps", {**BEGIN, "tasks": 10**9}),
        ("/v1/steps", {**BEGIN, "name": "n" * 257}),
        ("/v1/steps", {**BEGIN, "command": "c" * 1025}),
        ("/v1/steps", {**BEGIN, "gpus": -1}),
        ("/v1/steps", {**BEGIN, "job": 1}),
        ("/v1/steps", {**BEGIN, "time_limit_s": "soon"}),
        ("/v1/steps/end", {}),
        ("/v1/steps/end", {"step": -1}),
        ("/v1/steps/end", {"step": 0, "exit_code": 256}),
        ("/v1/steps/end", {"step": 0, "exit_code": 0, "user_cpu_s": -1}),
        ("/v1/steps/end", {"step": 0, "exit_code": 0, "peak_mem_mib": 1 << 41}),
        ("/v1/steps/cancel", {"id": "1"}),
        ("/v1/steps/cancel", {"id": "x", "step": 0}),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(daemon: Daemon, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        daemon.call("POST", path, body)


@pytest.fixture
def system() -> Iterator[SystemDaemon]:
    made = SystemDaemon()
    made.start()
    yield made
    made.close()


PYTHON = "/usr/bin/python3"
"""One that all users may run."""


@NEEDS_ROOT
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs a Python that all users may run")
def test_users_reach_no_step_of_anothers_job(system: SystemDaemon) -> None:
    ann, bob = system.person(ANN), system.person(BOB)
    go = system.home / "go"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    end = ("POST", "/v1/steps/end", {"step": 0, "exit_code": 0, "user_cpu_s": 1.5, "peak_mem_mib": 2.5})
    requests = (("POST", "/v1/steps", BEGIN), ("WAIT", str(go), None), end)
    theirs = ann.submit(*asks(*requests, python=PYTHON), env=env, name="secret")
    wait_until(lambda: listed(ann, theirs) == [("train", "RUNNING")], what="ann's step")
    # Whatever step bob's process names, it is one of its own job.
    out = Path("/tmp") / f"steps-{system.home.name}"
    try:
        own = bob.submit(
            *asks(("POST", "/v1/steps/end", {"step": 0, "exit_code": 0}), ("POST", "/v1/steps", BEGIN), python=PYTHON),
            env=env,
            stdout=str(out),
        )
        wait_until(lambda: bob.call("GET", f"/v1/jobs/{own}")["job"]["state"] == "COMPLETED", what="bob's job")
        refused, begun = answers(out.read_text())
    finally:
        out.unlink(missing_ok=True)
    assert (refused["error"], begun["step"]["step"]) == ("NotFound", 0)
    assert listed(bob, theirs) == [("train", "RUNNING")]
    (step,) = bob.call("GET", f"/v1/steps?ids={theirs}")["steps"]
    assert (step["command"], step["pid"]) == ("-", None)
    with pytest.raises(Forbidden):
        bob.call("POST", "/v1/steps/cancel", {"id": theirs, "step": 0})
    with pytest.raises(GpuschedError):
        bob.call("POST", "/v1/steps/cancel", {"id": theirs, "step": 0, "signal": 9})
    assert listed(ann, theirs) == [("train", "RUNNING")]
    with pytest.raises(Forbidden):
        bob.call("GET", f"/v1/jobs/{theirs}/usage")
    (node,) = ann.call("GET", f"/v1/jobs/{theirs}/usage")["usage"]["nodes"]
    assert [task["step"] for task in node["tasks"]] == [None]
    go.touch()
    wait_until(lambda: listed(ann, theirs) == [("train", "COMPLETED")], what="the end of ann's step")
    for person, usage in ((ann, (1.5, 2.5)), (bob, (None, None))):
        (row,) = person.call("GET", f"/v1/steps?ids={theirs}")["steps"]
        assert (row["user_cpu_s"], row["peak_mem_mib"]) == usage


def listed(person: Any, job: str) -> list[tuple[str, str]]:
    return [(row["name"], row["state"]) for row in person.call("GET", f"/v1/steps?ids={job}")["steps"]]
