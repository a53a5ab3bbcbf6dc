"""Steps of pipelines: what they need, their order, where the whole stands, what runs again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.lifecycle.dependencies import parse_dependency
from gpusched.lifecycle.pipelines import (
    dependency_of,
    find_circle,
    in_order,
    moved,
    names_of,
    parse_needs,
    pipeline_status,
    steps_of,
    to_resume,
    written,
)
from gpusched.model.job import Job
from gpusched.model.pipeline import StepNeed, StepNeeds
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.testing import job

DONE, FAILED, CANCELLED = JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED
PENDING, RUNNING = JobState.PENDING, JobState.RUNNING

READABLE = {
    "": StepNeeds(),
    "a": StepNeeds((StepNeed("afterok", "a"),)),
    "a, b.c-d_1": StepNeeds((StepNeed("afterok", "a"), StepNeed("afterok", "b.c-d_1"))),
    "afterany:a:b,c": StepNeeds((StepNeed("afterany", "a"), StepNeed("afterany", "b"), StepNeed("afterok", "c"))),
    "a?AfterNotOK:b": StepNeeds((StepNeed("afterok", "a"), StepNeed("afternotok", "b")), is_any=True),
    "after:a+5": StepNeeds((StepNeed("after", "a", 300),)),
    "a,a": StepNeeds((StepNeed("afterok", "a"),)),
}


@pytest.mark.parametrize(("text", "needs"), READABLE.items())
def test_needs_are_parsed(text: str, needs: StepNeeds) -> None:
    assert parse_needs(text) == needs


@pytest.mark.parametrize("text", ["a,b?c", "later:a", "a,", "afterok:", "-a", "a b", "afterok:a+5", "after:a+x", "a+5"])
def test_an_invalid_need_is_quoted(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_needs(text)
    assert repr(text) in str(error.value)


def test_needs_become_a_dependency() -> None:
    ids = {"a": 1, "b": 2, "c": 3}
    assert dependency_of(parse_needs("a,b,afterany:c"), ids, None) == "afterok:1:2,afterany:3"
    assert dependency_of(parse_needs("a?b"), ids, None) == "afterok:1?afterok:2"
    assert dependency_of(parse_needs("after:a+5,after:b"), ids, "singleton") == "singleton,after:1+5:2"
    assert dependency_of(StepNeeds(), ids, "afterok:9") == "afterok:9"
    assert dependency_of(StepNeeds(), ids, None) is None


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=10))
def test_steps_are_ordered_by_needs_or_a_cycle_is_named(edges: list[list[int]]) -> None:
    names = [f"s{number}" for number in range(len(edges))]
    needs = {
        names[at]: StepNeeds(tuple(StepNeed("afterok", names[one]) for one in dict.fromkeys(above) if one < len(edges)))
        for at, above in enumerate(edges)
    }
    circle = find_circle(needs)
    if circle is not None:
        assert circle[0] == circle[-1]
        assert all(below in needs[above].steps for above, below in pairwise(circle))
        return
    order = in_order(needs)
    assert sorted(order) == sorted(names)
    if all(int(step[1:]) < int(name[1:]) for name in names for step in needs[name].steps):
        assert order == names
    assert all(order.index(step) < order.index(name) for name in names for step in needs[name].steps)


@given(st.lists(st.sampled_from(["afterok:1", "afterany:2:3", "after:4+5", "singleton", "aftercorr:6"]), min_size=1))
def test_a_written_dependency_parses_the_same(terms: list[str]) -> None:
    for mark in ",?":
        expression = parse_dependency(mark.join(terms))
        assert parse_dependency(written(expression)).conditions == expression.conditions


def made(job_id: int, step: str, state: JobState, dependency: str | None = None, *, never: bool = False) -> Job:
    one = job(job_id, dependency=dependency, pipeline="p1", step=step, state=state)
    reason = ReasonCode.DEPENDENCY_NEVER_SATISFIED if never else None
    return replace(one, end_at=5.0 if state.is_final else None, reason=reason)


def fallback(job_id: int, of: int, step: str, state: JobState) -> Job:
    one = made(job_id, step, state)
    return replace(one, spec=replace(one.spec, fallback_of=of))


def task(job_id: int, of: int, step: str, state: JobState) -> Job:
    return replace(made(job_id, step, state), array_id=of, task=job_id - of - 1)


STANDINGS = {
    "nothing has begun": ([made(1, "a", PENDING), made(2, "b", PENDING)], "PENDING"),
    "one runs": ([made(1, "a", RUNNING), made(2, "b", PENDING)], "RUNNING"),
    "one has failed and others go on": ([made(1, "a", FAILED), made(2, "b", RUNNING)], "RUNNING"),
    "one is done, the next waits": ([made(1, "a", DONE), made(2, "b", PENDING)], "RUNNING"),
    "all are done": ([made(1, "a", DONE), made(2, "b", DONE)], "COMPLETED"),
    "one has failed": ([made(1, "a", DONE), made(2, "b", JobState.TIMEOUT)], "FAILED"),
    "cancelled": ([made(1, "a", DONE), made(2, "b", CANCELLED)], "CANCELLED"),
    "failed, and the rest never could": (
        [made(1, "a", FAILED), made(2, "b", CANCELLED, "afterok:1", never=True)],
        "FAILED",
    ),
    "what was for a failure is not needed": (
        [
            made(1, "a", DONE),
            made(2, "mend", CANCELLED, "afternotok:1", never=True),
            made(3, "after-mend", CANCELLED, "afterok:2", never=True),
        ],
        "COMPLETED",
    ),
    "failed, then resumed": ([made(1, "a", FAILED), made(2, "a", DONE)], "COMPLETED"),
    "failed, and its fallback runs": ([made(1, "a", FAILED), fallback(2, 1, "a", RUNNING)], "RUNNING"),
    "failed, and its fallback mended nothing": ([made(1, "a", FAILED), fallback(2, 1, "a", DONE)], "FAILED"),
    "a fallback of an array's task runs": (
        [made(1, "a", FAILED), task(2, 1, "a", FAILED), fallback(3, 2, "a", PENDING)],
        "RUNNING",
    ),
    "the fallback of what was resumed is past": (
        [made(1, "a", FAILED), fallback(2, 1, "a", FAILED), made(3, "a", DONE)],
        "COMPLETED",
    ),
}


@pytest.mark.parametrize(("jobs", "state"), STANDINGS.values(), ids=STANDINGS)
def test_the_state_of_a_pipeline_is_computed(jobs: list[Job], state: str) -> None:
    assert pipeline_status(jobs).state == state
    assert pipeline_status(jobs[::-1]).state == state


RESUMED = {
    "nothing when all is done": ([made(1, "a", DONE)], []),
    "what failed and what could not run for it": (
        [made(1, "a", DONE), made(2, "b", FAILED, "afterok:1"), made(3, "c", CANCELLED, "afterok:2", never=True)],
        ["b", "c"],
    ),
    "not what still waits or runs": ([made(1, "a", RUNNING), made(2, "b", PENDING), made(3, "c", FAILED)], ["c"]),
    "not what is not needed": (
        [made(1, "a", DONE), made(2, "mend", CANCELLED, "afternotok:1", never=True), made(3, "c", FAILED)],
        ["c"],
    ),
    "what was not needed, when that which it waits for runs again": (
        [
            made(1, "a", DONE),
            made(2, "mend", CANCELLED, "afternotok:1,afterok:3", never=True),
            made(3, "c", FAILED),
        ],
        ["c", "mend"],
    ),
    "a step that failed, and not its fallback": ([made(1, "a", FAILED), fallback(2, 1, "a", DONE)], ["a"]),
    "the newest job of a step counts": ([made(1, "a", FAILED), made(2, "a", DONE), made(3, "b", FAILED)], ["b"]),
    "in the order of their needs": (
        [made(1, "a", CANCELLED, "afterok:2"), made(2, "b", CANCELLED)],
        ["b", "a"],
    ),
}


@pytest.mark.parametrize(("jobs", "again"), RESUMED.values(), ids=RESUMED)
def test_steps_to_rerun_are_chosen(jobs: list[Job], again: list[str]) -> None:
    assert to_resume(jobs) == again


def test_dependencies_move_to_the_current_jobs() -> None:
    jobs = [made(1, "a", DONE), made(2, "b", FAILED), made(3, "c", CANCELLED, "afterok:1:2,afterany:77,singleton")]
    ids = {name: one.id for name, one in steps_of(jobs).items()} | {"b": 9}
    assert moved(jobs[2], names_of(jobs), ids) == "afterok:1,afterok:9,afterany:77,singleton"
    assert moved(jobs[0], names_of(jobs), ids) is None
