"""The daemon as its HTTP API sees it."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpusched.access import is_admin
from gpusched.client import reach
from gpusched.daemon.forecast import QueueForecast, StartsQuestion, dry_run, limit_hint
from gpusched.daemon.leanings import leanings
from gpusched.daemon.meters import page
from gpusched.daemon.owner_reader import OwnerReader
from gpusched.daemon.preset import PresetChoice, preset_choice
from gpusched.daemon.watch.burst import burst_text
from gpusched.daemon.watch.foreign import ForeignProcessWatch
from gpusched.engine.attach_protocol import QUERY, STATUS, frame, take_frames
from gpusched.engine.linux import proctree
from gpusched.engine.remote.messages import AttachCall, OutputWanted
from gpusched.engine.spool import attach_path, door_path
from gpusched.engine.step_usage import MeasuringEngine
from gpusched.errors import GpuschedError
from gpusched.gpu.usage import enforcement
from gpusched.lifecycle.foreign import OwnerNotes
from gpusched.lifecycle.output_paths import OutputFile
from gpusched.model.checks import Check
from gpusched.model.cluster import GpuSample
from gpusched.model.commands import AdoptableProcess, Caller, Command, Reload
from gpusched.model.job import ClientProcess, Job, JobSpec, Run, run_id
from gpusched.model.leaning import LeaningReason
from gpusched.model.metrics import Page
from gpusched.model.progress import ShownProgress
from gpusched.model.snapshot import VramSeen
from gpusched.model.step import TaskUsage
from gpusched.model.value import replace
from gpusched.ports.daemon import DaemonHealth, Forecast, JobOutlook, LimitHint, RunFindings
from gpusched.predict.predictor import ExpectedRunTime
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.forecast import StartRange
from gpusched.scheduler.whatif import Left, starts_without
from gpusched.scheduler.who_preempts import why_it_preempts_nothing
from gpusched.store.series import SeriesFile

from .audit import Audit
from .checks import broken_promises, daemon_checks, failing_steps
from .commit import AuditEvent
from .launch.limits import isolation
from .node_reach import PIECE_BYTES, NodeReach, RunStream
from .settings_log import SettingsLog
from .tick import Ticker
from .verbs import adopt
from .watch.progress import ProgressReader
from .watch.run_reports import RunReports
from .watch.series import SeriesRecorder

OUTLOOK_S = 10.0
"""How old the present that forecasts share may be, though nothing has changed: runs last longer meanwhile."""
LONG_QUEUE = 1000
"""With this many pending jobs, starts may be those of an earlier state: each submission makes a new one."""
STARTS_SHARE = 0.05
"""Of a core: what working out starts in a long queue may take. An answer is given again for that long, at most for
`OUTLOOK_S`, to whoever asks about jobs that were in the queue already."""
STALE_S = 30.0
"""And for this long while a new one is worked out for whoever asks next: a stale answer beats a late one."""
_PLACES = 5000
"""Places at the front of the queue that are looked up."""
ANSWER_S = 2.0
"""Time limit for an answer: a supervisor answers within milliseconds, unless it was stopped."""


class DaemonFacade:
    """One daemon. One class: it has a method for each question of the API.

    All calls are on the daemon's thread. Slow queries return a function without arguments that touches nothing but
    frozen values, so that another thread can compute the answer. A personal daemon has no audit record and messages no
    owners of foreign processes; a daemon in tests has no files to look at.
    """

    def __init__(
        self,
        ticker: Ticker,
        *,
        wake: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
        facts: Mapping[str, Any] | None = None,
        presets: PresetChoice | None = None,
        progress: ProgressReader | None = None,
        reports: RunReports | None = None,
        audit: Audit | None = None,
        foreign: ForeignProcessWatch | None = None,
        serves_all: bool = False,
        reach: NodeReach | None = None,
        series: SeriesRecorder | None = None,
        settings_log: SettingsLog | None = None,
    ) -> None:
        self.scheduler = scheduler = ticker.scheduler
        self._ticker = ticker
        self.series = SeriesRecorder(scheduler, SeriesFile(None)) if series is None else series
        self.stop = stop
        self.facts: Mapping[str, Any] = {} if facts is None else facts
        self.serves_all = serves_all
        self._wake = wake
        self.presets = preset_choice(ticker) if presets is None else presets
        self._progress = progress
        self._reports = reports
        self._audit = audit
        self._settings_log = settings_log
        self._foreign = foreign
        self._reach = NodeReach({}) if reach is None else reach
        self._owner_reader = OwnerReader()
        self._outlook: QueueForecast | None = None
        self._outlook_of: tuple[object, ...] = ()
        self._told: QueueForecast | None = None
        """The present of which starts were last told."""
        self._telling_s = 0.0
        """Processor time that took."""
        self._next: QueueForecast | None = None
        """The present that is being worked out to be told next."""
        self._commits = 0
        scheduler.signals.jobs_changed.connect(self._count_commit)

    # --- commands and events ----------------------------------------------------------------------

    async def ask(self, command: Command | Reload) -> dict[str, Any]:
        """Apply a command in the next tick; return after its commit. Raises: the command's exceptions."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def reply(answer: dict[str, Any] | GpuschedError) -> None:
            if future.done():
                return
            if isinstance(answer, GpuschedError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self._ticker.submit(command, reply)
        self._wake()
        return await future

    def audit(self, caller: Caller, what: str, target: str) -> None:
        """Record an action that no command records."""
        self.scheduler.signals.audited.send(self.scheduler.failures, AuditEvent(caller, what, target))

    def audit_refusal(self, caller: Caller, what: str, why: str) -> None:
        """Record a refused action."""
        if self._audit is not None:
            self._audit.refused(caller, what, why)

    # --- about jobs -------------------------------------------------------------------------------

    async def refresh_progress(self, jobs: Iterable[Job]) -> None:
        """Read the current progress of these running jobs."""
        if self._progress is not None:
            await self._progress.refresh(jobs, self.scheduler.state.open_runs)

    def progress_of(self, job: Job) -> ShownProgress | None:
        """Progress at the last look; no end is expected of a suspended job, nor by reports that were wrong."""
        shown = None if self._progress is None else self._progress.of(run_id(job.id, job.run))
        if shown is None or shown.eta_at is None:
            return shown
        is_unknown = job.suspended_at is not None or (self._reports is not None and self._reports.is_refuted(job))
        return replace(shown, eta_at=None) if is_unknown else shown

    def findings(self, run: Run) -> RunFindings:
        """Findings of the last GPU reading about an open run."""
        scheduler, settings, now = self.scheduler, self.scheduler.settings, self.scheduler.now()
        job = scheduler.state.jobs.get(run.job_id)
        return RunFindings(
            scheduler.overuse.facts(run, scheduler.cluster.samples(), settings),
            scheduler.overuse.why(run, settings, now),
            scheduler.intruders.unbooked(run.id),
            scheduler.intruders.on(run),
            None if job is None else scheduler.idle.why(run, job, settings, now),
        )

    async def read_output(
        self, job: Job, run: Run, file: OutputFile, *, is_error: bool, cursor: str, lines: int | None, wait_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """A piece of what a run on another node wrote, and where it ends. Raises: NotReady, Refused, TooMany."""
        wanted = OutputWanted(
            run.id,
            job.user,
            job.uid,
            file.path,
            keep=job.spec.launch.kept_files,
            is_error=is_error,
            cursor=cursor,
            lines=lines,
            most=PIECE_BYTES,
            wait_s=wait_s,
        )
        piece, data = await self._reach.output(file.node, wanted)
        facts = {"cursor": piece.cursor, "is_found": piece.is_found, "is_skipped": piece.is_skipped, "path": piece.path}
        return facts, data

    async def task_usage(self, run: Run, node: str) -> tuple[TaskUsage, ...]:
        """What the tasks of a run's steps use on one of its nodes now. Raises: NotReady, TooMany."""
        if node != self.scheduler.head.name:
            return await self._reach.usage(node, run.id)
        engine = self.scheduler.engine
        return engine.task_usage(run.id) if isinstance(engine, MeasuringEngine) else ()

    async def read_own_output(self, job: Job, path: str, at: int, most: int) -> tuple[int, bytes] | None:
        """Size and bytes of a file of a run on this node; None if there is none. Raises: Refused, TooMany."""
        return await self._owner_reader.output(job, path, at, most)

    async def read_snapshot(self, job: Job, at: int) -> bytes:
        """A piece of the archive of a job's snapshot. Raises: NotFound, Refused, TooMany."""
        return await self._owner_reader.snapshot_piece(job, at)

    def attach_path(self, job: Job) -> str:
        """Path of the attach socket of a foreground job's current run."""
        return attach_path(self.scheduler.head.site.spool, run_id(job.id, job.run))

    def client_path(self, run: Run, node: str, token: str = "") -> str:
        """Path, on a node, of a socket of a run's part there: with a token the door that an `EnterOrder` opens, else
        that of its foreground.
        """
        spool = self.scheduler.cluster[node].site.spool
        return door_path(spool, run.id, token) if token else attach_path(spool, run.id)

    def call_run(self, job: Job, run: Run, node: str, token: str, *, is_return: bool) -> RunStream:
        """Call the part of a run on a node, wherever that is, as its user. Raises: NotReady, TooMany."""
        return self._reach.call_run(node, AttachCall(run.id, job.user, job.uid, token, is_return))

    async def foreground_status(self, job: Job) -> tuple[float | None, float | None, float | None] | None:
        """Client pid, attach time and lease end as the run reports them; None without an answer."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            try:
                reach(sock, self.attach_path(job))
                return await asyncio.wait_for(_query_status(sock), ANSWER_S)
            except (OSError, ValueError, asyncio.TimeoutError):
                return None

    def is_alive(self, client: ClientProcess) -> bool:
        """Whether the process that submitted a foreground job is alive."""
        return proctree.lives(client.pid, client.start_ticks)

    def client_process(self, pid: int) -> ClientProcess:
        """Identity of the process that submits a foreground job."""
        found = proctree.read_process(pid)
        # The process may just have been killed; no process has start time 0.
        return ClientProcess(pid, 0 if found is None else found.start_ticks, self.scheduler.head.host.boot_id)

    def run_of_process(self, pid: int) -> str | None:
        """Handle of the run that a process belongs to."""
        return self.scheduler.engine.owners([pid]).get(pid)

    # --- about what is to come --------------------------------------------------------------------

    def forecast(self, spec: JobSpec, caller: Caller, key_again: str) -> Callable[[], Forecast]:
        """Forecast what a submission would do now."""
        return dry_run(spec, caller, self.scheduler, key_again)

    def _count_commit(self, jobs: Mapping[int, Job]) -> None:
        self._commits += 1
        now = self.scheduler.now()
        if self._outlook is not None and now - self._outlook.snapshot.now > OUTLOOK_S:
            self._outlook = None
        if self._told is not None and now - self._told.snapshot.now > STALE_S:
            self._told = None

    def _present(self) -> QueueForecast:
        """The present for forecasts, shared by all who ask until something changes or time has passed.

        What was worked out from it for one question serves the next.
        """
        scheduler = self.scheduler
        # A plan that finds nothing to do is another object, but changes no version.
        planner = scheduler.planner()
        mark = self._commits, planner.state.version, planner, scheduler.settings, scheduler.extensions
        found, of = self._outlook, self._outlook_of
        is_same = mark[:2] == of[:2] and all(one is other for one, other in zip(mark[2:], of[2:], strict=True))
        if found is None or not is_same or not 0 <= scheduler.now() - found.snapshot.now <= OUTLOOK_S:
            found, self._outlook_of = QueueForecast.of(scheduler), mark
            self._outlook = found
        return found

    def _earlier(self) -> QueueForecast | None:
        """The present of which starts were last told, while it may stand for the one of a long queue."""
        if self._next is not None and self._next.is_worked_out:
            self._told, self._next = self._next, None
        found = self._told
        if found is None or found.length < LONG_QUEUE:
            return None
        return found if 0 <= self.scheduler.now() - found.snapshot.now <= STALE_S else None

    def renewal(self) -> Callable[[], bool] | None:
        """Work for another thread after a question: starts to be told to whoever asks next, if it is time for them.

        Each call goes on a little, and returns whether that was all.
        """
        told = self._earlier()
        if told is None or self._next is not None:
            return None
        self._telling_s = told.spent_s or self._telling_s
        age_s = self.scheduler.now() - told.snapshot.now
        if age_s <= min(OUTLOOK_S, self._telling_s / STARTS_SHARE):
            return None
        self._next = found = self._present()
        return found.work_out

    def outlook(self, job: Job) -> Callable[[], JobOutlook]:
        """Forecast for one pending job; in a long queue its start may be told as of some seconds ago."""
        outlook, advice = self._present(), self.scheduler.advise_limit(job.user, job.spec)
        question = self.starts([job])
        as_of = None if question.told is outlook else question.as_of

        def look() -> JobOutlook:
            number = outlook.waiting_ids([job])[job.id]
            start = question.look()[job.id]
            return JobOutlook(outlook.place(number), start, outlook.alternatives(job, advice), as_of)

        return look

    def starts(self, named: Collection[Job] = ()) -> StartsQuestion:
        """When pending jobs start, which are to be added; in a long queue as of some seconds ago.

        Args: named: jobs asked for one by one, which are added and, if one of them has come since, told as of now.
        """
        class_of = self.scheduler.state.class_of
        if (earlier := self._earlier()) is not None:
            question = StartsQuestion(earlier, class_of, earlier.snapshot.now)
            question.add(named)
            if not named or not question.new:
                return question
        self._told = self._present()
        question = StartsQuestion(self._told, class_of)
        question.add(named)
        return question

    def first_starts(self, most: int) -> Callable[[], tuple[dict[int, int], dict[int, StartRange]]]:
        """Places and start ranges of the first jobs, also of some that cannot start yet; by planning id."""
        outlook = self._present()

        def look() -> tuple[dict[int, int], dict[int, StartRange]]:
            ids = outlook.first(_PLACES)
            wanted = ids[:most] + [one.job.id for one in outlook.arrivals[:most]]
            return {job_id: place for place, job_id in enumerate(ids, start=1)}, outlook.starts(wanted)

        return look

    def limit_hint(self, job: Job) -> Callable[[], LimitHint | None] | None:
        """Effect of a time limit on a pending job; None if there is nothing to compare."""
        return limit_hint(job, self.scheduler)

    def starts_without(self, cases: Sequence[Left]) -> Callable[[], Sequence[int]]:
        """For each case, how many more jobs would start now without the foreign memory that it removes."""
        outlook = QueueForecast.of(self.scheduler)
        return lambda: starts_without(outlook.snapshot, outlook.settings, cases, outlook.extensions)

    def vram_seen(self, job: Job) -> VramSeen | None:
        """GPU memory use of similar jobs; None when too few have ended."""
        self.scheduler.history.load_some()
        return self.scheduler.history.vram_seen(job)

    def expectation(self, job: Job) -> ExpectedRunTime:
        if self.scheduler.settings.priority.predict:
            return self.scheduler.history.expectation(job)
        limit_s = job.spec.time_limit_s
        return ExpectedRunTime(limit_s, "unknown" if limit_s is None else "limit")

    def burst(self, job: Job) -> str | None:
        """Whether a pending job goes to Slurm should its expected start stay too far away; None: no word on it."""
        return burst_text(job, self.scheduler.transaction(self.scheduler.now(), is_query=True))

    def why_it_preempts_nothing(self, job: Job) -> str | None:
        """Why a job that waits for what jobs of lower tiers hold takes none of it from them; None: no word on it."""
        scheduler = self.scheduler
        reason = scheduler.answers.reason_for(job)
        missing = reason.facts.get("needed") if reason is not None else None
        if not isinstance(missing, Mapping) or not missing:
            return None
        is_of_any = not missing.keys().isdisjoint({"cpus", "mem_mib", "nodes"})
        held = scheduler.state.holds.values()
        running = [one.terms.qos for one in held if not one.is_filler and (one.gpus or is_of_any)]
        return why_it_preempts_nothing(job.spec.qos, running, scheduler.settings)

    def leanings(self, job: Job) -> list[LeaningReason]:
        """What speaks for and against nodes for a job, apart from room, by node."""
        scheduler = self.scheduler
        scheduler.history.load_some()
        return leanings(job, ClusterLayout(scheduler.nodes(scheduler.now()), scheduler.settings), scheduler.history)

    # --- about processes without a job ------------------------------------------------------------

    def adoptable(self, pid: int, caller: Caller) -> Callable[[], AdoptableProcess]:
        """Facts about a process to adopt. Raises, also when called later: NotFound, Forbidden, Refused."""
        scheduler = self.scheduler
        is_an_admin, reading = is_admin(caller, scheduler.settings), scheduler.head.reading
        boot_id = scheduler.head.host.boot_id
        adopt.check_who(caller, scheduler.settings)
        # Check rights first: the error below names the job that it belongs to.
        adopt.check_rights(pid, caller, is_an_admin)
        adopt.check_is_no_job(pid, scheduler.engine)
        return lambda: adopt.examine(pid, caller, is_an_admin, reading, boot_id)

    def adoption_fields(self, found: AdoptableProcess, asked: dict[str, Any]) -> dict[str, Any]:
        """Submission fields for the process, combined with the requested ones."""
        return adopt.wanted(found, asked)

    def owner_notes(self, pid: int) -> OwnerNotes | None:
        """Messages sent to the owner of a foreign process."""
        return None if self._foreign is None else self._foreign.notes_of(pid)

    # --- about the machine and the daemon itself --------------------------------------------------

    def settings_log(self, since: float, limit: int) -> list[dict[str, Any]]:
        """The newest changes of the settings since then, oldest first."""
        return [] if self._settings_log is None else self._settings_log.entries(since, limit)

    def settings_before(self, at: float) -> dict[str, Any] | None:
        """The settings just before an instant, as a document; None if that is not recorded."""
        return None if self._settings_log is None else self._settings_log.document_before(at)

    def health(self) -> DaemonHealth:
        """State of the daemon's own work."""
        scheduler = self.scheduler
        last_ms, p95_ms = _recent_percentiles_ms(scheduler.meters.recent_tick_s)
        reading = scheduler.head.reading
        warnings = [] if reading is None else reading.remarks
        if reading is not None and reading.error:
            warnings.append(reading.error)
        if scheduler.trouble:
            warnings.append(scheduler.trouble)
        warnings += broken_promises(scheduler) + failing_steps(scheduler)
        failing = tuple(asdict(found) for found in scheduler.failures.failing)
        return DaemonHealth(self._ticker.ticks, last_ms, p95_ms, tuple(warnings), failing)

    def checks(self) -> Sequence[Check]:
        """Checks of `gpusched doctor` that only the daemon can make."""
        return daemon_checks(self._ticker)

    def isolation(self, node: str) -> dict[str, Any]:
        """Limits that a node's kernel enforces on runs, by kind."""
        return isolation(self.scheduler.cluster[node].limiter.isolation, self.scheduler.settings.isolation)

    def enforcement(self, sample: GpuSample | None, limit: str | None) -> tuple[str, str]:
        """What limits a run on this GPU to its VRAM: an `Enforcement` word and its explanation."""
        return enforcement(sample, self.scheduler.settings.gpu, limit)

    def metrics(self) -> Page:
        return page(self.scheduler, self.facts)


async def _query_status(sock: socket.socket) -> tuple[float | None, float | None, float | None] | None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, frame(QUERY))
    buffer = bytearray()
    while data := await loop.sock_recv(sock, 4096):
        buffer += data
        for kind, content in take_frames(buffer):
            if kind == STATUS:
                words = [None if word == b"-" else float(word) for word in content.split()[:3]]
                return words[0], words[1], words[2]
    return None


def _recent_percentiles_ms(samples: deque[float]) -> tuple[float | None, float | None]:
    """Last and 95th percentile of recent tick times, in milliseconds."""
    if not samples:
        return None, None
    ordered = sorted(samples)
    return samples[-1] * 1e3, ordered[int(len(ordered) * 0.95)] * 1e3
