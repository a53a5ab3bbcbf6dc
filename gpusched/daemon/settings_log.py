"""Record of every change of the settings: who made it, with which command, and what was before.

One file of JSON lines, each synced before the change counts as recorded. The settings known last are the sum of its
lines, so a change of the file that no command reported (an editor, or a command killed before the reload) is found and
recorded at the next reload or start, and none is recorded twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from logging import getLogger
from types import MappingProxyType
from typing import Any

from gpusched.config.document import Difference, differences, document_of, with_differences
from gpusched.daemon.commit import SettingEffect
from gpusched.model.commands import Caller
from gpusched.model.settings import Settings

log = getLogger("gpusched.daemon")

NOTHING: Mapping[str, Any] = MappingProxyType({})
LONGEST = 400
"""Longest command line that is kept, in characters."""
_MOST_BYTES = 8 << 20
_KEPT = 1000
"""Changes kept when the file has grown beyond that."""


class SettingsLog:
    """The record of one daemon. A disk that takes no line loses none: the next change includes it."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._known: dict[str, Any] | None = None
        self._entries: list[dict[str, Any]] = []
        self._begun_at: float | None = None
        """When its first document held; None in a record of a version that did not note it."""
        self._read()

    def record(self, settings: Settings, caller: Caller, what: str, table: Mapping[str, Any] = NOTHING) -> None:
        """Record what differs from the settings known so far; nothing if that is nothing.

        Args: table: sections of the settings in the job table, see `model.table_settings.document_of_table`.
        """
        document = {**document_of(settings), **table}
        if self._known is None:
            at = self._clock()
            self._write([{"id": 0, "at": at, "document": document}], os.O_TRUNC)
            self._known, self._begun_at = document, at
            return
        found = differences(self._known, document)
        if not found:
            return
        changes = [{"key": list(one.key), "before": one.before, "after": one.after} for one in found]
        self._add(caller, what, {"changes": changes})
        self._known = document

    def note(self, effect: SettingEffect) -> None:
        """Record a change of a machine, which no setting has."""
        if self._known is not None:
            effects = [{"name": effect.key, "before": effect.before, "after": effect.after}]
            self._add(effect.caller, effect.what, {"changes": [], "effects": effects})

    def _add(self, caller: Caller, what: str, more: Mapping[str, Any]) -> None:
        number = self._entries[-1]["id"] + 1 if self._entries else 1
        who = {"uid": caller.uid, "user": caller.user, "what": what[:LONGEST]}
        entry = {"id": number, "at": self._clock(), **who, **more}
        self._write([entry], os.O_APPEND)
        self._entries.append(entry)

    def entries(self, since: float, limit: int) -> list[dict[str, Any]]:
        """The newest changes since then, oldest first."""
        return [entry for entry in self._entries if entry["at"] >= since][-limit:]

    def document_before(self, at: float) -> dict[str, Any] | None:
        """The settings as they were just before an instant, as a document; None where the record begins later."""
        if self._known is None:
            return None
        earlier = [entry["at"] for entry in self._entries if entry["at"] < at]
        if not earlier and (self._begun_at is None or self._begun_at >= at):
            return None
        document = self._known
        for entry in reversed(self._entries):
            if entry["at"] >= at:
                undone = [Difference(tuple(one["key"]), one["after"], one["before"]) for one in entry["changes"]]
                document = with_differences(document, undone)
        return document

    def entry(self, number: int) -> dict[str, Any] | None:
        return next((entry for entry in self._entries if entry["id"] == number), None)

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        try:
            first, *rest = [json.loads(line) for line in whole.splitlines()]
            known, begun_at = first["document"], first.get("at")
            for entry in rest:
                made = [Difference(tuple(one["key"]), one["before"], one["after"]) for one in entry["changes"]]
                known = with_differences(known, made)
        except (ValueError, KeyError, TypeError) as error:
            # Begun again; the damaged one stays for a person to look at.
            log.error("the record of settings %s is damaged (%s); a new one is begun", self._path, error)
            os.replace(self._path, f"{self._path}.damaged")
            return
        self._known, self._entries, self._begun_at = known, rest, begun_at
        if len(whole) < len(content):
            # A line that was cut short was never counted.
            os.truncate(self._path, len(whole))
        if len(whole) > _MOST_BYTES:
            self._shorten(first["document"])

    def _shorten(self, document: dict[str, Any]) -> None:
        dropped, self._entries = self._entries[:-_KEPT], self._entries[-_KEPT:]
        for entry in dropped:
            self._begun_at = entry["at"]
            made = [Difference(tuple(one["key"]), one["before"], one["after"]) for one in entry["changes"]]
            document = with_differences(document, made)
        draft = f"{self._path}.new"
        path, self._path = self._path, draft
        try:
            self._write([{"id": 0, "at": self._begun_at, "document": document}, *self._entries], os.O_TRUNC)
        finally:
            self._path = path
        os.replace(draft, path)

    def _write(self, lines: list[dict[str, Any]], how: int) -> None:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        flags = os.O_WRONLY | os.O_CREAT | how | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            try:
                if os.write(fd, content) != len(content):
                    raise OSError(28, os.strerror(28), self._path)
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
