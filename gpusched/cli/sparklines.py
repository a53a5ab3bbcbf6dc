"""Sparklines: what happened over time in the cells of one line. Unknown values are `?`, and never a zero."""

from __future__ import annotations

import os
import sys

from gpusched.cli.query import quote
from gpusched.cli.tables import screen
from gpusched.errors import Forbidden, NotFound
from gpusched.model.units import format_size_mib, gpu_label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from gpusched.client import DaemonConnection

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#%@"
WIDTH = 24
"""Cells of one in gshow and ginfo."""
_MOST_CARDS = 16
"""Cards of one run that are shown."""
_HOUR_S = 3600


def draws_blocks() -> bool:
    """Whether the terminal can be expected to show block characters."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    ctype = os.environ.get("LC_CTYPE")
    # In the locale C, Python encodes as UTF-8 whatever the terminal does, and may set LC_CTYPE to this.
    named = os.environ.get("LC_ALL") or (ctype if ctype != "C.UTF-8" else None) or os.environ.get("LANG")
    if named in ("C", "POSIX"):
        return False
    return encoding == "utf8" and os.environ.get("TERM", "") not in ("linux", "dumb", "vt100", "vt220")


def spark(values: Iterable[float | None], width: int, is_ascii: bool) -> str:
    """The last values, 0 to 1, as columns; `?` for unknown ones."""
    known = list(values)[-width:]
    signs = _ASCII if is_ascii else _BLOCKS
    last = len(signs) - 1
    return "".join("?" if one is None else signs[min(last, max(0, int(one * last + 0.5)))] for one in known).rjust(
        width
    )


def add_series(client: DaemonConnection, job: dict[str, Any]) -> None:
    """Give each run of a job with GPUs its series of use and memory by card, as `series`."""
    for run in job["runs"]:
        run["series"] = []
        if not run["gpus"] or run["start_at"] is None:
            continue
        try:
            asked = f"job={quote(job['id'])}&run={run['run']}&points={WIDTH}&fields=use,vram_mib,vram_max_mib"
            run["series"] = client.call("GET", f"/v1/series?{asked}")["series"]
        except (Forbidden, NotFound):
            # Another user's job, whose use is private here.
            continue


def run_lines(series: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each card of a run: use, and memory as a part of its peak; at a narrow terminal below each other."""
    lines = []
    is_ascii, size = not draws_blocks(), screen()
    for card in series[:_MOST_CARDS]:
        label = "?" if card["index"] is None else gpu_label(card["index"])
        first, second = f"  GPU {label}  use {_use(card['use'], is_ascii)}", f"memory {_memory(card, is_ascii)}"
        if size is None or len(f"{first}  {second}") <= size[1]:
            lines.append(f"{first}  {second}")
        else:
            # Curves are not broken where they are blank.
            lines += [first, f"{'':{len(label) + 8}}{second}"]
    if len(series) > _MOST_CARDS:
        lines.append(f"  and {len(series) - _MOST_CARDS} more GPUs")
    return lines


_LEAST_OF_RUN = 2
"""Known values of a run that make a curve; with fewer, such as of a run of a second, the figures say it all."""


def _curve(values: Sequence[float | None], is_ascii: bool, least: int = _LEAST_OF_RUN) -> str:
    """The values as a curve and a blank; empty if fewer than `least` are known."""
    if sum(value is not None for value in values) < least:
        return ""
    return f"|{spark(values, min(WIDTH, len(values)), is_ascii)}| "


def _use(values: Sequence[float | None], is_ascii: bool, least: int = _LEAST_OF_RUN) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    return f"{_curve(values, is_ascii, least)}mean {sum(known) / len(known):.0%}"


def _memory(card: dict[str, Any], is_ascii: bool) -> str:
    values = card["vram_mib"]
    peaks = [value for value in (*card["vram_max_mib"], *values) if value is not None]
    if not peaks:
        return "n/a"
    most = max(peaks) or 1.0
    parts = [None if value is None else value / most for value in values]
    return f"{_curve(parts, is_ascii)}peak {format_size_mib(max(peaks))}"


def add_last_hour(client: DaemonConnection, cards: Iterable[dict[str, Any]]) -> None:
    """Give each card its use and memory over the last hour, as `last_hour`; None for a card without samples."""
    asked = f"cards=all&from=-{_HOUR_S}&points={WIDTH}&fields=use,vram_mib"
    found = {one["uuid"]: one for one in client.call("GET", f"/v1/series?{asked}")["series"]}
    for card in cards:
        one = found.get(card["uuid"])
        names = ("start_at", "step_s", "use", "vram_mib")
        card["last_hour"] = None if one is None else {name: one[name] for name in names}


def last_hour(card: dict[str, Any]) -> str:
    """The use of a card over the last hour, in one cell of a table."""
    found = card["last_hour"]
    return "n/a" if found is None else _use(found["use"], not draws_blocks(), 1)
