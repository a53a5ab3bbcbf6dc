"""Audit record of actions on other users' jobs and of refusals: JSON lines, readable by root only.

There are two files, each rotated by size, so that refusals, which any user can cause by the million, do not
push out actions. The first refusals of a user in each minute are written one by one, the rest as one line
with their number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger

from gpusched.daemon.commit import AuditEvent
from gpusched.model.commands import Caller
from gpusched.model.mentions import render
from gpusched.model.settings import AccessSettings

log = getLogger("gpusched.daemon")

DEEDS = "audit.jsonl"
REFUSALS = "refusals.jsonl"
PER_MINUTE = 20
"""Refusals per user and minute that are written one by one."""
_MINUTE_S = 60.0
_LONGEST = 400
"""Longest text under a client's control, in characters."""


@dataclass(slots=True)
class _Spell:
    """One user's refusals since `began_at`."""

    caller: Caller
    began_at: float
    written: int = 0
    left_out: int = 0


class Audit:
    """Writes the audit record. Lines that a full disk does not take are lost, counted and logged."""

    def __init__(self, folder: str, clock: Callable[[], float], settings: Callable[[], AccessSettings]) -> None:
        """Args: folder: must exist; clock: UTC epoch seconds; settings: returns the current ones."""
        self._folder = folder
        self._clock = clock
        self._settings = settings
        self._spells: dict[int, _Spell] = {}
        self.lost = 0
        """Lines lost since the last successful write."""

    def record(self, event: AuditEvent) -> None:
        """Record an action or a refused attempt."""
        target = {"target": event.target} | ({} if event.owner is None else {"owner": event.owner})
        if event.refused is not None:
            self._refuse(event.caller, {"what": event.what, **target, "why": event.refused})
            return
        self._write(DEEDS, {"at": self._clock(), **_who(event.caller), "what": event.what, **target})

    def refused(self, caller: Caller, what: str, why: str) -> None:
        self._refuse(caller, {"what": what, "why": why})

    def poll(self) -> None:
        """Write the number of omitted refusals for minutes that are over."""
        now = self._clock()
        for uid, spell in list(self._spells.items()):
            # A clock that is set back must not keep a spell forever.
            if not 0 <= now - spell.began_at < _MINUTE_S:
                self._close(uid)

    def close(self) -> None:
        """Write the number of all omitted refusals."""
        for uid in list(self._spells):
            self._close(uid)

    def _refuse(self, caller: Caller, words: dict[str, str]) -> None:
        self.poll()
        spell = self._spells.get(caller.uid)
        if spell is None:
            spell = self._spells[caller.uid] = _Spell(caller, self._clock())
        if spell.written >= PER_MINUTE:
            spell.left_out += 1
            return
        spell.written += 1
        self._write(REFUSALS, {"at": self._clock(), **_who(caller), **words})

    def _close(self, uid: int) -> None:
        spell = self._spells.pop(uid)
        if spell.left_out:
            words = {"what": "more refusals", "times": spell.left_out, "since": spell.began_at}
            self._write(REFUSALS, {"at": self._clock(), **_who(spell.caller), **words})

    def _write(self, name: str, words: dict[str, object]) -> None:
        cut = {key: render(value)[:_LONGEST] if isinstance(value, str) else value for key, value in words.items()}
        line = json.dumps(cut).encode() + b"\n"
        path = os.path.join(self._folder, name)
        try:
            self._rotate(path, len(line))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o600)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                log.error("the audit record %s cannot be written: %s", path, error.strerror)
        else:
            if self.lost:
                log.error("the audit record lacks %d lines that could not be written", self.lost)
                self.lost = 0

    def _rotate(self, path: str, more: int) -> None:
        settings = self._settings()
        try:
            size = os.stat(path, follow_symlinks=False).st_size
        except FileNotFoundError:
            return
        if size + more <= settings.audit_mib * (1 << 20):
            return
        for number in range(settings.audit_files, 0, -1):
            older = f"{path}.{number}"
            newer = path if number == 1 else f"{path}.{number - 1}"
            if os.path.lexists(newer):
                os.replace(newer, older)


def _who(caller: Caller) -> dict[str, object]:
    who: dict[str, object] = {"uid": caller.uid, "user": caller.user, "pid": caller.pid}
    return {**who, "through": caller.through} if caller.through else who
