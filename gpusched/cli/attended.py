"""What gshow says of a job in the foreground: who is at it, and when its lease ends."""

from __future__ import annotations

import time

from gpusched.model.units import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def attended(job: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines with their names."""
    facts = job["foreground"]
    how = f"{'at a terminal' if facts['terminal'] else 'with its streams'}, {_who(job, facts)}"
    if facts["keep"] and facts["client"] is not None:
        how += "; kept when that goes"
    pairs = [("Foreground", how)]
    if facts["lease_s"] is not None:
        lease = format_duration(facts["lease_s"])
        if facts["lease_ends_at"] is not None:
            lease += f", ends {_instant(facts['lease_ends_at'])} unless something happens in it"
        pairs.append(("Lease", lease))
    return pairs


def _who(job: dict[str, Any], facts: dict[str, Any]) -> str:
    client = facts["client"]
    if client is not None:
        verb = "waits" if job["state"] == "PENDING" else "is attached"
        return f"process {client['pid']} {verb} since {_instant(client['since_at'])}"
    if not facts["is_known"]:
        return "its supervisor does not say who is attached"
    if facts["keep"] and job["state"] in ("PENDING", "RUNNING", "SUSPENDED"):
        return f"nobody is attached; come back with: grun --attach {job['id']}"
    return "nobody is attached"


def _instant(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
