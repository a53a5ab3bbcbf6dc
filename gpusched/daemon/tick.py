"""One tick of the daemon, in a fixed order of named steps.

    collect    engine events and client commands
    apply      events through the lifecycle, then commands, then time and dependencies; `batch` before the next piece
               of one, if any
    decide     the policy's plan; every start becomes a recorded intent
    commit     all of it in one durable transaction
    reply      clients get their answers
    reconcile  the engine is brought in line with the committed rows: what to start, stop, suspend and forget,
               see `reconcile`; likewise the watch on GPUs of ended runs
    signal     signals and notes go to their runs, at most once

A crash between any two steps loses nothing: before `commit` nothing was promised, and after it the table and
the engine's spool together say what is left to do. An exception before the commit drops the tick, and the
memory is reloaded. An exception after it affects only the step that raised; the next tick brings the engine in
line. `step` is called with each name before the step, so that a test can kill the process exactly there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from logging import getLogger
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from gpusched.clock import STEP_S
from gpusched.daemon.commit import AuditEvent, TickTransaction, is_recorded, must_record
from gpusched.daemon.core import SchedulerCore
from gpusched.daemon.launch.ticket import CannotStart, RunTickets
from gpusched.daemon.parts import SchedulerParts
from gpusched.daemon.reload import reread
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs import batch, table_setting
from gpusched.daemon.watches import Stage, WatchRaised
from gpusched.errors import BrokenInvariant, Forbidden, GpuschedError, NotReady
from gpusched.model.batch import Batch
from gpusched.model.commands import Command, Reload
from gpusched.model.execution import EngineEvent, Ticket
from gpusched.model.job import Job, Run
from gpusched.model.mig import MigOrder
from gpusched.model.presets import under_preset
from gpusched.model.states import JobState
from gpusched.model.table_settings import document_of_table
from gpusched.ports import Changes
from gpusched.ports.tables import BATCHES, CLEARANCES, DRAINS, ESTIMATES, MIG_LAYOUTS, TABLE_SETTINGS
from gpusched.scheduler.forecast import StartRange

from . import verbs
from .failures import BATCH_STEP
from .meters import Meters
from .planner_sync import differences, table_differences
from .reconcile import Reconciler
from .run_events import RunEvents

log = getLogger("gpusched.daemon")


_OF_CARDS = frozenset({DRAINS, CLEARANCES, MIG_LAYOUTS})
"""Tables that say which cards may be used."""
SLOW_S = 1.0
"""From this duration on a tick is slow: commands feel instant no more."""


class SlowTick(NamedTuple):
    at: float
    seconds: float
    commit_s: float
    """How long of it the commit took."""


Reply = Callable[[dict[str, Any] | GpuschedError], None]
Asked = tuple[Command, Reply]
Answer = tuple[Reply, dict[str, Any] | GpuschedError]


def _nobody_asked(answer: dict[str, Any] | GpuschedError) -> None:
    """Ignore the answer to a command of the daemon's own: one that fails is given again at the next poll."""


class Scheduler(SchedulerCore):
    """The tick, which advances the core.

    One class: its steps share the transaction, and what has to be done again when it is dropped.
    """

    def __init__(self, parts: SchedulerParts) -> None:
        super().__init__(parts)
        self.ticks = 0
        self.recent_tick_s: deque[float] = deque(maxlen=512)
        self.slow_ticks: deque[SlowTick] = deque(maxlen=64)
        """The newest of those that kept everybody waiting."""
        self.meters = Meters()
        self.trouble: str | None = None
        """Why the last commit failed; None when the table is writable."""
        self._is_table_lost = False
        self._written = parts.settings
        """Settings of the file, those included that apply after a restart."""
        self._step = parts.step
        self._check_every = parts.check_every
        self._queue: deque[tuple[Command | Reload, Reply]] = deque()
        self._backlog: list[EngineEvent] = []
        self._culprit: object = None
        """The event, or the reply of the command, that broke off the tick."""
        self._awaited: dict[int, list[Answer]] = {}
        """Answers to clients that wait until all jobs of a batch are made, by its first id."""
        self._stuck: set[int] = set()
        """Batches whose next piece raised: they are left alone until the next start, by first id."""
        self._is_behind = False
        """The memory may differ from the table, and could not yet be reloaded."""
        self._targets_due = True
        """What GPUs are to be like may have changed."""
        self._reconciler = Reconciler(self._ticket, self.failures, self._must_wait)
        self._carried = Changes()
        self._tickets = RunTickets(self.cluster, self.store)
        self._last_tick_at = -inf
        self._recorded_at: float | None = None
        """Instant of the last tick; None unless all of it was recorded."""
        self._run_events = RunEvents(self.cluster, self.history)
        self._reconcile_releases(self.now())
        self.meters.gpus.hold(self.now(), self.state.holds.values())

    # --- what the edges call --------------------------------------------------------------------

    def submit(self, command: Command | Reload, reply: Reply = _nobody_asked) -> None:
        """Queue a command for the next tick; `reply` is called after its commit."""
        self._queue.append((command, reply))

    def mig_orders(self, node: str) -> tuple[MigOrder, ...]:
        """MIG layouts that a node is to make before its next reading."""
        if not self.is_quiet or node not in (one.node for one in self.state.rows[MIG_LAYOUTS].values()):
            return ()
        known = self.cluster.get(node)
        return () if known is None else self.mig.orders(known, self.state)

    @property
    def has_backlog(self) -> bool:
        """Whether anything needs a retry: events or commands of a failed tick, or the engine."""
        return bool(self._backlog or self._queue or self._is_behind or self._reconciler.is_behind)

    @property
    def has_batches(self) -> bool:
        """Whether jobs of accepted batches are to be made, a piece in each tick."""
        return batch.next_of(self.state, self._stuck) is not None

    @property
    def is_quiet(self) -> bool:
        """Whether the memory matches the table, and nothing awaits a tick."""
        return not (self.has_backlog or self._carried or self.trouble)

    def request_gpu_targets(self) -> None:
        """Have the cards of all nodes made as the recorded runs want them, and all others set back."""
        caps = self.power_caps.wanted(self.state, self.settings)
        mps = self.mps.wanted(self.state, self.settings)
        for node in self.cluster:
            node.want_gpus(caps.get(node.name, {}), mps.get(node.name, {}), self.now())

    def _must_wait(self, run: Run) -> bool:
        """Whether a recorded run must not start before its cards are as it wants them."""
        awaits_cap = self.power_caps.is_awaited(run) and not self.guard.is_left_out(self.power_caps.name)
        return awaits_cap or self.mps.is_awaited(run, self.settings)

    def node_joined(self) -> None:
        """Take a new node of `cluster` into everything that depends on the nodes."""
        self._targets_due = True
        self._update_tracker()
        if self.settings.gpu.speed:
            # The models of its GPUs say how fast the runs there have been.
            self.history.forget()
        self._is_behind |= not self.failures.run("settings", self._adopt_settings)
        self.look_again()

    def go_down(self, grace_s: float) -> None:
        """Start nothing any more, and stop all runs of this machine as in a shutdown of it.

        Args: grace_s: upper limit on the grace of any run.
        """
        self.is_going_down = True
        self.look_again()
        self._reconciler.shutdown = self.head.name, grace_s
        self._reconciler.look_at_all(self.state)
        self.failures.run("reconcile", self._reconcile)

    def stay_up(self) -> None:
        """Resume normal operation after a shutdown was called off."""
        self.is_going_down = False
        self.look_again()
        self._reconciler.shutdown = None

    def next_due(self) -> float | None:
        """Next change by time alone: begin time, backoff, deadline, reservation, timer of an alert."""
        dues = (
            self.state.next_due(),
            self._planner.windows.edge_at,
            self._planner.budgets.edge_at,
            self.watches.next_due(self.state, self.settings),
            self.decide_step.due_at,
        )
        return min((at for at in dues if at is not None), default=None)

    def record_estimates(self, ranges: Mapping[int, StartRange], made_at: float) -> None:
        """Keep the first estimates of jobs that are still pending, to be recorded with the next commit."""
        jobs = self.state.jobs
        waiting = {
            job_id: found
            for job_id, found in ranges.items()
            if job_id in jobs and jobs[job_id].state is JobState.PENDING and not jobs[job_id].run
        }
        self._carried.rows[ESTIMATES].update(self.estimates.add(waiting, made_at))

    def check_planner(self, most_jobs: float = inf) -> list[str]:
        """Compare planner, memory and job table, and repair differences. Returns a sentence for each.

        Args: most_jobs: with more active jobs the table is not read, and only planner and memory are compared.

        Raises: NotReady while the table can be neither read nor written.
        """
        if self.trouble or self._is_behind:
            raise NotReady(self.trouble or "the job table could not be read again yet", "see: gpusched daemon status")
        now = self.now()
        found = differences(self.planner(), self.state, self.snapshot(now))
        if found:
            self._planner.forget()
        self.flush()
        recorded_at = self._recorded_at
        if recorded_at is not None and len(self.state.jobs) <= most_jobs:
            table = DaemonState.load(self.store, recorded_at, self.state_settings())
            table.settle(recorded_at)
            if lost := table_differences(self.state, table):
                found += lost
                self.failures.run("table", self.reload)
        if found:
            self.look_again()
            error = BrokenInvariant(f"its state differed from the job table and was rebuilt: {'; '.join(found)}")
            self.failures.note("planner", error)
        else:
            self.failures.recovered("planner")
        return found

    # --- the tick -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run one tick. A full or broken disk raises nothing: clients get an error, and the tick is retried."""
        began, now = perf_counter(), self._clock.now()
        if now < self._last_tick_at - STEP_S:
            # The clock was set back: judge again what it had made due.
            self._is_behind = True
        self._last_tick_at = now
        self.meters.last_commit_s = 0.0
        failure: Exception | None = None
        tx: TickTransaction | None = None
        try:
            tx, answers = self._record(now)
        except NotReady as error:
            if self.trouble != error.message:
                # Log it once, not with every retry.
                log.error("cannot record: %s; %s", error.message, error.hint)
            self.trouble = error.message
        except Exception as error:
            failure = error
        else:
            # Everything is recorded now: an exception affects only the step that raised.
            self._enter("reply")
            self._answer(tx, answers)
            self._notify_listeners(tx)
        self._enter("reconcile")
        if tx is not None and (tx.changes.runs or tx.changes.jobs):
            self._targets_due = True
        if self._targets_due and not self._is_behind:
            # Before runs start: what they wait for is judged by it.
            self._targets_due = not self.failures.run("GPU targets", self.request_gpu_targets)
        self.failures.run("reconcile", self._reconcile)
        if not self._is_behind:
            self._reconcile_releases(now)
        if not self._is_behind:
            self.failures.run("lost nodes", self.leases.give_up, self.state, self.now())
        self._enter("signal")
        for handle, order in tx.signals if tx is not None else ():
            self.failures.run("signal", self.engine.order, handle, order)
        if failure is not None:
            raise failure
        self.ticks += 1
        self._recorded_at = None if tx is None else now
        if self._check_every and self.ticks % self._check_every == 0 and not (self.trouble or self._is_behind):
            self.failures.run("planner check", self.check_planner)
        self.recent_tick_s.append(perf_counter() - began)
        self.meters.ticked(self.recent_tick_s[-1], now)
        if self.recent_tick_s[-1] >= SLOW_S:
            self.slow_ticks.append(SlowTick(now, self.recent_tick_s[-1], self.meters.last_commit_s))

    def _enter(self, step: str) -> None:
        """Call the hook before a step that follows the commit; an exception there does not stop later steps."""
        self.failures.run(step, self._step, step)

    def _record(self, now: float) -> tuple[TickTransaction, list[Answer]]:
        """Run everything up to the commit. If it raises, nothing was recorded and the memory matches the table."""
        self._need_table()
        while True:
            try:
                return self._record_without_paused(now)
            except WatchRaised:
                # Each failure leaves out one more watch.
                continue

    def _record_without_paused(self, now: float) -> tuple[TickTransaction, list[Answer]]:
        events: list[EngineEvent] = []
        queue: list[Asked] = []
        tx: TickTransaction | None = None
        self._culprit = None
        try:
            if self._is_behind:
                self.reload()
            self._step("collect")
            self.failures.run("engine events", self._receive_events)
            events, self._backlog = self._backlog, []
            queue = self._take_commands()
            tx = self.transaction(now)
            tx.changes, self._carried = self._carried, Changes()
            answers = self._prepare(tx, events, queue)
            self._commit(tx, answers)
            self.history.recorded()
        except WatchRaised:
            self._take_back(tx)
            self._backlog = events + self._backlog
            self._queue.extendleft(reversed(queue))
            self._is_behind = True
            raise
        except NotReady as error:
            self._take_back(tx)
            self._give_up(events, queue, error)
            raise
        except Exception:
            self._take_back(tx)
            hint = "see its log, and with gq what is recorded"
            self._give_up(events, queue, BrokenInvariant("the daemon hit an internal error", hint))
            raise
        return tx, answers

    def _take_back(self, tx: TickTransaction | None) -> None:
        """Undo what a tick that is not recorded has noted outside of what is reloaded."""
        for undo in () if tx is None else tx.take_undo():
            self.failures.run("dropped tick", undo)

    def _need_table(self) -> None:
        """Accept and start nothing while the table is lost. Raises: NotReady.

        The memory stays as it is, since there is nothing to reload it from, and events are kept until the table
        is back. Runs continue; their ends are in the spool too.
        """
        lost = self.store.lost()
        if lost is None:
            if self._is_table_lost:
                log.warning("the job table is back; recording resumes")
                self._is_table_lost, self.trouble = False, None
                self.look_again()
            return
        self._is_table_lost = True
        self.meters.tick_failures += 1
        self.failures.run("engine events", self._receive_events)
        for _, reply in self._take_commands():
            self.failures.run("reply", reply, lost)
        raise lost

    def _receive_events(self) -> None:
        news = self.engine.events()
        self._backlog += [self._reconciler.judge(event) for event in news]
        self.meters.received(news)

    def _reconcile(self) -> None:
        # Only committed rows count, and a memory that could not be reloaded may be ahead of them.
        if not self._is_behind:
            self._reconciler.carry_out(self.engine, self.state, self.settings, self._clock.now())

    def _reconcile_releases(self, now: float) -> None:
        """Have the tracker watch the GPUs of ended runs, according to the committed rows."""
        self.failures.run("releases", self.cluster.reconcile_releases, self.state.releasing, now)

    def _take_commands(self) -> list[Asked]:
        """Take the commands of this tick; new settings come into force before it begins."""
        taken, self._queue = self._queue, deque()
        queue: list[Asked] = []
        for command, reply in taken:
            if isinstance(command, Reload):
                self.failures.run("reply", reply, self._reload_settings(command))
            else:
                queue.append((command, reply))
        return queue

    def _reload_settings(self, command: Reload) -> dict[str, Any] | GpuschedError:
        try:
            reloaded = reread(
                command, self.filed_settings, self.parts.read_settings, self._nodes_under, self.state.jobs.values()
            )
        except GpuschedError as error:
            if not isinstance(error, Forbidden):
                # Refusals go to the audit record, so that they cannot flood the log.
                log.error("the settings were not reloaded: %s", error.message)
            return error
        except Exception as error:
            self.failures.note("settings", error)
            return BrokenInvariant("the daemon hit an internal error; the settings are unchanged", "see its log")
        for key in table_setting.settled(self.filed_settings, reloaded.settings, self.state.rows[TABLE_SETTINGS]):
            del self.state.rows[TABLE_SETTINGS][key]
            self._carried.rows[TABLE_SETTINGS][key] = None
        self.filed_settings = reloaded.settings
        self._take_in_members()
        self.look_again()
        self.signals.audited.send(self.failures, AuditEvent(command.caller, "reload", "the settings"))
        self._written = reloaded.written or reloaded.settings
        table = document_of_table(self.state.rows[TABLE_SETTINGS])
        self.signals.settings_set.send(self.failures, self._written, command.caller, command.what, table)
        if not self.failures.run("settings", self._adopt_settings):
            # Rebuild the state that depends on the old settings.
            self._is_behind = True
        self.signals.settings_changed.send(self.failures, self.settings)
        log.info("the settings were reloaded; changed: %s", ", ".join(reloaded.changed) or "nothing")
        if reloaded.fixed:
            log.warning("these settings apply only after a restart: %s", ", ".join(reloaded.fixed))
        for note in reloaded.notes:
            log.warning("%s", note)
        if self.tariff_problem is None:
            return reloaded.answer()
        # The setting is in force, and its file is not.
        return {**reloaded.answer(), "failed": {"energy.tariff": self.tariff_problem.message}}

    def use_preset(self, name: str) -> None:
        """Switch to another preset between two ticks; explicit settings of the administrator stay."""
        self.filed_settings = under_preset(self.filed_settings, name)
        self._take_in_members()
        self.look_again()
        if not self.failures.run("settings", self._adopt_settings):
            self._is_behind = True

    def _prepare(self, tx: TickTransaction, events: list[EngineEvent], queue: Iterable[Asked]) -> list[Answer]:
        """Process events, commands and time, then plan: collect everything to record, and the answers to clients."""
        self._step("apply")
        for name in filter(None, (self._run_events.node_shut_down(event, self.state) for event in events)):
            # init stops runs by itself before it stops this daemon, or a node's agent.
            self.look_again()
            if name == self.head.name:
                self.is_going_down = True
            else:
                self.cluster[name].go_down()
        for event in events:
            self._culprit = event
            try:
                self._run_events.apply(tx, event)
            except BrokenInvariant as error:
                # One impossible event must not stop the others; a restart delivers it again.
                log.error("skipping event %s: %s", event, error.message)
        self._culprit = None
        if tx.releasing:
            # Before the plan and the commit, so that the reading proceeds in parallel.
            self.signals.gpus_freed.send(self.failures)
        self.watches.carry_out(Stage.BEFORE_COMMANDS, tx)
        # Before the commands, so that cancelling a pipeline includes the fallback of a step that has just failed.
        tx.make_fallbacks()
        if (open_batch := batch.next_of(self.state, self._stuck)) is not None:
            self._culprit = open_batch
            self._step(BATCH_STEP)
            batch.go_on(open_batch, tx)
        answers: list[Answer] = []
        for command, reply in queue:
            self._culprit = reply
            answers.append((reply, self._apply_command(tx, command)))
        self._culprit = None
        is_new_period = self._planner.budgets.edge_at is not None and self._planner.budgets.edge_at <= tx.now
        if self.state.promote(tx.now) or self._planner.windows.have_moved(tx.now) or is_new_period:
            self.look_again()
        tx.settle_dependencies()
        tx.end_too_late()
        tx.make_fallbacks()
        self.watches.carry_out(Stage.BEFORE_PLAN, tx)

        self._step("decide")
        reads_gpus = bool(self.signals.gpus_freed)
        self.decide_step.carry_out(tx, self.extensions, reads_gpus=reads_gpus)
        self.watches.carry_out(Stage.BEFORE_COMMIT, tx)
        return answers

    def _commit(self, tx: TickTransaction, answers: list[Answer]) -> None:
        if not (answers or tx.signals or tx.forgettable or must_record(tx.changes)):
            # A confirmed start needs no separate commit: the spool records it too.
            self._carried = tx.changes
            return
        self._step("commit")
        if tx.changes:
            try:
                with self.meters.commit():
                    self.store.commit(tx.changes)
            except NotReady:
                raise
            except Exception as error:
                if not is_recorded(tx.changes, self.store):
                    raise
                self.failures.note("commit", error)
            else:
                self.failures.recovered("commit")
            self.trouble = None
        self._reconciler.committed(tx.changes, tx.forgettable, self.state)
        if not tx.changes:
            return
        if not tx.changes.rows.keys().isdisjoint(_OF_CARDS):
            self._update_tracker()
        if any(kind == "member" for kind, _ in tx.changes.rows.get(TABLE_SETTINGS, ())):
            self._take_in_members()
            self.look_again()
            if not self.failures.run("settings", self._adopt_settings):
                self._is_behind = True
        self.failures.run("meters", self._count, tx)
        self.take_in_alerts(tx.changes)
        self.failures.run("alert times", self.alert_times.set, tx.changes.jobs.values(), self.state, self.settings)

    def take_in_alerts(self, committed: Changes) -> None:
        """Update the outbox in memory after a commit."""
        if not self.failures.run("alerts", self.alerts.committed, committed):
            self.failures.run("outbox", self.alerts.read_again, self.store)

    # --- behind the commit ----------------------------------------------------------------------

    def _answer(self, tx: TickTransaction, answers: Iterable[Answer]) -> None:
        for event in tx.audit_events:
            self.signals.audited.send(self.failures, event)
        for effect in tx.effects:
            self.signals.machine_set.send(self.failures, effect)
        for caller, what, table in tx.settings_record:
            self.signals.settings_set.send(self.failures, self._written, caller, what, table)
        for reply, answer in answers:
            first_id = answer.get("batch") if isinstance(answer, dict) else None
            if first_id is None:
                self.failures.run("reply", reply, answer)
            else:
                self._awaited.setdefault(first_id, []).append((reply, answer))
        for first_id in tx.changes.rows.get(BATCHES, {}).keys() - self.state.batches.keys():
            for reply, answer in self._awaited.pop(first_id, ()):
                self.failures.run("reply", reply, tx.cut_short.get(first_id, answer))

    def _notify_listeners(self, tx: TickTransaction) -> None:
        # Include runs: a confirmed start changes only the run, and clients that follow the job wait for it.
        of_runs = {run.job_id for run in tx.changes.runs.values()} & self.state.jobs.keys()
        told = {job_id: self.state.jobs[job_id] for job_id in of_runs} | tx.changes.jobs
        if not told:
            return
        self.signals.jobs_changed.send(self.failures, told)
        if self.plugins.names:
            for job_id, job in tx.changes.jobs.items():
                self.failures.run("plug-ins", self.plugins.job_changed, tx.before.get(job_id), job)

    def _count(self, tx: TickTransaction) -> None:
        self.meters.recorded(tx.before, tx.changes.jobs, tx.waited)
        if tx.changes.jobs or tx.changes.runs:
            self.meters.gpus.hold(tx.now, self.state.holds.values(), tx.nodes)

    def _give_up(self, events: list[EngineEvent], queue: list[Asked], error: GpuschedError) -> None:
        """Drop a tick that was not recorded, and reload the memory, which is ahead of the table.

        Its events are applied again, their results stay in the spool, and no client receives a confirmation. If
        a single event or command raised, the others are retried without it.
        """
        self.meters.tick_failures += 1
        culprit = self._culprit
        self._backlog = [event for event in events if event is not culprit] + self._backlog
        if len(self._backlog) < len(events):
            log.error("skipping event %s: it cannot be applied; a restart delivers it again", culprit)
        refused = [asked for asked in queue if asked[1] is culprit] if culprit is not None else [*queue, *self._queue]
        if culprit is None:
            self._queue.clear()
        else:
            self._queue.extendleft(asked for asked in reversed(queue) if asked[1] is not culprit)
        for _, reply in refused:
            self.failures.run("reply", reply, error)
        if isinstance(culprit, Batch) and not isinstance(error, NotReady):
            self._leave_alone(culprit)
        self._is_behind = True
        self.failures.run("table", self.reload)

    def _leave_alone(self, stuck: Batch) -> None:
        """Make no more jobs of a batch whose next piece raised; a restart tries again."""
        self._stuck.add(stuck.first_id)
        text = f"{stuck.left} of {stuck.shown_ids}, a batch that was accepted, could not be made"
        error = BrokenInvariant(text, "see the daemon's log; the next start of the daemon tries again")
        self.failures.note("batch", error)
        for reply, _ in self._awaited.pop(stuck.first_id, ()):
            self.failures.run("reply", reply, error)

    def flush(self) -> None:
        """Record changes carried over from earlier ticks; called at each poll and at exit."""
        if self._carried and self.trouble is None:
            with self.meters.commit():
                self.store.commit(self._carried)
            self._carried = Changes()

    def reload(self) -> None:
        """Reload the memory, for example after another process wrote to the table."""
        self._is_behind = self._targets_due = True
        self._recorded_at = None
        self.look_again()
        self.decide_step.due_at = None
        if (lost := self.store.lost()) is not None:
            # A lost table may still be readable, but is not up to date.
            raise lost
        self._carried = Changes()
        self.estimates.forget()
        self.state = self._load_state()
        self._take_in_members()
        self._update_tracker()
        self.alerts.read_again(self.store)
        self.watches.reload(self.state, self.settings)
        self.meters.gpus.hold(self._clock.now(), self.state.holds.values())
        self._reconcile_releases(self._clock.now())
        self._reconciler.look_at_all(self.state)
        self._is_behind = False

    # --- apply ----------------------------------------------------------------------------------

    def _apply_command(self, tx: TickTransaction, command: Command) -> dict[str, Any] | GpuschedError:
        before = len(tx.audit_events)
        try:
            return verbs.apply(command, tx)
        except GpuschedError as error:
            # Drop the audit events of actions that were refused.
            tx.audit_events[before:] = [event for event in tx.audit_events[before:] if event.refused is not None]
            return error

    def _ticket(self, job: Job, run: Run) -> Ticket:
        """Everything the engine needs to start a run. Raises: CannotStart."""
        if (why_not := self.mps.refusal(run, self.settings, self._clock.now())) is not None:
            raise CannotStart(why_not)
        return self._tickets.make(job, run, self.settings, self.containers)
