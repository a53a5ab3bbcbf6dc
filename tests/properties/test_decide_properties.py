"""What must hold of every plan, whatever the machines and the queue."""

from __future__ import annotations

import copy
import json

from hypothesis import given
from hypothesis import strategies as st
from strategies import held_by, nodes, queues, settings, snapshots

from gpusched import testing
from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.model.states import ReasonCode
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState
from gpusched.scheduler.infeasible import refusal
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.placement import fits
from gpusched.scheduler.planner import decide
from gpusched.scheduler.request_units import RequestUnits
from gpusched.testing import NOW

WAITING_CODES = {
    ReasonCode.PRIORITY,
    ReasonCode.RESOURCES,
    ReasonCode.REQ_NODE_NOT_AVAIL,
    ReasonCode.LOAD_CEILING,
}


def after(snapshot: Snapshot, held: list[Allocation]) -> Snapshot:
    return replace(snapshot, allocations=(*snapshot.allocations, *held))


@given(snapshots(), settings())
def test_no_resource_is_promised_twice(case, chosen):
    snapshot, waiting = case
    plan = decide(snapshot, chosen)
    assert check_invariants(after(snapshot, held_by(plan, waiting, NOW))) == []


@given(snapshots(), settings())
def test_equal_inputs_give_equal_plans_and_stay_unchanged(case, chosen):
    snapshot, _ = case
    before = copy.deepcopy(snapshot)
    plan = decide(snapshot, chosen)
    assert snapshot == before
    shuffled = replace(
        before,
        nodes=before.nodes[::-1],
        pending=before.pending[::-1],
        allocations=before.allocations[::-1],
    )
    for again in (decide(before, chosen), decide(shuffled, chosen)):
        assert (again.starts, again.reservations) == (plan.starts, plan.reservations)
        assert dict(again.reasons) == dict(plan.reasons)
        assert again.first_blocked == plan.first_blocked


@given(snapshots(), settings())
def test_every_job_starts_once_or_its_class_has_a_reason(case, chosen):
    snapshot, _ = case
    plan = decide(snapshot, chosen)
    started = [start.job_id for start in plan.starts]
    assert len(set(started)) == len(started)
    shown = {one.id for waiting in snapshot.pending for one in waiting.jobs}
    assert set(started) <= shown
    still = {waiting.key for waiting in snapshot.pending if not all(one.id in started for one in waiting.jobs)}
    assert set(plan.reasons) == still
    for reason in plan.reasons.values():
        assert reason.code in WAITING_CODES
        assert reason.text.removeprefix("needs").strip()
        json.dumps(dict(reason.facts))


@given(snapshots(), settings())
def test_jobs_of_a_class_start_in_order(case, chosen):
    snapshot, _ = case
    started = {start.job_id for start in decide(snapshot, chosen).starts}
    for waiting in snapshot.pending:
        flags = [one.id in started for one in waiting.jobs]
        assert flags == sorted(flags, reverse=True)


@given(snapshots(), settings())
def test_started_jobs_get_the_requested_usable_hardware(case, chosen):
    snapshot, waiting = case
    jobs = {one.id: one for one in waiting}
    machines = {node.name: node for node in snapshot.nodes}
    for start in decide(snapshot, chosen).starts:
        wanted, place = jobs[start.job_id].spec.request, start.placement
        node = machines[place.node]
        cards = {view.uuid: view for view in node.gpus}
        assert node.why_not is None
        assert not (wanted.gpus and node.gpu_error)
        assert (place.cpus, place.mem_mib) == (wanted.cpus, wanted.mem_mib)
        assert len({share.uuid for share in place.gpus}) == len(place.gpus) == wanted.gpus
        for share in place.gpus:
            view = cards[share.uuid]
            assert view.is_present
            assert view.why_not is None
            assert share.is_whole is not wanted.shares_cards
            assert not (share.is_whole and view.why_not_whole)
            assert share.is_whole or (view.can_share and view.vram_total_mib is not None)
            assert wanted.vram_mib in (None, share.vram_mib)
            assert (view.vram_total_mib or 0) >= (wanted.min_vram_mib or 0)
            assert (wanted.gpu_type or "").lower() in view.name.lower()


@given(snapshots(), settings())
def test_a_second_decision_after_the_plan_starts_nothing_new(case, chosen):
    """A cycle leaves no gap that it would fill if it were asked once more."""
    snapshot, waiting = case
    plan = decide(snapshot, chosen)
    started = {start.job_id for start in plan.starts}
    rest = testing.snapshot(
        *snapshot.nodes,
        running=[*snapshot.allocations, *held_by(plan, waiting, NOW)],
        waiting=[one for one in waiting if one.id not in started],
    )
    again = decide(rest, chosen)
    assert again.starts == ()


@given(snapshots())
def test_an_idle_gpu_means_no_unreserved_job_could_use_it(case):
    """Work is conserved: without a reservation in the way, whatever fits is started."""
    snapshot, waiting = case
    plan = decide(snapshot, Settings())
    if plan.reservations:
        return
    layout = ClusterLayout(snapshot.nodes, Settings())
    draft = ClusterState(layout)
    for held in (*snapshot.allocations, *held_by(plan, waiting, NOW)):
        booking = layout.booking(held.terms.uid, held)
        assert booking is not None
        draft.book(booking)
    for key in plan.reasons:
        assert not fits(draft, RequestUnits.of(key.terms.request, key.terms.uid))


@given(snapshots())
def test_a_reservation_excludes_jobs_that_outlast_it(case):
    """At the reserved start, all that is still expected to run leaves the reserved place free."""
    snapshot, waiting = case
    plan = decide(snapshot, Settings())
    for kept in plan.reservations:
        if kept.start_at is None:
            continue
        outlasting = [
            held
            for held in (*snapshot.allocations, *held_by(plan, waiting, NOW))
            if held.expected_end_at is None or max(held.expected_end_at, NOW) > kept.start_at
        ]
        claim = Allocation(
            job_id=kept.job_id,
            terms=JobTerms(next(one.uid for one in waiting if one.id == kept.job_id)),
            node=kept.placement.node,
            gpus=kept.placement.gpus,
            cpus=kept.placement.cpus,
            mem_mib=kept.placement.mem_mib,
            start_at=kept.start_at,
        )
        assert check_invariants(replace(snapshot, allocations=(*outlasting, claim))) == []


@given(nodes(), queues(), st.data())
def test_admitted_jobs_start_in_order_on_an_idle_machine(machines, waiting, data):
    """The refusal at submission and the placement agree on what can ever run."""
    one = data.draw(st.sampled_from(waiting))
    idle = tuple(
        replace(
            node,
            why_not=None,
            gpu_error=None,
            gpus=tuple(replace(gpu, foreign_mib=0, why_not=None, why_not_whole=None) for gpu in node.gpus),
        )
        for node in machines
    )
    found = refusal(one.spec.request, idle, Settings())
    starts = decide(testing.snapshot(*idle, waiting=[one]), Settings()).starts
    assert (found is None) is bool(starts)
    if found is not None:
        assert found.text.startswith("asked for")
        assert found.hint
