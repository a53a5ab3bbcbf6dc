"""Whatever fails, is tried again or is restarted in between: nobody starts before what it waits for allows it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.lifecycle.dependencies import Condition, parse_dependency
from gpusched.model.job import Job, RetryRule
from gpusched.model.states import JobState

KINDS = ("after", "afterok", "afterany", "afternotok")

graphs = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 8)), max_size=3),
        st.sampled_from(",?"),
        st.integers(0, 1),
        st.booleans(),
    ),
    min_size=2,
    max_size=8,
)
turns = st.lists(
    st.tuples(
        st.floats(0.5, 15),
        st.sampled_from(
            [SimulatedOutcome(runs_s=5), SimulatedOutcome(runs_s=5, exit_code=1), SimulatedOutcome(runs_s=3, lost=True)]
        ),
        st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=12,
)


def came_true(one: Condition, parent: Job, first_start_at: float | None, at: float) -> bool:
    """Whether a condition held at an instant, by what is known at the end."""
    has_ended = parent.end_at is not None and parent.end_at <= at
    if one.kind == "after":
        return has_ended or (first_start_at is not None and first_start_at <= at)
    is_right = {"afterok": parent.state is JobState.COMPLETED, "afternotok": parent.state is not JobState.COMPLETED}
    return has_ended and is_right.get(one.kind, True)


@given(graphs, turns)
def test_no_dependant_starts_early_or_is_forgotten(
    graph: list[tuple[list[tuple[str, int]], str, int, bool]],
    moves: list[tuple[float, SimulatedOutcome, bool]],
) -> None:
    lab = Lab(cpus=3)
    ids: list[int] = []
    for above, mark, retries, is_singleton in graph:
        terms = [f"{kind}:{ids[(one - 1) % len(ids)]}" for kind, one in above] if ids else []
        if is_singleton and mark == ",":
            terms.append("singleton")
        rule = RetryRule(retries=retries, backoff_s=4.0)
        name = "same" if is_singleton else f"job{len(ids)}"
        ids.append(lab.submit(name=name, dependency=mark.join(dict.fromkeys(terms)) or None, retry=rule))
    for seconds, outcome, restarts in moves:
        lab.outcome = outcome
        lab.tick(seconds)
        if restarts:
            adopt_open_runs(lab.restart().state, lab.engine)
    lab.outcome = SimulatedOutcome(runs_s=5)
    # Whatever the daemon remembers of a job, who comes later learns what has become of it.
    late = [lab.submit(dependency=f"afterany:{job_id}") for job_id in ids]
    for _ in range(80):
        lab.tick(5)
    assert {lab.job(job_id).state for job_id in late} == {JobState.COMPLETED}
    jobs = {job_id: lab.job(job_id) for job_id in ids}
    assert all(job.state.is_final for job in jobs.values())
    starts = {}
    for job_id in ids:
        runs = lab.store.runs([job_id])
        starts[job_id] = runs[0].intent_at if runs else None
    for job_id, job in jobs.items():
        expression = parse_dependency(job.spec.dependency) if job.spec.dependency else None
        if expression is None:
            assert starts[job_id] is not None
            continue
        at = starts[job_id]
        named = [one for one in expression.conditions if one.job_id]
        instant = lab.clock.now() if at is None else at
        held = [came_true(one, jobs[one.job_id], starts[one.job_id], instant) for one in named]
        holds = any(held) if expression.is_any else all(held)
        assert holds == (at is not None), (job, held)
        if at is not None and expression.is_singleton:
            earlier = [other for other in jobs.values() if other.id < job_id and other.spec.name == job.spec.name]
            assert all(other.end_at is not None and other.end_at <= at for other in earlier)
