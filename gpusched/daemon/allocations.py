"""Resources that a run holds, as the scheduler sees them, and the usage that an ended run adds."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.lifecycle.transitions import counts_for_usage
from gpusched.model.cluster import Allocation
from gpusched.model.job import Job, Run
from gpusched.model.resources import NOTHING
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.usage import charged, footprint


def allocations_of_run(
    job: Job | None,
    run: Run,
    default_grace_s: float,
    stopping_at: float | None = None,
    checkpoint_at: float | None = None,
    epilog_s: float = 0.0,
) -> tuple[Allocation, ...]:
    """Resources that an open run holds on each of its nodes, by rank.

    Args: stopping_at: since when the run is being stopped, if it is; epilog_s: how long its epilogs may take then.

    A run suspended by the policy keeps its memory, GPUs and countable resources and gives back its cores,
    also while it is stopped afterwards. A run suspended by its owner keeps everything, so that the owner can
    resume it at any time. The time limit does not count suspended time. Neither does usage, since the start
    is shifted by that time, unless the run kept GPUs from others meanwhile.
    """
    if job is None:
        # A run without a known job is stopped at the next adoption; until then it holds its booking.
        return _bare(run)
    spec = job.spec
    start_at = run.start_at if run.start_at is not None else run.intent_at
    limited_from = start_at + run.suspended_s
    if not run.gpus:
        start_at = limited_from
    grace_s = default_grace_s if spec.launch.grace_s is None else spec.launch.grace_s
    stands_still = job.suspended_at is not None
    gave_way = job.suspended_by == "policy"
    expected_end_at = None if spec.time_limit_s is None or stands_still else limited_from + spec.time_limit_s
    if stopping_at is not None:
        expected_end_at = stopping_at + grace_s + epilog_s
    request = spec.request
    first, *others = run.on_each_node
    held = Allocation(
        job_id=run.job_id,
        uid=job.uid,
        node=first.node,
        gpus=first.gpus,
        cpus=0.0 if gave_way else first.cpus,
        mem_mib=first.mem_mib,
        start_at=start_at,
        expected_end_at=expected_end_at,
        user=job.user,
        account=spec.account,
        queue=spec.queue,
        qos=spec.qos,
        resources=request.resources,
        licenses=request.licenses,
        is_exclusive=request.is_exclusive,
        reservation=spec.reservation,
        is_stopping=stopping_at is not None,
        is_suspended=stands_still and gave_way,
        suspended_cpus=first.cpus if gave_way else 0.0,
        can_requeue=spec.retry.requeue,
        # A suspended exclusive job would still keep others off its nodes.
        can_suspend=not (request.gpus or request.is_exclusive or stands_still),
        array_id=job.array_id,
        grace_s=grace_s,
        epilog_s=epilog_s,
        checkpoint_at=checkpoint_at,
        request=request,
        is_filler=run.is_filler,
    )
    return (
        held,
        *(
            replace(
                held,
                node=part.node,
                gpus=part.gpus,
                cpus=0.0 if gave_way else part.cpus,
                mem_mib=part.mem_mib,
                suspended_cpus=part.cpus if gave_way else 0.0,
                licenses=(),
            )
            for part in others
        ),
    )


def gpus_only(held: Allocation, end_at: float) -> Allocation:
    """Allocation of an ended run: its GPUs, until they are proven clean; planned as free at once.

    It starts at the end of the run, since the time before is already counted as usage.
    """
    return Allocation(
        job_id=held.job_id,
        uid=held.uid,
        node=held.node,
        gpus=held.gpus,
        cpus=0.0,
        mem_mib=0,
        start_at=end_at,
        expected_end_at=end_at,
        user=held.user,
        account=held.account,
        queue=held.queue,
        qos=held.qos,
        reservation=held.reservation,
        is_stopping=True,
        can_requeue=held.can_requeue,
        can_suspend=held.can_suspend,
        grace_s=0.0,
    )


def _bare(run: Run) -> tuple[Allocation, ...]:
    start_at = run.start_at if run.start_at is not None else run.intent_at
    return tuple(
        Allocation(run.job_id, -1, part.node, part.gpus, part.cpus, part.mem_mib, start_at, can_requeue=False)
        for part in run.on_each_node
    )


def usage_with_run(
    usage: Mapping[tuple[str, str], Usage], job: Job, run: Run, layout: ClusterLayout, settings: Settings, now: float
) -> Usage | None:
    """Usage of the job's account and user including this run, which has just ended; None when it adds nothing.

    A suspended run is charged for the time it ran, or for its whole time if it kept GPUs meanwhile. A run
    whose work was lost to a preemption is not charged.
    """
    if not counts_for_usage(run):
        return None
    qos = settings.qos.get(job.spec.qos)
    factor = 1.0 if qos is None else qos.usage_factor
    if run.start_at is None or run.end_at is None or factor <= 0:
        return None
    if job.suspended_at is not None or job.suspended_by is not None:
        job = replace(job, suspended_at=None, suspended_by=None)
    held = allocations_of_run(job, run, settings.life.grace_s)
    found = [footprint(layout, booking) for one in held if (booking := layout.booking(job.uid, one)) is not None]
    if not found:
        return None
    mark = (job.spec.account, job.user)
    return charged(
        usage.get(mark),
        *mark,
        sum(found, NOTHING),
        held[0].start_at,
        run.end_at,
        now,
        settings.priority.half_life_s,
        factor,
    )
