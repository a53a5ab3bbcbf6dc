"""`gctl limit`: limits of single users, in the config file or, with an end or for one account, in the job table;
`gctl budget NAME credit=500`: GPU-hours on top of a budget.
"""

from __future__ import annotations

import shlex
import sys

from gpusched.cli import output, tables
from gpusched.cli.query import is_user, quote
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import NotFound, UsageError
from gpusched.model.units import format_amount, format_hours, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection

_EXAMPLE = "for example: gctl limit user bob max_gpus=4 --until 1w"
_KEYS = ("max_gpus", "max_jobs")


_LIMITS = (
    Column("USER", lambda one: printable(one["user"], 24)),
    Column("ACCOUNT", lambda one: printable(one["account"] or "(all)", 24)),
    Column("MAX_GPUS", lambda one: "-" if one["max_gpus"] is None else format_amount(one["max_gpus"]), right=True),
    Column("MAX_JOBS", lambda one: "-" if one["max_jobs"] is None else str(one["max_jobs"]), right=True),
    Column("UNTIL", lambda one: "-" if one["until_at"] is None else tables.minute(one["until_at"])),
    Column("SET_BY", lambda one: "(config file)" if one["set_by"] is None else printable(one["set_by"], 24)),
    Column("MESSAGE", lambda one: printable(one["message"], 60)),
)


def show(_: str, words: Sequence[str], values: Values) -> int:
    """List the limits of users. Raises: UsageError."""
    if words:
        raise UsageError(f"{printable(words[0], 40)!r} is neither user nor remove", _EXAMPLE)
    with connect() as client:
        limits = client.call("GET", "/v1/limits")["limits"]
    if output.show(values, {"limits": limits}, dict.fromkeys(one["user"] for one in limits)):
        return 0
    if limits:
        sys.stdout.write(tables.listing(_LIMITS, limits))
    else:
        output.note("gctl", "no user is limited; " + _EXAMPLE)
    return 0


def change(action: str, words: Sequence[str], values: Values) -> int:
    """Set or remove the limit of a user. Raises: UserError."""
    is_removed = action == "limit remove"
    rest = list(words[1:] if is_removed and words[:1] == ["user"] else words)
    if not rest or "=" in rest[0]:
        raise UsageError("no user is named", "for example: gctl limit remove bob" if is_removed else _EXAMPLE)
    user, pairs = rest[0], _read(rest[1:], is_removed=is_removed)
    account = pairs.pop("account", "")
    what = shlex.join(["gctl", *action.split(), *words, *_options(values)])
    with connect() as client:
        if is_removed:
            return _remove(client, user, account, what, values)
        if not pairs:
            raise UsageError("nothing is limited", _EXAMPLE)
        if not is_user(user):
            output.note("gctl", f"this machine knows no user {printable(user, 40)}")
        if account or values.get("until_at") is not None:
            request = {"user": user, **pairs, "message": values.get("message"), "until_at": values.get("until_at")}
            request |= {"account": account or None, "what": what}
            return _told("limited", client.call("POST", "/v1/limits", request)["limit"], values)
        return _set_in_file(client, user, pairs, what, values)


def _read(words: Sequence[str], *, is_removed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lower().replace("-", "_")
        if not equals or key not in (("account",) if is_removed else (*_KEYS, "account")):
            known = "account=" if is_removed else "max_gpus=, max_jobs= and account="
            raise UsageError(f"{printable(word, 40)!r} is not a limit; the limits are {known}", _EXAMPLE)
        if key in found:
            raise UsageError(f"{key} is given twice", _EXAMPLE)
        found[key] = text if key == "account" else _number(key, text)
    return found


def _options(values: Values) -> list[str]:
    """The options of a command, for the record."""
    until_at, message = values.get("until_at"), values.get("message")
    return (["--until", tables.minute(until_at)] if until_at is not None else []) + (["-m", message] if message else [])


def _number(key: str, text: str) -> float | int:
    try:
        number = float(text)
        if key == "max_jobs" and number != int(number):
            raise ValueError
        if not 0 <= number <= 10**6:
            raise ValueError
    except (ValueError, OverflowError):
        kind = "whole number" if key == "max_jobs" else "number"
        raise UsageError(f"{key} is {printable(text, 40)!r}, not a {kind} of at least 0", _EXAMPLE) from None
    return int(number) if number == int(number) else number


def _set_in_file(client: DaemonConnection, user: str, pairs: dict[str, Any], what: str, values: Values) -> int:
    from gpusched.cli.setting_changes import FileChange  # reads the config file
    from gpusched.config.document import KeyChange

    def made(document: Any, _: Any) -> list[KeyChange]:
        known = document.get("user", {}).get(user, {})
        changes = {**pairs, **({"message": values["message"]} if values.get("message") else {})}
        if not known:
            return [KeyChange(("user", user), changes)]
        return [KeyChange(("user", user, key), value) for key, value in changes.items()]

    return FileChange(client, made, values, what).carry_out(f"limited {printable(user)}")


def _remove(client: DaemonConnection, user: str, account: str, what: str, values: Values) -> int:
    found = [
        one
        for one in client.call("GET", "/v1/limits")["limits"]
        if one["user"] == user and (one["account"] or "") == account
    ]
    if not found:
        where = f" in account {printable(account, 40)}" if account else ""
        raise NotFound(f"user {printable(user, 40)} has no limit{where}", "list them with: gctl limit")
    for one in found:
        if one["set_by"] is not None:
            _told("removed the limit of", _removed_from_table(client, user, account, what), values)
    if any(one["set_by"] is None for one in found):
        from gpusched.cli.setting_changes import FileChange  # reads the config file
        from gpusched.config.document import KeyChange

        def made(document: Any, _: Any) -> list[KeyChange]:
            return [KeyChange(("user", user), None)] if user in document.get("user", {}) else []

        return FileChange(client, made, values, what).carry_out(f"removed the limit of {printable(user)}")
    return 0


def _removed_from_table(client: DaemonConnection, user: str, account: str, what: str) -> dict[str, Any]:
    request = {"user": user, "account": account or None, "what": what}
    return dict(client.call("POST", "/v1/limits/remove", request)["limit"])


def _told(done: str, limit: dict[str, Any], values: Values) -> int:
    if not output.show(values, {"limit": limit}, [limit["user"]]):
        end = f" until {tables.minute(limit['until_at'])}" if limit["until_at"] is not None else ""
        where = f" in account {printable(limit['account'])}" if limit["account"] else ""
        sys.stdout.write(f"{done} {printable(limit['user'])}{where}{'' if done.startswith('removed') else end}\n")
    return 0


# --- credits ------------------------------------------------------------------------------------

_CREDIT = "for example: gctl budget vision credit=500 -m 'grant'"


def give_credit(words: Sequence[str], values: Values) -> int:
    """Add GPU-hours to a budget for its present period."""
    name, *pairs = words
    if "=" in name or len(pairs) != 1 or not pairs[0].startswith("credit="):
        raise UsageError("a credit needs an account and its GPU-hours", _CREDIT)
    text = pairs[0].partition("=")[2]
    try:
        hours = float(text)
        if not 0 < abs(hours) <= 1e9:
            raise ValueError
    except ValueError:
        raise UsageError(f"credit is {printable(text, 40)!r}, not a number of GPU-hours", _CREDIT) from None
    request = {"account": name, "gpu_hours": hours, "message": values.get("message")}
    with connect() as client:
        what = shlex.join(["gctl", "budget", *words, *_options(values)])
        credit = client.call("POST", "/v1/credits", {**request, "what": what})["credit"]
        (row, *_) = client.call("GET", f"/v1/budgets?name={quote(name)}")["budgets"]
    if not output.show(values, {"credit": credit, "budget": row}, [credit["number"]]):
        given = f"gave {printable(name)} {format_amount(hours)}" if hours > 0 else f"took {format_amount(-hours)}"
        whom = "" if hours > 0 else f" from {printable(name)}"
        left = format_hours(row["left_gpu_hours"], down=True)
        sys.stdout.write(f"{given} GPU-hours{whom}; {left} are left of {printable(row['period'])}\n")
    return 0
