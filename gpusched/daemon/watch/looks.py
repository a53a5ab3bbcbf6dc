"""Looks that may take long, on another thread: one at a time, its result taken in on the loop's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gpusched.daemon.failures import StepFailures

T = TypeVar("T")


class BackgroundLook(Generic[T]):
    """A look that is repeated: whether one is due, and the one that is being taken."""

    def __init__(self, step: str, failures: StepFailures, pause_s: float = 0.0) -> None:
        """Args: step: its name, for people; failures: where those that raise are counted and shown; pause_s: how long
        none is due after one."""
        self.is_open = False
        self._step = step
        self._failures = failures
        self._pause_s = pause_s
        self._next_at = 0.0
        """On the clock of the loop."""

    def is_due(self) -> bool:
        """Whether none is being taken, and the last one is long enough ago."""
        return not self.is_open and asyncio.get_running_loop().time() >= self._next_at

    def rest(self, seconds: float) -> None:
        """Let none be due for so long from now on."""
        self._next_at = asyncio.get_running_loop().time() + seconds

    def begin(self, take: Callable[[T], None], look: Callable[..., T], *arguments: Any) -> None:
        """Call `look` on another thread and `take` with its result; if either raises, that counts as one failure."""

        def done(looked: asyncio.Future[T]) -> None:
            self.is_open = False
            if self._pause_s:
                self.rest(self._pause_s)
            if not looked.cancelled():
                self._failures.run(self._step, lambda: take(looked.result()))

        # Set only then: an exception in here must not keep later polls from looking.
        asyncio.get_running_loop().run_in_executor(None, look, *arguments).add_done_callback(done)
        self.is_open = True
