"""Simulation of the future: plan, let the starts hold their resources, advance to the next end, plan again.

Nothing is guessed: a run of unknown length never ends here, measured load
counts for the first plan only, and a class with hidden jobs ends the simulation once its visible jobs are
used up. Ends close together are merged into the last of them, so that few plans reach far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

import msgspec

from gpusched.lifecycle.dependencies import Expression, Parent, Satisfied, Unsatisfied, evaluate
from gpusched.model.cluster import Allocation
from gpusched.model.job import Request
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Estimate, PendingJob, Plan, Prediction, PreemptMode, Snapshot, Usage
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import Value, replace
from gpusched.scheduler.events import RunChanged, SettingsChanged, UsageCharged, WindowsChanged
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.preemption import safe_until
from gpusched.scheduler.usage import charged

if TYPE_CHECKING:
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.runs import ActiveRun

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


class _Followers:
    """Jobs that become eligible after others, and the states of those that started or ended in the simulation."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._waiting = [one for one in arrivals if one.dependency is not None]
        self._parents = {number for one in self._waiting if one.dependency for number in one.dependency.job_ids}
        self._states: dict[int, Parent] = {}

    def started(self, job_id: int, now: float) -> None:
        if job_id in self._parents:
            self._states[job_id] = Parent(JobState.RUNNING, now)

    def ended(self, job_id: int, start_at: float, now: float) -> None:
        if job_id in self._parents:
            self._states[job_id] = Parent(JobState.COMPLETED, start_at, now)

    def following(self, changed: Iterable[int], now: float) -> Iterator[Arrival]:
        """Take those whose dependency on the start or end of these holds now, or from a known instant on."""
        ids = self._parents.intersection(changed)
        for one in list(self._waiting) if ids else ():
            if one.dependency is None or ids.isdisjoint(one.dependency.job_ids):
                continue

            def lookup(job_id: int, parents: Mapping[int, Parent] = one.parents) -> Parent | None:
                return self._states.get(job_id, parents.get(job_id))

            verdict = evaluate(one.dependency, lookup)
            if isinstance(verdict, Unsatisfied):
                continue
            self._waiting.remove(one)
            if isinstance(verdict, Satisfied):
                yield replace(one, at=max(one.at, verdict.at))


_ENDS, _ARRIVES, _MISSES_DEADLINE, _CHANGES = range(4)
"""What is due at an instant, in the order of events at the same one: the end of a run, an arrival, the last start of a
class that meets its deadline, or a change of what may start."""


class Future:
    """A planner that plays on: it starts, preempts and resumes jobs; they end, come back, arrive or miss deadlines."""

    def __init__(self, planner: Planner, now: float, length: Length, arrivals: Iterable[Arrival] = ()) -> None:
        """Args: planner: as of `now`, and used up by this."""
        self._planner, self._length = planner, length
        self._state = state = planner.state
        state.settle()
        self.now = self._began = now
        self.started: dict[int, float] = {}
        """First start of each job that has started so far."""
        self.spent = 0
        """What all plans so far count."""
        self._is_over = False
        self._instants: list[tuple[float, int, int]] = []
        """What is due, and for which job, or for which of `_classes`, as a heap."""
        self._ends: dict[int, float] = {}
        """Ends of running jobs that are known."""
        may_fill = any(one.when_spent == "filler" for one in state.budgets)
        self._may_change = bool(state.odd_runs) or not state.can_never_preempt or may_fill
        """Whether running jobs may be preempted, suspended or resumed."""
        self._origins: dict[int, tuple[ClassKey, float]] = {}
        """Class and arrival of running jobs that may come back."""
        self._preempted: dict[int, bool] = {}
        """Jobs being stopped to make room, and whether each is pending again then."""
        self._suspended: dict[int, _Suspended] = {}
        self._classes: list[ClassKey] = []
        self._last_calls: list[int] = []
        """Those that may only start in the next plan."""
        to_come = tuple(arrivals)
        self._followers = _Followers(to_come)
        self._arrivals = {one.job.id: one for one in to_come if one.dependency is None}
        for job_id, one in self._arrivals.items():
            heappush(self._instants, (one.at, _ARRIVES, job_id))
        for job_id, run in state.runs.items():
            self._find(job_id, run.allocations)
        for job_class in state.queue.classes:
            self._meet_deadline(job_class.key)
        edges = [at for window in state.windows for at in (window.start_at, window.end_at)]
        edges += [at for one in state.limits if (at := one.limit.until_at) is not None]
        edges += [at for one in state.budgets if (at := one.until_at) is not None]
        for at in edges:
            self._change_at(at)

    def play(self, wanted: Iterable[int], most: int) -> dict[int, float]:
        """Start of each of these jobs, as far as plans that count `most` since the beginning determine it."""
        wanted = tuple(wanted)
        self.play_on(wanted, most, inf)
        return {job_id: self.started[job_id] for job_id in wanted if job_id in self.started}

    def play_on(self, wanted: Iterable[int], most: int, plans: float) -> bool:
        """Make so many of these plans; return whether those were all."""
        left = set(wanted) - self.started.keys()
        while left and not self._is_over and self.spent < most:
            if plans <= 0:
                return False
            left.difference_update(self._step())
            plans -= 1
        return True

    def _step(self) -> list[int]:
        """Plan once and advance to the next instant at which something changes; return the jobs that started."""
        state, now = self._state, self.now
        _, begun, cycle = self._planner.play(now)
        if not self.spent and state.has_ceilings:
            # The measured load is no prediction.
            settings = replace(state.settings, ceiling=_no_ceiling(state.settings))
            state.apply(SettingsChanged(settings, state.extensions))
        is_whole, classes = cycle is not None and cycle.is_general, len(state.queue.classes)
        self.spent += min(SWIFTER, WHOLE_PLAN + classes // CLASSES) if is_whole else 1
        for (queued_at, job_id, job_class), run, _ in begun:
            variant = run.job_class or job_class
            lasts_s = self._length(job_id, variant.key.time_limit_s, 0.0)
            if lasts_s is not None:
                self._end_at(job_id, now + lasts_s)
            self.started.setdefault(job_id, now)
            self._followers.started(job_id, now)
            if self._may_change:
                self._origins[job_id] = job_class.key, queued_at
                self._change_at(safe_until(run.terms.qos, now, state.settings), job_id)
            if job_class.hidden and not job_class.jobs:
                self._is_over = True
        started = [entry[1] for entry, _, _ in begun]
        goes_on = cycle is not None and self._may_change and self._carry_out(cycle)
        goes_on |= self._let_follow(started)
        if self._last_calls:
            late, self._last_calls = self._last_calls, []
            goes_on |= self._drop(late)
        if not self._is_over and not goes_on and not self._move_on():
            self._is_over = True
        return started

    # --- running jobs -----------------------------------------------------------------------------

    def _find(self, job_id: int, pieces: tuple[Allocation, ...]) -> None:
        """Take in a job that runs at the beginning."""
        now, first = self.now, pieces[0]
        limit_at = first.expected_end_at
        if limit_at is not None and (first.is_stopping or limit_at <= now):
            end_at: float | None = max(now, limit_at)
        elif first.is_stopping:
            end_at = now
        else:
            lasts_s = self._length(
                job_id, None if limit_at is None else limit_at - first.start_at, now - first.start_at
            )
            end_at = None if lasts_s is None else max(now, first.start_at + lasts_s)
        if first.is_suspended:
            left_s = None if end_at is None else end_at - now
            self._suspended[job_id] = _Suspended(tuple(map(_awake, pieces)), now, left_s)
        elif end_at is not None:
            self._end_at(job_id, end_at)
        if self._may_change:
            self._change_at(safe_until(first.terms.qos, first.start_at, self._state.settings), job_id)

    def _end_at(self, job_id: int, at: float) -> None:
        if self._ends.get(job_id) != at:
            self._ends[job_id] = at
            heappush(self._instants, (at, _ENDS, job_id))

    def _end(self, job_id: int) -> None:
        """Let a run release everything."""
        state, run = self._state, self._state.runs[job_id]
        del self._ends[job_id]
        if self._may_change:
            # Reported, since the use of a user is computed anew from reports when one of their runs changes.
            if job_id not in self._preempted and (usage := self._usage_with(run)) is not None:
                state.apply(UsageCharged(usage))
            state.run_ended(job_id, is_charged=True)
        else:
            state.run_ended(job_id)
        origin = self._origins.pop(job_id, None)
        if self._preempted.pop(job_id, False) and origin is not None:
            key, queued_at = origin
            self._enqueue(replace(key, is_front=True), PendingJob(job_id, queued_at))
        else:
            self._followers.ended(job_id, run.running.start_at, self.now)

    def _usage_with(self, run: ActiveRun) -> Usage | None:
        """Use of ended runs of its user, this one included; None if it adds nothing."""
        settings, first = self._state.settings, run.first
        qos = settings.qos.get(first.terms.qos)
        factor = 1.0 if qos is None else qos.usage_factor
        if run.is_filler or factor <= 0:
            return None
        mark = first.terms.account, first.terms.user
        half_life_s = settings.priority.half_life_s
        times = first.start_at, self.now, self.now
        return charged(self._state.usage_of(mark), *mark, run.amount, *times, half_life_s, factor)

    def _carry_out(self, cycle: Cycle) -> bool:
        """Resume and preempt as planned; return whether to plan again at once, as that changes what is free."""
        # Not for jobs that were suspended at this very instant: they would be suspended again for ever.
        has_room = any(self._suspended[one.job_id].since_at < self.now for one in cycle.resumes)
        for resume in cycle.resumes:
            self._resume(resume.job_id)
        preemption = cycle.made_preemption
        for preempt in preemption.chosen.values() if preemption is not None else ():
            pieces = self._state.runs[preempt.job_id].allocations
            if preempt.mode == PreemptMode.SUSPEND:
                has_room = True
                self._suspend(preempt.job_id, pieces)
            else:
                self._stop(preempt.job_id, pieces, comes_back=preempt.mode == PreemptMode.REQUEUE)
        return has_room

    def _suspend(self, job_id: int, pieces: tuple[Allocation, ...]) -> None:
        end_at = self._ends.pop(job_id, None)
        self._suspended[job_id] = _Suspended(pieces, self.now, None if end_at is None else end_at - self.now)
        still = (
            replace(one, cpus=0.0, suspended_cpus=one.cpus, is_suspended=True, expected_end_at=None) for one in pieces
        )
        self._state.apply(RunChanged(tuple(still)))

    def _resume(self, job_id: int) -> None:
        one = self._suspended.pop(job_id)
        pieces = one.resumed(self.now)
        self._state.apply(RunChanged(pieces))
        self._change_at(safe_until(pieces[0].terms.qos, pieces[0].start_at, self._state.settings), job_id)
        if one.left_s is not None:
            self._end_at(job_id, self.now + one.left_s)

    def _stop(self, job_id: int, pieces: tuple[Allocation, ...], *, comes_back: bool) -> None:
        first = pieces[0]
        latest_at = self.now + first.grace_s + first.epilog_s
        self._end_at(job_id, min(self._ends.get(job_id, inf), latest_at))
        self._origins.setdefault(job_id, (class_key_of(pieces), first.start_at))
        self._preempted[job_id] = comes_back
        stopping = (replace(one, is_stopping=True, expected_end_at=latest_at) for one in pieces)
        self._state.apply(RunChanged(tuple(stopping)))

    # --- pending jobs -----------------------------------------------------------------------------

    def _enqueue(self, key: ClassKey, job: PendingJob) -> None:
        """Queue a job, unless it is too late for its deadline."""
        if _last_start_at(key) < self.now:
            return
        self._state.job_queued(self._state.class_of_key(key), job.queued_at, job.id)
        self._meet_deadline(key)

    def _let_follow(self, changed: Iterable[int]) -> bool:
        """Queue the jobs that depended on the start or end of these; return whether there were any."""
        has_any = False
        for one in self._followers.following(changed, self.now):
            if one.at > self.now:
                self._arrivals[one.job.id] = one
                heappush(self._instants, (one.at, _ARRIVES, one.job.id))
            else:
                has_any = True
                self._enqueue(one.key, one.job)
        return has_any

    def _meet_deadline(self, key: ClassKey) -> None:
        """Watch the last start of a class that meets its deadline."""
        if key.deadline_at is not None:
            heappush(self._instants, (_last_start_at(key), _MISSES_DEADLINE, len(self._classes)))
            self._classes.append(key)

    def _drop(self, classes: Iterable[int]) -> bool:
        """Let go of the jobs of these of `_classes`, which miss their deadline; return whether there were any."""
        state, has_any = self._state, False
        for number in classes:
            key = self._classes[number]
            found = state.queue.class_with(key)
            for _, job_id, _ in () if found is None else tuple(found.jobs):
                state.job_left(job_id)
                has_any = True
        return has_any

    # --- moving on --------------------------------------------------------------------------------

    def _change_at(self, at: float, job_id: int = 0) -> None:
        """Plan again at this instant, if it is still to come. Args: job_id: if this job runs then; 0: in any case."""
        if at > self.now:
            heappush(self._instants, (at, _CHANGES, job_id))

    def _move_on(self) -> bool:
        """Advance to the next instant at which something changes; False if there is none."""
        instants, due = self._instants, list[tuple[float, int, int]]()
        together = inf
        while instants and instants[0][0] <= together:
            at, kind, number = heappop(instants)
            if kind == _ENDS and self._ends.get(number) != at:
                # It was preempted or suspended since.
                continue
            if kind == _CHANGES and number and number not in self._state.runs:
                continue
            if not due:
                first = max(self.now, at)
                together = first + TOGETHER * (first - self._began)
            due.append((at, kind, number))
        if not due:
            return False
        self.now = now = max(self.now, due[-1][0])
        # Each once: a run that was suspended for no time at all has two ends at the same instant.
        over = dict.fromkeys(number for _, kind, number in due if kind == _ENDS)
        for job_id in over:
            self._end(job_id)
        self._let_follow(over)
        for number in [number for _, kind, number in due if kind == _ARRIVES]:
            one = self._arrivals.pop(number)
            self._enqueue(one.key, one.job)
        late = [(at, number) for at, kind, number in due if kind == _MISSES_DEADLINE]
        self._drop(number for at, number in late if at < now)
        self._last_calls = [number for at, number in late if at == now]
        if self._state.windows:
            self._state.apply(WindowsChanged(tuple(one for one in self._state.windows if one.end_at > now)))
        return True


@dataclass(frozen=True, slots=True)
class _Suspended:
    """A job that stands still."""

    pieces: tuple[Allocation, ...]
    """What it holds while it runs."""
    since_at: float
    left_s: float | None
    """Remaining run time, if known."""

    def resumed(self, now: float) -> tuple[Allocation, ...]:
        """What it holds from now on: the time that it stood still counts neither as use nor for its limit."""
        by_s = now - self.since_at
        return tuple(
            replace(
                one,
                start_at=one.start_at + by_s,
                expected_end_at=None if one.expected_end_at is None else one.expected_end_at + by_s,
                predicted_end_at=None if one.predicted_end_at is None else one.predicted_end_at + by_s,
                reported_end_at=None if one.reported_end_at is None else one.reported_end_at + by_s,
            )
            for one in self.pieces
        )


def _awake(held: Allocation) -> Allocation:
    """What a suspended run holds while it runs."""
    cpus = held.cpus + held.suspended_cpus
    terms = replace(held.terms, can_suspend=True)
    return replace(held, terms=terms, cpus=cpus, suspended_cpus=0.0, is_suspended=False)


def _last_start_at(key: ClassKey) -> float:
    """Latest start of jobs of this class that meets their deadline: later they are ended instead of started."""
    if key.deadline_at is None:
        return inf
    return key.deadline_at - min(variant.time_limit_s or 0 for variant in key.each_variant)


def _no_ceiling(settings: Settings) -> CeilingSettings:
    """Disable load ceilings after the present. The order `utilisation` brings its own if unset."""
    if settings.priority.order != "utilisation":
        return CeilingSettings()
    return CeilingSettings(cpu_fraction=inf, mem_fraction=inf, gpu_fraction=inf)


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


Predict = Callable[[int], Prediction | None]
"""Run time of a running or pending job, by id."""

MAX_CYCLES = 80
"""Maximum number of plans for each end of the range."""

MAX_VISITS = 6000
"""Budget of classes examined by all plans for one end of the range: the more classes, the fewer plans."""

SWIFTER = 20
"""How many incremental plans cost as much as a full one."""

WHOLE_PLAN = 5
"""How many incremental plans cost as much as one that examines every class, if there are few."""

CLASSES = 10
"""And that many further classes count as one more, up to `SWIFTER`."""

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
        self._snapshot, self._run_s, self._arrivals = snapshot, run_s, tuple(arrivals)
        self._seen = {job.id for waiting in snapshot.pending for job in waiting.jobs}
        self._seen.update(one.job.id for one in self._arrivals)
        self._reported_s = {
            held.job_id: held.reported_end_at - held.start_at
            for held in snapshot.allocations
            if held.reported_end_at is not None
        }
        self._knows_any = bool(self._reported_s) or _knows_any(snapshot, self._arrivals, run_s)
        self._planner = Planner.from_snapshot(snapshot, settings, extensions) if planner is None else planner
        self._latest: Future | None = None
        self._earliest: Future | None = None
        self._hopeless: set[int] = set()
        """Jobs blocked by measured load."""
        self._known: dict[int, StartRange] = {}
        """Answers as of `_spent`."""
        self._spent: tuple[int, ...] = ()

    def ranges(self, wanted: Collection[int], max_cycles: int = MAX_CYCLES) -> dict[int, StartRange]:
        """Start range of each wanted job; unknown for jobs neither in the snapshot nor among the arrivals."""
        most, futures = SWIFTER * _affordable(max_cycles, self._snapshot), self._futures()
        played = [future.play(wanted, most) for future in futures]
        spent = tuple(future.spent for future in futures)
        if spent != self._spent:
            self._spent, self._known = spent, {}
        known, latest, earliest = self._known, played[0], played[-1]
        for job_id in wanted:
            if job_id not in known:
                known[job_id] = self._range(job_id, latest, earliest)
        return {job_id: known[job_id] for job_id in wanted}

    def play_on(self, wanted: Collection[int], plans: int) -> bool:
        """Make so many of the plans that `ranges` of these jobs need; return whether those were all."""
        most = SWIFTER * _affordable(MAX_CYCLES, self._snapshot)
        return all(future.play_on(wanted, most, plans) for future in self._futures())

    def _futures(self) -> list[Future]:
        """What runs that use all of their limits lead to, then what runs of the usual length do, if any is known."""
        if self._latest is None:
            self._latest = self._begin()
        return [self._latest] if self._earliest is None else [self._latest, self._earliest]

    def _begin(self) -> Future:
        now, planner, arrivals = self._snapshot.now, self._planner, self._arrivals
        if planner.state.has_ceilings:
            self._hopeless = _blocked_by_load(self._snapshot, planner.fork().plan(now))
        if self._knows_any:
            self._earliest = Future(planner.fork(), now, _as_usual(self._run_s, self._reported_s), arrivals)
        return Future(planner.fork(), now, by_limit, arrivals)

    def _range(self, job_id: int, latest: Mapping[int, float], earliest: Mapping[int, float]) -> StartRange:
        if job_id not in self._seen or job_id in self._hopeless:
            return UNKNOWN
        high_at, low_at = latest.get(job_id), earliest.get(job_id)
        if high_at is not None:
            low_at = high_at if low_at is None else min(low_at, high_at)
        return StartRange(low_at, high_at)


def _affordable(max_cycles: int, snapshot: Snapshot) -> int:
    return max(1, min(max_cycles, MAX_VISITS // max(1, len(snapshot.pending))))


def _knows_any(snapshot: Snapshot, arrivals: Iterable[Arrival], run_s: Predict) -> bool:
    ids = [held.job_id for held in snapshot.allocations]
    ids += [job.id for waiting in snapshot.pending for job in waiting.jobs]
    ids += [one.job.id for one in arrivals]
    return any(run_s(job_id) is not None for job_id in ids)


def _as_usual(run_s: Predict, reported_s: Mapping[int, float]) -> Length:
    """Args: reported_s: lengths of running jobs by their own reports, which say nothing about later runs."""

    def length(job_id: int, limit_s: float | None, so_far_s: float) -> float | None:
        own_s = reported_s.get(job_id, 0.0)
        if 0 < so_far_s < own_s:
            return own_s if limit_s is None else min(own_s, limit_s)
        usual = run_s(job_id)
        if usual is None:
            return limit_s
        # A run that has outlived the median of similar jobs is compared with the long ones, then with its limit.
        found = next((long_s for long_s in (usual.median_s, usual.high_s) if long_s > so_far_s), limit_s)
        return found if limit_s is None or found is None else min(found, limit_s)

    return length


def _blocked_by_load(snapshot: Snapshot, plan: Plan) -> set[int]:
    """Jobs blocked by measured load: no time limit predicts when that ends."""
    return {
        job.id
        for waiting in snapshot.pending
        if (reason := plan.reasons.get(waiting.key)) is not None and reason.code is ReasonCode.LOAD_CEILING
        for job in waiting.jobs
    }


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
