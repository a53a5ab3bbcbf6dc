"""`gctl log`: who changed which settings, and when; `gctl undo`: take one of these changes back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from gpusched.cli import output
from gpusched.cli.setting_changes import FileChange
from gpusched.client import connect
from gpusched.config.document import document_of, look_up
from gpusched.config.edit import KeyChange
from gpusched.config.table_changes import Document
from gpusched.errors import NotFound, Refused, UsageError
from gpusched.model.settings import Settings
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_DEFAULT_SINCE_S = 7 * 86400


def show_log(words: Sequence[str], values: Values) -> int:
    """Print the changes of the last days, the newest last."""
    if words:
        raise UsageError(f"unexpected argument {printable(words[0], 40)!r}", "for example: gctl log --since 30d")
    since = values.get("since", time.time() - _DEFAULT_SINCE_S)
    with connect() as client:
        answer = client.call("GET", f"/v1/settings-log?since={since}")
    if values.get("json"):
        output.print_json(answer)
        return 0
    for entry in answer["entries"]:
        if values.get("quiet"):
            sys.stdout.write(f"{entry['id']}\n")
            continue
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["at"]))
        sys.stdout.write(f"{entry['id']:>4}  {at}  {printable(entry['user'], 16)}  {printable(entry['what'])}\n")
        for one in entry["changes"]:
            before, after = _shown(one["before"]), _shown(one["after"])
            sys.stdout.write(f"      {printable('.'.join(one['key']))}: {before} -> {after}\n")
        for one in entry.get("effects", ()):
            if one["before"] is not None or one["after"] is not None:
                before, after = printable(one["before"] or "none"), printable(one["after"] or "none")
                sys.stdout.write(f"      {printable(one['name'])}: {before} -> {after}\n")
    if not answer["entries"] and not values.get("quiet"):
        output.note("gctl", "no setting was changed in that time")
    return 0


def undo(words: Sequence[str], values: Values) -> int:
    """Set the keys of one change to what they were before it."""
    if len(words) != 1 or not words[0].isascii() or not words[0].isdigit():
        raise UsageError("undo needs the number of one change", "see them with: gctl log; for example: gctl undo 17")
    with connect() as client:
        entries = client.call("GET", "/v1/settings-log")["entries"]
        found = next((entry for entry in entries if str(entry["id"]) == words[0].lstrip("0")), None)
        if found is None:
            raise NotFound(f"there is no change {words[0]}", "see them with: gctl log --since 30d")
        changes = found["changes"]
        if not changes:
            raise Refused(
                f"change {found['id']} is of no setting: {printable(found['what'])}", "see what it was before: gctl log"
            )

        def made(document: Document, settings: Settings) -> Sequence[KeyChange]:
            now = document_of(settings)
            for one in changes:
                value = look_up(now, tuple(one["key"]))
                if value != one["after"]:
                    raise _changed_since(entries, found["id"], one, value)
            return [KeyChange(tuple(one["key"]), one["before"]) for one in reversed(changes)]

        what = f"gctl undo {found['id']}"
        return FileChange(client, made, values, what).carry_out(f"undid {found['id']}: {printable(found['what'])}")


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


def _shown(value: Any) -> str:
    return "unset" if value is None else printable(json.dumps(value, ensure_ascii=False), 200)
