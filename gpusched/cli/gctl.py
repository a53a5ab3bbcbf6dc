"""gctl: hold, release, suspend, resume, requeue and update jobs; drain, undrain and reserve nodes and GPUs."""

from __future__ import annotations

import sys

from gpusched import paths
from gpusched.cli import output, reserving
from gpusched.cli.arrays import folded_ids
from gpusched.cli.options import gctl_table
from gpusched.cli.parse import parse
from gpusched.cli.query import check_names, mine
from gpusched.cli.updates import ACTIONS, CLEARED, UPDATES
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
}
_TOLD = 10
_FILTERS = ("of_users", "names", "queues", "states", "me", "all")
_AS_IT_WAS = {
    "hold": "was held already",
    "release": "was not held",
    "suspend": "was suspended already",
    "resume": "was not suspended",
    "undrain": "was not drained",
}


def main() -> int:
    """Entry point."""
    return output.run("gctl", body)


def body(words: list[str]) -> int:
    """Do it; returns the exit code."""
    table = gctl_table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table, values):
        return 0
    if not operands or operands[0] not in ACTIONS:
        what = f"{printable(operands[0], 40)!r} is no action" if operands else "no action is named"
        raise UsageError(what, "actions: " + ", ".join(ACTIONS) + "; see gctl --help")
    action, rest = operands[0], operands[1:]
    if "message" in values and action not in ("drain", "reserve"):
        raise UsageError(f"-m goes with drain and reserve, not with {action}", "see: gctl --help")
    odd = [name for name in reserving.FIELDS if name in values and action != "reserve"]
    if odd:
        raise UsageError(f"options of reserve do not go with {action}", "see: gctl --help")
    chosen = [name for name in (*_FILTERS, "yes") if name in values]
    if chosen and action not in ("hold", "release") and not (action == "account" and chosen == ["me"]):
        raise UsageError(f"filters go with hold and release, not with {action}", "see: gctl --help")
    if "hold" in values and action != "requeue":
        raise UsageError(f"--hold goes with requeue, not with {action}", "to hold pending jobs: gctl hold 41")
    if "judge" in values and action != "preset":
        raise UsageError(f"--judge goes with preset, not with {action}", "see: gctl --help")
    if action == "reload":
        return _reload(rest, values)
    if action == "preset":
        from gpusched.cli import presets  # tables that no other action prints

        return presets.show(rest, values)
    if action == "reserve":
        return reserving.reserve(rest, values)
    if action == "unreserve":
        return reserving.unreserve(_split(rest), values)
    if action in ("account", "queue"):
        return _show(action, rest, values)
    filters = [name for name in _FILTERS if name in values]
    if rest and filters:
        raise UsageError("ids and filters were both given", f"name jobs, or say which: gctl {action} -n sweep")
    if not (rest or filters):
        raise UsageError(f"{action} needs to know what", ACTIONS[action])
    request: dict[str, Any]
    if action in ("drain", "undrain"):
        path = f"/v1/{action}"
        request = {"targets": _split(rest)}
        if "message" in values:
            request["message"] = values["message"]
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
        answer = client.call("POST", path, request)
    changes = request.get("changes", {})
    if changes.get("notify") or changes.get("notify_to"):
        from gpusched.cli.notifying import say_nobody  # reads the user's targets

        say_nobody("gctl", changes.get("notify_to") or ())
    if values.get("json"):
        output.print_json(answer)
    elif values.get("quiet"):
        sys.stdout.write("".join(f"{name}\n" for name in answer["changed"]))
    else:
        _tell("requeue and hold" if values.get("hold") else action, answer)
        if filters and not answer["changed"]:
            output.note("gctl", "no job matches")
    return 0


def _choice(values: dict[str, Any]) -> dict[str, Any]:
    """The filters as the API takes them."""
    return {
        "users": [*values.get("of_users", ()), *mine(values)],
        **{key: values.get(key, []) for key in ("names", "queues", "states")},
        "all": values.get("all", False),
    }


def _ask(action: str, ids: list[str]) -> None:
    if len(ids) > 1:
        output.confirm("gctl", f"{action} {folded_ids(ids)}", f"nothing was {_DONE[action]}")


def _show(action: str, names: list[str], values: dict[str, Any]) -> int:
    from gpusched.cli import standing  # tables that no other action prints

    with connect() as client:
        (standing.show_accounts if action == "account" else standing.show_queues)(client, names, values)
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
        go_on = "goes on until its run ends" if len(running) == 1 else "go on until their runs end"
        ids = " ".join(running) if len(running) <= _TOLD else "ID"
        output.note(
            "gctl",
            f"{folded_ids(running)} {go_on}, and may not start again before it is released; to stop it now: "
            f"gctl requeue --hold {ids}, or gctl suspend {ids}",
        )
    for text in answer.get("notes", ()):
        output.note("gctl", printable(text))
    for kept in answer.get("kept", ()):
        gpus, them = ("its GPU", "it") if kept["gpus"] == 1 else (f"its {kept['gpus']} GPUs", "them")
        job_id = kept["id"]
        output.note("gctl", f"{job_id} keeps {gpus} meanwhile; to let others have {them}: gctl requeue {job_id}")


def _reload(rest: list[str], values: dict[str, Any]) -> int:
    if rest:
        raise UsageError(f"reload takes no operand, not {printable(rest[0], 40)!r}", ACTIONS["reload"])
    with connect() as client:
        answer = client.call("POST", "/v1/reload", {})
    if values.get("json"):
        output.print_json(answer)
        return 0
    for path in answer["changed"]:
        sys.stdout.write(f"{printable(path)}\n" if values.get("quiet") else f"reloaded {printable(path)}\n")
    if not answer["changed"] and not answer["needs_restart"] and not values.get("quiet"):
        output.note("gctl", "the settings have not changed")
    for path in answer["needs_restart"]:
        output.note("gctl", f"{printable(path)} counts after a restart: {paths.restart_command()}")
    for text in answer.get("notes", ()):
        output.note("gctl", printable(text))
    return 0


def _split(words: list[str]) -> list[str]:
    return [word for operand in words for word in split_ids(operand)]


def _changes(pairs: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        key = name.lower().replace("_", "-")
        if key not in UPDATES:
            raise UsageError(f"{printable(name, 40)!r} cannot be updated", "there are: " + ", ".join(UPDATES))
        if not text:
            changes[CLEARED.get(key, key.replace("-", "_"))] = None
            continue
        try:
            changes.update(UPDATES[key](text))
        except ValueError as error:
            raise UsageError(f"{key}: {error}", ACTIONS["update"]) from None
    if not changes:
        raise UsageError("nothing to change", ACTIONS["update"])
    return changes
