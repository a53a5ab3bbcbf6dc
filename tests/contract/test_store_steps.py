"""What every job table promises about steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpusched.errors import BrokenInvariant
from gpusched.model.job import GpuShare
from gpusched.model.states import JobState
from gpusched.model.step import JobStep, StepPart
from gpusched.model.value import replace
from gpusched.ports import Changes, Store
from gpusched.ports.tables import STEPS, ChangedRows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, run


@pytest.fixture
def store() -> Iterator[Store]:
    made = SqliteStore.in_memory()
    jobs = {1: job(1, state=JobState.RUNNING, run=2), 2: job(2, state=JobState.RUNNING, run=1)}
    runs = [run(jobs[1], number=1), run(jobs[1], number=2), run(jobs[2], number=1)]
    made.commit(Changes(jobs=jobs, runs={one.id: one for one in runs}))
    yield made
    made.close()


def step(number: int, job_id: int = 1, run: int = 1, **parts: object) -> JobStep:
    facts = {"name": "train", "command": "python train.py", "node": "n1", "start_at": NOW, **parts}
    return JobStep(job_id=job_id, run=run, number=number, **facts)  # type: ignore[arg-type]


def put(store: Store, *steps: JobStep) -> None:
    store.commit(Changes(rows=ChangedRows({STEPS: {one.id: one for one in steps}})))


RICH = step(
    3,
    name='"quoted" \udcff',
    command="\x1b[31m\nzoë",
    tasks=4,
    cpus=2.5,
    gpus=(GpuShare("GPU-1", 0), GpuShare("GPU-2", 1, vram_mib=8192)),
    is_exclusive=True,
    has_own_gpus=True,
    time_limit_s=60,
    cancel_uid=1000,
    user_cpu_s=0.25,
    system_cpu_s=1 / 3,
    peak_mem_mib=12.5,
    mean_mem_mib=0.0,
    pid=4711,
    start_ticks=99,
    parts=(
        StepPart("n1", (0, 2), 1.5, (GpuShare("GPU-1", 0),)),
        StepPart("n2", (1, 3), 1.0, (GpuShare("GPU-2", 1, vram_mib=8192),)),
    ),
)


def test_a_step_round_trips(store: Store) -> None:
    put(store, RICH)
    assert store.steps([1]) == [RICH]
    assert list(store.load(STEPS).values()) == [RICH]


def test_an_ended_step_is_kept_and_no_longer_open(store: Store) -> None:
    put(store, step(0), step(1))
    ended = replace(step(0), state=JobState.FAILED, end_at=NOW + 5, exit_code=3)
    put(store, ended)
    assert store.steps([1]) == [ended, step(1)]
    assert list(store.load(STEPS).values()) == [step(1)]


def test_a_step_may_begin_and_end_in_one_commit(store: Store) -> None:
    ended = replace(step(0), state=JobState.COMPLETED, end_at=NOW, exit_code=0)
    put(store, ended)
    assert (store.steps([1]), list(store.load(STEPS).values())) == ([ended], [])


def test_steps_come_by_job_run_and_number(store: Store) -> None:
    some = [step(1, job_id=2), step(10, run=2), step(2, run=2), step(0)]
    put(store, *some)
    wanted = [step(0), step(2, run=2), step(10, run=2), step(1, job_id=2)]
    assert store.steps([2, 1]) == wanted
    assert list(store.load(STEPS).values()) == wanted
    assert store.steps([2]) == wanted[3:]
    assert store.steps([]) == store.steps([7]) == []


def test_numbers_go_on_within_a_run_and_begin_anew_with_the_next(store: Store) -> None:
    assert store.next_step(1, 1) == 0
    put(store, step(0), replace(step(1), state=JobState.CANCELLED, end_at=NOW + 1))
    assert (store.next_step(1, 1), store.next_step(1, 2), store.next_step(9, 1)) == (2, 0, 0)


def test_a_steps_end_is_final(store: Store) -> None:
    ended = replace(step(0), state=JobState.COMPLETED, end_at=NOW, exit_code=0)
    put(store, ended)
    with pytest.raises(BrokenInvariant):
        put(store, replace(ended, exit_code=1, state=JobState.FAILED))
    assert store.steps([1]) == [ended]


@pytest.mark.parametrize(
    "bad",
    [
        step(0, run=3),
        step(0, job_id=9),
        step(-1),
        step(0, tasks=0),
        step(0, state=JobState.COMPLETED),
        step(0, end_at=NOW),
    ],
    ids=["no such run", "no such job", "negative number", "no tasks", "ended without an end", "an end while it runs"],
)
def test_an_impossible_step_is_refused_with_all_of_its_commit(store: Store, bad: JobStep) -> None:
    with pytest.raises(BrokenInvariant):
        put(store, step(5, job_id=2), bad)
    assert store.steps([1, 2, 9]) == []


def test_steps_go_with_their_job(store: Store) -> None:
    put(store, step(0), step(0, job_id=2))
    store.prune([1])
    assert store.steps([1, 2]) == [step(0, job_id=2)]
