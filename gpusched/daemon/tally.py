"""How many jobs wait or run, by what the limits on their number look at; kept job by job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gpusched.model.job import JobSpec
from gpusched.scheduler.sharing.admission import Tally


class JobCounts:
    """Counters of active jobs. `tally` is a view of them and follows every change."""

    def __init__(self) -> None:
        self._queues: Counter[str] = Counter()
        self._queue_users: Counter[tuple[str, str]] = Counter()
        self._qos_users: Counter[tuple[str, str]] = Counter()
        self.tally = Tally(self._queues, self._queue_users, self._qos_users)

    def add(self, spec: JobSpec, user: str, jobs: int = 1) -> None:
        """So many more jobs of this kind; less with a negative number."""
        for counter, mark in (
            (self._queues, spec.queue),
            (self._queue_users, (spec.queue, user)),
            (self._qos_users, (spec.qos, user)),
        ):
            _add(counter, mark, jobs)

    @contextmanager
    def with_more(self, spec: JobSpec, user: str, jobs: int) -> Iterator[Tally]:
        """The tally as it would be with so many more (or less) of these, for a while."""
        self.add(spec, user, jobs)
        try:
            yield self.tally
        finally:
            self.add(spec, user, -jobs)


def _add(counter: Counter, mark: object, jobs: int) -> None:  # type: ignore[type-arg]
    counter[mark] += jobs
    if not counter[mark]:
        # Names come and go for months: what is not there takes no memory.
        del counter[mark]
