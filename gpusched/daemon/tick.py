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
from typing import Any

from gpusched.clock import STEP_S
from gpusched.daemon.commit import AuditEvent, TickTransaction, is_recorded, must_record
from gpusched.daemon.core import Scheduler
from gpusched.daemon.launch.ticket import CannotStart, RunTickets
from gpusched.daemon.reload import reread
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs import batch, table_setting
from gpusched.daemon.watches import Stage, WatchRaised
from gpusched.errors import BrokenInvariant, Forbidden, GpuschedError, NotReady
from gpusched.model.batch import Batch
from gpusched.model.commands import Command, Reload
from gpusched.model.execution import EngineEvent, RunEnded, Ticket
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
from .planner_sync import differences, table_differences
from .reconcile import Reconciler
from .run_events import RunEvents

log = getLogger("gpusched.daemon")


_OF_CARDS = frozenset({DRAINS, CLEARANCES, MIG_LAYOUTS})
"""Tables that say which cards may be used."""

Reply = Callable[[dict[str, Any] | GpuschedError], None]
Asked = tuple[Command, Reply]
Answer = tuple[Reply, dict[str, Any] | GpuschedError]


def _nobody_asked(answer: dict[str, Any] | GpuschedError) -> None:
    """Ignore the answer to a command of the daemon's own: one that fails is given again at the next poll."""


class Ticker:
    """Advances a scheduler tick by tick. Its settings and its memory are replaced under every step: ask it for them.

    One class: its steps share the transaction, and what has to be done again when it is dropped.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        parts = scheduler.parts
        self._now, self._store, self._cluster = parts.clock.now, parts.store, parts.cluster
        self._failures, self._signals, self._watches = scheduler.failures, scheduler.signals, scheduler.watches
        self._meters = scheduler.meters
        self.ticks = 0
        self._is_table_lost = False
        self._written = parts.settings
        """Settings of the file, those included that apply after a restart."""
        self._step = parts.step
        self.before_starts: Callable[[], None] | None = None
        """Called when a tick has been recorded, and its runs are about to be started."""
        self._check_every = parts.check_every
        self._queue: deque[tuple[Command | Reload, Reply]] = deque()
        self._backlog: list[EngineEvent] = []
        self._leaving: dict[str, Run] = {}
        """Runs whose ends the next tick applies, and whose GPUs are read meanwhile."""
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
        self._reconciler = Reconciler(self._ticket, scheduler.failures, self._must_wait)
        self._carried = Changes()
        self.tickets = RunTickets(parts.cluster, parts.store)
        self._last_tick_at = -inf
        self._recorded_at: float | None = None
        """Instant of the last tick; None unless all of it was recorded."""
        self._run_events = RunEvents(parts.cluster, scheduler.history)
        self._reconcile_releases(self._now())
        self._meters.gpus.hold(self._now(), scheduler.state.holds.values())

    # --- what the edges call --------------------------------------------------------------------

    def submit(self, command: Command | Reload, reply: Reply = _nobody_asked) -> None:
        """Queue a command for the next tick; `reply` is called after its commit."""
        self._queue.append((command, reply))

    def take_news(self) -> bool:
        """Take in ahead of the next tick what the engine reports; return whether runs on GPUs of this machine ended.

        A reading that begins now and arrives before that tick lets it record their ends and reuse their GPUs at once.
        """
        self._failures.run("engine events", self._receive_events)
        has_more = False
        for event in self._backlog:
            if not isinstance(event, RunEnded) or event.start_at is None or event.run in self._leaving:
                continue
            run = self.scheduler.state.open_runs.get(event.run)
            if run is not None and self._cluster.head.expect_release(run, self._now()):
                self._leaving[run.id] = run
                has_more = True
        return has_more

    @property
    def has_news(self) -> bool:
        """Whether anything that the engine has reported awaits the next tick."""
        return bool(self._backlog)

    @property
    def awaits_reading(self) -> bool:
        """Whether the next tick applies ends of runs whose GPUs no reading has shown to be clean yet."""
        return not all(map(self._cluster.head.tracker.is_proven, self._leaving.values()))

    def mig_orders(self, node: str) -> tuple[MigOrder, ...]:
        """MIG layouts that a node is to make before its next reading."""
        scheduler = self.scheduler
        if not self.is_quiet or node not in (one.node for one in scheduler.state.rows[MIG_LAYOUTS].values()):
            return ()
        known = self._cluster.get(node)
        return () if known is None else scheduler.mig.orders(known, scheduler.state)

    @property
    def has_backlog(self) -> bool:
        """Whether anything needs a retry: events or commands of a failed tick, or the engine."""
        return bool(self._backlog or self._queue or self._is_behind or self._reconciler.is_behind)

    @property
    def has_batches(self) -> bool:
        """Whether jobs of accepted batches are to be made, a piece in each tick."""
        return batch.next_of(self.scheduler.state, self._stuck) is not None

    @property
    def is_quiet(self) -> bool:
        """Whether the memory matches the table, and nothing awaits a tick."""
        return not (self.has_backlog or self._carried or self.scheduler.trouble)

    @property
    def has_commands(self) -> bool:
        """Whether clients await the next tick."""
        return bool(self._queue)

    def request_gpu_targets(self) -> None:
        """Have the cards of all nodes made as the recorded runs want them, and all others set back."""
        scheduler = self.scheduler
        caps = scheduler.power_caps.wanted(scheduler.state, scheduler.settings)
        mps = scheduler.mps.wanted(scheduler.state, scheduler.settings)
        for node in self._cluster:
            node.want_gpus(caps.get(node.name, {}), mps.get(node.name, {}), self._now())

    def _must_wait(self, run: Run) -> bool:
        """Whether a recorded run must not start before its cards are as it wants them."""
        scheduler = self.scheduler
        awaits_cap = scheduler.power_caps.is_awaited(run) and not scheduler.guard.is_left_out(scheduler.power_caps.name)
        return awaits_cap or scheduler.mps.is_awaited(run, scheduler.settings)

    def node_joined(self) -> None:
        """Take a new node of `cluster` into everything that depends on the nodes."""
        scheduler = self.scheduler
        self._targets_due = True
        scheduler.update_tracker()
        if scheduler.settings.gpu.speed:
            # The models of its GPUs say how fast the runs there have been.
            scheduler.history.forget()
        self._is_behind |= not scheduler.follow_settings()

    def go_down(self, grace_s: float) -> None:
        """Start nothing any more, and stop all runs of this machine as in a shutdown of it.

        Args: grace_s: upper limit on the grace of any run.
        """
        scheduler = self.scheduler
        scheduler.is_going_down = True
        scheduler.look_again()
        self._reconciler.shutdown = scheduler.head.name, grace_s
        self._reconciler.look_at_all(scheduler.state)
        self._failures.run("reconcile", self._reconcile)

    def stay_up(self) -> None:
        """Resume normal operation after a shutdown was called off."""
        self.scheduler.is_going_down = False
        self.scheduler.look_again()
        self._reconciler.shutdown = None

    def next_due(self) -> float | None:
        """Next change by time alone: begin time, backoff, deadline, reservation, timer of an alert."""
        scheduler = self.scheduler
        dues = (
            scheduler.state.next_due(),
            scheduler.planner_sync.windows.edge_at,
            scheduler.planner_sync.budgets.edge_at,
            self._watches.next_due(scheduler.state, scheduler.settings),
            scheduler.decide_step.due_at,
        )
        return min((at for at in dues if at is not None), default=None)

    def record_estimates(self, ranges: Mapping[int, StartRange], made_at: float) -> None:
        """Keep the first estimates of jobs that are still pending, to be recorded with the next commit."""
        jobs = self.scheduler.state.jobs
        waiting = {
            job_id: found
            for job_id, found in ranges.items()
            if job_id in jobs and jobs[job_id].state is JobState.PENDING and not jobs[job_id].run
        }
        self._carried.rows[ESTIMATES].update(self.scheduler.estimates.add(waiting, made_at))

    def check_planner(self, most_jobs: float = inf) -> list[str]:
        """Compare planner, memory and job table, and repair differences. Returns a sentence for each.

        Args: most_jobs: with more active jobs the table is not read, and only planner and memory are compared.

        Raises: NotReady while the table can be neither read nor written.
        """
        scheduler = self.scheduler
        if scheduler.trouble or self._is_behind:
            raise NotReady(
                scheduler.trouble or "the job table could not be read again yet", "see: gpusched daemon status"
            )
        now = self._now()
        found = differences(scheduler.planner(), scheduler.state, scheduler.snapshot(now))
        if found:
            scheduler.planner_sync.forget()
        self.flush()
        recorded_at = self._recorded_at
        if recorded_at is not None and len(scheduler.state.jobs) <= most_jobs:
            table = DaemonState.load(self._store, recorded_at, scheduler.state_settings())
            table.settle(recorded_at)
            if lost := table_differences(scheduler.state, table):
                found += lost
                self._failures.run("table", self.reload)
        if found:
            scheduler.look_again()
            error = BrokenInvariant(f"its state differed from the job table and was rebuilt: {'; '.join(found)}")
            self._failures.note("planner", error)
        else:
            self._failures.recovered("planner")
        return found

    # --- the tick -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run one tick. A full or broken disk raises nothing: clients get an error, and the tick is retried."""
        scheduler = self.scheduler
        began, now = perf_counter(), self._now()
        if now < self._last_tick_at - STEP_S:
            # The clock was set back: judge again what it had made due.
            self._is_behind = True
        self._last_tick_at = now
        self._meters.last_commit_s = 0.0
        failure: Exception | None = None
        tx: TickTransaction | None = None
        try:
            tx, answers = self._record(now)
        except NotReady as error:
            if scheduler.trouble != error.message:
                # Log it once, not with every retry.
                log.error("cannot record: %s; %s", error.message, error.hint)
            scheduler.trouble = error.message
        except Exception as error:
            failure = error
        else:
            # Everything is recorded now: an exception affects only the step that raised.
            self._enter("reply")
            self._answer(tx, answers)
            self._notify_listeners(tx)
        if tx is not None and self.before_starts is not None:
            self._failures.run("early news", self.before_starts)
        self._enter("reconcile")
        if tx is not None and (tx.changes.runs or tx.changes.jobs):
            self._targets_due = True
        if self._targets_due and not self._is_behind:
            # Before runs start: what they wait for is judged by it.
            self._targets_due = not self._failures.run("GPU targets", self.request_gpu_targets)
        self._failures.run("reconcile", self._reconcile)
        if not self._is_behind:
            self._reconcile_releases(now)
        if not self._is_behind:
            self._failures.run("lost nodes", scheduler.leases.give_up, scheduler.state, self._now())
        self._enter("signal")
        for handle, order in tx.signals if tx is not None else ():
            self._failures.run("signal", scheduler.engine.order, handle, order)
        if failure is not None:
            raise failure
        self.ticks += 1
        self._recorded_at = None if tx is None else now
        if self._check_every and self.ticks % self._check_every == 0 and not (scheduler.trouble or self._is_behind):
            self._failures.run("planner check", self.check_planner)
        self._meters.ticked(perf_counter() - began, now)

    def _enter(self, step: str) -> None:
        """Call the hook before a step that follows the commit; an exception there does not stop later steps."""
        self._failures.run(step, self._step, step)

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
            if not self._leaving:
                # Else GPUs were read for the ends that are known: one that is told of now is to wait for a reading.
                self._failures.run("engine events", self._receive_events)
            events, self._backlog, self._leaving = self._backlog, [], {}
            queue = self._take_commands()
            tx = self.scheduler.transaction(now)
            tx.changes, self._carried = self._carried, Changes()
            answers = self._prepare(tx, events, queue)
            self._commit(tx, answers)
            self.scheduler.history.recorded()
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
            self._failures.run("dropped tick", undo)

    def _need_table(self) -> None:
        """Accept and start nothing while the table is lost. Raises: NotReady.

        The memory stays as it is, since there is nothing to reload it from, and events are kept until the table
        is back. Runs continue; their ends are in the spool too.
        """
        lost = self._store.lost()
        if lost is None:
            if self._is_table_lost:
                log.warning("the job table is back; recording resumes")
                self._is_table_lost, self.scheduler.trouble = False, None
                self.scheduler.look_again()
            return
        self._is_table_lost = True
        self._meters.tick_failures += 1
        self._failures.run("engine events", self._receive_events)
        for _, reply in self._take_commands():
            self._failures.run("reply", reply, lost)
        raise lost

    def _receive_events(self) -> None:
        news = self.scheduler.engine.events()
        self._backlog += [self._reconciler.judge(event) for event in news]
        self._meters.received(news)

    def _reconcile(self) -> None:
        # Only committed rows count, and a memory that could not be reloaded may be ahead of them.
        if not self._is_behind:
            scheduler = self.scheduler
            self._reconciler.carry_out(scheduler.engine, scheduler.state, scheduler.settings, self._now())

    def _reconcile_releases(self, now: float) -> None:
        """Have the tracker watch the GPUs of ended runs, according to the committed rows."""
        self._failures.run("releases", self._cluster.reconcile_releases, self.scheduler.state.releasing, now)

    def _take_commands(self) -> list[Asked]:
        """Take the commands of this tick; new settings come into force before it begins."""
        taken, self._queue = self._queue, deque()
        queue: list[Asked] = []
        for command, reply in taken:
            if isinstance(command, Reload):
                self._failures.run("reply", reply, self._reload_settings(command))
            else:
                queue.append((command, reply))
        return queue

    def _reload_settings(self, command: Reload) -> dict[str, Any] | GpuschedError:
        scheduler = self.scheduler
        try:
            reloaded = reread(
                command,
                scheduler.filed_settings,
                scheduler.parts.read_settings,
                scheduler.nodes_under,
                scheduler.state.jobs.values(),
            )
        except GpuschedError as error:
            if not isinstance(error, Forbidden):
                # Refusals go to the audit record, so that they cannot flood the log.
                log.error("the settings were not reloaded: %s", error.message)
            return error
        except Exception as error:
            self._failures.note("settings", error)
            return BrokenInvariant("the daemon hit an internal error; the settings are unchanged", "see its log")
        for key in table_setting.settled(
            scheduler.filed_settings, reloaded.settings, scheduler.state.rows[TABLE_SETTINGS]
        ):
            del scheduler.state.rows[TABLE_SETTINGS][key]
            self._carried.rows[TABLE_SETTINGS][key] = None
        scheduler.filed_settings = reloaded.settings
        # If they cannot be followed, what depends on the old ones is rebuilt.
        self._is_behind |= not scheduler.follow_settings()
        self._signals.audited.send(self._failures, AuditEvent(command.caller, "reload", "the settings"))
        self._written = reloaded.written or reloaded.settings
        table = document_of_table(scheduler.state.rows[TABLE_SETTINGS])
        self._signals.settings_set.send(self._failures, self._written, command.caller, command.what, table)
        self._signals.settings_changed.send(self._failures, scheduler.settings)
        log.info("the settings were reloaded; changed: %s", ", ".join(reloaded.changed) or "nothing")
        if reloaded.fixed:
            log.warning("these settings apply only after a restart: %s", ", ".join(reloaded.fixed))
        for note in reloaded.notes:
            log.warning("%s", note)
        if scheduler.tariff_problem is None:
            return reloaded.answer()
        # The setting is in force, and its file is not.
        return {**reloaded.answer(), "failed": {"energy.tariff": scheduler.tariff_problem.message}}

    def use_preset(self, name: str) -> None:
        """Switch to another preset between two ticks; explicit settings of the administrator stay."""
        scheduler = self.scheduler
        scheduler.filed_settings = under_preset(scheduler.filed_settings, name)
        self._is_behind |= not scheduler.follow_settings()

    def _prepare(self, tx: TickTransaction, events: list[EngineEvent], queue: Iterable[Asked]) -> list[Answer]:
        """Process events, commands and time, then plan: collect everything to record, and the answers to clients."""
        scheduler = self.scheduler
        self._step("apply")
        for name in filter(None, (self._run_events.node_shut_down(event, tx.state) for event in events)):
            # init stops runs by itself before it stops this daemon, or a node's agent.
            scheduler.look_again()
            if name == scheduler.head.name:
                scheduler.is_going_down = True
            else:
                self._cluster[name].go_down()
        ends = {event.run for event in events if isinstance(event, RunEnded)}
        for event in events:
            self._culprit = event
            try:
                self._run_events.apply(tx, event, is_over=event.run in ends)
            except BrokenInvariant as error:
                if (begun := tx.state.open_runs.get(event.run)) is not None:
                    tx.put_run(begun)
                # One impossible event must not stop the others; a restart delivers it again.
                log.error("skipping event %s: %s", event, error.message)
        self._culprit = None
        self._watches.carry_out(Stage.BEFORE_COMMANDS, tx)
        if tx.releasing:
            # Before the plan and the commit, so that the reading proceeds in parallel.
            self._signals.gpus_freed.send(self._failures)
        # Before the commands, so that cancelling a pipeline includes the fallback of a step that has just failed.
        tx.make_fallbacks()
        if (open_batch := batch.next_of(scheduler.state, self._stuck)) is not None:
            self._culprit = open_batch
            self._step(BATCH_STEP)
            batch.go_on(open_batch, tx)
        answers: list[Answer] = []
        for command, reply in queue:
            self._culprit = reply
            answers.append((reply, self._apply_command(tx, command)))
        self._culprit = None
        known = scheduler.planner_sync
        is_new_period = known.budgets.edge_at is not None and known.budgets.edge_at <= tx.now
        if tx.state.promote(tx.now) or known.windows.have_moved(tx.now) or is_new_period:
            scheduler.look_again()
        tx.settle_dependencies()
        tx.end_too_late()
        tx.make_fallbacks()
        self._watches.carry_out(Stage.BEFORE_PLAN, tx)

        self._step("decide")
        reads_gpus = bool(self._signals.gpus_freed)
        scheduler.decide_step.carry_out(tx, scheduler.extensions, reads_gpus=reads_gpus)
        self._watches.carry_out(Stage.BEFORE_COMMIT, tx)
        return answers

    def _commit(self, tx: TickTransaction, answers: list[Answer]) -> None:
        scheduler = self.scheduler
        if not (answers or tx.signals or tx.forgettable or must_record(tx.changes)):
            # A confirmed start needs no separate commit: the spool records it too.
            self._carried = tx.changes
            return
        self._step("commit")
        if tx.changes:
            try:
                with self._meters.commit():
                    self._store.commit(tx.changes)
            except NotReady:
                raise
            except Exception as error:
                if not is_recorded(tx.changes, self._store):
                    raise
                self._failures.note("commit", error)
            else:
                self._failures.recovered("commit")
            scheduler.trouble = None
        self._reconciler.committed(tx.changes, tx.forgettable, scheduler.state)
        if not tx.changes:
            return
        if not tx.changes.rows.keys().isdisjoint(_OF_CARDS):
            scheduler.update_tracker()
        if any(kind == "member" for kind, _ in tx.changes.rows.get(TABLE_SETTINGS, ())):
            self._is_behind |= not scheduler.follow_settings()
        self._failures.run("meters", self._count, tx)
        scheduler.take_in_alerts(tx.changes)
        self._failures.run(
            "alert times", scheduler.alert_times.set, tx.changes.jobs.values(), tx.state, scheduler.settings
        )

    # --- behind the commit ----------------------------------------------------------------------

    def _answer(self, tx: TickTransaction, answers: Iterable[Answer]) -> None:
        for event in tx.audit_events:
            self._signals.audited.send(self._failures, event)
        for effect in tx.effects:
            self._signals.machine_set.send(self._failures, effect)
        for caller, what, table in tx.settings_record:
            self._signals.settings_set.send(self._failures, self._written, caller, what, table)
        for reply, answer in answers:
            first_id = answer.get("batch") if isinstance(answer, dict) else None
            if first_id is None:
                self._failures.run("reply", reply, answer)
            else:
                self._awaited.setdefault(first_id, []).append((reply, answer))
        for first_id in tx.changes.rows.get(BATCHES, {}).keys() - self.scheduler.state.batches.keys():
            for reply, answer in self._awaited.pop(first_id, ()):
                self._failures.run("reply", reply, tx.cut_short.get(first_id, answer))

    def _notify_listeners(self, tx: TickTransaction) -> None:
        # Include runs: a confirmed start changes only the run, and clients that follow the job wait for it.
        scheduler = self.scheduler
        of_runs = {run.job_id for run in tx.changes.runs.values()} & scheduler.state.jobs.keys()
        told = {job_id: scheduler.state.jobs[job_id] for job_id in of_runs} | tx.changes.jobs
        if not told:
            return
        self._signals.jobs_changed.send(self._failures, told)
        if scheduler.plugins.names:
            for job_id, job in tx.changes.jobs.items():
                self._failures.run("plug-ins", scheduler.plugins.job_changed, tx.before.get(job_id), job)

    def _count(self, tx: TickTransaction) -> None:
        self._meters.recorded(tx.before, tx.changes.jobs, tx.waited)
        if tx.changes.jobs or tx.changes.runs:
            self._meters.gpus.hold(tx.now, self.scheduler.state.holds.values(), tx.nodes)

    def _give_up(self, events: list[EngineEvent], queue: list[Asked], error: GpuschedError) -> None:
        """Drop a tick that was not recorded, and reload the memory, which is ahead of the table.

        Its events are applied again, their results stay in the spool, and no client receives a confirmation. If
        a single event or command raised, the others are retried without it.
        """
        self._meters.tick_failures += 1
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
            self._failures.run("reply", reply, error)
        if isinstance(culprit, Batch) and not isinstance(error, NotReady):
            self._leave_alone(culprit)
        self._is_behind = True
        self._failures.run("table", self.reload)

    def _leave_alone(self, stuck: Batch) -> None:
        """Make no more jobs of a batch whose next piece raised; a restart tries again."""
        self._stuck.add(stuck.first_id)
        text = f"{stuck.left} of {stuck.shown_ids}, a batch that was accepted, could not be made"
        error = BrokenInvariant(text, "see the daemon's log; the next start of the daemon tries again")
        self._failures.note("batch", error)
        for reply, _ in self._awaited.pop(stuck.first_id, ()):
            self._failures.run("reply", reply, error)

    def flush(self) -> None:
        """Record changes carried over from earlier ticks; called at each poll and at exit."""
        if self._carried and self.scheduler.trouble is None:
            with self._meters.commit():
                self._store.commit(self._carried)
            self._carried = Changes()

    def reload(self) -> None:
        """Reload the memory, for example after another process wrote to the table."""
        scheduler = self.scheduler
        self._is_behind = self._targets_due = True
        self._recorded_at = None
        scheduler.look_again()
        scheduler.decide_step.due_at = None
        if (lost := self._store.lost()) is not None:
            # A lost table may still be readable, but is not up to date.
            raise lost
        self._carried = Changes()
        scheduler.load_again()
        self._meters.gpus.hold(self._now(), scheduler.state.holds.values())
        self._reconcile_releases(self._now())
        self._reconciler.look_at_all(scheduler.state)
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
        scheduler = self.scheduler
        if (why_not := scheduler.mps.refusal(run, scheduler.settings, self._now())) is not None:
            raise CannotStart(why_not)
        return self.tickets.make(job, run, scheduler.settings, scheduler.containers, scheduler.handover)
