"""Which preset `auto` has in force: changed only for what is better beyond chance, twice in a row, within bounds."""

from __future__ import annotations

import pytest

from gpusched.addons.simulate.preset_choice import (
    APART_S,
    Judgement,
    PresetGain,
    PresetState,
    PresetWorth,
    beyond_bounds,
    decide,
    too_little,
    with_too_little,
)
from gpusched.model import value
from gpusched.model.value import replace

NIGHT_S = 86400.0
SURE = PresetGain(12, 11, 1, 0.01)
CHANCE = PresetGain(12, 7, 5, 0.2)
WORSE = PresetGain(12, 1, 11, 1.0)
PLAIN = PresetWorth(100_000, 50_000, 300_000, 80_000, 20_000)


def judged(night: int = 0, in_force: str = "fair", **presets: tuple[PresetWorth, PresetGain]) -> Judgement:
    """Presets that are not named do as fair does, and are never better."""
    worth = dict.fromkeys(("fair", "throughput", "fifo", "slurm"), PLAIN)
    gains = dict.fromkeys(worth, WORSE)
    for name, (one, gain) in presets.items():
        worth[name], gains[name] = one, gain
    del gains[in_force]
    return Judgement(night * NIGHT_S, 1000, 0.0, in_force, worth, gains)


def faster(by: float, **more: float) -> PresetWorth:
    return replace(PLAIN, completion_s=PLAIN.completion_s * (1 - by), **more)


def test_no_change_is_made_when_no_preset_is_better() -> None:
    state = decide(PresetState(), judged())
    assert (state.in_force, state.candidate, state.why) == ("fair", None, "no other preset would be better")


def test_an_insignificant_gain_is_reported_and_changes_nothing() -> None:
    state = PresetState()
    for night in range(5):
        state = decide(state, judged(night, throughput=(faster(0.12), CHANCE)))
    assert (state.in_force, state.candidate) == ("fair", None)
    assert state.why == "throughput would be 12% better, not significant (better in 7 of 12 parts, p = 0.2)"


def test_a_significant_gain_changes_over_the_second_time_in_a_row() -> None:
    first = decide(PresetState(), judged(0, throughput=(faster(0.12), SURE)))
    assert (first.in_force, first.candidate) == ("fair", "throughput")
    assert first.why == (
        "throughput is 12% better (better in 11 of 12 parts, p = 0.01); changes over if it is so again"
    )
    second = decide(first, judged(1, throughput=(faster(0.10), SURE)))
    assert (second.in_force, second.candidate, second.since_at) == ("throughput", None, NIGHT_S)
    assert second.why == "throughput is 10% better (better in 11 of 12 parts, p = 0.01), twice in a row"


def test_two_judgements_of_one_day_count_as_one() -> None:
    state = decide(PresetState(), judged(0, throughput=(faster(0.12), SURE)))
    again = replace(judged(0, throughput=(faster(0.12), SURE)), at=APART_S - 1)
    for _ in range(3):
        state = decide(state, again)
    assert (state.in_force, state.candidate, state.candidate_at) == ("fair", "throughput", 0.0)
    assert decide(state, replace(again, at=APART_S)).in_force == "throughput"


@pytest.mark.parametrize(
    "between",
    [
        judged(1),
        judged(1, throughput=(faster(0.12), CHANCE)),
        judged(1, throughput=(faster(0.12, longest_wait_s=700_000), SURE)),
        judged(1, fifo=(faster(0.2), SURE)),
    ],
    ids=["no gain", "chance", "beyond bounds", "another preset"],
)
def test_a_night_without_the_same_verdict_restarts_the_count(between: Judgement) -> None:
    state = decide(PresetState(), judged(0, throughput=(faster(0.12), SURE)))
    state = decide(state, between)
    assert state.in_force == "fair"
    state = decide(state, judged(2, throughput=(faster(0.12), SURE)))
    assert (state.in_force, state.candidate) == ("fair", "throughput")
    assert decide(state, judged(3, throughput=(faster(0.12), SURE))).in_force == "throughput"


def test_a_night_without_a_result_does_not_count_as_another_opinion() -> None:
    state = decide(PresetState(), judged(0, throughput=(faster(0.12), SURE)))
    state = replace(state, problem="took longer than 3 hours", tried_at=NIGHT_S)
    assert decide(state, judged(2, throughput=(faster(0.12), SURE))).in_force == "throughput"


def test_the_best_of_several_significant_gains_is_chosen() -> None:
    gains = {"throughput": (faster(0.12), SURE), "slurm": (faster(0.2), SURE), "fifo": (faster(0.3), CHANCE)}
    assert decide(PresetState(), judged(0, **gains)).candidate == "slurm"


@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"longest_wait_s": 660_000}, "the longest wait would be 2.2 times as long as under fair"),
        ({"wide_wait_s": 160_000}, "wide jobs would wait 2.0 times as long as under fair"),
        ({"light_wait_s": 30_000}, "users who use little would wait 1.5 times as long as under fair"),
    ],
)
def test_a_preset_too_costly_for_others_is_not_chosen(worse: dict[str, float], said: str) -> None:
    state = PresetState()
    for night in range(3):
        state = decide(state, judged(night, throughput=(faster(0.3, **worse), SURE)))
    assert (state.in_force, state.candidate) == ("fair", None)
    assert state.why == f"throughput would be 30% better, but {said}"
    assert list(state.excluded) == ["throughput"]


def test_the_next_best_is_chosen_where_the_best_is_out_of_bounds() -> None:
    found = judged(0, throughput=(faster(0.3, wide_wait_s=160_000), SURE), slurm=(faster(0.1), SURE))
    assert decide(PresetState(), found).candidate == "slurm"


@pytest.mark.parametrize(
    ("base", "value", "is_within"),
    [
        (0.0, 599.0, True),
        (0.0, 601.0, False),
        (1000.0, 1600.0, True),
        (10_000.0, 14_999.0, True),
        (10_000.0, 15_001.0, False),
    ],
)
def test_minutes_are_within_every_bound(base: float, value: float, is_within: bool) -> None:
    fair, other = (replace(PLAIN, wide_wait_s=one) for one in (base, value))
    assert (beyond_bounds(other, fair) is None) is is_within


def test_absent_jobs_set_no_bound() -> None:
    assert beyond_bounds(PresetWorth(1, 1, 1), PLAIN) is None
    assert beyond_bounds(PLAIN, PresetWorth(1, 1, 300_000)) is None


def test_a_preset_out_of_bounds_is_given_up_the_second_time() -> None:
    state = PresetState("throughput", since_at=0.0)
    bad = {"throughput": (faster(0.3, longest_wait_s=900_000), SURE)}
    state = decide(state, judged(1, "throughput", **bad))
    assert (state.in_force, state.candidate) == ("throughput", "fair")
    assert state.why.startswith("under throughput the longest wait would be 3.0 times as long as under fair;")
    state = decide(state, judged(2, "throughput", **bad))
    assert (state.in_force, state.since_at) == ("fair", 2 * NIGHT_S)


def test_fair_comes_back_when_it_is_better() -> None:
    state = PresetState("throughput", since_at=0.0)
    for night in (1, 2):
        found = judged(night, "throughput", throughput=(faster(-0.2), SURE), fair=(PLAIN, SURE))
        state = decide(state, found)
    assert state.in_force == "fair"


def test_too_few_jobs_for_parts_change_nothing() -> None:
    state = decide(PresetState(), judged(0, throughput=(faster(0.5), PresetGain(0, 0, 0, 1.0))))
    assert state.why == "throughput would be 50% better, not significant (too few jobs to tell it from chance)"


@pytest.mark.parametrize(
    ("jobs", "days", "is_enough"), [(199, 30, False), (200, 6.9, False), (200, 7, True), (0, 0, False)]
)
def test_too_little_history_is_reported(jobs: int, days: float, is_enough: bool) -> None:
    why = too_little(jobs, days * NIGHT_S)
    assert (why is None) is is_enough
    if why is not None:
        assert why.startswith("too little history: ")
        kept = with_too_little(PresetState("slurm", candidate="fair", candidate_at=1.0), why)
        assert (kept.in_force, kept.candidate, kept.why) == ("slurm", None, why)


def test_the_state_round_trips() -> None:
    state = decide(PresetState(), judged(0, throughput=(faster(0.12, wide_wait_s=1e6), SURE)))
    assert value.decode(value.encode(state), PresetState) == state
