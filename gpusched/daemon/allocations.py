"""Resources that a run holds, as the scheduler sees them, and the usage that an ended run adds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from gpusched.daemon.state_settings import StateSettings
from gpusched.lifecycle.run_transitions import counts_for_usage
from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.job import Job, Request, Run
from gpusched.model.resources import NOTHING
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.events import RunHolds, RunReleased
from gpusched.scheduler.priority import terms_of
from gpusched.scheduler.usage import charged, footprint

_LAST_EPILOGS = 8
"""Runs from which the length of the next epilog is estimated."""
_MOST_EPILOGS = 256


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
    terms, request = terms_of(job), spec.request
    first, *others = run.on_each_node
    held = Allocation(
        job_id=run.job_id,
        # A suspended exclusive job would still keep others off its nodes.
        terms=replace(terms, can_suspend=False) if stands_still and terms.can_suspend else terms,
        node=first.node,
        gpus=first.gpus,
        cpus=0.0 if gave_way else first.cpus,
        mem_mib=first.mem_mib,
        start_at=start_at,
        expected_end_at=expected_end_at,
        resources=request.resources,
        licenses=request.licenses,
        is_exclusive=request.is_exclusive,
        is_stopping=stopping_at is not None,
        is_suspended=stands_still and gave_way,
        suspended_cpus=first.cpus if gave_way else 0.0,
        array_id=job.array_id,
        grace_s=grace_s,
        epilog_s=epilog_s,
        checkpoint_at=checkpoint_at,
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


def _gpus_only(held: Allocation, end_at: float) -> Allocation:
    """Allocation of an ended run: its GPUs, until they are proven clean; planned as free at once.

    It starts at the end of the run, since the time before is already counted as usage.
    """
    return Allocation(
        job_id=held.job_id,
        terms=replace(held.terms, request=Request()),
        node=held.node,
        gpus=held.gpus,
        cpus=0.0,
        mem_mib=0,
        start_at=end_at,
        expected_end_at=end_at,
        is_stopping=True,
        grace_s=0.0,
    )


def _bare(run: Run) -> tuple[Allocation, ...]:
    start_at = run.start_at if run.start_at is not None else run.intent_at
    terms = JobTerms(-1, can_requeue=False)
    return tuple(
        Allocation(run.job_id, terms, part.node, part.gpus, part.cpus, part.mem_mib, start_at)
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


class HeldResources:
    """What each open run holds on its nodes, and each ended one whose GPUs are not proven clean."""

    def __init__(self) -> None:
        self.by_key: dict[str, Allocation] = {}
        """By handle, on a gang's other nodes by handle and rank."""
        self._keys: dict[int, set[str]] = {}
        """Those handles by job: beside a new run an earlier one may still hold its GPUs."""
        self._changed: dict[int, None] = {}
        """Jobs whose changes the planner does not know yet."""
        self._stopping_at: dict[int, float] = {}
        """Since when the runs of jobs have been stopped."""
        self._epilogs_s: dict[tuple[int, str] | None, deque[float]] = {}
        """How long runs with epilogs took from their stop to their end, the last few of each owner's own epilog, and of
        those that have only the site's."""

    def note_stop(self, job: Job, now: float) -> None:
        """Note whether the run of a job is being stopped; the next `put` counts with it."""
        if job.state is JobState.COMPLETING or job.preempt_at is not None:
            self._stopping_at.setdefault(job.id, job.preempt_at or job.cancel_at or now)
        else:
            self.forget_stop(job.id)

    def forget_stop(self, job_id: int) -> None:
        self._stopping_at.pop(job_id, None)

    def put(
        self,
        job: Job | None,
        run: Run,
        rules: StateSettings,
        checkpoint_at: float | None,
        reported_at: float | None = None,
    ) -> None:
        """Take in what an open run holds now.

        Args: checkpoint_at: when it last saved its work; reported_at: when it ends by its own reports.
        """
        if run.native is not None:
            # Another scheduler has booked for it.
            return
        epilog_s = 0.0 if job is None else self._epilog_s(job, rules)
        stopping_at = self._stopping_at.get(run.job_id)
        held = allocations_of_run(job, run, rules.grace_s, stopping_at, checkpoint_at, epilog_s)
        guess = rules.guess_of(job)
        if guess is not None:
            lasts_s: float = guess.plan_s
            if rules.slowness is not None and (slowness := rules.slowness(run)) != 1.0:
                lasts_s *= slowness
                if job is not None and job.spec.time_limit_s is not None:
                    lasts_s = min(lasts_s, job.spec.time_limit_s)
            held = tuple(replace(one, predicted_end_at=one.start_at + lasts_s) for one in held)
        if reported_at is not None and stopping_at is None:
            held = tuple(replace(one, reported_end_at=reported_at) for one in held)
        self._set(run, held)

    def _epilog_s(self, job: Job, rules: StateSettings) -> float:
        """How long the epilogs of a run may take: the longest of the last ones, or their time limits."""
        longest_s = rules.longest_epilogs_s(job)
        known = self._epilogs_s.get(_epilog_of(job)) if longest_s else None
        return min(longest_s, max(known)) if known else longest_s

    def learn_epilogs(self, job: Job, end_at: float, rules: StateSettings) -> None:
        """Note that a run has ended. From its stop on it had its grace, too, so that the epilogs took no longer."""
        stopping_at = self._stopping_at.get(job.id)
        if stopping_at is not None and rules.longest_epilogs_s(job):
            known = self._epilogs_s.pop(_epilog_of(job), None) or deque(maxlen=_LAST_EPILOGS)
            known.append(max(0.0, end_at - stopping_at))
            self._epilogs_s[_epilog_of(job)] = known
            if len(self._epilogs_s) > _MOST_EPILOGS:
                del self._epilogs_s[next(iter(self._epilogs_s))]

    def keep_gpus(self, job: Job | None, run: Run, rules: StateSettings) -> None:
        """Free all that an ended run holds but its GPUs."""
        held = allocations_of_run(job, run, rules.grace_s)
        end_at = run.end_at if run.end_at is not None else held[0].start_at
        self._set(run, [_gpus_only(one, end_at) for one in held])

    def drop(self, run: Run) -> None:
        """Free all that a run holds."""
        for key in _keys(run):
            if self.by_key.pop(key, None) is not None:
                self._changed[run.job_id] = None
                self._keys[run.job_id].discard(key)
                if not self._keys[run.job_id]:
                    del self._keys[run.job_id]

    def take_events(self) -> Iterator[RunHolds | RunReleased]:
        """What jobs hold whose allocations have changed since the last call."""
        changed, self._changed = self._changed, {}
        for job_id in changed:
            keys = self._keys.get(job_id)
            if keys:
                yield RunHolds(tuple([self.by_key[key] for key in sorted(keys)]))
            else:
                yield RunReleased(job_id, is_charged=True)

    def _set(self, run: Run, held: Iterable[Allocation]) -> None:
        for key, one in zip(_keys(run), held, strict=True):
            if self.by_key.get(key) != one:
                self.by_key[key] = one
                self._keys.setdefault(run.job_id, set()).add(key)
                self._changed[run.job_id] = None


def _keys(run: Run) -> list[str]:
    """Keys of what a run holds on its nodes, by rank and in their order."""
    return [run.id, *(f"{run.id}@{rank:04}" for rank in range(1, len(run.parts)))]


def _epilog_of(job: Job) -> tuple[int, str] | None:
    path = job.spec.launch.epilog
    return None if path is None else (job.uid, path)
