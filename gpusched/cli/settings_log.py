"""`gctl log`: who changed which settings, and when; `gctl undo`: take one of these changes back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from gpusched.cli import output
from gpusched.cli.setting_changes import FileChange
from gpusched.cli.tables import minute
from gpusched.client import connect
from gpusched.config.document import KeyChange, document_of, look_up
from gpusched.config.table_changes import Document
from gpusched.errors import NotFound, Refused, UsageError
from gpusched.model.settings import Settings
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection

_OF_TABLE = ("credit", "user_limit", "member", "queue_pause")
"""Sections of the record that the daemon keeps in the job table."""
_DEFAULT_SINCE_S = 7 * 86400


def show_log(_: str, words: Sequence[str], values: Values) -> int:
    """Print the changes of the last days, the newest last."""
    output.no_operands(words, "for example: gctl log --since 30d")
    since = values.get("since", time.time() - _DEFAULT_SINCE_S)
    with connect() as client:
        answer = client.call("GET", f"/v1/settings-log?since={since}")
    if output.show(values, answer, (entry["id"] for entry in answer["entries"])):
        return 0
    for entry in answer["entries"]:
        at = minute(entry["at"])
        sys.stdout.write(f"{entry['id']:>4}  {at}  {printable(entry['user'], 16)}  {printable(entry['what'])}\n")
        for one in entry["changes"]:
            before, after = (_shown_of(one["key"], one[when]) for when in ("before", "after"))
            sys.stdout.write(f"      {printable('.'.join(one['key']))}: {before} -> {after}\n")
        for one in entry.get("effects", ()):
            if one["before"] is not None or one["after"] is not None:
                before, after = printable(one["before"] or "none"), printable(one["after"] or "none")
                sys.stdout.write(f"      {printable(one['name'])}: {before} -> {after}\n")
    if not answer["entries"]:
        output.note("gctl", "no setting was changed in that time")
    return 0


def undo(_: str, words: Sequence[str], values: Values) -> int:
    """Set the keys of one change to what they were before it."""
    if len(words) != 1 or not is_digits(words[0]):
        raise UsageError("undo needs the number of one change", "see them with: gctl log; for example: gctl undo 17")
    with connect() as client:
        entries = client.call("GET", "/v1/settings-log")["entries"]
        found = next((entry for entry in entries if str(entry["id"]) == words[0].lstrip("0")), None)
        if found is None:
            raise NotFound(f"there is no change {words[0]}", "see them with: gctl log --since 30d")
        changes = found["changes"]
        if not changes:
            raise Refused(
                f"change {found['id']} does not concern a setting: {printable(found['what'])}",
                "see what it was before: gctl log",
            )
        if any(one["key"][0] in _OF_TABLE for one in changes):
            return _undo_in_table(client, found, values)

        def made(document: Document, settings: Settings) -> Sequence[KeyChange]:
            now = document_of(settings)
            for one in changes:
                value = look_up(now, tuple(one["key"]))
                if value != one["after"]:
                    raise _changed_since(entries, found["id"], one, value)
            return [KeyChange(tuple(one["key"]), one["before"]) for one in reversed(changes)]

        what = f"gctl undo {found['id']}"
        return FileChange(client, made, values, what).carry_out(f"undid {found['id']}: {printable(found['what'])}")


def _undo_in_table(client: DaemonConnection, found: dict[str, Any], values: Values) -> int:
    """Undo a change of limits or credits, which the daemon keeps itself."""
    if values.get("dry_run"):
        for one in found["changes"]:
            after, before = (_shown_of(one["key"], one[when]) for when in ("after", "before"))
            sys.stdout.write(f"{printable('.'.join(one['key']))}: {after} -> {before}\n")
        return 0
    client.call("POST", "/v1/settings-log/undo", {"id": found["id"]})
    if not output.show(values, {"undone": found["id"]}, ()):
        sys.stdout.write(f"undid {found['id']}: {printable(found['what'])}\n")
    return 0


def _changed_since(entries: Sequence[dict[str, Any]], number: int, one: dict[str, Any], value: Any) -> Refused:
    """The refusal, with the later change of this key, or of what is above or below it, if it is known."""
    path, key = ".".join(one["key"]), one["key"]
    touched = [
        entry["id"]
        for entry in entries
        if entry["id"] > number
        and any(other["key"][: len(key)] == key[: len(other["key"])] for other in entry["changes"])
    ]
    later = f"undo that first: gctl undo {touched[-1]}" if touched else "see: gctl log"
    return Refused(f"{printable(path)} is {_shown(value)} now, no longer {_shown(one['after'])}", later)


def _shown_of(key: Sequence[str], value: Any) -> str:
    """A value; of limits and credits, what they say."""
    if key[0] not in _OF_TABLE or value is None:
        return _shown(value)
    if key[0] == "member":
        return "added" if value.get("is_member") else "removed"
    parts = [f"{name}={value[name]:g}" for name in ("gpu_hours", "max_gpus", "max_jobs") if name in value]
    parts += [f"account={value['account']}"] if value.get("account") else []
    if "until_at" in value:
        parts.append("until " + minute(value["until_at"]))
    if value.get("message"):
        parts.append(json.dumps(value["message"], ensure_ascii=False))
    return printable(" ".join(parts), 200)


def _shown(value: Any) -> str:
    return "unset" if value is None else printable(json.dumps(value, ensure_ascii=False), 200)
