"""What a policy can know of run times while a trace is replayed: only of jobs that have ended by then.

Who waits is told anew when somebody like it has ended. Jobs of traces without estimates have no limit: what is known
of them is what was learned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from gpusched.errors import UsageError
from gpusched.model.snapshot import ClassKey
from gpusched.policy.standing import Kind, Standing
from gpusched.predict.past import METHODS, Guess, Past
from gpusched.simulate.trace import TraceJob

EXACT = "exact"
"""Every job is known to run as long as it will."""

NAMES = (*METHODS, EXACT)


def check(name: str | None, order: str, *, orders_by_run_time: bool) -> None:
    """Whether an order can go by what is predicted in this way; None: by nothing. Raises: UsageError when not."""
    if name is not None and name not in NAMES:
        text = f"{name!r} is no way to predict that is known: {', '.join(NAMES)}"
        raise UsageError(text, "--policy fcfs+sjbf --predict similar")
    if name is None and order == "spf" and not orders_by_run_time:
        raise UsageError("the order spf goes by predictions, and none were asked for", "--predict mixed")
    if name is not None and orders_by_run_time:
        text = f"sjf_exact knows every run time, and {name} is a way to guess them"
        raise UsageError(text, f"--policy spf+easy --predict {name}")


class _Group:
    """Jobs that are one class without predictions, and what is thought of them."""

    __slots__ = ("guess", "kind", "waiting")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.guess: Guess | None = None
        self.waiting = 0


class Foresight:
    """The kinds of the jobs of a trace, and what is thought of them from one instant to the next.

    Args: key_of: what a job is to the policy, without any prediction.
    """

    def __init__(
        self, name: str, jobs: Sequence[TraceJob], standing: Standing, key_of: Callable[[TraceJob], ClassKey]
    ) -> None:
        self._jobs = jobs
        self._standing = standing
        self._key_of = key_of
        self._method = None if name == EXACT else METHODS[name]
        self._past = Past()
        self.has_limits = any(job.estimate_s != job.run_s for job in jobs)
        self._groups: dict[Hashable, _Group] = {}
        """By what makes jobs alike."""
        self._waiting: dict[str, dict[_Group, TraceJob]] = {}
        """Of each user those of whom somebody waits, with one of them."""
        self._changed: dict[str, None] = {}
        """Users who have seen a job end since the last look."""

    def marks(self, job: TraceJob) -> tuple[Hashable, ...]:
        """From those of jobs very much like it to those of everybody's."""
        whose = _whose(job)
        size = job.procs, job.gpus
        if self.has_limits:
            return (whose, job.name, job.estimate_s, size), (whose, job.name, job.estimate_s), (whose,)
        return (whose, job.name, size), (whose, job.name), (size,), ()

    def guess(self, job: TraceJob) -> Guess | None:
        """How long this one will run, judged by those that have ended."""
        if self._method is None:
            return Guess(job.run_s, job.run_s)
        return self._method(self._past, self.marks(job), job.estimate_s if self.has_limits else None)

    def arrived(self, number: int) -> Kind:
        """The kind of a job that arrives; by what it is guessed to run, all that wait with it are."""
        job = self._jobs[number]
        alike = self._alike(job)
        group = self._groups.get(alike)
        if group is None:
            key = replace(self._key_of(job), time_limit_s=job.estimate_s if self.has_limits else None)
            group = self._groups[alike] = _Group(self._standing.own_kind(key))
        self._think(group, self.guess(job))
        if not group.waiting:
            self._waiting.setdefault(_whose(job), {})[group] = job
        group.waiting += 1
        return group.kind

    def started(self, number: int) -> None:
        """A job waits no longer."""
        job = self._jobs[number]
        group = self._groups[self._alike(job)]
        group.waiting -= 1
        if not group.waiting:
            del self._waiting[_whose(job)][group]

    def ended(self, number: int) -> None:
        """A job has ended, and everybody may know how long it ran."""
        job = self._jobs[number]
        if self._method is not None:
            self._past.learn(self.marks(job), job.run_s)
            self._changed[_whose(job)] = None

    def renew(self) -> None:
        """Tell the policy what is to be thought now of those that wait, where a job of the same user has ended."""
        for whose in self._changed:
            for group, job in self._waiting.get(whose, {}).items():
                self._think(group, self.guess(job))
        self._changed.clear()

    def _think(self, group: _Group, guess: Guess | None) -> None:
        if guess != group.guess and guess is not None:
            group.guess = guess
            self._standing.foresee(group.kind, guess.expected_s, guess.plan_s)

    def _alike(self, job: TraceJob) -> Hashable:
        """What all have in common that are one class without predictions."""
        # An exact guess is of one run time alone.
        limit_s = job.estimate_s if self.has_limits else None
        run_s = job.run_s if self._method is None else None
        return (
            *(limit_s, run_s, job.procs, job.gpus, job.user, job.queue, job.name),
            *(job.cpus, job.mem_mib, job.gpu_fraction),
        )


def _whose(job: TraceJob) -> str:
    return job.user or job.queue
