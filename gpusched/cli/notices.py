"""The line below the queue: drained nodes and GPUs, and maintenance."""

from __future__ import annotations

import time

from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_MOST = 3


def line(notices: Sequence[dict[str, Any]], now: float) -> str:
    """What everybody should know, on one line; the others are counted, and `ginfo` has them."""
    texts = [_text(one, now) for one in notices[:_MOST]]
    if len(notices) > _MOST:
        texts.append(f"and {len(notices) - _MOST} more, see ginfo")
    return printable("; ".join(texts))


def _text(one: dict[str, Any], now: float) -> str:
    why = f" ({one['message']})" if one["message"] else ""
    if one["kind"] == "drain":
        return f"{one['what']} is drained{why}"
    head = f"maintenance {one['name']} of {one['what']}"
    if one["start_at"] <= now:
        return f"{head} until {_at(one['end_at'], now)}{why}"
    return f"{head} from {_at(one['start_at'], now)} to {_at(one['end_at'], one['start_at'])}{why}"


def _at(at: float, near: float) -> str:
    """The time of day, with the date when it is of another day."""
    there = time.localtime(at)
    is_same_day = there[:3] == time.localtime(near)[:3]
    return time.strftime("%H:%M" if is_same_day else "%a %Y-%m-%d %H:%M", there)
