"""gctl: hold, release, suspend, resume, requeue and update jobs; drain, undrain and reserve nodes and GPUs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from gpusched import paths
from gpusched.cli import output
from gpusched.cli.actions import ACTIONS, find_action, gctl_table, unknown_action
from gpusched.cli.job_options import UPDATES, read_change
from gpusched.cli.parse import parse
from gpusched.cli.query import check_names, folded_ids, ids_in, mine
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.option import CommandLine, OptionError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values


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
_FILTERS = ("users", "names", "queues", "states", "me", "all")
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
    table = everything = gctl_table()
    line = CommandLine(table.by_name, words, permutes=True, has_equals=True)
    with suppress(OptionError):  # raised by `parse`, unless the options of the action leave no doubt
        for _ in line:
            pass
    action = find_action(line.operands)
    if action is not None:
        table = action.table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table if values.get("help") else everything, values, operands):
        return 0
    if action is None:
        raise unknown_action(operands)
    return action.function()(action.name, operands[len(action.name.split()) :], values)


def change_jobs(action: str, words: list[str], values: Values) -> int:
    """Hold, release, suspend, resume, requeue or update jobs."""
    filters = [name for name in _FILTERS if name in values]
    if words and filters:
        raise UsageError(
            "ids and filters were both given", f"give one or the other, for example: gctl {action} -n sweep"
        )
    if not (words or filters):
        raise _no_target(action)
    request: dict[str, Any]
    if action == "update":
        pairs = [word for word in words if "=" in word]
        request = {"ids": ids_in([word for word in words if "=" not in word]), "changes": _changes(pairs)}
    else:
        request = _choice(values) if filters else {"ids": ids_in(words)}
        if values.get("hold"):
            request["hold"] = True
    path = f"/v1/jobs/{action}"
    with connect() as client:
        check_names(client, values.get("users", []), values.get("queues", []))
        if filters and output.asks(values):
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


def change_nodes(action: str, words: list[str], values: Values) -> int:
    """Drain or undrain nodes and GPUs, or declare nodes down."""
    if not words:
        raise _no_target(action)
    request: Values = {key: values[key] for key in ("message", "confirm") if key in values}
    request["targets"] = ids_in(words)
    with connect() as client:
        answer = client.call("POST", f"/v1/{action}", request)
    if not output.show(values, answer, answer["changed"]):
        _tell(action, answer)
    return 0


def _no_target(action: str) -> UsageError:
    return UsageError(f"{action} needs a target", ACTIONS[action].text)


def _choice(values: Values) -> dict[str, Any]:
    """The filters in the form of the API."""
    return {
        "users": [*values.get("users", ()), *mine(values)],
        **{key: values.get(key, []) for key in ("names", "queues", "states")},
        "all": values.get("all", False),
    }


def _ask(action: str, ids: list[str]) -> None:
    if len(ids) > 1:
        output.confirm("gctl", f"{action} {folded_ids(ids)}", f"nothing was {_DONE[action]}")


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
    output.notes("gctl", answer)
    for kept in answer.get("kept", ()):
        gpus, them = ("its GPU", "it") if kept["gpus"] == 1 else (f"its {kept['gpus']} GPUs", "them")
        job_id = kept["id"]
        output.note("gctl", f"{job_id} keeps {gpus} while suspended; to free {them}: gctl requeue {job_id}")


def reload(_: str, rest: list[str], values: Values) -> int:
    """Have the config file read again; returns 1 if a file could not be read."""
    if rest:
        raise UsageError(f"reload takes no arguments, but {printable(rest[0], 40)!r} was given", ACTIONS["reload"].text)
    with connect() as client:
        answer = client.call("POST", "/v1/reload", {})
        if any(path.startswith(("account.", "queue.", "default.")) for path in answer["changed"]):
            from gpusched.cli.lockouts import notes_of_file  # reads the config file

            answer["notes"] = [*answer.get("notes", ()), *notes_of_file(client)]
    code = 1 if answer.get("failed") else 0
    if not output.show(values, answer, answer["changed"]):
        sys.stdout.write("".join(f"reloaded {printable(path)}\n" for path in answer["changed"]))
        if not answer["changed"] and not answer["needs_restart"]:
            output.note("gctl", "the settings have not changed")
    if values.get("json"):
        return code
    for path in answer["needs_restart"]:
        output.note("gctl", f"{printable(path)} takes effect after a restart: {paths.restart_command()}")
    output.notes("gctl", answer)
    for path, text in answer.get("failed", {}).items():
        output.note("gctl", f"{path} was not reloaded: {printable(text)}; what was read before stays in force")
    return code


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
            raise UsageError(f"{key}: {error}", ACTIONS["update"].text) from None
    if not changes:
        raise UsageError("nothing to change", ACTIONS["update"].text)
    return changes
