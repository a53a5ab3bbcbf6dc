"""What a worker says, taken for what it is: the word of a process that runs as a user.

In system mode its user may write in its place. Whatever is said is therefore about alerts that this worker was given,
of the kind that `deliveries` describes, and no longer than people read.
"""

from __future__ import annotations

import json
import math
from typing import Any

from gpusched.model.units import printable
from gpusched.notify.deliveries import Report

_LONGEST_LINE = 1 << 16
_MOST_TEXT = 600
_MOST_REPORTS = 10_000
"""Of one alert: some hundred tries a day, times the targets that a user may have."""
_MOST_OTHERS = 1000
"""Lines that are no reports, of one worker; a few are in order."""
_OUTCOMES = ("told", "failed", "gave_up")


class Hearing:
    """Puts together what is heard of one worker, and tells reports from anything else."""

    def __init__(self) -> None:
        self.is_nonsense = False
        """Whether it says what no worker would ever say."""
        self._heard = b""
        self._others = 0
        """Lines that were no reports."""
        self._handed: dict[str, int] = {}
        """Alerts that it was given and is not done with, and how many reports there were of each."""

    @property
    def expects_more(self) -> bool:
        """Whether it was given alerts that it is not done with."""
        return bool(self._handed)

    def expect(self, key: str) -> bool:
        """The worker is given this alert now; whether it does not have it yet."""
        if key in self._handed:
            return False
        self._handed[key] = 0
        return True

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
            return None  # a new process starts with an empty line, a killed one may stop within one
        key = said.get("key") if isinstance(said, dict) else None
        if not isinstance(key, str) or key not in self._handed:
            return None
        self._handed[key] += 1
        if self._handed[key] > _MOST_REPORTS:
            self.is_nonsense = True
            return None
        if said.get("done") is True:
            del self._handed[key]
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
    if outcome == "failed":
        next_s = said.get("next_s")
        report["next_s"] = next_s if isinstance(next_s, float) and math.isfinite(next_s) else 0.0
    return report
