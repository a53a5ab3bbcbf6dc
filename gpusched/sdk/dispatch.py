"""Between an executor and the scheduler: calls become jobs many at a time, and ends of jobs results of calls.

Two threads, which live only while there is something to do: one submits what has gathered, one holds a single
request open for the ends of all jobs. Neither refers to the executor, so that it can be collected.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, InvalidStateError
from typing import Any

from gpusched.errors import GpuschedError, NotReady
from gpusched.sdk.client import Client
from gpusched.sdk.folder import CallFolder, InitializerFailed
from gpusched.sdk.future import CallFuture

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
        """By job."""
        self._early: dict[str, dict[str, Any]] = {}
        """Jobs that ended before their submission was answered."""
        self._logs: list[str] = []
        """Jobs whose output need not be kept for longer than the executor."""
        self._sending: Sequence[CallFuture[Any]] = ()
        """What is on its way to the daemon: not waiting any more, and without an id yet."""
        self._one_cancels = threading.Lock()
        """Held while a cancellation is asked for, never while callbacks are called."""
        self._cancelling: frozenset[str] = frozenset()
        """Jobs of which a thread asks the daemon right now whether they can be cancelled."""
        self._left: set[str] = set()
        """Those of them that have ended so: that thread tells, as `Future.cancel` calls the callbacks itself."""
        self._cursor: str | None = None
        self._sender: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._is_closed = False
        self._broken: InitializerFailed | None = None
        self._calls = 0

    # --- what the executor asks -------------------------------------------------------------------

    def add(self, call: Callable[..., Any], arguments: Any, keywords: dict[str, Any] | None) -> CallFuture[Any]:
        """Take a call. Raises: RuntimeError after `close`, BrokenExecutor when no call can be made."""
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
        """Cancel the calls whose jobs have not started; whether one of them is cancelled now.

        As in the standard library, their callbacks have been called when this returns. They are called last, without
        any lock: they may shut the executor down, or cancel others.
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
        """Ask for these to be cancelled; those that are get into `done`. Raises: as Client.call."""
        sent: dict[str | None, CallFuture[Any]] = {}
        gone: set[str] | None = None
        try:
            with self._lock:
                # What is being submitted right now gets its id in a moment.
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
        """With the lock held, and its files gone before anybody can take the executor for idle."""
        if not future.take_back():
            return False
        self.folder.forget(future.number)
        return True

    def has_started(self, future: CallFuture[Any]) -> bool:
        """Whether the job of a call runs."""
        if future.job_id is None:
            return False
        return any(
            job.state in ("RUNNING", "COMPLETING", "SUSPENDED") for job in self._client.jobs(ids=[future.job_id])
        )

    def close(self, wait: bool, cancel: bool) -> None:
        """Take no more calls; see Executor.shutdown."""
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
        # Whoever shuts down and the last thread may both come here: the second one finds nothing left to do.
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
            # One request gives all its jobs one name.
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
        """Make jobs of these; returns those that have ended by now."""
        if self._cursor is None:
            # Before the first job, so that no end can be missed.
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
        """Submit, once, also when the daemon is killed under it: whether it has recorded the jobs can be seen."""
        began_at = time.time() - 60
        while True:
            try:
                answer = self._client.call("POST", "/v1/jobs", {"spec": spec, "batch": lines})
                return [str(job_id) for job_id in answer["ids"]]
            except NotReady as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
            known = {job.command: job.id for job in self._client.jobs(states=["all"], since=began_at)}
            if all(line in known for line in lines):
                return [known[line] for line in lines]

    # --- watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._lock:
                # A call that another thread is about to cancel is not over yet.
                self._lock.wait_for(lambda: self._open or self._sending or not self._left)
                if not self._open and not self._sending:
                    self._watcher = None
                    break
            try:
                answer = self._client.call("GET", f"/v1/ended?after={self._cursor}&timeout_s={_WATCH_S}")
                self._cursor = answer["cursor"]
                ended = self._look() if answer["missed"] else answer["jobs"]
            except Exception as error:
                # Whatever it is: a future that nobody watches any more would be waited for for ever.
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
        """Those that have ended, by looking at each: the daemon was restarted."""
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
                pass  # cancelled in the same moment
        finally:
            self.folder.forget(future.number)

    def _break(self, error: InitializerFailed) -> None:
        """Give up all calls that have not started: each would fail as this one did."""
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
                return  # they start, and find out by themselves
            gone = set(map(str, answer["cancelled"]))
            for job_id, future in sent.items():
                if job_id in gone:
                    _give(future, error)
                else:
                    future.is_given_up = False

    def _settle_end(self) -> None:
        """After the last call of an executor that was shut down without waiting."""
        with self._lock:
            is_over = self._is_closed and self._sender is None and self._watcher is None
        if is_over:
            self._end()


def _give(future: CallFuture[Any], error: BaseException) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass  # cancelled in the same moment
