"""Jobs on several nodes at once: all of them or none."""

from __future__ import annotations

import pytest
from scenario import HOUR, Scenario, load, place_of, running, settings, wants

from gpusched.model.job import Request
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.placement import best_placement, candidates, fits
from gpusched.scheduler.request_units import RequestUnits
from gpusched.testing import NOW, gpu_view, node

GIB = 1024
THREE = [node("n1", gpus=4), node("n2", gpus=4), node("n3", gpus=4)]


def gangs(outcome):
    """Job -> places of all its nodes."""
    return {
        start.job_id: " ".join(place_of(piece) for piece in (start.placement, *start.placement.others))
        for start in outcome.plan.starts
    }


PLACES = {
    "each node has all of the request": (THREE, [], [wants(1, 2, nodes=2)], {1: "n1:0,1 n2:0,1"}),
    "nodes without GPUs will do for a job without": (THREE, [], [wants(1, nodes=3)], {1: "n1 n2 n3"}),
    "the fullest nodes that suffice": (
        THREE,
        [running(8, "n3:0,1"), running(9, "n2:0")],
        [wants(1, 2, nodes=2)],
        {1: "n3:2,3 n2:1,2"},
    ),
    "what is left of an uneven gang is on one node more": (
        THREE,
        [],
        [wants(1, 4, nodes=2, tail_gpus=1)],
        {1: "n1:0,1,2,3 n2:0,1,2,3 n3:0"},
    ),
    "one node too few is none at all": (THREE, [running(9, "n2:0")], [wants(1, 4, nodes=3)], {}),
    "never twice on one node": ([node("n1", gpus=8)], [], [wants(1, 2, nodes=2)], {}),
    "after a gang there is less for others": (
        THREE,
        [],
        [wants(1, 4, nodes=2), wants(2, 4), wants(3, 1)],
        {1: "n1:0,1,2,3 n2:0,1,2,3", 2: "n3:0,1,2,3"},
    ),
    "licenses are booked once": (
        THREE,
        [],
        [wants(1, nodes=3, licenses=(("matlab", 2),)), wants(2, licenses=(("matlab", 1),))],
        {1: "n1 n2 n3"},
    ),
    "resources are booked on each node": (
        [node("n1", resources=(("fpga", 1),)), node("n2", resources=(("fpga", 1),))],
        [],
        [wants(1, nodes=2, resources=(("fpga", 1),)), wants(2, resources=(("fpga", 1),))],
        {1: "n1 n2"},
    ),
    "a gang that must be alone takes empty nodes": (
        THREE,
        [running(9, "n2")],
        [wants(1, 1, nodes=2, is_exclusive=True), wants(2, 1)],
        {1: "n1:0 n3:0", 2: "n2:0"},
    ),
    "linked cards on each node": (
        [node(name, [gpu_view(index, name, link_group=index // 2) for index in range(4)]) for name in ("n1", "n2")],
        [running(9, "n2:0")],
        [wants(1, 2, nodes=2, is_linked=True)],
        {1: "n2:2,3 n1:0,1"},
    ),
    "slices on each node": (THREE, [], [wants(1, 1, nodes=2, vram_mib=GIB)], {1: "n1:0 n2:0"}),
    "labels hold for each node": (
        [node("n1", labels=("a",)), node("n2"), node("n3", labels=("a",))],
        [],
        [wants(1, nodes=2, constraint="a")],
        {1: "n1 n3"},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), PLACES.values(), ids=PLACES)
def test_gangs_are_placed(nodes, held, waiting, starts):
    assert gangs(Scenario(nodes, waiting, held, settings(license={"matlab": 2})).outcome()) == starts


def test_the_pieces_are_equal_and_only_the_first_has_the_licenses():
    one = wants(1, 2, nodes=2, cpus=3, mem_mib=GIB, licenses=(("matlab", 1),))
    outcome = Scenario(THREE, [one], settings=settings(license={"matlab": 1})).outcome()
    first = outcome.plan.starts[0].placement
    (second,) = first.others
    assert (
        (first.cpus, first.mem_mib, len(first.gpus)) == (second.cpus, second.mem_mib, len(second.gpus)) == (3, GIB, 2)
    )
    assert (first.licenses, second.licenses) == ((("matlab", 1),), ())
    assert second.others == ()


def test_a_pending_gang_is_reserved_whole():
    held = [running(8, "n1:0", ends_in=HOUR), running(9, "n2:0", ends_in=2 * HOUR), running(7, "n3:0")]
    outcome = Scenario(THREE, [wants(1, 4, nodes=2)], held).outcome()
    (kept,) = outcome.plan.reservations
    assert kept.start_at == NOW + 2 * HOUR
    assert [place_of(piece) for piece in (kept.placement, *kept.placement.others)] == ["n1:0,1,2,3", "n2:0,1,2,3"]


def test_no_job_that_would_delay_a_gang_passes_it():
    held = [running(8, "n1:0", ends_in=HOUR)]
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    passing = [wants(1, 1, nodes=2), wants(2, 1, limit=2 * HOUR), wants(3, 1, limit=HOUR / 2)]
    assert Scenario(nodes, passing, held).outcome().starts == {3: "n2:0"}


def test_resources_missing_for_a_gang_are_counted_in_nodes():
    held = [running(8, "n1:0"), running(9, "n2:0")]
    outcome = Scenario(THREE, [wants(1, 4, nodes=2)], held).outcome()
    assert outcome.text(1).startswith("needs 2 nodes with 4 GPUs each, 1 of 3 has that free; expected when")
    assert outcome.reasons[1].facts["needed"] == {"nodes": 2}
    assert outcome.reasons[1].facts["free"] == {"nodes": 1}
    cores = Scenario(THREE, [wants(1, 1, nodes=2, cpus=16)], [running(8, "n1"), running(9, "n2")]).outcome()
    assert cores.text(1).startswith("needs 2 nodes with 1 GPU and 16 CPUs each, 1 of 3 has that free")
    none = Scenario(THREE[:1], [wants(1, 4, nodes=1), wants(2, 4, nodes=2)]).outcome()
    assert none.codes == {2: "ReqNodeNotAvail"}


def test_a_busy_node_takes_no_part_of_a_gang():
    nodes = [node("n1", load=load(cpu_fraction=0.9)), node("n2", load=load()), node("n3", load=load())]
    ceiling = settings(ceiling={"cpu_fraction": 0.5})
    assert gangs(Scenario(nodes, [wants(1, nodes=2)], settings=ceiling).outcome()) == {1: "n2 n3"}
    outcome = Scenario(nodes, [wants(1, nodes=3)], settings=ceiling).outcome()
    assert outcome.codes == {1: "LoadCeiling"}
    assert outcome.text(1) == "the CPU load of node n1 is 90%, the ceiling is 50%"


def test_all_nodes_of_a_gang_count_as_new_load():
    nodes = [node("n1", load=load()), node("n2", load=load())]
    ceiling = settings(ceiling={"cpu_fraction": 0.5})
    waiting = [wants(1, nodes=2, cpus=12), wants(2, nodelist=("n2",))]
    assert set(Scenario(nodes, waiting, settings=ceiling).outcome().starts) == {1}


class AtMostOneOf:
    """Lets no gang have two of these nodes."""

    def __init__(self, *nodes):
        self.nodes = set(nodes)

    def why_not(self, booking: AllocationUnits) -> str | None:
        return "no" if len(self.nodes & {piece.node for piece in booking.pieces()}) > 1 else None


def test_a_guard_sees_the_whole_gang():
    draft = ClusterState(ClusterLayout(THREE, settings()))
    need = RequestUnits.of(Request(gpus=1, nodes=2), 1)
    found = best_placement(draft, need, guard=AtMostOneOf(0, 1))
    assert found is not None
    assert [piece.node for piece in found.pieces()] == [0, 2]
    assert best_placement(draft, need, guard=AtMostOneOf(0, 1, 2)) is None


def test_a_gang_has_at_most_one_option_and_fits_where_it_is_found():
    draft = ClusterState(ClusterLayout(THREE, settings()))
    for nodes, count in ((2, 1), (3, 1), (4, 0)):
        need = RequestUnits.of(Request(gpus=1, nodes=nodes), 1)
        assert len(candidates(draft, need)) == count
        assert fits(draft, need) is bool(count)
