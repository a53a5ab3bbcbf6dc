"""What is planned cycle after cycle is planned as if from scratch, whatever is configured and whatever happens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from worlds import FEATURES, Story, World, shrunk, story_of

from gpusched.model.snapshot import Plan
from gpusched.model.value import replace
from gpusched.policy.invariants import check_invariants
from gpusched.scheduler.planner import decide

SELDOM = 0.05
"""More than this part of all stories has each feature."""


def differences(one: Plan, other: Plan) -> list[str]:
    """What two plans do not agree on, reasons included."""
    found = [
        f"{name}: {ours} and {theirs}"
        for name in ("starts", "preempts", "resumes", "reservations", "first_blocked", "has_more")
        if (ours := getattr(one, name)) != (theirs := getattr(other, name))
    ]
    if not found:
        found = [
            f"reason of {key}: {one.reasons.get(key)} and {other.reasons.get(key)}"
            for key in {**one.reasons, **other.reasons}
            if one.reasons.get(key) != other.reasons.get(key)
        ]
    return found


def first_problem(story: Story) -> str | None:
    """What is wrong in the first step of a story in which anything is."""
    world = World(story)
    for number in story.steps:
        dice = world.step(number)
        snapshot = world.snapshot()
        plan = decide(snapshot, world.settings, world.extensions)
        shuffled = replace(snapshot, nodes=snapshot.nodes[::-1], pending=snapshot.pending[::-1])
        problems = differences(plan, decide(shuffled, world.settings, world.extensions))
        world.carry_out(plan, dice)
        problems += check_invariants(world.snapshot(), world.settings)
        if problems:
            return f"step {number}: {problems[0]}"
    return None


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=200, phases=[Phase.explicit, Phase.generate])
def test_plans_do_not_depend_on_the_order_of_nodes_and_classes_and_book_nothing_twice(seed):
    story = story_of(seed)
    if first_problem(story) is not None:
        least = shrunk(story, lambda tried: first_problem(tried) is not None)
        pytest.fail(f"{first_problem(least)}\n{least}")


def test_stories_have_every_feature_with_real_probability():
    seen: Counter[str] = Counter()
    count = 150
    for seed in range(count):
        world = World(story_of(seed))
        for number in world.story.steps:
            dice = world.step(number)
            world.carry_out(decide(world.snapshot(), world.settings, world.extensions), dice)
        seen.update(name for name, often in world.seen.items() if often)
    events = ("JobLeft", "RunStarted", "RunEnded", "RunExpected", "RunChanged", "NodesChanged", "UsageCharged")
    plans = ("starts", "failed", "preempts", "reserved")
    for what in (*FEATURES, *events, "WindowsChanged", "SettingsChanged", *plans):
        assert seen[what] > SELDOM * count, f"{what}: in {seen[what]} of {count} stories"
    for what in ("suspended", "resumes"):
        assert seen[what] > SELDOM / 2 * count, f"{what}: in {seen[what]} of {count} stories"
