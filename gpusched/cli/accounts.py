"""`gctl account`, `queue` and `budget`: the tables of accounts, queues and budgets."""

from __future__ import annotations

import sys

from gpusched.cli import output, tables
from gpusched.cli.query import quote
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import format_amount, format_hours, format_size_mib, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_MEMBERS = 4
"""Members listed in the table before the rest is only counted."""
_ACCOUNTS = (
    Column("ACCOUNT", lambda row: "  " * row["depth"] + printable(row["account"] or "(all)", 24)),
    Column("USER", lambda row: printable(row["user"] or "", 16)),
    Column("SHARES", lambda row: format_amount(row["shares"]), right=True),
    Column("NORM_SHARES", lambda row: f"{row['norm_shares']:.4f}", right=True),
    # With private_data, other users' usage is hidden.
    Column("GPU_HOURS", lambda row: _number(row["gpu_hours"], ".2f"), right=True),
    Column("CORE_HOURS", lambda row: _number(row["core_hours"], ".2f"), right=True),
    Column("USAGE_S", lambda row: _number(row["usage_s"], ".0f"), right=True),
    Column("EFFECTIVE_USAGE", lambda row: _number(row["effective_usage"], ".4f"), right=True),
    Column("LEVEL_FS", lambda row: _level(row), right=True),
    Column("FAIRSHARE", lambda row: _number(row["fairshare"], ".4f", ""), right=True),
    Column("MEMBERS", lambda row: _members(row)),
)
_QUEUES = (
    Column("QUEUE", lambda row: "  " * row["depth"] + printable(row["name"], 24)),
    Column("GUARANTEED", lambda row: format_amount(row["guaranteed_gpus"]), right=True),
    Column("HELD", lambda row: format_amount(row["used_gpus"]), right=True),
    Column("BORROWED", lambda row: format_amount(row["borrowed_gpus"]), right=True, order=3),
    Column("LENT", lambda row: format_amount(row["lent_gpus"]), right=True, order=4),
    Column("MAX", lambda row: "-" if row["max_gpus"] is None else format_amount(row["max_gpus"]), right=True, order=2),
    Column("WEIGHT", lambda row: format_amount(row["weight"]), right=True, order=1),
    Column("RUNNING", lambda row: str(row["running"]), right=True),
    Column("PENDING", lambda row: str(row["pending"]), right=True),
)


def _number(value: float | None, form: str, none: str = "-") -> str:
    return none if value is None else f"{value:{form}}"


def show_accounts(_: str, names: list[str], values: Values) -> int:
    """`gctl account`: the account tree with shares, usage and fairshare factors."""
    with connect() as client:
        print_accounts(client.call("GET", f"/v1/accounts{_only(names, 'account')}"), values)
    return 0


def print_accounts(answer: dict[str, Any], values: Values) -> None:
    """Print the account tree, and which accounts the caller may submit to."""
    # A daemon not restarted since an upgrade does not report members yet.
    own, rows = answer.get("own_accounts"), answer["accounts"]
    if values.get("me"):
        rows = answer["accounts"] = [
            {**row, "depth": int(row["user"] is not None)}
            for row in rows
            if row["account"] in (own or ()) and row["user"] in (None, answer["user"])
        ]
    if output.show(values, answer, (row["account"] for row in rows if row["user"] is None and row["account"])):
        return
    sys.stdout.write(tables.listing(_ACCOUNTS, rows))
    if own is not None:
        output.note("gctl", _own(own, answer["default_account"]))


_BUDGETS = (
    Column("ACCOUNT", lambda row: printable(row["account"], 24)),
    Column("USER", lambda row: printable(row["user"] or "(all)", 16)),
    Column("PERIOD", lambda row: printable(row["period"])),
    Column("GPU_HOURS", lambda row: format_amount(row["granted_gpu_hours"]), right=True),
    Column("USED", lambda row: format_hours(row["used_gpu_hours"]), right=True),
    Column("BOOKED", lambda row: format_hours(row["booked_gpu_hours"]), right=True),
    Column("LEFT", lambda row: format_hours(row["left_gpu_hours"], down=True), right=True),
    Column("ENDS", lambda row: "-" if row["until_at"] is None else tables.minute(row["until_at"])),
)


def budget(_: str, words: list[str], values: Values) -> int:
    """`gctl budget`: GPU-hours granted, used, booked and left; or a credit on top of them."""
    if any("=" in word for word in words):
        from gpusched.cli.limits import give_credit  # rarely used

        return give_credit(words, values)
    with connect() as client:
        rows = client.call("GET", f"/v1/budgets{_only(words, 'budget')}")["budgets"]
    if output.show(values, {"budgets": rows}, dict.fromkeys(row["account"] for row in rows)):
        return 0
    if rows:
        then = Column("THEN", lambda row: str(row["when_spent"]))
        # A daemon that was not restarted since an upgrade does not tell.
        has_fillers = any(row.get("when_spent") == "filler" for row in rows)
        sys.stdout.write(tables.listing((*_BUDGETS, then) if has_fillers else _BUDGETS, rows))
    else:
        output.note("gctl", "there is no budget; grant one with: gctl account modify NAME gpu_hours=2000")
    return 0


def _members(row: dict[str, Any]) -> str:
    """The members of an account: users, groups as `@lab`, `*` for all users, `-` for none."""
    if row.get("users") is None:
        return ""
    if "*" in row["users"]:
        return "*"
    names = [*row["users"], *(f"@{group}" for group in row["groups"])]
    more = f" +{len(names) - _MEMBERS}" if len(names) > _MEMBERS else ""
    return printable(",".join(names[:_MEMBERS]) + more, 40) if names else "-"


def _own(own: list[str], default: str | None) -> str:
    if not own:
        return "you are not a member of any account; ask an admin to add you to one"
    names = ", ".join(f"{printable(name)} (default)" if name == default else printable(name) for name in own)
    return f"you may submit to: {names}"


def _level(row: dict[str, Any]) -> str:
    """Share divided by usage; infinite without usage."""
    if row["level_fs"] is not None:
        return f"{row['level_fs']:.4f}"
    return "-" if row["usage_s"] is None else "inf"


def show_queues(_: str, names: list[str], values: Values) -> int:
    """`gctl queue`: guarantees, usage, borrowed and lent GPUs of each queue."""
    if any("=" in name for name in names):
        raise UsageError(
            "unclear whether to show or to change a queue", "to change one: gctl queue modify vision max_gpus=4"
        )
    with connect() as client:
        answer = client.call("GET", f"/v1/queues{_only(names, 'queue')}")
    if not output.show(values, answer, (row["name"] for row in answer["queues"])):
        print_queues(answer["queues"], answer["loans"])
        output.note("gctl", "in GPUs; change queues with: gctl queue modify NAME max_gpus=4")
    return 0


def print_queues(queues: list[dict[str, Any]], loans: list[dict[str, Any]]) -> None:
    """Print the table of queues, and a sentence for each paused queue and each loan."""
    sys.stdout.write(tables.listing(_QUEUES, queues))
    for row in queues:
        # A daemon that was not restarted since an upgrade does not tell.
        if row.get("state") == "paused" and row["paused_with"] == row["name"]:
            why = f": {printable(row['message'])}" if row["message"] else ""
            by = f"{printable(row['paused_by'])} since {tables.minute(row['paused_at'])}"
            sys.stdout.write(tables.folded(f"{printable(row['name'])} has been paused by {by}{why}") + "\n")
    for loan in loans:
        lent = f"{printable(loan['lender'])} has lent {_amount(loan)} to {printable(loan['borrower'])}"
        sys.stdout.write(tables.folded(lent) + "\n")


def _amount(loan: dict[str, Any]) -> str:
    parts = []
    if loan["gpus"]:
        parts.append(plural(loan["gpus"], "GPU"))
    if loan["cpus"]:
        parts.append(plural(loan["cpus"], "CPU"))
    if loan["mem_mib"]:
        parts.append(f"{format_size_mib(loan['mem_mib'])} of memory")
    return " and ".join(parts)


def _only(names: list[str], what: str) -> str:
    if len(names) > 1:
        raise UsageError(f"more than one {what} was given", f"list all with: gctl {what}")
    return f"?name={quote(names[0])}" if names else ""
