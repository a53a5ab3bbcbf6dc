"""What seldom changes about one card behind NVML: its modes, and how well its memory is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND = 3, 6, 13
ABSENT = frozenset({NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND})

_UNCORRECTED, _VOLATILE, _SLOWDOWN = 1, 0, 1

Ask = Callable[..., tuple[Any, int]]
"""Asks the library about this card: a value and 0, or None and the error's code."""


@dataclass(frozen=True, slots=True)
class Modes:
    """None is what the driver does not tell. What it fails to tell for once stays as it was."""

    mig: bool | None = None
    mig_pending: bool | None = None
    compute: int = 0
    display: bool = False
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowdown_c: float | None = None


def read_modes(ask: Ask, before: Modes) -> Modes:
    """All of it anew."""
    mig, mig_pending = before.mig, before.mig_pending
    found, code = ask("nvmlDeviceGetMigMode")
    if code == 0:
        mig, mig_pending = bool(found[0]), bool(found[1])
    elif code in ABSENT:
        mig, mig_pending = False, None
    compute, _ = ask("nvmlDeviceGetComputeMode")
    display, _ = ask("nvmlDeviceGetDisplayActive")
    errors, code = ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE)
    pending, failed = _repairs(ask, before)
    slowdown_c, _ = ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
    return Modes(
        mig=mig,
        mig_pending=mig_pending,
        compute=before.compute if compute is None else int(compute),
        display=bool(display),
        ecc_errors=int(errors) if code == 0 else None if code in ABSENT else before.ecc_errors,
        remap_pending=pending,
        remap_failed=failed,
        slowdown_c=before.slowdown_c if slowdown_c is None else float(slowdown_c),
    )


def _repairs(ask: Ask, before: Modes) -> tuple[bool | None, bool | None]:
    """Whether a repair of memory waits for a reset, and whether one has failed."""
    rows, code = ask("nvmlDeviceGetRemappedRows")
    if code == 0:
        return bool(rows[2]), bool(rows[3])
    if code not in ABSENT:
        return before.remap_pending, before.remap_failed
    # Cards before Ampere retire whole pages, and never tell that they cannot.
    pages, code = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    if code == 0:
        return bool(pages), None
    return (None, None) if code in ABSENT else (before.remap_pending, None)
