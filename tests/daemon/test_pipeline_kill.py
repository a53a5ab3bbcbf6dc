"""kill -9 of the daemon in the middle of a pipeline: it goes on, runs nothing twice and loses nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

from gpusched.daemon.failures import STEPS
from gpusched.errors import GpuschedError

LAYERS, WIDTH = 4, 3


def step(daemon: Daemon, name: str, needs: str, line: str, **spec: Any) -> dict[str, Any]:
    asked = daemon.spec("/bin/sh", "-c", f"echo {name} >> witness; {line}", stdout="/dev/null", **spec)
    asked.pop("env")
    return {"step": name, "needs": needs, "where": f"p.toml, line {name}", "spec": asked}


def layers(daemon: Daemon, line: str = "sleep 0.02") -> list[dict[str, Any]]:
    """Steps in layers, each needing all of the layer before; the last one is needed by nobody."""
    steps = []
    for layer in range(LAYERS):
        needs = ",".join(f"s{layer - 1}-{number}" for number in range(WIDTH)) if layer else ""
        steps += [step(daemon, f"s{layer}-{number}", needs, line) for number in range(WIDTH)]
    return steps


def submit(daemon: Daemon, steps: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"name": "p", "source": "text", "environments": [daemon.spec()["env"]], "steps": steps}
    return daemon.call("POST", "/v1/pipelines", body)


def shown(daemon: Daemon, name: str = "p1") -> dict[str, Any]:
    return dict(daemon.call("GET", f"/v1/pipelines/{name}")["pipeline"])


def finished(daemon: Daemon) -> bool:
    return shown(daemon)["state"] not in ("PENDING", "RUNNING")


def witness(daemon: Daemon) -> list[str]:
    path = daemon.home / "witness"
    return path.read_text().split() if path.exists() else []


def check_order(ran: list[str], steps: list[dict[str, Any]]) -> None:
    for one in steps:
        for needed in filter(None, one["needs"].split(",")):
            assert ran.index(needed) < ran.index(one["step"])


@pytest.mark.parametrize("moment", STEPS)
def test_a_pipeline_is_recorded_atomically(make_daemon: Callable[..., Daemon], moment: str) -> None:
    daemon = make_daemon(start=False)
    daemon.try_start(GPUSCHED_CRASH_AT=f"{moment}:1")
    steps = layers(daemon)
    try:
        submit(daemon, steps)
        is_acknowledged = True
    except (GpuschedError, OSError):
        is_acknowledged = False
    wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
    daemon.reap()
    daemon.start()
    jobs = daemon.call("GET", "/v1/jobs?states=all")["jobs"]
    assert len(jobs) in ((len(steps),) if is_acknowledged else (0, len(steps)))
    if jobs:
        wait_until(lambda: finished(daemon), 60, what="the end of the pipeline")
        assert shown(daemon)["state"] == "COMPLETED"
        assert sorted(witness(daemon)) == sorted(one["step"] for one in steps)
        check_order(witness(daemon), steps)
    # Its number is not given to another one.
    assert submit(daemon, layers(daemon)[:1])["pipeline"] == ("p2" if jobs else "p1")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pipeline_continues_across_kills_at_any_time(make_daemon: Callable[..., Daemon], seed: int) -> None:
    dice = random.Random(seed)
    daemon = make_daemon()
    steps = layers(daemon, "sleep 0.1")
    submit(daemon, steps)
    for _ in range(4):
        seen = len(witness(daemon))
        if dice.random() < 0.7:
            wait_until(lambda seen=seen: len(witness(daemon)) > seen or finished(daemon), what="another step")
        daemon.kill()
        daemon.start()
    wait_until(lambda: finished(daemon), 60, what="the end of the pipeline")
    assert shown(daemon)["state"] == "COMPLETED"
    assert sorted(witness(daemon)) == sorted(one["step"] for one in steps)
    check_order(witness(daemon), steps)


def test_a_resumed_pipeline_continues_across_a_kill(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    steps = [
        step(daemon, "a", "", "true"),
        step(daemon, "b", "a", "test -e ok"),
        step(daemon, "c", "b", "while ! test -e go; do sleep 0.02; done"),
        step(daemon, "d", "c", "true"),
    ]
    submit(daemon, steps)
    wait_until(lambda: finished(daemon), what="the failure")
    assert shown(daemon)["state"] == "FAILED"
    (daemon.home / "ok").touch()
    answer = daemon.call("POST", "/v1/pipelines/p1/resume", {})
    assert set(answer["jobs"]) == {"b", "c", "d"}
    wait_until(lambda: "c" in witness(daemon), what="step c")
    daemon.kill()
    daemon.start()
    (daemon.home / "go").touch()
    wait_until(lambda: finished(daemon), what="the end")
    assert shown(daemon)["state"] == "COMPLETED"
    assert witness(daemon) == ["a", "b", "b", "c", "d"]


@pytest.mark.parametrize("moment", ["apply", "commit", "reply"])
def test_a_fallback_stays_in_its_pipeline_across_a_kill(make_daemon: Callable[..., Daemon], moment: str) -> None:
    daemon = make_daemon()
    line = "echo fallback >> witness; while ! test -e go; do sleep 0.02; done"
    steps = [step(daemon, "a", "", "while ! test -e fail; do sleep 0.02; done; false", fallback=line)]
    submit(daemon, [*steps, step(daemon, "b", "a", "true")])
    daemon.wait_state("1", "RUNNING")
    daemon.kill()
    (daemon.home / "fail").touch()
    # It dies in the turn that learns of the failure.
    daemon.try_start(GPUSCHED_CRASH_AT=f"{moment}:1")
    wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
    daemon.reap()
    daemon.start()
    wait_until(lambda: witness(daemon).count("fallback") == 1, what="the fallback")
    assert (shown(daemon)["state"], shown(daemon)["fallback_counts"]) == ("RUNNING", {"RUNNING": 1})
    assert daemon.call("POST", "/v1/jobs/cancel", {"ids": ["p1"]})["cancelled"] == ["3"]
    wait_until(lambda: finished(daemon), what="the end of the pipeline")
    assert (shown(daemon)["state"], witness(daemon)) == ("FAILED", ["a", "fallback"])


def test_pending_steps_follow_the_resumed_ones(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config='[life]\nnever_satisfied = "wait"\n')
    steps = [step(daemon, "a", "", "test -e ok"), step(daemon, "b", "a", "true")]
    submit(daemon, steps)
    daemon.wait_state("1", "FAILED")
    assert daemon.job("2")["reason"] == "DependencyNeverSatisfied"
    (daemon.home / "ok").touch()
    assert daemon.call("POST", "/v1/pipelines/p1/resume", {})["jobs"] == {"a": "3"}
    wait_until(lambda: finished(daemon), what="the end")
    assert {one["step"]: one["id"] for one in shown(daemon)["steps"]} == {"a": "3", "b": "2"}
    assert shown(daemon)["state"] == "COMPLETED"


BAD_STEPS = {
    "a name that is none": ({"step": "a b", "spec": {}}, "is not a step name"),
    "a field that there is not": ({"step": "a", "spec": {}, "x": 1}, "unknown field 'x'"),
    "needs that are no text": ({"step": "a", "needs": ["b"], "spec": {}}, "needs is"),
    "a need that is no step": ({"step": "b", "needs": "zz"}, "there is no step zz to wait for"),
    "two of one name": ({"step": "a"}, "step a is defined twice"),
    "a circle": ({"step": "b", "needs": "b"}, "the steps wait for each other: b -> b"),
    "an environment of its own": (
        {"step": "b", "spec": {"env": {}, "argv": ["true"]}},
        "env is not allowed in a pipeline step",
    ),
    "an environment that there is not": ({"step": "b", "environment": 7}, "there is no environment 7"),
    "a job that is wrong": ({"step": "b", "spec": {"argv": []}}, "there is no command to run"),
}


@pytest.mark.parametrize(("given", "said"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_client_input_is_not_trusted(daemon: Daemon, given: dict[str, Any], said: str) -> None:
    good = step(daemon, "a", "", "true")
    with pytest.raises(GpuschedError) as error:
        submit(daemon, [good, {"spec": good["spec"], **given}])
    assert said in error.value.message
    assert daemon.call("GET", "/v1/jobs?states=all")["jobs"] == []
