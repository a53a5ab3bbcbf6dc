"""A refused submission says in one stable word what it is about, for programs that have sentences of their own."""

from __future__ import annotations

from typing import Any

import pytest
from lab import BOB, Lab

from gpusched.api.openapi import build
from gpusched.api.routes import ROUTES
from gpusched.api.validate import read_submission
from gpusched.client import error_from
from gpusched.errors import ABOUT, Concerning, GpuschedError, NotFound, Refused, UsageError
from gpusched.model.job import ArraySpec, Request
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import LimitSettings, Settings

GOVERNED: dict[str, Any] = {
    "queue": {
        "default": QueueSettings("default", max_time_s=3600, max_jobs_per_user=5),
        "closed": QueueSettings("closed", users=("eve",)),
        "small": QueueSettings("small", max_gpus_per_job=1),
    },
    "qos": {"high": QosSettings("high", users=("eve",)), "few": QosSettings("few", max_jobs_per_user=1)},
    "account": {"vision": AccountSettings("vision", users={"bob": 1.0})},
    "limit": LimitSettings(array=10),
}


@pytest.mark.parametrize(
    ("parts", "about"),
    [
        ({"queue": "nowhere"}, "queue"),
        ({"queue": "closed"}, "queue_access"),
        ({"qos": "nowhere"}, "qos"),
        ({"qos": "high"}, "qos_access"),
        ({"account": "nowhere"}, "account"),
        ({"reservation": "nowhere"}, "reservation"),
        ({"nice": -5}, "nice"),
        ({"dependency": "afterok:99"}, "dependency"),
        ({"array": ArraySpec("0-99")}, "array"),
        ({"deadline_at": 1.0}, "deadline"),
        ({"time_limit_s": 7200}, "time"),
        ({"request": Request(gpus=2), "queue": "small"}, "policy"),
        ({"array": ArraySpec("0-6")}, "job_count"),
        ({"request": Request(constraint="nvlink")}, "constraint"),
        ({"request": Request(nodelist=("elsewhere",))}, "node"),
        ({"request": Request(nodes=5)}, "nodes"),
        ({"request": Request(cpus=100)}, "cpus"),
        ({"request": Request(mem_mib=1 << 30)}, "memory"),
        ({"request": Request(gpus=9)}, "gpus"),
        ({"request": Request(gpus=1, gpu_type="h100")}, "gpus"),
        ({"request": Request(resources=(("scratch", 1),))}, "resource"),
        ({"request": Request(licenses=(("matlab", 1),))}, "license"),
    ],
)
def test_the_scheduler_says_what_it_refuses(parts: dict[str, Any], about: str) -> None:
    lab = Lab(**GOVERNED)
    (answer,) = lab.ask(lab.submission(BOB, **{"account": "vision", "time_limit_s": 60, **parts}))
    assert isinstance(answer, GpuschedError)
    assert (answer.about, answer.about in ABOUT) == (about, True), answer.message


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({"array": "a-b"}, "array"),
        ({"array": "1-10:0"}, "array"),
        ({"dependency": "afterokay:1"}, "dependency"),
        ({"constraint": "a&&b"}, "constraint"),
        ({"nodelist": ["a["]}, "node"),
        ({"licenses": {"a b": 1}}, "license"),
        ({"resources": {"a b": 1}}, "resource"),
        ({"open_mode": "sometimes"}, ""),
    ],
)
def test_unreadable_values_say_it_too(values: dict[str, Any], about: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_submission({"argv": ["true"], **values}, None, Settings(), {}, 0.0)
    assert raised.value.about == about


def test_the_word_reaches_clients_and_is_documented() -> None:
    error = error_from({"message": "no", "hint": "", "code": "refused", "about": "queue"})
    assert (type(error), error.about) == (Refused, "queue")
    assert error_from({"message": "no", "hint": "", "code": "refused"}).about == ""
    shape = build(ROUTES)["components"]["responses"]["Error"]["content"]["application/json"]["schema"]
    assert shape["properties"]["error"]["properties"]["about"]["enum"] == list(ABOUT)


def test_an_error_keeps_what_it_is_about_in_a_context() -> None:
    with pytest.raises(NotFound) as raised, Concerning("dependency"):
        raise NotFound("there is no job 7")
    assert raised.value.about == "dependency"
    with pytest.raises(Refused) as refused, Concerning("dependency"):
        raise Refused("no", "", "array")
    assert refused.value.about == "array"
    with pytest.raises(KeyError), Concerning("array"):
        raise KeyError
