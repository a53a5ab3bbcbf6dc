"""Tables about who stands where: parts of priorities, the tree of accounts, queues and what they lend."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.query import quote
from gpusched.errors import UsageError
from gpusched.model.units import format_amount, format_duration, format_size_mib, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import Client


def priorities_view(client: Client, asked: str, values: Values) -> str | dict[str, Any]:
    """`gq --priority`: one line a waiting job, one column a factor; or the document."""
    answer = client.call("GET", f"/v1/priorities?{asked}")
    rows = answer["priorities"]
    if values.get("json"):
        return answer
    if values.get("quiet"):
        return "".join(f"{row['id']}\n" for row in rows)
    if answer["order"] == "response_ratio":
        return _responses(rows, header=not values.get("noheader"))
    # Plug-ins may add a part for some jobs only.
    parts = list(dict.fromkeys(part for row in rows for part in row["parts"]))
    lines = [
        (
            row["id"],
            printable(row["user"]),
            f"{row['priority']:.1f}",
            *(f"{row['parts'].get(part, 0.0):.1f}" for part in parts),
            str(row["tier"]),
        )
        for row in rows
    ]
    titles = ("ID", "USER", "PRIORITY", *(part.upper() for part in parts), "TIER")
    right = frozenset(range(2, len(titles)))
    if answer["order"] != "multifactor":
        output.note("gq", f"the order of the queue is {answer['order']}, not the sum of these parts")
    shown = tables.table(titles, lines, right=right, header=not values.get("noheader"), cut={1: 6})
    return "".join(f"{line}\n" for line in shown)


def _responses(rows: list[dict[str, Any]], *, header: bool) -> str:
    """What places in the order `response_ratio` are made of; `-` for jobs that are not eligible."""
    from gpusched.cli.ahead import instant

    now = time.time()
    lines = []
    for row in rows:
        found = row["response"]
        if found is None:
            parts = ["-"] * 7
        else:
            is_due = found["reserves_at"] <= now
            parts = [
                f"{found['share']:.2f}",
                str(found["turn"]),
                format_duration(found["waited_s"]),
                "unknown" if found["expected_s"] is None else format_duration(found["expected_s"]),
                f"{found['urgency']:.2f}",
                f"{found['ratio']:.2f}",
                "yes" if found["is_reserved"] else "next" if is_due else instant(found["reserves_at"], now),
            ]
        lines.append((row["id"], printable(row["user"]), *parts, str(row["tier"])))
    titles = ("ID", "USER", "SHARE", "TURN", "WAITED", "EXPECTED", "URGENCY", "RATIO", "RESERVED", "TIER")
    shown = tables.table(titles, lines, right=frozenset({2, 3, 4, 5, 6, 7, 9}), header=header, cut={1: 6})
    return "".join(f"{line}\n" for line in shown)


_MEMBERS = 4
"""Members that the table names before it says how many more there are."""
_USED = (("gpu_hours", ".2f"), ("core_hours", ".2f"), ("usage_s", ".0f"), ("effective_usage", ".4f"))


def show_accounts(client: Client, names: list[str], values: Values) -> None:
    """`gctl account`: the tree with its shares, what was used of them, and the factors."""
    answer = client.call("GET", f"/v1/accounts{_only(names, 'account')}")
    # A daemon that has not been restarted since an upgrade does not tell members yet.
    own, rows = answer.get("own_accounts"), answer["accounts"]
    if values.get("me"):
        rows = answer["accounts"] = [
            {**row, "depth": int(row["user"] is not None)}
            for row in rows
            if row["account"] in (own or ()) and row["user"] in (None, answer["user"])
        ]
    if values.get("json"):
        output.print_json(answer)
        return
    if values.get("quiet"):
        sys.stdout.write("".join(f"{row['account']}\n" for row in rows if row["user"] is None and row["account"]))
        return
    lines = [
        (
            "  " * row["depth"] + printable(row["account"] or "(all)", 24),
            printable(row["user"] or "", 16),
            format_amount(row["shares"]),
            f"{row['norm_shares']:.4f}",
            # With private_data nobody is told what others have used.
            *("-" if row[key] is None else f"{row[key]:{form}}" for key, form in _USED),
            _level(row),
            "" if row["fairshare"] is None else f"{row['fairshare']:.4f}",
            _members(row),
        )
        for row in rows
    ]
    titles = (
        "ACCOUNT",
        "USER",
        "SHARES",
        "NORM_SHARES",
        "GPU_HOURS",
        "CORE_HOURS",
        "USAGE_S",
        "EFFECTIVE_USAGE",
        "LEVEL_FS",
        "FAIRSHARE",
        "MEMBERS",
    )
    tables.print_table(titles, lines, right=frozenset(range(2, len(titles) - 1)))
    if own is not None:
        output.note("gctl", _own(own, answer["default_account"]))


def _members(row: dict[str, Any]) -> str:
    """Whom an account lists: users, groups as `@lab`, `*` for everybody; `-` for nobody."""
    if row.get("users") is None:
        return ""
    if "*" in row["users"]:
        return "*"
    names = [*row["users"], *(f"@{group}" for group in row["groups"])]
    more = f" +{len(names) - _MEMBERS}" if len(names) > _MEMBERS else ""
    return printable(",".join(names[:_MEMBERS]) + more, 40) if names else "-"


def _own(own: list[str], default: str | None) -> str:
    if not own:
        return "you are a member of no account; ask an admin to add you to one"
    names = ", ".join(f"{printable(name)} (default)" if name == default else printable(name) for name in own)
    return f"you may submit to: {names}"


def _level(row: dict[str, Any]) -> str:
    """What it has against what it should have; infinite for who has used nothing."""
    if row["level_fs"] is not None:
        return f"{row['level_fs']:.4f}"
    return "-" if row["usage_s"] is None else "inf"


def show_queues(client: Client, names: list[str], values: Values) -> None:
    """`gctl queue`: what each queue is guaranteed, holds, borrows and lends."""
    if any("=" in name for name in names):
        raise UsageError("queues are not changed here", "change [queue.NAME] in the config file, then: gctl reload")
    answer = client.call("GET", f"/v1/queues{_only(names, 'queue')}")
    if values.get("json"):
        output.print_json(answer)
    elif values.get("quiet"):
        sys.stdout.write("".join(f"{row['name']}\n" for row in answer["queues"]))
    else:
        print_queues(answer["queues"], answer["loans"])
        output.note("gctl", "in GPUs; queues are set in the config file, changes of it count after: gctl reload")


def print_queues(queues: list[dict[str, Any]], loans: list[dict[str, Any]]) -> None:
    """The table of queues, and a sentence for each loan."""
    lines = [
        (
            "  " * row["depth"] + printable(row["name"], 24),
            format_amount(row["guaranteed_gpus"]),
            format_amount(row["used_gpus"]),
            format_amount(row["borrowed_gpus"]),
            format_amount(row["lent_gpus"]),
            "-" if row["max_gpus"] is None else format_amount(row["max_gpus"]),
            format_amount(row["weight"]),
            str(row["running"]),
            str(row["pending"]),
        )
        for row in queues
    ]
    titles = ("QUEUE", "GUARANTEED", "HELD", "BORROWED", "LENT", "MAX", "WEIGHT", "RUNNING", "PENDING")
    tables.print_table(titles, lines, right=frozenset(range(1, len(titles))))
    for loan in loans:
        sys.stdout.write(f"{printable(loan['lender'])} has lent {_amount(loan)} to {printable(loan['borrower'])}\n")


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
        raise UsageError(f"more than one {what} is named", f"for all of them: gctl {what}")
    return f"?name={quote(names[0])}" if names else ""
