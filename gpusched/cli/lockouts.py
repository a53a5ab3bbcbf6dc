"""Whom a change of the settings shuts out, told to the admin who makes it: users of this machine with recent jobs."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Collection
from dataclasses import dataclass

from gpusched import paths
from gpusched.access import look_up_groups, user_name
from gpusched.cli.query import is_user
from gpusched.client import DaemonConnection
from gpusched.config import load_settings
from gpusched.errors import UsageError
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler import lockouts
from gpusched.scheduler.admission import groups_listed

RECENT_S = 30 * 86400.0
RECENT = "users of the last 30 days"


@dataclass(frozen=True, slots=True)
class Consequences:
    """What a change does to users, beyond what it says."""

    shut_out: tuple[str, ...]
    """Clauses such as `ann is in no account`: to be asked about."""
    notes: tuple[str, ...]
    """Sentences to mention."""


def consequences(client: DaemonConnection, before: Settings, after: Settings) -> Consequences:
    """Compare the settings of a config file before and after a change. Raises: UserError from the daemon."""
    unknown = lockouts.newly_unknown(before, after, is_user)
    notes = [f"this machine has no user {name}; correct the name, or add the user" for name in unknown]
    if all(getattr(before, one) == getattr(after, one) for one in ("account", "queue", "qos", "default")):
        return Consequences((), tuple(notes))
    users = recent_users(client)
    shut_out = lockouts.lockouts(users, _groups_of, after, before)
    return Consequences(tuple(shut_out), (*notes, *lockouts.now_required(users, _groups_of, after, before)))


def shut_out(client: DaemonConnection, settings: Settings) -> list[str]:
    """Whom these settings of the config file shut out. Raises: UserError from the daemon."""
    if not (settings.account or settings.queue):
        return []
    return lockouts.lockouts(recent_users(client), _groups_of, _with_members(client, settings))


def notes_of_file(client: DaemonConnection) -> list[str]:
    """Sentences about the config file that the daemon has just read; none where the caller cannot read it."""
    where = client.call("GET", "/v1/status")["daemon"]["config"]
    try:
        settings = load_settings(where, {}).settings
    except (UsageError, OSError):
        return []
    found = shut_out(client, settings)
    return [f"the settings shut out {RECENT}: {'; '.join(found)}"] if found else []


def recent_users(client: DaemonConnection) -> list[str]:
    """Users of this machine with jobs within the last 30 days, and of a personal scheduler its one user."""
    since = time.time() - RECENT_S
    names = {row["user"] for row in client.call("GET", f"/v1/usage?by=user&since={since:.0f}")["usage"]}
    names |= {user for (user,) in client.call("GET", "/v1/jobs?states=PENDING&fields=user")["rows"]}
    if not paths.finds_system():
        names.add(user_name(os.geteuid()))
    return sorted(filter(is_user, names))


def _groups_of(user: str, settings: Settings) -> Collection[str]:
    return look_up_groups(pwd.getpwnam(user).pw_uid, groups_listed(settings))


def _with_members(client: DaemonConnection, settings: Settings) -> Settings:
    """The settings with the members whom coordinators have added, which no file lists."""
    if not any(one.coordinators for one in settings.account.values()):
        return settings
    accounts = dict(settings.account)
    for row in client.call("GET", "/v1/accounts")["accounts"]:
        one = accounts.get(row["account"])
        if row["user"] is None and one is not None and row["users"]:
            accounts[one.name] = replace(one, users={**dict.fromkeys(row["users"], 1.0), **one.users})
    return replace(settings, account=accounts)
