"""Who lends what to whom: guarantees that lie idle and are in use by others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.model.resources import Resources
from gpusched.scheduler.sharing.queues import KINDS, QueueNode, resources_of


@dataclass(frozen=True, slots=True)
class Loan:
    """What one queue has lent to another of the same level. Neither is above the other."""

    lender: str
    borrower: str
    amount: Resources


Held = Callable[[str], Sequence[int]]
"""What a queue holds with all below it, in millionths by kind."""


def loans(
    nodes: Mapping[str, QueueNode], tops: Sequence[str], held: Held, capacity: Mapping[int, int]
) -> tuple[Loan, ...]:
    """All loans, level by level, by lender and borrower.

    What nobody is guaranteed is nobody's loan: borrowers use that up first. The rest of what they hold
    above their guarantee is taken from idle guarantees. Both go by name, so that equal worlds give
    equal ledgers. `tops` are all queues of the highest level, those without settings too.
    """
    found = _between(sorted(tops), nodes, held, capacity)
    for name, node in sorted(nodes.items()):
        if node.children:
            # What the queue may share out among those below: its guarantee, or what it holds if that is more.
            own = {kind: max(node.guaranteed[kind], held(name)[kind]) for kind in KINDS}
            found += _between(node.children, nodes, held, own)
    return tuple(found)


def _between(
    siblings: Sequence[str], nodes: Mapping[str, QueueNode], held: Held, capacity: Mapping[int, int]
) -> list[Loan]:
    lent: dict[tuple[str, str], list[int]] = {}
    for kind in KINDS:
        guaranteed = {name: nodes[name].guaranteed[kind] if name in nodes else 0 for name in siblings}
        if not any(guaranteed.values()):
            continue
        idle = {name: guaranteed[name] - held(name)[kind] for name in siblings}
        unpromised = max(0, capacity.get(kind, 0) - sum(guaranteed.values()))
        for lender, borrower, amount in _apportion(siblings, idle, unpromised):
            lent.setdefault((lender, borrower), [0, 0, 0])[kind] += amount
    return [Loan(lender, borrower, resources_of(amount)) for (lender, borrower), amount in sorted(lent.items())]


def _apportion(siblings: Sequence[str], idle: Mapping[str, int], unpromised: int) -> list[tuple[str, str, int]]:
    """Pairs for one kind. `idle` is below 0 for those that hold more than their guarantee."""
    made = []
    left = {name: amount for name, amount in idle.items() if amount > 0}
    lenders = iter([name for name in siblings if name in left])
    lender = next(lenders, None)
    for borrower in siblings:
        wanted = max(0, -idle[borrower])
        from_nobody = min(wanted, unpromised)
        unpromised -= from_nobody
        wanted -= from_nobody
        while wanted and lender is not None:
            amount = min(wanted, left[lender])
            made.append((lender, borrower, amount))
            wanted -= amount
            left[lender] -= amount
            if not left[lender]:
                lender = next(lenders, None)
    return made
