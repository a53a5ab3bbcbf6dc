"""Sums over the record of runs: exact by hand, the same from every job table, additive, and quick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.history import GROUPS, AccountUse, UsageSum, cards_in, seconds_in
from gpusched.model.job import GpuShare, Job, Run, RunMeasures
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter, Store
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, run, share

HOUR = 3600.0
CARDS = GpuReading(NOW, "nvml", tuple(GpuSample(share(i).uuid, i, "A100", vram_total_mib=40_000) for i in range(4)))
EVERYTHING = JobFilter()


@pytest.fixture
def store() -> Iterator[Store]:
    made = SqliteStore.in_memory()
    made.save_gpus("n1", CARDS)
    yield made
    made.close()


def put(store: Store, *values: Job | Run) -> None:
    store.commit(
        Changes(
            jobs={value.id: value for value in values if isinstance(value, Job)},
            runs={value.id: value for value in values if isinstance(value, Run)},
        )
    )


def lived(
    job_id: int,
    begins: float,
    ends: float | None,
    *shares: GpuShare,
    cpus: float = 1,
    mem_mib: int = 0,
    **parts: object,
) -> tuple[Job, Run]:
    """A job and its run, from and until so many hours after NOW; without an end it still runs."""
    end_at = None if ends is None else NOW + ends * HOUR
    state = JobState.RUNNING if end_at is None else JobState.COMPLETED
    made = job(job_id, state=state, end_at=end_at, run=1, **parts)
    its_run = run(made, gpus=shares, cpus=cpus, mem_mib=mem_mib, start_at=NOW + begins * HOUR)
    if end_at is None:
        return made, replace(its_run, state=RunState.RUNNING)
    return made, replace(its_run, state=RunState.ENDED, end_at=end_at, outcome=JobState.COMPLETED)


def sums(
    store: Store, by: str = "user", since: float = 0, now: float = 10, wanted: JobFilter = EVERYTHING
) -> list[UsageSum]:
    return store.usage_sums(by, wanted, NOW + since * HOUR, NOW + now * HOUR)


def hours(found: UsageSum) -> tuple[float, float, float]:
    """GPU, core and GiB hours."""
    return (
        pytest.approx(found.gpu_s / HOUR),
        pytest.approx(found.cpu_s / HOUR),
        pytest.approx(found.mem_mib_s / HOUR / 1024),
    )


def test_an_empty_table_sums_to_nothing(store: Store) -> None:
    assert sums(store) == []


def test_usage_is_amount_times_hours_per_user(store: Store) -> None:
    put(store, *lived(1, 0, 2, share(0), share(1), cpus=4, mem_mib=2048))
    put(store, *lived(2, 1, 2, cpus=0.5))
    put(store, *lived(3, 0, 1, share(2), user="zoë\udcff", account="vision"))
    ann, zoe = sums(store)
    assert (ann.name, ann.jobs, ann.runs, hours(ann)) == ("ann", 2, 2, (4, 8.5, 4))
    assert (zoe.name, zoe.jobs, zoe.runs, hours(zoe)) == ("zoë\udcff", 1, 1, (1, 1, 0))
    assert [found.name for found in sums(store, by="account")] == ["", "vision"]
    assert [(found.name, found.jobs) for found in sums(store, by="queue")] == [("default", 3)]


def test_slices_count_as_their_part_of_the_gpu(store: Store) -> None:
    put(store, *lived(1, 0, 4, share(0, fraction=0.25)), *lived(2, 0, 4, share(1, vram_mib=10_000)))
    assert hours(sums(store)[0])[0] == 2.0
    put(store, *lived(3, 0, 4, GpuShare("GPU-gone", 9, vram_mib=1)))
    assert hours(sums(store)[0])[0] == 6.0, "of a card that nobody knows, a slice counts as all of it"


def test_only_time_inside_the_span_counts_and_open_runs_count_until_now(store: Store) -> None:
    put(store, *lived(1, -5, 2, share(0)), *lived(2, 8, None, share(1)), *lived(3, -9, -1, share(2)))
    put(store, *lived(4, 12, None, share(3)))
    (found,) = sums(store)
    assert (found.jobs, found.runs, hours(found)[0]) == (2, 2, 4)


def test_suspended_time_does_not_count(store: Store) -> None:
    ended, its_run = lived(1, 0, 4, share(0))
    put(store, ended, replace(its_run, suspended_s=HOUR))
    assert hours(sums(store)[0])[0] == 3
    stands, open_run = lived(2, 0, None, share(1), user="bob", suspended_at=NOW + 6 * HOUR)
    put(store, stands, replace(open_run, suspended_s=HOUR))
    assert hours(sums(store)[1])[0] == 5


def test_a_job_with_several_runs_counts_once_and_waited_once(store: Store) -> None:
    made, first = lived(1, 1, 2, share(0))
    made = replace(made, run=3, end_at=NOW + 4 * HOUR)
    second = replace(first, number=2, gpus=(share(1),), start_at=NOW + 3 * HOUR, end_at=NOW + 4 * HOUR)
    third = replace(second, number=3, gpus=(share(0),))
    put(store, made, first, second, third)
    put(store, *lived(2, 3, 4, share(2)), *lived(3, 2, 3, share(2)))
    (found,) = sums(store)
    assert (found.jobs, found.runs, found.started) == (3, 5, 3)
    assert found.wait_s == (1 + 3 + 2) * HOUR
    (late,) = sums(store, since=2.5)
    assert (late.jobs, late.runs, late.started, late.wait_s) == (3, 4, 1, 3 * HOUR)


def test_a_clock_set_back_adds_nothing(store: Store) -> None:
    made, its_run = lived(1, 2, 1, share(0))
    put(store, replace(made, queued_at=NOW + 3 * HOUR), its_run)
    (found,) = sums(store)
    assert (found.jobs, found.gpu_s, found.cpu_s, found.wait_s) == (1, 0, 0, 0)


def test_a_run_that_never_started_does_not_count(store: Store) -> None:
    made, its_run = lived(1, 0, 1, share(0))
    put(store, made, replace(its_run, start_at=None))
    assert sums(store) == []


@pytest.mark.parametrize(
    ("wanted", "jobs"),
    [
        (JobFilter(users=frozenset({"bob"})), 1),
        (JobFilter(queues=frozenset({"default"}), states=frozenset({JobState.COMPLETED})), 1),
        (JobFilter(ids=frozenset({1, 2, 7})), 2),
        (JobFilter(names=frozenset({"?", "test"})), 2),
        (JobFilter(since=NOW + 99 * HOUR, limit=1), 2),
    ],
)
def test_filters_select_jobs(store: Store, wanted: JobFilter, jobs: int) -> None:
    put(store, *lived(1, 0, 1), *lived(2, 0, None, user="bob"))
    assert sum(found.jobs for found in sums(store, wanted=wanted)) == jobs


def test_only_known_words_form_groups(store: Store) -> None:
    put(store, *lived(1, 0, 1))
    with pytest.raises(KeyError):
        sums(store, by="uid")


times = st.integers(-20, 30).map(float)
shares = st.lists(
    st.builds(
        lambda index, part: share(index, **part),
        st.integers(0, 3),
        st.sampled_from([{}, {"fraction": 0.5}, {"vram_mib": 4000}]),
    ),
    max_size=2,
)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[Job, Run]]:
    made = []
    for job_id in range(1, draw(st.integers(1, 6)) + 1):
        begins = draw(times)
        ends = None if draw(st.booleans()) else begins + draw(st.integers(0, 30))
        of, its_run = lived(
            job_id,
            begins,
            ends,
            *draw(shares),
            cpus=draw(st.sampled_from([0, 0.5, 2])),
            mem_mib=draw(st.sampled_from([0, 1000])),
            user=draw(st.sampled_from(["ann", "bob"])),
            queue=draw(st.sampled_from(["a", "b"])),
        )
        still_s = 0.0 if ends is None else draw(st.floats(0, 1)) * (ends - begins) * HOUR
        made.append((of, replace(its_run, suspended_s=still_s)))
    return made


@settings(max_examples=60, deadline=None)
@given(lives(), st.sampled_from(GROUPS), times)
def test_sums_are_those_of_a_plain_loop(made: list[tuple[Job, Run]], by: str, since: float) -> None:
    store = SqliteStore.in_memory()
    store.save_gpus("n1", CARDS)
    for pair in made:
        put(store, *pair)
    found = sums(store, by, since, 20)
    begin, now = NOW + since * HOUR, NOW + 20 * HOUR
    wanted: dict[str, UsageSum] = {}
    for one, its_run in made:
        assert its_run.start_at is not None
        if its_run.start_at >= now or (its_run.end_at is not None and its_run.end_at < begin):
            continue
        name = {"user": one.user, "account": one.spec.account, "queue": one.spec.queue}[by]
        total = wanted.setdefault(name, UsageSum(name))
        seconds = seconds_in(its_run, begin, now, one.suspended_at)
        total.jobs += 1
        total.runs += 1
        total.gpu_s += seconds * cards_in(its_run.gpus, {gpu.uuid: 40_000 for gpu in CARDS.gpus})
        total.cpu_s += seconds * its_run.cpus
        total.mem_mib_s += seconds * its_run.mem_mib
        if its_run.start_at >= begin:
            total.started += 1
            total.wait_s += max(0.0, its_run.start_at - one.queued_at)
    assert [one.name for one in found] == sorted(wanted)
    for one in found:
        for name in ("jobs", "runs", "gpu_s", "cpu_s", "mem_mib_s", "started", "wait_s"):
            assert getattr(one, name) == pytest.approx(getattr(wanted[one.name], name)), name


@given(lives(), times, times, times)
def test_adjacent_spans_sum_to_both_together(
    made: list[tuple[Job, Run]], one: float, other: float, third: float
) -> None:
    first, middle, last = (NOW + hour * HOUR for hour in sorted((one, other, third)))
    for _, its_run in made:
        if its_run.end_at is None:
            continue
        both = seconds_in(its_run, first, middle) + seconds_in(its_run, middle, last)
        assert both == pytest.approx(seconds_in(its_run, first, last))


def test_twenty_thousand_runs_are_summed_within_a_fifth_of_a_second(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "gpusched.db")
    store.save_gpus("n1", CARDS)
    made = [
        lived(number + 1, number % 100 / 10, 20, share(number % 4), user=f"user{number % 50}")
        for number in range(20_000)
    ]
    for first in range(0, len(made), 10_000):
        put(store, *[value for pair in made[first : first + 10_000] for value in pair])
    began = time.process_time()
    found = sums(store, now=30)
    took_s = time.process_time() - began
    store.close()
    assert len(found) == 50
    held_s = sum((its_run.end_at or 0) - (its_run.start_at or 0) for _, its_run in made)
    assert held_s == pytest.approx(sum(one.gpu_s for one in found))
    assert took_s < 0.2


# --- by account and user ------------------------------------------------------------------------


def uses(
    store: Store, since: float = 0, until: float = 10, now: float = 20, user: str | None = None
) -> list[AccountUse]:
    return store.account_uses(NOW + since * HOUR, NOW + until * HOUR, NOW + now * HOUR, user)


def test_account_uses_split_runs_at_the_edges_and_tell_held_from_charged(store: Store) -> None:
    lost, lost_run = lived(2, 1, 3, share(1), account="vision")
    moved, moved_run = lived(3, 2, 4, share(2, fraction=0.5), account="vision", user="bob")
    put(store, *lived(1, -5, 5, share(0), share(9), cpus=2, account="vision"))
    put(store, lost, replace(lost_run, outcome=JobState.NODE_FAIL))
    put(store, moved, replace(moved_run, reason=ReasonCode.PREEMPTED, outcome=JobState.PREEMPTED))
    put(store, *lived(4, 9, None, share(3), account="nlp", user="zoë\udcff"), *lived(5, 10, 12, share(3)))
    nlp, ann, bob = uses(store)
    assert [(one.account, one.user, one.jobs, one.runs, one.open_runs) for one in (nlp, ann, bob)] == [
        ("nlp", "zoë\udcff", 1, 1, 1),
        ("vision", "ann", 2, 2, 0),
        ("vision", "bob", 1, 1, 0),
    ]
    assert ann.gpu_s == pytest.approx({"A100": 7 * HOUR, "": 5 * HOUR})
    assert ann.charged_gpu_s == pytest.approx({"A100": 5 * HOUR, "": 5 * HOUR})
    assert ann.cpu_s == pytest.approx(12 * HOUR)
    assert (bob.gpu_s, bob.charged_gpu_s) == ({"A100": pytest.approx(HOUR)}, {})
    assert nlp.gpu_s == {"A100": pytest.approx(HOUR)}
    assert uses(store, user="bob") == [bob]
    assert uses(store, until=-5) == []


def test_account_uses_count_what_is_known_of_use_and_energy(store: Store) -> None:
    made, first = lived(1, 0, 4, share(0), share(1))
    known = {"mean_utilisation": 0.5, "cpu_s": 3600.0, "energy_j": 7.2e6, "suspended_s": HOUR}
    put(store, made, replace(first, measured=RunMeasures(cost=1.0, grams=None), **known))
    put(store, *lived(2, 0, 4, share(2)))
    (all_of_it,) = uses(store)
    assert all_of_it.gpu_s == {"A100": pytest.approx(10 * HOUR)}
    assert all_of_it.busy_gpu_s == pytest.approx(3 * HOUR)
    assert (all_of_it.busy_cpu_s, all_of_it.energy_j, all_of_it.cost) == pytest.approx((3600, 7.2e6, 1.0))
    assert all_of_it.grams is None
    (half,) = uses(store, until=2)
    assert (half.energy_j, half.cost) == pytest.approx((3.6e6, 0.5))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-20, 20), st.floats(0, 30), st.booleans(), st.sampled_from(["ann", "bob"]), st.booleans()),
        max_size=6,
    ),
    st.floats(-10, 10),
)
def test_account_uses_of_adjacent_periods_add_up_to_those_of_a_plain_loop(
    lives: list[tuple[float, float, bool, str, bool]], middle: float
) -> None:
    store = SqliteStore.in_memory()
    store.save_gpus("n1", CARDS)
    held = dict.fromkeys(("ann", "bob"), 0.0)
    for number, (begins, lasts, is_open, user, is_free) in enumerate(lives, 1):
        made, its_run = lived(number, begins, None if is_open else begins + lasts, share(number % 4), user=user)
        if is_free and not is_open:
            its_run = replace(its_run, outcome=JobState.NODE_FAIL)
        put(store, made, replace(its_run, energy_j=None if is_open else 100.0))
        held[user] += seconds_in(its_run, NOW - 50 * HOUR, NOW + 60 * HOUR)
    parts = [uses(store, -50, middle, 60), uses(store, middle, 60, 60), uses(store, -50, 60, 60)]
    for user, wanted in held.items():
        early, late, whole = (total(part, user) for part in parts)
        assert whole[0] == pytest.approx(wanted, abs=1e-3)
        assert [a + b for a, b in zip(early, late, strict=True)] == pytest.approx(whole, abs=1e-3)


def total(found: list[AccountUse], user: str) -> list[float]:
    mine = [one for one in found if one.user == user]
    held = sum(sum(one.gpu_s.values()) for one in mine)
    charged = sum(sum(one.charged_gpu_s.values()) for one in mine)
    return [held, charged, sum(one.energy_j or 0.0 for one in mine)]
