"""A readable way to write down one cycle: machines, running and waiting jobs in, decisions out.

Places are written `n1` (a node, no GPU) or `n1:0,2` (cards by index). Running jobs name theirs, and
expectations are compared with the same words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusched import testing
from gpusched.model.cluster import Allocation, HostSample, NodeView
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, Placement, Plan, Reason, Snapshot, Usage, Window
from gpusched.model.value import replace
from gpusched.model.variants import with_variant
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.planner import decide
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.priority import terms_of
from gpusched.testing import NOW, allocation, job, share

MINUTE, HOUR = 60.0, 3600.0


def running(
    job_id: int,
    where: str,
    *,
    ends_in: float | None = None,
    since: float = HOUR,
    vram: int | None = None,
    fraction: float | None = None,
    **parts: Any,
) -> Allocation:
    """A running job at a place, whole cards unless `vram` (MiB) or `fraction` is given."""
    node_name, cards = split_place(where)
    shares = [share(index, node_name, vram_mib=vram, fraction=fraction) for index in cards]
    return allocation(
        job_id,
        node_name,
        shares,
        start_at=NOW - since,
        expected_end_at=None if ends_in is None else NOW + ends_in,
        **parts,
    )


def wants(job_id: int, gpus: int = 0, *, limit: float | None = None, waited: float | None = None, **parts: Any) -> Job:
    """A waiting job by the fields of Request, Job and JobSpec. Lower ids have waited longer."""
    request = {name: parts.pop(name) for name in list(parts) if name in Request.__struct_fields__}
    return job(
        job_id,
        request=Request(gpus=gpus, **request),
        time_limit_s=None if limit is None else int(limit),
        submit_at=NOW - (10_000.0 - job_id if waited is None else waited),
        **parts,
    )


def load(**parts: Any) -> HostSample:
    """Measured load of a node, idle unless said otherwise."""
    fields: dict[str, Any] = {"mem_available_mib": 64 * 1024, "cpu_fraction": 0.0, "disk_mib_s": 0.0}
    return HostSample(at=NOW, name="n1", cpus=16, mem_total_mib=64 * 1024, **{**fields, "net_mib_s": 0.0, **parts})


FIRST_COME = replace(
    Settings(),
    priority=PrioritySettings(
        order="multifactor", weight_short=0.0, weight_whole=0.0, backfill_by="limit", max_wait_s=7 * 86400.0
    ),
)
"""First come, first served where nothing else is said: most tables speak neither of lengths nor of users."""

_TABLES = {"queue": QueueSettings, "qos": QosSettings, "account": AccountSettings}


def settings(**groups: Mapping[str, Any]) -> Settings:
    """Defaults, with some fields of some groups replaced: `settings(gpu={"share_headroom_mib": 0})`.

    Of `queue`, `qos` and `account` the fields of each by name: `settings(qos={"urgent": {"tier": 1}})`.
    """
    made = FIRST_COME
    for group, fields in groups.items():
        if group in _TABLES:
            value: Any = {name: _TABLES[group](name, **parts) for name, parts in fields.items()}
        elif group == "license":
            value = dict(fields)
        else:
            value = replace(getattr(made, group), **fields)
        made = replace(made, **{group: value})
    return made


def split_place(where: str) -> tuple[str, list[int]]:
    """`n1:0,2` -> (`n1`, [0, 2])."""
    node_name, _, cards = where.partition(":")
    return node_name, [int(index) for index in cards.split(",") if index]


def place_of(placement: Placement) -> str:
    """A placement in the words of the scenarios."""
    cards = ",".join(str(card.index) for card in placement.gpus)
    return f"{placement.node}:{cards}" if cards else placement.node


@dataclass(frozen=True)
class Outcome:
    """A plan in the words of the scenarios."""

    plan: Plan
    starts: dict[int, str]
    reserved: dict[int, tuple[str, float | None]]
    """Job -> place and seconds from now until its start, None when unknown."""
    reasons: dict[int, Reason]
    """By the first waiting job of each class."""
    preempts: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Victim -> how, and for which job."""

    @property
    def codes(self) -> dict[int, str]:
        """The code of each waiting job."""
        return {job_id: str(reason.code) for job_id, reason in self.reasons.items()}

    def text(self, job_id: int) -> str:
        """The sentence for people of one waiting job."""
        return self.reasons[job_id].text


@dataclass(frozen=True)
class Scenario:
    """One cycle. `outcome` decides twice and checks what must hold of every plan."""

    nodes: Sequence[NodeView]
    waiting: Sequence[Job]
    running: Sequence[Allocation] = ()
    settings: Settings = FIRST_COME
    front: int | None = None
    usage: Sequence[Usage] = ()
    windows: Sequence[Window] = ()
    extensions: Extensions = NO_EXTENSIONS
    budgets: Sequence[Budget] = ()

    def snapshot(self) -> Snapshot:
        """The policy's input."""
        made = testing.snapshot(
            *self.nodes,
            running=self.running,
            waiting=self.waiting,
            front=self.front,
            usage=self.usage,
            windows=self.windows,
        )
        return replace(made, budgets=tuple(self.budgets))

    def outcome(self) -> Outcome:
        """Decide, and compare with a second decision on a snapshot made anew."""
        before = self.snapshot()
        plan = decide(before, self.settings, self.extensions)
        assert plan == decide(self.snapshot(), self.settings, self.extensions)
        assert check_invariants(apply_plan(before, self.waiting, plan), self.settings) == []
        started = {start.job_id for start in plan.starts}
        reasons = {}
        for waiting in before.pending:
            left = [one.id for one in waiting.jobs if one.id not in started]
            if left:
                reasons[left[0]] = plan.reasons[waiting.key].render()
        return Outcome(
            plan=plan,
            starts={start.job_id: place_of(start.placement) for start in plan.starts},
            reserved={
                kept.job_id: (
                    place_of(kept.placement),
                    None if kept.start_at is None else kept.start_at - before.now,
                )
                for kept in plan.reservations
            },
            reasons=reasons,
            preempts={one.job_id: (one.mode, one.for_job) for one in plan.preempts},
        )


def apply_plan(snapshot: Snapshot, waiting: Sequence[Job], plan: Plan) -> Snapshot:
    """The snapshot after all starts of the plan."""
    jobs = {one.id: one for one in waiting}
    jobs |= {
        start.job_id: replace(one, spec=with_variant(one.spec, start.variant))
        for start in plan.starts
        if (one := jobs[start.job_id]).spec.variants
    }
    held = [
        Allocation(
            job_id=start.job_id,
            terms=terms_of(jobs[start.job_id]),
            node=piece.node,
            gpus=piece.gpus,
            cpus=piece.cpus,
            mem_mib=piece.mem_mib,
            start_at=snapshot.now,
            expected_end_at=_end_of(jobs[start.job_id], snapshot.now),
            resources=piece.resources,
            licenses=piece.licenses,
            is_exclusive=piece.is_exclusive,
        )
        for start in plan.starts
        for piece in (start.placement, *start.placement.others)
    ]
    started = {start.job_id for start in plan.starts}
    return testing.snapshot(
        *snapshot.nodes,
        running=[*snapshot.allocations, *held],
        waiting=[one for one in waiting if one.id not in started],
        now=snapshot.now,
    )


def _end_of(one: Job, now: float) -> float | None:
    return None if one.spec.time_limit_s is None else now + one.spec.time_limit_s
