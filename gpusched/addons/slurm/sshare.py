"""sshare: accounts, their shares, what they have used, and the fair-share factors of their users."""

from __future__ import annotations

import sys

from gpusched.addons.slurm.command import Command, cluster_suffix, comma_list, run
from gpusched.addons.slurm.format import AccountingColumn, choose_columns, helpformat, render_table
from gpusched.client import connect
from gpusched.model.units import format_amount, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.addons.slurm.command import Parsed

    Json = dict[str, Any]

COMMAND = Command(
    "sshare",
    "sshare [options]",
    """
-a --all  all users
-A --accounts NAMES  only these accounts
-e --helpformat  list all columns
-h --help  show this help
-l --long  more columns
-m --partition  accepted: shares do not depend on partitions
-M --clusters --cluster NAMES  this cluster's name, or all
-n --noheader  print no header
-o --format NAMES  columns, such as Account,User,FairShare%20
-p --parsable  separate columns by |, with one at the end of the line
-P --parsable2  separate columns by |
-u --users NAMES  only these users
-U --Users  only users, without accounts
-v --verbose  accepted: there is nothing more to print
""",
)
_ROOT = "root"


def _fraction(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _norm_shares(row: Json) -> str:
    return _fraction(0.0 if _is_root(row) else row["norm_shares"])


def _is_root(row: Json) -> bool:
    return row["user"] is None and not row["account"]


def _account(row: Json) -> str:
    # Users belong one level below their account, whose name they repeat.
    return " " * int(row["depth"]) + printable(row["account"] or _ROOT)


def _raw_shares(row: Json) -> str:
    return "" if _is_root(row) else format_amount(row["shares"])


def _raw_usage(row: Json) -> str:
    return "" if row["usage_s"] is None else f"{row['usage_s']:.0f}"


def _norm_usage(row: Json) -> str:
    if row["user"] is None or row["usage_s"] is None:
        return ""
    return _fraction(row["usage_s"] / row["total_s"] if row["total_s"] else 0.0)


def _level(row: Json) -> str:
    if _is_root(row) or row["usage_s"] is None:
        return ""
    return "inf" if row["level_fs"] is None else _fraction(row["level_fs"])


_COLUMNS = (
    AccountingColumn("Account", -20, _account),
    AccountingColumn("User", 10, lambda row: printable(row["user"] or "")),
    AccountingColumn("RawShares", 10, _raw_shares),
    AccountingColumn("NormShares", 11, _norm_shares),
    AccountingColumn("RawUsage", 11, _raw_usage),
    AccountingColumn("NormUsage", 11, _norm_usage),
    AccountingColumn("EffectvUsage", 13, lambda row: _fraction(row["effective_usage"])),
    AccountingColumn("FairShare", 10, lambda row: _fraction(row["fairshare"]) if row["user"] is not None else ""),
    AccountingColumn("LevelFS", 10, _level),
    AccountingColumn("GrpTRESMins", 30, lambda row: ""),
    AccountingColumn("TRESRunMins", 30, lambda row: ""),
)
_DEFAULT = "account,user,rawshares,normshares,rawusage,effectvusage,fairshare"


def main() -> int:
    return run(COMMAND, body)


def body(options: Parsed) -> int:
    if options.operands:
        raise COMMAND.refuse(f"unexpected argument '{printable(options.operands[0])}'")
    if options.has("helpformat"):
        sys.stdout.write(helpformat(_COLUMNS))
        return 0
    columns = _columns(options)
    with connect() as client:
        if options.has("clusters"):
            cluster_suffix(COMMAND, client, options.get("clusters"))
        answer = client.call("GET", "/v1/accounts")
    rows = _rows(options, answer)
    sys.stdout.write(render_table(options, columns, rows))
    return 0


def _columns(options: Parsed) -> list[AccountingColumn]:
    """The columns asked for. Raises: CommandError."""
    form = options.get("format") or ("all" if options.has("long") else _DEFAULT)
    return choose_columns(COMMAND, form, _COLUMNS)


def _rows(options: Parsed, answer: Json) -> list[Json]:
    """The tree, with only the users asked for; by default the caller."""
    rows: list[Json] = answer["accounts"]
    total_s = next((row["usage_s"] for row in rows if _is_root(row)), None) or 0.0
    users = comma_list(options.all("users"))
    accounts = comma_list(options.all("accounts"))
    has_all = options.has("all") or users in (["-1"], ["ALL"])
    wanted = users or [answer["user"]]
    of_them = {row["account"] for row in rows if row["user"] in wanted}
    shown = []
    for row in rows:
        if row["user"] is not None and not has_all and row["user"] not in wanted:
            continue
        if row["user"] is None and (options.has("Users") or not (has_all or accounts or _leads(row, of_them, rows))):
            continue
        if accounts and row["account"] not in accounts:
            continue
        shown.append({**row, "total_s": total_s})
    return shown


def _leads(row: Json, accounts: set[str], rows: list[Json]) -> bool:
    """Whether an account is one of these, or above one of them."""
    place = next(at for at, one in enumerate(rows) if one is row)
    for one in rows[place:]:
        if one is not row and one["depth"] <= row["depth"]:
            return False
        if one["user"] is None and one["account"] in accounts:
            return True
    return False
