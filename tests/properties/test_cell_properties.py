"""Whatever starts and ends: every queue can be given all of its cells by ending only what can be made to give way."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.cells import Cell, CellVeto, cell_problems, cells_of
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout
from gpusched.testing import gpu_view, node

NAMES = ("a", "b", "c")


@dataclass
class Lab:
    """A machine, what is promised of it, and who holds which card."""

    sizes: tuple[int, ...]
    settings: Settings
    jobs: list[tuple[str, frozenset[int], bool]] = field(default_factory=list)
    """Queue, cards, whether it can be made to give way."""

    def __post_init__(self) -> None:
        if set(self.sizes) == {1}:
            # Where no card is linked, all cards of the node are alike.
            self.sizes = (len(self.sizes),)
        group_of = [group for group, size in enumerate(self.sizes) for _ in range(size)]
        counts = dict(enumerate(self.sizes))
        views = [
            gpu_view(index, link_group=group if counts[group] > 1 else None) for index, group in enumerate(group_of)
        ]
        self.layout = ClusterLayout([node(gpus=views)], self.settings)
        self.group_of = tuple(group_of)
        self.cells = cells_of(self.settings.queue)

    def guard(self) -> CellVeto:
        return CellVeto(self.layout, self.settings, [(queue, booking(cards), may) for queue, cards, may in self.jobs])

    def free(self) -> list[int]:
        held = {card for _, cards, _ in self.jobs for card in cards}
        return [card for card in range(len(self.group_of)) if card not in held]

    def may_start(self, queue: str, cards: frozenset[int], can_requeue: bool, is_borrowed: bool) -> bool:
        return self.guard().veto_for(queue, is_borrowed, can_requeue).why_not(booking(cards)) is None


def booking(cards: frozenset[int]) -> AllocationUnits:
    return AllocationUnits(0, 1000, 0, 0, tuple(CardShare(card, True) for card in sorted(cards)))


def can_be_granted(lab: Lab, jobs: list[tuple[str, frozenset[int], bool]]) -> bool:
    """Whether concrete, disjoint cards of one group each can be found for all cells: every way is tried."""
    holder = {card: queue for queue, cards, may in jobs if not may for card in cards}
    members = [
        tuple(card for card, group in enumerate(lab.group_of) if group == number) for number in range(len(lab.sizes))
    ]

    @cache
    def give(at: int, taken: frozenset[int]) -> bool:
        if at == len(lab.cells):
            return True
        cell: Cell = lab.cells[at]
        for cards in members:
            # Cards of a group differ only by who holds them, so own ones first is as good as any choice.
            own = [card for card in cards if card not in taken and holder.get(card) == cell.queue]
            free = [card for card in cards if card not in taken and card not in holder]
            for of_own in range(min(len(own), cell.size) + 1):
                chosen = [*own[:of_own], *free[: cell.size - of_own]]
                if len(chosen) == cell.size and give(at + 1, taken | frozenset(chosen)):
                    return True
        return False

    return give(0, frozenset())


SIZES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4).map(tuple)
PROMISES = st.fixed_dictionaries(
    {name: st.lists(st.sampled_from(["1", "2", "3", "4"]), max_size=2).map(tuple) for name in NAMES[:2]}
)


@st.composite
def labs(draw: st.DrawFn) -> Lab:
    promises = draw(PROMISES)
    queues = {name: QueueSettings(name, cells=promises.get(name, ())) for name in NAMES}
    return Lab(draw(SIZES), Settings(queue=queues))


class Days(RuleBasedStateMachine):
    """Jobs start where the guard lets them, end, and are preempted."""

    @initialize(lab=labs())
    def begin(self, lab: Lab) -> None:
        assume(not cell_problems(lab.settings, lab.layout))
        self.lab = lab

    @precondition(lambda self: hasattr(self, "lab") and self.lab.free())
    @rule(data=st.data(), queue=st.sampled_from(NAMES), can_requeue=st.booleans(), is_borrowed=st.booleans())
    def start(self, data: st.DataObject, queue: str, can_requeue: bool, is_borrowed: bool) -> None:
        cards = frozenset(data.draw(st.sets(st.sampled_from(self.lab.free()), min_size=1, max_size=4)))
        is_removable = can_requeue and is_borrowed
        job = (queue, cards, is_removable)
        passes = self.lab.may_start(queue, cards, can_requeue, is_borrowed)
        # Turned away only when there is no other way: the search is exact.
        assert passes == (is_removable or can_be_granted(self.lab, [*self.lab.jobs, job]))
        if passes:
            self.lab.jobs.append(job)

    @precondition(lambda self: hasattr(self, "lab") and self.lab.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.lab.jobs.remove(data.draw(st.sampled_from(self.lab.jobs)))

    @invariant()
    def every_cell_can_be_granted(self) -> None:
        if hasattr(self, "lab"):
            assert can_be_granted(self.lab, self.lab.jobs)


TestDays = Days.TestCase


@given(labs(), st.data())
def test_an_incremental_guard_equals_a_new_one(lab: Lab, data: st.DataObject) -> None:
    told = lab.guard()
    for _ in range(data.draw(st.integers(1, 8))):
        if lab.jobs and data.draw(st.booleans()):
            queue, cards, may = lab.jobs.pop(data.draw(st.integers(0, len(lab.jobs) - 1)))
            told.remove(queue, booking(cards), may)
        elif lab.free():
            cards = frozenset(data.draw(st.sets(st.sampled_from(lab.free()), min_size=1, max_size=3)))
            job = (data.draw(st.sampled_from(NAMES)), cards, data.draw(st.booleans()))
            lab.jobs.append(job)
            told.add(job[0], booking(cards), job[2])
        for card in lab.free():
            for queue in NAMES:
                assert told.why_not(queue, frozenset((card,))) == lab.guard().why_not(queue, frozenset((card,)))


@given(labs())
def test_every_reported_problem_is_real(lab: Lab) -> None:
    assert (not cell_problems(lab.settings, lab.layout)) is can_be_granted(lab, [])


@given(labs(), st.data())
def test_gpus_to_avoid_are_those_no_job_may_have_alone(lab: Lab, data: st.DataObject) -> None:
    for card in data.draw(st.sets(st.sampled_from(lab.free()), max_size=4)):
        lab.jobs.append((data.draw(st.sampled_from(NAMES)), frozenset((card,)), data.draw(st.booleans())))
    guard = lab.guard()
    for queue in NAMES:
        alone = {card for card in range(len(lab.group_of)) if guard.why_not(queue, frozenset((card,))) is not None}
        held_for_good = {card for _, cards, may in lab.jobs if not may for card in cards}
        assert guard.avoid(queue) == alone - held_for_good
