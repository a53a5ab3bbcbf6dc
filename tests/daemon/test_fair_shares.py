"""Three accounts with shares 1:1:2 that always have jobs waiting, on a real daemon with simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

CONFIG = """
[priority]
order = "multifactor"
weight_age = 0
weight_nice = 0
weight_fairshare = 100000
half_life_s = 10

[account.one]
shares = 1

[account.other]
shares = 1

[account.double]
shares = 2
"""
WANTED = {"one": 0.25, "other": 0.25, "double": 0.5}
ENDED = 200


def counts(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.call("GET", "/v1/status")["daemon"]["jobs"])


def gpu_seconds(jobs: list[dict[str, Any]]) -> dict[str, float]:
    total = dict.fromkeys(WANTED, 0.0)
    for job in jobs:
        for run in job["runs"]:
            if run["end_at"] is not None:
                total[job["account"]] += (run["end_at"] - run["start_at"]) * len(run["gpus"])
    return total


def test_gpu_time_is_divided_by_the_shares(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="4x24GiB", config=CONFIG)
    # Of unequal length, so that the GPUs do not come free all at once.
    lines = [f"sleep {0.1 + number * 37 % 11 / 100:.2f}" for number in range(ENDED)]
    for account in WANTED:
        spec = daemon.spec(gpus=1, account=account, stdout="/dev/null")
        daemon.call("POST", "/v1/jobs", {"spec": spec, "batch": lines})
    submitted = len(WANTED) * len(lines)
    wait_until(
        lambda: submitted - sum(counts(daemon).values()) >= ENDED, timeout_s=180, what=f"{ENDED} of the jobs to end"
    )
    jobs = daemon.call("GET", "/v1/history?states=all")["jobs"]
    waiting = {job["account"] for job in jobs if job["state"] == "PENDING"}
    assert waiting == set(WANTED), "every account must have had jobs waiting all the time"
    seconds = gpu_seconds(jobs)
    parts = {account: amount / sum(seconds.values()) for account, amount in seconds.items()}
    assert parts == pytest.approx(WANTED, rel=0.05)
