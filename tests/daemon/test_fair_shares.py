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
GPUS = 4


def counts(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.call("GET", "/v1/status")["daemon"]["jobs"])


def ended_runs(jobs: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Account and length of each ended run, each on one GPU."""
    return [
        (job["account"], run["end_at"] - run["start_at"])
        for job in jobs
        for run in job["runs"]
        if run["end_at"] is not None
    ]


@pytest.mark.nightly
def test_gpu_time_is_divided_by_the_shares(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus=f"{GPUS}x24GiB", config=CONFIG)
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
    runs = ended_runs(jobs)
    total_s = sum(length_s for _, length_s in runs)
    used_s = {account: sum(length_s for owner, length_s in runs if owner == account) for account in WANTED}
    # A plan knows the runs that have ended: an account may be ahead or behind by what runs at once.
    at_once_s = sum(sorted(length_s for _, length_s in runs)[-GPUS:])
    assert at_once_s < total_s / 8, "the runs must be short for their sum to show the shares"
    assert used_s == pytest.approx({account: part * total_s for account, part in WANTED.items()}, abs=at_once_s)
