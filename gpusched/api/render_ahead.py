"""What is said of the future, as JSON. Unknown is null; instants are epoch seconds."""

from __future__ import annotations

from typing import Any

from gpusched.api.render import plain
from gpusched.daemon.forecast import Forecast
from gpusched.policy.ahead.estimates import Accuracy, StartRange
from gpusched.policy.ahead.whatif import Alternative


def forecast_json(found: Forecast) -> dict[str, Any]:
    """The answer to a dry run."""
    return {**plain(found), "alternatives": [alternative_json(one) for one in found.alternatives]}


def range_json(found: StartRange) -> dict[str, Any] | None:
    """Both ends of a start; null when nothing is known."""
    return None if found.is_unknown else {"low_at": found.low_at, "high_at": found.high_at}


def alternative_json(one: Alternative) -> dict[str, Any]:
    """One thing that would help."""
    return {
        "change": plain(one.change),
        "text": one.text,
        "option": one.option,
        "update": one.update,
        "starts": "now" if one.is_now else one.starts_at,
    }


def accuracy_json(found: Accuracy | None) -> dict[str, Any] | None:
    """How good estimates were; null when none can be judged."""
    return None if found is None else plain(found)
