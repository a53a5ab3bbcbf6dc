"""The asyncio edge: timers, the socket, the worker's pipe, and when the next tick is due.

Ticks are synchronous and run on this one thread, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Container, Mapping, Set
from functools import partial
from logging import getLogger
from types import MappingProxyType
from typing import Any

from gpusched.daemon.dispatch import Dispatcher
from gpusched.daemon.preset import PresetChoice
from gpusched.daemon.remote_nodes import RemoteNodes
from gpusched.daemon.service_manager import ServiceManager
from gpusched.daemon.tick import Ticker
from gpusched.daemon.watch.burst import BurstWatch
from gpusched.daemon.watch.checkpoints import CheckpointKeeper
from gpusched.daemon.watch.clients import ClientWatch
from gpusched.daemon.watch.estimates import Estimator
from gpusched.daemon.watch.idle import ActivityReader
from gpusched.daemon.watch.pruning import Pruner
from gpusched.daemon.watch.steps import StepWatch
from gpusched.engine import spool as files
from gpusched.engine.going_down import machine_goes_down
from gpusched.errors import GpuschedError
from gpusched.gpu.worker import GpuWorker
from gpusched.model.commands import Caller, Reload
from gpusched.model.units import plural
from gpusched.ports import HostSource
from gpusched.ports.daemon import ApiServer

log = getLogger("gpusched.daemon")

_RELEASE_POLL_S = 0.5
_RETRY_S = 0.5
_BITE_GAP_S = 0.05
_TICK_GAP_S = 0.002
_PIECE_GAP_S = 0.005
_READING_S = 0.01
"""Longest time that ends of runs wait for the reading that shows their GPUs clean, to share a tick with it."""
_LAST_WORDS_S = 15.0
"""Time beyond their grace for runs to be killed and recorded while the machine shuts down."""
_LOOK_UP_S = 10.0
"""Time between two checks whether the machine is still shutting down."""


class _Alarm:
    """One timer of the loop, set to one instant at a time."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    @property
    def at(self) -> float | None:
        """When it rings, on the clock of the loop; None: it is not set."""
        return None if self._handle is None else self._handle.when()

    def set(self, wait_s: float) -> None:
        """Set it, unless it is set already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def reset(self, wait_s: float | None) -> None:
        """Set it anew; None: not any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if wait_s is not None:
            self.set(wait_s)

    def _ring(self) -> None:
        self._handle = None
        self._action()


class Loop:
    """Ticks the scheduler after every event and at every poll.

    One class: all that wakes the daemon meets here, each a timer and a few lines, which would be twice as many apart.
    """

    def __init__(
        self,
        ticker: Ticker,
        worker: GpuWorker,
        host: HostSource,
        dispatcher: Dispatcher,
        manager: ServiceManager,
        goes_down: Callable[[], bool] = machine_goes_down,
        *,
        auto_preset: PresetChoice | None = None,
        remote: RemoteNodes | None = None,
        observers: Mapping[str, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        """Args: observers: steps of each poll that only some daemons have, by name."""
        self._ticker = ticker
        self._scheduler = scheduler = ticker.scheduler
        self._failures = scheduler.failures
        self._manager = manager
        self._goes_down = goes_down
        self._farewell = _Alarm(self.stop)
        """Set while a shutdown waits for runs to end."""
        self._last_look_up = 0.0
        self._worker = worker
        self._host = host
        self._dispatcher = dispatcher
        self._stopping = asyncio.Event()
        self._due: asyncio.Handle | None = None
        self._last_turn = 0.0
        self._news: asyncio.Handle | None = None
        self._patience = _Alarm(self.wake)
        """Set while a tick waits for a reading: one that shows the GPUs of ended runs clean, or that of a poll."""
        self._has_early_news = False
        """Whether the engine has reported something during the present tick."""
        ticker.before_starts = self._look_ahead
        self._can_wait = False
        """Whether nothing but ends of runs and readings makes the next tick due."""
        self._estimator = Estimator(ticker)
        self._activity = ActivityReader(scheduler)
        self._checkpoints = CheckpointKeeper(scheduler, ticker.tickets.spare_folders)
        self._pruner = Pruner(ticker, self._checkpoints.forget)
        self._bite = _Alarm(partial(self._between_ticks, "pruning", self._take_bite))
        self._clients = ClientWatch(ticker)
        scheduler.signals.gpus_freed.connect(self._request_gpus)
        scheduler.signals.jobs_changed.connect(self._clients.changed)
        scheduler.signals.jobs_changed.connect(self._checkpoints.changed)
        self._auto_preset = auto_preset
        self._remote = remote
        self._nodes_due: asyncio.Handle | None = None
        self._export = _Alarm(partial(self._between_ticks, "preset", self._poll_preset))
        """Set while the history is exported for `auto_preset`."""
        self._next_poll = _Alarm(self._poll)
        self._retry = _Alarm(self.wake)
        """Set while a backlog awaits a retry: one timer, however many ticks come in between."""
        self._piece = _Alarm(self.wake)
        """Set while another piece of a batch is to be made, after a pause in which the requests of others are served.
        """
        self._alerts_due = _Alarm(partial(self._failures.run, "alerts", self._reconcile_alerts))
        """Set while alerts wait for the next attempt at their targets."""
        self._promotion: float | None = None
        self._tried: float | None = None
        """The due instant that the last timer tick was for."""
        self._next_promotion = _Alarm(self._promote)
        self._last_gpu_poll = 0.0
        self._requested: Set[str] = set()
        """Nodes that were asked for a reading that a start awaits, until it needs none of them any more."""
        self.observers: dict[str, Callable[[], None]] = {
            "job table": self._observe_table,
            "carried rows": ticker.flush,
            "host load": self._observe_host,
            "checkpoint files": scheduler.observe_checkpoints,
            "GPU request": self._request_gpus_if_due,
            # Poll even without news: this detects a driver that does not respond.
            "GPU reading": self._take_reading,
            "start estimates": self._estimator.poll,
            "bursts": BurstWatch(scheduler).poll,
            "idle evidence": self._activity.poll,
            "clients": self._clients.poll,
            "steps": StepWatch(ticker).poll,
            "checkpoint folders": self._checkpoints.poll,
            "alerts": self._reconcile_alerts,
            "shutdown": self._poll_shutdown,
            "service status": self._show_status,
            "pruning schedule": partial(self._bite.set, _BITE_GAP_S),
            "preset": self._poll_preset,
            **observers,
        }
        """Steps of each poll, by name and in order. They are independent: one that raises stops no other."""
        if remote is not None:
            # At each poll also what did not arrive.
            self.observers["nodes"] = remote.poll
            remote.wake = self._note_report
        self.after_tick: dict[str, Callable[[], None]] = {
            "early news of runs": self._go_on_with_news,
            "GPU request after ends": self._request_after_tick,
            "retry": self._retry_backlog,
            "batches": self._go_on_with_batches,
            "alert delivery": self._follow_outbox,
            "timers": self._await_promotion,
        }
        """Steps after every tick, independent as well."""

    def wake(self, *, can_wait: bool = False) -> None:
        """Schedule a tick once the requests already received have been read.

        Under load, ticks keep a small distance, so that requests within it share one commit.
        Args: can_wait: the tick may wait for a reading, if more runs end before it begins.
        """
        self._can_wait = can_wait and (self._can_wait or self._due is None)
        if self._due is None:
            loop = asyncio.get_running_loop()
            wait_s = self._last_turn + _TICK_GAP_S - loop.time()
            self._due = loop.call_soon(self._turn) if wait_s <= 0 else loop.call_later(wait_s, self._turn)

    def stop(self) -> None:
        """End the loop; runs continue without it."""
        self._stopping.set()

    async def run(self, server: ApiServer, socket_path: str, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_exception)
        self._scheduler.plugins.thread.attach(loop)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        # Start-up has just read the GPUs.
        self._last_gpu_poll = loop.time()
        try:
            await server.start(socket_path)
            self._scheduler.engine.set_waker(self._note_news)
            self._watch(self._worker.fileno(), "GPU reading", self._take_reading)
            self._dispatcher.watch = lambda courier: self._watch(courier.fileno(), "alerts", self._reconcile_alerts)
            self._poll()
            ready()
            self._manager.ready()
            await self._stopping.wait()
        finally:
            self._manager.stopping()
            for alarm in vars(self).values():
                if isinstance(alarm, _Alarm):
                    alarm.reset(None)
            self._scheduler.plugins.thread.attach(None)
            self._scheduler.engine.set_waker(None)
            self._checkpoints.close()
            if self._auto_preset is not None:
                self._auto_preset.close()
            await server.close()
            loop.remove_reader(self._worker.fileno())

    def _watch(self, fd: int, step: str, action: Callable[[], None]) -> None:
        """Run a step whenever the descriptor is readable."""
        loop = asyncio.get_running_loop()

        def on_readable() -> None:
            if not self._failures.run(step, action):
                # The descriptor may still be readable, which would call this in a busy loop.
                loop.remove_reader(fd)
                loop.call_later(_RETRY_S, self._watch, fd, step, action)

        loop.add_reader(fd, on_readable)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception that no callback or task caught."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._failures.note("event loop", error)
        else:
            log.error("event loop: %s", context["message"])

    def _reload(self) -> None:
        """Handle SIGHUP, which only the owner or root may send. The tick logs the result."""
        self._manager.reloading()
        self._ticker.submit(Reload(Caller(os.geteuid(), "SIGHUP")), lambda answer: self._manager.ready())
        self.wake()

    # --- the end ------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        """Handle SIGTERM: exit at once and leave runs alone, or, in a shutdown, end them first with their grace."""
        if self._farewell.at is not None:
            return
        # The check may exceed the usual time limit of a stop.
        self._manager.still_at_it("asked to stop; checking whether the machine is shutting down")
        if not self._failures.run("shutdown", self._go_down):
            # If the check fails, the daemon was still asked to stop.
            self.stop()

    def _go_down(self) -> None:
        if not self._goes_down():
            self.stop()
            return
        grace_s = self._scheduler.settings.daemon.shutdown_grace_s
        log.info("the machine is shutting down: ending %d runs", self._scheduler.runs_here)
        self._ticker.go_down(grace_s)
        self._farewell.set(grace_s + _LAST_WORDS_S)
        self.wake()

    def _poll_shutdown(self) -> None:
        """During a shutdown: report it, exit when all runs have ended, and notice when it was called off."""
        if not self._scheduler.is_going_down:
            return
        left = self._scheduler.runs_here
        if self._farewell.at is not None:
            self._manager.still_at_it(f"the machine is shutting down: {plural(left, 'run')} still running")
            if not left and self._ticker.is_quiet:
                self.stop()
            return
        now = asyncio.get_running_loop().time()
        if now - self._last_look_up >= _LOOK_UP_S:
            self._last_look_up = now
            if not self._goes_down():
                log.warning("runs were ended for a shutdown of the machine, which stays up: starting jobs again")
                self._ticker.stay_up()

    def _show_status(self) -> None:
        counts = self._scheduler.state.counts()
        jobs = ", ".join(f"{count} {state.lower()}" for state, count in counts.items() if count)
        self._manager.status(jobs or "no jobs")

    def _note_news(self) -> None:
        """Take in what the engine reports once it has returned: it may announce something while it is called."""
        if self._news is None:
            self._news = asyncio.get_running_loop().call_soon(self._take_news)

    def _take_news(self) -> None:
        self._news = None
        if not self._failures.run("news of runs", self._follow_news):
            self.wake()

    def _follow_news(self) -> None:
        """Take in what the engine reports, and go on with it."""
        if self._ticker.take_news():
            self._request_gpus({self._scheduler.head.name})
        self._await_reading()

    def _look_ahead(self) -> None:
        """Take in what was reported since the tick began, to have GPUs read while that starts runs."""
        if self._ticker.take_news():
            self._request_gpus({self._scheduler.head.name})
        self._has_early_news = self._ticker.has_news

    def _go_on_with_news(self) -> None:
        has_news, self._has_early_news = self._has_early_news, False
        if has_news:
            self._await_reading()

    def _await_reading(self) -> None:
        """Schedule a tick for news of the engine; if runs on GPUs have ended, after a reading that comes soon."""
        is_waiting = self._patience.at is not None
        may_wait = is_waiting or (self._ticker.awaits_reading and self._worker.answered_in_s <= _READING_S)
        if not may_wait or self._ticker.has_commands or not (self._due is None or self._can_wait):
            self.wake(can_wait=True)
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._patience.set(_READING_S)

    def _turn(self) -> None:
        self._due = None
        self._patience.reset(None)
        self._last_turn = asyncio.get_running_loop().time()
        try:
            self._ticker.tick()
            self._manager.alive()
        except GpuschedError as error:
            # The tick did complete; a restart would not help.
            self._manager.alive()
            log.error("tick: %s", error.message)
        except Exception as error:
            # One bad tick must not take the queue down: its input is still in the table and the
            # spool, and the next tick tries again.
            self._failures.note("tick", error)
        else:
            self._failures.recovered("tick")
        for step, action in self.after_tick.items():
            self._failures.run(step, action)

    def _request_after_tick(self) -> None:
        if self._scheduler.awaits_release:
            # A reading was requested when the runs ended; later ones come with the poll.
            self._hasten_poll()
        asked, self._requested = self._requested, self._scheduler.decide_step.awaited
        if new := self._requested - asked:
            self._request_gpus(new)

    def _retry_backlog(self) -> None:
        if self._ticker.has_backlog:
            self._retry.set(_RETRY_S)

    def _go_on_with_batches(self) -> None:
        if self._ticker.has_batches:
            self._piece.set(_PIECE_GAP_S)

    def _await_promotion(self) -> None:
        """Tick when the next begin time, backoff or deadline is reached, rather than at the next poll."""
        promotion = self._ticker.next_due()
        if promotion == self._promotion:
            return
        self._promotion = promotion
        delay_s = None
        if promotion is not None:
            delay_s = max(0.0, promotion - self._scheduler.now())
            if not delay_s and promotion == self._tried:
                # The last tick could not handle it: the table is not writable, or a step raises.
                delay_s = _RETRY_S
            # A clock that is set back makes the timer early; the tick then finds nothing due and the
            # poll, which re-arms it, comes within poll_s.
        self._next_promotion.reset(delay_s)

    def _promote(self) -> None:
        self._tried, self._promotion = self._promotion, None
        self.wake()

    def _follow_outbox(self) -> None:
        if self._dispatcher.is_behind:
            self._reconcile_alerts()

    def _reconcile_alerts(self) -> None:
        # After an exception, alerts that are already due would cause a busy loop.
        due_s: float | None = _RETRY_S
        try:
            self._dispatcher.reconcile()
            due_s = self._dispatcher.due_s()
        finally:
            self._alerts_due.reset(due_s)

    # --- polling --------------------------------------------------------------------------------

    def _poll(self) -> None:
        try:
            for step, observe in self.observers.items():
                self._failures.run(step, observe)
            self._tick_after_poll()
        finally:
            self._next_poll.reset(self._poll_gap_s())

    def _tick_after_poll(self) -> None:
        """Tick together with the reading that this poll has asked for, if readings come soon."""
        if self._worker.is_asked and self._worker.answered_in_s <= _READING_S and self._ticker.is_quiet:
            self._patience.set(_READING_S)
        else:
            self.wake()

    def _hasten_poll(self) -> None:
        """Poll earlier than scheduled, since a GPU now has to be read more often."""
        gap_s, poll_at = self._poll_gap_s(), self._next_poll.at
        if poll_at is not None and poll_at > asyncio.get_running_loop().time() + gap_s:
            self._next_poll.reset(gap_s)

    def _poll_gap_s(self) -> float:
        wait_s = self._scheduler.settings.daemon.poll_s
        if self._scheduler.awaits_release or self._farewell.at is not None:
            wait_s = min(wait_s, _RELEASE_POLL_S)
        if self._manager.watchdog_s is not None:
            wait_s = min(wait_s, self._manager.watchdog_s / 4)
        return wait_s

    def _observe_table(self) -> None:
        if self._scheduler.store.lost() is None and self._scheduler.store.changed():
            log.warning("the job table was changed from outside; reloading it")
            self._ticker.reload()

    def _observe_host(self) -> None:
        try:
            trouble = files.why_full(self._scheduler.head.site.spool)
        except OSError as error:
            trouble = f"its spool cannot be looked at: {error.strerror}"
        self._scheduler.observe_host(self._host.read(), trouble)

    def _request_gpus_if_due(self) -> None:
        elapsed_s = asyncio.get_running_loop().time() - self._last_gpu_poll
        if self._scheduler.has_work or elapsed_s >= self._scheduler.settings.daemon.idle_poll_s:
            self._request_gpus()

    def _between_ticks(self, step: str, action: Callable[[], None]) -> None:
        """Take a part of a long step, unless a tick is due: ticks go first, and the next poll retries."""
        if self._due is None:
            self._failures.run(step, action)

    def _take_bite(self) -> None:
        if self._pruner.bite():
            self._bite.set(_BITE_GAP_S)

    def _poll_preset(self) -> None:
        if self._auto_preset is not None and self._export.at is None and self._auto_preset.poll():
            self._export.set(_BITE_GAP_S)

    def _request_gpus(self, nodes: Container[str] | None = None) -> None:
        """Ask these nodes, by default all, for a reading."""
        head = self._scheduler.head.name
        if nodes is None or head in nodes:
            self._last_gpu_poll = asyncio.get_running_loop().time()
            self._worker.request(self._ticker.mig_orders(head))
        if self._remote is not None:
            self._remote.request_readings(nodes)

    def _poll_nodes(self) -> None:
        self._nodes_due = None
        if self._remote is not None and self._failures.run("nodes", self._remote.take_reports):
            self.wake()

    def _note_report(self) -> None:
        """Take in the reports of other nodes as they arrive."""
        if self._nodes_due is None:
            self._nodes_due = asyncio.get_running_loop().call_soon(self._poll_nodes)

    def _take_reading(self) -> None:
        reading = self._worker.poll()
        if reading is None:
            return
        # A separate step: a later poll without a reading must not count as a success of this one.
        if not self._failures.run("GPU accounts", self._scheduler.observe_gpus, reading):
            return
        if self._patience.at is None or not self._ticker.awaits_reading:
            self.wake(can_wait=True)
