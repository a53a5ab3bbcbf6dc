"""How far a job is, drawn with signs that every terminal and every pipe can hold."""

from __future__ import annotations

import time

from gpusched.model.units import format_duration

WIDTH = 10


def bar(fraction: float, eta_at: float | None, now: float) -> str:
    """`[####......]  45% 2:03`: the part that is done, and how long it still takes; `?` when nobody knows."""
    # Never full, and never 100 %, before it is.
    done = int(fraction * WIDTH)
    left = "?" if eta_at is None else format_duration(max(0.0, eta_at - now))
    return f"[{'#' * done}{'.' * (WIDTH - done)}] {int(fraction * 100):3d}% {left}"


def sentence(fraction: float, text: str, eta_at: float | None, now: float) -> str:
    """The same for gshow, with what the job says beside it."""
    drawn = bar(fraction, eta_at, now).rpartition(" ")[0]
    said = f", {text}" if text else ""
    if eta_at is None:
        return f"{drawn}{said}"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(eta_at))
    return f"{drawn}{said}; done in about {format_duration(max(0.0, eta_at - now))}, at {at}"
