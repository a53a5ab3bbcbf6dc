"""Whatever the history is: pruning leaves all that an unfinished job needs, all that is recent, and nothing else."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from lab import Lab

from gpusched.daemon.watch.pruning import Pruner
from gpusched.lifecycle.dependencies import parse_dependency
from gpusched.model.job import ArraySpec, Job
from gpusched.model.pipeline import Pipeline
from gpusched.model.settings import HistorySettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter, Store
from gpusched.ports.tables import PIPELINES, ChangedRows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job, launch

KEEP_S = 10 * 86400.0


@dataclass
class Past:
    """A table: its jobs and the numbers of its pipelines."""

    jobs: dict[int, Job] = field(default_factory=dict)
    pipelines: set[int] = field(default_factory=set)


@st.composite
def pasts(draw: st.DrawFn, now: float) -> Past:
    past = Past()
    next_id = 1

    def put(made: Job) -> Job:
        when = draw(st.sampled_from(["old", "old", "older", "recent", "waits"]))
        return ended(made, when)

    def ended(made: Job, when: str) -> Job:
        if when != "waits":
            age_s = {"old": KEEP_S + 5, "older": 3 * KEEP_S, "recent": KEEP_S - 5}[when]
            made = replace(made, state=JobState.COMPLETED, end_at=now - age_s, run=1)
        past.jobs[made.id] = made
        return made

    for _ in range(draw(st.integers(1, 9))):
        parts: dict[str, Any] = {"hold": "user", "launch": launch("true", env_sha=draw(st.sampled_from("abc")) * 64)}
        if past.jobs and draw(st.booleans()):
            parent = past.jobs[draw(st.sampled_from(sorted(past.jobs)))]
            word = str(parent.id) if parent.array_id is None else f"{parent.shown_id}={parent.id}"
            kinds = ["afterok", "afterany", *(["aftercorr"] if parent.is_array else [])]
            parts["dependency"] = f"{draw(st.sampled_from(kinds))}:{word}"
        if draw(st.integers(0, 2)) == 0:
            number = draw(st.integers(1, 2))
            past.pipelines.add(number)
            parts |= {"pipeline": f"p{number}", "step": f"s{next_id}"}
        kind = draw(st.sampled_from(["plain", "plain", "array", "fallback"]))
        if kind == "array":
            array = job(next_id, array=ArraySpec("0-2"), tasks_left="", **parts)
            tasks = [
                put(job(next_id + 1 + task, spec=array.spec, array_id=array.id, task=task, hold="user"))
                for task in range(3)
            ]
            waits = any(not one.state.is_final for one in tasks)
            last = max((one.end_at or 0.0 for one in tasks), default=0.0)
            past.jobs[array.id] = (
                array if waits else replace(array, state=JobState.COMPLETED, end_at=last, run=0, hold=None)
            )
            next_id += 4
        elif kind == "fallback":
            failed = ended(job(next_id, fallback_id=next_id + 1, **parts), draw(st.sampled_from(["old", "recent"])))
            put(job(next_id + 1, fallback_of=failed.id, **{**parts, "dependency": None}))
            next_id += 2
        else:
            put(job(next_id, **parts))
            next_id += 1
    return past


def needed(past: Past) -> set[int]:
    """By the words of the promise, without a look at how it is kept."""
    found: set[int] = set()
    for one in past.jobs.values():
        if one.state.is_final:
            continue
        found.add(one.id)
        found |= {
            other.id for other in past.jobs.values() if one.spec.pipeline and other.spec.pipeline == one.spec.pipeline
        }
        found |= {one.spec.fallback_of, one.fallback_id, one.array_id} - {None}  # type: ignore[arg-type]
        found |= {other.id for other in past.jobs.values() if one.array_id and other.array_id == one.array_id}
        found |= {other.id for other in past.jobs.values() if other.array_id == one.id}
        for condition in parse_dependency(one.spec.dependency).conditions if one.spec.dependency else ():
            group = condition.array_id or condition.job_id
            found |= {condition.job_id, group}
            found |= {other.id for other in past.jobs.values() if other.array_id == group}
    return found & past.jobs.keys()


def free(past: Past, now: float) -> set[int]:
    """What must be gone: old, in no group, and related to nothing that is left."""
    kept = needed(past)
    return {
        one.id
        for one in past.jobs.values()
        if one.end_at is not None
        and one.end_at < now - KEEP_S
        and one.id not in kept
        and one.array_id is None
        and not one.is_array
        and one.spec.pipeline is None
    }


@given(st.data(), st.booleans(), st.integers(1, 4))
def test_needed_rows_are_kept(data: st.DataObject, on_disk: bool, cut_off: int) -> None:
    lab = Lab(history=HistorySettings(KEEP_S / 86400))
    now = lab.clock.now()
    past = data.draw(pasts(now))
    with tempfile.TemporaryDirectory() as folder:
        store: Store = SqliteStore.open(Path(folder) / "x.db") if on_disk else SqliteStore.in_memory()
        pipelines = {number: Pipeline(number, 1000, "ann", "x", now, "") for number in past.pipelines}
        shas = {sha * 64: sha.encode() for sha in "abcd"}
        store.commit(
            Changes(jobs=dict(sorted(past.jobs.items())), payloads=shas, rows=ChangedRows({PIPELINES: pipelines}))
        )
        next_id = store.next_job_id()
        # The first of them is killed after some bites: what it leaves is as good a table as any.
        for bites in (cut_off, 1000):
            lab.store = store  # type: ignore[assignment]
            lab.restart()
            before = {
                job_id: lab.scheduler.state.dependency_state(one) for job_id, one in lab.scheduler.state.jobs.items()
            }
            pruner = Pruner(lab.ticker, lambda job: None)
            while bites and pruner.bite():
                bites -= 1
            left = {one.id: one for one in store.jobs(JobFilter())}
            assert needed(past) <= left.keys()
            recent = {one.id for one in past.jobs.values() if one.end_at is not None and one.end_at >= now - KEEP_S}
            assert recent <= left.keys()
            assert all(left[job_id] == past.jobs[job_id] for job_id in left)
            assert store.next_job_id() == next_id
            lab.restart()
            after = {
                job_id: lab.scheduler.state.dependency_state(one) for job_id, one in lab.scheduler.state.jobs.items()
            }
            assert after == before, "each waits for the same, for the same reason"
            stored = set(store.payload_shas("", 9))
            assert {one.spec.launch.env_sha for one in left.values()} <= stored
        assert bites, "it comes to an end"
        assert free(past, now).isdisjoint(left)
        if pruner.pruned:
            assert stored == {one.spec.launch.env_sha for one in left.values()}
        # A pipeline and an array are there whole or, of what nobody needs, not at all.
        for number in past.pipelines:
            members = {one.id for one in past.jobs.values() if one.spec.pipeline == f"p{number}"}
            assert (
                members <= left.keys()
                if store.find(PIPELINES, [number])
                else members & left.keys() <= recent | needed(past)
            )
        store.close()
