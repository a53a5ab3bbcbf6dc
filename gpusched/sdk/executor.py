"""An executor like those of concurrent.futures, whose calls are jobs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gpusched.errors import GpuschedError, UsageError
from gpusched.sdk import call as call_module
from gpusched.sdk.client import Client
from gpusched.sdk.dispatch import Dispatch
from gpusched.sdk.options import spec_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpusched.sdk.future import CallFuture
    from gpusched.sdk.options import JobOptions

P = ParamSpec("P")
T = TypeVar("T")


_OWN = ("client", "max_workers", "initializer", "initargs", "python")


class Executor(concurrent.futures.Executor):
    """Runs calls as jobs of the scheduler, each with the resources that are named here.

    A call and its result travel by pickle, in files for the owner alone; what a call raises is raised by
    `result()`, with the traceback of the job as its cause. A job that is killed raises JobFailed.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        python: str = sys.executable,
        **options: Unpack[JobOptions],
    ) -> None:
        """Set up an executor; nothing is submitted yet.

        Args:
            client: that of another part of the program; by default one of its own.
            max_workers: most jobs that wait or run at once; by default all calls are jobs at once.
            initializer: called as `initializer(*initargs)` in each job before its call. When it raises, that call,
                those that have not started and all later ones raise BrokenExecutor.
            python: the interpreter of the jobs.
            options: of every job, see JobOptions.
        """
        if max_workers is not None and max_workers < 1:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if "key" in options:
            raise UsageError("a key stands for one job, not for the calls of an executor", "leave key= out")
        if options.get("snapshot"):
            raise UsageError("calls find their code by this program's import path", "leave snapshot= out")
        command = [python, os.path.abspath(call_module.__file__)]
        own = client is None
        spec = spec_of(options, "Executor", _OWN)
        self._dispatch = Dispatch(client or Client(), spec, command, max_workers, own)
        if initializer is not None:
            try:
                self._dispatch.folder.write_initializer(initializer, initargs)
            except BaseException:
                # What cannot be pickled: nobody will shut this one down.
                self._dispatch.close(False, False)
                raise
        # An executor that nobody refers to takes no more calls; those that it has go on.
        weakref.finalize(self, self._dispatch.close, False, False)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Have a job call `fn(*args, **kwargs)`. Raises: RuntimeError after shutdown."""
        return self._dispatch.add(fn, args, kwargs)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Results of `fn` over the iterables, in order; everything is submitted at once.

        Args:
            timeout: of the whole iteration, in seconds from now. Raises: TimeoutError.
            chunksize: so many calls make one job: starting a job costs more than a small call.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        deadline = None if timeout is None else time.monotonic() + timeout
        calls = zip(*iterables)  # noqa: B905  the shortest one ends it, as in the standard library
        if chunksize == 1:
            return _results(self._dispatch, [self._dispatch.add(fn, args, {}) for args in calls], deadline)
        chunks = iter(lambda: list(itertools.islice(calls, chunksize)), [])
        futures = [self._dispatch.add(fn, chunk, None) for chunk in chunks]
        return itertools.chain.from_iterable(_results(self._dispatch, futures, deadline))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all calls; after Ctrl-C only for those whose jobs run, the others are cancelled."""
        self.shutdown(cancel_futures=isinstance(error, KeyboardInterrupt))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        Args:
            wait: return when all calls are over; else at once, and they go on.
            cancel_futures: cancel the calls whose jobs have not started.
        """
        self._dispatch.close(wait, cancel_futures)


def _results(dispatch: Dispatch, futures: list[CallFuture[Any]], deadline: float | None) -> Iterator[Any]:
    """Each result in order; whoever stops before the last has the others cancelled, with one request for all."""
    futures.reverse()
    try:
        while futures:
            result = futures[-1].result(None if deadline is None else deadline - time.monotonic())
            futures.pop()
            yield result
    finally:
        if futures:
            with contextlib.suppress(GpuschedError):  # what ended the iteration says more
                dispatch.cancel(futures)
