"""Settings under which schedules are those of the literature, so that two simulators can be compared start for start.

    swf    rigid jobs on identical processors
    gang   jobs of whole GPUs on nodes with 8 each: whole nodes, and one more for what is left

A policy is named `ORDER[+BACKFILL][/PLACEMENT]`: `fcfs`, `sjf+easy`, `fcfs+greedy/spread`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.job import Request
from gpusched.model.settings import PlacementSettings, PrioritySettings, Settings
from gpusched.simulate.trace import TraceJob

ORDERS = {"fcfs": "fifo", "sjf": "sjf", "saf": "saf", "spf": "spf", "sjf_exact": "spf"}
"""Names of the literature and ours."""

BACKFILLS = {"none": (False, 1), "greedy": (True, 0), "easy": (True, 1), "sjbf": (True, 1), "cons": (True, 1_000_000)}
"""Whether others pass the first that is blocked, and for how many something is kept; with sjbf the shortest first."""

PLACEMENTS = {"best": "pack", "first": "first", "spread": "spread"}

EXACT = {
    "swf": (("fcfs", "sjf", "saf", "sjf_exact"), ("none", "greedy", "easy", "cons"), ("best",)),
    "gang": (("fcfs", "sjf"), ("none", "greedy", "easy"), ("best", "first", "spread")),
}
"""Orders, backfills and placements for which the rules determine every start."""


@dataclass(frozen=True, slots=True)
class Rules:
    """One policy by the names of its parts."""

    order: str = "fcfs"
    backfill: str = "none"
    placement: str = "best"

    @property
    def orders_by_run_time(self) -> bool:
        """Whether the order knows how long each job will run."""
        return self.order == "sjf_exact"

    def settings(self) -> Settings:
        """What makes the daemon's policy keep these rules."""
        is_on, depth = BACKFILLS[self.backfill]
        return Settings(
            priority=PrioritySettings(
                order=ORDERS[self.order],
                backfill=is_on,
                backfill_depth=depth,
                backfill_order="shortest" if self.backfill == "sjbf" else "line",
                backfill_elsewhere=False,
                backfill_by="prediction",
                max_wait_s=inf,
                fence_s=inf,
            ),
            placement=PlacementSettings(strategy=PLACEMENTS[self.placement]),
        )


def rules_of(text: str) -> Rules:
    """The rules of a name. Raises: UsageError for a part that is not known, naming those that are."""
    rest, _, placement = text.partition("/")
    order, _, backfill = rest.partition("+")
    rules = Rules(order, backfill or "none", placement or "best")
    for what, name, known in (
        ("order", rules.order, ORDERS),
        ("backfill", rules.backfill, BACKFILLS),
        ("placement", rules.placement, PLACEMENTS),
    ):
        if name not in known:
            raise UsageError(f"{text!r} names no {what} that is known: {', '.join(known)}", "--policy fcfs+easy")
    return rules


def check_exact(kind: str, policies: Iterable[str], jobs: Sequence[TraceJob]) -> None:
    """That these policies on these jobs give one schedule alone by the rules of this kind, `swf` or `gang`.

    Raises: UsageError for another kind, a policy or a request that the rules do not cover, and jobs of the other kind.
    """
    if kind not in EXACT:
        raise UsageError(f"{kind!r} names no rules that are known: {', '.join(EXACT)}", "--rules swf")
    for policy in policies:
        rules = rules_of(policy)
        parts = rules.order, rules.backfill, rules.placement
        for name, known in zip(parts, EXACT[kind], strict=True):
            if name not in known:
                raise UsageError(
                    f"the rules {kind} do not say what {name!r} of {policy} is: {', '.join(known)}",
                    "--policy fcfs+easy",
                )
    wants_gpus = kind == "gang"
    other = next((job.id for job in jobs if bool(job.gpus) is not wants_gpus), None)
    if other is not None:
        what, better = ("no GPU", "swf") if wants_gpus else ("GPUs", "gang")
        raise UsageError(
            f"job {other} asks for {what}, which is not by the rules {kind}", f"--rules {better}, or leave it out"
        )
    more = next((job.id for job in jobs if job.cpus or job.mem_mib or job.gpu_fraction is not None), None)
    if more is not None:
        raise UsageError(
            f"job {more} asks for cores, memory or a part of a card, which the rules {kind} do not know",
            "leave --rules out",
        )


def request_of(job: TraceJob, nodes: Sequence[NodeView]) -> Request:
    """What a job of a trace asks the policy for, on these machines.

    GPUs that are more than any node has become a gang: whole nodes, and one more for what is left.
    """
    if job.procs and not job.gpus:
        return Request(cpus=float(job.procs))
    size = max(len(node.gpus) for node in nodes)
    fields = {"cpus": job.cpus, "mem_mib": job.mem_mib}
    if job.gpus <= size:
        return Request(gpus=job.gpus, gpu_fraction=job.gpu_fraction, **fields)  # type: ignore[arg-type]
    return Request(gpus=size, nodes=job.gpus // size, tail_gpus=job.gpus % size, **fields)  # type: ignore[arg-type]
