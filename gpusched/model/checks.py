"""What a check of `gpusched doctor` finds, in the daemon and in the client."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

Finding = tuple[str, str, str]
"""Level (`ok`, `warn`, `fail`), what was found, and what to do about it with the next command to type."""


def passed(text: str) -> Finding:
    """All is well."""
    return "ok", text, ""


def warned(text: str, hint: str) -> Finding:
    """Costs something, breaks nothing."""
    return "warn", text, hint


def failed(text: str, hint: str) -> Finding:
    """Something does not work."""
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
        """A warning is no failure."""
        return self.level != "fail"

    def document(self) -> dict[str, Any]:
        """For --json and the API."""
        return {**asdict(self), "ok": self.ok}
