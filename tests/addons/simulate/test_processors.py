"""Conservative backfill by numbers alone gives the schedules of the scheduler's planner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from gpusched.addons.simulate import planner_run
from gpusched.addons.simulate.cluster import nodes_of, processors
from gpusched.addons.simulate.policies import rules_of
from gpusched.addons.simulate.processors import FreeSteps, ProcessorsPlanner, is_covered
from gpusched.addons.simulate.trace import TraceJob
from gpusched.scheduler.state import PlannerState

COUNT = 8


@st.composite
def traces(draw: st.DrawFn) -> list[TraceJob]:
    """Jobs in bursts, most of which end before their limits."""
    jobs, now = [], 0
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from((0, 0, 1, 3, 40)))
        limit_s = draw(st.sampled_from((1, 4, 10, 10, 60)))
        run_s = draw(st.integers(0, limit_s))
        procs = draw(st.sampled_from((1, 1, 2, 5, COUNT)))
        user = draw(st.sampled_from(("ann", "bob")))
        jobs.append(TraceJob(str(number), now, run_s, limit_s, procs=procs, user=user))
    return jobs


@given(traces(), st.sampled_from(("fcfs", "sjf", "saf", "spf")), st.sampled_from((None, "mixed", "own")))
@effort(max_examples=60, deadline=None)
def test_the_schedules_are_those_of_the_scheduler(jobs: list[TraceJob], order: str, predict: str | None) -> None:
    nodes, settings = processors(COUNT), rules_of(f"{order}+cons").settings()
    found = planner_run.PlannerRun(jobs, nodes, settings, predict=predict)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_run, "is_covered", lambda *_: False)
        wanted = planner_run.PlannerRun(jobs, nodes, settings, predict=predict)
    assert isinstance(wanted.state, PlannerState)
    if predict is None or planner_run.has_limits(jobs):
        assert isinstance(found.state, ProcessorsPlanner)
    for body in (found, wanted):
        planner_run.play([job.submit_s for job in jobs], body)
    assert found.starts == wanted.starts


PROCS = TraceJob("1", 0, 5, 10, procs=2)


@pytest.mark.parametrize(
    ("policy", "job", "nodes"),
    [
        ("fcfs+easy", PROCS, processors(COUNT)),
        ("fcfs+none", PROCS, processors(COUNT)),
        ("fcfs+cons", TraceJob("1", 0, 5, 10, gpus=1), nodes_of("1x8")),
        ("fcfs+cons", PROCS, nodes_of("1x8")),
        ("fcfs+cons", TraceJob("1", 0, 5, 0, procs=2), processors(COUNT)),
    ],
)
def test_other_plans_are_left_to_the_scheduler(policy: str, job: TraceJob, nodes: tuple) -> None:
    assert not is_covered([job], nodes, rules_of(policy).settings())
    assert is_covered([PROCS], processors(COUNT), rules_of("fcfs+cons").settings())


def test_an_amount_is_taken_where_it_stays_free() -> None:
    steps = FreeSteps(0.0, 2, [(10.0, 3), (10.0, 1), (20.0, 2)])
    assert [steps.take(6, 5.0), steps.take(2, 10.0), steps.take(1, 1.0), steps.take(9, 1.0)] == [10.0, 0.0, 15.0, None]
    steps.move_on(16.0)
    assert steps.take(6, 1.0) == 16.0
