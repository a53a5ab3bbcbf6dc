"""What ended runs cost: by hand, additive over periods, and the same as by a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.history import seconds_in
from gpusched.model.job import GpuShare, Job, NativeJob, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, Store
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, run, share

HOUR = 3600.0
CARDS = GpuReading(NOW, "nvml", tuple(GpuSample(share(i).uuid, i, "A100", vram_total_mib=40_000) for i in range(4)))


@pytest.fixture
def store() -> Iterator[Store]:
    made = SqliteStore.in_memory()
    made.save_gpus("n1", CARDS)
    yield made
    made.close()


def lived(job_id: int, begins: float, ends: float | None, *shares: GpuShare, **parts: object) -> tuple[Job, Run]:
    """A job and its run, so many hours after NOW; `run_...` are fields of the run."""
    of_run = {name.removeprefix("run_"): parts.pop(name) for name in list(parts) if name.startswith("run_")}
    end_at = None if ends is None else NOW + ends * HOUR
    made = job(job_id, state=JobState.COMPLETED if end_at else JobState.RUNNING, end_at=end_at, run=1, **parts)
    one = run(made, gpus=shares, start_at=NOW + begins * HOUR)
    if end_at is None:
        return made, replace(one, state=RunState.RUNNING)
    fields = {"outcome": JobState.COMPLETED, **of_run}
    return made, replace(one, state=RunState.ENDED, end_at=end_at, **fields)


def put(store: Store, *lives: tuple[Job, Run]) -> None:
    store.commit(Changes(jobs={one.id: one for one, _ in lives}, runs={one.id: one for _, one in lives}))


def hours(store: Store, since: float, now: float) -> dict[tuple[str, str], float]:
    found = store.budget_sums(NOW + since * HOUR, NOW + now * HOUR)
    sums: dict[tuple[str, str], float] = {}
    for (account, user, model), amount in found.items():
        assert model in ("A100", "")
        sums[account, user] = sums.get((account, user), 0.0) + amount / HOUR
    return {mark: round(amount, 6) for mark, amount in sums.items() if amount}


def test_ended_runs_cost_what_they_held_within_the_period(store: Store) -> None:
    put(
        store,
        lived(1, 0, 4, share(0), share(1), account="vision"),
        lived(2, -3, 1, share(0), account="vision", user="bob"),
        lived(3, 1, 3, share(2, fraction=0.5), account="nlp"),
        lived(4, 1, 3, share(2, vram_mib=10_000), account="nlp"),
        lived(5, 0, 4, account="nlp"),
        lived(6, 0, None, share(3), account="nlp"),
    )
    assert hours(store, 0, 10) == {("vision", "ann"): 8, ("vision", "bob"): 1, ("nlp", "ann"): 1.5}
    # The same run over the end of a period is split.
    assert hours(store, -10, 0) == {("vision", "bob"): 3}
    assert hours(store, 4.5, 10) == {}


@pytest.mark.parametrize(
    "free",
    [
        {"run_outcome": JobState.NODE_FAIL, "run_reason": ReasonCode.NODE_DOWN},
        {"run_outcome": JobState.PREEMPTED, "run_reason": ReasonCode.PREEMPTED},
        {"run_native": NativeJob("42")},
        {"run_is_filler": True},
    ],
    ids=["node failed", "preempted", "handed over", "filler"],
)
def test_work_that_was_lost_to_others_is_free(store: Store, free: dict[str, object]) -> None:
    put(store, lived(1, 0, 4, share(0), **free), lived(2, 0, 4, share(1), run_outcome=JobState.FAILED))
    assert sum(hours(store, 0, 10).values()) == 4


def test_statements_tell_what_fillers_held(store: Store) -> None:
    put(store, lived(1, 0, 4, share(0), run_is_filler=True), lived(2, 0, 3, share(1)))
    (found,) = store.account_uses(NOW, NOW + 10 * HOUR, NOW + 10 * HOUR)
    assert (found.filler_gpu_s, sum(found.gpu_s.values())) == (4 * HOUR, 7 * HOUR)
    assert sum(found.charged_gpu_s.values()) == 3 * HOUR


def test_suspended_time_is_free(store: Store) -> None:
    put(store, lived(1, 0, 4, share(0), run_suspended_s=HOUR))
    assert hours(store, 0, 10) == {(job(1).spec.account, "ann"): 3}


LIVES = st.lists(
    st.tuples(
        st.integers(-5, 5),
        st.integers(0, 6),
        st.integers(0, 3),
        st.fixed_dictionaries(
            {
                "account": st.sampled_from(["vision", "nlp", ""]),
                "user": st.sampled_from(["ann", "bob"]),
                "run_outcome": st.sampled_from([JobState.COMPLETED, JobState.FAILED, JobState.NODE_FAIL]),
            }
        ),
    ),
    max_size=6,
)


@settings(max_examples=12, deadline=None)
@given(LIVES, st.floats(-5, 5, width=16))
def test_sums_are_those_of_the_runs_and_add_up_over_periods(lives: list[Any], edge: float) -> None:
    made = [
        lived(number, begins, begins + length, *map(share, range(gpus)), **parts)
        for number, (begins, length, gpus, parts) in enumerate(lives, start=1)
    ]
    wanted: dict[tuple[str, str], float] = {}
    for one, its_run in made:
        if its_run.outcome is not JobState.NODE_FAIL:
            mark = one.spec.account, one.user
            cost = seconds_in(its_run, NOW - 9 * HOUR, NOW + 20 * HOUR) * len(its_run.gpus)
            wanted[mark] = wanted.get(mark, 0.0) + cost
    store = SqliteStore.in_memory()
    store.save_gpus("n1", CARDS)
    put(store, *made)
    whole = hours(store, -9, 20)
    assert whole == pytest.approx({mark: round(s / HOUR, 6) for mark, s in wanted.items() if s}, abs=1e-5)
    before, after = hours(store, -9, edge), hours(store, edge, 20)
    both = {mark: before.get(mark, 0) + after.get(mark, 0) for mark in {*before, *after}}
    assert {m: h for m, h in both.items() if h > 1e-5} == pytest.approx(whole, abs=1e-4)
