"""Open steps in the daemon's memory, by run, and the numbers of the next ones."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.model.job import run_id
from gpusched.model.step import JobStep


class OpenSteps:
    """Steps that have not ended: an ended one is only in the table. `closed`: runs that have been told to end."""

    def __init__(self) -> None:
        self._of_run: dict[str, dict[int, JobStep]] = {}
        self._next: dict[str, int] = {}
        self.closed: set[str] = set()

    def put(self, step: JobStep) -> None:
        """Take in a new or changed step; an ended one leaves the memory."""
        handle = run_id(step.job_id, step.run)
        if handle in self._next:
            self._next[handle] = max(self._next[handle], step.number + 1)
        if step.is_open:
            self._of_run.setdefault(handle, {})[step.number] = step
            return
        found = self._of_run.get(handle, {})
        found.pop(step.number, None)
        if not found:
            self._of_run.pop(handle, None)

    def of(self, handle: str) -> list[JobStep]:
        """Open steps of a run, by number."""
        found = self._of_run.get(handle, {})
        return [found[number] for number in sorted(found)]

    def all(self) -> dict[tuple[int, int, int], JobStep]:
        return {step.id: step for handle in self._of_run for step in self.of(handle)}

    def next_number(self, handle: str, read: Callable[[], int]) -> int:
        """Number of a run's next step; `read` asks the table, once."""
        if handle not in self._next:
            self._next[handle] = read()
        return self._next[handle]

    def forget(self, handle: str) -> None:
        """Drop what is kept of a run that has ended."""
        self._next.pop(handle, None)
        self.closed.discard(handle)
