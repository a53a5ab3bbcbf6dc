"""Starting the daemon: arguments, single instance, log, adapters, readiness."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import logging.handlers
import os
import resource
import sys
import time
from functools import partial

from filelock import FileLock, Timeout

from gpusched import __version__, entry_points, paths
from gpusched.access import user_name
from gpusched.api.server import HttpServer
from gpusched.api.service import ApiService
from gpusched.clock import SystemClock
from gpusched.config.load import CONFIG_VARIABLE
from gpusched.daemon.arguments import build_parser
from gpusched.daemon.audit import Audit
from gpusched.daemon.core import Scheduler
from gpusched.daemon.dispatch import Dispatcher
from gpusched.daemon.earlier_life import earlier_life
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.failures import CHECK_VARIABLE, VARIABLE, check_every, crash_step
from gpusched.daemon.launch.containers import ContainerHost
from gpusched.daemon.launch.limits import PERSONAL, RunLimiter
from gpusched.daemon.loop import Loop
from gpusched.daemon.node_reach import NodeReach
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.parts import SchedulerParts
from gpusched.daemon.preset import PresetChoice, chosen_preset, preset_choice, sentence
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.daemon.reload import SettingsFile
from gpusched.daemon.remote_nodes import RemoteNodes, next_session
from gpusched.daemon.service_manager import (
    JournalFormatter,
    LineFormatter,
    ServiceManager,
    is_locked_in,
    journal_command,
    writes_to_journal,
)
from gpusched.daemon.settings_log import SettingsLog
from gpusched.daemon.tick import Ticker
from gpusched.daemon.verbs import table_setting
from gpusched.daemon.watch.foreign import ForeignProcessWatch
from gpusched.daemon.watch.progress import ProgressReader
from gpusched.daemon.watch.run_reports import RunReports
from gpusched.daemon.watch.series import SeriesRecorder
from gpusched.daemon.watch.tariff import TariffWatch
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.launchers import LauncherChoice, choose
from gpusched.engine.linux.isolation import look, pinned_cpus, read_processors
from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.services import StreamServices
from gpusched.errors import DaemonBusy, GpuschedError, NotReady, UsageError
from gpusched.gpu.host import PsutilHost
from gpusched.gpu.source import MPS_FOLDER, SOCKET
from gpusched.gpu.tracker import GpuTracker
from gpusched.gpu.worker import GpuWorker
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.model.execution import LaunchSite
from gpusched.model.settings import Settings
from gpusched.model.table_settings import document_of_table
from gpusched.paths import make_private
from gpusched.plugins import Plugins
from gpusched.ports import Engine, HandoverEngine
from gpusched.ports.tables import TABLE_SETTINGS
from gpusched.scheduler.admission import membership_findings
from gpusched.scheduler.compiled import is_compiled
from gpusched.slurm_commands import slurm_conf, write_conf, write_for_jobs, write_login_path
from gpusched.store.database_file import use_rescued
from gpusched.store.id_record import IdRecord
from gpusched.store.series import SeriesFile
from gpusched.store.sqlite import SqliteStore

log = logging.getLogger("gpusched.daemon")

_SWITCH_S = 0.001
_YOUNG_COLLECTIONS = 100
"""Collections of young objects before one of all, which halts the daemon for 15 ms where ten thousand jobs wait."""
_JOIN_S = 5.0
"""How long a start waits for the other nodes of the cluster."""
_OWN_FILES = 4096
"""Files that the daemon may need beside connections: a few per run."""


def main(argv: list[str] | None = None, manager: ServiceManager | None = None) -> int:
    """Run the daemon in the foreground until it is stopped. Returns the process exit code."""
    options = build_parser().parse_args(argv)
    if manager is None:
        manager = ServiceManager()
        manager.starting()
    report = _Report(options.ready_fd)
    try:
        if options.root is not None and not options.system:
            raise UsageError(f"--root {options.root} is for the system's daemon", "add --system")
        if options.system:
            if os.geteuid() != 0:
                raise NotReady(
                    f"the system's daemon runs as root, not as {user_name(os.geteuid())}",
                    "start your own, without --system: gpuschedd",
                )
            paths.serve_system(options.root or "")
        _run(report, manager, foreground=options.ready_fd is None)
    except GpuschedError as error:
        log.error("%s", error.message)
        report.failed(error)
        return error.exit_code
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        report.failed(
            NotReady(f"the daemon cannot start: {error.strerror}{where}", "check every path with: gpusched doctor")
        )
        return 1
    return 0


class _Report:
    """Reports to the starting process that the daemon is ready, or why it is not."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def ready(self) -> None:
        self._write("ready\n")

    def failed(self, error: GpuschedError) -> None:
        if self._fd is None:
            hint = f"\ngpuschedd: hint: {error.hint}" if error.hint else ""
            sys.stderr.write(f"gpuschedd: error: {error.message}{hint}\n")
        self._write(f"error {json.dumps(error.document())}\n")

    def _write(self, line: str) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, line.encode())
            os.close(self._fd)
        except OSError:
            pass  # the client has gone; the daemon serves the next one
        self._fd = None


def _stay_off_nodes() -> None:
    """Refuse to decide for GPUs that another scheduler books already. Raises: NotReady."""
    if not paths.is_system() and os.environ.get("GPUSCHED_FAKE_GPUS"):
        # They are this daemon's alone.
        return
    for path in dict.fromkeys((paths.node_mark(), *(() if paths.is_system() else (paths.NODE_MARK,)))):
        try:
            with open(path, encoding="utf-8") as file:
                node, _, head = file.read().strip().partition(" ")
        except OSError:
            continue
        where = f"the machine at {head}" if head else "another machine"
        raise NotReady(
            f"this machine is node {node} of a cluster: the scheduler that books its GPUs runs on {where}",
            f"type the command there: ssh {head or 'HEAD'};  if this machine is no longer a node: "
            f"{'sudo ' if path == paths.NODE_MARK else ''}rm {path}",
        )


def _run(report: _Report, manager: ServiceManager, foreground: bool) -> None:
    make_folders()
    _stay_off_nodes()
    lock = FileLock(paths.lock_file())
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DaemonBusy(
            f"another daemon is already running for {paths.state_dir()}", "see it with: gpusched daemon status"
        ) from None
    try:
        file = SettingsFile(chosen_preset(paths.preset_file()))
        settings = file.at_start()
        fake = os.environ.get("GPUSCHED_FAKE_GPUS", "")
        if os.path.exists(fake):
            # A path relative to the start directory would be wrong after chdir to the root.
            os.environ["GPUSCHED_FAKE_GPUS"] = os.path.abspath(fake)
        _start_log(settings, foreground)
        os.chdir("/")
        try:
            begun = _begin(settings, manager)
        except (UsageError, NotReady) as error:
            settings = file.fall_back(error)
            begun = _begin(settings, manager)
        if file.problem is not None:
            log.error("%s; %s", *file.problem)
        _serve(settings, begun, file, report, manager)
    finally:
        lock.release()


def make_folders() -> None:
    """Create the folders of a daemon, or of an agent, and leave a private umask. Raises: NotReady, OSError."""
    os.umask(0o077)
    folders = (
        *(paths.state_dir(), paths.spool_dir(), paths.checkpoint_dir()),
        *(os.path.dirname(paths.log_file()), paths.runtime_dir()),
    )
    if not paths.is_system():
        make_private(paths.state_dir())
        make_private(paths.runtime_dir())
        for folder in folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        return
    os.umask(0o022)
    try:
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
            if os.lstat(folder).st_uid != 0:
                raise NotReady(
                    f"{folder} belongs to {user_name(os.lstat(folder).st_uid)}, not to root", f"see: ls -ld {folder}"
                )
    finally:
        os.umask(0o077)
    # Users run their scripts in the spool, but must not list its parent.
    os.chmod(paths.state_dir(), 0o711)
    os.chmod(os.path.dirname(paths.log_file()), 0o700)
    os.chmod(paths.runtime_dir(), 0o755)
    # Only root creates folders in it: a user who could might take another job's.
    os.chmod(paths.checkpoint_dir(), 0o711)


def _start_log(settings: Settings, foreground: bool) -> None:
    level = settings.daemon.log_level.upper()
    if foreground and writes_to_journal():
        # journald rotates, dates and stores; when the watchdog kills a hung loop, faulthandler prints a trace.
        faulthandler.enable()
        journal = logging.StreamHandler()
        journal.setFormatter(JournalFormatter())
        logging.basicConfig(level=level, handlers=[journal], force=True)
        return
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(
            paths.log_file(),
            maxBytes=int(settings.daemon.log_mib * (1 << 20)),
            backupCount=settings.daemon.log_files,
            encoding="utf-8",
            errors="backslashreplace",
        )
    ]
    if foreground:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=handlers, force=True)


def _begin(settings: Settings, manager: ServiceManager) -> tuple[LauncherChoice, Plugins]:
    """Choose what starts runs, and load plug-ins: settings that apply from a start. Raises: NotReady, UsageError."""
    chosen = choose(settings.daemon.launcher, is_system=paths.is_system(), root=paths.system_root())
    if chosen.kind == "fork" and paths.is_system() and manager.unit is not None and is_locked_in():
        raise NotReady(
            f"runs could not leave the daemon's sandbox: {chosen.text}",
            "lift it with: gpusched system install, which reads [daemon] launcher; or let systemd start the runs",
        )
    log.info("launcher: %s", chosen.text)
    return chosen, Plugins.load(settings.plugins)


def _serve(
    settings: Settings,
    begun: tuple[LauncherChoice, Plugins],
    file: SettingsFile,
    report: _Report,
    manager: ServiceManager,
) -> None:
    clock = SystemClock(tell=log.warning)
    chosen, plugins = begun
    host = PsutilHost(settings.node, folder=paths.state_dir(), clock=clock.now)
    sample = host.read()
    if use_rescued(paths.database()):
        log.warning("%s was deleted while the last daemon ran; continuing with its copy", paths.database())
    if (lost := earlier_life().lost_table()) is not None:
        raise lost
    ids = IdRecord(paths.id_record())
    store = SqliteStore.open(paths.database(), ids)
    worker = GpuWorker(
        settings.gpu, {**os.environ, SOCKET: paths.socket_path()}, folder=paths.state_dir(), clock=clock.now
    )
    engine: Engine | None = None
    cluster: ClusterEngine | None = None
    remote: RemoteNodes | None = None
    series: SeriesRecorder | None = None
    dispatcher = None
    try:
        isolation = look(chosen.kind) if paths.is_system() else PERSONAL
        engine = LocalEngine(
            paths.spool_dir(),
            boot_id=sample.boot_id,
            clock=clock,
            launcher=chosen.make,
            pam=paths.is_system(),
            run_cgroups=isolation.folder,
        )
        address = ""
        if settings.cluster.nodes or settings.cluster.engine == "ray":
            remote, address = _remote_nodes(settings, sample.name, clock)
            engine = cluster = ClusterEngine({sample.name: engine, **remote.engines}, sample.name)
        slurm = _slurm(settings, clock)
        if slurm is not None:
            if isinstance(engine, ClusterEngine):
                engine.add(slurm.node, slurm)
            else:
                engine = ClusterEngine({sample.name: engine, slurm.node: slurm}, sample.name)
        head = ClusterNode(
            site=LaunchSite(
                *(sample.name, paths.socket_path()),
                checkpoints=paths.checkpoint_dir(),
                spool=paths.spool_dir(),
                cpus=int(sample.cpus if settings.node.cpus is None else settings.node.cpus),
                commands=paths.slurm_commands(),
                address=settings.node.address or address,
                mps=os.path.join(paths.state_dir(), MPS_FOLDER),
            ),
            boot_id=sample.boot_id,
            host=sample,
            tracker=GpuTracker(settings.gpu, max(settings.daemon.poll_s, settings.daemon.idle_poll_s)),
            limiter=RunLimiter(isolation, read_processors(), pinned_cpus),
            set_gpu_targets=worker.want,
        )
        nodes = ClusterNodes(head)
        slurm_files = _SlurmFiles()
        scheduler = Scheduler(
            SchedulerParts(
                store=store,
                engine=engine,
                cluster=nodes,
                settings=settings,
                clock=clock,
                plugins=plugins,
                handover=slurm,
                containers=ContainerHost(head.name, lambda: (node.host for node in nodes), lambda: head.reading),
                read_settings=file.read,
                settings_problem=lambda: file.problem,
                commands_problem=lambda: slurm_files.problem,
                # For daemons in tests only: a daemon that serves others has no such hook.
                step=crash_step(None if paths.is_system() else os.environ.get(VARIABLE)),
                check_every=check_every(None if paths.is_system() else os.environ.get(CHECK_VARIABLE)),
            )
        )
        ticker = Ticker(scheduler)
        signals = scheduler.signals
        note_ids = partial(_note_ids, scheduler, ids)
        scheduler.failures.run("next ids", note_ids)
        signals.jobs_changed.connect(note_ids)
        tariff = TariffWatch(scheduler)
        series = SeriesRecorder(scheduler, SeriesFile(paths.series_file()))
        dispatcher = Dispatcher(scheduler)
        signals.settings_changed.connect(lambda settings: worker.adopt(settings.gpu))
        signals.settings_changed.connect(lambda settings: file.accept(scheduler.filed_settings))
        slurm_files.write(scheduler, settings)
        signals.settings_changed.connect(partial(slurm_files.write, scheduler))
        if remote is not None and cluster is not None:
            remote.attach(ticker, cluster)
        # Adopt runs first: processes of continuing runs are not foreign.
        adopt_open_runs(scheduler.state, engine, scheduler.settings)
        # Before the first reading, which sets back what no run wants.
        ticker.request_gpu_targets()
        if remote is not None:
            remote.await_reports(_JOIN_S)
        _first_readings(worker, scheduler, store)
        form = " with a compiled planner" if is_compiled() else ""
        log.info("gpusched %s%s serves %s", __version__, form, paths.state_dir())
        for _, text, hint in membership_findings(settings):
            log.warning("%s; %s", text, hint)
        # Imported modules stay for good: the collector need not traverse them again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_COLLECTIONS)
        # Threads that look ahead yield this soon to the one that serves clients, which waits after each system call.
        sys.setswitchinterval(_SWITCH_S)
        tell_of_restart(scheduler)
        if file.problem is None:
            file.accept(settings)
        auto_preset = preset_choice(ticker, paths.preset_file(), file.choose)
        log.info("preset: %s", sentence(auto_preset.document()))
        recorders = series, tariff
        asyncio.run(
            _loop(ticker, worker, host, report, dispatcher, manager, auto_preset, chosen.text, remote, recorders)
        )
        ticker.flush()
        log.info("stopped%s", "" if scheduler.is_going_down else "; runs continue")
    finally:
        if dispatcher is not None:
            dispatcher.close()
        if series is not None:
            series.close()
        if engine is not None:
            engine.close()
        if remote is not None:
            remote.close()
        worker.close()
        ids.close()
        store.close()


def _note_ids(scheduler: Scheduler, ids: IdRecord, _: object = None) -> None:
    ids.note(scheduler.state.next_id, scheduler.state.next_pipeline)


def _remote_nodes(settings: Settings, head: str, clock: SystemClock) -> tuple[RemoteNodes, str]:
    """Links to the other nodes of the cluster, and where these reach the head. Raises: NotReady."""
    session = partial(next_session, paths.session_file(), clock)
    if settings.cluster.engine == "ray":
        open_members = entry_points.need("engine.ray", "ray", 'the setting [cluster] engine = "ray"')
        members = open_members(paths.state_dir(), is_system=paths.is_system())
        return RemoteNodes(settings.cluster, clock, session(), members, paths.known_nodes_file()), members.address
    if head in settings.cluster.nodes:
        raise NotReady(f"[cluster] nodes names {head}, the daemon's own node", "name the other nodes only")
    return RemoteNodes(settings.cluster, clock, session(), seen=paths.known_nodes_file()), ""


def _slurm(settings: Settings, clock: SystemClock) -> HandoverEngine | None:
    """The engine of the site's Slurm; None if the settings name none."""
    open_engine = entry_points.find("engine.slurm")
    if open_engine is None:
        return None
    is_root = os.geteuid() == 0 and paths.is_system()
    engine: HandoverEngine | None = open_engine(settings, paths.handover_dir(), clock, is_root=is_root)
    return engine


class _SlurmFiles:
    """What jobs find of Slurm: its commands and SLURM_CONF."""

    problem: str | None = None
    """Why they cannot use it; None when they can."""

    def write(self, scheduler: Scheduler, settings: Settings) -> None:
        """Write them anew. What cannot be written is a warning, no obstacle."""
        folder = paths.slurm_commands()
        problem = write_for_jobs(folder, for_others=paths.is_system())
        parents = {queue.parent for queue in settings.queue.values()}
        leaves = {name: queue.max_time_s for name, queue in settings.queue.items() if name not in parents}
        partitions = leaves or {settings.default.queue: None}
        node = scheduler.nodes(scheduler.now())[0]
        text = slurm_conf(
            settings.slurm.cluster_name, node.name, int(node.cpus), node.mem_mib, partitions, settings.default.queue
        )
        try:
            write_conf(folder, text)
            write_login_path(folder)
        except OSError as error:
            problem = problem or f"{error.filename or folder}: {error.strerror}"
        self.problem = problem
        if problem is not None and settings.slurm.commands_in_jobs:
            log.warning("jobs cannot use Slurm's commands: %s", problem)


def _first_readings(worker: GpuWorker, scheduler: Scheduler, store: SqliteStore) -> None:
    """Read the GPUs before the first job is considered: a GPU is used only after several good readings."""
    gpu = scheduler.settings.gpu
    for _ in range(gpu.free_polls):
        reading = worker.read_blocking(gpu.deadline_s + 1.0)
        scheduler.observe_gpus(reading)
        if reading.error or not reading.gpus:
            break
    else:
        store.save_gpus(scheduler.head.name, reading)
    for note in reading.notes:
        log.info("gpus: %s", note)
    if reading.error:
        log.error("gpus: %s", reading.error)


def tell_of_restart(scheduler: Scheduler) -> None:
    """Alert the administrator if the table shows an earlier daemon."""
    if scheduler.store.next_job_id() == 1:
        return
    counts = scheduler.state.counts()
    jobs = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no unfinished job"
    text = f"gpuschedd {__version__} has started again on {scheduler.head.name}: {jobs}"
    news = AdminEvent("daemon_restarted", text, scheduler.head.name)
    scheduler.alerts.alert_admin(news, scheduler.now(), scheduler.settings)


async def _loop(
    ticker: Ticker,
    worker: GpuWorker,
    host: PsutilHost,
    report: _Report,
    dispatcher: Dispatcher,
    manager: ServiceManager,
    auto_preset: PresetChoice,
    launcher: str,
    remote: RemoteNodes | None,
    recorders: tuple[SeriesRecorder, TariffWatch],
) -> None:
    scheduler = ticker.scheduler
    series, tariff = recorders
    observers = {"tariff": tariff.poll, "time series": series.poll}
    audit = foreign = None
    if paths.is_system():
        audit = Audit(os.path.dirname(paths.log_file()), scheduler.now, lambda: scheduler.settings.access)
        scheduler.signals.audited.connect(audit.record)
        foreign = ForeignProcessWatch(scheduler)
        dispatcher.listeners.append(foreign.heard)
        observers |= {"foreign processes": foreign.poll, "audit": audit.poll}
        _allow_connections(scheduler.settings.limit.connections)
    loop = Loop(ticker, worker, host, dispatcher, manager, auto_preset=auto_preset, remote=remote, observers=observers)
    facts = _facts(manager.unit, launcher)
    head = scheduler.head
    own = head.name, StreamServices(head.site.spool, head.site.outputs)
    reach = NodeReach(remote.engines if remote is not None else {}, own)
    if remote is not None:
        remote.on_engine = reach.add
    settings_log = _open_settings_log(scheduler)
    progress = ProgressReader(
        paths.spool_dir(), scheduler.now, (lambda run: None) if remote is None else remote.progress_of
    )
    reports = RunReports(scheduler, progress)
    loop.observers["progress of runs"] = reports.poll
    daemon = DaemonFacade(
        ticker,
        wake=loop.wake,
        stop=loop.stop,
        facts=facts,
        presets=auto_preset,
        progress=progress,
        reports=reports,
        audit=audit,
        foreign=foreign,
        serves_all=paths.is_system(),
        reach=reach,
        series=series,
        settings_log=settings_log,
    )
    make_door = entry_points.find("api.door")
    server = HttpServer(ApiService(daemon, door=None if make_door is None else make_door(scheduler.now)))

    def user_of(node: str, handle: str) -> int | None:
        run = scheduler.state.open_runs.get(handle)
        job = None if run is None or node not in run.nodes else scheduler.state.jobs.get(run.job_id)
        return None if job is None else job.uid

    reach.serve_commands(server.adopt, user_of)
    try:
        await loop.run(server, paths.socket_path(), report.ready)
    finally:
        reach.close()
        if audit is not None:
            audit.close()


def _open_settings_log(scheduler: Scheduler) -> SettingsLog | None:
    """The record of settings, with what has changed since the last daemon; None on a disk that takes none."""
    try:
        settings_log = SettingsLog(paths.settings_log(), scheduler.now)
        table = document_of_table(scheduler.state.rows[TABLE_SETTINGS])
        settings_log.record(scheduler.filed_settings, table_setting.daemon_caller(), "daemon start", table)
    except OSError as error:
        log.warning("changes of settings are not recorded: %s", error)
        return None
    scheduler.signals.settings_set.connect(settings_log.record)
    scheduler.signals.machine_set.connect(settings_log.note)
    return settings_log


def _allow_connections(connections: int) -> None:
    """Allow this many connections and the daemon's own files; jobs do not inherit it, as the fork server runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OWN_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    if hard < wanted:
        log.warning("only %d files may be open; [limit] connections = %d needs %d", hard, connections, wanted)


def _facts(unit: str | None, launcher: str) -> dict[str, object]:
    journal = journal_command(unit, is_system=paths.is_system())
    return {
        "version": __version__,
        "pid": os.getpid(),
        "user": user_name(os.geteuid()),
        "started_at": time.time(),
        "home": paths.state_dir(),
        "socket": paths.socket_path(),
        "database": paths.database(),
        "spool": paths.spool_dir(),
        "launcher": launcher,
        "log": journal if writes_to_journal() else paths.log_file(),
        "unit": unit,
        "config": os.path.abspath(os.environ.get(CONFIG_VARIABLE) or paths.config_file()),
    }
