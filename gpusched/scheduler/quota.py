"""Queues, guarantees and limits: how much more a job may take, and which goes first.

One `Quotas` lives through one cycle. It tracks the holdings of running jobs, must see every start, and
answers for the next job. Idle guarantees are lent, also down the tree: the guarantee of
a queue is available to all of its descendants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import add, sub

from gpusched.model.cluster import JobTerms
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.limits import (
    JOBS,
    KINDS,
    NONE_HELD,
    ZERO,
    Amount,
    Denial,
    Held,
    Limit,
    QueueNode,
    amount_of,
    has_limits,
    implied,
    is_capacity,
    over_job_limit,
    over_maximum,
    over_qos_limit,
    over_user_limit,
    plant,
    resources_of,
    shared_limits,
    shared_qos_limits,
)
from gpusched.scheduler.usage import capacity_of


class Quotas:
    """Holdings of every queue, user and QOS, against their limits and guarantees."""

    def __init__(self, settings: Settings, layout: ClusterLayout, source: Quotas | None = None) -> None:
        """Args: source: whose fields it takes over, whatever the others say."""
        if source is not None:
            take_over(self, source)
            return
        self._settings, self._layout = settings, layout
        there = amount_of(capacity_of(layout))
        self._capacity = tuple((kind, amount) for kind, amount in enumerate(there) if amount)
        """Of what there is at all."""
        self._nodes = plant(settings.queue)
        self._chains: dict[str, tuple[QueueNode, ...]] = {}
        self._limited: dict[tuple[str, str], bool] = {}
        self._by_queue: dict[str, Held] = {}
        self._by_queue_user: dict[tuple[str, str], Held] = {}
        self._by_qos: dict[str, Held] = {}
        self._by_qos_user: dict[tuple[str, str], Held] = {}
        self._leaving: dict[str, Amount] = {}
        """Of what queues hold, what they are losing already."""
        self._fillers: dict[str, Held] = {}
        """Of what queues hold, what their fillers do: that counts for limits alone."""
        self._reclaims = settings.preempt.reclaim
        self.is_capacity = is_capacity(settings)
        """Whether queues divide the machines among them, so that `rank` decides which goes first."""

    def mark(self) -> dict[str, Amount]:
        """Amounts that queues are losing already, to pass to `restore`."""
        return self._leaving.copy()

    def restore(self, mark: dict[str, Amount]) -> None:
        """Reset the amounts that queues are losing."""
        self._leaving = mark

    def copy(self) -> Quotas:
        twin = Quotas(self._settings, self._layout, self)
        twin._by_queue = self._by_queue.copy()
        twin._by_queue_user = self._by_queue_user.copy()
        twin._by_qos = self._by_qos.copy()
        twin._by_qos_user = self._by_qos_user.copy()
        twin._leaving = self._leaving.copy()
        twin._fillers = self._fillers.copy()
        return twin

    def add(self, terms: JobTerms, amount: Resources, jobs: int = 1, *, is_filler: bool = False) -> None:
        """Count a running job, a gang with all of its nodes at once; or, with `jobs=0`, a further piece of one."""
        self._count(terms, amount_of(amount), jobs, 1, is_filler)

    def remove(self, terms: JobTerms, amount: Resources, jobs: int = 1, *, is_filler: bool = False) -> None:
        """Undo `add`, exactly."""
        self._count(terms, amount_of(amount), jobs, -1, is_filler)

    def leave(self, queue: str, amount: Resources) -> None:
        """Count a running job as being stopped: it no longer counts for guarantees, but for limits until it has ended.

        This keeps a queue from having to return borrowed resources twice. Jobs that receive the freed resources
        must be added like running jobs, or they would claim their guarantee twice.
        """
        gpus, cpus, mem = amount_of(amount)
        for node in self._chain(queue):
            g, c, m = self._leaving.get(node.name, ZERO)
            self._leaving[node.name] = (g + gpus, c + cpus, m + mem)

    def _owned(self, name: str) -> Held:
        """Holdings of a queue without those of its fillers."""
        held = self._by_queue.get(name, NONE_HELD)
        lent = self._fillers.get(name)
        return held if lent is None else (held[0] - lent[0], held[1] - lent[1], held[2] - lent[2], held[3] - lent[3])

    def _staying(self, name: str) -> Amount:
        """Holdings of a queue without those it is losing already, or may lose to any job."""
        gpus, cpus, mem, _ = self._owned(name)
        leaving = self._leaving.get(name)
        if leaving is None:
            return gpus, cpus, mem
        return gpus - leaving[0], cpus - leaving[1], mem - leaving[2]

    def _count(self, terms: JobTerms, amount: Amount, jobs: int, sign: int, is_filler: bool) -> None:
        user, qos = terms.user, terms.qos
        gpus, cpus, mem, jobs = sign * amount[0], sign * amount[1], sign * amount[2], sign * jobs
        for node in self._chain(terms.queue):
            if is_filler:
                g, c, m, j = self._fillers.get(node.name, NONE_HELD)
                self._fillers[node.name] = (g + gpus, c + cpus, m + mem, j + jobs)
            g, c, m, j = self._by_queue.get(node.name, NONE_HELD)
            self._by_queue[node.name] = (g + gpus, c + cpus, m + mem, j + jobs)
            g, c, m, j = self._by_queue_user.get((node.name, user), NONE_HELD)
            self._by_queue_user[node.name, user] = (g + gpus, c + cpus, m + mem, j + jobs)
        if qos:
            g, c, m, j = self._by_qos.get(qos, NONE_HELD)
            self._by_qos[qos] = (g + gpus, c + cpus, m + mem, j + jobs)
            g, c, m, j = self._by_qos_user.get((qos, user), NONE_HELD)
            self._by_qos_user[qos, user] = (g + gpus, c + cpus, m + mem, j + jobs)

    def _chain(self, queue: str) -> tuple[QueueNode, ...]:
        """The queue and its ancestors, from the bottom up."""
        known = self._chains.get(queue)
        if known is not None:
            return known
        made: list[QueueNode] = []
        node: QueueNode | None = self._nodes.get(queue) or implied(queue)
        most = self._settings.limit.running_per_user
        if most is not None and node is not None and node.settings.max_running_per_user is None:
            # Applies to the job's own queue; its ancestors do not inherit the default.
            node = replace(node, settings=replace(node.settings, max_running_per_user=most))
        while node is not None:
            made.append(node)
            node = None if node.parent is None else self._nodes[node.parent]
        self._chains[queue] = tuple(made)
        return self._chains[queue]

    def used(self, queue: str) -> Resources:
        """Holdings of the jobs in a queue and its descendants, without VRAM."""
        return resources_of(self._by_queue.get(queue, NONE_HELD)[:JOBS])

    def running(self, queue: str) -> int:
        """Number of running jobs in a queue and its descendants."""
        return self._by_queue.get(queue, NONE_HELD)[JOBS]

    def guaranteed(self, queue: str) -> Resources:
        """Guarantee of a queue, its own or through its descendants."""
        return resources_of(self._chain(queue)[0].guaranteed)

    # Limits

    def why_not(self, terms: JobTerms, amount: Resources) -> Denial | None:
        """The first limit that blocks a job on these terms with this amount; None if it may start.

        Order: limits per job, per user, maxima of the queues from the bottom up, the QOS.
        """
        if not self.has_limits(terms):
            return None
        needed, user = amount_of(amount), terms.user
        chain = self._chain(terms.queue)
        for node in chain:
            if denial := over_job_limit(node, needed):
                return denial
        for node in chain:
            if node.limits_users:
                by_user = self._by_queue_user.get((node.name, user), NONE_HELD)
                if denial := over_user_limit(node, user, by_user, needed):
                    return denial
        for node in chain:
            if denial := over_maximum(node, self._by_queue.get(node.name, NONE_HELD), needed):
                return denial
        qos = self._settings.qos.get(terms.qos)
        if qos is None:
            return None
        by_user = self._by_qos_user.get((qos.name, user), NONE_HELD)
        return over_qos_limit(qos, user, self._by_qos.get(qos.name, NONE_HELD), by_user, needed)

    def may_act_for(self, qos: str, user: str, amount: Resources) -> bool:
        """Whether a job of another QOS may preempt in the name of this one, which a job that depends on it has.

        Only within its limits, with all that the user holds counted as of this QOS: otherwise one job without GPUs that
        depends on many would let all of them preempt.
        """
        limits = self._settings.qos.get(qos)
        if limits is None or not has_limits(limits):
            return limits is not None
        whole = NONE_HELD
        for (queue, name), held in self._by_queue_user.items():
            if name == user and self._chain(queue)[-1].name == queue:
                whole = tuple(map(add, whole, held))
        own = self._by_qos_user.get((qos, user), NONE_HELD)
        total = tuple(map(add, self._by_qos.get(qos, NONE_HELD), map(sub, whole, own)))
        return over_qos_limit(limits, user, total, whole, amount_of(amount)) is None

    def has_limits(self, terms: JobTerms) -> bool:
        """Whether any limit can block a job of this queue and QOS."""
        mark = terms.queue, terms.qos
        known = self._limited.get(mark)
        if known is None:
            known = self._limited[mark] = self._has_limits(*mark)
        return known

    def _has_limits(self, queue: str, qos: str) -> bool:
        if any(node.maxima or node.most_per_job is not None or node.limits_users for node in self._chain(queue)):
            return True
        limits = self._settings.qos.get(qos)
        return limits is not None and has_limits(limits)

    def is_under(self, limit: Limit, terms: JobTerms) -> bool:
        if limit.user not in (None, terms.user):
            return False
        if limit.where == "qos":
            return limit.name == terms.qos
        return any(limit.name == node.name for node in self._chain(terms.queue))

    def limits_over(self, terms: JobTerms) -> Iterator[Limit]:
        if not self.has_limits(terms):
            return
        for node in self._chain(terms.queue):
            yield from shared_limits(node, terms.user)
        qos = self._settings.qos.get(terms.qos)
        if qos is not None:
            yield from shared_qos_limits(qos, terms.user)

    # Guarantees

    def is_within_guarantee(self, queue: str, amount: Resources) -> bool:
        """Whether the queue or one of its ancestors has this much of its guarantee left.

        Only needed and guaranteed kinds count: with nothing but GPUs guaranteed,
        the cores of a job do not matter, and a job without GPUs is not within it.
        """
        needed = amount_of(amount)
        return any(_is_within(node, self._staying(node.name), needed) for node in self._chain(queue))

    def rank(self, queue: str, amount: Resources) -> tuple[tuple[int, float, str], ...]:
        """Sort key across all queues, smaller first, for a job with this amount.

        Per level from the top: within its guarantee (0), beyond it (1), without settings although others
        have them (2); then the used fraction of the guarantee, or the dominant share of the excess over
        it divided by the weight; then the name. It grows with the queue's holdings and never shrinks.
        """
        needed = amount_of(amount)
        return tuple(self._rank_of(node, needed) for node in reversed(self._chain(queue)))

    def _rank_of(self, node: QueueNode, needed: Amount) -> tuple[int, float, str]:
        held = self._owned(node.name)
        share = 0.0
        if _is_within(node, held, needed):
            for kind, own in node.guarantees:
                share = max(share, held[kind] / own)
            return 0, share, node.name
        for kind, there in self._capacity:
            share = max(share, (held[kind] - node.guaranteed[kind]) / there)
        weight = 1.0 if node.settings.weight is None else node.settings.weight
        level = 1 if node.is_configured or not self._nodes else 2
        return level, share / weight if weight > 0 else inf, node.name

    def may_reclaim(
        self, claimant: str, amount: Resources, victim: str, victim_amount: Resources, *, may_cut: bool = False
    ) -> bool:
        """Whether a job of the claimant queue may reclaim what a job of the victim queue holds.

        Below their common ancestor, the claimant's side must stay within its guarantee with the
        amount. Every queue on the victim's side must be preemptible, hold more than its guarantee of some kind
        that the claimant is guaranteed and needs, and fall below its guarantee of no kind in which it exceeds it;
        `may_cut` waives the last condition, for a victim partly on borrowed resources when there is no
        other. A guarantee of GPUs precedes one of cores, and that one of memory: a job on
        guaranteed GPUs is not preempted for its cores. Otherwise two queues with guarantees of different
        kinds could keep preempting each other.
        """
        if not self._reclaims:
            return False
        ours, theirs = list(self._chain(claimant)), list(self._chain(victim))
        while ours and theirs and ours[-1].name == theirs[-1].name:
            ours.pop()
            theirs.pop()
        if not ours or not theirs:
            return False
        needed, lost = amount_of(amount), amount_of(victim_amount)
        if not _is_within(ours[-1], self._staying(ours[-1].name), needed):
            return False
        wanted = [kind for kind in KINDS if needed[kind] and lost[kind] and ours[-1].guaranteed[kind]]
        return all(self._can_give(node, wanted, lost, may_cut) for node in theirs)

    def _can_give(self, node: QueueNode, wanted: list[int], lost: Amount, may_cut: bool) -> bool:
        held, own = self._staying(node.name), node.guaranteed
        claimed = next((kind for kind in wanted if held[kind] > own[kind]), None)
        if claimed is None or not node.settings.preemptible:
            return False
        for kind in KINDS:
            if not lost[kind] or not own[kind]:
                continue
            if held[kind] > own[kind]:
                if held[kind] - lost[kind] < own[kind] and not may_cut:
                    return False
            elif kind < claimed:
                return False
        return True

    def ledger(self) -> tuple[Loan, ...]:
        """Current loans between queues."""
        tops = [name for name, node in self._nodes.items() if node.parent is None]
        tops += [name for name in self._by_queue if name not in self._nodes]
        return loans(self._nodes, tops, lambda name: self._by_queue.get(name, NONE_HELD), dict(self._capacity))


def _is_within(node: QueueNode, held: Sequence[int], needed: Amount) -> bool:
    """Whether this much more is within the guarantee of this queue alone."""
    is_any = False
    for kind, own in node.guarantees:
        if needed[kind]:
            if held[kind] + needed[kind] > own:
                return False
            is_any = True
    return is_any


@dataclass(frozen=True, slots=True)
class Loan:
    """Loan from one queue to another of the same level. Neither is the other's ancestor."""

    lender: str
    borrower: str
    amount: Resources


HeldBy = Callable[[str], Sequence[int]]
"""Holdings of a queue and its descendants, in millionths by kind."""


def loans(
    nodes: Mapping[str, QueueNode], tops: Sequence[str], held: HeldBy, capacity: Mapping[int, int]
) -> tuple[Loan, ...]:
    """All loans, level by level, by lender and borrower.

    Unguaranteed resources are not lent: borrowers use them up first. The rest of their excess over
    their guarantee is taken from idle guarantees. Both go by name, so that equal states give
    equal ledgers. `tops` are all queues of the highest level, including those without settings.
    """
    found = _between(sorted(tops), nodes, held, capacity)
    for name, node in sorted(nodes.items()):
        if node.children:
            # What the queue can divide among its children: the greater of its guarantee and its holdings.
            own = {kind: max(node.guaranteed[kind], held(name)[kind]) for kind in KINDS}
            found += _between(node.children, nodes, held, own)
    return tuple(found)


def _between(
    siblings: Sequence[str], nodes: Mapping[str, QueueNode], held: HeldBy, capacity: Mapping[int, int]
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
    """Pairs for one kind. `idle` is negative for queues above their guarantee."""
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
