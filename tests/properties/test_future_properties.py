"""The machines of the first reservation, moved from cycle to cycle, are those that are worked out anew."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_standing_properties import CLUSTERS, some_request

from gpusched.model.settings import Settings
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.need import Need
from gpusched.policy.placement import find
from gpusched.policy.profile import Ending, Profile
from gpusched.policy.standing.future import Future
from gpusched.testing import NOW


def free_of(draft: Draft) -> tuple[object, ...]:
    """All that bookings change, but for whose slices were on a card that is empty."""
    owners = [owner for owner, slices in zip(draft.owner, draft.slices, strict=True) if slices]
    counts = draft.free_millicpus, draft.free_mem_mib, draft.jobs, draft.free_cards, draft.shared_cards
    return (*counts, draft.wholes, draft.slices, draft.vram_mib, draft.micros, owners)


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=100)
def test_what_is_kept_is_what_would_be_kept_anew(cluster, seed):
    dice = Random(seed)
    layout = Layout(CLUSTERS[cluster], Settings())
    draft = Draft(layout)
    future = Future(draft)
    running: list[Ending] = []
    needs = [Need.of(some_request(dice), 1000 + dice.randrange(2)) for _ in range(6)]
    lasts_s = [1.0, 2.0, 2.0, 5.0, 30.0] if dice.random() < 0.5 else [2.0, 9.0, inf, inf, inf]
    now, last = NOW, 0

    def start(booking: Booking, end_at: float) -> Ending:
        nonlocal last
        last += 1
        ending = Ending(last, now, end_at, booking)
        draft.book(booking)
        draft.settle()
        future.add(ending)
        running.append(ending)
        return ending

    for _ in range(dice.randint(1, 25)):
        now += dice.choice([0.0, 0.0, 1.0, 4.0])
        for ending in list(running):
            # Some run on for longer than was planned, and are not yet over.
            if dice.random() < 0.2 or (ending.end_at <= now and dice.random() < 0.9):
                running.remove(ending)
                draft.release(ending.booking)
                draft.settle()
                future.remove(ending)
        for need in dice.choices(needs, k=dice.randint(0, 3)):
            booking = find(draft, need)
            if booking is not None:
                start(booking, now + dice.choice(lasts_s))
        need, duration_s = dice.choice(needs), dice.choice(lasts_s)
        plain = Profile(draft, running, now)
        expected, kept = plain.reserve(1000, need, duration_s), future.keep(1000, need, duration_s, now)
        assert (kept is None) is (expected is None)
        if kept is None or expected is None:
            continue
        assert (kept.start, kept.end, kept.pass_until) == (expected.start, expected.end, expected.pass_until)
        assert kept.booking == expected.booking
        assert free_of(kept.state) == free_of(expected.state)
        # Others pass what is kept, which may move it.
        profile = Profile(draft, (), now)
        profile.kept.append(kept)
        for other in dice.choices(needs, k=2):
            booking, end_at = find(draft, other), now + dice.choice(lasts_s)
            if booking is None:
                continue
            passes = plain.admits(booking, end_at)
            assert profile.admits(booking, end_at) is passes
            if passes and dice.random() < 0.7:
                ending = start(booking, end_at)
                plain.start(ending)
                profile.start(ending)
                assert free_of(kept.state) == free_of(expected.state)
