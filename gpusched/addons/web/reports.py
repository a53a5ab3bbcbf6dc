"""Reports of the simulator: files with what `gpusched simulate --json` prints, in a folder that an admin fills.

Pages show sums by policy and no users: a report of the machine's own history names them, and every user may look.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gpusched.errors import NotFound, Refused
from gpusched.model.units import format_duration

MOST_BYTES = 8 << 20
MOST_REPORTS = 200
_MOST_POLICIES = 12
_SHORTEST = 0.05
"""Length of the bar of the least value."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENDING = ".json"


def _decimal(value: float) -> str:
    return f"{value:,.2f}"


def _part(value: float) -> str:
    return f"{100 * value:.1f}%"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


MEASURES: tuple[tuple[str, tuple[str, ...], Callable[[float], str], int], ...] = (
    ("jobs", ("jobs",), _whole, 0),
    ("wait, mean", ("wait_s", "mean"), format_duration, -1),
    ("wait, median", ("wait_s", "median"), format_duration, -1),
    ("wait, p95", ("wait_s", "p95"), format_duration, -1),
    ("wait, most", ("wait_s", "most"), format_duration, -1),
    ("wait of wide jobs", ("wide_wait_s",), format_duration, -1),
    ("completion, mean", ("completion_s", "mean"), format_duration, -1),
    ("slowdown, mean", ("slowdown", "mean"), _decimal, -1),
    ("slowdown, p95", ("slowdown", "p95"), _decimal, -1),
    ("makespan", ("makespan_s",), format_duration, -1),
    ("jobs per hour", ("jobs_per_hour",), _decimal, 1),
    ("utilisation", ("utilisation",), _part, 1),
    ("idle, unusable for pending jobs", ("fragmentation",), _part, -1),
    ("fairness of users' slowdowns", ("user_fairness",), _decimal, 1),
    ("fairness of dominant shares", ("dominant_fairness",), _decimal, 1),
    ("preemptions", ("preemptions",), _whole, -1),
)
"""What a report shows: its name, its keys in the document of a policy, how it is written, and whether more is better
(1) or worse (-1)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure under one policy."""

    text: str
    part: float | None
    """Place between the least and the largest of its line, from 0 to 1; None for a missing one."""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """One comparison of policies."""

    id: str
    trace: str
    policies: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Measured, ...]], ...]
    notes: tuple[str, ...]


class Reports:
    """The reports of one folder, which may change at any time."""

    def __init__(self, folder: str | None = None) -> None:
        """Args: folder: None for none."""
        self._folder = folder

    @property
    def is_there(self) -> bool:
        return self._folder is not None

    def listing(self) -> list[tuple[str, float]]:
        """Ids with the time of their last change, the newest first. Raises: Refused."""
        found = []
        try:
            with os.scandir(self._folder or "") as entries:
                for entry in entries:
                    name, ending = os.path.splitext(entry.name)
                    with suppress(OSError):
                        if ending == _ENDING and _ID.fullmatch(name) and entry.is_file(follow_symlinks=False):
                            found.append((name, entry.stat(follow_symlinks=False).st_mtime))
        except OSError as error:
            raise Refused(f"the reports cannot be read: {error.strerror}", "ask an admin") from None
        return sorted(found, key=lambda one: -one[1])[:MOST_REPORTS]

    def read(self, report_id: str) -> Report:
        """One report. Raises: NotFound, Refused."""
        missing = NotFound("there is no such report", "go to the reports")
        if self._folder is None or _ID.fullmatch(report_id) is None:
            raise missing
        try:
            # A pipe would block, and a link could lead anywhere.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(os.path.join(self._folder, report_id + _ENDING), flags)
        except OSError:
            raise missing from None
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise missing
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise Refused(f"this report is larger than {MOST_BYTES >> 20} MiB", "read it with: jq . FILE")
        try:
            return read_report(report_id, json.loads(content))
        except (ValueError, TypeError, RecursionError):
            raise Refused("this file is not a report", "write one with: gpusched simulate TRACE --json") from None


def read_report(report_id: str, document: Any) -> Report:
    """What a document says. Raises: ValueError, TypeError for one of another kind."""
    if not isinstance(document, dict) or not isinstance(document.get("policies"), list):
        raise TypeError("no report")
    policies = [one for one in document["policies"] if isinstance(one, dict)][:_MOST_POLICIES]
    if not policies:
        raise ValueError("no policies")
    lines = []
    for title, keys, shown, sign in MEASURES:
        values = [_number(one, keys) for one in policies]
        if known := [value for value in values if value is not None]:
            lines.append((title, tuple(_measured(value, known, shown, sign) for value in values)))
    notes = document.get("notes")
    return Report(
        report_id,
        str(document.get("trace", "")),
        tuple(str(one.get("policy", "")) for one in policies),
        tuple(lines),
        tuple(str(note) for note in notes[:20]) if isinstance(notes, list) else (),
    )


def _measured(value: float | None, known: list[float], shown: Callable[[float], str], sign: int) -> Measured:
    if value is None:
        return Measured("n/a", None)
    least, most = min(known), max(known)
    part = _SHORTEST + (1 - _SHORTEST) * ((value - least) / (most - least) if most > least else 1.0)
    best = most if sign > 0 else least
    # What is written the same is as good.
    return Measured(shown(value), part, bool(sign) and least < most and shown(value) == shown(best))


def _number(document: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    value: Any = document
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e15 else None


REPORTS: web.AppKey[Reports] = web.AppKey("reports", Reports)
