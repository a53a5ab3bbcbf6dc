"""Rows that several answers have: of queues, what each is guaranteed, uses, borrows and lends; and of equal jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from gpusched.access import is_private, own_accounts
from gpusched.api.visibility import Viewer
from gpusched.lifecycle.arrays import job_count
from gpusched.model.job import Job
from gpusched.model.resources import Resources
from gpusched.model.states import JobState
from gpusched.model.table_settings import QueuePause
from gpusched.model.variants import gpu_demands
from gpusched.scheduler.admission import default_time_limit, longest_time_limit_of_queue
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.limits import QueueNode, implied, plant
from gpusched.scheduler.preemption import held_by_job
from gpusched.scheduler.quota import Quotas


def queues_and_loans(viewer: Viewer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every configured or used queue, each before its children, and the loans between them."""
    service = viewer.service
    scheduler, settings = service.scheduler, service.settings
    snapshot = scheduler.snapshot(scheduler.now())
    layout = ClusterLayout(snapshot.nodes, settings)
    quotas = Quotas(settings, layout)
    for held in held_by_job(layout, snapshot.allocations).values():
        quotas.add(held.first.terms, held.amount)
    nodes = plant(settings.queue)
    counts = _counts(viewer, nodes)
    lent, borrowed, loans = _loans(quotas)
    places = {name: place for place, name in enumerate(settings.queue)}
    rows = [
        {
            "name": node.name,
            "parent": node.parent,
            "depth": depth,
            "pending": counts[node.name][0],
            "running": counts[node.name][1],
            **_amounts("guaranteed", quotas.guaranteed(node.name)),
            "max_gpus": node.settings.max_gpus,
            "max_cpus": node.settings.max_cpus,
            "max_mem_mib": node.settings.max_mem_mib,
            **_amounts("used", quotas.used(node.name)),
            **_amounts("borrowed", borrowed.get(node.name, Resources())),
            **_amounts("lent", lent.get(node.name, Resources())),
            "weight": 1.0 if node.settings.weight is None else node.settings.weight,
            "preemptible": node.settings.preemptible,
            "preempt_mode": settings.preempt.mode if node.settings.preemptible else "off",
            "order": node.settings.order or settings.priority.order,
            "is_default": node.name == settings.default.queue,
            "is_leaf": not node.children,
            "position": places.get(node.name),
            "default_time_s": default_time_limit(node.name, settings),
            "max_time_s": longest_time_limit_of_queue(node.name, settings),
            "accounts": _shown_accounts(node.settings.accounts, viewer),
            **pause_json(scheduler.state.pauses.of(node.name)),
        }
        for node, depth in _tree(nodes, counts)
    ]
    return rows, loans


def pause_json(pause: QueuePause | None) -> dict[str, Any]:
    """Whether nothing new starts from a queue, who said so and why; `paused_with` is the queue that was paused."""
    if pause is None:
        return {"state": "up", **dict.fromkeys(("paused_with", "paused_by", "paused_at", "message"))}
    return {
        "state": "paused",
        "paused_with": pause.queue,
        "paused_by": pause.by,
        "paused_at": pause.at,
        "message": pause.message,
    }


def _shown_accounts(names: Iterable[str], viewer: Viewer) -> list[str]:
    """The accounts of a queue; where accounts are private, those that are not the caller's as `-`."""
    settings = viewer.service.settings
    if not is_private("accounts", viewer.caller, settings):
        return list(names)
    own = own_accounts(viewer.caller, settings)
    return list(dict.fromkeys(name if name in own else "-" for name in names))


def _amounts(what: str, amount: Resources) -> dict[str, float]:
    return {f"{what}_gpus": amount.gpus, f"{what}_cpus": amount.cpus, f"{what}_mem_mib": amount.mem_mib}


def _loans(quotas: Quotas) -> tuple[dict[str, Resources], dict[str, Resources], list[dict[str, Any]]]:
    lent: dict[str, Resources] = {}
    borrowed: dict[str, Resources] = {}
    rows: list[dict[str, Any]] = []
    for loan in quotas.ledger():
        lent[loan.lender] = lent.get(loan.lender, Resources()) + loan.amount
        borrowed[loan.borrower] = borrowed.get(loan.borrower, Resources()) + loan.amount
        amount = {"gpus": loan.amount.gpus, "cpus": loan.amount.cpus, "mem_mib": loan.amount.mem_mib}
        rows.append({"lender": loan.lender, "borrower": loan.borrower, **amount})
    return lent, borrowed, rows


def _counts(viewer: Viewer, nodes: dict[str, QueueNode]) -> dict[str, tuple[int, int]]:
    """Pending and running jobs of each queue visible to the caller, including those of its subtree.

    Each task of an array is one, as in the totals of the board.
    """
    service = viewer.service
    state = service.scheduler.state
    by_queue = state.census.by_queue
    if viewer.is_restricted:
        by_queue = Counter()
        for job in filter(viewer.sees, state.jobs.values()):
            by_queue[job.state, job.spec.queue] += job_count(job)
    own: dict[str, list[int]] = {}
    for (state_of_jobs, name), jobs in by_queue.items():
        own.setdefault(name, [0, 0])[0 if state_of_jobs is JobState.PENDING else 1] += jobs
    default = service.settings.default.queue
    total = {name: [0, 0] for name in (*nodes, *own, *(() if nodes else (default,)))}
    for name, counts in own.items():
        above: str | None = name
        while above is not None:
            total[above][0] += counts[0]
            total[above][1] += counts[1]
            above = nodes[above].parent if above in nodes else None
    return {name: (pending, running) for name, (pending, running) in total.items()}


def _tree(nodes: dict[str, QueueNode], names: Iterable[str]) -> Iterable[tuple[QueueNode, int]]:
    """Every queue with its depth, by name within its level; queues without settings are at the top."""
    tops = [name for name in names if name not in nodes or nodes[name].parent is None]
    stack = [(name, 0) for name in sorted(tops, reverse=True)]
    while stack:
        name, depth = stack.pop()
        node = nodes.get(name) or implied(name)
        yield node, depth
        stack.extend((child, depth + 1) for child in sorted(node.children, reverse=True))


def table_key(viewer: Viewer) -> Callable[[Job], object]:
    """What pending jobs of one row of a table have in common: user, name, GPUs and reason."""
    code_of = viewer.service.scheduler.answers.reason_codes()
    demands: dict[int, object] = {}

    def key(job: Job) -> object:
        # Equal requests mostly share one object.
        asked = job.spec.variants or job.spec.request
        demand = demands.get(id(asked))
        if demand is None:
            demand = demands[id(asked)] = gpu_demands(job.spec)
        return job.user, viewer.name_of(job), demand, code_of(job)

    return key
