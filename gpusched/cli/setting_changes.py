"""`gctl account|queue|qos add|modify|remove` and `account members`: change the config file, then have it reloaded.

This process writes the file, with the rights of its user: the system's daemon cannot write below /etc, and never acts
as root on a user's words. A user who must not write the file is shown the patch.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from gpusched.cli import output
from gpusched.cli.lockouts import RECENT, consequences
from gpusched.cli.query import folded_ids, quote
from gpusched.client import DaemonConnection, connect
from gpusched.config import SettingsError
from gpusched.config.document import KeyChange
from gpusched.config.edit import with_changes
from gpusched.config.file import ConfigFile
from gpusched.config.load import parse_text, settings_in
from gpusched.config.table_changes import Document, added, along, members_changed, modified, removed
from gpusched.errors import GpuschedError, Refused, UsageError
from gpusched.model.settings import Settings
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_DONE = {"add": "added", "modify": "changed", "remove": "removed", "members": "changed"}
Made = Callable[[Document, Settings], Sequence[KeyChange]]
"""The changes of a config file, from its document and its settings."""


def change_table(action: str, words: Sequence[str], values: Values) -> int:
    """Serve one command, as in `gctl account modify vision shares=4`. Raises: UserError."""
    section, verb = action.split()
    if not words:
        raise UsageError(f"gctl {action} needs a name", f"for example: gctl {action} vision")
    name, *pairs = words
    to = values.get("to")
    if verb == "remove":
        output.no_operands(pairs, f"for example: gctl {action} {name}")

    def made(document: Document, _: Settings) -> Sequence[KeyChange]:
        if verb == "add":
            default = along(document, section, name)
            change.also = "" if default is None else f", and queue {printable(default)} for jobs that name none"
            return added(document, section, name, pairs)
        if verb == "modify":
            return modified(document, section, name, pairs)
        if verb == "members":
            return members_changed(document, name, pairs)
        return removed(document, section, name, to)

    what = shlex.join(["gctl", section, verb, *words, *(["--to", to] if to is not None else [])])
    with connect() as client:
        if verb == "members" and _is_for_coordinator(client, name):
            return _ask_for_members(client, name, pairs, what, values)
        change = FileChange(client, made, values, what)
        if verb == "remove":
            _move_jobs(client, section, name, to, is_dry=True)
            change.before_write = lambda: _move_jobs(client, section, name, to, is_dry=False)
        return change.carry_out(f"{_DONE[verb]} {section} {printable(name)}")


def _is_for_coordinator(client: DaemonConnection, account: str) -> bool:
    """Whether the caller coordinates the account and cannot write the config file: then the daemon keeps the change."""
    if account not in client.call("GET", "/v1/accounts").get("coordinated_accounts", ()):
        return False
    return not os.access(client.call("GET", "/v1/status")["daemon"]["config"], os.W_OK)


def _ask_for_members(client: DaemonConnection, account: str, words: Sequence[str], what: str, values: Values) -> int:
    if values.get("dry_run"):
        raise UsageError("--dry-run prints a change of the config file; this one is the daemon's", "leave it out")
    changes: dict[str, list[str]] = {"add": [], "remove": []}
    for word in words:
        verb, _, text = word.partition("=")
        if verb not in changes or not text:
            hint = f"for example: gctl account members {account} add=bob remove=carl"
            raise UsageError(f"{printable(word, 40)!r} is neither add=NAMES nor remove=NAMES", hint)
        changes[verb] += text.split(",")
    answer = client.call("POST", "/v1/members", {"account": account, **changes, "what": what})
    if not output.show(values, {"members": answer["members"]}, ()):
        sys.stdout.write(f"changed account {printable(account)}\n")
    return 0


class FileChange:
    """One change of the daemon's config file, from the words to the settings in force."""

    def __init__(self, client: DaemonConnection, made: Made, values: Values, what: str) -> None:
        """Args: what: the command, for the record of settings."""
        self._client = client
        self._made = made
        self._values = values
        self._what = what
        self.also = ""
        """What else the report of success says."""
        self.before_write: Callable[[], None] | None = None
        """What must be done first, once it is certain that the change is wanted."""
        where = client.call("GET", "/v1/status")["daemon"]["config"]
        self._file = ConfigFile(where)

    def carry_out(self, done: str) -> int:
        """Ask, write, reload and report. Raises: UserError, after which file and settings are as before."""
        seen = self._file.read()
        text, before, after = self._changed(seen)
        patch = self._patch(seen, text)
        if not patch:
            if self._values.get("json"):
                output.print_json({"changed": [], "file": self._file.path, "patch": ""})
            else:
                output.note("gctl", "nothing to change")
            return 0
        found = consequences(self._client, before, after)
        for note in found.notes:
            output.note("gctl", printable(note))
        shut_out = f"this shuts out {RECENT}: {printable('; '.join(found.shut_out))}" if found.shut_out else ""
        if self._values.get("dry_run"):
            if shut_out:
                output.note("gctl", shut_out)
            self._print_patch(patch)
            return 0
        is_asked = output.asks(self._values)
        if shut_out and not (is_asked or self._values.get("yes")):
            raise Refused(
                f"{shut_out}; nothing was changed", "name them as well, or confirm with --yes that they are to be out"
            )
        if shut_out:
            output.note("gctl", shut_out)
        if is_asked:
            sys.stderr.write(patch)
            output.confirm("gctl", f"change {self._file.path}", "nothing was changed")
        for editor in self._file.editors():
            output.note(
                "gctl", f"an editor may have {self._file.path} open ({editor}); what it saves replaces this change"
            )
        try:
            with self._file.locked():
                now = self._file.read()
                if now != seen and not is_asked:
                    # Another command was quicker; its change stays.
                    seen, (text, *_) = now, self._changed(now)
                    patch = self._patch(seen, text)
                if self.before_write is not None:
                    self.before_write()
                self._file.replace(text.encode(), seen)
                answer = self._reloaded(seen, text)
        except PermissionError:
            self._print_patch(patch)
            raise Refused(
                f"you may not write {self._file.path}; nothing was changed",
                "as root: sudo gctl ...; or have this patch applied, then: gctl reload",
            ) from None
        document = {"file": self._file.path, "patch": patch, **answer}
        if not output.show(self._values, document, answer["changed"]):
            sys.stdout.write(f"{done}{self.also}\n")
            output.notes("gctl", answer)
        return 0

    def _changed(self, content: bytes | None) -> tuple[str, Settings, Settings]:
        """The new text, and the settings of both. Raises: UserError."""
        text = self._file.text(content)
        try:
            settings = settings_in(text, self._file.path)
        except SettingsError as error:
            raise Refused(f"the config file has a mistake already: {error.message}", error.hint) from None
        changed = with_changes(text, self._made(parse_text(text), settings))
        return changed, settings, settings_in(changed, self._file.path)

    def _reloaded(self, seen: bytes | None, text: str) -> dict[str, Any]:
        try:
            return self._client.call("POST", "/v1/reload", {"what": self._what})
        except GpuschedError as error:
            if not isinstance(error, (Refused, UsageError)) and error.code not in ("forbidden", "not_ready"):
                output.note("gctl", f"{self._file.path} is changed; the daemon reads it when it starts next")
                raise
            self._file.replace(seen, text.encode())
            raise Refused(f"{error.message}; {self._file.path} is as it was", error.hint) from None

    def _patch(self, seen: bytes | None, text: str) -> str:
        before = self._file.text(seen).splitlines(keepends=True)
        name = self._file.path
        lines = difflib.unified_diff(before, text.splitlines(keepends=True), name, name, n=2)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def _print_patch(self, patch: str) -> None:
        if self._values.get("json"):
            output.print_json({"changed": [], "file": self._file.path, "patch": patch})
        else:
            sys.stdout.write("".join(f"{printable(line)}\n" for line in patch.splitlines()))


def check_unused(client: DaemonConnection, section: str, name: str) -> None:
    """Refuse to remove what unfinished jobs belong to. Raises: Refused."""
    _move_jobs(client, section, name, None, is_dry=True)


def _move_jobs(client: DaemonConnection, section: str, name: str, to: str | None, *, is_dry: bool) -> None:
    """Refuse to remove what unfinished jobs belong to; with `to`, move them if all are pending. Raises: Refused."""
    query = f"&queues={quote(name)}" if section == "queue" else ""
    rows = client.call("GET", f"/v1/jobs?fields=id,state,{section}{query}")["rows"]
    jobs = [(job_id, state) for job_id, state, of in rows if of == name]
    started = [job_id for job_id, state in jobs if state != "PENDING"]
    if not jobs:
        return
    if to is None or started:
        ids = started if to is not None else [job_id for job_id, _ in jobs]
        hint = f"wait for them, or cancel them: gcancel {folded_ids(ids).partition(' ')[0]}"
        if to is None:
            hint = f"move them with: gctl {section} remove {name} --to NAME" if not started else hint
        kind = "running" if to is not None else "unfinished"
        raise Refused(f"{section} {printable(name)} has {kind} jobs: {folded_ids(ids)}", hint)
    if not is_dry:
        request = {"ids": [job_id for job_id, _ in jobs], "changes": {section: to}}
        client.call("POST", "/v1/jobs/update", request)
