"""Between users, whoever has used less of late goes first, whatever the lengths of their jobs."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, wants

from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.testing import NOW, node

HEAVY = {"user": "heavy", "uid": 2000, "account": "lab"}
LIGHT = {"user": "light", "uid": 2001, "account": "lab"}

A_WEEK_OF_USE = Usage("lab", "heavy", Resources(gpus=7 * 24 * HOUR), NOW)


@pytest.mark.parametrize("limit", [None, 10 * MINUTE], ids=["no limit", "ten minutes"])
@pytest.mark.parametrize("jobs", [1, 30])
def test_new_short_jobs_of_a_heavy_user_do_not_pass_an_older_job_without_a_limit(limit, jobs):
    older = wants(1, 1, waited=2 * HOUR, **LIGHT)
    newer = [wants(10 + number, 1, limit=limit, waited=MINUTE, **HEAVY) for number in range(jobs)]
    outcome = Scenario([node(gpus=1)], [*newer, older], settings=Settings(), usage=[A_WEEK_OF_USE]).outcome()
    assert list(outcome.starts) == [1]


def test_a_job_of_a_light_user_starts_before_the_backlog_of_a_heavy_one():
    backlog = [wants(number, 1, limit=10 * MINUTE, waited=5 * HOUR, **HEAVY) for number in range(10, 40)]
    outcome = Scenario(
        [node(gpus=1)], [*backlog, wants(1, 1, waited=MINUTE, **LIGHT)], settings=Settings(), usage=[A_WEEK_OF_USE]
    ).outcome()
    assert list(outcome.starts) == [1]


def test_the_shorter_job_goes_first_between_equally_ranked_users():
    waiting = [
        wants(1, 1, limit=10 * HOUR, waited=2 * MINUTE, **HEAVY),
        wants(2, 1, limit=HOUR, waited=MINUTE, **LIGHT),
    ]
    even = [Usage("lab", user, Resources(gpus=HOUR), NOW) for user in ("heavy", "light")]
    assert list(Scenario([node(gpus=1)], waiting, settings=Settings(), usage=even).outcome().starts) == [2]
