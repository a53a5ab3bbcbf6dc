"""The whole numbers in which parts of a node are booked, so that no sum depends on the order of adding."""

from __future__ import annotations

WHOLE_CARD = 1_000_000
"""A whole card in the unit in which fractions are booked."""


def millicpus_of(cpus: float) -> int:
    """Cores in the unit in which they are booked, thousandths."""
    return round(cpus * 1000)


def micros_of(fraction: float) -> int:
    """A fraction of a card in the unit in which it is booked, millionths."""
    return max(1, round(fraction * WHOLE_CARD))


def squeeze(model: str) -> str:
    """A model name as types are compared: lower case, without blanks and dashes."""
    return "".join(model.split()).replace("-", "").lower()
