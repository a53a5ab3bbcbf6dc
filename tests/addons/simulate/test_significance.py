"""A sign-flip test over parts of a trace: exact, fair where nothing differs, and silent about jobs that are too few."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.simulate.comparison import (
    LEAST_IN_PART,
    LEAST_PARTS,
    PARTS,
    SignFlipResult,
    sign_flip_p,
    sign_flip_test,
)
from gpusched.addons.simulate.outcome import Outcome
from gpusched.addons.simulate.preset_choice import ALPHA
from gpusched.addons.simulate.trace import TraceJob


def schedule(waits: list[int], users: list[str] | None = None) -> Outcome:
    """One job a minute, each with this wait."""
    jobs = [
        TraceJob(str(number), number * 60, 10, 10, gpus=1, user=users[number] if users else "")
        for number in range(len(waits))
    ]
    return Outcome(jobs, [job.submit_s + wait for job, wait in zip(jobs, waits, strict=True)], 0)


def mean_wait(outcome: Outcome) -> float:
    return sum(outcome.wait_s) / len(outcome.wait_s)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=10))
def test_the_p_value_is_the_share_of_sign_flips_that_do_as_well(gains: list[int]) -> None:
    if not any(gains):
        assert sign_flip_p(gains) == 1.0
        return
    all_signs = list(product((1, -1), repeat=len(gains)))
    as_well = sum(sum(s * gain for s, gain in zip(signs, gains, strict=True)) >= sum(gains) for signs in all_signs)
    assert sign_flip_p(gains) == as_well / len(all_signs)


def test_equal_sums_in_another_order_count_as_equal() -> None:
    assert sign_flip_p([0.1] * 12) == 1 / 4096
    assert sign_flip_p([0.1, 0.2, 0.3]) == 1 / 8


def test_a_gain_in_every_part_is_significant() -> None:
    found = sign_flip_test(schedule([600] * 240), schedule([500] * 240), mean_wait)
    assert (found.parts, found.better, found.p) == (PARTS, PARTS, 1 / 4096)
    assert found.is_significant
    assert str(found) == "better in 12 of 12 parts, chance alone does as well in 1 of 4,096 tries"


def test_the_same_schedule_is_not_a_gain() -> None:
    found = sign_flip_test(schedule([600] * 240), schedule([600] * 240), mean_wait)
    assert (found.better, found.p, found.is_significant) == (0, 1.0, False)


def test_a_loss_is_never_significant() -> None:
    found = sign_flip_test(schedule([500] * 240), schedule([600] * 240), mean_wait)
    assert (found.better, found.p) == (0, 1.0)


def test_a_single_good_week_is_not_significant() -> None:
    before, after = [600] * 240, [600] * 240
    before[:20] = [100_000] * 20
    found = sign_flip_test(schedule(before), schedule(after), mean_wait)
    assert (found.better, found.p) == (1, 0.5)
    assert str(found) == "better in 1 and worse in 0 of 12 parts, chance alone does as well in every second case"


def test_multiple_comparisons_are_corrected() -> None:
    once = sign_flip_test(schedule([600] * 240), schedule([500] * 240), mean_wait)
    thrice = sign_flip_test(schedule([600] * 240), schedule([500] * 240), mean_wait, comparisons=3)
    assert thrice.p == 3 * once.p
    assert sign_flip_test(schedule([5] * 240), schedule([6] * 240), mean_wait, comparisons=3).p == 1.0


@pytest.mark.parametrize(
    ("jobs", "parts"),
    [
        (LEAST_PARTS * LEAST_IN_PART - 1, 0),
        (LEAST_PARTS * LEAST_IN_PART, LEAST_PARTS),
        (PARTS * LEAST_IN_PART, PARTS),
        (5000, PARTS),
    ],
)
def test_parts_have_enough_jobs_or_none_are_made(jobs: int, parts: int) -> None:
    found = sign_flip_test(schedule([600] * jobs), schedule([500] * jobs), mean_wait)
    assert (found.parts, found.better) == (parts, parts)
    assert found.is_significant is (parts > 0)
    if not parts:
        assert str(found) == "too few jobs to rule out chance (in 6 parts, 10 in each)"


def test_parts_have_equal_numbers_of_counted_jobs() -> None:
    # Nine of ten jobs of ann come in the last tenth.
    users = ["bob" if number < 900 and number % 10 else "ann" for number in range(1000)]
    sizes = []

    def loss(part: Outcome) -> float:
        sizes.append(sum(job.user == "ann" for job in part.jobs))
        return 0.0

    sign_flip_test(schedule([1] * 1000, users), schedule([1] * 1000, users), loss, lambda job: job.user == "ann")
    assert sum(sizes) == 2 * users.count("ann")
    assert max(sizes) - min(sizes) <= 1


def test_parts_follow_submission_order_and_not_file_order() -> None:
    ordered = sign_flip_test(schedule([*range(240)]), schedule([100] * 240), mean_wait)
    numbers = list(range(240))
    Random(3).shuffle(numbers)

    def shuffled(outcome: Outcome) -> Outcome:
        return Outcome([outcome.jobs[n] for n in numbers], [outcome.start_s[n] for n in numbers], 0)

    assert sign_flip_test(shuffled(schedule([*range(240)])), shuffled(schedule([100] * 240)), mean_wait) == ordered


def test_false_positives_are_rare() -> None:
    random, found, rounds = Random(11), 0, 400
    for _ in range(rounds):
        before = [int(random.lognormvariate(6, 2)) for _ in range(240)]
        after = [int(random.lognormvariate(6, 2)) for _ in range(240)]
        found += sign_flip_test(schedule(before), schedule(after), mean_wait).is_significant
    assert found / rounds < 1.6 * ALPHA


def test_the_better_policy_is_found_despite_noise() -> None:
    random, found, rounds = Random(12), 0, 100
    for _ in range(rounds):
        before = [int(random.lognormvariate(6, 1)) for _ in range(240)]
        after = [int(0.7 * random.lognormvariate(6, 1)) for _ in range(240)]
        found += sign_flip_test(schedule(before), schedule(after), mean_wait).is_significant
    assert found / rounds > 0.8


def test_a_verdict_says_how_often_chance_does_as_well() -> None:
    assert (
        str(SignFlipResult(12, 11, 1, 0.002)) == "better in 11 of 12 parts, chance alone does as well in 1 of 500 tries"
    )
    assert str(SignFlipResult(12, 8, 4, 0.2)) == "better in 8 of 12 parts, chance alone does as well in 1 of 5 tries"
