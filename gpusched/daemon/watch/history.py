"""What past jobs say about future ones: run times, and the accuracy of predictions.

Read from the table on first use and kept up to date from then on. No run is ever ended because of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from math import inf

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.watches import Stage, Watch
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.leaning import LeaningReason, NodeLeaning
from gpusched.model.snapshot import Prediction, VramSeen
from gpusched.model.states import JobState, ReasonCode
from gpusched.ports import JobFilter, Store
from gpusched.predict.family import (
    NEWEST_PEAKS,
    SAMPLES,
    Family,
    Invocation,
    family,
    family_of,
    invocation_of,
    largest_peak,
    peak_vram_mib,
    predict_job,
    stated_limit_s,
)
from gpusched.predict.limits import LimitAdvice, advise
from gpusched.predict.nodes import NodeHistory, NodeRun
from gpusched.predict.predictor import (
    EndedRun,
    ExpectedRunTime,
    JudgedRun,
    Overruns,
    PredictionError,
    PredictionJudge,
    RunTimeGuess,
    RunTimes,
    at_least,
    by_all_alike,
    by_mean,
)
from gpusched.scheduler.priority import ranked_at

MOST_JOBS = 5000
"""Number of newest jobs from which the ended ones are read from the table."""
_CHUNK = 500
MOST_FAMILIES = 5000
AGED_EVERY_S = 3600.0
"""How often runs that speak for and against nodes grow older."""


_Past = tuple[Job, float, float, bool]


class History:
    """Run times in seconds by family, oldest first."""

    def __init__(self, store: Store, slowness: Callable[[Run], float] = lambda run: 1.0) -> None:
        """Args: slowness: how many times as long as at speed 1 a run took on its GPUs."""
        self._store = store
        self._slowness = slowness
        self.forget()

    def forget(self) -> None:
        """Forget all, and reread the past."""
        self._run_times_s: dict[Hashable, tuple[float, ...]] = {}
        self._peaks_mib: dict[Family, tuple[int, ...]] = {}
        """Peak VRAM per GPU of runs, by family, oldest first."""
        self._past = RunTimes()
        self._invocations = RunTimes()
        """By command line. Kept apart, since a sweep of many lines must not displace what is known of others' jobs."""
        self._judge = PredictionJudge()
        self._overruns = Overruns()
        self._nodes = NodeHistory()
        self._aged_at = 0.0
        """Instant from which the age of their runs counts."""
        self._said: dict[int, int] = {}
        """Guessed run times of running jobs with a time limit, as of their start."""
        self._learned: set[str] = set()
        """Runs learned in the current tick, which is repeated after a failed commit."""
        self._changed: dict[Family, None] = {}
        """Families with new runs since the last `take_changes`."""
        self._changed_invocations: dict[Invocation, None] = {}
        """Command lines with new runs since then."""
        self._turned: dict[str, None] = {}
        """Users whose limits have come into use, or gone out of use, since the last `take_changes`."""
        self._looked_at = -inf
        self._unread: range | None = None
        """Ids of past jobs not read yet; None before the first read."""

    def load(self) -> None:
        """Read the rest of the past."""
        while not self.load_some():
            pass

    @property
    def is_loaded(self) -> bool:
        return self._unread is not None and not self._unread

    def load_some(self) -> bool:
        """Read a part of the past, newest first, within some 10 ms; return whether it was the last one.

        Runs that end before their job is read come from the table too, but never twice: a run is either read or
        learned as it ends.
        """
        if self._unread is None:
            last = self._store.next_job_id()
            self._unread = range(max(1, last - MOST_JOBS), last)
        chunk, self._unread = self._unread[-_CHUNK:], self._unread[:-_CHUNK]
        if chunk:
            self._read(frozenset(chunk))
        return not self._unread

    def _read(self, ids: frozenset[int]) -> None:
        jobs = {job.id: job for job in self._store.jobs(JobFilter(ids=ids, states=_TELLING))}
        on_nodes: list[tuple[Family, NodeRun]] = []
        older: dict[Family, list[float]] = {}
        invocations: dict[Invocation, list[float]] = {}
        ended: list[_Past] = []
        peaks: dict[Family, list[int]] = {}
        for run in sorted(self._store.runs(jobs), key=lambda run: run.end_at or 0.0):
            job = jobs[run.job_id]
            slowness = self._slowness(run)
            on_nodes += [(family(job), one) for one in _on_nodes(job, run, slowness)]
            run_s = _run_s(run)
            if run_s is None:
                continue
            run_s /= slowness
            is_cut = _is_cut(run)
            ended.append((job, run_s, slowness, is_cut))
            if is_cut:
                continue
            older.setdefault(family(job), []).append(run_s)
            invocations.setdefault(invocation_of(job), []).append(run_s)
            if (peak_mib := peak_vram_mib(run)) is not None:
                peaks.setdefault(family(job), []).append(peak_mib)
        self._look_back(ended)
        self._nodes.learn_older(on_nodes)
        self._changed |= dict.fromkeys((*older, *(kind for kind, _ in on_nodes)))
        for kind, run_times_s in older.items():
            self._run_times_s[kind] = (*run_times_s, *self._run_times_s.get(kind, ()))[-SAMPLES:]
        for invocation, run_times_s in invocations.items():
            self._invocations.learn_older((invocation,), run_times_s)
        self._changed_invocations |= dict.fromkeys(invocations)
        for kind, peaks_mib in peaks.items():
            self._peaks_mib[kind] = (*peaks_mib, *self._peaks_mib.get(kind, ()))[-NEWEST_PEAKS:]

    def learn(self, job: Job, run: Run) -> None:
        """Take in an ended run, once; failed and stopped runs say nothing about run times.

        A run ended at its limit says how good the limit was, and that similar jobs may take longer.
        """
        if run.id in self._learned:
            return
        self._learned.add(run.id)
        said_s = self._said.pop(job.id, None)
        run_s = _run_s(run)
        if self._unread is None or job.id in self._unread:
            return
        slowness, kind = self._slowness(run), family(job)
        for one in _on_nodes(job, run, slowness):
            self._changed[kind] = None
            if self._nodes.learn(kind, one):
                self._turned[job.user] = None
        if run_s is None:
            return
        lasted_s, run_s = run_s, run_s / slowness
        limit_s = stated_limit_s(job)
        if limit_s is not None:
            if said_s is None:
                # The run started before this daemon.
                said_s = self._guess(job, limit_s).plan_s
            if self._judge.add(job.user, JudgedRun(said_s * slowness, limit_s, lasted_s)):
                self._turned[job.user] = None
        is_cut = _is_cut(run)
        self._changed[kind] = None
        self._past.learn(_marks(kind, job.spec.time_limit_s)[: _CUT if is_cut else None], run_s)
        if not (is_cut and _goes_on(job)):
            self._overruns.learn(kind, job.user, EndedRun(lasted_s, limit_s, is_cut))
        if is_cut:
            return
        invocation = invocation_of(job, kind)
        self._invocations.learn((invocation,), run_s)
        self._changed_invocations[invocation] = None
        before = self._run_times_s.pop(kind, ())
        self._run_times_s[kind] = (*before, run_s)[-SAMPLES:]
        if len(self._run_times_s) > MOST_FAMILIES:
            del self._run_times_s[next(iter(self._run_times_s))]
        if (peak_mib := peak_vram_mib(run)) is not None:
            self._peaks_mib[kind] = (*self._peaks_mib.pop(kind, ()), peak_mib)[-NEWEST_PEAKS:]
            if len(self._peaks_mib) > MOST_FAMILIES:
                del self._peaks_mib[next(iter(self._peaks_mib))]

    def recorded(self) -> None:
        """Note that the last learned ends are committed, so that none of them recurs."""
        self._learned.clear()

    def take_changes(self, as_of: float) -> tuple[Collection[Family], Collection[str], Collection[Invocation]]:
        """Since the last call: families with new runs, users whose limits are now used or no longer, command lines.

        Empty if called again for the same instant.
        """
        if as_of - self._aged_at >= AGED_EVERY_S:
            self._aged_at = as_of - as_of % AGED_EVERY_S
            self._changed |= dict.fromkeys(self._nodes.families())
        if not self._changed or as_of == self._looked_at:
            return (), (), ()
        found = self._changed, self._turned, self._changed_invocations
        self._changed, self._turned, self._changed_invocations, self._looked_at = {}, {}, {}, as_of
        return found

    def is_known_invocation(self, invocation: Invocation) -> bool:
        """Whether a job with this command line has completed."""
        return invocation in self._invocations

    def leaning(self, job: Job) -> NodeLeaning | None:
        """What earlier runs of its user say about nodes for a job; None: nothing."""
        return self._nodes.leaning(family(job), job.spec.request.near, self._aged_at)

    def leaning_reasons(self, job: Job) -> list[LeaningReason]:
        """The same as sentences, by node."""
        return self._nodes.reasons(family(job), job.spec.request.near, self._aged_at)

    def has_read(self, user: str, data: str) -> bool:
        """Whether a job of this user near this data set has lately completed."""
        return self._nodes.is_known_data(user, data, self._aged_at)

    def vram_seen(self, job: Job) -> VramSeen | None:
        """VRAM per GPU that similar jobs used; None when too few have ended."""
        return largest_peak(self._peaks_mib.get(family(job), ()))

    def began(self, job: Job) -> None:
        """Remember the guess for a job that starts, to judge it later."""
        limit_s = stated_limit_s(job)
        if limit_s is not None and self._unread is not None:
            self._said[job.id] = self._guess(job, limit_s).plan_s

    def limit_advice(self, user: str, spec: JobSpec) -> LimitAdvice | None:
        """The time limit that similar jobs of a user keep to; None when too few have ended."""
        return advise(self._overruns.ended(family_of(user, spec)))

    def guess(self, job: Job) -> RunTimeGuess | None:
        """Guess a job's run time; None if nothing is known, or if its user's limits have been more accurate.

        The expected time for ordering is at least what similar runs ended at their limits make likely. Without a
        stated limit, even other users' runs say more than nothing or a default, so that new users are not last in
        the queue for lack of history.
        """
        limit_s = job.spec.time_limit_s
        if stated_limit_s(job) is None:
            kind = family(job)
            invocation = invocation_of(job, kind)
            if invocation in self._invocations:
                guess = by_mean(self._invocations, (invocation,), limit_s)
            else:
                guess = by_mean(self._past, _marks(kind, limit_s), limit_s)
        else:
            assert limit_s is not None
            guess = self._guess(job, limit_s) if self._judge.is_better(job.user) else None
        if limit_s is None:
            return guess
        return at_least(guess, limit_s, self._overruns.least_s(family(job), job.user, limit_s))

    def expectation(self, job: Job) -> ExpectedRunTime:
        """Expected run time of a job, and the source of the expectation."""
        limit_s, guess = job.spec.time_limit_s, self.guess(job)
        if limit_s is None:
            return (
                ExpectedRunTime(None, "unknown") if guess is None else ExpectedRunTime(guess.expected_s, "prediction")
            )
        if guess is None:
            return ExpectedRunTime(limit_s, "limit")
        kind = family(job)
        if guess.expected_s == self._overruns.least_s(kind, job.user, limit_s):
            count = self._overruns.count(kind, job.user, limit_s)
            return ExpectedRunTime(guess.expected_s, "overruns", count)
        return ExpectedRunTime(guess.expected_s, "prediction")

    def measure(self, user: str | None = None) -> PredictionError:
        """Accuracy of guesses and limits for jobs of this user; None for all users."""
        return self._judge.measure(user)

    def _guess(self, job: Job, limit_s: int) -> RunTimeGuess:
        return by_all_alike(self._past, _marks(family(job), limit_s)[:_OWN], limit_s) or RunTimeGuess(limit_s, limit_s)

    def _look_back(self, ended: Sequence[_Past]) -> None:
        """Take in runs older than all known ones, oldest first; each is judged by its predecessors.

        Args: ended: job, run time (s) at speed 1 without suspensions, how many times as long it took, and whether it
        was ended at its limit.
        """
        past, said, overruns = RunTimes(), [], []
        for job, run_s, slowness, is_cut in ended:
            kind, limit_s = family(job), stated_limit_s(job)
            marks = _marks(kind, job.spec.time_limit_s)
            if limit_s is not None:
                guess = by_all_alike(past, marks[:_OWN], limit_s) or RunTimeGuess(limit_s, limit_s)
                said.append((job.user, JudgedRun(guess.plan_s * slowness, limit_s, run_s * slowness)))
            past.learn(marks[: _CUT if is_cut else None], run_s)
            if not (is_cut and _goes_on(job)):
                overruns.append((kind, job.user, EndedRun(run_s * slowness, limit_s, is_cut)))
        self._judge.add_older(said)
        self._overruns.learn_older(overruns)
        for mark in dict.fromkeys(mark for job, *_ in ended for mark in _marks(family(job), job.spec.time_limit_s)):
            for run_times_s in past.known((mark,)):
                self._past.learn_older((mark,), run_times_s)

    def run_times_s(self) -> tuple[Mapping[Hashable, tuple[float, ...]], Mapping[Hashable, tuple[float, ...]]]:
        """Copies of the run times by command line and by family, for predictions on another thread."""
        return dict(self._invocations.by_key()), dict(self._run_times_s)

    def predict(self, job: Job) -> Prediction | None:
        """Predicted run time of a job; None when too few similar ones have ended."""
        return predict_job(job, self._invocations.by_key(), self._run_times_s)


class RunTimeChanges(Watch):
    """Puts pending jobs in the order of what was learned of run times since the last look."""

    name = "run times"
    stage = Stage.BEFORE_COMMANDS

    def __init__(self, history: History) -> None:
        self._history = history

    def carry_out(self, tx: TickTransaction) -> None:
        tx.must_plan |= tx.state.rethink(*self._history.take_changes(ranked_at(tx.now, tx.settings)))


def _marks(kind: Family, limit_s: int | None) -> tuple[Hashable, ...]:
    """Groups of similar jobs, closest first: family and limit, family, user, same number of GPUs, all."""
    return (kind, limit_s), kind, kind.user, kind.gpus, ()


_OWN = 3
"""The first marks of `_marks` that cover one user; beside a limit they say more than other users' runs."""
_CUT = 1
"""The first marks of `_marks` that learn from a run ended at its limit: those with the same limit."""
_FAILURES = frozenset({JobState.FAILED, JobState.NODE_FAIL, JobState.OUT_OF_MEMORY})
"""Outcomes that may be the fault of a node."""
_TELLING = frozenset({JobState.COMPLETED, JobState.TIMEOUT, *_FAILURES})
"""States of jobs whose runs say something about run times or nodes."""


def _is_cut(run: Run) -> bool:
    return run.outcome is JobState.TIMEOUT and run.reason is ReasonCode.TIME_LIMIT


def _goes_on(job: Job) -> bool:
    """Whether the job asked to be requeued at its limit, as jobs that resume from a checkpoint do."""
    return "timeout" in job.spec.retry.retry_on


def _on_nodes(job: Job, run: Run, slowness: float) -> list[NodeRun]:
    """What an ended run says about its nodes. Which node of a gang has failed is not recorded, so only success counts.

    The ends that an administrator or another job caused say nothing.
    """
    if run.outcome is None or run.start_at is None or run.end_at is None:
        return []
    data = job.spec.request.near
    if run.outcome is JobState.COMPLETED:
        run_s = (_run_s(run) or 0.0) / slowness if len(run.nodes) == 1 else 0.0
        return [NodeRun(node, run.end_at, run_s, None, data) for node in run.nodes]
    if run.outcome not in _FAILURES or len(run.nodes) > 1:
        return []
    cause = run.outcome.value, run.exit_code, run.signal
    return [NodeRun(run.node, run.end_at, 0.0, cause)]


def _run_s(run: Run) -> float | None:
    """Run time without suspensions (s); None unless the run completed or was ended at its limit."""
    if not (run.outcome is JobState.COMPLETED or _is_cut(run)) or run.start_at is None or run.end_at is None:
        return None
    return max(0.0, run.end_at - run.start_at - run.suspended_s)
