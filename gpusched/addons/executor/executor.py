"""An executor in the style of concurrent.futures, whose calls are jobs.

`Dispatch` submits calls in batches and turns ended jobs into results. Its two threads live only while there is work:
one submits collected calls, one holds a single request open for the ends of all jobs. Neither refers to the executor,
so that it can be garbage-collected.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import shlex
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from gpusched.addons.executor.folder import CallFolder, InitializerFailed
from gpusched.errors import GpuschedError, NotReady, UsageError
from gpusched.sdk import call as call_module
from gpusched.sdk.client import Client
from gpusched.sdk.options import spec_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpusched.sdk.job_options import JobOptions


P = ParamSpec("P")
T = TypeVar("T")


class CallFuture(Future[T]):
    """The result of a call. `as_completed` and `wait` of concurrent.futures accept it."""

    def __init__(self, dispatch: Dispatch, number: int, name: str) -> None:
        super().__init__()
        self.number = number
        """Number of the call within its executor."""
        self.name = name
        self.job_id: str | None = None
        """Id of its job, set on submission shortly after the call."""
        self.is_being_cancelled = False
        """A cancellation was requested and has not been refused."""
        self.is_given_up = False
        """Its job is being cancelled because no call of the executor can be made."""
        self._dispatch = dispatch

    def cancel(self) -> bool:
        """Cancel the call if its job has not started; False if it has started or ended."""
        if self.done():
            return self.cancelled()
        return self._dispatch.cancel([self])

    def running(self) -> bool:
        """Whether the job is running. Asks the scheduler, since nothing else tracks it."""
        if not super().running() and not self.done() and self._dispatch.has_started(self):
            with self._condition:
                if self._state == "PENDING":
                    self._state = "RUNNING"
        return super().running()

    def take_back(self) -> bool:
        """Mark as cancelled and wake only threads blocked in `result`; False if already done.

        Does not contact the job, and ignores a run before a requeue. If this returns True, call `tell_cancelled`.
        """
        with self._condition:
            if self.done():
                return False
            self._state = "CANCELLED"
            self._condition.notify_all()
            return True

    def tell_cancelled(self) -> None:
        """Run the callbacks in this thread, and notify `wait` and `as_completed`."""
        self._invoke_callbacks()  # type: ignore[attr-defined]  # `Future.cancel` does this where there is no job
        self.set_running_or_notify_cancel()


_CALLS_AT_ONCE = 5000
_WATCH_S = 30


class Dispatch:
    """The calls of one executor."""

    def __init__(
        self, client: Client, spec: Mapping[str, Any], command: Sequence[str], max_workers: int | None, close: bool
    ) -> None:
        self.folder = CallFolder()
        self._client = client
        self._spec = {"stdout": self.folder.log_pattern(), **spec}
        self._has_own_logs = "stdout" not in spec
        self._command = shlex.join(command)
        self._max = max_workers
        self._closes_client = close
        self._lock = threading.Condition()
        self._queue: deque[CallFuture[Any]] = deque()
        self._open: dict[str, CallFuture[Any]] = {}
        """Unfinished calls, by job."""
        self._early: dict[str, dict[str, Any]] = {}
        """Jobs that ended before their submission was answered."""
        self._logs: list[str] = []
        """Jobs whose output is deleted with the executor."""
        self._sending: Sequence[CallFuture[Any]] = ()
        """Calls being submitted: no longer queued, and without a job id yet."""
        self._one_cancels = threading.Lock()
        """Held while a cancellation is requested, never while callbacks run."""
        self._cancelling: frozenset[str] = frozenset()
        """Jobs whose cancellation a thread is currently requesting."""
        self._left: set[str] = set()
        """Jobs among these that the request has ended: its thread runs the callbacks, as `Future.cancel` does."""
        self._cursor: str | None = None
        self._sender: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._is_closed = False
        self._broken: InitializerFailed | None = None
        self._calls = 0

    # --- what the executor asks -------------------------------------------------------------------

    def add(self, call: Callable[..., Any], arguments: Any, keywords: dict[str, Any] | None) -> CallFuture[Any]:
        """Queue a call. Raises: RuntimeError after `close`, BrokenExecutor if no call can be made."""
        name = str(getattr(call, "__name__", None) or type(call).__name__)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._broken is not None:
                raise BrokenExecutor(f"no call can be made: {self._broken}")
            self._calls += 1
            future: CallFuture[Any] = CallFuture(self, self._calls, name)
        try:
            self.folder.write(future.number, call, arguments, keywords)
        except Exception as error:
            future.set_exception(error)
            return future
        with self._lock:
            self._queue.append(future)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send, name="gpusched-submit")
                self._sender.start()
            else:
                self._lock.notify_all()
        return future

    def cancel(self, futures: Sequence[CallFuture[Any]]) -> bool:
        """Cancel the calls whose jobs have not started; returns whether one of them is cancelled now.

        As in the standard library, their callbacks have run when this returns. They run last and without a lock, so
        they may shut the executor down or cancel others.
        """
        done: list[CallFuture[Any]] = []
        with self._lock:
            unsent = set(self._queue)
            taken = {future for future in futures if future in unsent}
            if taken:
                self._queue = deque(future for future in self._queue if future not in taken)
                self._lock.notify_all()
            done += [future for future in futures if future in taken and self._take_back(future)]
        try:
            if len(taken) < len(futures):
                with self._one_cancels:
                    self._cancel_sent([future for future in futures if future not in taken], done)
        finally:
            for future in done:
                future.tell_cancelled()
        return any(future.cancelled() for future in futures)

    def _cancel_sent(self, futures: Sequence[CallFuture[Any]], done: list[CallFuture[Any]]) -> None:
        """Request the cancellation of these; add the cancelled ones to `done`. Raises: as Client.call."""
        sent: dict[str | None, CallFuture[Any]] = {}
        gone: set[str] | None = None
        try:
            with self._lock:
                # Calls being submitted get their ids in a moment.
                self._lock.wait_for(lambda: not self._sending or all(future.job_id for future in futures), 30)
                sent = {future.job_id: future for future in futures if future.job_id in self._open}
                for future in sent.values():
                    future.is_being_cancelled = True
                self._cancelling = frozenset(map(str, sent))
            if sent:
                answer = self._client.call("POST", "/v1/jobs/cancel", {"ids": list(sent), "states": ["PENDING"]})
                gone = set(map(str, answer["cancelled"]))
        finally:
            with self._lock:
                for job_id, future in sent.items():
                    if job_id in (gone or ()) or job_id in self._left:
                        if self._take_back(future):
                            done.append(future)
                    elif gone is not None:
                        future.is_being_cancelled = False
                self._cancelling = frozenset()
                self._left.clear()
                self._lock.notify_all()

    def _take_back(self, future: CallFuture[Any]) -> bool:
        """Requires the lock; removes the files before another thread can see the executor as idle."""
        if not future.take_back():
            return False
        self.folder.forget(future.number)
        return True

    def has_started(self, future: CallFuture[Any]) -> bool:
        if future.job_id is None:
            return False
        return any(
            job.state in ("RUNNING", "COMPLETING", "SUSPENDED") for job in self._client.jobs(ids=[future.job_id])
        )

    def close(self, wait: bool, cancel: bool) -> None:
        """Accept no more calls; see Executor.shutdown."""
        with self._lock:
            self._is_closed = True
            pending = [*self._queue, *self._sending, *self._open.values()]
            self._lock.notify_all()
        if cancel and pending:
            self.cancel(pending)
        while wait:
            with self._lock:
                threads = [thread for thread in (self._sender, self._watcher) if thread is not None]
            if not threads or threading.current_thread() in threads:
                break
            for thread in threads:
                thread.join()
        with self._lock:
            is_idle = self._sender is None and self._watcher is None
        if is_idle:
            self._end()

    def _end(self) -> None:
        # Both `close` and the last thread may get here: the second finds nothing left to do.
        with self._lock:
            while self._logs:
                self.folder.forget_log(self._logs.pop())
            self.folder.remove()
        if self._closes_client:
            self._client.close()

    # --- submitting -------------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            with self._lock:
                while self._queue and self._room() < 1:
                    self._lock.wait()
                if not self._queue:
                    self._sender = None
                    break
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._room()))]
                self._sending = batch
            # All jobs of one request have the same name.
            alike: dict[str, list[CallFuture[Any]]] = {}
            for future in batch:
                alike.setdefault(future.name, []).append(future)
            early: list[tuple[CallFuture[Any], dict[str, Any]]] = []
            refused: list[tuple[CallFuture[Any], Exception]] = []
            for futures in alike.values():
                try:
                    early += self._submit(futures)
                except Exception as error:
                    refused += [(future, error) for future in futures]
            with self._lock:
                self._sending = ()
                self._lock.notify_all()
            # Only now: a callback that cancels other calls would wait until nothing is being submitted.
            for future, why in refused:
                self.folder.forget(future.number)
                _give(future, why)
            for future, job in early:
                self._settle(future, job)
        self._settle_end()

    def _room(self) -> int:
        return _CALLS_AT_ONCE if self._max is None else min(_CALLS_AT_ONCE, self._max - len(self._open))

    def _submit(self, batch: Sequence[CallFuture[Any]]) -> list[tuple[CallFuture[Any], dict[str, Any]]]:
        """Submit these calls as jobs; returns those that have already ended."""
        if self._cursor is None:
            # Before the first job, so that no end is missed.
            self._cursor = self._client.call("GET", "/v1/ended")["cursor"]
        lines = [f"exec {self._command} {shlex.quote(self.folder.path)} {future.number}" for future in batch]
        spec = {"name": batch[0].name, **self._spec}
        ids = self._posted(spec, lines)
        with self._lock:
            for job_id, future in zip(ids, batch, strict=True):
                future.job_id = job_id
                self._open[job_id] = future
            early = [(self._open.pop(job_id), self._early[job_id]) for job_id in ids if job_id in self._early]
            self._early.clear()
            if self._open and self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="gpusched-watch")
                self._watcher.start()
        return early

    def _posted(self, spec: Mapping[str, Any], lines: Sequence[str]) -> list[str]:
        """Submit exactly once, under a key, even if the daemon is killed meanwhile."""
        keyed = {**spec, "key": f"executor-{os.urandom(8).hex()}"}
        while True:
            try:
                answer = self._client.call("POST", "/v1/jobs", {"spec": keyed, "batch": lines})
                return [str(job_id) for job_id in answer["ids"]]
            except NotReady as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise

    # --- watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._lock:
                # A call that another thread is cancelling has not ended yet.
                self._lock.wait_for(lambda: self._open or self._sending or not self._left)
                if not self._open and not self._sending:
                    self._watcher = None
                    break
            try:
                answer = self._client.call("GET", f"/v1/ended?after={self._cursor}&timeout_s={_WATCH_S}")
                self._cursor = answer["cursor"]
                ended = self._look() if answer["missed"] else answer["jobs"]
            except Exception as error:
                # Any error: without a watcher, waits for these futures would never return.
                with self._lock:
                    lost, self._open = list(self._open.values()), {}
                for future in lost:
                    _give(future, error)
                continue
            with self._lock:
                settled: list[tuple[CallFuture[Any], dict[str, Any]]] = []
                for job in ended:
                    if job["id"] not in self._open:
                        if self._sending:
                            self._early[job["id"]] = job
                        continue
                    future = self._open.pop(job["id"])
                    if job["state"] == "CANCELLED" and job["id"] in self._cancelling:
                        self._left.add(job["id"])
                    else:
                        settled.append((future, job))
                self._lock.notify_all()
            for future, job in settled:
                self._settle(future, job)
        self._settle_end()

    def _look(self) -> list[dict[str, Any]]:
        """The ended jobs, found by checking each one after a restart of the daemon."""
        with self._lock:
            ids = list(self._open)
        return [
            {
                "id": job.id,
                "state": job.state.value,
                "exit_code": job.exit_code,
                "signal": job.signal,
                "run": job.run,
                "reason": job.reason,
                "reason_text": job.reason_text,
            }
            for job in self._client.jobs(ids=ids)
            if job.is_final
        ]

    def _settle(self, future: CallFuture[Any], job: dict[str, Any]) -> None:
        try:
            if job["state"] == "CANCELLED" and future.is_being_cancelled:
                if future.take_back():
                    future.tell_cancelled()
                return
            if job["state"] == "CANCELLED" and future.is_given_up and self._broken is not None:
                _give(future, self._broken)
                return
            try:
                value = self.folder.take(future.number, job, future.name)
            except BaseException as error:
                _give(future, error)
                if isinstance(error, InitializerFailed):
                    self._break(error)
                return
            if self._has_own_logs:
                self._logs.append(job["id"])
            try:
                future.set_result(value)
            except InvalidStateError:
                pass  # cancelled concurrently
        finally:
            self.folder.forget(future.number)

    def _break(self, error: InitializerFailed) -> None:
        """Fail all calls that have not started: each would fail as this one did."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            waiting, sent = list(self._queue), dict(self._open)
            for future in sent.values():
                future.is_given_up = True
            self._queue.clear()
            self._lock.notify_all()
        for future in waiting:
            self.folder.forget(future.number)
            _give(future, error)
        if sent:
            try:
                answer = self._client.call("POST", "/v1/jobs/cancel", {"ids": list(sent), "states": ["PENDING"]})
            except GpuschedError:
                return  # they start, and fail by themselves
            gone = set(map(str, answer["cancelled"]))
            for job_id, future in sent.items():
                if job_id in gone:
                    _give(future, error)
                else:
                    future.is_given_up = False

    def _settle_end(self) -> None:
        """Clean up after the last call of an executor that was shut down without waiting."""
        with self._lock:
            is_over = self._is_closed and self._sender is None and self._watcher is None
        if is_over:
            self._end()


def _give(future: CallFuture[Any], error: BaseException) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass  # cancelled concurrently


_OWN = ("client", "max_workers", "initializer", "initargs", "python")


class Executor(concurrent.futures.Executor):
    """Runs calls as jobs of the scheduler, each with the resources given here.

    Calls and results are pickled into files that only the owner can read; an exception of a call is raised by
    `result()`, with the job's traceback as its cause. A job that is killed raises JobFailed.
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
            client: a client to share; by default the executor creates its own.
            max_workers: maximum number of pending and running jobs; by default every call becomes a job at once.
            initializer: called as `initializer(*initargs)` in each job before its call. If it raises, that call,
                calls that have not started and all later ones raise BrokenExecutor.
            python: the interpreter of the jobs.
            options: of every job, see JobOptions.
        """
        if max_workers is not None and max_workers < 1:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if "key" in options:
            raise UsageError("a key identifies one job, not the calls of an executor", "leave key= out")
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
                # It cannot be pickled, and the caller gets no executor to shut down.
                self._dispatch.close(False, False)
                raise
        # An unreferenced executor accepts no more calls; its pending ones continue.
        weakref.finalize(self, self._dispatch.close, False, False)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Submit a job that calls `fn(*args, **kwargs)`. Raises: RuntimeError after shutdown."""
        return self._dispatch.add(fn, args, kwargs)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Results of `fn` over the iterables, in order; everything is submitted at once.

        Args:
            timeout: of the whole iteration, in seconds from now. Raises: TimeoutError.
            chunksize: number of calls in each job: starting a job costs more than a small call.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        deadline = None if timeout is None else time.monotonic() + timeout
        calls = zip(*iterables)  # noqa: B905  stops at the shortest, as in the standard library
        if chunksize == 1:
            return _results(self._dispatch, [self._dispatch.add(fn, args, {}) for args in calls], deadline)
        chunks = iter(lambda: list(itertools.islice(calls, chunksize)), [])
        futures = [self._dispatch.add(fn, chunk, None) for chunk in chunks]
        return itertools.chain.from_iterable(_results(self._dispatch, futures, deadline))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all calls; after Ctrl-C only for running ones, the others are cancelled."""
        self.shutdown(cancel_futures=isinstance(error, KeyboardInterrupt))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls.

        Args:
            wait: block until all calls have ended; otherwise return at once, and they keep running.
            cancel_futures: cancel the calls whose jobs have not started.
        """
        self._dispatch.close(wait, cancel_futures)


def _results(dispatch: Dispatch, futures: list[CallFuture[Any]], deadline: float | None) -> Iterator[Any]:
    """Yield the results in order; if the iteration stops early, cancel the rest with a single request."""
    futures.reverse()
    try:
        while futures:
            result = futures[-1].result(None if deadline is None else deadline - time.monotonic())
            futures.pop()
            yield result
    finally:
        if futures:
            with contextlib.suppress(GpuschedError):  # the error that ended the iteration says more
                dispatch.cancel(futures)
