"""What `GET /v1/metrics` tells, on a scheduler turned by hand: against a count of every job, and what it costs."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from exposition_reader import read_page, values
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.meters import MOST_QUEUES, OTHERS, RECENT_S, GpuMeter, page
from gpusched.lifecycle import arrays
from gpusched.model import series
from gpusched.model.commands import Caller, Cancel, Hold, Release, Selection
from gpusched.model.job import ArraySpec, RetryRule
from gpusched.model.metrics import OPENMETRICS, PROMETHEUS, Histogram
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import LifeSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.testing import NOW, allocation, node, request, share

FACTS = {"version": "1.2.3", "started_at": NOW, "database": "/nonexistent/gpusched.db"}


def text(lab: Lab, form: str = PROMETHEUS) -> str:
    return page(lab.scheduler, FACTS).text(form)


def told(lab: Lab, name: str, **labels: str) -> float | None:
    """One series by some of its labels; None when it is not told."""
    found = [
        value
        for (sample, marks), value in values(text(lab)).items()
        if sample == name and labels.items() <= dict(marks).items()
    ]
    assert len(found) < 2, found
    return found[0] if found else None


def by(lab: Lab, name: str, label: str) -> dict[str, float]:
    """All series of a name by one label."""
    return {dict(marks)[label]: value for (sample, marks), value in values(text(lab)).items() if sample == name}


# --- the queue -----------------------------------------------------------------------------------


def test_every_family_is_exported_and_both_formats_are_valid() -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=100))
    lab.submit(request=request(gpus=1))
    lab.submit(request=request(gpus=2), hold=True)
    lab.tick(1)
    found = read_page(text(lab, OPENMETRICS), is_open=True)
    read_page(text(lab, PROMETHEUS), is_open=False)
    unmeasured = {series.GPU_TEMPERATURE.name, series.GPU_POWER.name, series.STORE_SIZE.name}
    assert found.keys() == {family.name for family in series.FAMILIES} - unmeasured
    for family in series.FAMILIES:
        if family.name in found:
            assert (found[family.name].kind, found[family.name].unit) == (family.kind, family.unit)
            for _, labels in found[family.name].samples:
                assert {name for name, _ in labels} - {"le"} == set(family.labels)


def counted(lab: Lab) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Jobs by user and state and waiting jobs by reason, by looking at each of them."""
    state = lab.scheduler.state
    states: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    for row in state.jobs.values():
        jobs = [row]
        if row.is_array:
            left = arrays.tasks_left(row) if row.state is JobState.PENDING else ()
            jobs = [arrays.task(row, number) for number in left]
        for job in jobs:
            states[job.user, job.state] += 1
            # A task knows its place in the line; what keeps the whole array out of it, the array knows.
            reason = lab.scheduler.answers.reason_for(row if row.is_array and state.class_of(row.id) is None else job)
            if reason is not None:
                reasons[reason.code] += 1
    return states, reasons


@pytest.mark.parametrize("seed", range(4))
def test_incremental_counts_equal_a_full_count(seed: int) -> None:
    rng = random.Random(seed)
    lab = Lab(
        2, cpus=6, outcome=SimulatedOutcome(runs_s=7), life=LifeSettings(never_satisfied=rng.choice(["wait", "cancel"]))
    )
    ids: list[int] = []
    is_by_task = False
    for _ in range(60):
        act = rng.random()
        if act < 0.5:
            parts: dict[str, Any] = {"request": request(gpus=rng.choice([0, 0, 1, 2]), cpus=rng.choice([1.0, 2.0]))}
            if ids and rng.random() < 0.4:
                kind = rng.choice(["afterok", "afternotok", "afterany", "after"])
                delay = "+1" if kind == "after" and rng.random() < 0.5 else ""
                parts["dependency"] = f"{kind}:{rng.choice(ids)}{delay}"
            if rng.random() < 0.15:
                parts["hold"] = True
            if rng.random() < 0.2:
                parts["array"] = ArraySpec("0-5", throttle=rng.choice([None, 2]))
                if ids and rng.random() < 0.5:
                    parts["dependency"] = f"aftercorr:{rng.choice(ids)}"
                    is_by_task = True
            if rng.random() < 0.2:
                parts["begin_at"] = lab.clock.now() + rng.randrange(1, 40)
            if rng.random() < 0.3:
                parts["retry"] = RetryRule(retries=2, backoff_s=9)
                lab.outcomes[f"{lab.scheduler.state.next_id}.1"] = SimulatedOutcome(runs_s=3, exit_code=1)
            caller = rng.choice([ANN, BOB])
            (answer,) = lab.ask(lab.submission(caller, **parts))
            if isinstance(answer, dict):
                ids += answer["ids"]
        elif act < 0.6 and ids:
            chosen = rng.choice(ids)
            owner = lab.job(chosen).user
            lab.ask((Hold if rng.random() < 0.5 else Release)(ANN if owner == "ann" else BOB, (chosen,)))
        elif act < 0.65 and ids:
            chosen = rng.choice(ids)
            lab.ask(Cancel(ANN if lab.job(chosen).user == "ann" else BOB, Selection(ids=(chosen,))))
        elif act < 0.7:
            lab.ticker.reload()
            lab.tick()
        else:
            lab.tick(rng.choice([0.5, 3, 12]))
        states, reasons = counted(lab)
        found = {
            (dict(marks)["user"], dict(marks)["state"]): value
            for (sample, marks), value in values(text(lab)).items()
            if sample == "gpusched_user_jobs"
        }
        assert found == states
        shown = Counter({reason: int(jobs) for reason, jobs in by(lab, "gpusched_jobs_pending", "reason").items()})
        if not is_by_task:
            assert shown == reasons
        # Which task of a line is first, `gq` only guesses when those before it are let go one by one.
        assert out_of_line(shown) == out_of_line(reasons)
        assert shown.total() == reasons.total()
    assert len(ids) > 15


def out_of_line(reasons: Counter[str]) -> dict[str, int]:
    codes = (
        *(ReasonCode.DEPENDENCY, ReasonCode.DEPENDENCY_NEVER_SATISFIED, ReasonCode.BEGIN_TIME),
        *(ReasonCode.RETRY_DELAY, ReasonCode.JOB_HELD_USER, ReasonCode.NONE),
    )
    return {code: reasons[code] for code in codes}


def test_a_scrape_neither_walks_pending_jobs_nor_queries_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(1, outcome=SimulatedOutcome(runs_s=100))
    for _ in range(30):
        lab.submit(request=request(gpus=1))

    class Shut(dict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all jobs were looked at")

        keys = values = items = __iter__  # type: ignore[assignment]

    before = values(text(lab))
    state = lab.scheduler.state
    monkeypatch.setattr(state, "jobs", Shut(state.jobs))
    monkeypatch.setattr(lab.scheduler, "store", None)
    assert values(text(lab)).keys() == before.keys()


def test_scrapes_leave_nothing_behind() -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=1000))
    for number in range(20):
        lab.submit(request=request(gpus=1), queue=f"q{number}")
    for _ in range(20):
        text(lab)
    lines = text(lab).count("\n")
    tracemalloc.start()
    try:
        text(lab)
        gc.collect()  # which also gives back the tuples that Python keeps for later
        began, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            text(lab)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - began
    finally:
        tracemalloc.stop()
    assert text(lab).count("\n") == lines
    assert grown < 20_000, grown


def test_invented_queues_do_not_create_series() -> None:
    lab = Lab(1, cpus=500, outcome=SimulatedOutcome(runs_s=100))
    lab.ask(*[lab.submission(queue=f"q{number}") for number in range(3 * MOST_QUEUES)])
    lab.tick(1)
    lab.tick(100)
    found = by(lab, "gpusched_wait_seconds_count", "queue")
    assert len(found) == MOST_QUEUES + 1
    lab.ask(*[lab.submission(queue=f"r{number}", hold=True) for number in range(2 * MOST_QUEUES)])
    states = [
        (dict(marks)["queue"], value)
        for (name, marks), value in values(text(lab)).items()
        if name == "gpusched_jobs" and dict(marks)["state"] == "PENDING"
    ]
    assert len(states) <= MOST_QUEUES + 2
    pending = lab.scheduler.state.counts()["pending"]
    assert sum(value for _, value in states) == pending
    assert dict(states)[OTHERS] > 0


def test_configured_queues_are_exported_when_empty() -> None:
    lab = Lab(1, queue={"vision": QueueSettings("vision"), "nlp": QueueSettings("nlp")})
    assert by(lab, "gpusched_queue_gpus", "queue") == {"nlp": 0, "vision": 0}
    assert told(lab, "gpusched_jobs", queue="nlp", state="PENDING") == 0


@pytest.mark.parametrize("name", ['a"b', "x\n} 1", "back\\slash", "日本", "(others)", "\udc80"])
def test_hostile_names_of_users_and_queues_stay_labels(name: str) -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=100))
    mallory = Caller(1002, name)
    lab.ask(lab.submission(mallory, queue=name, request=request(gpus=1)))
    # Two names that cannot be told apart as labels share a series.
    twin = name.encode("utf-8", "backslashreplace").decode()
    lab.ask(lab.submission(Caller(1003, twin), queue=twin, request=request(gpus=1)))
    lab.tick(1)
    assert told(lab, "gpusched_jobs", queue=twin, state="RUNNING") == 2
    assert told(lab, "gpusched_user_jobs", user=twin, state="RUNNING") == 2
    assert told(lab, "gpusched_user_gpus", user=twin) == 2
    assert told(lab, "gpusched_wait_seconds_count", queue=twin) == 2
    read_page(text(lab, OPENMETRICS), is_open=True)


# --- what is counted -----------------------------------------------------------------------------


def counters(lab: Lab) -> dict[Any, float]:
    return {
        mark: value
        for family in read_page(text(lab, OPENMETRICS), is_open=True).values()
        if family.kind in ("counter", "histogram")
        for mark, value in family.samples.items()
    }


def test_counters_only_grow() -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=5))
    before = counters(lab)
    for number in range(40):
        if number % 3 == 0:
            lab.submit(request=request(gpus=number % 2), queue=f"q{number % 5}")
        if number == 20:
            lab.ticker.reload()
        lab.tick(1)
        after = counters(lab)
        assert before.keys() <= after.keys()
        assert all(after[mark] >= value for mark, value in before.items())
        before = after
    assert told(lab, "gpusched_jobs_submitted_total") == 14
    assert told(lab, "gpusched_jobs_finished_total", state="COMPLETED") >= 10  # type: ignore[operator]
    assert told(lab, "gpusched_engine_events_total", event="ended") >= 10  # type: ignore[operator]


def test_tasks_are_counted_individually_even_without_a_row() -> None:
    lab = Lab(0, cpus=2, outcome=SimulatedOutcome(runs_s=100))
    array = lab.submit(array=ArraySpec("0-9"))
    lab.tick(1)
    assert told(lab, "gpusched_jobs_submitted_total") == 10
    assert told(lab, "gpusched_user_jobs", user="ann", state="PENDING") == 8
    assert told(lab, "gpusched_user_jobs", user="ann", state="RUNNING") == 2
    lab.ask(Cancel(ANN, Selection(ids=(array,))))
    for _ in range(5):
        lab.tick(60)
    assert told(lab, "gpusched_jobs_finished_total", state="CANCELLED") == 10
    assert by(lab, "gpusched_user_jobs", "state") == {}


def test_unrecorded_events_are_not_counted() -> None:
    lab = Lab(2)
    lab.tick()
    before = counters(lab)
    lab.store.is_full = True
    lab.ask(lab.submission(request=request(gpus=1)))
    after = counters(lab)
    assert told(lab, "gpusched_store_writable") == 0
    changed = {name for (name, marks), value in after.items() if value != before.get((name, marks))}
    assert {name for name in changed if not name.startswith("gpusched_tick_seconds")} == {
        "gpusched_commit_failures_total",
        "gpusched_tick_failures_total",
    }
    assert by(lab, "gpusched_user_jobs", "user") == {}
    lab.store.is_full = False
    lab.submit(request=request(gpus=1))
    assert told(lab, "gpusched_store_writable") == 1
    assert told(lab, "gpusched_jobs_submitted_total") == 1


def waits(lab: Lab) -> list[float]:
    """Count and sum of all waits."""
    return [told(lab, f"gpusched_wait_seconds_{part}", queue="default") or 0 for part in ("count", "sum")]


def test_a_wait_counts_from_eligibility() -> None:
    lab = Lab(1, outcome=SimulatedOutcome(runs_s=50))
    first = lab.submit(request=request(gpus=1))
    lab.submit(dependency=f"afterok:{first}")
    lab.submit(begin_at=lab.clock.now() + 30)
    assert waits(lab) == [1, 0]
    lab.tick(30)
    assert waits(lab) == [2, 0]
    lab.tick(20)
    lab.tick(1)
    count, total = waits(lab)
    assert count == 3
    # Its parent ran for 50 s; that is not the scheduler's doing.
    assert total <= 1
    lab.submit(request=request(gpus=1))
    lab.submit(request=request(gpus=1))
    for _ in range(60):
        lab.tick(1)
    count, total = waits(lab)
    assert count == 5
    assert 50 <= total <= 55


# --- GPUs and who holds them ---------------------------------------------------------------------


def test_gpus_are_exported_as_measured() -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=100))
    lab.load, lab.used, lab.strangers = {0: 0.75}, {0: 2048}, {1: 4096}
    lab.submit(request=request(gpus=1, vram_mib=8192))
    lab.tick(1)
    (card,) = [name for name, ratio in by(lab, "gpusched_gpu_booked_ratio", "gpu").items() if ratio]
    assert told(lab, "gpusched_gpu_booked_ratio", gpu=card) == pytest.approx(0.1)
    assert told(lab, "gpusched_gpu_runs", gpu=card) == 1
    assert told(lab, "gpusched_gpu_state", gpu=card, state="mixed") == 1
    assert sum(1 for (name, _), value in values(text(lab)).items() if name == "gpusched_gpu_state" and value) == 2
    assert told(lab, "gpusched_gpu_utilisation_ratio", gpu="0") == 0.75
    assert told(lab, "gpusched_gpu_memory_used_bytes", gpu="0") == 2048 << 20
    assert told(lab, "gpusched_gpu_memory_foreign_bytes", gpu="1") == 4096 << 20
    assert told(lab, "gpusched_gpu_memory_bytes", gpu="1") == 81920 << 20
    assert told(lab, "gpusched_queue_gpus", queue="default") == pytest.approx(0.1)
    assert told(lab, "gpusched_user_gpus", user="ann") == pytest.approx(0.1)


def test_unmeasurable_values_are_omitted() -> None:
    lab = Lab(2)
    measured = ("utilisation_ratio", "memory_used_bytes", "memory_foreign_bytes")

    def names() -> list[set[str]]:
        return [set(by(lab, f"gpusched_gpu_{what}", "gpu")) for what in measured]

    assert names() == [{"0", "1"}] * 3
    lab.lost = {1}
    lab.tick(1)
    assert names() == [{"0"}] * 3
    assert told(lab, "gpusched_gpu_state", gpu="1", state="lost") == 1
    lab.lost, lab.gpu_error = set(), "the driver is broken"
    lab.tick(1)
    assert names() == [set()] * 3
    assert told(lab, "gpusched_gpu_driver_up") == 0
    lab.gpu_error = None
    lab.tick(1)
    assert names() == [{"0", "1"}] * 3
    # Readings that stop coming are as bad as those that fail.
    lab.clock.advance(3600)
    assert names() == [set()] * 3


def test_gpu_seconds_integrate_held_gpus() -> None:
    lab = Lab(4, outcome=SimulatedOutcome(runs_s=100))
    lab.submit(request=request(gpus=2))
    lab.ask(lab.submission(BOB, request=request(gpus=1, gpu_fraction=0.25)))
    lab.clock.advance(40)
    assert by(lab, "gpusched_user_gpu_seconds_total", "user") == {"ann": 80, "bob": 10}
    lab.tick(60)
    lab.tick(1)
    lab.tick(1)
    assert by(lab, "gpusched_user_gpus", "user") == {"ann": 0, "bob": 0}
    final = by(lab, "gpusched_user_gpu_seconds_total", "user")
    assert 200 <= final["ann"] <= 206
    lab.clock.advance(3600)
    assert by(lab, "gpusched_user_gpu_seconds_total", "user") == final
    lab.clock.advance(RECENT_S)
    assert by(lab, "gpusched_user_gpu_seconds_total", "user") == {}


def test_a_clock_set_back_decreases_nothing() -> None:
    meter = GpuMeter()
    held = [allocation(1, gpus=[0, share(1, vram_mib=6144)], user="ann")]
    meter.hold(NOW, held, [node(gpus=2)])
    assert meter.seconds(NOW + 10) == {"ann": 12.5}
    assert meter.seconds(NOW - 500) == {"ann": 12.5}
    assert meter.seconds(NOW - 490) == {"ann": 25.0}
    meter.hold(NOW - 490, [])
    assert meter.by_user == {}
    assert meter.seconds(NOW) == {"ann": 25.0}


def test_an_observation_at_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 5.0))
    for value in (0.0, 1.0, 1.1, 5.0, 6.0):
        histogram.add(value)
    assert [count for _, count in histogram.cumulated()] == [2, 4, 5]
    assert (histogram.count, histogram.sum) == (5, 13.1)


def test_reasons_are_the_words_of_gq() -> None:
    lab = Lab(1, outcome=SimulatedOutcome(runs_s=100))
    for _ in range(4):
        lab.submit(request=request(gpus=1))
    lab.submit(hold=True)
    assert by(lab, "gpusched_jobs_pending", "reason") == {
        ReasonCode.RESOURCES: 1,
        ReasonCode.PRIORITY: 2,
        ReasonCode.JOB_HELD_USER: 1,
    }
