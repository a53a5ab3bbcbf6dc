"""Simulation of the future: plan, let the starts hold their resources, advance to the next end, plan again.

Nothing is guessed: a run of unknown length never ends here, measured load
counts for the first plan only, and a class with hidden jobs ends the simulation once its visible jobs are
used up. Ends close together are merged into the last of them, so that few plans reach far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import inf

import msgspec

from gpusched.lifecycle.dependencies import Expression, Parent, Satisfied, Unsatisfied, evaluate
from gpusched.model.cluster import Allocation
from gpusched.model.job import Request
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import (
    ClassKey,
    Estimate,
    PendingClass,
    PendingJob,
    Plan,
    Prediction,
    Preempt,
    PreemptMode,
    Snapshot,
    Start,
)
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import Value, replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.runs import held_by
from gpusched.scheduler.usage import charged, footprint

TOGETHER = 0.01
"""Ends within this fraction of their distance from the present are merged."""

Length = Callable[[int, float | None, float], float | None]
"""Total seconds of a run, by job id, time limit (None without) and seconds that it has run so far.
None if unknown."""


def by_limit(job_id: int, limit_s: float | None, run_s: float) -> float | None:
    """Assume that every run uses all of its time limit."""
    return limit_s


class Arrival(Value):
    """A job that becomes eligible later: not before `at`, and not before its dependency holds."""

    at: float
    key: ClassKey
    job: PendingJob
    dependency: Expression | None = None
    """Runs that end in the simulation count as succeeded."""
    parents: Mapping[int, Parent] = msgspec.field(default_factory=dict)
    """Present state of the jobs that the dependency names."""


class _Arrivals:
    """Jobs that become eligible during a simulation, by time or after others, and the states that they follow."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        arrivals = tuple(arrivals)
        self._timed = sorted((one for one in arrivals if one.dependency is None), key=_latest_first)
        self._followers = [one for one in arrivals if one.dependency is not None]
        self._parents = {number for one in self._followers if one.dependency for number in one.dependency.job_ids}
        self._states: dict[int, Parent] = {}
        """Of the jobs that started or ended in the simulation."""

    @property
    def next_at(self) -> float | None:
        """When the next one becomes eligible by time."""
        return self._timed[-1].at if self._timed else None

    def due(self, now: float) -> Iterator[Arrival]:
        """Take those that are eligible by then."""
        while self._timed and self._timed[-1].at <= now:
            yield self._timed.pop()

    def started(self, job_id: int, now: float) -> None:
        self._states[job_id] = Parent(JobState.RUNNING, now)

    def ended(self, job_id: int, start_at: float, now: float) -> None:
        self._states[job_id] = Parent(JobState.COMPLETED, start_at, now)

    def following(self, changed: Iterable[int], now: float) -> list[Arrival]:
        """Take those that depended on the start or end of these and are eligible now."""
        ids = self._parents.intersection(changed)
        found: list[Arrival] = []
        for one in list(self._followers) if ids else ():
            if one.dependency is None or ids.isdisjoint(one.dependency.job_ids):
                continue

            def lookup(job_id: int, parents: Mapping[int, Parent] = one.parents) -> Parent | None:
                return self._states.get(job_id, parents.get(job_id))

            verdict = evaluate(one.dependency, lookup)
            if isinstance(verdict, Unsatisfied):
                continue
            self._followers.remove(one)
            if isinstance(verdict, Satisfied) and max(one.at, verdict.at) > now:
                later = replace(one, at=max(one.at, verdict.at))
                self._timed = sorted([*self._timed, later], key=_latest_first)
            elif isinstance(verdict, Satisfied):
                found.append(one)
        return found


@dataclass(slots=True)
class _Running:
    pieces: tuple[Allocation, ...]
    end_at: float | None
    key: ClassKey | None = None
    """Known for jobs that started in the simulation, and for those to be requeued."""
    queued_at: float = 0.0
    left_s: float | None = None
    """Remaining run time of a suspended job."""
    comes_back: bool = False
    """Whether it is preempted: at its end it is pending again."""


class Future:
    """State of the simulation. `now` is its clock; `first_plan` is the plan of the present.

    Nothing is guessed: a run of unknown length never ends here, measured load counts for the first plan only, and a
    class with hidden jobs ends the simulation once its visible jobs are used up. Ends close together are merged
    into the last of them, so that few plans reach far.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        settings: Settings,
        length: Length,
        arrivals: Iterable[Arrival] = (),
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        self.now = snapshot.now
        self.first_plan: Plan | None = None
        self._snapshot = snapshot
        self._settings = settings
        self._extensions = extensions
        self._layout = ClusterLayout(snapshot.nodes, settings)
        self._usage = {(one.account, one.user): one for one in snapshot.usage}
        self._length = length
        self._pending = {waiting.key: waiting for waiting in snapshot.pending if waiting.jobs}
        self._arrivals = _Arrivals(arrivals)
        ordered = sorted(snapshot.allocations, key=lambda held: held.job_id)
        self._running = {job_id: self._found(tuple(held)) for job_id, held in groupby(ordered, lambda one: one.job_id)}

    def play(self, wanted: Iterable[int], cycles: int) -> dict[int, float]:
        """Start of each of these jobs, as far as at most `cycles` plans determine it."""
        left = set(wanted)
        started: dict[int, float] = {}
        for _ in range(cycles):
            plan = decide(self._view(), self._settings, self._extensions)
            if self.first_plan is None:
                self.first_plan = plan
                self._settings = replace(self._settings, ceiling=_no_ceiling(self._settings))
            self._carry_out(plan)
            for start in plan.starts:
                if start.job_id in left:
                    left.discard(start.job_id)
                    started[start.job_id] = self.now
            if not left or any(not waiting.jobs for waiting in self._pending.values()):
                break
            followed = self._let_follow(start.job_id for start in plan.starts)
            if not followed and not _goes_on_at_once(plan) and not self._move_on():
                break
        return started

    # --- the snapshot of one instant --------------------------------------------------------------

    def _view(self) -> Snapshot:
        pending = sorted(self._pending.values(), key=lambda one: (one.jobs[0].queued_at, one.jobs[0].id))
        return replace(
            self._snapshot,
            now=self.now,
            allocations=tuple(piece for job_id in sorted(self._running) for piece in self._running[job_id].pieces),
            pending=tuple(pending),
            usage=tuple(self._usage[mark] for mark in sorted(self._usage)),
            windows=tuple(window for window in self._snapshot.windows if window.end_at > self.now),
        )

    def _found(self, pieces: tuple[Allocation, ...]) -> _Running:
        """A job that runs at the beginning of the simulation."""
        first = pieces[0]
        expected = first.expected_end_at
        if first.is_stopping:
            return _Running(pieces, self.now if expected is None else expected)
        limit_s = None if expected is None else expected - first.start_at
        if limit_s is not None and expected is not None and expected <= self.now:
            return _Running(pieces, self.now)
        run_s = self.now - first.start_at
        length = self._length(first.job_id, limit_s, run_s)
        end_at = None if length is None else max(self.now, first.start_at + length)
        if first.is_suspended:
            left_s = None if end_at is None else end_at - self.now
            return _Running(pieces, None, left_s=left_s)
        return _Running(pieces, end_at)

    # --- carrying out a plan ----------------------------------------------------------------------

    def _carry_out(self, plan: Plan) -> None:
        self._start(plan.starts)
        for preempt in plan.preempts:
            self._preempt(preempt)
        for resume in plan.resumes:
            run = self._running.get(resume.job_id)
            if run is not None and run.pieces[0].is_suspended:
                run.end_at = None if run.left_s is None else self.now + run.left_s
                run.pieces = tuple(
                    replace(piece, cpus=piece.cpus + piece.suspended_cpus, is_suspended=False, suspended_cpus=0.0)
                    for piece in run.pieces
                )

    def _start(self, starts: Iterable[Start]) -> None:
        places = {start.job_id: start for start in starts}
        if not places:
            return
        for key, waiting in list(self._pending.items()):
            begun = [job for job in waiting.jobs if job.id in places]
            if not begun:
                continue
            for job in begun:
                self._running[job.id] = self._begun(key, job, places[job.id])
                self._arrivals.started(job.id, self.now)
            rest = tuple(job for job in waiting.jobs if job.id not in places)
            total = waiting.total - len(begun)
            if total:
                self._pending[key] = PendingClass(key, rest, total)
            else:
                del self._pending[key]

    def _begun(self, key: ClassKey, job: PendingJob, start: Start) -> _Running:
        variant = key.each_variant[start.variant]
        length = self._length(job.id, variant.time_limit_s, 0.0)
        end_at = None if length is None else self.now + length
        limit_at = None if variant.time_limit_s is None else self.now + variant.time_limit_s
        grace_s = self._settings.life.grace_s
        held = (
            held_by(variant, job.id, piece, self.now, limit_at, grace_s)
            for piece in (start.placement, *start.placement.others)
        )
        pieces = tuple(replace(piece, is_filler=start.is_filler) for piece in held)
        return _Running(pieces, end_at, key, job.queued_at)

    def _preempt(self, preempt: Preempt) -> None:
        run = self._running.get(preempt.job_id)
        if run is None or run.pieces[0].is_suspended or run.pieces[0].is_stopping:
            return
        if preempt.mode == PreemptMode.SUSPEND:
            run.left_s = None if run.end_at is None else max(0.0, run.end_at - self.now)
            run.end_at = None
            run.pieces = tuple(
                replace(piece, cpus=0.0, suspended_cpus=piece.cpus, is_suspended=True, expected_end_at=None)
                for piece in run.pieces
            )
            return
        if run.key is None:
            run.key, run.queued_at = class_key_of(run.pieces), run.pieces[0].start_at
        end_at = self.now + run.pieces[0].grace_s + run.pieces[0].epilog_s
        run.comes_back = preempt.mode == PreemptMode.REQUEUE
        run.end_at = end_at if run.end_at is None else min(run.end_at, end_at)
        run.pieces = tuple(replace(piece, is_stopping=True, expected_end_at=run.end_at) for piece in run.pieces)

    # --- moving on --------------------------------------------------------------------------------

    def _move_on(self) -> bool:
        """Advance to the next instant at which something changes; False if there is none."""
        instants = [run.end_at for run in self._running.values() if run.end_at is not None]
        for window in self._snapshot.windows:
            instants.extend(at for at in (window.start_at, window.end_at) if at > self.now)
        if self._arrivals.next_at is not None:
            instants.append(self._arrivals.next_at)
        instants.extend(self._safe_until())
        if not instants:
            return False
        first = max(self.now, min(instants))
        together = first + TOGETHER * (first - self._snapshot.now)
        self.now = max(self.now, *(at for at in instants if at <= together))
        over = [job_id for job_id, run in self._running.items() if run.end_at is not None and run.end_at <= self.now]
        for job_id in over:
            run = self._running.pop(job_id)
            self._charge(run)
            if run.comes_back:
                self._queue_again(job_id, run)
            else:
                self._arrivals.ended(job_id, run.pieces[0].start_at, self.now)
        self._let_follow(over)
        for arrival in self._arrivals.due(self.now):
            self._enqueue(arrival.key, arrival.job)
        for key in [key for key in self._pending if _is_too_late(key, self.now)]:
            del self._pending[key]
        return True

    def _let_follow(self, changed: Iterable[int]) -> bool:
        """Queue the jobs that depended on the start or end of these; return whether there were any."""
        found = self._arrivals.following(changed, self.now)
        for one in found:
            self._enqueue(one.key, one.job)
        return bool(found)

    def _charge(self, run: _Running) -> None:
        """Charge the use of an ended run, or its user would seem to have used nothing."""
        for held in run.pieces:
            booking = self._layout.booking(held.terms.uid, held)
            if booking is None:
                continue
            qos = self._settings.qos.get(held.terms.qos)
            mark = (held.terms.account, held.terms.user)
            rate, half_life_s = footprint(self._layout, booking), self._settings.priority.half_life_s
            factor = 0.0 if held.is_filler else 1.0 if qos is None else qos.usage_factor
            self._usage[mark] = charged(
                self._usage.get(mark), *mark, rate, held.start_at, self.now, self.now, half_life_s, factor
            )

    def _safe_until(self) -> list[float]:
        """Ends of the protected time of runs that are too young to be preempted now."""
        settings = self._settings
        if settings.preempt.mode == "off" or not (settings.queue or settings.qos):
            return []
        ends = []
        for run in self._running.values():
            held = run.pieces[0]
            qos = settings.qos.get(held.terms.qos)
            safe_s = settings.preempt.min_run_s if qos is None or qos.min_run_s is None else qos.min_run_s
            ends.append(held.start_at + safe_s)
        return [at for at in ends if at > self.now]

    def _queue_again(self, job_id: int, run: _Running) -> None:
        if run.key is not None:
            self._enqueue(replace(run.key, is_front=True), PendingJob(job_id, run.queued_at))

    def _enqueue(self, key: ClassKey, job: PendingJob) -> None:
        waiting = self._pending.get(key)
        jobs = (job,) if waiting is None else (*waiting.jobs, job)
        total = 1 if waiting is None else waiting.total + 1
        self._pending[key] = PendingClass(key, tuple(sorted(jobs, key=lambda one: (one.queued_at, one.id))), total)


def _latest_first(arrival: Arrival) -> tuple[float, int]:
    return -arrival.at, -arrival.job.id


def _goes_on_at_once(plan: Plan) -> bool:
    """Whether to plan again at the same instant: jobs were suspended or resumed."""
    suspends = any(preempt.mode == PreemptMode.SUSPEND for preempt in plan.preempts)
    return suspends or bool(plan.resumes)


def _no_ceiling(settings: Settings) -> CeilingSettings:
    """Disable load ceilings after the present. The order `utilisation` brings its own if unset."""
    if settings.priority.order != "utilisation":
        return CeilingSettings()
    return CeilingSettings(cpu_fraction=inf, mem_fraction=inf, gpu_fraction=inf)


def _is_too_late(key: ClassKey, now: float) -> bool:
    """Whether jobs of this class can no longer meet their deadline: they are ended instead of started."""
    if key.deadline_at is None:
        return False
    return now + min(variant.time_limit_s or 0 for variant in key.each_variant) > key.deadline_at


# --- where nothing but starts and ends can happen ----------------------------------------------------


class IncrementalFuture:
    """The same simulation on one planner with incremental plans, continued as far as anyone asks.

    Past use accrues as time passes.
    """

    def __init__(self, planner: Planner, now: float, length: Length, arrivals: Iterable[Arrival] = ()) -> None:
        """Args: planner: loaded with the snapshot of `now`, and used up by this; see `is_incremental`."""
        self.started: dict[int, float] = {}
        """Start of each job that has started so far."""
        planner.state.settle()
        self._planner = planner
        self._began = self._now = now
        self._length = length
        self._arrivals = _Arrivals(arrivals)
        runs = sorted(planner.state.allocations(), key=lambda held: held.job_id)
        self._ends = [
            (end_at, held.job_id) for held in _firsts(runs) if (end_at := _end_at(held, length, now)) is not None
        ]
        heapify(self._ends)
        self._start_at = {held.job_id: held.start_at for held in runs}
        self._cycles = 0
        self._is_over = False

    def play(self, wanted: Iterable[int], cycles: int) -> dict[int, float]:
        """Start of each of these jobs, as far as `cycles` plans since the beginning determine it."""
        wanted = tuple(wanted)
        left = set(wanted) - self.started.keys()
        while left and not self._is_over and self._cycles < cycles:
            left.difference_update(self._step())
        return {job_id: self.started[job_id] for job_id in wanted if job_id in self.started}

    def _step(self) -> list[int]:
        """Plan once and advance to the next instant at which something changes; return the jobs that started."""
        planner, now, arrivals = self._planner, self._now, self._arrivals
        self._cycles += 1
        begun: list[int] = []
        for start in planner.schedule(now):
            job_class = planner.state.runs[start.job_id].job_class
            assert job_class is not None
            lasts_s = self._length(start.job_id, job_class.key.time_limit_s, 0.0)
            if lasts_s is not None:
                heappush(self._ends, (now + lasts_s, start.job_id))
            self.started[start.job_id] = self._start_at[start.job_id] = now
            arrivals.started(start.job_id, now)
            begun.append(start.job_id)
            if job_class.hidden and not job_class.jobs:
                self._is_over = True
        if not self._is_over and not self._let_follow(begun) and not self._move_on():
            self._is_over = True
        return begun

    def _let_follow(self, changed: Iterable[int]) -> bool:
        found = self._arrivals.following(changed, self._now)
        for one in found:
            self._planner.state.job_queued(self._planner.state.class_of_key(one.key), one.job.queued_at, one.job.id)
        return bool(found)

    def _move_on(self) -> bool:
        """Advance to the next end or arrival; False if there is none."""
        ends, arrivals, planner = self._ends, self._arrivals, self._planner
        instants = [at for at in (ends[0][0] if ends else None, arrivals.next_at) if at is not None]
        if not instants:
            return False
        now = max(self._now, min(instants))
        together = now + TOGETHER * (now - self._began)
        over: list[int] = []
        arrived: list[Arrival] = []
        while ends and ends[0][0] <= together:
            end_at, job_id = heappop(ends)
            now = max(now, end_at)
            over.append(job_id)
        for one in arrivals.due(together):
            now = max(now, one.at)
            arrived.append(one)
        self._now = now
        for job_id in over:
            planner.state.run_ended(job_id)
            arrivals.ended(job_id, self._start_at[job_id], now)
        self._let_follow(over)
        for one in (*arrived, *arrivals.due(now)):
            planner.state.job_queued(planner.state.class_of_key(one.key), one.job.queued_at, one.job.id)
        return True


def is_incremental(planner: Planner, arrivals: Iterable[Arrival] = ()) -> bool:
    """Whether `IncrementalFuture` covers this present: nothing else than starts, ends and arrivals can happen.

    Runs that are suspended or being stopped, windows of the calendar, deadlines, preemption, measured load and
    plug-ins are left to `Future`.
    """
    if planner.state.odd_runs or planner.state.windows or planner.state.extensions != NO_EXTENSIONS:
        return False
    if any(held.terms.reservation for held in planner.state.allocations()):
        return False
    # Jobs that miss their deadline are ended instead of started.
    keys = [*(one.key for one in planner.state.queue.classes), *(one.key for one in arrivals)]
    if any(key.deadline_at is not None for key in keys):
        return False
    return planner.state.can_never_preempt and not planner.state.has_ceilings


def _firsts(allocations: Iterable[Allocation]) -> Iterable[Allocation]:
    return {held.job_id: held for held in allocations}.values()


def _end_at(held: Allocation, length: Length, now: float) -> float | None:
    """End of a running job; None if unknown."""
    expected = held.expected_end_at
    if expected is not None and expected <= now:
        return now
    lasts_s = length(held.job_id, None if expected is None else expected - held.start_at, now - held.start_at)
    return None if lasts_s is None else max(now, held.start_at + lasts_s)


def class_key_of(pieces: Sequence[Allocation]) -> ClassKey:
    """Class of a running job, derived from its holdings on each of its nodes."""
    held = pieces[0]
    share = held.gpus[0] if held.gpus else None
    limit_s = None if held.expected_end_at is None else int(held.expected_end_at - held.start_at)
    request = Request(
        gpus=len(held.gpus),
        gpu_fraction=share.fraction if share else None,
        vram_mib=share.vram_mib if share and share.fraction is None else None,
        cpus=held.cpus,
        mem_mib=held.mem_mib,
        nodes=len(pieces),
        is_exclusive=held.is_exclusive,
        licenses=held.licenses,
        resources=held.resources,
    )
    return ClassKey(terms=replace(held.terms, request=request), nice=0, time_limit_s=limit_s, is_front=True)


def in_order(
    snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS
) -> Iterator[tuple[ClassKey, PendingJob]]:
    """Pending jobs of the snapshot, best first, up to the first class with hidden jobs that makes the order unknown."""
    return Planner.from_snapshot(snapshot, settings, extensions).in_order(snapshot.now)


def queue_position(
    snapshot: Snapshot, settings: Settings, job_id: int, extensions: Extensions = NO_EXTENSIONS
) -> tuple[int, int] | None:
    """Position of a job, from 1, and the length of the queue; None if it is not in the visible part."""
    for place, (_, job) in enumerate(in_order(snapshot, settings, extensions), start=1):
        if job.id == job_id:
            return place, sum(waiting.total for waiting in snapshot.pending)
    return None


def first_in_order(
    snapshot: Snapshot, settings: Settings, most: int, extensions: Extensions = NO_EXTENSIONS
) -> list[int]:
    """Ids of the first jobs in the queue, at most `most`."""
    ids: list[int] = []
    for _, job in in_order(snapshot, settings, extensions):
        if len(ids) == most:
            break
        ids.append(job.id)
    return ids


Predict = Callable[[int], Prediction | None]
"""Run time of a running or pending job, by id."""

MAX_CYCLES = 80
"""Maximum number of plans for each end of the range."""

MAX_VISITS = 6000
"""Budget of classes examined by all plans for one end of the range: the more classes, the fewer plans."""

SWIFTER = 20
"""How many incremental plans cost as much as a full one."""

MANY_CLASSES = 100
"""With more classes than this, those behind the last wanted job are left out of the simulation."""

SLACK_S = 60.0
"""Tolerance for a start to count as inside its range, since polling and cleaning of cards take time."""


@dataclass(frozen=True, slots=True)
class StartRange:
    """Earliest and latest expected start of a job. Unknown is None, never a guess."""

    low_at: float | None
    """If runs last as long as similar ones did, and those of unknown length use all of their time limit."""
    high_at: float | None
    """If every run uses all of its time limit; None if one without must end first, or beyond the simulated plans."""

    @property
    def is_unknown(self) -> bool:
        return self.low_at is None and self.high_at is None


UNKNOWN = StartRange(None, None)


class StartForecast:
    """When jobs start, as of one snapshot; each question continues the simulation where earlier ones stopped.

    The answers do not depend on what was asked before.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        settings: Settings,
        run_s: Predict,
        arrivals: Iterable[Arrival] = (),
        extensions: Extensions = NO_EXTENSIONS,
        planner: Planner | None = None,
    ) -> None:
        """Args: planner: loaded with the snapshot, and left as it is; None: not loaded yet."""
        self._snapshot, self._settings, self._run_s = snapshot, settings, run_s
        self._arrivals, self._extensions = tuple(arrivals), extensions
        self._seen = {job.id for waiting in snapshot.pending for job in waiting.jobs}
        self._seen.update(one.job.id for one in self._arrivals)
        self._knows_any = _knows_any(snapshot, self._arrivals, run_s)
        planner = Planner.from_snapshot(snapshot, settings, extensions) if planner is None else planner
        self._planner = planner if is_incremental(planner, self._arrivals) else None
        self._latest: IncrementalFuture | None = None
        self._earliest: IncrementalFuture | None = None
        self._promised: dict[int, float | None] = {}
        """Of jobs with a reservation in the plan of the present, its start."""

    def ranges(self, wanted: Collection[int], max_cycles: int = MAX_CYCLES) -> dict[int, StartRange]:
        """Start range of each wanted job; unknown for jobs neither in the snapshot nor among the arrivals."""
        if self._planner is None:
            return self._planned_anew(wanted, max_cycles)
        cycles = SWIFTER * _affordable(max_cycles, self._snapshot)
        if self._latest is None:
            self._begin(self._planner)
        assert self._latest is not None
        latest = earliest = self._latest.play(wanted, cycles)
        if self._earliest is not None:
            earliest = self._earliest.play(wanted, cycles)
        return {job_id: self._range(job_id, self._promised, latest, earliest) for job_id in wanted}

    def _begin(self, planner: Planner) -> None:
        snapshot, by_limits = self._snapshot, _by_limits(self._snapshot)
        if by_limits is snapshot:
            first = planner.fork()
        else:
            first = Planner.from_snapshot(by_limits, self._settings, self._extensions)
        self._promised = {one.job_id: one.start_at for one in first.plan(snapshot.now).reservations}
        self._latest = IncrementalFuture(first, snapshot.now, by_limit, self._arrivals)
        if self._knows_any:
            length = _as_usual(self._run_s)
            self._earliest = IncrementalFuture(planner.fork(), snapshot.now, length, self._arrivals)

    def _planned_anew(self, wanted: Collection[int], max_cycles: int) -> dict[int, StartRange]:
        """The ranges by `Future`, which plans each instant from a snapshot of its own."""
        settings, arrivals, extensions = self._settings, self._arrivals, self._extensions
        snapshot = _without_those_behind(self._snapshot, settings, wanted, extensions)
        cycles = _affordable(max_cycles, snapshot)
        future = Future(_by_limits(snapshot), settings, by_limit, arrivals, extensions)
        latest = earliest = future.play(wanted, cycles)
        plan = future.first_plan
        assert plan is not None
        promised = {one.job_id: one.start_at for one in plan.reservations}
        if self._knows_any:
            earliest = Future(snapshot, settings, _as_usual(self._run_s), arrivals, extensions).play(wanted, cycles)
        hopeless = _miss_their_deadline(snapshot, promised) | _blocked_by_load(snapshot, plan)
        return {
            job_id: UNKNOWN if job_id in hopeless else self._range(job_id, promised, latest, earliest)
            for job_id in wanted
        }

    def _range(
        self,
        job_id: int,
        promised: Mapping[int, float | None],
        latest: Mapping[int, float],
        earliest: Mapping[int, float],
    ) -> StartRange:
        if job_id not in self._seen:
            return UNKNOWN
        # Behind a run without a limit, only starts guaranteed by preemption are promised.
        high_at = promised.get(job_id)
        if high_at is None:
            high_at = latest.get(job_id)
        low_at = earliest.get(job_id)
        if high_at is not None:
            low_at = high_at if low_at is None else min(low_at, high_at)
        return StartRange(low_at, high_at)


def forecast_starts(
    snapshot: Snapshot,
    settings: Settings,
    run_s: Predict,
    wanted: Collection[int],
    max_cycles: int = MAX_CYCLES,
    arrivals: Iterable[Arrival] = (),
    extensions: Extensions = NO_EXTENSIONS,
) -> dict[int, StartRange]:
    """Start range of each wanted job, for a single question."""
    return StartForecast(snapshot, settings, run_s, arrivals, extensions).ranges(wanted, max_cycles)


def _affordable(max_cycles: int, snapshot: Snapshot) -> int:
    return max(1, min(max_cycles, MAX_VISITS // max(1, len(snapshot.pending))))


def _by_limits(snapshot: Snapshot) -> Snapshot:
    """The same snapshot, planned by time limits where there are any: a promise must not rest on a guess."""
    if not any(one.plan_s is not None for waiting in snapshot.pending for one in waiting.key.each_variant) and not any(
        held.predicted_end_at is not None and held.expected_end_at is not None for held in snapshot.allocations
    ):
        return snapshot
    allocations = tuple(
        held if held.expected_end_at is None else replace(held, predicted_end_at=None) for held in snapshot.allocations
    )
    classes: dict[ClassKey, PendingClass] = {}
    for waiting in snapshot.pending:
        key = _planned_by_limit(waiting.key)
        other = classes.get(key)
        jobs = waiting.jobs if other is None else (*other.jobs, *waiting.jobs)
        total = waiting.total if other is None else other.total + waiting.total
        classes[key] = PendingClass(key, tuple(sorted(jobs, key=lambda one: (one.queued_at, one.id))), total)
    return replace(snapshot, allocations=allocations, pending=tuple(classes.values()))


def _planned_by_limit(key: ClassKey) -> ClassKey:
    if key.variants:
        key = replace(key, variants=tuple(map(_planned_by_limit, key.variants)))
    return key if key.time_limit_s is None else replace(key, plan_s=None)


def _knows_any(snapshot: Snapshot, arrivals: Iterable[Arrival], run_s: Predict) -> bool:
    ids = [held.job_id for held in snapshot.allocations]
    ids += [job.id for waiting in snapshot.pending for job in waiting.jobs]
    ids += [one.job.id for one in arrivals]
    return any(run_s(job_id) is not None for job_id in ids)


def _as_usual(run_s: Predict) -> Length:
    def length(job_id: int, limit_s: float | None, so_far_s: float) -> float | None:
        usual = run_s(job_id)
        if usual is None:
            return limit_s
        # A run that has outlived the median of similar jobs is compared with the long ones, then with its limit.
        found = next((long_s for long_s in (usual.median_s, usual.high_s) if long_s > so_far_s), limit_s)
        return found if limit_s is None or found is None else min(found, limit_s)

    return length


def _miss_their_deadline(snapshot: Snapshot, promised: Mapping[int, float | None]) -> set[int]:
    """Jobs whose reservation is too late: their deadline ends them first, unless something ends early."""
    return {
        job.id
        for waiting in snapshot.pending
        if waiting.key.deadline_at is not None
        for job in waiting.jobs
        if (at := promised.get(job.id)) is not None and _is_too_late(waiting.key, at)
    }


def _blocked_by_load(snapshot: Snapshot, plan: Plan) -> set[int]:
    """Jobs blocked by measured load: no time limit predicts when that ends."""
    return {
        job.id
        for waiting in snapshot.pending
        if (reason := plan.reasons.get(waiting.key)) is not None and reason.code is ReasonCode.LOAD_CEILING
        for job in waiting.jobs
    }


def _without_those_behind(
    snapshot: Snapshot, settings: Settings, wanted: Collection[int], extensions: Extensions
) -> Snapshot:
    """Leave out the classes whose first job comes after every wanted one; they could only fill gaps."""
    if len(snapshot.pending) <= MANY_CLASSES:
        return snapshot
    left = set(wanted) & {job.id for waiting in snapshot.pending for job in waiting.jobs}
    kept = set()
    for key, job in in_order(snapshot, settings, extensions):
        if not left:
            break
        kept.add(key)
        left.discard(job.id)
    if left:
        return snapshot
    return replace(snapshot, pending=tuple(waiting for waiting in snapshot.pending if waiting.key in kept))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of the first estimates of jobs that have started."""

    count: int
    """Number of estimates with both ends whose jobs have started."""
    inside: float
    """Fraction of jobs that started inside their range, within a minute."""
    median_error_s: float
    """Median distance between the start and the early end of the range."""


def accuracy(estimates: Iterable[Estimate]) -> Accuracy | None:
    """Compare estimates with actual starts; None if there is nothing to compare."""
    inside = 0
    errors_s = []
    for one in estimates:
        if one.start_at is None or one.high_at is None:
            continue
        inside += one.low_at - SLACK_S <= one.start_at <= one.high_at + SLACK_S
        errors_s.append(abs(one.start_at - one.low_at))
    if not errors_s:
        return None
    errors_s.sort()
    return Accuracy(len(errors_s), inside / len(errors_s), errors_s[len(errors_s) // 2])
