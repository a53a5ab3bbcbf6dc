"""The table of a replay answers like the one on disk, whenever it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.simulate.replay_table import ReplayTable
from gpusched.model.job import Job, Run
from gpusched.model.snapshot import Estimate
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import ESTIMATES, ChangedRows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, run

OVER = {"state": RunState.ENDED, "end_at": NOW, "outcome": JobState.FAILED}


def life(job_id: int, attempts: int) -> list[tuple[Job, Run | None]]:
    """Rows of a job in order: submitted, then each attempt's start and end."""
    rows: list[tuple[Job, Run | None]] = [(job(job_id), None)]
    for number in range(1, attempts + 1):
        runs = replace(rows[0][0], state=JobState.RUNNING, run=number)
        one = run(runs, number=number)
        rows.append((runs, one))
        is_last = number == attempts
        after = {"state": JobState.FAILED, "end_at": NOW} if is_last else {"state": JobState.PENDING}
        rows.append((replace(runs, **after), replace(one, **OVER)))
    return rows


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.lists(st.sampled_from(["step", "step", "step", "runs", "jobs", "prune"]), max_size=20),
    st.randoms(use_true_random=False),
)
def test_it_answers_like_the_job_table(attempts: list[int], steps: list[str], random: object) -> None:
    replay, table = ReplayTable.in_memory(), SqliteStore.in_memory()
    lives = {job_id: life(job_id, many) for job_id, many in enumerate(attempts, 1)}
    ids = sorted(lives)
    for step in steps:
        if step == "step":
            going = [job_id for job_id in ids if lives[job_id]]
            if not going:
                continue
            one, its_run = lives[random.choice(going)].pop(0)  # type: ignore[attr-defined]
            estimate = {one.id: Estimate(one.id, NOW, NOW, None)}
            for store in (replay, table):
                changes = Changes({one.id: one}, rows=ChangedRows({ESTIMATES: {**estimate}}))
                if its_run is not None:
                    changes.runs[its_run.id] = its_run
                store.commit(changes)
        elif step == "prune":
            ended = [job_id for job_id in ids if not lives[job_id] and attempts[job_id - 1]]
            for store in (replay, table):
                store.prune(ended)
        elif step == "runs":
            assert replay.runs([*ids, 99]) == table.runs([*ids, 99])
        else:
            assert replay.jobs(JobFilter()) == table.jobs(JobFilter())
    assert replay.runs(ids) == table.runs(ids)
    assert replay.jobs(JobFilter()) == table.jobs(JobFilter())
    assert replay.load_active() == table.load_active()
    assert replay.load(ESTIMATES) == table.load(ESTIMATES)


def test_it_knows_the_payloads_that_it_was_given() -> None:
    replay = ReplayTable.in_memory()
    replay.commit(Changes(payloads={"0" * 64: b""}))
    assert replay.known_payloads(["0" * 64, "1" * 64]) == {"0" * 64}
    assert replay.payload("0" * 64) == b""
    with pytest.raises(KeyError):
        replay.payload("1" * 64)
