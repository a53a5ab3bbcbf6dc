"""Whom settings shut out: users all of whose jobs are refused, or all that name no account, queue or QOS.

The daemon refuses such a job with its reason (`admission`); this says so to the admin who is about to cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gpusched.model.queue_settings import chain_of
from gpusched.model.settings import Settings
from gpusched.model.units import MOST_CHOICES, name_some
from gpusched.scheduler.admission import accounts_of, barred_by, default_account, leaves_of, names_listed, usable_qos

GroupsOf = Callable[[str, Settings], Collection[str]]
"""The Unix groups of a user among those that accounts of the settings list."""

_NAMED = {"-A": "an account", "-q": "a queue", "--qos": "a QOS"}


def lockouts(users: Iterable[str], groups_of: GroupsOf, after: Settings, before: Settings | None = None) -> list[str]:
    """Users whose jobs are all refused, a clause for each reason: `ann and bob are in no account`.

    Args: before: leave out the users that these settings shut out, too.
    """
    found: dict[str, list[str]] = {}
    for user in users:
        why = _barrier(user, groups_of(user, after), after)
        if why and (before is None or not _barrier(user, groups_of(user, before), before)):
            found.setdefault(why, []).append(user)
    return [f"{_names(who)} {'are' if len(who) > 1 else 'is'} {why}" for why, who in found.items()]


def now_required(users: Iterable[str], groups_of: GroupsOf, after: Settings, before: Settings) -> list[str]:
    """Users whose jobs without options were accepted before and are not any more, though others of theirs are."""
    found: dict[str, list[str]] = {}
    for user in users:
        groups = groups_of(user, after)
        if not _barrier(user, groups, after):
            for option in _required(user, groups, after) - _required(user, groups_of(user, before), before):
                found.setdefault(option, []).append(user)
    return [
        f"jobs of {_names(found[option])} must name {what} from now on ({option})"
        for option, what in _NAMED.items()
        if option in found
    ]


def newly_unknown(before: Settings, after: Settings, is_user: Callable[[str], bool]) -> list[str]:
    """Users that only the later settings name and this machine does not have."""
    known = _users_in(before)
    return [name for name in _users_in(after) if name not in known and not is_user(name)]


def _barrier(user: str, groups: Collection[str], settings: Settings) -> str:
    """Why every job of a user is refused; empty if some are not."""
    accounts = accounts_of(user, groups, settings) if settings.account else [user]
    if not accounts:
        return "in no account"
    queues = settings.queue
    if queues and all(
        barred_by(chain_of(leaf, queues), user, account, settings) for leaf in leaves_of(queues) for account in accounts
    ):
        return "admitted to no queue"
    return ""


def _required(user: str, groups: Collection[str], settings: Settings) -> set[str]:
    """The options without which a job of the user is refused."""
    default = default_account(user, groups, settings) if settings.account else user
    accounts = accounts_of(user, groups, settings) if default is None else [default]
    chain, qos = list(chain_of(settings.default.queue, settings.queue)), settings.default.qos
    is_required = {
        "-A": default is None,
        "-q": all(barred_by(chain, user, account, settings) for account in accounts),
        "--qos": bool(qos) and all(qos not in usable_qos(user, account, settings) for account in accounts),
    }
    return {option for option, required in is_required.items() if required}


def _users_in(settings: Settings) -> dict[str, None]:
    return {name: None for _, _, noun, names in names_listed(settings) if noun == "user" for name in names}


def _names(users: list[str]) -> str:
    return name_some("", sorted(users), MOST_CHOICES)
