"""Dependants with real processes: over retries, requeues, preemption, and kill -9 of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

COUNT = 'echo "$GPUSCHED_RUN" >> "$1"; test "$(wc -l < "$1")" -ge "$2"'
"""Fails until it was run so often."""


def tries(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def counting(path: Path, times: int) -> list[str]:
    return ["/bin/sh", "-c", COUNT, "count", str(path), str(times)]


def test_dependants_wait_for_the_last_attempt(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "tries"
    parent = daemon.submit(*counting(path, 3), retries=3, backoff_s=0.05)
    good = daemon.submit("/bin/sh", "-c", f"wc -l < {path}", dependency=f"afterok:{parent}")
    bad = daemon.submit("true", dependency=f"afternotok:{parent}")
    ended = daemon.wait(parent, good, bad)
    assert [job["state"] for job in ended] == ["COMPLETED", "COMPLETED", "CANCELLED"]
    assert ended[0]["failures"] == 2
    assert ended[2]["reason"] == "DependencyNeverSatisfied"
    assert daemon.output(good).strip() == "3"


@pytest.mark.parametrize("kind", ["afterok", "afterany"])
def test_dependants_of_a_requeued_job_wait_for_its_next_run(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    gate = tmp_path / "gate"
    parent = daemon.submit("/bin/sh", "-c", f"while ! test -e {gate}; do sleep 0.02; done", grace_s=0.2)
    child = daemon.submit("true", dependency=f"{kind}:{parent}")
    daemon.pid_of(parent)
    daemon.call("POST", "/v1/jobs/requeue", {"ids": [parent]})
    wait_until(lambda: daemon.job(parent)["run"] == 2, what="the second run")
    assert daemon.state(child) == "PENDING"
    gate.touch()
    assert [job["state"] for job in daemon.wait(parent, child)] == ["COMPLETED", "COMPLETED"]


@pytest.mark.parametrize("moment", ["running", "between two tries", "ended while nobody looked"])
def test_dependants_follow_across_a_daemon_kill(make_daemon: Callable[..., Daemon], moment: str) -> None:
    daemon = make_daemon()
    gate, path = daemon.home / "gate", daemon.home / "tries"
    line = f"echo try >> {path}; while ! test -e {gate}; do sleep 0.02; done; test $(wc -l < {path}) -ge 2"
    parent = daemon.submit("/bin/sh", "-c", line, retries=2, backoff_s=1.0 if "between" in moment else 0.0)
    child = daemon.submit("true", dependency=f"afterok:{parent}")
    single = daemon.submit("true", name="sh", dependency="singleton")
    wait_until(lambda: len(tries(path)) == 1, what="the first try")
    if moment == "between two tries":
        gate.touch()
        wait_until(lambda: daemon.job(parent)["failures"] == 1, what="the first failure")
    pid = None if "between" in moment else daemon.pid_of(parent)
    daemon.kill()
    if moment.startswith("ended"):
        gate.touch()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the first try")
    daemon.start()
    if not gate.exists():
        assert (daemon.state(child), daemon.state(single)) == ("PENDING", "PENDING")
    gate.touch()
    ended = daemon.wait(parent, child, single)
    assert [job["state"] for job in ended] == ["COMPLETED", "COMPLETED", "COMPLETED"]
    assert len(tries(path)) == 2
    assert min(ended[1]["start_at"], ended[2]["start_at"]) >= ended[0]["end_at"]


PREEMPTING = """
[qos.low]
[qos.high]
tier = 1
preempts = ["low"]
[preempt]
mode = "requeue"
min_run_s = 0
"""


def test_dependants_of_a_preempted_job_wait_until_it_has_run_again(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="1x24GiB", config=PREEMPTING)
    gate = daemon.home / "gate"
    low = daemon.submit(
        "/bin/sh", "-c", f"while ! test -e {gate}; do sleep 0.02; done", gpus=1, qos="low", grace_s=0.2, time_limit_s=60
    )
    child = daemon.submit("true", dependency=f"afterany:{low}")
    daemon.pid_of(low)
    high = daemon.submit("true", gpus=1, qos="high", time_limit_s=10)
    daemon.wait(high)
    wait_until(lambda: daemon.job(low)["run"] == 2, what="the second run")
    assert daemon.state(child) == "PENDING"
    assert daemon.job(low)["runs"][0]["outcome"] == "PREEMPTED"
    gate.touch()
    assert [job["state"] for job in daemon.wait(low, child)] == ["COMPLETED", "COMPLETED"]
