"""gctl: hold, release, suspend, resume, requeue and update jobs; drain, undrain and reserve nodes and GPUs."""

from __future__ import annotations

import os
import sys

from gpusched import paths
from gpusched.cli import output
from gpusched.cli.accounts import show_accounts, show_budgets, show_queues
from gpusched.cli.job_options import UPDATES, read_change
from gpusched.cli.options import ACTIONS, gctl_table
from gpusched.cli.parse import parse
from gpusched.cli.query import check_names, folded_ids, mine
from gpusched.cli.reservations import FIELDS, reserve, unreserve
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
