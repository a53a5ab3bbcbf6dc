"""What jobs count as, before and after they have a place, on any machines."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from strategies import nodes, requests, snapshots

from gpusched.model.cluster import Allocation
from gpusched.model.job import Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import QosSettings
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState
from gpusched.scheduler.placement import best_placement
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.usage import capacity_of, charged, demand, footprint, usage_now
from gpusched.testing import NOW

KINDS = ("gpus", "vram_mib", "cpus", "mem_mib")


def at_most(one: Resources, other: Resources) -> bool:
    return all(getattr(one, kind) <= getattr(other, kind) * (1 + 1e-6) + 1e-6 for kind in KINDS)


def same(one: Resources, other: Resources) -> bool:
    return all(isclose(getattr(one, kind), getattr(other, kind), rel_tol=1e-6, abs_tol=1e-3) for kind in KINDS)


@given(nodes(), requests())
def test_a_placement_never_holds_more_gpus_than_were_counted(machines, asked):
    """So a quota that has room for the demand has room for the booking."""
    settings = Settings()
    layout = ClusterLayout([replace(machine, load=None) for machine in machines], settings)
    booking = best_placement(ClusterState(layout), RequestUnits.of(asked, 1000))
    if booking is None:
        return
    event("placed")
    before, after = demand(layout, asked), footprint(layout, booking)
    assert after.gpus <= before.gpus + 1e-5
    assert after.cpus == pytest.approx(before.cpus, abs=0.0005)
    assert after.mem_mib == before.mem_mib
    assert at_most(after, capacity_of(layout))


@given(nodes(), requests(), st.integers(1, 5))
def test_a_gang_counts_the_sum_of_its_nodes(machines, asked, count):
    layout = ClusterLayout(machines, Settings())
    assert demand(layout, replace(asked, nodes=count)) == demand(layout, asked).times(count)


@given(nodes(), requests(), requests())
def test_larger_requests_never_count_for_less(machines, one, other):
    layout = ClusterLayout(machines, Settings())
    more = Request(
        gpus=max(one.gpus, other.gpus),
        cpus=max(one.cpus, other.cpus),
        mem_mib=max(one.mem_mib, other.mem_mib),
    )
    plain = replace(one, gpu_type=None, min_vram_mib=None)
    if not plain.shares_cards:
        assert at_most(demand(layout, plain), demand(layout, more))


@given(snapshots())
def test_running_usage_never_exceeds_capacity(case):
    snapshot, _ = case
    layout = ClusterLayout(snapshot.nodes, Settings())
    total = NOTHING
    for held in snapshot.allocations:
        booking = layout.booking(held.terms.uid, held)
        assert booking is not None
        total += footprint(layout, booking)
    for kind in ("cpus", "mem_mib"):
        assert getattr(total, kind) <= getattr(capacity_of(layout), kind) + 1e-6
    assert total.gpus <= len(layout.cards) + 1e-6


@given(snapshots(), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_the_qos_factor_scales_usage(case, factor):
    snapshot, _ = case
    held = tuple(replace(one, terms=replace(one.terms, qos="some")) for one in snapshot.allocations)
    marked = replace(snapshot, allocations=held)
    layout = ClusterLayout(snapshot.nodes, Settings())
    plain = usage_now(snapshot, layout, Settings())
    scaled = usage_now(marked, layout, replace(Settings(), qos={"some": QosSettings("some", usage_factor=factor)}))
    for mark, used in plain.items():
        assert same(scaled.get(mark, NOTHING), used.times(factor))


@given(snapshots(), st.floats(0.0, 1e5), st.sampled_from([60.0, 3600.0, 1e6]))
def test_open_and_ended_runs_give_the_same_usage(case, later_s, half_life_s):
    """A user's standing does not jump when a run ends: what was open is what is recorded."""
    snapshot, _ = case
    settings = replace(Settings(), priority=PrioritySettings(half_life_s=half_life_s))
    layout = ClusterLayout(snapshot.nodes, settings)
    then = replace(snapshot, now=NOW + later_s)
    opened = usage_now(then, layout, settings)
    ended: dict[tuple[str, str], Usage] = {}
    for held in snapshot.allocations:
        booking = layout.booking(held.terms.uid, held)
        assert booking is not None
        mark = (held.terms.account, held.terms.user)
        rate = footprint(layout, booking)
        ended[mark] = charged(ended.get(mark), *mark, rate, held.start_at, then.now, then.now, half_life_s)
    recorded = usage_now(replace(then, allocations=(), usage=tuple(ended.values())), layout, settings)
    assert opened.keys() == recorded.keys()
    for mark, used in opened.items():
        assert same(used, recorded[mark])


@given(snapshots(), st.integers(0, 3))
def test_quotas_count_running_and_forget_ended_jobs(case, ending):
    snapshot, _ = case
    settings = Settings()
    layout = ClusterLayout(snapshot.nodes, settings)
    quotas = Quotas(settings, layout)
    running = [(held, _footprint(layout, held)) for held in snapshot.allocations]
    for held, amount in running:
        quotas.add(held.terms, amount)
    for held, amount in running[:ending]:
        quotas.remove(held.terms, amount)
    left = running[ending:]
    assert quotas.running("default") == len(left)
    assert quotas.used("default").gpus == pytest.approx(sum(amount.gpus for _, amount in left), abs=1e-5)
    assert quotas.used("default").cpus == pytest.approx(sum(amount.cpus for _, amount in left), abs=1e-5)


def _footprint(layout: ClusterLayout, held: Allocation) -> Resources:
    booking = layout.booking(held.terms.uid, held)
    assert booking is not None
    return footprint(layout, booking)


@given(nodes(), st.integers(0, 3))
def test_a_lost_gpu_reduces_capacity_and_a_drained_one_does_not(machines, which):
    layout = ClusterLayout(machines, Settings())
    cards = [card for card in layout.cards if card.view.is_present]
    assume(len(cards) > which)
    chosen = cards[which].view

    def with_card(**parts: object) -> Resources:
        changed = [
            replace(machine, gpus=tuple(replace(gpu, **parts) if gpu is chosen else gpu for gpu in machine.gpus))
            for machine in machines
        ]
        return capacity_of(ClusterLayout(changed, Settings()))

    before = capacity_of(layout)
    assert with_card(why_not="drained", foreign_mib=9000) == before
    lost = with_card(is_present=False)
    assert lost.gpus == before.gpus - 1
    assert lost.vram_mib == before.vram_mib - (chosen.vram_total_mib or 0)
    assert (lost.cpus, lost.mem_mib) == (before.cpus, before.mem_mib)
