"""Credits of budgets and limits of users: settings that the daemon keeps in the job table."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from gpusched.access import check_admin, coordinated_accounts, coordinates, is_admin, user_name
from gpusched.daemon.commit import AuditEvent, TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import Stage, Watch
from gpusched.errors import Forbidden, NotFound, Refused, UsageError
from gpusched.model.commands import Caller, ChangeMembers, GiveCredit, SetUserLimit, UndoTableSettings
from gpusched.model.queue_settings import EVERYBODY
from gpusched.model.rules import WORD
from gpusched.model.settings import Settings
from gpusched.model.snapshot import LimitInForce
from gpusched.model.table_settings import (
    KINDS,
    SECTIONS,
    Credit,
    Key,
    Membership,
    QueuePause,
    TableSetting,
    UserLimit,
    document_of_table,
    with_members,
)
from gpusched.model.units import closest, printable
from gpusched.model.value import convert, replace
from gpusched.ports.tables import TABLE_SETTINGS
from gpusched.scheduler.admission import are_restricted

LONGEST_MESSAGE = 500
MOST_LIMITS = 1000
MOST_CREDITS = 10_000
MOST_MEMBERS = 10_000
_KIND_OF = {section: kind for kind, section in SECTIONS.items()}


def give_credit(command: GiveCredit, tx: TickTransaction) -> dict[str, Any]:
    """Record a credit. Raises: UserError."""
    check_admin(command.caller, "give credit to a budget", tx.settings)
    account = tx.settings.account.get(command.account)
    if account is None:
        near = closest(command.account, tx.settings.account)
        hint = f"did you mean {near}?" if near else "list them with: gctl account"
        raise NotFound(f"there is no account {printable(command.account, 60)}", hint)
    if account.gpu_hours is None:
        name = account.name
        raise Refused(f"account {name} has no budget", f"grant one with: gctl account modify {name} gpu_hours=2000")
    check_message(command.message)
    known = [one.number for one in tx.state.rows[TABLE_SETTINGS].values() if isinstance(one, Credit)]
    if len(known) >= MOST_CREDITS:
        raise Refused(f"there are {len(known)} credits already", "raise gpu_hours of the account instead")
    number = max([*known, tx.state.last_credit]) + 1
    tx.state.last_credit = number
    credit = Credit(number, account.name, command.gpu_hours, tx.now, command.caller.user, command.message)
    _put(credit.key, credit, command.caller, command.what, f"credit of account {account.name}", tx)
    return {"credit": credit}


def set_limit(command: SetUserLimit, tx: TickTransaction) -> dict[str, Any]:
    """Record or remove the limit of a user. Raises: UserError."""
    is_admins = is_admin(command.caller, tx.settings)
    if not is_admins and not (command.account and coordinates(command.caller, command.account, tx.settings)):
        _check_coordinator(command.caller, command.account, "limit a user", tx)
    limit = UserLimit(
        user=command.user,
        account=command.account,
        max_gpus=command.max_gpus,
        max_jobs=command.max_jobs,
        message=command.message,
        by=command.caller.user,
        is_of_coordinator=not is_admins,
        at=tx.now,
        until_at=command.until_at,
    )
    before = tx.state.rows[TABLE_SETTINGS].get(limit.key)
    if isinstance(before, UserLimit) and not (is_admins or before.is_of_coordinator):
        raise Forbidden(f"{before.by}, an admin, has set the limit of user {command.user}", "ask an admin to change it")
    what = f"limit of user {command.user}"
    if command.is_removed:
        if before is None:
            raise NotFound(f"user {printable(command.user, 60)} has no such limit", "list them with: gctl limit")
        _put(limit.key, None, command.caller, command.what, what, tx)
        return {"limit": before}
    if command.account and command.account not in tx.settings.account:
        near = closest(command.account, tx.settings.account)
        hint = f"did you mean {near}?" if near else "list them with: gctl account"
        raise NotFound(f"there is no account {printable(command.account, 60)}", hint)
    if command.max_gpus is None and command.max_jobs is None:
        raise UsageError("nothing is limited", "for example: gctl limit user bob max_gpus=4 --until 1w")
    if command.until_at is not None and command.until_at <= tx.now:
        raise Refused("the limit would end in the past", "give a later time: --until 1w, or --until 2026-12-24")
    check_message(command.message)
    if before is None and len(_limits_of(tx.state.rows[TABLE_SETTINGS])) >= MOST_LIMITS:
        raise Refused(f"{MOST_LIMITS} users are limited already", "remove some; list them with: gctl limit")
    _put(limit.key, limit, command.caller, command.what, what, tx)
    return {"limit": limit}


def change_members(command: ChangeMembers, tx: TickTransaction) -> dict[str, Any]:
    """Record members that come and go. Raises: UserError, with nothing changed."""
    name, caller = command.account, command.caller
    # Earlier commands of this tick count.
    settings = with_members(tx.settings, tx.state.rows[TABLE_SETTINGS])
    if not coordinates(caller, name, settings):
        _check_coordinator(caller, name, f"change the members of account {printable(name, 60)}", tx)
    account = settings.account.get(name)
    if account is None:
        raise NotFound(f"there is no account {printable(name, 60)}", "list them with: gctl account")
    if EVERYBODY in account.users:
        raise Refused(f'the members of account {name} are all users ("*")', "an admin can list them in the config file")
    if not are_restricted(settings.account):
        # The first list anywhere would close all accounts that have none.
        raise Refused("no account lists members, so all of them are open", "an admin has to name the first member")
    if not command.add and not command.remove:
        raise UsageError("no member was given", f"for example: gctl account members {name} add=bob remove=carl")
    users = dict(account.users)
    for user in command.remove:
        if user not in users:
            near = closest(user, users)
            hint = f"did you mean {near}?" if near else f"see: gctl account {name}"
            raise NotFound(f"{printable(user, 40)} is not a member of account {name} by name", hint)
        del users[user]
    for user in command.add:
        if not WORD.admits(user) or user == EVERYBODY or ":" in user:
            raise UsageError(
                f"{printable(user, 40)!r} is not a user", "coordinators give members one share each: add=bob"
            )
        users.setdefault(user, 1.0)
    after = {**settings.account, name: replace(account, users=users)}
    if not are_restricted(after):
        raise Refused(
            "without its last member all accounts would be open", "ask an admin to remove it in the config file"
        )
    if len(users) > MOST_MEMBERS:
        raise Refused(f"account {name} would have {len(users)} members by name", "list a Unix group instead: groups")
    changed = False
    for user in sorted({*users, *account.users}):
        if (user in users) != (user in account.users):
            tx.set_in_table(("member", f"{name} {user}"), Membership(name, user, user in users, tx.now, caller.user))
            changed = True
    if changed:
        _record(caller, command.what, f"members of account {name}", tx)
    return {"members": sorted(users)}


def _check_coordinator(caller: Caller, account: str, what: str, tx: TickTransaction) -> None:
    """Refuse, with who may. Raises: Forbidden."""
    if coordinated_accounts(caller, tx.settings):
        own = ", ".join(coordinated_accounts(caller, tx.settings))
        hint = f"you coordinate {own}; name one of them" if not account else f"you coordinate only {own}"
        raise Forbidden(f"only an admin may {what}, not {caller.user}", hint)
    check_admin(caller, what, tx.settings)
    # An admin names members in the config file, where the next admin looks for them.
    raise Refused(f"members of account {printable(account, 60)} are named in the config file", "as root: sudo gctl ...")


def settled(before: Settings, after: Settings, table: Mapping[Key, TableSetting]) -> list[Key]:
    """Rows that a change of the config file has settled: an admin wrote about that member, or removed the queue."""
    found = []
    for key, one in table.items():
        if isinstance(one, QueuePause) and one.queue in before.queue and one.queue not in after.queue:
            found.append(key)
        if isinstance(one, Membership):
            was, now = (_lists(each, one) for each in (before, after))
            if was != now or now == one.is_member or one.account not in after.account:
                found.append(key)
    return found


def _lists(settings: Settings, one: Membership) -> bool:
    return one.account in settings.account and one.user in settings.account[one.account].users


def undo(command: UndoTableSettings, tx: TickTransaction) -> dict[str, Any]:
    """Take one recorded change back, all of it or nothing. Raises: UserError."""
    check_admin(command.caller, "undo a change of the settings", tx.settings)
    now = document_of_table(tx.state.rows[TABLE_SETTINGS])
    for (section, name), _, after in command.changes:
        if now.get(section, {}).get(name) != after:
            raise Refused(f"{section} {printable(name, 60)} has changed since", "see: gctl log")
    for (section, name), before, _ in command.changes:
        key: Key = _KIND_OF[section], name
        value = None if before is None else convert(before, KINDS[key[0]])
        if isinstance(value, UserLimit) and value.until_at is not None and value.until_at <= tx.now:
            raise Refused(f"the limit of user {value.user} would have ended by now", "set it again: gctl limit")
        tx.set_in_table(key, value)
    _record(command.caller, command.what, f"change {command.number} of the settings", tx)
    return {}


class LimitsWithAnEnd(Watch):
    """Ends the limits whose time is over."""

    name = "limits with an end"
    stage = Stage.BEFORE_COMMANDS

    def next_due(self, state: DaemonState, settings: Settings) -> float | None:
        return next_end(state.rows[TABLE_SETTINGS])

    def carry_out(self, tx: TickTransaction) -> None:
        end_at = next_end(tx.state.rows[TABLE_SETTINGS])
        if end_at is None or end_at > tx.now:
            return
        for one in _limits_of(tx.state.rows[TABLE_SETTINGS]):
            if one.until_at is not None and one.until_at <= tx.now:
                tx.set_in_table(one.key, None)
                what = (
                    f"the limit of user {one.user}" + (f" in account {one.account}" if one.account else "") + " ended"
                )
                tx.settings_record.append((daemon_caller(), what, document_of_table(tx.state.rows[TABLE_SETTINGS])))


def daemon_caller() -> Caller:
    """The daemon, as the author of a change."""
    return Caller(os.geteuid(), user_name(os.geteuid()))


def next_end(settings: Mapping[Key, TableSetting]) -> float | None:
    """When the next limit ends by itself."""
    return min((one.until_at for one in _limits_of(settings) if one.until_at is not None), default=None)


def limits_in_force(settings: Settings, table: Mapping[Key, TableSetting]) -> tuple[LimitInForce, ...]:
    """Limits of single users, of the config file and of the job table, by user and account."""
    of_file = [
        UserLimit(user=name, max_gpus=one.max_gpus, max_jobs=one.max_jobs, message=one.message or "")
        for name, one in settings.user.items()
        if one.max_gpus is not None or one.max_jobs is not None
    ]
    found = sorted((*of_file, *_limits_of(table)), key=lambda one: (one.user, one.account, one.by))
    return tuple(LimitInForce(one, _until(one.until_at)) for one in found)


def _until(until_at: float | None) -> str:
    return "" if until_at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(until_at))


def _limits_of(settings: Mapping[Key, TableSetting]) -> list[UserLimit]:
    return [one for one in settings.values() if isinstance(one, UserLimit)]


def check_message(message: str) -> None:
    if len(message) > LONGEST_MESSAGE:
        raise Refused(f"the message is longer than {LONGEST_MESSAGE} characters", "use -m 'why'")


def _put(key: Key, value: TableSetting | None, caller: Caller, what: str, about: str, tx: TickTransaction) -> None:
    tx.set_in_table(key, value)
    _record(caller, what, about, tx)


def _record(caller: Caller, what: str, about: str, tx: TickTransaction) -> None:
    tx.settings_record.append((caller, what, document_of_table(tx.state.rows[TABLE_SETTINGS])))
    tx.audit_events.append(AuditEvent(caller, "change", about))
