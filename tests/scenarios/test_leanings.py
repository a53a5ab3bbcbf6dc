"""Nodes that a job leans to or away from: data sets, failures and run times of earlier runs. None makes it wait."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.job import Request, Run
from gpusched.model.planner_settings import PlacementSettings, PrioritySettings
from gpusched.model.settings import NodeSettings
from gpusched.model.states import JobState
from gpusched.testing import launch

FOREVER = SimulatedOutcome(runs_s=1e9)
NEAR = Request(1, near=("imagenet",))


def make_lab(**sections: Any) -> Lab:
    """Three nodes of two GPUs, the third of which has imagenet."""
    more = {"n3": NodeSettings(data=("imagenet", "coco"))}
    lab = Lab(more_nodes=("n2", "n3"), node_settings=more, outcome=FOREVER, **sections)
    lab.scheduler.history.load()
    return lab


@pytest.fixture
def lab() -> Lab:
    return make_lab()


def run_of(lab: Lab, job_id: int) -> Run:
    return lab.store.runs([job_id])[-1]


def node_of(lab: Lab, job_id: int) -> str | None:
    """First node on which a job runs; None while it is pending."""
    return run_of(lab, job_id).node if lab.job(job_id).state is JobState.RUNNING else None


def start(lab: Lab, **parts: Any) -> str | None:
    return node_of(lab, lab.submit(**{"request": Request(1), **parts}))


def story(lab: Lab, job_id: int) -> str:
    return next(event.text for event in lab.store.events(job_id) if event.kind == "started")


def play(lab: Lab, node: str, outcome: SimulatedOutcome, **parts: Any) -> int:
    """A job that runs on this node and ends there as given."""
    before, lab.outcome = lab.outcome, outcome
    request = parts.pop("request", Request(1))
    pinned = Request(request.gpus, near=request.near, nodelist=(node,))
    job = lab.submit(request=pinned, **parts)
    for _ in range(3):
        lab.tick(outcome.runs_s)
    assert lab.job(job).state.is_final, lab.job(job).state
    lab.outcome = before
    return job


DONE = SimulatedOutcome(runs_s=100)
FAILED = SimulatedOutcome(runs_s=5, exit_code=3)


# --- data -------------------------------------------------------------------------------------------


def test_a_job_goes_where_its_data_is(lab: Lab) -> None:
    job = lab.submit(request=NEAR)
    assert node_of(lab, job) == "n3"
    assert story(lab, job) == "started on n3, GPU 0 (n3 has data imagenet)"


def test_a_job_that_names_no_data_goes_where_it_would_have_gone(lab: Lab) -> None:
    assert start(lab, request=Request(2)) == "n1"


def test_a_job_does_not_wait_for_its_data(lab: Lab) -> None:
    assert [start(lab, request=NEAR) for _ in range(7)] == ["n3", "n3", "n1", "n1", "n2", "n2", None]


def test_more_of_the_data_is_nearer() -> None:
    more = {"n2": NodeSettings(data=("coco",)), "n3": NodeSettings(data=("coco", "imagenet"))}
    lab = Lab(more_nodes=("n2", "n3"), node_settings=more, outcome=FOREVER)
    wanted = Request(2, near=("coco", "imagenet"))
    assert [start(lab, request=wanted) for _ in range(3)] == ["n3", "n2", "n1"]


def test_a_gang_starts_on_the_nodes_with_its_data() -> None:
    more = {name: NodeSettings(data=("imagenet",)) for name in ("n3", "n4")}
    lab = Lab(more_nodes=("n2", "n3", "n4"), node_settings=more, outcome=FOREVER)
    assert run_of(lab, lab.submit(request=Request(1, nodes=2, near=("imagenet",)))).nodes == ("n3", "n4")


def test_preferred_labels_go_before_data() -> None:
    more = {"n2": NodeSettings(labels=("nvlink",)), "n3": NodeSettings(data=("imagenet",))}
    lab = Lab(more_nodes=("n2", "n3"), node_settings=more, outcome=FOREVER)
    assert start(lab, request=Request(1, near=("imagenet",), prefer="nvlink")) == "n2"


def test_a_node_that_has_run_such_a_job_has_its_data(lab: Lab) -> None:
    near = Request(1, near=("wiki",))
    assert start(lab, request=near) == "n1"
    play(lab, "n2", DONE, request=near)
    job = lab.submit(request=near)
    assert node_of(lab, job) == "n2"
    assert story(lab, job).endswith("(n2 your job read wiki there 0:00 ago)")
    assert start(lab, request=near, launch=launch("other")) == "n2", "whatever the program"


def test_data_read_by_others_does_not_steer(lab: Lab) -> None:
    near = Request(1, near=("wiki",))
    play(lab, "n2", DONE, request=near)
    (answer,) = lab.ask(lab.submission(BOB, request=near))
    assert node_of(lab, answer["ids"][0]) == "n1"


NOTES = {
    "data that a node declares": (("imagenet",), []),
    "data that nobody has": (
        ("imagnet",),
        [
            "no node has data imagnet, and no job of yours near it has completed lately; --near data=imagnet has no "
            "effect yet (nodes have: coco, imagenet)"
        ],
    ),
    "one of two": (
        ("coco", "wiki"),
        [
            "no node has data wiki, and no job of yours near it has completed lately; --near data=wiki has no "
            "effect yet (nodes have: coco, imagenet)"
        ],
    ),
}


@pytest.mark.parametrize(("near", "notes"), NOTES.values(), ids=NOTES)
def test_a_misspelt_data_set_is_noted(lab: Lab, near: tuple[str, ...], notes: list[str]) -> None:
    (answer,) = lab.ask(lab.submission(ANN, request=Request(1, near=near)))
    assert answer["notes"] == notes


def test_data_that_a_job_has_read_is_not_noted(lab: Lab) -> None:
    near = Request(1, near=("wiki",))
    play(lab, "n2", DONE, request=near)
    (answer,) = lab.ask(lab.submission(ANN, request=near))
    assert answer["notes"] == []


# --- history ----------------------------------------------------------------------------------------


def test_a_retry_after_a_failure_goes_elsewhere(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    job = lab.submit(request=Request(1))
    assert node_of(lab, job) == "n2"
    assert story(lab, job) == "started on n2, GPU 0 (n1 1 of 1 runs like it failed there)"


def test_only_nodes_that_a_job_may_use_are_named(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    job = lab.submit(request=Request(1, exclude=("n1",)))
    assert story(lab, job) == "started on n2, GPU 0"


def test_failures_of_other_programs_are_named_as_such(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    job = lab.submit(request=Request(1), launch=launch("other"))
    assert node_of(lab, job) == "n2"
    assert story(lab, job) == "started on n2, GPU 0 (n1 1 of 1 of your runs failed there)"


def test_a_job_that_fails_everywhere_alike_goes_where_it_went(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    play(lab, "n2", FAILED)
    assert start(lab) == "n1"


def test_a_job_takes_a_node_that_failed_rather_than_wait(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    assert [start(lab, request=Request(2)) for _ in range(4)] == ["n2", "n3", "n1", None]


def test_another_user_is_not_kept_off(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    (answer,) = lab.ask(lab.submission(BOB, request=Request(1)))
    assert node_of(lab, answer["ids"][0]) == "n1"


def test_slower_nodes_come_last(lab: Lab) -> None:
    for _ in range(4):
        play(lab, "n1", SimulatedOutcome(runs_s=300), request=Request(2))
        play(lab, "n2", SimulatedOutcome(runs_s=100), request=Request(2))
    assert [start(lab, request=Request(2)) for _ in range(3)] == ["n2", "n3", "n1"]


def test_failures_survive_a_restart(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    lab.restart()
    lab.scheduler.history.load()
    assert start(lab) == "n2"


def test_failures_fade(lab: Lab) -> None:
    play(lab, "n1", FAILED)
    lab.tick(15 * 86400)
    assert start(lab) == "n1"


def test_pending_jobs_follow_what_happens_meanwhile(lab: Lab) -> None:
    """The class of a pending job changes with the ends of others like it."""
    other = launch("other")
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=50), "3.1": SimulatedOutcome(runs_s=50, exit_code=3)}
    for name in ("n2", "n3"):
        lab.submit(request=Request(2, nodelist=(name,)), launch=other)
    failing, pending = (lab.submit(request=Request(2)) for _ in range(2))
    assert (node_of(lab, failing), node_of(lab, pending)) == ("n1", None)
    lab.tick(60)
    lab.tick(1)
    assert lab.job(failing).state is JobState.FAILED
    assert node_of(lab, pending) == "n2"


def test_history_can_be_switched_off() -> None:
    lab = make_lab(placement=PlacementSettings(by_history=False))
    play(lab, "n1", FAILED)
    job = lab.submit(request=Request(1))
    assert (node_of(lab, job), story(lab, job)) == ("n1", "started on n1, GPU 0")


def test_leanings_do_not_apply_where_jobs_wait_for_their_best_place() -> None:
    lab = make_lab(priority=PrioritySettings(backfill_elsewhere=False))
    play(lab, "n1", FAILED)
    assert start(lab) == "n1"
    assert start(lab, request=NEAR) == "n1"
