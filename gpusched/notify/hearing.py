"""What a sender says, taken for what it is: the word of a process that runs as a user.

In system mode its user may write in its place. Whatever is said is therefore about alerts of its batch, of the kind
that `batch` describes, and no longer than people read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from gpusched.model.units import printable
from gpusched.notify.batch import Report

_LONGEST_LINE = 1 << 16
_MOST_TEXT = 600
_MOST_REPORTS = 1000
"""Of one alert: as many as a user may have targets."""
_MOST_OTHERS = 1000
"""Lines that are no reports, of one sender; a few are in order."""
_LONGEST_S = 86400.0
_OUTCOMES = ("told", "failed", "gave_up")


class Hearing:
    """Puts together what is heard of one sender, and tells reports from anything else.

    Args: keys: of its alerts.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.is_nonsense = False
        """Whether it says what no sender would ever say."""
        self.has_ended = False
        """Whether it said that it is over."""
        self.next_s: float | None = None
        """In how many seconds what it left is due; None when it left nothing."""
        self._heard = b""
        self._others = 0
        """Lines that were no reports."""
        self._open = dict.fromkeys(keys, 0)
        """Alerts that it is not done with, and how many reports there were of each."""

    def take(self, data: bytes) -> list[Report]:
        """The reports in what was read, in order."""
        *lines, self._heard = (self._heard + data).split(b"\n")
        self.is_nonsense |= len(self._heard) > _LONGEST_LINE
        reports = []
        for line in lines:
            report = self._report_in(line)
            if report is not None:
                reports.append(report)
                continue
            self._others += 1
            if self._others > _MOST_OTHERS:
                self.is_nonsense = True
            if self.is_nonsense:
                break
        return reports

    def _report_in(self, line: bytes) -> Report | None:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return None  # a killed one may stop within a line
        if not isinstance(said, dict):
            return None
        key = said.get("key")
        if key is None and "next_s" in said:
            self.has_ended, self.next_s = True, None if said["next_s"] is None else _seconds(said["next_s"])
            return None
        if not isinstance(key, str) or key not in self._open:
            return None
        self._open[key] += 1
        if self._open[key] > _MOST_REPORTS:
            self.is_nonsense = True
            return None
        if said.get("done") is True:
            del self._open[key]
            return {"key": key, "done": True}
        return _outcome_in(said, key)


def _outcome_in(said: dict[str, Any], key: str) -> Report | None:
    outcome, target, tries = said.get("outcome"), said.get("target"), said.get("tries")
    if outcome not in _OUTCOMES or not isinstance(target, str) or not isinstance(tries, int):
        return None
    report: Report = {"key": key, "target": printable(target, _MOST_TEXT), "tries": max(0, min(tries, 1 << 31))}
    report["outcome"] = outcome
    if outcome == "told":
        return report
    error = said.get("error")
    report["error"] = printable(error, _MOST_TEXT) if isinstance(error, str) else "no reason is known"
    if "failures" in said or outcome == "failed":
        failures = said.get("failures")
        report["failures"] = max(1, min(failures, 1 << 16)) if isinstance(failures, int) else 1
        report["next_s"] = _seconds(said.get("next_s"))
    return report


def _seconds(said: object) -> float:
    if not isinstance(said, int) and not (isinstance(said, float) and math.isfinite(said)):
        return 0.0
    # Cut before it becomes a float: JSON has whole numbers that are too large for one.
    return float(max(0, min(said, _LONGEST_S)))
