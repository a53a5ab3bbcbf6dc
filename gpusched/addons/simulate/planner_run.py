"""The planner alone on the clock of a trace, with the daemon's settings; jobs run for as long as the trace says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

from gpusched.addons.simulate.event_loop import Progress, play
from gpusched.addons.simulate.outcome import Outcome, RunLog
from gpusched.addons.simulate.processors import ProcessorsPlanner, is_covered
from gpusched.addons.simulate.trace import CUT, TraceJob, request_of
from gpusched.errors import BrokenInvariant, UsageError
from gpusched.model.cluster import JobTerms, NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey
from gpusched.model.value import replace
from gpusched.predict.predictor import (
    METHODS,
    EndedRun,
    FamilyKeys,
    JudgedRun,
    Overruns,
    PredictionJudge,
    RunTimeGuess,
    RunTimes,
    at_least,
)
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.queue import JobClass
from gpusched.scheduler.state import PlannerState


def run(
    jobs: Sequence[TraceJob],
    nodes: Sequence[NodeView],
    settings: Settings,
    *,
    orders_by_run_time: bool = False,
    predict: str | None = None,
    keeps_places: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Schedule these jobs on these machines.

    Args:
        orders_by_run_time: give the policy each run time, as an exact prediction.
        predict: plan, and order where the order depends on it, with this one of `PREDICTIONS`, which learns from ended
            jobs.
        keeps_places: record where each job ran, for measures over time (`occupancy`) and plots.
    Raises: BrokenInvariant if jobs remain that can never start.
    """
    body = PlannerRun(
        jobs, nodes, settings, orders_by_run_time=orders_by_run_time, predict=predict, keeps_places=keeps_places
    )
    with _collecting_seldom():
        cycles = play([job.submit_s for job in jobs], body, progress)
    return body.outcome(cycles)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Look for cyclic garbage a tenth as often: planning makes hardly any, and looking takes 5 % of its time."""
    before = gc.get_threshold()
    gc.set_threshold(10_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class PlannerRun:
    """The planner as a body of `event_loop.play`; single use. Ids of jobs are their indices plus 1."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: Sequence[NodeView],
        settings: Settings,
        *,
        orders_by_run_time: bool = False,
        predict: str | None = None,
        keeps_places: bool = False,
    ) -> None:
        foresees_all = predict is not None and not has_limits(jobs)
        is_simple = not foresees_all and is_covered(jobs, nodes, settings)
        planner = ProcessorsPlanner(nodes, settings) if is_simple else Planner(PlannerState(nodes, settings))
        self.state = planner.state if isinstance(planner, Planner) else planner
        self._schedule = planner.schedule
        self.starts = [-1] * len(jobs)
        self._jobs = jobs
        self._runs = RunLog(self.state.layout.nodes, settings) if keeps_places else None
        self._ends: list[tuple[int, int]] = []
        """When each running job ends, with its id, as a heap."""
        self._now = 0
        keys = _Keys(self.state.layout.nodes, orders_by_run_time=orders_by_run_time)
        self._foresight = None if predict is None else Foresight(predict, jobs, self.state, keys.of)
        self._classes = [] if self._foresight else keys.classes(jobs, self.state)

    def next_at(self, arrives_at: float) -> float:
        """The next arrival, or an end that comes no later."""
        ends = self._ends
        return ends[0][0] if ends and ends[0][0] <= arrives_at else arrives_at

    def advance(self, now: float) -> None:
        """End the runs due now."""
        self._now = int(now)
        ends = self._ends
        if not ends or ends[0][0] > now:
            return
        while ends and ends[0][0] <= now:
            self.end(heappop(ends)[1])
        if self._foresight is not None:
            self._foresight.renew()

    def end(self, job_id: int) -> None:
        self.state.run_ended(job_id)
        if self._foresight is not None:
            self._foresight.ended(job_id - 1)

    def arrive(self, job: int) -> None:
        """Make a job pending."""
        job_class = self._classes[job] if self._foresight is None else self._foresight.arrived(job)
        self.state.job_queued(job_class, self._now, job + 1)

    def settle(self, now: float) -> None:
        """Plan, and start the planned jobs."""
        for start in self._schedule(now):
            number = start.job_id - 1
            self.starts[number] = self._now
            end_s = self._now + self._jobs[number].run_s
            heappush(self._ends, (end_s, start.job_id))
            if self._foresight is not None:
                self._foresight.started(number)
            if self._runs is not None:
                self._runs.add(number, self._now, end_s, start.placement)

    def outcome(self, cycles: int) -> Outcome:
        """The schedule. Raises: BrokenInvariant if jobs remain."""
        stuck = [job.id for job, start_s in zip(self._jobs, self.starts, strict=True) if start_s < 0]
        if stuck:
            raise BrokenInvariant(f"{len(stuck)} jobs never start on this cluster, the first being {stuck[0]}")
        return Outcome(self._jobs, self.starts, cycles, runs=self._runs)


class _Keys:
    """Policy keys of a trace's jobs. In a trace without users, queues take their place in fair share."""

    def __init__(self, nodes: Sequence[NodeView], *, orders_by_run_time: bool) -> None:
        self._nodes = nodes
        self._orders_by_run_time = orders_by_run_time
        self._users: dict[str, int] = {}

    def of(self, job: TraceJob) -> ClassKey:
        """Key of a job, equal for equal jobs."""
        terms = JobTerms(
            uid=1000 + self._users.setdefault(job.user, len(self._users)),
            user=job.user or job.queue,
            account=job.account,
            queue=job.queue or "default",
            request=request_of(job, self._nodes),
        )
        return ClassKey(
            terms,
            nice=0,
            time_limit_s=job.estimate_s,
            predicted_s=job.run_s if self._orders_by_run_time else None,
        )

    def classes(self, jobs: Sequence[TraceJob], state: PlannerState | ProcessorsPlanner) -> list[JobClass]:
        """Planner class of each job, computed once per key."""
        known: dict[object, JobClass] = {}
        found = []
        for job in jobs:
            mark = (*job.mark, job.estimate_s, job.run_s if self._orders_by_run_time else None)
            found_class = known.get(mark)
            if found_class is None:
                found_class = known[mark] = state.queue.own_class(self.of(job))
            found.append(found_class)
        return found


EXACT_PREDICTION = "exact"
"""Every run time is known exactly."""

OWN_PREDICTION = "own"
"""As the daemon: `mean` for jobs without a limit; for others `mixed` while it beats their user's limits, and at least
the length suggested by runs that were ended at their limits."""

NO_PREDICTION = "none"
"""None: jobs have their users' limits; run times of jobs without a limit are unknown."""

PREDICTIONS = (*METHODS, OWN_PREDICTION, NO_PREDICTION, EXACT_PREDICTION)


def check_prediction(name: str | None, order: str, *, orders_by_run_time: bool) -> None:
    """Check that an order can use this prediction; None: no prediction. Raises: UsageError if it cannot."""
    if name is not None and name not in PREDICTIONS:
        text = f"{name!r} is not a known prediction method: {', '.join(PREDICTIONS)}"
        raise UsageError(text, "--policy fcfs+sjbf --predict similar")
    if name in (None, NO_PREDICTION) and order == "spf" and not orders_by_run_time:
        raise UsageError("the order spf needs predictions, and none are requested", "--predict mixed")
    if name not in (None, NO_PREDICTION) and orders_by_run_time:
        text = f"sjf_exact knows every run time; it cannot be combined with the prediction {name}"
        raise UsageError(text, f"--policy spf+easy --predict {name}")


class _Group:
    """Jobs of one class before predictions, and their prediction."""

    __slots__ = ("guess", "job", "job_class", "kind", "limit_s", "marks", "user", "waiting")

    def __init__(self, job_class: JobClass, job: TraceJob, marks: tuple[Hashable, ...], limit_s: int | None) -> None:
        self.job_class = job_class
        self.job = job
        """One of them."""
        self.user = _whose(job)
        self.marks = marks
        """From those of very similar jobs to those of all users."""
        self.kind = self.user, job.name, job.procs, job.gpus
        """Its family, as far as a trace has it."""
        self.limit_s = limit_s
        self.guess: RunTimeGuess | None = None
        self.waiting = 0


def has_limits(jobs: Iterable[TraceJob]) -> bool:
    """Whether the estimates of these jobs are limits, and not their run times."""
    return any(job.estimate_s != job.run_s for job in jobs)


class Foresight:
    """Classes of a trace's jobs, updated with predictions as jobs end.

    Args: key_of: policy key of a job, without any prediction.
    """

    def __init__(
        self,
        name: str,
        jobs: Sequence[TraceJob],
        state: PlannerState | ProcessorsPlanner,
        key_of: Callable[[TraceJob], ClassKey],
    ) -> None:
        self._jobs = jobs
        self._state = state
        self._key_of = key_of
        self._past = RunTimes()
        self.has_limits = has_limits(jobs)
        own = "mixed" if self.has_limits else "mean"
        self._method = (
            None
            if name == EXACT_PREDICTION
            else _nothing
            if name == NO_PREDICTION
            else METHODS[own if name == OWN_PREDICTION else name]
        )
        self._judge = PredictionJudge() if name == OWN_PREDICTION and self.has_limits else None
        """Of whether guesses are gone by; None: they are."""
        self._overruns = Overruns()
        self._said_s: dict[int, int] = {}
        """What running jobs were guessed to run as they started, where that is judged."""
        self._known: dict[Hashable, _Group] = {}
        """By what makes jobs alike."""
        self._groups: list[_Group | None] = [None] * len(jobs)
        """Of each job that has arrived and has not ended."""
        self._waiting: dict[str, dict[_Group, None]] = {}
        """By user those with pending jobs."""
        self._changed: dict[str, None] = {}
        """Users who have seen a job end since the last look."""

    def _new_group(self, job: TraceJob) -> _Group:
        limit_s = job.estimate_s if self.has_limits else None
        job_class = self._state.queue.own_class(replace(self._key_of(job), time_limit_s=limit_s))
        user, size = _whose(job), (job.procs, job.gpus)
        marks: tuple[Hashable, ...]
        if self.has_limits:
            marks = (user, job.name, limit_s, size), (user, job.name, limit_s), (user,)
        else:
            marks = (user, job.name, size), (user, job.name), (size,), ()
        return _Group(job_class, job, marks, limit_s)

    def _group_of(self, number: int) -> _Group:
        group = self._groups[number]
        assert group is not None  # it has arrived
        return group

    def _guess(self, group: _Group) -> RunTimeGuess | None:
        """Predicted run time from ended jobs; None if not used."""
        if self._method is None:
            return RunTimeGuess(group.job.run_s, group.job.run_s)
        if self._judge is None or group.limit_s is None:
            return self._method(self._past, group.marks, group.limit_s)
        is_better = self._judge.is_better(group.user)
        guess = self._method(self._past, group.marks, group.limit_s) if is_better else None
        least_s = self._overruns.least_s(group.kind, group.user, group.limit_s)
        return at_least(guess, group.limit_s, least_s)

    def arrived(self, number: int) -> JobClass:
        """Class of an arriving job; its prediction also applies to the pending jobs of its group."""
        job = self._jobs[number]
        # Exact predictions apply to a single run time.
        lengths = job.estimate_s if self.has_limits else None, job.run_s if self._method is None else None
        mark = (*job.mark, job.name, *lengths)
        group = self._known.get(mark)
        if group is None:
            group = self._known[mark] = self._new_group(job)
        self._groups[number] = group
        self._think(group)
        if not group.waiting:
            self._waiting.setdefault(group.user, {})[group] = None
        group.waiting += 1
        return group.job_class

    def started(self, number: int) -> None:
        """Remove a job from the pending ones."""
        group = self._group_of(number)
        group.waiting -= 1
        if self._judge is not None and self._method is not None:
            said = self._method(self._past, group.marks, group.limit_s)
            self._said_s[number] = self._jobs[number].estimate_s if said is None else said.plan_s
        if not group.waiting:
            del self._waiting[group.user][group]

    def ended(self, number: int) -> None:
        """Record the run time of an ended job."""
        job, group = self._jobs[number], self._group_of(number)
        self._groups[number] = None
        marks = group.marks
        if self._judge is not None:
            self._judge.add(group.user, JudgedRun(self._said_s.pop(number), job.estimate_s, job.run_s))
            is_cut = job.outcome == CUT and job.run_s >= job.estimate_s
            if is_cut:
                # As in the daemon: jobs with the same limit take as long, others longer.
                marks = marks[:1]
            if not (is_cut and _goes_on(job)):
                self._overruns.learn(group.kind, group.user, EndedRun(job.run_s, job.estimate_s, is_cut))
        if self._method is not None:
            self._past.learn(marks, job.run_s)
            self._changed[group.user] = None

    def renew(self) -> None:
        """Update predictions of pending jobs of every user with a newly ended job."""
        for user in self._changed:
            for group in self._waiting.get(user, ()):
                self._think(group)
        self._changed.clear()

    def _think(self, group: _Group) -> None:
        guess = self._guess(group)
        if guess != group.guess:
            group.guess = guess
            known = (None, None) if guess is None else (guess.expected_s, guess.plan_s)
            self._state.predict(group.job_class, *known)


def _nothing(past: RunTimes, marks: FamilyKeys, limit_s: int | None) -> None:
    """A method without predictions."""


def _goes_on(job: TraceJob) -> bool:
    """Whether it asked for a requeue at its limit."""
    return job.spec is not None and "timeout" in job.spec.retry.retry_on


def _whose(job: TraceJob) -> str:
    return job.user or job.queue
