"""Whom a change of the settings shuts out, and whose jobs must name more than before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import DefaultSettings, Settings
from gpusched.scheduler.lockouts import lockouts, newly_unknown, now_required

USERS = ("ann", "bob", "cleo")


def groups_of(user: str, settings: Settings) -> Collection[str]:
    return ("students",) if user == "cleo" else ()


def settings_of(*tables: Any, **default: str) -> Settings:
    return Settings(
        account={one.name: one for one in tables if isinstance(one, AccountSettings)},
        queue={one.name: one for one in tables if isinstance(one, QueueSettings)},
        qos={one.name: one for one in tables if isinstance(one, QosSettings)},
        default=DefaultSettings(**default),  # type: ignore[arg-type]
    )


def account(name: str, *users: str, **values: Any) -> AccountSettings:
    return AccountSettings(name, users=dict.fromkeys(users, 1.0), **values)


OPEN = settings_of()
VISION = settings_of(account("vision", "ann"))
SHUT_OUT: dict[str, tuple[Settings, Settings, list[str]]] = {
    "the first list closes all accounts": (OPEN, VISION, ["bob and cleo are in no account"]),
    "accounts without lists close nothing": (OPEN, settings_of(account("vision")), []),
    "a list of all users closes nothing": (OPEN, settings_of(account("vision", "*")), []),
    "a group lets its members in": (
        OPEN,
        settings_of(account("vision", "ann"), account("course", groups=("students",))),
        ["bob is in no account"],
    ),
    "who was out before is not named": (VISION, settings_of(account("vision", "dora")), ["ann is in no account"]),
    "the last list gone opens them": (VISION, settings_of(account("vision")), []),
    "a queue for some": (
        OPEN,
        settings_of(QueueSettings("default", users=("ann",))),
        ["bob and cleo are admitted to no queue"],
    ),
    "another queue is open": (
        OPEN,
        settings_of(QueueSettings("default", users=("ann",)), QueueSettings("slow")),
        [],
    ),
    "a list above holds below": (
        OPEN,
        settings_of(QueueSettings("lab", users=("ann",)), QueueSettings("fast", parent="lab"), queue="fast"),
        ["bob and cleo are admitted to no queue"],
    ),
    "two reasons": (
        OPEN,
        settings_of(account("vision", "ann", "bob"), QueueSettings("default", users=("ann",))),
        ["bob is admitted to no queue", "cleo is in no account"],
    ),
    "a queue of an account": (
        OPEN,
        settings_of(account("vision", "ann"), account("nlp", "bob", "cleo"), QueueSettings("q", accounts=("nlp",))),
        ["ann is admitted to no queue"],
    ),
}


@pytest.mark.parametrize(("before", "after", "wanted"), SHUT_OUT.values(), ids=SHUT_OUT)
def test_users_who_lose_every_way_in_are_named(before: Settings, after: Settings, wanted: list[str]) -> None:
    assert lockouts(USERS, groups_of, after, before) == wanted


def test_without_a_comparison_all_who_are_out_are_named() -> None:
    assert lockouts(USERS, groups_of, VISION) == ["bob and cleo are in no account"]


REQUIRED: dict[str, tuple[Settings, Settings, list[str]]] = {
    "a second account": (
        VISION,
        settings_of(account("vision", "ann"), account("nlp", "ann")),
        ["jobs of ann must name an account from now on (-A)"],
    ),
    "a second account by group, which comes after one by name": (
        settings_of(account("vision", "cleo")),
        settings_of(account("vision", "cleo"), account("course", groups=("students",))),
        [],
    ),
    "the default queue": (
        OPEN,
        settings_of(QueueSettings("default", users=("ann",)), QueueSettings("slow")),
        ["jobs of bob and cleo must name a queue from now on (-q)"],
    ),
    "the default QOS": (
        OPEN,
        settings_of(QosSettings("normal", users=("ann", "bob")), qos="normal"),
        ["jobs of cleo must name a QOS from now on (--qos)"],
    ),
    "of those who are out nothing is asked": (OPEN, VISION, []),
}


@pytest.mark.parametrize(("before", "after", "wanted"), REQUIRED.values(), ids=REQUIRED)
def test_users_whose_plain_jobs_are_refused_from_now_on_are_named(
    before: Settings, after: Settings, wanted: list[str]
) -> None:
    assert now_required(USERS, groups_of, after, before) == wanted


def test_only_names_that_are_new_and_unknown_are_found() -> None:
    before = settings_of(account("a", "ghost"))
    after = settings_of(
        account("a", "ghost", "ann", "*", coordinators=("carla",)),
        QueueSettings("q", users=("bbo",), operators=("op",)),
    )
    assert newly_unknown(before, after, {"ann", "op"}.__contains__) == ["carla", "bbo"]
