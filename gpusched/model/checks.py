"""Findings of the `gpusched doctor` checks, in the daemon and in the client."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Finding = tuple[str, str, str]
"""Level (`ok`, `warn`, `fail`), finding, and a hint with the next command to type."""


def passed(text: str) -> Finding:
    return "ok", text, ""


def warned(text: str, hint: str) -> Finding:
    """A finding that costs something but breaks nothing."""
    return "warn", text, hint


def failed(text: str, hint: str) -> Finding:
    """A finding that breaks something."""
    return "fail", text, hint


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    check: str
    level: str
    text: str
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings do not count."""
        return self.level != "fail"

    def document(self) -> dict[str, Any]:
        """JSON object for --json and the API."""
        return {**asdict(self), "ok": self.ok}
