"""What comes of quotas when queues that never run out of jobs of one GPU are served by them, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given
from hypothesis import strategies as st

from gpusched.model.cluster import JobTerms
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.limits import quota_problems as problems
from gpusched.scheduler.quota import Quotas
from gpusched.testing import node

ONE = Resources(gpus=1.0)
CARDS = 12
NODES = [node("n1", gpus=8), node("n2", gpus=4)]
NAMES = ("a", "b", "c", "d", "e")


@dataclass
class House:
    """Queues on twelve GPUs, and the jobs of one GPU that run in them."""

    settings: Settings
    quotas: Quotas

    @classmethod
    def of(cls, queues: list[QueueSettings]) -> House:
        settings = Settings(queue={queue.name: queue for queue in queues})
        return cls(settings, Quotas(settings, ClusterLayout(NODES, settings)))

    @property
    def leaves(self) -> list[str]:
        parents = {queue.parent for queue in self.settings.queue.values()}
        return [name for name in self.settings.queue if name not in parents]

    @property
    def tops(self) -> list[str]:
        return [queue.name for queue in self.settings.queue.values() if queue.parent is None]

    def held(self, name: str) -> int:
        """GPUs in use by a queue with all below it."""
        return round(self.quotas.used(name).gpus)

    @property
    def free(self) -> int:
        return CARDS - sum(self.held(name) for name in self.tops)

    def add(self, name: str) -> None:
        self.quotas.add(JobTerms(1000, "ann", "lab", name), ONE)

    def remove(self, name: str) -> None:
        self.quotas.remove(JobTerms(1000, "ann", "lab", name), ONE)

    def may_start(self, name: str) -> bool:
        return self.quotas.why_not(JobTerms(1000, "ann", "lab", name), ONE) is None

    def fill(self, wanted: dict[str, int]) -> None:
        """Start the job of the first queue in rank until there is no room, or nobody wants more."""
        while self.free:
            waiting = [name for name in self.leaves if self.held(name) < wanted[name] and self.may_start(name)]
            if not waiting:
                return
            self.add(min(waiting, key=lambda name: self.quotas.rank(name, ONE)))

    def victim_for(self, name: str) -> str | None:
        """A queue that has to give a GPU to this one."""
        return next(
            (other for other in self.leaves if self.held(other) and self.quotas.may_reclaim(name, ONE, other, ONE)),
            None,
        )


@st.composite
def flat(draw: st.DrawFn) -> list[QueueSettings]:
    """Queues of one level that are promised no more than there is."""
    left = CARDS
    made = []
    for name in NAMES[: draw(st.integers(1, len(NAMES)))]:
        own = draw(st.integers(0, min(5, left)))
        left -= own
        made.append(
            QueueSettings(name, guaranteed_gpus=float(own), weight=draw(st.sampled_from([None, 1.0, 2.0, 3.0])))
        )
    return made


@st.composite
def trees(draw: st.DrawFn) -> list[QueueSettings]:
    """The same with queues below queues; some have maxima."""
    made: list[QueueSettings] = []
    for position, name in enumerate(NAMES):
        made.append(
            QueueSettings(
                name,
                parent=draw(st.sampled_from([None, *NAMES[:position]])),
                guaranteed_gpus=float(draw(st.integers(0, 4))),
                max_gpus=draw(st.sampled_from([None, None, 4.0, 8.0])),
            )
        )
    while problems(Settings(queue={queue.name: queue for queue in made}), Resources(gpus=CARDS)):
        largest = max(made, key=lambda queue: queue.guaranteed_gpus)
        made[made.index(largest)] = QueueSettings(largest.name, parent=largest.parent)
    return made


def much(queues: list[QueueSettings]) -> dict[str, int]:
    return {queue.name: CARDS for queue in queues}


@given(flat(), st.lists(st.integers(0, CARDS), min_size=len(NAMES), max_size=len(NAMES)))
def test_every_queue_gets_the_smaller_of_guarantee_and_demand(queues, wanted):
    house = House.of(queues)
    wants = dict(zip(NAMES, wanted, strict=True))
    house.fill(wants)
    for queue in queues:
        assert house.held(queue.name) >= min(wants[queue.name], queue.guaranteed_gpus)
    assert house.free == max(0, CARDS - sum(wants[queue.name] for queue in queues))


@given(flat())
def test_the_rest_is_divided_by_weight(queues):
    house = House.of(queues)
    house.fill(much(queues))
    weight = {queue.name: queue.weight or 1.0 for queue in queues}
    borrowed = {queue.name: house.held(queue.name) - queue.guaranteed_gpus for queue in queues}
    for one in borrowed:
        for other in borrowed:
            # The last GPU of the one was given while it had borrowed no more, by its weight, than the other.
            assert (borrowed[one] - 1) / weight[one] <= borrowed[other] / weight[other] + 1e-9


@given(trees())
def test_every_queue_of_a_tree_gets_its_guarantee(queues):
    house = House.of(queues)
    house.fill(much(queues))
    for name in house.settings.queue:
        # Queues that are at a maximum hold all that they may.
        assert house.held(name) >= house.quotas.guaranteed(name).gpus or not _may_grow(house, name)


def _may_grow(house: House, name: str) -> bool:
    """Whether any leaf at or below the queue is not at a maximum."""
    below = {name}
    for queue in house.settings.queue.values():
        if queue.parent in below:
            below.add(queue.name)
    return any(house.may_start(leaf) for leaf in house.leaves if leaf in below)


@given(trees(), st.lists(st.sampled_from(NAMES), max_size=40))
def test_a_queue_within_its_guarantee_finds_a_victim_on_full_machines(queues, arrivals):
    """So no guarantee is a promise that cannot be kept: the argument goes down from the level that is full."""
    house = House.of([QueueSettings(one.name, one.parent, guaranteed_gpus=one.guaranteed_gpus) for one in queues])
    leaves = house.leaves
    for name in arrivals:
        if house.free and name in leaves:
            house.add(name)
    while house.free:
        house.add(leaves[0])
    for name in leaves:
        if house.quotas.is_within_guarantee(name, ONE):
            event("within its guarantee")
            assert house.victim_for(name) is not None
        else:
            assert house.victim_for(name) is None


@given(trees(), st.lists(st.sampled_from(NAMES), max_size=40))
def test_reclaiming_terminates_with_every_guarantee_kept(queues, arrivals):
    house = House.of([QueueSettings(one.name, one.parent, guaranteed_gpus=one.guaranteed_gpus) for one in queues])
    leaves = house.leaves
    for name in arrivals:
        if house.free and name in leaves:
            house.add(name)
    while house.free:
        house.add(leaves[0])
    for _ in range(CARDS * len(leaves)):
        pair = next(((name, victim) for name in leaves if (victim := house.victim_for(name)) is not None), None)
        if pair is None:
            break
        name, victim = pair
        house.remove(victim)
        house.add(name)
    else:
        raise AssertionError("they take from each other for ever")
    assert house.free == 0
    for name in house.settings.queue:
        assert house.held(name) >= house.quotas.guaranteed(name).gpus


@given(flat(), st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=40))
def test_the_ledger_is_settled_when_every_queue_holds_its_own(queues, steps):
    """Whatever came and went, a loan is there exactly while somebody lacks what others hold too much of."""
    house = House.of(queues)
    for name, comes in steps:
        if name not in house.settings.queue:
            continue
        if comes and house.free:
            house.add(name)
        elif not comes and house.held(name):
            house.remove(name)
    lent = {loan.lender for loan in house.quotas.ledger()}
    borrowed = {loan.borrower for loan in house.quotas.ledger()}
    for queue in queues:
        assert queue.name not in lent or house.held(queue.name) < queue.guaranteed_gpus
        assert queue.name not in borrowed or house.held(queue.name) > queue.guaranteed_gpus
    if not house.free:
        short = [queue for queue in queues if house.held(queue.name) < queue.guaranteed_gpus]
        assert bool(lent) == bool(short)
