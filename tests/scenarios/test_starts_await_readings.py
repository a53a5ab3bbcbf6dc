"""How new the readings are that a start needs: of all its nodes, by when they began, and each node for itself."""

from __future__ import annotations

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.commands import Submit
from gpusched.model.job import ArraySpec
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.testing import request

PENDING, RUNNING = JobState.PENDING, JobState.RUNNING
GANG = request(gpus=1, nodes=2)


@pytest.fixture
def lab() -> Lab:
    """Two nodes of one GPU, last read 4 s ago."""
    made = Lab(gpus=1, cpus=300, more_nodes=("n2",), outcome=SimulatedOutcome(runs_s=1e9))
    made.tick()
    made.clock.advance(4)
    return made


def tick(lab: Lab, *commands: Submit) -> None:
    """A tick without a reading, as when a request wakes the daemon."""
    for command in commands:
        lab.ticker.submit(command, lambda answer: None)
    lab.ticker.tick()


def states(lab: Lab, *jobs: int) -> list[JobState]:
    return [lab.job(job).state for job in jobs]


def why(lab: Lab, job_id: int) -> str:
    reason = lab.scheduler.answers.reason_for(lab.job(job_id))
    assert reason is not None
    assert reason.code is ReasonCode.NONE is lab.scheduler.answers.reason_codes()(lab.job(job_id))
    return reason.text


WAITS = "is about to start: waits for a new reading of the GPUs of "


@pytest.mark.parametrize(("read", "awaited"), [("n1", "n2"), ("n2", "n1")])
def test_a_gang_awaits_a_new_reading_of_each_of_its_nodes(lab: Lab, read: str, awaited: str) -> None:
    (lab.read_head if read == "n1" else lambda: lab.read_node("n2"))()
    tick(lab, lab.submission(request=GANG))
    assert states(lab, 1) == [PENDING]
    assert lab.scheduler.decide_step.awaited == {awaited}
    assert why(lab, 1) == f"{WAITS}node {awaited}; the last one is 0:04 old"
    (lab.read_head if read == "n2" else lambda: lab.read_node("n2"))()
    tick(lab)
    assert states(lab, 1) == [RUNNING]
    assert not lab.scheduler.decide_step.awaited


def test_a_gang_awaits_the_readings_of_both_nodes(lab: Lab) -> None:
    tick(lab, lab.submission(request=GANG))
    assert lab.scheduler.decide_step.awaited == {"n1", "n2"}
    assert why(lab, 1) == f"{WAITS}nodes n1 and n2"
    lab.read_head()
    tick(lab)
    assert (states(lab, 1), lab.scheduler.decide_step.awaited) == ([PENDING], {"n2"})


def test_an_array_says_what_its_first_task_waits_for(lab: Lab) -> None:
    tick(lab, lab.submission(request=GANG, array=ArraySpec("1-3")))
    assert why(lab, 1) == f"{WAITS}nodes n1 and n2"


def test_a_foreign_process_on_the_second_node_is_found_before_a_gang_starts(lab: Lab) -> None:
    lab.held_on["n2", ""] = 0, 60_000
    lab.read_head()
    tick(lab, lab.submission(request=GANG))
    lab.read_node("n2")
    tick(lab)
    reason = lab.scheduler.answers.reason_for(lab.job(1))
    assert states(lab, 1) == [PENDING]
    assert reason is not None
    assert "GPU 0 of node n2: " in reason.text


def test_a_reading_that_was_under_way_for_long_is_as_old_as_it_is(lab: Lab) -> None:
    early = lab.scheduler.cluster["n2"].reading
    assert early is not None
    began_at = lab.clock.now()
    lab.clock.advance(10)
    lab.scheduler.observe_gpus(replace(early, at=began_at), lab.scheduler.cluster["n2"], {})
    tick(lab, lab.submission(request=request(gpus=1, nodelist=("n2",))))
    assert states(lab, 1) == [PENDING]
    assert why(lab, 1) == f"{WAITS}node n2; the last one is 0:10 old"


def test_readings_begun_for_a_start_confirm_it_however_slow_the_first_is(lab: Lab) -> None:
    tick(lab, lab.submission(request=GANG))
    began_at = lab.clock.now()
    for node, seconds in (("n2", 0.5), ("n1", 3.5)):
        found = lab.scheduler.cluster[node]
        assert found.reading is not None
        lab.clock.advance(seconds)
        lab.scheduler.observe_gpus(replace(found.reading, at=began_at), found, {})
        tick(lab)
    assert states(lab, 1) == [RUNNING]


def test_a_reading_begun_before_the_start_was_planned_does_not(lab: Lab) -> None:
    reading = lab.scheduler.head.reading
    assert reading is not None
    began_at = lab.clock.now()
    lab.clock.advance(2)
    tick(lab, lab.submission(request=request(gpus=1, nodelist=("n1",))))
    lab.clock.advance(1)
    lab.scheduler.observe_gpus(replace(reading, at=began_at))
    tick(lab)
    assert (states(lab, 1), lab.scheduler.decide_step.awaited) == ([PENDING], {"n1"})


def test_a_clock_that_is_set_back_makes_no_reading_new(lab: Lab) -> None:
    lab.clock.advance(-3600)
    tick(lab, lab.submission(request=request(gpus=1, nodelist=("n1",))))
    assert (states(lab, 1), lab.scheduler.decide_step.awaited) == ([PENDING], {"n1"})
    lab.read_head()
    tick(lab)
    assert states(lab, 1) == [RUNNING]


def test_another_node_is_not_held_up_meanwhile(lab: Lab) -> None:
    lab.read_head()
    on = [lab.submission(request=request(gpus=1, nodelist=(node,))) for node in ("n2", "n1")]
    many = lab.submission(request=request(cpus=1, nodelist=("n1",)), array=ArraySpec("1-200"))
    tick(lab, *on, many)
    assert states(lab, 1, 2) == [PENDING, RUNNING]
    assert lab.scheduler.decide_step.awaited == {"n2"}
    # More than one plan has room for.
    assert len(lab.scheduler.state.open_runs) == 201
    lab.read_head()
    tick(lab)
    assert (states(lab, 1), lab.scheduler.decide_step.awaited) == ([PENDING], {"n2"})
