"""How many jobs are in which state, by queue and by user, and why those wait that are in no line; kept job by job.

Nothing here looks at all jobs, however many wait. The tasks of an array that have no row count one by one.
"""

from __future__ import annotations

from collections import Counter

from gpusched.lifecycle.arrays import job_count
from gpusched.lifecycle.lifecycle import held_code
from gpusched.model.job import Job
from gpusched.model.states import JobState, ReasonCode


class Census:
    """Counters of active jobs, in step with the world."""

    def __init__(self) -> None:
        self.by_queue: Counter[tuple[JobState, str]] = Counter()
        self.by_user: Counter[tuple[JobState, str]] = Counter()
        self.held: Counter[ReasonCode] = Counter()
        """Pending jobs that somebody holds."""
        self.asleep: Counter[ReasonCode] = Counter()
        """Pending jobs that wait for an instant, or for what cannot come true."""
        self._asleep: dict[int, tuple[ReasonCode, int]] = {}

    @property
    def pending(self) -> int:
        """How many jobs wait."""
        return sum(jobs for (state, _), jobs in self.by_queue.items() if state is JobState.PENDING)

    def replace(self, before: Job | None, after: Job | None) -> None:
        """A row has changed, come or gone."""
        if before is not None:
            self._add(before, -job_count(before))
        if after is not None:
            self._add(after, job_count(after))

    def _add(self, job: Job, jobs: int) -> None:
        if job.state.is_final or not jobs:
            return
        _count(self.by_queue, (job.state, job.spec.queue), jobs)
        _count(self.by_user, (job.state, job.user), jobs)
        if job.state is JobState.PENDING and job.hold is not None:
            _count(self.held, held_code(job), jobs)

    def sleep(self, job: Job, why: ReasonCode) -> None:
        """A pending job that nobody holds is in no line because of this."""
        self.wake(job.id)
        self._asleep[job.id] = why, job_count(job)
        _count(self.asleep, why, job_count(job))

    def wake(self, job_id: int) -> None:
        """Forget why a job was in no line."""
        known = self._asleep.pop(job_id, None)
        if known is not None:
            _count(self.asleep, known[0], -known[1])


def _count(counter: Counter, mark: object, jobs: int) -> None:  # type: ignore[type-arg]
    counter[mark] += jobs
    if not counter[mark]:
        del counter[mark]
