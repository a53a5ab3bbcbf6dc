"""Forecasts from a frozen copy of the present: when jobs start, and what would help.

The daemon's thread takes the copy; another thread works out the answers, which takes a while. The copy
therefore consists of values only and shares no part of the daemon's memory, which a test checks by copying it.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from time import thread_time
from typing import TYPE_CHECKING, TypeVar

from gpusched.daemon.verbs.admission import check_submission, completed, handover_notes, sized, with_auto_limits
from gpusched.daemon.verbs.submit import existing
from gpusched.daemon.verbs.variants import with_variants
from gpusched.errors import Refused
from gpusched.lifecycle import arrays
from gpusched.lifecycle.dependencies import Never, Satisfied, evaluate, parse_dependency
from gpusched.lifecycle.transitions import new_job
from gpusched.model.commands import NEVER, Caller
from gpusched.model.job import Job, JobSpec
from gpusched.model.layout import LAYOUT_KEYS, rearranged
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Placement, Plan, Prediction, Snapshot
from gpusched.model.spec import DEFAULT, MAXIMUM
from gpusched.model.states import JobState
from gpusched.model.units import format_duration, gpu_list
from gpusched.model.value import replace
from gpusched.model.variants import variant_names
from gpusched.ports.daemon import Forecast, LimitHint
from gpusched.predict.family import LEAST_RUNS, predict_job
from gpusched.predict.limits import LimitAdvice, usual_span
from gpusched.scheduler.admission import Tally, longest_time_limit, why_refused
from gpusched.scheduler.cheap import put_off
from gpusched.scheduler.forecast import MAX_CYCLES, UNKNOWN, Arrival, StartForecast, StartRange
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.plugins import Extensions
from gpusched.scheduler.whatif import Alternative, SensibleLimit, alternatives, format_limit

if TYPE_CHECKING:
    from gpusched.daemon.commit import TickTransaction
    from gpusched.daemon.core import Scheduler
    from gpusched.daemon.state import DaemonState

SEEN_ARRIVALS = 500
_PLANS_AT_ONCE = 10
"""So many plans are made for starts before other questions get a turn."""
_Mark = TypeVar("_Mark")


@dataclass(frozen=True, slots=True)
class RunTimeForecast:
    """Predicted run times of jobs, by id; None for those with too little history, without a time limit with none."""

    jobs: Mapping[int, Job]
    invocations: Mapping[Hashable, tuple[float, ...]]
    """Run times by command line."""
    families: Mapping[Hashable, tuple[float, ...]]

    def __call__(self, job_id: int) -> Prediction | None:
        job = self.jobs.get(job_id)
        if job is None:
            return None
        # One run says more than nothing, and nothing else says when those behind it start.
        least = 1 if job.spec.time_limit_s is None else LEAST_RUNS
        return predict_job(job, self.invocations, self.families, least)


@dataclass(frozen=True, slots=True)
class JobNames:
    """User-visible ids of jobs: `42`, a task `42_7`."""

    arrays: tuple[Job, ...]
    """Ordered by id."""

    def __call__(self, job_id: int) -> str:
        at = bisect_right(self.arrays, job_id, key=lambda array: array.id)
        number = arrays.task_number(self.arrays[at - 1], job_id) if at else None
        return str(job_id) if number is None else f"{self.arrays[at - 1].id}_{number}"


@dataclass(slots=True)
class QueueForecast:
    """The present as forecasts see it: a copy, and what was worked out from it so far, for one thread at a time."""

    snapshot: Snapshot
    settings: Settings
    extensions: Extensions
    predict: RunTimeForecast
    arrivals: tuple[Arrival, ...]
    tally: Tally
    _loaded: Planner | None = field(default=None, init=False, repr=False, compare=False)
    _places: dict[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    """Places from 1, by job."""
    _starts: StartForecast | None = field(default=None, init=False, repr=False, compare=False)
    _keys: dict[int, ClassKey] | None = field(default=None, init=False, repr=False, compare=False)
    _cut: dict[ClassKey, tuple[float, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Arrival and id of the last job looked at of classes that have more."""
    _ids: frozenset[int] | None = field(default=None, init=False, repr=False, compare=False)
    """Jobs in the queue."""
    spent_s: float = field(default=0.0, init=False, repr=False, compare=False)
    """Processor time that `starts` has taken so far."""
    is_worked_out: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether `work_out` is over."""

    @classmethod
    def of(cls, scheduler: Scheduler, newcomer: Job | None = None) -> QueueForecast:
        """Copy the present of a scheduler, with one more job if given."""
        scheduler.history.load()
        now = scheduler.now()
        state = scheduler.state
        arrivals = [Arrival(at, state.key_of(job), _waits(job)) for at, job in state.timed_jobs(SEEN_ARRIVALS)]
        arrivals += [
            Arrival(job.eligible_at, state.key_of(job), _waits(job), dependency, parents)
            for job, dependency, parents in state.dependent_jobs(SEEN_ARRIVALS)
        ]
        snapshot = scheduler.snapshot_with_queue(now)
        if newcomer is not None and newcomer.eligible_at > now:
            arrivals.append(Arrival(newcomer.eligible_at, state.key_of(newcomer), _waits(newcomer)))
        elif newcomer is not None:
            snapshot = with_job(snapshot, state.key_of(newcomer), _waits(newcomer))
        names = JobNames(tuple(state.jobs[array_id] for array_id in state.arrays.ids))
        snapshot = replace(snapshot, name_of=names)
        tally = state.active.tally
        return cls(
            snapshot,
            scheduler.settings,
            scheduler.extensions.asked_once(),
            RunTimeForecast(_jobs_in(snapshot, arrivals, state.jobs, newcomer), *scheduler.history.run_times_s()),
            tuple(arrivals),
            Tally(dict(tally.by_queue), dict(tally.by_queue_user), dict(tally.by_qos_user)),
        )

    def starts(self, wanted: Collection[int], max_cycles: int = MAX_CYCLES) -> dict[int, StartRange]:
        before_s = thread_time()
        found = self._forecast().ranges(wanted, max_cycles)
        self.spent_s += thread_time() - before_s
        return found

    def work_out(self) -> bool:
        """Work out the starts of all jobs a little further, for later questions; return whether they are ready."""
        before_s = thread_time()
        try:
            is_over = self._forecast().play_on(self.ids, _PLANS_AT_ONCE)
        except BaseException:
            self.is_worked_out = True
            raise
        self.spent_s += thread_time() - before_s
        self.is_worked_out = is_over
        return is_over

    def _forecast(self) -> StartForecast:
        if self._starts is None:
            known = cache(self.predict)
            self._starts = StartForecast(
                self.snapshot, self.settings, known, self.arrivals, self.extensions, self._planner()
            )
        return self._starts

    def has_as_is(self, job: Job, number: int, key: ClassKey | None) -> bool:
        """Whether a pending job, planned under this id, was here already, in the class in which it is now.

        So does one that was only counted, behind those of its class that were looked at.
        """
        if key is None:
            return self.predict.jobs.get(number) is job
        if self._keys is None:
            self._keys = {one.id: waiting.key for waiting in self.snapshot.pending for one in waiting.jobs}
            self._cut = {
                waiting.key: (last.queued_at, last.id)
                for waiting in self.snapshot.pending
                if waiting.total > len(waiting.jobs) and (last := waiting.jobs[-1])
            }
        known = self._keys.get(number)
        if known is None:
            return key in self._cut and (job.queued_at, number) > self._cut[key]
        # Mostly the same object, and comparing classes takes long.
        return known is key or known == key

    def _planner(self) -> Planner:
        """Loaded with the snapshot; never changed, only forked."""
        if self._loaded is None:
            self._loaded = Planner.from_snapshot(self.snapshot, self.settings, self.extensions)
        return self._loaded

    def _in_order(self) -> dict[int, int]:
        if self._places is None:
            ordered = self._planner().in_order(self.snapshot.now)
            self._places = {job.id: place for place, (_, job) in enumerate(ordered, start=1)}
        return self._places

    def in_class(self, job_id: int, key: ClassKey) -> QueueForecast:
        """The same present with one pending job moved to another class."""
        pending, moved = [], None
        for waiting in self.snapshot.pending:
            rest = tuple(one for one in waiting.jobs if one.id != job_id)
            if len(rest) < len(waiting.jobs):
                (moved,) = (one for one in waiting.jobs if one.id == job_id)
                waiting = PendingClass(waiting.key, rest, waiting.total - 1)
            if rest:
                pending.append(waiting)
        if moved is None:
            return self
        return dataclasses.replace(self, snapshot=with_job(replace(self.snapshot, pending=tuple(pending)), key, moved))

    def waiting_ids(self, jobs: Iterable[Job]) -> dict[int, int]:
        """Each job's id in the snapshot, by its own id; for an array, the id of its next task."""
        seen, found = self.ids, {}
        for job in jobs:
            left = arrays.tasks_left(job) if job.is_array else None
            task = arrays.task_id(job, left.at(0)) if left else job.id
            found[job.id] = task if task in seen else job.id
        return found

    @property
    def ids(self) -> frozenset[int]:
        """Ids of the pending jobs that are eligible."""
        if self._ids is None:
            self._ids = frozenset(one.id for waiting in self.snapshot.pending for one in waiting.jobs)
        return self._ids

    @property
    def length(self) -> int:
        """Number of pending jobs that are eligible."""
        return sum(waiting.total for waiting in self.snapshot.pending)

    def place(self, job_id: int) -> tuple[int, int] | None:
        """Place of a job in the queue, and the queue's length; None when it is too far behind to tell."""
        place = self._in_order().get(job_id)
        return None if place is None else (place, self.length)

    def first(self, most: int) -> list[int]:
        """Ids of the jobs in the first places."""
        return list(islice(self._in_order(), most))

    def alternatives(self, job: Job, advice: LimitAdvice | None) -> tuple[Alternative, ...]:
        """Changes to a pending job that would let it start now.

        Args: advice: the time limit that similar jobs keep to, None when too few have ended.
        """
        if job.spec.variants:
            # What would help depends on the variant, and a change of one amount on all of them.
            return ()
        settings, tally = self.settings, _without(self.tally, job)

        def allowed(key: ClassKey) -> bool:
            return why_refused(_changed(job.spec, key), job.user, settings, tally) is None

        sensible = None if advice is None else SensibleLimit(advice.least_s, advice.limit_s, advice.known)
        number = self.waiting_ids([job])[job.id]
        found = alternatives(self.snapshot, settings, number, allowed, self.extensions, sensible, self._planner())
        return tuple(one for one in found if _has_this_effect(job.spec, one.change))


def _has_this_effect(spec: JobSpec, change: Mapping[str, object]) -> bool:
    """Whether a change of what each node books means the same for this job, which may count its cores by the task."""
    stated = LAYOUT_KEYS & change.keys()
    if spec.layout is None or not stated:
        return True
    try:
        found, _ = rearranged(spec.request, spec.layout, change)
    except ValueError:
        return False
    gpus = found.gpus or 0
    total = gpus * found.nodes if found.bundles is None else found.bundles["count"] * found.bundles["gpus"]
    effect = {"gpus": total, "gpus_per_node": gpus, "cpus": found.cpus, "mem_mib": found.mem_mib}
    effect["nodes"] = found.nodes
    if found.bundles is not None:
        effect["nodes_max"] = found.bundles["nodes_max"]
    return all(effect.get(name) == change[name] for name in stated)


def with_job(snapshot: Snapshot, key: ClassKey, newcomer: PendingJob) -> Snapshot:
    classes = {waiting.key: waiting for waiting in snapshot.pending}
    before = classes.get(key)
    # Behind a truncated front, its turn is beyond the reach of one plan anyway.
    jobs = (newcomer,) if before is None else (*before.jobs, newcomer)
    classes[key] = PendingClass(key, jobs, 1 if before is None else before.total + 1)
    ordered = sorted(classes.values(), key=lambda waiting: (waiting.jobs[0].queued_at, waiting.jobs[0].id))
    return replace(snapshot, pending=tuple(ordered))


def _waits(job: Job) -> PendingJob:
    return PendingJob(job.id, job.queued_at)


@dataclass(slots=True)
class StartsQuestion:
    """When pending jobs start, to be worked out on another thread."""

    told: QueueForecast
    class_of: Callable[[int], ClassKey | None]
    """Class of an eligible job now."""
    as_of: float | None = None
    """The instant that the answer is for; None: now."""
    ids: dict[int, int] = field(default_factory=dict)
    """The id under which each job is planned, by its own."""
    new: set[int] = field(default_factory=set)
    """Jobs submitted or changed since that instant, whose starts are not known yet."""

    def add(self, jobs: Collection[Job]) -> None:
        """Ask for more jobs."""
        found = self.told.waiting_ids(jobs)
        self.ids |= found
        if self.as_of is not None:
            has_as_is, class_of = self.told.has_as_is, self.class_of
            self.new.update([job.id for job in jobs if not has_as_is(job, found[job.id], class_of(job.id))])

    def look(self) -> dict[int, StartRange]:
        """Work it out; by the jobs' own ids."""
        new = self.new
        known = self.told.starts([number for job_id, number in self.ids.items() if job_id not in new])
        return {job_id: UNKNOWN if job_id in new else known[number] for job_id, number in self.ids.items()}


def _jobs_in(
    snapshot: Snapshot, arrivals: Iterable[Arrival], jobs: Mapping[int, Job], newcomer: Job | None
) -> dict[int, Job]:
    """Rows of all jobs in a forecast; tasks without a row get no prediction."""
    ids = [held.job_id for held in snapshot.allocations]
    ids += [one.id for waiting in snapshot.pending for one in waiting.jobs]
    ids += [arrival.job.id for arrival in arrivals]
    found = {job_id: jobs[job_id] for job_id in ids if job_id in jobs}
    return found if newcomer is None else {**found, newcomer.id: newcomer}


def _changed(spec: JobSpec, key: ClassKey) -> JobSpec:
    return replace(
        spec,
        request=key.terms.request,
        queue=key.terms.queue,
        time_limit_s=key.time_limit_s,
        reservation=key.terms.reservation,
    )


def _without(tally: Tally, job: Job) -> Tally:
    """Job counts without this job, which would be changed rather than added."""
    spec = job.spec
    return Tally(
        _less(tally.by_queue, spec.queue),
        _less(tally.by_queue_user, (spec.queue, job.user)),
        _less(tally.by_qos_user, (spec.qos, job.user)),
    )


def _less(counts: Mapping[_Mark, int], mark: _Mark) -> dict[_Mark, int]:
    return {**counts, mark: max(0, counts.get(mark, 0) - 1)}


def dry_run(spec: JobSpec, caller: Caller, scheduler: Scheduler, again: str = NEVER) -> Callable[[], Forecast]:
    """Question for another thread: what would submitting this do now? Changes nothing."""
    answer = _at_once(spec, caller, scheduler, again)
    return (lambda: answer) if isinstance(answer, Forecast) else answer


def _at_once(spec: JobSpec, caller: Caller, scheduler: Scheduler, again: str) -> Forecast | Callable[[], Forecast]:
    tx = scheduler.transaction(scheduler.now(), is_query=True)
    try:
        (spec,), left = with_variants([spec], caller, tx)
    except Refused as error:
        return Forecast("refused", error.message, "Refused", hint=error.hint or None, about=error.about or None)
    (spec,), said = with_auto_limits([spec], caller.user, tx)
    said = [*left, *said]
    spec = sized(completed(spec, caller, scheduler.settings), tx)
    answer = _of_completed(spec, caller, scheduler, again, tx)

    def with_limit(found: Forecast) -> Forecast:
        source, text = spec.limit_source, "; ".join(filter(None, said))
        if spec.launch.image is not None and found.verdict in ("starts_now", "waits") and not spec.is_for_slurm:
            found = replace(found, text=f"{found.text}; its image is pulled first")
        return replace(found, time_limit_s=spec.time_limit_s, time_limit_source=source, limit_text=text)

    return with_limit(answer) if isinstance(answer, Forecast) else lambda: with_limit(answer())


def _of_completed(
    spec: JobSpec, caller: Caller, scheduler: Scheduler, again: str, tx: TickTransaction
) -> Forecast | Callable[[], Forecast]:
    now = tx.now
    try:
        found = existing(spec, again, caller, tx)
        if found is not None:
            return Forecast("exists", f"job {found['ids'][0]} has this key already; nothing would be submitted")
        check_submission([spec], caller, tx)
    except Refused as error:
        about = error.about or None
        return Forecast("refused", error.message, "Refused", hint=error.hint or None, about=about)
    job = put_off(new_job(scheduler.state.next_id, caller, spec, now), tx.tariff, now)
    if spec.hold:
        return Forecast("waits", "held until it is released with gctl release", "JobHeldUser")
    if spec.dependency:
        expression = parse_dependency(spec.dependency)
        state = scheduler.state
        earlier = _earlier_namesake(state, caller.uid, spec.name) if expression.is_singleton else None
        verdict = evaluate(expression, state.lookup_parents(scheduler.store.jobs, expression), earlier)
        if isinstance(verdict, Never):
            text = f"could never start: {verdict.text}"
            return Forecast("waits", text, "DependencyNeverSatisfied")
        if not isinstance(verdict, Satisfied) or verdict.at > now:
            return Forecast("waits", verdict.text, "Dependency")
    if (why := scheduler.state.pauses.why(spec.queue) or scheduler.state.rules.why_infeasible(job)) is not None:
        return Forecast("waits", why.text, str(why.code))
    if spec.is_for_slurm:
        return Forecast("waits", "; ".join(handover_notes([spec], scheduler.handover)), "HandedOver")
    outlook = QueueForecast.of(scheduler, job)
    advice = scheduler.advise_limit(job.user, job.spec)
    key = scheduler.state.key_of(job)
    return lambda: _look(outlook, job, key, advice)


def _look(outlook: QueueForecast, job: Job, key: ClassKey, advice: LimitAdvice | None) -> Forecast:
    now = outlook.snapshot.now
    found = outlook.starts([job.id])[job.id]
    if job.eligible_at > now:
        text = f"begins in {format_duration(job.eligible_at - now)} at the earliest"
        reason = "BeginTime" if job.spec.start_when is None else "CheapEnergy"
        return Forecast("waits", text, reason, start_at=found.high_at, start_low_at=found.low_at)
    answer = _read(job.id, key, now, decide(outlook.snapshot, outlook.settings, outlook.extensions))
    if answer.verdict == "starts_now":
        return answer
    alternatives = outlook.alternatives(job, advice)
    return replace(answer, start_at=found.high_at, start_low_at=found.low_at, alternatives=alternatives)


def _place_text(place: Placement) -> str:
    cards = gpu_list(share.index for share in place.gpus)
    return place.node + (f", GPU {cards}" if cards else "")


def _read(job_id: int, key: ClassKey, now: float, plan: Plan) -> Forecast:
    for start in plan.starts:
        if start.job_id == job_id:
            place = start.placement
            text = f"would start now on {'; '.join(map(_place_text, (place, *place.others)))}"
            if key.variants:
                parts = [(one.terms.request, one.time_limit_s) for one in key.each_variant]
                text += f", with {variant_names(parts)[start.variant]}"
            return Forecast("starts_now", text, None, place.node, place.gpus, now, now)
    for reservation in plan.reservations:
        if reservation.job_id == job_id and reservation.start_at is not None:
            text = f"would wait about {format_duration(reservation.start_at - now)}"
            reason = plan.reasons.get(key)
            place = reservation.placement
            return Forecast(
                "waits",
                f"{text}: {reason.text}" if reason else text,
                str(reason.code) if reason else None,
                place.node,
                place.gpus,
                facts=reason.facts if reason else {},
            )
    reason = plan.reasons.get(key)
    if reason is None:
        return Forecast("waits", "would wait behind the jobs that start now", "Priority")
    return Forecast("waits", f"would wait: {reason.text}", str(reason.code), facts=reason.facts)


LEAST_GAIN_S = 600.0
"""Smallest gain in start time that a hint mentions."""
LEAST_PART = 0.1
"""Smallest gain that a hint mentions, as a part of the wait."""
CYCLES = 20
"""Plans per simulated future: few, since a user waits at the prompt."""


def limit_hint(job: Job, scheduler: Scheduler) -> Callable[[], LimitHint | None] | None:
    """Question for another thread: what would a time limit change? None if there is nothing to compare.

    Changes nothing.
    """
    spec, settings, history = job.spec, scheduler.settings, scheduler.history
    is_stated = spec.time_limit_source not in ("", DEFAULT, MAXIMUM) or (
        not spec.time_limit_source and spec.time_limit_s is not None
    )
    if is_stated or not settings.submit.limit_hint or not history.is_loaded:
        return None
    if job.state is not JobState.PENDING or scheduler.state.class_of(job.id) is None:
        return None
    advice, usual = history.limit_advice(job.user, spec), history.predict(job)
    if advice is None or usual is None or spec.variants:
        return None
    most_s = longest_time_limit(spec, settings)
    limit_s = advice.limit_s if most_s is None else min(most_s, advice.limit_s)
    if spec.time_limit_s is not None and limit_s >= spec.time_limit_s:
        return None
    key = scheduler.state.key_of(replace(job, spec=replace(spec, time_limit_s=limit_s, time_limit_source="")))
    outlook = QueueForecast.of(scheduler)

    def play() -> LimitHint | None:
        found = _starts(outlook, job, key)
        if found is None:
            return None
        words = usual_span(usual)
        return LimitHint(advice.runs, words, limit_s, format_limit(limit_s), *found, spec.time_limit_s)

    return play


def _starts(outlook: QueueForecast, job: Job, key: ClassKey) -> tuple[float, float | None] | None:
    """Start in this class and start as it is; None if the difference is not worth a hint."""
    now = outlook.snapshot.now
    number = outlook.waiting_ids([job])[job.id]
    without_at = outlook.starts([number], CYCLES)[number].low_at
    if without_at is not None and without_at - now < LEAST_GAIN_S:
        return None
    with_at = outlook.in_class(number, key).starts([number], CYCLES)[number].low_at
    if with_at is None:
        return None
    if without_at is not None and without_at - with_at < max(LEAST_GAIN_S, LEAST_PART * (without_at - now)):
        return None
    return with_at, without_at


def _earlier_namesake(state: DaemonState, uid: int, name: str) -> int | None:
    """First unfinished job of this owner and name, which `singleton` would wait for. Scans all jobs."""
    same = (job.id for job in state.jobs.values() if job.uid == uid and job.spec.name == name)
    return min(same, default=None)
