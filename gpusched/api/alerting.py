"""What a submission or an update says of alerts, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpusched.errors import UsageError
from gpusched.model.alerts import EACH_TASK, EVENTS, parse_events
from gpusched.model.job import Alerting
from gpusched.model.units import printable

MOST_TARGETS = 20
MAX_TARGET = 200
_ADDRESS = re.compile(r"[\w!#$%&'*+/=?^`{|}~.-]+@[\w.-]+")


def read_alerting(values: Mapping[str, Any]) -> Alerting | None:
    """Events and targets of a job's alerts; None for none. Raises: UsageError."""
    found = read_parts(values)
    alerting = Alerting(found.get("notify", ()), found.get("notify_to", ()))
    if alerting.on:
        return alerting
    if alerting.targets:
        shown = printable(alerting.targets[0], 60)
        raise UsageError(
            f"{shown} is a target of alerts, but no event is named", f"add --notify, with {', '.join(EVENTS)}"
        )
    return None


def read_parts(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """`notify` and `notify_to` as far as they are given, checked each by itself. Raises: UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    if "notify" in values:
        try:
            words = parse_events(",".join(values["notify"]))
        except ValueError as error:
            raise UsageError(str(error), "see --notify in gsub --help") from None
        found["notify"] = words if set(words) - {EACH_TASK} else ()
    if "notify_to" in values:
        targets = found["notify_to"] = tuple(dict.fromkeys(values["notify_to"]))
        for target in targets:
            if not _is_name(target):
                shown = printable(repr(target), 60)
                raise UsageError(f"{shown} is neither a target nor a mail address", "see docs/howto/alerts.md")
        if len(targets) > MOST_TARGETS:
            raise UsageError(f"{len(targets)} targets for one job; at most {MOST_TARGETS} are allowed", "name fewer")
    return found


def _is_name(target: str) -> bool:
    """Whether it can be the name of a target, or a mail address."""
    if not target or not target.isprintable() or set(target) & set(" ,") or len(target) > MAX_TARGET:
        return False
    return "@" not in target or _ADDRESS.fullmatch(target) is not None
