"""Queues that are promised whole groups of linked GPUs: others may use them, but not break up the last for good."""

from __future__ import annotations

from scenario import Scenario, running, settings, wants

from gpusched.testing import gpu_view, node


def linked(name, groups=(0, 0, 1, 1)):
    """A node whose cards are linked in groups."""
    return node(name, [gpu_view(index, name, link_group=group) for index, group in enumerate(groups)])


ONE = [linked("n1")]
IN_ORDER = {"strategy": "first"}
"""A strategy that would not leave groups of linked cards whole by itself."""
RULES = settings(
    queue={"pairs": {"cells": ("2",)}, "small": {"guaranteed_gpus": 2.0}},
    preempt={"min_run_s": 60.0},
    placement=IN_ORDER,
)


def small(job_id, gpus=1, **parts):
    return wants(job_id, gpus, queue="small", user="small", **parts)


def test_unreclaimable_jobs_stay_in_one_group():
    held = [running(9, "n1:2", queue="small", user="small")]
    assert Scenario(ONE, [small(1)], held, RULES).outcome().starts == {1: "n1:3"}


def test_without_the_promise_they_would_go_elsewhere():
    held = [running(9, "n1:2", queue="small", user="small")]
    free = settings(queue={"pairs": {}, "small": {"guaranteed_gpus": 2.0}}, placement=IN_ORDER)
    assert Scenario(ONE, [small(1)], held, free).outcome().starts == {1: "n1:0"}


def test_reclaimable_jobs_may_use_any_gpu():
    held = [running(8, "n1:2", queue="small", user="small"), running(9, "n1:3", queue="small", user="small")]
    outcome = Scenario(ONE, [small(1), small(2)], held, RULES).outcome()
    assert sorted(outcome.starts.values()) == ["n1:0", "n1:1"]


def test_the_queue_reclaims_its_whole_group():
    held = [running(number, f"n1:{number - 6}", queue="small", user="small") for number in (6, 7, 8, 9)]
    outcome = Scenario(ONE, [wants(1, 2, queue="pairs", user="p", is_linked=True)], held, RULES).outcome()
    assert len(outcome.preempts) == 2
    place, _ = outcome.reserved[1]
    assert place in ("n1:0,1", "n1:2,3")


def test_without_preemption_no_loan_breaks_the_last_group():
    rules = settings(queue={"pairs": {"cells": ("2",)}, "small": {"guaranteed_gpus": 2.0}}, preempt={"mode": "off"})
    held = [running(8, "n1:2", queue="small", user="small"), running(9, "n1:3", queue="small", user="small")]
    outcome = Scenario(ONE, [small(1)], held, rules).outcome()
    assert outcome.starts == {}
    assert outcome.codes == {1: "QueueGuarantee"}
    assert outcome.text(1) == "queue pairs is promised 2 linked GPUs and could no longer get them"
