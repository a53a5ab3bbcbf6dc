"""What must hold of every placement, whatever is asked for, wherever, by any strategy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import combinations
from random import Random

from bundles import laid_out
from hypothesis import given
from hypothesis import strategies as st

from gpusched import testing
from gpusched.model.bundles import part_of
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import STRATEGIES, OversubscribeSettings, PlacementSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement, Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.filters import parse_constraint
from gpusched.scheduler.infeasible import refusal
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.placement import best_placement, candidates, fits, hosts
from gpusched.scheduler.planner import decide
from gpusched.scheduler.priority import terms_of
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.strategies.fragmentation import typical_of
from gpusched.testing import NOW, gpu_view, job

LABELS = ("old", "coco", "nvlink")
TYPES = ("NVIDIA A100", "Tesla T4")


@st.composite
def machines(draw: st.DrawFn) -> tuple[NodeView, ...]:
    """Up to four nodes with up to six cards, with links, memory, labels and custom resources."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        name = f"n{number}"
        marks = draw(st.sampled_from(["link", "numa", "none"]))
        cards = []
        for index in range(draw(st.integers(0, 6))):
            group = draw(st.sampled_from([None, 0, 0, 1, 1]))
            cards.append(
                gpu_view(
                    index,
                    name,
                    name=draw(st.sampled_from(TYPES)),
                    vram_total_mib=draw(st.sampled_from([16_384, 24_576, 24_576, None])),
                    link_group=group if marks == "link" else None,
                    numa=group if marks == "numa" else None,
                    why_not=draw(st.sampled_from([None, None, None, None, "drained"])),
                )
            )
        made.append(
            testing.node(
                name,
                cards,
                cpus=draw(st.sampled_from([2.0, 8.0])),
                mem_mib=8192,
                labels=tuple(sorted(draw(st.sets(st.sampled_from(LABELS))))),
                resources=tuple(sorted(draw(st.dictionaries(st.sampled_from("xy"), st.integers(0, 2))).items())),
                why_not=draw(st.sampled_from([None, None, None, None, None, "down"])),
            )
        )
    return tuple(made)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """All that can be asked for, mostly little of it."""

    def seldom(strategy):
        return draw(strategy) if draw(st.sampled_from([False, False, False, True])) else None

    if draw(st.sampled_from([False, False, False, True])):
        return laid_out(
            Random(draw(st.integers(0, 1 << 16))),
            3,
            is_exclusive=draw(st.sampled_from([False, False, False, True])),
            prefer=seldom(st.sampled_from(["nvlink", "!coco"])),
            exclude=seldom(st.sampled_from([("n0",), ("n1", "n2")])) or (),
            licenses=seldom(st.sampled_from([(("m", 1),), (("m", 2),)])) or (),
            resources=seldom(st.just((("x", 1),))) or (),
        )
    gpus = draw(st.sampled_from([0, 1, 1, 2, 3]))
    fraction = draw(st.sampled_from([None, 0.5, 0.3])) if gpus == 1 else None
    vram = draw(st.sampled_from([None, None, 1000, 12_000])) if gpus and fraction is None else None
    return Request(
        gpus=gpus,
        gpu_fraction=fraction,
        vram_mib=vram,
        gpu_type=seldom(st.sampled_from(["a100", "t4"])) if gpus else None,
        min_vram_mib=seldom(st.just(20_000)) if gpus else None,
        cpus=draw(st.sampled_from([0.0, 1.0, 1.0, 3.0])),
        mem_mib=draw(st.sampled_from([0, 0, 3000])),
        nodes=draw(st.sampled_from([1, 1, 1, 2, 3])),
        is_linked=bool(gpus) and draw(st.booleans()),
        is_exclusive=draw(st.sampled_from([False, False, False, True])),
        constraint=seldom(st.sampled_from(["old", "!old", "coco|nvlink", "(old|coco)&!nvlink"])),
        prefer=seldom(st.sampled_from(["nvlink", "!coco"])),
        nodelist=seldom(st.sampled_from([("n0",), ("n0", "n1"), ("n1", "n2", "n3")])) or (),
        exclude=seldom(st.sampled_from([("n0",), ("n1", "n2")])) or (),
        licenses=seldom(st.sampled_from([(("m", 1),), (("m", 2),)])) or (),
        resources=seldom(st.sampled_from([(("x", 1),), (("x", 1), ("y", 1))])) or (),
    )


@st.composite
def chosen(draw: st.DrawFn) -> Settings:
    """Any strategy, sometimes with more to book than there is."""
    over = draw(
        st.sampled_from([OversubscribeSettings(), OversubscribeSettings(), OversubscribeSettings(1.0, 1.0, 2.0)])
    )
    strategy = draw(st.sampled_from(STRATEGIES))
    return replace(Settings(), placement=PlacementSettings(strategy), oversubscribe=over, license={"m": 2})


@st.composite
def queues(draw: st.DrawFn) -> list[Job]:
    """Waiting jobs of two users."""
    return [
        job(
            number,
            uid=draw(st.sampled_from([1, 1, 2])),
            request=draw(requests()),
            time_limit_s=draw(st.sampled_from([None, 600])),
            submit_at=NOW - number,
        )
        for number in range(1, draw(st.integers(2, 10)))
    ]


def pieces_of(place: Placement) -> tuple[Placement, ...]:
    return (place, *place.others)


def held_by(snapshot: Snapshot, waiting: list[Job], settings: Settings) -> list[Allocation]:
    jobs = {one.id: one for one in waiting}
    return [
        Allocation(
            job_id=start.job_id,
            terms=terms_of(jobs[start.job_id]),
            node=piece.node,
            gpus=piece.gpus,
            cpus=piece.cpus,
            mem_mib=piece.mem_mib,
            start_at=NOW,
            resources=piece.resources,
            licenses=piece.licenses,
            is_exclusive=piece.is_exclusive,
        )
        for start in decide(snapshot, settings).starts
        for piece in pieces_of(start.placement)
    ]


@given(machines(), queues(), queues(), chosen())
def test_no_resource_is_booked_twice(nodes, first, second, settings):
    held = held_by(testing.snapshot(*nodes, waiting=first), first, settings)
    assert check_invariants(testing.snapshot(*nodes, running=held), settings) == []
    later = [replace(one, id=one.id + 100) for one in second]
    more = held_by(testing.snapshot(*nodes, running=held, waiting=later), later, settings)
    assert check_invariants(testing.snapshot(*nodes, running=[*held, *more]), settings) == []


def are_linked(node: NodeView, place: Placement) -> bool:
    """Told anew from the cards, not by the policy's own groups."""
    taken = [view for view in node.gpus if view.uuid in {card.uuid for card in place.gpus}]
    if len(taken) < 2:
        return True
    marks = [view.link_group for view in taken]
    if all(view.link_group is None for view in node.gpus):
        if all(view.numa is None for view in node.gpus):
            return True
        marks = [view.numa for view in taken]
    return len(set(marks)) == 1 and marks[0] is not None


def parts_of(wanted: Request, pieces: tuple[Placement, ...]) -> list[Request]:
    """What each of these places of a job in bundles should hold; together they are the whole job."""
    bundles = wanted.bundles
    assert bundles is not None
    counts = [len(piece.gpus) // bundles.gpus if bundles.gpus else round(piece.cpus / bundles.cpus) for piece in pieces]
    assert sum(counts) == bundles.count
    assert min(counts) >= 1
    return [part_of(wanted, count) for count in counts]


@given(machines(), queues(), chosen())
def test_placements_are_complete_and_where_requested(nodes, waiting, settings):
    views = {node.name: node for node in nodes}
    jobs = {one.id: one for one in waiting}
    for start in decide(testing.snapshot(*nodes, waiting=waiting), settings).starts:
        wanted = jobs[start.job_id].spec.request
        pieces = pieces_of(start.placement)
        parts = [wanted] * len(pieces) if wanted.bundles is None else parts_of(wanted, pieces)
        most = wanted.nodes if wanted.bundles is None else wanted.bundles.nodes_max
        assert wanted.nodes <= len(pieces) == len({piece.node for piece in pieces}) <= most
        assert start.placement.licenses == wanted.licenses
        assert all(not piece.licenses and not piece.others for piece in start.placement.others)
        for piece, part in zip(pieces, parts, strict=True):
            view = views[piece.node]
            assert view.why_not is None
            assert len({card.uuid for card in piece.gpus}) == len(piece.gpus) == part.gpus
            assert (piece.cpus, piece.mem_mib) == (part.cpus, part.mem_mib)
            assert (piece.resources, piece.is_exclusive) == (wanted.resources, wanted.is_exclusive)
            assert not wanted.nodelist or piece.node in wanted.nodelist
            assert piece.node not in wanted.exclude
            assert wanted.constraint is None or parse_constraint(wanted.constraint).admits(view.labels)
            assert not wanted.is_linked or are_linked(view, piece)


@given(machines(), queues(), queues(), chosen())
def test_equal_inputs_give_equal_plans_in_any_order_and_stay_unchanged(nodes, first, second, settings):
    held = held_by(testing.snapshot(*nodes, waiting=first), first, settings)
    before = testing.snapshot(*nodes, running=held, waiting=[replace(one, id=one.id + 100) for one in second])
    kept = copy.deepcopy(before)
    plan = decide(before, settings)
    assert before == kept
    shuffled = replace(before, nodes=before.nodes[::-1], pending=before.pending[::-1])
    for again in (decide(kept, settings), decide(shuffled, settings)):
        assert (again.starts, again.reservations) == (plan.starts, plan.reservations)
        assert dict(again.reasons) == dict(plan.reasons)


class Hater:
    """Turns down cards and nodes, and gangs that are on certain nodes together."""

    def __init__(self, cards: set[int], nodes: set[int], apart: set[int]) -> None:
        self.cards, self.nodes, self.apart = cards, nodes, apart

    def why_not(self, booking: AllocationUnits) -> str | None:
        nodes = {piece.node for piece in booking.pieces()}
        cards = {part.card for piece in booking.pieces() for part in piece.parts}
        return "no" if cards & self.cards or nodes & self.nodes or len(nodes & self.apart) > 1 else None


@st.composite
def drafts(draw: st.DrawFn) -> ClusterState:
    """A draft on which some jobs run."""
    nodes, waiting, settings = draw(machines()), draw(queues()), draw(chosen())
    snapshot = testing.snapshot(*nodes, waiting=waiting)
    layout = ClusterLayout(nodes, settings)
    layout.typical = typical_of(snapshot)
    draft = ClusterState(layout)
    for held in held_by(snapshot, waiting, settings):
        booking = layout.booking(held.terms.uid, held)
        assert booking is not None
        draft.book(booking)
    return draft


@given(
    drafts(),
    requests(),
    st.sets(st.integers(0, 12)),
    st.sets(st.integers(0, 3), max_size=2),
    st.sets(st.integers(0, 3)),
)
def test_a_guard_is_obeyed(draft, wanted, cards, nodes, apart):
    need, guard = RequestUnits.of(wanted, 1), Hater(cards, nodes, apart)
    for option in candidates(draft, need, guard=guard):
        assert guard.why_not(option.booking) is None
        assert draft.has_room(option.booking)
    if best_placement(draft, need, guard=guard) is not None:
        assert fits(draft, need)


@given(drafts(), requests())
def test_a_valid_place_is_found_where_one_exists(draft, wanted):
    need = RequestUnits.of(wanted, 1)
    found = candidates(draft, need)
    assert bool(found) is fits(draft, need)
    assert all(draft.has_room(option.booking) for option in found)
    if wanted.nodes == 1 and wanted.bundles is None and found:
        assert {option.booking.node for option in found} == set(hosts(draft, need))
    best = best_placement(draft, need)
    if best is not None:
        draft.book(best)
        assert not draft.has_room(replace(best, millicpus=10**9))


def layouts(count: int, nodes: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to lay so many bundles out over so many nodes."""
    if nodes == 1:
        yield from [(count,)] if 1 <= count <= most else []
        return
    for first in range(1, min(most, count - nodes + 1) + 1):
        yield from ((first, *rest) for rest in layouts(count - first, nodes - 1, most))


@given(drafts(), st.integers(0, 1 << 20))
def test_bundles_are_on_as_few_nodes_as_any_layout(draft, seed):
    wanted = laid_out(Random(seed), 3)
    bundles, names = wanted.bundles, [node.name for node in draft.layout.nodes]
    rooms: dict[tuple[str, int], bool] = {}

    def has_room(name: str, count: int) -> bool:
        if (name, count) not in rooms:
            part = replace(part_of(wanted, count), nodelist=(name,))
            rooms[name, count] = fits(draft, RequestUnits.of(part, 1))
        return rooms[name, count]

    fewest = next(
        (
            nodes
            for nodes in range(wanted.nodes, bundles.nodes_max + 1)
            for some in combinations(names, nodes)
            for counts in layouts(bundles.count, nodes, bundles.most)
            if all(map(has_room, some, counts))
        ),
        None,
    )
    best = best_placement(draft, RequestUnits.of(wanted, 1))
    assert (None if best is None else len(best.pieces())) == fewest
    if best is not None:
        held = sorted(len(piece.parts) or piece.millicpus for piece in best.pieces())
        is_even = bundles.count % fewest == 0 and bundles.count // fewest <= bundles.most
        each = bundles.count // fewest
        if is_even and sum(has_room(name, each) for name in names) >= fewest:
            assert held[0] == held[-1], "even parts where there is room for them"


@given(drafts(), requests(), st.frozensets(st.integers(0, 23)))
def test_gpus_to_avoid_are_used_only_when_necessary(draft, wanted, avoid):
    need = RequestUnits.of(replace(wanted, nodes=1, bundles=None, is_linked=False), 1)
    places = {option.booking.node: option.booking for option in candidates(draft, need)}
    others = {option.booking.node: option.booking for option in candidates(draft, need, avoid=avoid)}
    assert places.keys() == others.keys()
    for node, booking in others.items():
        taken = {part.card for part in booking.parts} & avoid
        before = {part.card for part in places[node].parts} & avoid
        assert len(taken) <= len(before)


@given(machines(), requests(), chosen())
def test_admitted_jobs_start_on_an_idle_machine(nodes, wanted, settings):
    idle = tuple(
        replace(node, why_not=None, gpus=tuple(replace(gpu, why_not=None, utilisation=0.0) for gpu in node.gpus))
        for node in nodes
    )
    names = {node.name for node in idle}
    wanted = replace(wanted, nodelist=tuple(name for name in wanted.nodelist if name in names))
    found = refusal(wanted, idle, settings)
    starts = decide(testing.snapshot(*idle, waiting=[job(1, request=wanted)]), settings).starts
    assert (found is None) is bool(starts)
    if found is not None:
        assert found.text.startswith("asked for")
        assert found.hint


@given(machines(), queues(), chosen())
def test_every_reason_can_be_rendered(nodes, waiting, settings):
    plan = decide(testing.snapshot(*nodes, waiting=waiting), settings)
    for reason in plan.reasons.values():
        assert "needs ;" not in reason.text
        assert reason.text.removeprefix("needs").strip()
