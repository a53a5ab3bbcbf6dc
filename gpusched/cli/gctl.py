"""gctl: hold, release, suspend, resume, requeue and update jobs; drain, undrain and reserve nodes and GPUs."""

from __future__ import annotations

import os
import sys

from gpusched import paths
from gpusched.cli import output, tables
from gpusched.cli.job_options import UPDATES, read_change
from gpusched.cli.options import ACTIONS, gctl_table
from gpusched.cli.parse import parse
from gpusched.cli.query import check_names, folded_ids, mine, quote
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import (
    format_amount,
    format_duration,
    format_hours,
    format_size_mib,
    gpu_list,
    plural,
    printable,
    split_ids,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection


_DONE = {
    "hold": "held",
    "release": "released",
    "suspend": "suspended",
    "resume": "resumed",
    "requeue": "requeued",
    "requeue and hold": "requeued and held",
    "update": "updated",
    "drain": "drained",
    "undrain": "undrained",
    "down": "declared down",
}
_TOLD = 10
_VERBS = ("add", "modify", "remove", "members")
"""What `gctl account`, `queue` and `qos` do besides showing."""
_FILTERS = ("of_users", "names", "queues", "states", "me", "all")
_AS_IT_WAS = {
    "hold": "was already held",
    "release": "was not held",
    "suspend": "was already suspended",
    "resume": "was not suspended",
    "undrain": "was not drained",
}


def main() -> int:
    return output.run("gctl", body)


def body(words: list[str]) -> int:
    table = gctl_table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table, values):
        return 0
    if not operands or operands[0] not in ACTIONS:
        what = f"unknown action {printable(operands[0], 40)!r}" if operands else "no action given"
        raise UsageError(what, "actions: " + ", ".join(ACTIONS) + "; see gctl --help")
    action, rest = operands[0], operands[1:]
    is_pause = action == "queue" and rest[:1] == ["pause"]
    if "message" in values and action not in ("drain", "down", "reserve", "budget", "limit") and not is_pause:
        raise UsageError(
            f"-m applies to drain, down, queue pause, reserve, budget and limit, not to {action}", "see: gctl --help"
        )
    if "confirm" in values and action != "down":
        raise UsageError(f"--confirm applies to down, not to {action}", "see: gctl --help")
    fitting = FIELDS if action == "reserve" else ["until_at"] if action == "limit" else []
    odd = [name for name in FIELDS if name in values and name not in fitting]
    if odd:
        raise UsageError(f"options of reserve do not apply to {action}", "see: gctl --help")
    chosen = [name for name in (*_FILTERS, "yes") if name in values]
    if "since" in values and action != "log":
        raise UsageError(f"--since applies to log, not to {action}", "see: gctl --help")
    if action == "limit" or (action == "budget" and any("=" in word for word in rest)):
        if chosen not in ([], ["yes"]):
            raise UsageError(f"filters do not apply to {action}", "see: gctl --help")
        from gpusched.cli import limits  # not needed by other actions

        return limits.change_limits(rest, values) if action == "limit" else limits.give_credit(rest, values)
    changes_table = action in ("account", "queue", "qos") and rest[:1] and rest[0] in _VERBS
    if action == "mig" and chosen in ([], ["yes"]):
        from gpusched.cli import mig  # not needed by other actions

        return mig.main(rest, values)
    if ("dry_run" in values and not changes_table and action not in ("undo", "import")) or (
        "to" in values and not changes_table
    ):
        raise UsageError(f"--dry-run and --to do not apply to {action}", "see: gctl --help")
    if changes_table and chosen not in ([], ["yes"]):
        raise UsageError(f"filters do not apply to {action} {rest[0]}", "see: gctl --help")
    if action in ("export", "import") and chosen in ([], ["yes"]):
        from gpusched.cli import transfer  # reads the config file

        return transfer.export(rest, values) if action == "export" else transfer.import_from(rest, values)
    if action == "undo" and chosen in ([], ["yes"]):
        from gpusched.cli.settings_log import undo  # reads the config file

        return undo(rest, values)
    if changes_table:
        from gpusched.cli.setting_changes import change_table  # reads the config file

        return change_table(action, rest, values)
    if chosen and action not in ("hold", "release") and not (action == "account" and chosen == ["me"]):
        raise UsageError(f"filters apply to hold and release, not to {action}", "see: gctl --help")
    if "hold" in values and action != "requeue":
        raise UsageError(f"--hold applies to requeue, not to {action}", "to hold pending jobs: gctl hold 41")
    if "judge" in values and action != "preset":
        raise UsageError(f"--judge applies to preset, not to {action}", "see: gctl --help")
    if action == "reload":
        return _reload(rest, values)
    if action == "log":
        from gpusched.cli.settings_log import show_log  # not needed by other actions

        return show_log(rest, values)
    if action == "preset":
        from gpusched.cli import preset  # not needed by other actions

        return preset.show(rest, values)
    if action == "reserve":
        return reserve(rest, values)
    if action == "unreserve":
        return unreserve(_split(rest), values)
    if action == "qos":
        raise UsageError(f"qos needs one of {', '.join(_VERBS[:3])}", ACTIONS["qos"])
    if action == "queue" and rest and rest[0] in ("pause", "resume"):
        from gpusched.cli.pauses import change  # not needed by other actions

        return change(rest[0], rest[1:], values)
    if action in ("account", "queue", "budget"):
        return _show(action, rest, values)
    filters = [name for name in _FILTERS if name in values]
    if rest and filters:
        raise UsageError(
            "ids and filters were both given", f"give one or the other, for example: gctl {action} -n sweep"
        )
    if not (rest or filters):
        raise UsageError(f"{action} needs a target", ACTIONS[action])
    request: dict[str, Any]
    if action in ("drain", "undrain", "down"):
        path = f"/v1/{action}"
        request = {"targets": _split(rest)}
        if "message" in values:
            request["message"] = values["message"]
        if "confirm" in values:
            request["confirm"] = True
    elif action == "update":
        pairs = [word for word in rest if "=" in word]
        path = "/v1/jobs/update"
        request = {"ids": _split([word for word in rest if "=" not in word]), "changes": _changes(pairs)}
    else:
        path = f"/v1/jobs/{action}"
        request = _choice(values) if filters else {"ids": _split(rest)}
        if values.get("hold"):
            request["hold"] = True
    with connect() as client:
        check_names(client, values.get("of_users", []), values.get("queues", []))
        if filters and not values.get("yes") and sys.stdin.isatty() and sys.stdout.isatty():
            _ask(action, client.call("POST", path, {**request, "dry_run": True})["changed"])
        if action == "requeue" and "GPUSCHED_JOB_ID" in os.environ:
            import signal  # hardly ever needed

            # A job that requeues itself is to see that it worked, although the end of its run has begun.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        answer = client.call("POST", path, request)
    changes = request.get("changes", {})
    if changes.get("notify") or changes.get("notify_to"):
        from gpusched.cli.notify_targets import warn_about_targets  # reads the user's targets

        warn_about_targets("gctl", changes.get("notify_to") or ())
    if not output.show(values, answer, answer["changed"]):
        _tell("requeue and hold" if values.get("hold") else action, answer)
        if filters and not answer["changed"]:
            output.note("gctl", "no job matches")
        if action == "hold" and values.get("queues"):
            which = printable(values["queues"][0], 60)
            output.note(
                "gctl", f"jobs submitted from now on are not held; to start none of them: gctl queue pause {which}"
            )
    return 0


def _choice(values: dict[str, Any]) -> dict[str, Any]:
    """The filters in the form of the API."""
    return {
        "users": [*values.get("of_users", ()), *mine(values)],
        **{key: values.get(key, []) for key in ("names", "queues", "states")},
        "all": values.get("all", False),
    }


def _ask(action: str, ids: list[str]) -> None:
    if len(ids) > 1:
        output.confirm("gctl", f"{action} {folded_ids(ids)}", f"nothing was {_DONE[action]}")


def _show(action: str, names: list[str], values: dict[str, Any]) -> int:
    with connect() as client:
        {"account": show_accounts, "queue": show_queues, "budget": show_budgets}[action](client, names, values)
    return 0


def _tell(action: str, answer: dict[str, Any]) -> None:
    labels = answer.get("labels", {})
    changed = answer["changed"]
    if len(changed) > _TOLD and action not in ("drain", "undrain"):
        changed = [folded_ids(changed)]
    for name in changed:
        sys.stdout.write(f"{_DONE[action]} {printable(str(labels.get(name, name)))}\n")
    unchanged = answer.get("unchanged", ())
    for name in unchanged[:_TOLD]:
        output.note("gctl", f"{printable(str(labels.get(name, name)))} {_AS_IT_WAS[action]}")
    if len(unchanged) > _TOLD:
        output.note("gctl", f"and {len(unchanged) - _TOLD} more")
    running = answer.get("running", ())
    if running:
        go_on = "keeps running until its run ends" if len(running) == 1 else "keep running until their runs end"
        ids = " ".join(running) if len(running) <= _TOLD else "ID"
        output.note(
            "gctl",
            f"{folded_ids(running)} {go_on}, and cannot start again until released; to stop now: "
            f"gctl requeue --hold {ids}, or gctl suspend {ids}",
        )
    if answer.get("lost"):
        output.note("gctl", f"lost: {folded_ids(answer['lost'])}; use the node again with: gctl undrain {changed[0]}")
    for text in answer.get("notes", ()):
        output.note("gctl", printable(text))
    for kept in answer.get("kept", ()):
        gpus, them = ("its GPU", "it") if kept["gpus"] == 1 else (f"its {kept['gpus']} GPUs", "them")
        job_id = kept["id"]
        output.note("gctl", f"{job_id} keeps {gpus} while suspended; to free {them}: gctl requeue {job_id}")


def _reload(rest: list[str], values: dict[str, Any]) -> int:
    if rest:
        raise UsageError(f"reload takes no arguments, but {printable(rest[0], 40)!r} was given", ACTIONS["reload"])
    with connect() as client:
        answer = client.call("POST", "/v1/reload", {})
        if any(path.startswith(("account.", "queue.", "default.")) for path in answer["changed"]):
            from gpusched.cli.lockouts import notes_of_file  # reads the config file

            answer["notes"] = [*answer.get("notes", ()), *notes_of_file(client)]
    if values.get("json"):
        output.print_json(answer)
        return 1 if answer.get("failed") else 0
    for path in answer["changed"]:
        sys.stdout.write(f"{printable(path)}\n" if values.get("quiet") else f"reloaded {printable(path)}\n")
    if not answer["changed"] and not answer["needs_restart"] and not values.get("quiet"):
        output.note("gctl", "the settings have not changed")
    for path in answer["needs_restart"]:
        output.note("gctl", f"{printable(path)} takes effect after a restart: {paths.restart_command()}")
    for text in answer.get("notes", ()):
        output.note("gctl", printable(text))
    for path, text in answer.get("failed", {}).items():
        output.note("gctl", f"{path} was not reloaded: {printable(text)}; what was read before stays in force")
    return 1 if answer.get("failed") else 0


def _split(words: list[str]) -> list[str]:
    return [word for operand in words for word in split_ids(operand)]


def _changes(pairs: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        key = name.lower().replace("_", "-")
        if key not in UPDATES:
            raise UsageError(f"{printable(name, 40)!r} cannot be updated", "what can: " + ", ".join(UPDATES))
        try:
            changes.update(read_change(key, text))
        except ValueError as error:
            raise UsageError(f"{key}: {error}", ACTIONS["update"]) from None
    if not changes:
        raise UsageError("nothing to change", ACTIONS["update"])
    return changes


FIELDS = (
    "start_at duration_s every_s until_at gpus cards is_node nodelist cpus mem_mib is_maintenance users accounts "
    "ignore_jobs"
).split()
"""Fields of the request that the options of `gctl reserve` set."""

_EXAMPLE = "for example: gctl reserve course --start 14:00 --duration 4h --gpus 2 --users ann,bob"
_RESERVATIONS = (
    Column("NAME", lambda one: printable(one["name"])),
    Column("STATE", lambda one: "active" if one["is_active"] else "coming"),
    Column("BEGINS", lambda one: tables.minute(one["next"]["start_at"])),
    Column("ENDS", lambda one: tables.minute(one["next"]["end_at"])),
    Column("EVERY", lambda one: period(one["every_s"]) if one["every_s"] else "-"),
    Column("KEEPS", lambda one: keeps(one)),
    Column("FOR", lambda one: printable(whom(one))),
)


def reserve(names: list[str], values: Values) -> int:
    """Create a reservation, or list all if none is named."""
    asked = {name: values[name] for name in (*FIELDS, "message") if name in values}
    if not names:
        if asked:
            raise UsageError("the reservation has no name", _EXAMPLE)
        return _list(values)
    if len(names) > 1:
        raise UsageError(f"unexpected argument {printable(names[1], 40)!r}", _EXAMPLE)
    for key, option in (("start_at", "--start"), ("duration_s", "--duration")):
        if key not in asked:
            raise UsageError(f"{option} is missing", _EXAMPLE)
    with connect() as client:
        answer = client.call("POST", "/v1/reservations", {"name": names[0], **asked})
    made = answer["reservation"]
    if values.get("json"):
        output.print_json(answer)
        return 0
    if values.get("quiet"):
        sys.stdout.write(f"{printable(made['name'])}\n")
    else:
        window = made["next"]
        span = f"{tables.minute(window['start_at'])} to {tables.minute(window['end_at'])}"
        again = f", every {period(made['every_s'])}" if made["every_s"] else ""
        sys.stdout.write(f"reserved {printable(made['name'])}: {keeps(made)}, {span}{again}\n")
    for text in (*answer["notes"], *_unknown_users(made["users"])):
        output.note("gctl", printable(text))
    return 0


def unreserve(names: list[str], values: Values) -> int:
    if not names:
        raise UsageError("unreserve needs a name", "for example: gctl unreserve course")
    with connect() as client:
        answer = client.call("POST", "/v1/unreserve", {"names": names})
    if values.get("json"):
        output.print_json(answer)
        return 0
    for name in answer["changed"]:
        sys.stdout.write(f"{printable(name)}\n" if values.get("quiet") else f"unreserved {printable(name)}\n")
    if answer["waiting"]:
        ids = ",".join(answer["waiting"])
        output.note("gctl", f"jobs that requested it stay pending until they are moved or cancelled: {ids}")
    return 0


def print_reservations(found: list[dict[str, Any]]) -> None:
    """Print reservations, the next one first."""
    sys.stdout.write(tables.listing(_RESERVATIONS, found))


def whom(one: dict[str, Any]) -> str:
    """The users and accounts of a reservation, or its reason."""
    if one["is_maintenance"]:
        return "maintenance" + (f": {one['message']}" if one["message"] else "")
    return ", ".join([*one["users"], *(f"account {name}" for name in one["accounts"])])


def keeps(one: dict[str, Any]) -> str:
    """`node lab1`, or `lab1: GPUs 0,1, 8 CPUs, 32G`."""
    return "; ".join(_place(place) for place in one["held"])


def _place(place: dict[str, Any]) -> str:
    node = printable(place["node"])
    if place["is_node"]:
        return f"node {node}"
    indices = gpu_list(gpu["index"] for gpu in place["gpus"])
    parts = [f"GPU{'s' if len(place['gpus']) > 1 else ''} {indices}"] if indices else []
    parts.append(plural(place["cpus"], "CPU"))
    parts.append(format_size_mib(place["mem_mib"]))
    return f"{node}: {', '.join(parts)}"


def period(every_s: int) -> str:
    """The users and accounts of a reservation, or `maintenance` with its message."""
    for name, length_s in (("week", 604800), ("day", 86400), ("hour", 3600)):
        if every_s % length_s == 0:
            count = every_s // length_s
            return name if count == 1 else f"{count} {name}s"
    return format_duration(every_s)


def _list(values: Values) -> int:
    with connect() as client:
        answer = client.call("GET", "/v1/reservations")
    found = answer["reservations"]
    if output.show(values, answer, (one["name"] for one in found)):
        return 0
    if found:
        print_reservations(found)
    else:
        output.note("gctl", f"there are no reservations; {_EXAMPLE}")
    return 0


def _unknown_users(names: list[str]) -> list[str]:
    import pwd  # only when a reservation was made

    unknown = []
    for name in names:
        try:
            pwd.getpwnam(name)
        except KeyError:
            unknown.append(f"user {name} does not exist on this machine yet")
    return unknown


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
    Column("BORROWED", lambda row: format_amount(row["borrowed_gpus"]), right=True),
    Column("LENT", lambda row: format_amount(row["lent_gpus"]), right=True),
    Column("MAX", lambda row: "-" if row["max_gpus"] is None else format_amount(row["max_gpus"]), right=True),
    Column("WEIGHT", lambda row: format_amount(row["weight"]), right=True),
    Column("RUNNING", lambda row: str(row["running"]), right=True),
    Column("PENDING", lambda row: str(row["pending"]), right=True),
)


def _number(value: float | None, form: str, none: str = "-") -> str:
    return none if value is None else f"{value:{form}}"


def show_accounts(client: DaemonConnection, names: list[str], values: Values) -> None:
    """`gctl account`: the account tree with shares, usage and fairshare factors."""
    answer = client.call("GET", f"/v1/accounts{_only(names, 'account')}")
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


def show_budgets(client: DaemonConnection, names: list[str], values: Values) -> None:
    """`gctl budget`: GPU-hours granted, used, booked and left."""
    rows = client.call("GET", f"/v1/budgets{_only(names, 'budget')}")["budgets"]
    if output.show(values, {"budgets": rows}, dict.fromkeys(row["account"] for row in rows)):
        return
    if rows:
        then = Column("THEN", lambda row: str(row["when_spent"]))
        # A daemon that was not restarted since an upgrade does not tell.
        has_fillers = any(row.get("when_spent") == "filler" for row in rows)
        sys.stdout.write(tables.listing((*_BUDGETS, then) if has_fillers else _BUDGETS, rows))
    else:
        output.note("gctl", "there is no budget; grant one with: gctl account modify NAME gpu_hours=2000")


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


def show_queues(client: DaemonConnection, names: list[str], values: Values) -> None:
    """`gctl queue`: guarantees, usage, borrowed and lent GPUs of each queue."""
    if any("=" in name for name in names):
        raise UsageError(
            "unclear whether to show or to change a queue", "to change one: gctl queue modify vision max_gpus=4"
        )
    answer = client.call("GET", f"/v1/queues{_only(names, 'queue')}")
    if not output.show(values, answer, (row["name"] for row in answer["queues"])):
        print_queues(answer["queues"], answer["loans"])
        output.note("gctl", "in GPUs; change queues with: gctl queue modify NAME max_gpus=4")


def print_queues(queues: list[dict[str, Any]], loans: list[dict[str, Any]]) -> None:
    """Print the table of queues, and a sentence for each paused queue and each loan."""
    sys.stdout.write(tables.listing(_QUEUES, queues))
    for row in queues:
        # A daemon that was not restarted since an upgrade does not tell.
        if row.get("state") == "paused" and row["paused_with"] == row["name"]:
            why = f": {printable(row['message'])}" if row["message"] else ""
            by = f"{printable(row['paused_by'])} since {tables.minute(row['paused_at'])}"
            sys.stdout.write(f"{printable(row['name'])} has been paused by {by}{why}\n")
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
        raise UsageError(f"more than one {what} was given", f"list all with: gctl {what}")
    return f"?name={quote(names[0])}" if names else ""
