"""The agent of a node: starts and watches runs there for a daemon on another machine, to which its streams lead."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import signal
import sys
from functools import partial

from filelock import FileLock, Timeout

from gpusched import paths
from gpusched.clock import SystemClock
from gpusched.daemon.launch.limits import PERSONAL
from gpusched.daemon.main import make_folders
from gpusched.daemon.preset import chosen_preset
from gpusched.daemon.reload import SettingsFile
from gpusched.daemon.watch.node_output import NodeOutputKeeper
from gpusched.engine import spool as files
from gpusched.engine.launchers import choose
from gpusched.engine.linux import proctree
from gpusched.engine.linux.isolation import look, read_processors
from gpusched.engine.local import LocalEngine
from gpusched.engine.remote.agent_server import AgentServer, agent_of_spool
from gpusched.engine.remote.channel import Channel
from gpusched.engine.remote.command_channel import standard_streams
from gpusched.engine.remote.node_agent import NodeAgent, NodeSources
from gpusched.engine.remote.run_progress import SpoolProgress
from gpusched.engine.remote.services import StreamServices
from gpusched.errors import DaemonBusy, NotReady
from gpusched.gpu.host import PsutilHost
from gpusched.gpu.source import MPS_FOLDER
from gpusched.gpu.worker import GpuWorker
from gpusched.model.execution import LaunchSite
from gpusched.model.settings import NodeSettings, Settings
from gpusched.model.value import replace
from gpusched.slurm_commands import slurm_conf, write_conf, write_for_jobs, write_login_path

log = logging.getLogger("gpusched.agent")

_LET_GO_S = 1.0
"""An agent whose head has hung up ends within this time."""
_DIE_S = 10.0
_HOLDER_BYTES = 64


def _take_over(folder: str, node: str) -> FileLock:
    """The lock of an agent's folder. An agent that still has it has lost its head, and hangs. Raises: DaemonBusy."""
    lock, holder = FileLock(os.path.join(folder, "lock")), os.path.join(folder, "agent.pid")
    try:
        lock.acquire(timeout=_LET_GO_S)
    except Timeout:
        _kill_holder(holder)
        try:
            lock.acquire(timeout=_DIE_S)
        except Timeout:
            hint = f"see: pgrep -af 'gpusched agent {node}'"
            raise DaemonBusy(f"another agent of {node} serves {folder}", hint) from None
    own = proctree.read_process(os.getpid())
    assert own is not None
    # In place: on a full disk a file that was emptied could not be filled again.
    fd = os.open(holder, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{own.pid} {own.start_ticks}".ljust(_HOLDER_BYTES).encode())
    finally:
        os.close(fd)
    return lock


def _kill_holder(path: str) -> None:
    try:
        with open(path, encoding="ascii") as file:
            pid, start_ticks = map(int, file.read().split())
    except (FileNotFoundError, ValueError):
        return
    process = proctree.read_process(pid)
    if process is not None and process.start_ticks == start_ticks:
        # It may be killed at any moment; the next one continues from its journal.
        proctree.send(process, signal.SIGKILL)


def _other_node(node: str) -> str | None:
    """The other node whose agent serves on this machine."""
    try:
        with open(paths.node_mark(), encoding="utf-8") as file:
            other = file.read().partition(" ")[0]
    except (OSError, ValueError):
        return None
    if not other or other == node:
        return None
    lock = FileLock(os.path.join(paths.agent_dir(other), "lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return other
    except OSError:
        return None
    lock.release()
    return None


def _keep_daemon_out(node: str) -> FileLock | None:
    """Hold the lock of this machine's system daemon, which would book its GPUs a second time. Raises: NotReady.

    A personal daemon's lock says nothing: a home may be that of several machines, the head's among them.
    """
    if not paths.is_system():
        return None
    lock = FileLock(paths.lock_file())
    try:
        lock.acquire(timeout=0)
    except Timeout:
        other = _other_node(node)
        if other is not None:
            raise NotReady(
                f"this machine is node {other} already, under another name", "name it once in [cluster] nodes"
            ) from None
        raise NotReady(
            "this machine's own system daemon schedules its GPUs",
            "once its jobs have ended: sudo systemctl disable --now gpusched",
        ) from None
    return lock


def _mark_node(node: str) -> None:
    """Note that this machine is a node, for daemons that would book its GPUs a second time."""
    # Of ssh; other connections do not say where they come from.
    head = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    text = f"{node} {head}\n"
    path = paths.node_mark()
    try:
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return
    except OSError:
        pass
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o644)
    except OSError as error:
        log.warning("commands here cannot know that this machine is node %s: %s: %s", node, path, error.strerror)


def _write_slurm(folder: str, own: NodeSettings, settings: Settings, cpus: int, mem_mib: int) -> str:
    """Write what jobs find of Slurm; returns the folder of its commands, empty when jobs cannot use them."""
    problem = write_for_jobs(folder, for_others=paths.is_system())
    queue = settings.default.queue
    text = slurm_conf(settings.slurm.cluster_name, own.name or "", cpus, mem_mib, {queue: None}, queue)
    try:
        write_conf(folder, text)
        write_login_path(folder)
    except OSError as error:
        problem = problem or f"{error.filename or folder}: {error.strerror}"
    if problem is not None:
        log.warning("jobs cannot use Slurm's commands: %s", problem)
    return folder if problem is None else ""


async def _serve(agent: NodeAgent, channel: Channel, site: LaunchSite) -> None:
    services = StreamServices(site.spool, site.outputs, agent.task_usage)
    await AgentServer(agent, channel, services, socket=site.socket, serves_all=paths.is_system()).serve()


def _account_trouble(node: str, uid: int, user: str) -> str | None:
    """Why this node cannot start anything as a user of the head, whose files it would take for another's."""
    own = os.geteuid()
    if own != 0:
        return None if uid == own else f"{user} is {uid} on the head, and the agent of {node} runs as {own}"
    try:
        here = pwd.getpwnam(user).pw_uid
    except KeyError:
        return f"{user} is {uid} on the head, and has no account on {node}"
    return None if here == uid else f"{user} is {uid} on the head, {here} on {node}"


def serve(node: str, address: str | None = None) -> int:
    """Serve the head at the other end of standard input and output until it hangs up. Raises: DaemonBusy, NotReady.

    Args: address: where other nodes reach this one; default: its name.

    Its spool is a folder of the node's own, since a home may be that of several machines.
    """
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(message)s", force=True)
    make_folders()
    folder = paths.agent_dir(node)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if paths.is_system():
        # Users run their scripts in the spool, and write to their checkpoint folders.
        os.chmod(folder, 0o711)
    lock = _take_over(folder, node)
    daemon_lock = _keep_daemon_out(node)
    _mark_node(node)
    settings = SettingsFile(chosen_preset(paths.preset_file())).at_start()
    chosen = choose(settings.daemon.launcher, is_system=paths.is_system(), root=paths.system_root())
    isolation = look(chosen.kind) if paths.is_system() else PERSONAL
    own = replace(settings.node, name=node)
    host, clock = PsutilHost(own, folder=paths.state_dir()), SystemClock(tell=log.warning)
    sample = host.read()
    spool = os.path.join(folder, "spool")
    worker = GpuWorker(settings.gpu, dict(os.environ), folder=folder, clock=clock.now)
    cpus = int(sample.cpus if own.cpus is None else own.cpus)
    commands = os.path.join(folder, "slurm", "bin")
    site = LaunchSite(
        *(node, paths.agent_socket(node)),
        checkpoints=os.path.join(folder, "checkpoints"),
        spool=spool,
        cpus=cpus,
        commands=_write_slurm(commands, own, settings, cpus, own.mem_mib or sample.mem_total_mib),
        address=own.address or address or node,
        outputs=os.path.join(folder, "outputs"),
        mps=os.path.join(folder, MPS_FOLDER),
        fetches_snapshots=True,
    )
    os.makedirs(site.checkpoints, mode=0o700, exist_ok=True)
    if paths.is_system():
        # Only root creates folders in it: a user who could might take another job's.
        os.chmod(site.checkpoints, 0o711)

    def make_engine() -> LocalEngine:
        return LocalEngine(
            spool,
            boot_id=sample.boot_id,
            clock=clock,
            launcher=chosen.make,
            pam=paths.is_system(),
            run_cgroups=isolation.folder,
        )

    trouble = partial(_account_trouble, node)
    sources = NodeSources(
        host,
        worker,
        isolation,
        tuple(read_processors()),
        site,
        own,
        trouble,
        partial(files.why_full, spool),
        SpoolProgress(spool).read,
    )
    agent = agent_of_spool(spool, make_engine, boot_id=sample.boot_id, clock=clock, sources=sources)
    outputs = NodeOutputKeeper(site.outputs, spool, settings.limit)
    channel = standard_streams()
    try:
        asyncio.run(_serve(agent, channel, site))
    finally:
        outputs.close()
        agent.close()
        worker.close()
        channel.close()
        if daemon_lock is not None:
            daemon_lock.release()
        lock.release()
    return 0
