"""Site plug-ins: `pluggy` hooks, found by entry points and by the setting `[plugins] load`.

A plug-in is a module or object with functions marked `hookimpl`. They take part in the cycle at the points of
the Kubernetes scheduling framework: queue sort, filter, score, permit; and receive state changes. A plug-in that
raises, or returns a value of the wrong type, is reported and skipped; after some failures it is disabled. It
cannot stop the loop, but there is no protection from one that never returns.

All plug-ins are called in the thread of the daemon's loop; planning on another thread has the loop call them and
waits. They therefore need no locks, and may keep thread-bound objects such as a connection to SQLite.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from importlib import import_module
from logging import getLogger
from typing import TYPE_CHECKING, Any

import pluggy

from gpusched.errors import NotReady, UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.job import Job
from gpusched.model.snapshot import ClassKey, PendingJob, Placement
from gpusched.scheduler.plugins import Extensions

if TYPE_CHECKING:
    import asyncio

log = getLogger("gpusched.plugins")

PROJECT = "gpusched"
"""Name of the pluggy project and of the entry-point group."""

FAILURES_ALLOWED = 3
"""Failures after which a plug-in is disabled until the daemon restarts."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """Hook specifications. Implementations may omit arguments that they do not need."""

    @hookspec
    def gpusched_queue_sort(self, key: ClassKey) -> float | None:
        """Points added to the weighted priority of this class; shown among its parts."""

    @hookspec
    def gpusched_filter(self, key: ClassKey, node: NodeView) -> str | None:
        """Why jobs of this class must not run on this node, as a short sentence; None if they may."""

    @hookspec
    def gpusched_score(self, key: ClassKey, node: NodeView) -> float | None:
        """Suitability of the node for the class; the highest sum wins, the configured strategy breaks ties."""

    @hookspec
    def gpusched_permit(self, key: ClassKey, job: PendingJob, place: Placement) -> str | None:
        """Why a job with a place must not start yet, as a short sentence; None if it may."""

    @hookspec
    def gpusched_job_changed(self, before: Job | None, after: Job) -> None:
        """Called after the commit of a job's row; `before` is None for a new one."""


class OneThread:
    """Calls functions in one thread: the thread that created this, which may run a loop."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: set[Future[Any]] = set()

    def attach(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Route calls from other threads through this loop; None: reject them, including waiting ones."""
        self._loop = loop
        if loop is None:
            for future in list(self._awaited):
                future.cancel()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call a function in the thread. Raises: NotReady from another thread while no loop runs."""
        if threading.get_ident() == self._thread:
            return function(*arguments)
        future: Future[Any] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        self._awaited.add(future)
        try:
            # Checked after adding it: a loop that closes from now on cancels it.
            loop = self._loop
            if loop is None:
                raise NotReady("plug-ins are no longer called: the daemon is stopping")
            loop.call_soon_threadsafe(answer)
            return future.result()
        except (CancelledError, RuntimeError):
            if self._loop is None:
                raise NotReady("plug-ins are no longer called: the daemon is stopping") from None
            raise
        finally:
            self._awaited.discard(future)


class Plugins:
    """The loaded plug-ins, with guarded calls in one thread."""

    def __init__(self) -> None:
        self.thread = OneThread()
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(Hooks)
        self._failures: Counter[str] = Counter()
        self.troubles: list[str] = []
        """A sentence for each plug-in that failed, for `gpusched doctor`."""

    @classmethod
    def load(cls, modules: Iterable[str] = ()) -> Plugins:
        """Load plug-ins of the installed distributions, and these modules.

        A distribution's plug-in that cannot be loaded is reported and left out.
        Raises: UsageError for a module of the config that cannot be loaded.
        """
        plugins = cls()
        plugins._load_entry_points()
        for name in modules:
            try:
                plugins._manager.register(import_module(name), name)
            except (Exception, SystemExit) as error:
                raise UsageError(
                    f"the plug-in {name!r} of [plugins] load cannot be loaded: {type(error).__name__}: {error}",
                    f"try it with: python -c 'import {name}'",
                ) from error
        plugins._check()
        return plugins

    def _load_entry_points(self) -> None:
        from importlib.metadata import entry_points

        for point in entry_points(group=PROJECT):
            try:
                self._manager.register(point.load(), point.name)
            except (Exception, SystemExit) as error:
                self._report(point.name, f"cannot be loaded: {type(error).__name__}: {error}")

    def register(self, plugin: object, name: str) -> None:
        """Add a plug-in object."""
        self._manager.register(plugin, name)

    def _check(self) -> None:
        """Raises: UsageError for a function with a hook's mark but an unknown name."""
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            known = ", ".join(name for name in vars(Hooks) if name.startswith("gpusched_"))
            raise UsageError(f"a plug-in has a hook that does not exist: {error}", f"the hooks are: {known}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all loaded plug-ins."""
        return tuple(sorted(name for name, _ in self._manager.list_name_plugin()))

    def extensions(self) -> Extensions:
        """The plug-ins' parts in the cycle."""
        return Extensions(
            sorts=tuple(self._calls("gpusched_queue_sort", _number, 0.0)),
            filters=tuple(self._calls("gpusched_filter", _sentence, None)),
            scores=tuple(self._calls("gpusched_score", _number, 0.0)),
            permits=tuple(self._calls("gpusched_permit", _sentence, None)),
        )

    def job_changed(self, before: Job | None, after: Job) -> None:
        for _, tell in self._calls("gpusched_job_changed", lambda answer: None, None):
            tell(before, after)

    def _calls(self, hook: str, read: Callable[[Any], Any], neutral: Any) -> Iterable[tuple[str, Callable[..., Any]]]:
        spec = getattr(self._manager.hook, hook)
        for implementation in spec.get_hookimpls():
            yield implementation.plugin_name, self._guarded(implementation, hook, read, neutral)

    def _guarded(self, implementation: Any, hook: str, read: Callable[[Any], Any], neutral: Any) -> Callable[..., Any]:
        names = _ARGUMENTS[hook]
        positions = [names.index(name) for name in implementation.argnames]
        plugin, function = implementation.plugin_name, implementation.function

        def guarded(*arguments: Any) -> Any:
            if self._failures[plugin] >= FAILURES_ALLOWED:
                return neutral
            try:
                return read(function(*(arguments[position] for position in positions)))
            except (Exception, SystemExit) as error:
                self._report(plugin, f"{hook} failed: {type(error).__name__}: {error}")
                return neutral

        return lambda *arguments: self.thread.call(guarded, arguments)

    def _report(self, plugin: str, text: str) -> None:
        self._failures[plugin] += 1
        out = "; it is left out from now on" if self._failures[plugin] >= FAILURES_ALLOWED else ""
        sentence = f"plug-in {plugin}: {text}{out}"
        log.error("%s", sentence)
        self.troubles = [*self.troubles[-9:], sentence]


_ARGUMENTS = {
    "gpusched_queue_sort": ("key",),
    "gpusched_filter": ("key", "node"),
    "gpusched_score": ("key", "node"),
    "gpusched_permit": ("key", "job", "place"),
    "gpusched_job_changed": ("before", "after"),
}


def _number(answer: Any) -> float:
    if answer is None:
        return 0.0
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or answer != answer:
        raise TypeError(f"answered {answer!r}, which is not a number")
    return float(answer)


def _sentence(answer: Any) -> str | None:
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise TypeError(f"answered {answer!r}, which is not a sentence")
