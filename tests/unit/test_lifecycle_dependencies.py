"""Dependencies: what can be read, what it means, and circles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpusched.lifecycle import dependencies
from gpusched.lifecycle.dependencies import (
    KINDS,
    Condition,
    Expression,
    Never,
    Parent,
    Satisfied,
    Unsatisfied,
    Verdict,
    as_typed,
    find_cycle,
    parse_dependency,
)
from gpusched.lifecycle.pipelines import written
from gpusched.model.mentions import render
from gpusched.model.states import FINAL_STATES, JobState

PENDING = Parent(JobState.PENDING)
RUNNING = Parent(JobState.RUNNING, 5.0)
COMPLETED = Parent(JobState.COMPLETED, 5.0, 9.0)
FAILED = Parent(JobState.FAILED, 5.0, 9.0)
CANCELLED_UNSTARTED = Parent(JobState.CANCELLED, None, 9.0)

READABLE = {
    "afterok:1": Expression((Condition("afterok", 1),)),
    "afterok:1:2": Expression((Condition("afterok", 1), Condition("afterok", 2))),
    "afterok:1,afterany:3": Expression((Condition("afterok", 1), Condition("afterany", 3))),
    "afterok:1?afternotok:2": Expression((Condition("afterok", 1), Condition("afternotok", 2)), is_any=True),
    "AfterOK: 1 , after : 2": Expression((Condition("afterok", 1), Condition("after", 2))),
    "after:7,after:7": Expression((Condition("after", 7),)),
    "after:7+10:8": Expression((Condition("after", 7, 600), Condition("after", 8))),
    "after:7 + 0": Expression((Condition("after", 7),)),
    "aftercorr:1": Expression((Condition("aftercorr", 1),)),
    "singleton": Expression((Condition("singleton"),)),
    "Singleton,afterok:3": Expression((Condition("singleton"), Condition("afterok", 3))),
    "afterok:4_2=7:9": Expression((Condition("afterok", 7, task="4_2"), Condition("afterok", 9))),
    "afterok:1,2,3": Expression((Condition("afterok", 1), Condition("afterok", 2), Condition("afterok", 3))),
}


def evaluated(*args: Any) -> Verdict:
    """The verdict with its text as those read it who may know all jobs."""
    verdict = dependencies.evaluate(*args)
    return replace(verdict, text=render(verdict.text))


@pytest.mark.parametrize(("text", "expression"), READABLE.items())
def test_a_dependency_is_parsed(text, expression):
    assert parse_dependency(text) == expression


def test_a_task_is_shown_by_its_display_id():
    dependency = "afterok:4_2=7,after:4_3=8+1"
    assert as_typed(dependency) == "afterok:4_2,after:4_3+1"
    assert as_typed(None) is None
    verdict = evaluated(parse_dependency(dependency), {7: RUNNING, 8: PENDING}.get)
    assert verdict == Unsatisfied("waits for job 4_2 to complete and job 4_3 to start", (7, 8))
    assert written(parse_dependency(dependency)) == dependency


def test_named_jobs_are_listed():
    assert parse_dependency("afterok:9:2,afterany:2").job_ids == (2, 9)


UNREADABLE = {
    "": "''",
    "afterok": "'afterok'",
    "afterok:": "''",
    "afterok:x": "'x'",
    "afterok:0": "'0'",
    "afterok:-1": "'-1'",
    "afterok:1:": "''",
    "12": "'12'",
    "before:1": "'before:1'",
    "afterok:1,": "''",
    "afterok:1,afterany:2?after:3": "mixes ',' (all of) and '?' (any of)",
    "afterok:1_4": "'1_4'",
    "afterok:1=4": "'1=4'",
    "afterok:1_4=": "''",
    "afterok:a_4=5": "'a_4=5'",
    "afterok:1+30": "'1+30'",
    "after:1+": "'1+'",
    "after:1+x": "'1+x'",
    "after:1+999999999": "'1+999999999'",
    "singleton:1": "'singleton:1'",
    "singleton,2": "'2'",
    "expand:1": "'expand'",
    "afterok:99999999999999999999": "'99999999999999999999'",
}


@pytest.mark.parametrize(("text", "part"), UNREADABLE.items())
def test_an_unreadable_dependency_is_quoted(text, part):
    with pytest.raises(ValueError) as error:
        parse_dependency(text)
    assert part in str(error.value)
    assert repr(text) in str(error.value)


ONE_JOB = {
    "after, not started": ("after:1", PENDING, Unsatisfied("waits for job 1 to start", (1,))),
    "after, started": ("after:1", RUNNING, Satisfied()),
    "after, waiting for its second run": ("after:1", Parent(JobState.PENDING, 5.0), Satisfied()),
    "after, cancelled before it started": ("after:1", CANCELLED_UNSTARTED, Satisfied()),
    "afterany, running": ("afterany:1", RUNNING, Unsatisfied("waits for job 1 to end", (1,))),
    "afterany, completed": ("afterany:1", COMPLETED, Satisfied()),
    "afterany, failed": ("afterany:1", FAILED, Satisfied()),
    "afterok, running": ("afterok:1", RUNNING, Unsatisfied("waits for job 1 to complete", (1,))),
    "afterok, completed": ("afterok:1", COMPLETED, Satisfied()),
    "afterok, failed": (
        "afterok:1",
        FAILED,
        Never("depends on the success of job 1, which ended as FAILED", 1),
    ),
    "afterok, completing": (
        "afterok:1",
        Parent(JobState.COMPLETING, 5.0),
        Unsatisfied("waits for job 1 to complete", (1,)),
    ),
    "afternotok, pending": ("afternotok:1", PENDING, Unsatisfied("waits for job 1 to fail", (1,))),
    "afternotok, completed": (
        "afternotok:1",
        COMPLETED,
        Never("depends on the failure of job 1, which ended as COMPLETED", 1, is_spared=True),
    ),
    "afternotok, cancelled": ("afternotok:1", CANCELLED_UNSTARTED, Satisfied()),
    "aftercorr, completed": ("aftercorr:1", COMPLETED, Satisfied()),
    "aftercorr, failed": (
        "aftercorr:1",
        FAILED,
        Never("depends on the success of job 1, which ended as FAILED", 1),
    ),
    "ten minutes after, not started": ("after:1+10", PENDING, Unsatisfied("waits for job 1 to start", (1,))),
    "ten minutes after, started": ("after:1+10", RUNNING, Satisfied(605.0, "10 min after the start of job 1")),
    "ten minutes after, over": ("after:1+10", FAILED, Satisfied(605.0, "10 min after the start of job 1")),
    "ten minutes after, cancelled before it started": (
        "after:1+10",
        CANCELLED_UNSTARTED,
        Satisfied(609.0, "10 min after the end of job 1, which was never started"),
    ),
    "a job that is gone": (
        "afterany:1",
        None,
        Never("depends on job 1, which is not in the job table", 1),
    ),
}


@pytest.mark.parametrize(("text", "parent", "verdict"), ONE_JOB.values(), ids=ONE_JOB)
def test_one_parent_decides(text, parent, verdict):
    assert evaluated(parse_dependency(text), {1: parent}.get) == verdict


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_every_final_state_decides_every_kind(state):
    for kind in KINDS:
        verdict = evaluated(parse_dependency(f"{kind}:1"), {1: Parent(state, 5.0, 9.0)}.get)
        assert not isinstance(verdict, Unsatisfied)
    is_ok = isinstance(evaluated(parse_dependency("afterok:1"), {1: Parent(state, 5.0, 9.0)}.get), Satisfied)
    assert is_ok is (state is JobState.COMPLETED)


SEVERAL = {
    "all hold": ("afterok:1,afternotok:2", {1: COMPLETED, 2: FAILED}, Satisfied),
    "all, one still open": ("afterok:1:2", {1: COMPLETED, 2: RUNNING}, Unsatisfied),
    "all, one hopeless": ("afterok:1:2", {1: RUNNING, 2: FAILED}, Never),
    "any, one holds": ("afterok:1?afterok:2", {1: FAILED, 2: COMPLETED}, Satisfied),
    "any, one holds among several of one kind": ("afterok:1:2?afterany:3", {1: FAILED, 2: COMPLETED}, Satisfied),
    "any, one still open": ("afterok:1?afterok:2", {1: FAILED, 2: RUNNING}, Unsatisfied),
    "any, none can": ("afterok:1?afterok:2", {1: FAILED, 2: FAILED}, Never),
}


@pytest.mark.parametrize(("text", "parents", "kind"), SEVERAL.values(), ids=SEVERAL)
def test_several_parents_combine(text, parents, kind):
    assert isinstance(evaluated(parse_dependency(text), parents.get), kind)


LEFT_OUT = Parent(JobState.CANCELLED, None, 9.0, is_left_out=True)
SPARED = {
    "a failure that did not come": ("afternotok:1", True),
    "what was to follow a failure": ("afterok:4", True),
    "a failure": ("afterok:2", False),
    "with a failure before it": ("afterok:2,afternotok:1", True),
    "with a failure behind it": ("afternotok:1,afterok:2", True),
    "any, none of which can come": ("afternotok:1?afterok:4", True),
    "any, the last of which failed": ("afternotok:1?afterok:2", False),
    "any, the first of which failed": ("afterok:2?afternotok:1", False),
}


@pytest.mark.parametrize(("text", "is_spared"), SPARED.values(), ids=SPARED)
def test_needless_parts_are_dropped(text, is_spared):
    verdict = evaluated(parse_dependency(text), {1: COMPLETED, 2: FAILED, 4: LEFT_OUT}.get)
    assert isinstance(verdict, Never)
    assert verdict.is_spared == is_spared


DELAYS = {
    "all of them: the latest instant counts": ("after:1+10,after:2+20", 1205.0),
    "any of them: the first instant counts": ("after:1+10?after:2+20", 605.0),
    "any of them, and one has ended": ("after:1+10?afterok:2", 0.0),
    "all of them, and one has ended": ("after:1+10,afterok:2", 605.0),
}


@pytest.mark.parametrize(("text", "at"), DELAYS.values(), ids=DELAYS)
def test_delays_are_added(text, at):
    verdict = evaluated(parse_dependency(text), {1: RUNNING, 2: COMPLETED}.get)
    assert isinstance(verdict, Satisfied)
    assert verdict.at == at


def test_singleton_waits_while_there_is_an_earlier_job():
    expression = parse_dependency("singleton")
    assert expression.is_singleton
    assert expression.job_ids == ()
    assert evaluated(expression, {}.get) == Satisfied()
    assert evaluated(expression, {}.get, 7) == Unsatisfied("waits for job 7, which has the same name, to end", (7,))


def test_singleton_goes_with_others():
    both, either = parse_dependency("singleton,afterok:1"), parse_dependency("singleton?afterok:1")
    assert isinstance(evaluated(both, {1: COMPLETED}.get, 7), Unsatisfied)
    assert isinstance(evaluated(both, {1: FAILED}.get, None), Never)
    assert isinstance(evaluated(either, {1: COMPLETED}.get, 7), Satisfied)
    assert isinstance(evaluated(either, {1: FAILED}.get, 7), Unsatisfied)


def test_the_sentence_names_unsatisfied_parts():
    parents = {1: COMPLETED, 2: RUNNING, 3: PENDING}
    assert evaluated(parse_dependency("afterok:1:2,after:3"), parents.get) == Unsatisfied(
        "waits for job 2 to complete and job 3 to start", (2, 3)
    )
    assert evaluated(parse_dependency("afterany:2?afterany:3"), parents.get) == Unsatisfied(
        "waits for job 2 to end or job 3 to end", (2, 3)
    )


def test_a_long_list_is_cut_in_the_sentence_but_not_in_the_ids():
    verdict = evaluated(parse_dependency("afterany:1:2:3:4:5"), lambda _: RUNNING)
    assert verdict == Unsatisfied(
        "waits for job 1 to end and job 2 to end and job 3 to end and 2 more", (1, 2, 3, 4, 5)
    )


CYCLES = {
    "nothing": ({}, None),
    "a chain": ({3: {2}, 2: {1}}, None),
    "two ways to one job": ({4: {2, 3}, 3: {1}, 2: {1}}, None),
    "a job that waits for itself": ({1: {1}}, (1, 1)),
    "two jobs": ({1: {2}, 2: {1}}, (1, 2, 1)),
    "three jobs behind a chain": ({1: {2}, 2: {3}, 3: {4}, 4: {2}}, (2, 3, 4, 2)),
    "the second of two branches": ({1: {2, 3}, 3: {1}}, (1, 3, 1)),
}


@pytest.mark.parametrize(("edges", "cycle"), CYCLES.values(), ids=CYCLES)
def test_cycles_are_found(edges, cycle):
    assert find_cycle(edges) == cycle


def test_a_long_chain_is_neither_a_cycle_nor_recursion():
    edges = {number: {number - 1} for number in range(1, 50_000)}
    assert find_cycle(edges) is None
    assert len(find_cycle(edges | {0: {49_999}}) or ()) == 50_001
