"""What a policy can know of run times while a trace is replayed: only of jobs that have ended by then.

Who waits is told anew when somebody like it has ended. Jobs of traces without estimates have no limit: what is known
of them is what was learned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from gpusched.errors import UsageError
from gpusched.model.snapshot import ClassKey, PendingJob
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


class Foresight:
    """The kinds of the jobs of a trace as they are predicted from one instant to the next.

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
        self._plain: dict[Hashable, ClassKey] = {}
        self._kinds: dict[tuple[Hashable, Guess | None], Kind] = {}
        self._waiting: dict[Hashable, dict[int, Guess | None]] = {}
        """By what makes jobs alike, and how long each was taken to run."""
        self._of_user: dict[Hashable, dict[Hashable, None]] = {}
        """Those of whom somebody waits."""
        self._changed: dict[Hashable, None] = {}
        """Users who have seen a job end since the last look."""

    def marks(self, job: TraceJob) -> tuple[Hashable, ...]:
        """From those of jobs very much like it to those of everybody's."""
        whose = job.user or job.queue
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
        """The kind of a job that arrives."""
        job = self._jobs[number]
        alike, guess = self._alike(job), self.guess(job)
        self._waiting.setdefault(alike, {})[number] = guess
        self._of_user.setdefault(self.marks(job)[-1], {})[alike] = None
        return self._kind(job, alike, guess)

    def started(self, number: int) -> None:
        """A job waits no longer."""
        job = self._jobs[number]
        alike = self._alike(job)
        waiting = self._waiting[alike]
        del waiting[number]
        if not waiting:
            del self._waiting[alike]
            del self._of_user[self.marks(job)[-1]][alike]

    def ended(self, number: int) -> None:
        """A job has ended, and everybody may know how long it ran."""
        job = self._jobs[number]
        if self._method is not None:
            self._past.learn(self.marks(job), job.run_s)
            self._changed[self.marks(job)[-1]] = None

    def renew(self) -> None:
        """Tell the policy what is to be thought now of those that wait."""
        for user in self._changed:
            for alike in self._of_user.get(user, ()):
                waiting = self._waiting[alike]
                job = self._jobs[next(iter(waiting))]
                guess = self.guess(job)
                late = [number for number, before in waiting.items() if before != guess]
                for number in late:
                    waiting[number] = guess
                    self._standing.left(number + 1)
                    kind = self._kind(job, alike, guess)
                    self._standing.arrived(kind, PendingJob(number + 1, self._jobs[number].submit_s))
        self._changed.clear()

    def _alike(self, job: TraceJob) -> Hashable:
        """What all have in common that are one class without predictions."""
        limit_s = job.estimate_s if self.has_limits else job.run_s if self._method is None else None
        return (limit_s, job.procs, job.gpus, job.user, job.queue, job.name, job.cpus, job.mem_mib, job.gpu_fraction)

    def _kind(self, job: TraceJob, alike: Hashable, guess: Guess | None) -> Kind:
        # An exact guess is of one job alone.
        mark = alike, guess
        kind = self._kinds.get(mark)
        if kind is None:
            plain = self._plain.get(alike)
            if plain is None:
                plain = self._plain[alike] = self._key_of(job)
            limit_s = job.estimate_s if self.has_limits else None
            known = (None, None) if guess is None else (guess.expected_s, guess.plan_s)
            key = replace(plain, time_limit_s=limit_s, predicted_s=known[0], plan_s=known[1])
            kind = self._kinds[mark] = self._standing.kind_of(key)
        return kind
