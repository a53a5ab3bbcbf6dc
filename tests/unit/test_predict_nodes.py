"""What ended runs say about nodes: failures, run times, data; how it fades, and what it cannot be abused for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.leaning import NodeLeaning
from gpusched.predict.family import Family
from gpusched.predict.nodes import KEPT_S, MOST_AGAINST, RUNS_KEPT, NodeHistory, NodeRun

DAY = 86400.0
NOW = 100 * DAY
TRAIN = Family("ann", "python train.py", 1)
EVAL = Family("ann", "python eval.py", 1)
FAILED = ("FAILED", 1, None)
KILLED = ("FAILED", None, 9)


def ok(node: str, run_s: float = 100.0, *, age: float = 0.0, data: tuple[str, ...] = ()) -> NodeRun:
    return NodeRun(node, NOW - age, run_s, None, data)


def bad(node: str, cause: object = FAILED, *, age: float = 0.0) -> NodeRun:
    return NodeRun(node, NOW - age, 0.0, cause)


def history_of(runs: Iterable[NodeRun], kind: Family = TRAIN) -> NodeHistory:
    made = NodeHistory()
    for run in runs:
        made.learn(kind, run)
    return made


def points(runs: Iterable[NodeRun], kind: Family = TRAIN, learned: Family = TRAIN) -> dict[str, int]:
    found = history_of(runs, learned).leaning(kind, (), NOW)
    return {} if found is None else dict(found.points)


POINTS = {
    "nothing known": ([], {}),
    "success says nothing": ([ok("n1"), ok("n2")], {}),
    "one failure sends the next try elsewhere": ([bad("n1")], {"n1": -4}),
    "one failure among many successes does not": ([bad("n1"), *[ok("n1")] * 6], {}),
    "failing here and working elsewhere": ([bad("n1"), ok("n2"), ok("n2"), ok("n2")], {"n1": -7}),
    "always failing here is bounded": ([*[bad("n1")] * 20, *[ok("n2")] * 20], {"n1": -MOST_AGAINST}),
    "failing everywhere alike is the job's own fault": ([bad("n1"), bad("n2"), bad("n1")], {}),
    "failing elsewhere in another way": ([bad("n1"), bad("n2", KILLED)], {}),
    "another signal here only": ([bad("n1", KILLED), bad("n1"), bad("n2"), ok("n2"), ok("n3")], {"n1": -7}),
    "three of four take longer": ([ok("n1", 200)] * 4 + [ok("n2", 100)] * 4, {"n1": -4}),
    "a little longer says nothing": ([ok("n1", 115)] * 4 + [ok("n2", 100)] * 4, {}),
    "three runs are too few": ([ok("n1", 200)] * 3 + [ok("n2", 100)] * 4, {}),
    "some longer ones are chance": ([ok("n1", 100), ok("n1", 100), ok("n1", 900), ok("n1", 900)] + [ok("n2")] * 4, {}),
    "half again as long": ([ok("n1", 150)] * 4 + [ok("n2", 100)] * 4, {"n1": -2}),
    "much longer is bounded": ([ok("n1", 9999)] * 4 + [ok("n2", 1)] * 4, {"n1": -4}),
}


@pytest.mark.parametrize(("runs", "expected"), POINTS.values(), ids=POINTS)
def test_runs_speak_for_and_against_nodes(runs: list[NodeRun], expected: dict[str, int]) -> None:
    assert points(runs) == expected


AGES = {
    "today": (0.0, -4),
    "two days ago": (2 * DAY, -2),
    "last week": (7 * DAY, None),
    "too long ago": (KEPT_S, None),
}


@pytest.mark.parametrize(("age", "expected"), AGES.values(), ids=AGES)
def test_failures_fade(age: float, expected: int | None) -> None:
    assert points([bad("n1", age=age)]).get("n1") == expected


def test_new_runs_displace_old_ones() -> None:
    assert points([*[bad("n1")] * 5, *[ok("n1")] * RUNS_KEPT, *[ok("n2")] * 5]) == {}


def test_failures_of_other_programs_of_the_user_count_half() -> None:
    runs = [bad("n1"), bad("n1"), ok("n2"), ok("n2")]
    assert points(runs, EVAL)["n1"] == points(runs)["n1"] // 2


def test_own_runs_on_a_node_count_instead_of_other_programs() -> None:
    known = history_of([bad("n1"), bad("n1"), ok("n2"), ok("n2")])
    known.learn(EVAL, ok("n1"))
    assert known.leaning(EVAL, (), NOW) is None


def test_programs_that_fail_alike_everywhere_say_nothing_about_others() -> None:
    known = history_of([bad("n1"), bad("n2")])
    assert known.leaning(EVAL, (), NOW) is None


def test_jobs_of_other_users_say_nothing() -> None:
    theirs = Family("eve", TRAIN.command, TRAIN.gpus)
    assert points([bad("n1")] * 20, TRAIN, learned=theirs) == {}
    known = history_of([ok("n1", data=("imagenet",))], theirs)
    assert known.leaning(TRAIN, ("imagenet",), NOW) is None
    assert not known.is_known_data("ann", "imagenet", NOW)


def test_data_is_near_where_a_job_has_read_it() -> None:
    known = history_of([ok("n2", data=("coco", "imagenet")), ok("n1", data=("coco",))])
    assert known.leaning(TRAIN, ("imagenet",), NOW) == NodeLeaning(read=(("n2", "imagenet"),))
    both = known.leaning(EVAL, ("coco", "imagenet"), NOW)
    assert both == NodeLeaning(read=(("n1", "coco"), ("n2", "coco"), ("n2", "imagenet")))
    assert known.leaning(TRAIN, (), NOW) is None
    assert known.leaning(TRAIN, ("imagenet",), NOW + KEPT_S) is None


def test_a_failed_run_has_read_nothing() -> None:
    known = history_of([NodeRun("n1", NOW, 0.0, FAILED, ("imagenet",))])
    assert not known.is_known_data("ann", "imagenet", NOW)


def test_reasons_are_sentences() -> None:
    known = history_of([bad("n1"), bad("n1"), ok("n1"), *[ok("n2", 100, data=("coco",))] * 4, *[ok("n3", 200)] * 4])
    assert [(one.node, one.points, one.text) for one in known.reasons(TRAIN, ("coco",), NOW + 7200)] == [
        ("n1", -5, "2 of 3 runs like it failed there, 0 of 8 elsewhere"),
        ("n2", 2, "your job read coco there 2:00:00 ago"),
        ("n3", -4, "4 runs like it took 2.0 times as long there as elsewhere"),
    ]


RUNS = st.lists(
    st.builds(
        NodeRun,
        st.sampled_from(("n1", "n2", "n3")),
        st.floats(NOW - 2 * KEPT_S, NOW),
        st.floats(0, 1e6),
        st.sampled_from((None, None, FAILED, KILLED)),
        st.sampled_from(((), ("coco",))),
    ),
    max_size=60,
)


@given(RUNS)
def test_points_are_bounded_and_explained(runs: list[NodeRun]) -> None:
    known = history_of(runs)
    found = known.leaning(TRAIN, ("coco",), NOW) or NodeLeaning()
    assert all(-MOST_AGAINST <= value < 0 for _, value in found.points)
    told = known.reasons(TRAIN, ("coco",), NOW)
    assert {node for node, _ in found.points} == {one.node for one in told if one.points < 0}
    assert {node for node, _ in found.read} == {one.node for one in told if one.points > 0}


@given(RUNS, st.integers(0, 60))
def test_what_was_read_from_the_table_counts_as_what_was_seen(runs: list[NodeRun], number: int) -> None:
    """A restart reads the past in pieces, the newest first."""
    runs = sorted(runs, key=lambda run: run.ended_at)
    seen = history_of(runs)
    read = history_of(runs[number:])
    read.learn_older((TRAIN, run) for run in runs[:number])
    for kind in (TRAIN, EVAL):
        assert read.leaning(kind, ("coco",), NOW) == seen.leaning(kind, ("coco",), NOW)
        assert read.reasons(kind, ("coco",), NOW) == seen.reasons(kind, ("coco",), NOW)
