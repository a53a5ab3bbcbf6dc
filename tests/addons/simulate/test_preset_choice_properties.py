"""Whatever nights bring: `auto` changes over only for what two judgements in a row say, and stays within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.simulate.preset_choice import (
    ALPHA,
    APART_S,
    MARGIN,
    Judgement,
    PresetGain,
    PresetState,
    PresetWorth,
    beyond_bounds,
    decide,
)
from gpusched.model import value
from gpusched.model.presets import CHOICES, FAIR

TIMES = st.sampled_from([0.0, 300.0, 5000.0, 20_000.0, 90_000.0])
WORTH = st.builds(
    PresetWorth,
    completion_s=st.sampled_from([100.0, 99.5, 98.0, 50.0, 5000.0]),
    wait_s=TIMES,
    longest_wait_s=TIMES,
    wide_wait_s=st.none() | TIMES,
    light_wait_s=st.none() | TIMES,
)
GAIN = st.builds(
    PresetGain,
    parts=st.just(12),
    better=st.integers(0, 12),
    worse=st.just(0),
    p=st.sampled_from([0.0, 0.01, 0.049, 0.05, 0.5, 1.0]),
)
NIGHTS = st.lists(
    st.tuples(
        st.fixed_dictionaries(dict.fromkeys(CHOICES, WORTH)),
        st.fixed_dictionaries(dict.fromkeys(CHOICES, GAIN)),
        st.sampled_from([600.0, APART_S, 86_400.0]),
    ),
    max_size=12,
)


@given(NIGHTS)
def test_a_changeover_was_announced_and_is_earned(
    nights: list[tuple[dict[str, PresetWorth], dict[str, PresetGain], float]],
) -> None:
    state, now = PresetState(), 0.0
    for worth, gains, later_s in nights:
        now += later_s
        compared = {name: gain for name, gain in gains.items() if name != state.in_force}
        before = state
        state = decide(before, Judgement(now, 1000, 0.0, before.in_force, worth, compared))
        assert state.in_force in CHOICES
        assert state.candidate in {*CHOICES, None} - {state.in_force}
        assert state.why
        assert value.decode(value.encode(state), PresetState) == state
        wanted = state.in_force if state.in_force != before.in_force else state.candidate
        if wanted is None:
            continue
        # What is wanted keeps the bounds, and is better beyond chance or takes the place of what leaves them.
        assert wanted == FAIR or beyond_bounds(worth[wanted], worth[FAIR]) is None
        gives_up = beyond_bounds(worth[before.in_force], worth[FAIR]) is not None
        if not (gives_up and wanted == FAIR):
            assert compared[wanted].p < ALPHA
            assert worth[wanted].completion_s < worth[before.in_force].completion_s * (1 - MARGIN) + 1e-9
        if state.in_force != before.in_force:
            assert before.candidate == state.in_force
            assert before.candidate_at is not None
            assert now - before.candidate_at >= APART_S
            assert (state.candidate, state.since_at) == (None, now)
