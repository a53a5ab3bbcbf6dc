"""The daemon's planner beside one that is made from all that its memory shows."""

from __future__ import annotations

import pytest
from lab import Lab

from gpusched.daemon import planner_sync
from gpusched.model.snapshot import Plan
from gpusched.model.value import replace
from gpusched.scheduler.planner import Planner


def plan_differences(one: Plan, other: Plan, *, with_reasons: bool = True) -> list[str]:
    """What two plans do not agree on."""
    found = [
        f"{name}: {ours} and {theirs}"
        for name in ("starts", "preempts", "resumes", "reservations", "first_blocked")
        if (ours := getattr(one, name)) != (theirs := getattr(other, name))
    ]
    if not found and with_reasons:
        found = [
            f"reason of {key}: {one.reasons.get(key)} and {other.reasons.get(key)}"
            for key in {**one.reasons, **other.reasons}
            if one.reasons.get(key) != other.reasons.get(key)
        ]
    return found


def check_planner(lab: Lab) -> None:
    """The planner knows what the memory says, and plans by it; raises AssertionError with what differs."""
    scheduler = lab.scheduler
    now, planner = scheduler.now(), scheduler.planner()
    found = planner_sync.differences(planner, scheduler.state, scheduler.snapshot(now))
    assert not found, found
    fresh = rebuilt(lab, planner, now)
    found = plan_differences(planner.plan(now), fresh.plan(now))
    assert not found, found


def rebuilt(lab: Lab, planner: Planner, now: float) -> Planner:
    """A planner made from all that the memory knows, which this one does."""
    scheduler = lab.scheduler
    known = replace(scheduler.snapshot(now, planner.state.layout.nodes), kept=tuple(sorted(planner.state.kept.items())))
    return planner_sync.planner_of(scheduler.state, known, scheduler.settings, scheduler.extensions)


def check_each_plan(lab: Lab, patch: pytest.MonkeyPatch) -> list[int]:
    """Have each plan of the daemon compared, as it is made, with that of a planner made for it alone.

    Returns how many starts each had, which grows.
    """
    usual, starts = Planner.plan, list[int]()

    def plan(planner: Planner, now: float) -> Plan:
        made = usual(planner, now)
        scheduler = lab.scheduler
        if planner is scheduler.planner_sync._planner:
            fresh = usual(rebuilt(lab, planner, now), now)
            # Reasons are worked out when they are asked for, and take back what the plan has tried.
            found = plan_differences(made, fresh, with_reasons=False)
            assert not found, found
            starts.append(len(made.starts))
        return made

    patch.setattr(Planner, "plan", plan)
    return starts
