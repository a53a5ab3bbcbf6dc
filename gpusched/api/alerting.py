"""What a submission says of alerts, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched.errors import UsageError
from gpusched.model.alerts import EACH_TASK, EVENTS, parse_events
from gpusched.model.job import Alerting
from gpusched.model.units import printable

MOST_TARGETS = 20
MAX_TARGET = 200


def read_alerting(values: Mapping[str, Any]) -> Alerting | None:
    """Whom to tell what of a job; None for nobody. Raises: UsageError."""
    try:
        words = parse_events(",".join(values.get("notify", ())))
    except ValueError as error:
        raise UsageError(str(error), "see --notify in gsub --help") from None
    targets = tuple(dict.fromkeys(values.get("notify_to", ())))
    for target in targets:
        if not target or not target.isprintable() or set(target) & set(" ,") or len(target) > MAX_TARGET:
            shown = printable(repr(target), 60)
            raise UsageError(f"{shown} is neither a target nor a mail address", "see docs/howto/alerts.md")
    if len(targets) > MOST_TARGETS:
        raise UsageError(f"{len(targets)} targets for one job; at most {MOST_TARGETS} are told", "name fewer")
    if targets and not set(words) - {EACH_TASK}:
        raise UsageError(
            f"{printable(targets[0], 60)} is to be told, but nothing of what", f"add --notify, with {', '.join(EVENTS)}"
        )
    return Alerting(words, targets) if set(words) - {EACH_TASK} else None
