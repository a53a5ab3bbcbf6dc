"""The future of one call: one of concurrent.futures, which knows its job."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Submitter(Protocol):
    """Who knows what became of the jobs of the calls."""

    def cancel(self, futures: Sequence[CallFuture[Any]]) -> bool:
        """Take back those that have not started; whether there was one."""

    def has_started(self, future: CallFuture[Any]) -> bool:
        """Whether its job runs, as far as the scheduler knows."""


class CallFuture(Future[T]):
    """What a call will return. `as_completed` and `wait` of concurrent.futures take it like any other."""

    def __init__(self, dispatch: Submitter, number: int, name: str) -> None:
        super().__init__()
        self.number = number
        """Of the call, within its executor."""
        self.name = name
        self.job_id: str | None = None
        """Its job, once that is submitted, which is a moment after the call."""
        self.is_being_cancelled = False
        """It was asked for, and not refused so far."""
        self.is_given_up = False
        """Its job is being cancelled because no call of the executor can be made."""
        self._dispatch = dispatch

    def cancel(self) -> bool:
        """Take the call back if its job has not started; False when it has, or is over."""
        if self.done():
            return self.cancelled()
        return self._dispatch.cancel([self])

    def running(self) -> bool:
        """Whether the job runs now. Asks the scheduler: nobody keeps count of it otherwise."""
        if not super().running() and not self.done() and self._dispatch.has_started(self):
            with self._condition:
                if self._state == "PENDING":
                    self._state = "RUNNING"
        return super().running()

    def take_back(self) -> bool:
        """Be cancelled, without a word to anybody but those in `result`; False when it is over already.

        The job is not asked, and that it ran before it was put back into the queue does not matter. Whoever gets True
        must call `tell_cancelled`.
        """
        with self._condition:
            if self.done():
                return False
            self._state = "CANCELLED"
            self._condition.notify_all()
            return True

    def tell_cancelled(self) -> None:
        """Call the callbacks, here, and tell those who wait for one of many."""
        self._invoke_callbacks()  # type: ignore[attr-defined]  # `Future.cancel` does this where there is no job
        self.set_running_or_notify_cancel()
