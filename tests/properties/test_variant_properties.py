"""Jobs with variants, whatever they ask: never two at once, no later than the best of them alone, and deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.model.variants import each_variant, of_specs, with_variant
from gpusched.scheduler.forecast import Future, by_limit
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.planner import Planner, decide
from gpusched.testing import NOW, allocation, gpu_view, job, node, share, snapshot

FIRST_COME = replace(Settings(), priority=PrioritySettings(order="fifo", backfill_by="limit"))
CARDS = {"n1": ("A100", 2), "n2": ("RTX 3090", 4)}
NODES = [
    node(name, [gpu_view(at, name, name=f"NVIDIA {model}") for at in range(count)])
    for name, (model, count) in CARDS.items()
]

limits = st.integers(1, 20).map(lambda minutes: minutes * 60)
requests = st.one_of(
    st.builds(Request, gpus=st.integers(1, 2), gpu_type=st.just("a100"), cpus=st.sampled_from([1.0, 4.0])),
    st.builds(Request, gpus=st.integers(1, 4), gpu_type=st.just("rtx3090"), cpus=st.sampled_from([1.0, 8.0])),
    st.builds(Request, gpus=st.just(0), cpus=st.integers(1, 16).map(float)),
)
variants = st.lists(st.tuples(requests, limits), min_size=1, max_size=3, unique=True)


def waits(job_id: int, wanted: Sequence[tuple[Request, int]]) -> Job:
    made = job(job_id, submit_at=NOW - 1000 + job_id)
    specs = [replace(made.spec, request=request, time_limit_s=limit) for request, limit in wanted]
    return replace(made, spec=of_specs(specs, [()] * len(specs)))


@st.composite
def held_cards(draw: st.DrawFn) -> list[Allocation]:
    """Runs on some of the cards, each until its limit."""
    found = []
    for name, (_, count) in CARDS.items():
        for at in range(count):
            if draw(st.booleans()):
                end_at = NOW + draw(limits)
                found.append(allocation(100 + len(found), name, [share(at, name)], expected_end_at=end_at))
    return found


def play(jobs: Sequence[Job], held: Sequence[Allocation], nodes: Sequence[NodeView] = NODES) -> Mapping[int, float]:
    state = snapshot(*nodes, running=held, waiting=jobs)
    return Future(Planner.from_snapshot(state, FIRST_COME), state.now, by_limit).play([one.id for one in jobs], 200)


@given(jobs=st.lists(variants, min_size=1, max_size=6), held=held_cards())
def test_what_is_booked_is_one_variant_of_each_job_and_equal_inputs_give_equal_plans(
    jobs: list[list[tuple[Request, int]]], held: list[Allocation]
) -> None:
    waiting = {number: waits(number, wanted) for number, wanted in enumerate(jobs, 1)}
    state = snapshot(*NODES, running=held, waiting=list(waiting.values()))
    plan = decide(state, FIRST_COME)
    again = decide(state, FIRST_COME)
    assert (plan.starts, plan.reservations) == (again.starts, again.reservations)
    assert dict(plan.reasons) == dict(again.reasons)
    ids = [one.job_id for one in (*plan.starts, *plan.reservations)]
    assert len(ids) == len(set(ids))
    booked = []
    for start in plan.starts:
        request = each_variant(waiting[start.job_id].spec)[start.variant].request
        assert len(start.placement.gpus) == request.gpus
        assert start.placement.cpus == request.cpus
        booked.append(
            allocation(
                start.job_id, start.placement.node, start.placement.gpus, cpus=start.placement.cpus, request=request
            )
        )
    assert check_invariants(snapshot(*NODES, running=[*held, *booked]), FIRST_COME) == []


@given(wanted=variants, held=held_cards())
def test_a_job_starts_exactly_when_the_best_of_its_variants_alone_would(
    wanted: list[tuple[Request, int]], held: list[Allocation]
) -> None:
    # Nothing else waits, so what each variant alone would do is what the machines allow.
    alone = [play([waits(1, [one])], held)[1] for one in wanted]
    assert play([waits(1, wanted)], held)[1] == min(alone)


@given(jobs=st.lists(variants, min_size=1, max_size=8), held=held_cards(), leaving=st.lists(st.integers(0, 7)))
def test_a_planner_that_stays_plans_as_one_made_anew(
    jobs: list[list[tuple[Request, int]]], held: list[Allocation], leaving: list[int]
) -> None:
    waiting = {number: waits(number, wanted) for number, wanted in enumerate(jobs, 1)}
    planner = Planner.from_snapshot(snapshot(*NODES, running=held, waiting=list(waiting.values())), FIRST_COME)
    now = NOW
    for number in leaving:
        before = planner.state.snapshot(now)
        assert planner.plan(now).starts == decide(before, FIRST_COME).starts
        twin = planner.fork()
        started = list(planner.schedule(now))
        assert list(twin.schedule(now)) == started
        for start in started:
            assert planner.state.runs[start.job_id].allocations[0].terms.request == (
                with_variant(waiting[start.job_id].spec, start.variant).request
            )
        runs = sorted(planner.state.runs)
        if runs:
            planner.state.run_ended(runs[number % len(runs)])
        now += 30
