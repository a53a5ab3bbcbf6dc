"""`gpusched doctor`: checks of this machine and the daemon's files, with or without a daemon; never starts one."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpusched import __version__, paths
from gpusched.access import is_group, user_name
from gpusched.cli.lockouts import RECENT, shut_out
from gpusched.cli.notify_targets import problems_in_targets
from gpusched.cli.query import is_user
from gpusched.client import connect
from gpusched.config import Loaded, load_settings
from gpusched.config.tariff import TariffError, read_tariff
from gpusched.config.without_effect import without_effect
from gpusched.daemon.earlier_life import earlier_life
from gpusched.engine.linux.site_program import why_not_executed
from gpusched.errors import DaemonUnreachable, GpuschedError, Refused
from gpusched.gpu.source import choose, nvidia_signs
from gpusched.model.checks import Check, Finding, failed, passed, warned
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.units import format_duration, format_size_mib, plural
from gpusched.model.value import fields, replace
from gpusched.scheduler import cells
from gpusched.scheduler.admission import membership_findings, unknown_members
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.limits import quota_problems
from gpusched.scheduler.usage import capacity_of
from gpusched.store.read_only import store_status

Checks = dict[str, Callable[[], Finding]]

_LEAST_FREE_MIB = 100
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs", "9p"}
_CGROUPS = "/sys/fs/cgroup"
_CONTROLLERS = ("cpu", "memory", "pids")
_LATE_S = 60.0
_TIME_ERROR = 5
"""Return value of adjtimex(2) when the clock is not synchronised."""
_TIMEX_BYTES = 512
"""Larger than `struct timex` on any platform."""
_UNLIMITED = float(1 << 50)
"""An unknown number, larger than any guarantee."""


def examine() -> list[Check]:
    """Run all checks: the client's own first, then those that need the daemon.

    On a machine with a system scheduler, root checks its files; other users cannot, and need not.
    """
    is_system, is_root = paths.finds_system(), os.geteuid() == 0
    if is_system and is_root:
        paths.serve_system()
    of_daemon, source = _ask_daemon(is_system)
    checks: Checks = {"versions": _versions, "config": _config, "accounts": _accounts, "notify": _targets}
    if is_system and not is_root:
        checks |= {"folders": _left_to_root}
    else:
        checks |= {"folders": _folder, "file system": _file_system, "disk": _disk}
        checks |= {"permissions": permissions, "spool": _spool_executes}
    checks |= {"service": service} if is_system else {}
    checks |= {"control groups": control_groups, "clock": clock}
    if source in ("simulated", "static"):
        # Device nodes may exist even though the driver is not used.
        word = "simulated" if source == "simulated" else "declared in [gpu] static"
        checks |= {"nvml": lambda: passed(f"not checked: the GPUs are {word}")}
    else:
        checks |= {"nvml module": _nvml_module, "nvml": nvml, "persistence mode": _persistence}
    return [*(Check(name, *run()) for name, run in checks.items()), *of_daemon]


def _ask_daemon(is_system: bool) -> tuple[list[Check], str | None]:
    """The daemon's own checks and the source of its GPUs; without a daemon, the source it would use."""
    source = _chosen_source()
    try:
        with connect(autostart=False) as client:
            facts = client.call("GET", "/v1/status")["daemon"]
            checks = [Check("daemon", *_version_of(facts, is_system))]
            for one in client.call("GET", "/v1/doctor")["checks"]:
                level = one.get("level", "ok" if one["ok"] else "fail")
                checks.append(Check(one["check"], level, one["text"], one["hint"]))
            return checks, facts["gpu_source"]
    except DaemonUnreachable as error:
        checks = [Check("daemon", *_unreachable(error.message, is_system))]
        if not is_system or os.geteuid() == 0:
            checks.append(Check("database", *table_at_rest()))
        return checks, source
    except GpuschedError as error:
        return [Check("daemon", *failed(error.message, error.hint))], source


def _version_of(facts: Mapping[str, Any], is_system: bool) -> Finding:
    text = f"daemon {facts['version']} answers on {facts['socket']}"
    if facts["version"] == __version__:
        return passed(text)
    command = "sudo systemctl restart gpusched" if is_system else "gpusched daemon stop && gpusched daemon start"
    return warned(f"{text}, but this is {__version__}", f"restart it with: {command}")


def _unreachable(message: str, is_system: bool) -> Finding:
    if os.environ.get("GPUSCHED_SOCKET"):
        return failed(message, "unset GPUSCHED_SOCKET, or start that daemon")
    if is_system:
        return failed(message, "see why: journalctl -u gpusched; start it with: sudo systemctl start gpusched")
    return passed("not running; the first gsub starts it")


def _chosen_source() -> str | None:
    try:
        return choose(load_settings(paths.config_file(), os.environ).settings.gpu, os.environ).kind
    except GpuschedError:
        return None  # another check reports it


def _versions() -> Finding:
    text = f"gpusched {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    text += f", {platform.system()}"
    if sqlite3.sqlite_version_info >= (3, 37) and sys.platform == "linux":
        return passed(text)
    return failed(text, "Linux and SQLite 3.37 or newer are required")


# --- settings ---------------------------------------------------------------------------------------------


def _config() -> Finding:
    try:
        loaded = load_settings(paths.config_file(), os.environ)
    except GpuschedError as error:
        return failed(error.message, error.hint)
    if problems := untrusted_programs(loaded):
        return failed(problems[0].message, problems[0].hint)
    if warnings := effect_warnings(loaded):
        return warned("; ".join(warning.message for warning in warnings), warnings[0].hint)
    where = paths.config_file()
    return passed(f"{where} is valid" if os.path.exists(where) else "no config file; the defaults apply")


def _accounts() -> Finding:
    try:
        loaded = load_settings(paths.config_file(), os.environ)
    except GpuschedError:
        return passed("not checked: the config file is invalid")
    if not loaded.settings.account:
        return passed("none configured; usage counts for each user")
    warnings = membership_warnings(loaded)
    if warnings:
        return warned("; ".join(warning.message for warning in warnings), warnings[0].hint)
    return passed(f"{plural(len(loaded.settings.account), 'account')}, each with members")


def _targets() -> Finding:
    quota_problems = problems_in_targets()
    if quota_problems:
        return warned(quota_problems[0].message, quota_problems[0].hint)
    where = paths.notify_file()
    return passed(f"{where} is valid" if os.path.exists(where) else f"no {where}; --notify has no targets")


def broken_promises(loaded: Loaded) -> list[Refused]:
    """One sentence with file and line for each guarantee that the machine cannot hold.

    The machine is the one the daemon sees, adjusted by the config file; without a daemon, the file alone counts.
    """
    settings = loaded.settings
    if not settings.queue:
        return []
    hint = "lower the guarantee; see the machine with: ginfo"
    return [Refused(f"{loaded.place_of(path)}: {text}", hint) for path, text in _found(settings, _nodes())]


def membership_warnings(loaded: Loaded) -> list[Refused]:
    """Warn of accounts open by default or without members, of unknown names, and of recent users who are shut out."""
    settings = loaded.settings
    found = (*membership_findings(settings), *unknown_members(settings, is_user, is_group))
    return [
        *(Refused(f"{loaded.place_of(path)}: {text}", hint) for path, text, hint in found),
        *_shut_out(settings),
    ]


def _shut_out(settings: Settings) -> list[Refused]:
    """Users of the last 30 days, as the daemon knows them, who can submit no job; none without a daemon."""
    try:
        with connect(autostart=False) as client:
            found = shut_out(client, settings)
    except GpuschedError:
        return []
    if not found:
        return []
    text = f"the settings shut out {RECENT}: {'; '.join(found)}"
    return [Refused(text, "let them in with: gctl account members NAME add=USER, or users of the queue")]


def tariff_warnings(loaded: Loaded) -> list[Refused]:
    """Warn of a tariff file that cannot be used."""
    try:
        read_tariff(loaded.settings.energy)
    except TariffError as error:
        return [Refused(f"{loaded.place_of('energy.tariff')}: {error.message}", error.hint)]
    return []


def effect_warnings(loaded: Loaded) -> list[Refused]:
    """Warn of settings of the file that change nothing."""
    return [Refused(f"{loaded.place_of(path)}: {text}", hint) for path, text, hint in without_effect(loaded)]


def untrusted_programs(loaded: Loaded) -> list[Refused]:
    """Programs of the site that the daemon would not execute here; of root's daemon only root can tell."""
    settings = loaded.settings
    if paths.finds_system() and os.geteuid() != 0:
        return []
    named = (("prolog.path", settings.prolog.path), ("epilog.path", settings.epilog.path))
    return [
        Refused(f"{loaded.place_of(name)}: {why}", "see: namei -l PATH   and docs/howto/prolog-and-epilog.md")
        for name, path in named
        if path is not None and (why := why_not_executed(path)) is not None
    ]


def _found(settings: Settings, nodes: tuple[NodeView, ...]) -> Iterator[tuple[str, str]]:
    own = settings.node
    if not nodes:
        cores = _UNLIMITED if own.cpus is None else own.cpus
        mem_mib = _UNLIMITED if own.mem_mib is None else float(own.mem_mib)
        yield from quota_problems(settings, Resources(_UNLIMITED, _UNLIMITED, cores, mem_mib))
        return
    if len(nodes) == 1:
        # The running daemon need not have loaded the file yet.
        (node,) = nodes
        cores = node.cpus if own.cpus is None else own.cpus
        mem_mib = node.mem_mib if own.mem_mib is None else own.mem_mib
        nodes = (replace(node, name=own.name or node.name, cpus=cores, mem_mib=mem_mib),)
    layout = ClusterLayout(nodes, settings)
    yield from quota_problems(settings, capacity_of(layout))
    yield from cells.cell_problems(settings, layout)


def _nodes() -> tuple[NodeView, ...]:
    """The daemon's nodes; empty without a daemon."""
    try:
        with connect(autostart=False) as client:
            found = client.call("GET", "/v1/snapshot")["snapshot"]["nodes"]
    except DaemonUnreachable:
        return ()
    return tuple(_node(node) for node in found)


def _node(node: Mapping[str, Any]) -> NodeView:
    known = [one.name for one in fields(GpuView)]
    gpus = tuple(GpuView(**{name: gpu[name] for name in known if name in gpu}) for gpu in node["gpus"])
    return NodeView(node["name"], node["cpus"], node["mem_mib"], gpus)


# --- files ------------------------------------------------------------------------------------------------


def _left_to_root() -> Finding:
    return passed("not checked: the system scheduler's files belong to root; check them with: sudo gpusched doctor")


def _nearest_existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _folder() -> Finding:
    for path in (paths.state_dir(), paths.runtime_dir()):
        at = _nearest_existing(path)
        if not os.access(at, os.W_OK | os.X_OK):
            return failed(f"{at} is not writable", "take ownership of it, or set GPUSCHED_HOME to a writable folder")
    return passed(f"{paths.state_dir()} is writable")


def _file_system() -> Finding:
    where = os.path.realpath(_nearest_existing(paths.state_dir()))
    kind = _kind_of(where)
    if kind in _REMOTE:
        return failed(f"{where} is on {kind}", "set GPUSCHED_HOME to a local disk: SQLite and the spool need one")
    return passed(f"{where} is on {kind}")


def _kind_of(path: str) -> str:
    best, kind = "", "unknown"
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, mount, found, *_ = line.split(" ")
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, found
    return kind


def _disk() -> Finding:
    where = _nearest_existing(paths.state_dir())
    free_mib = shutil.disk_usage(where).free >> 20
    text = f"{format_size_mib(free_mib)} free in {where}"
    return passed(text) if free_mib >= _LEAST_FREE_MIB else failed(text, "free some: a full disk stops submissions")


def _spool_executes() -> Finding:
    where = _nearest_existing(paths.spool_dir())
    if os.statvfs(where).f_flag & os.ST_RDONLY:
        return _no_script(where, OSError(errno.EROFS, ""))
    if not os.access(where, os.W_OK):
        return failed(f"{where} is not writable", "take ownership of it")
    if os.stat(where).st_uid not in (0, os.geteuid()):
        # The folder's owner could replace our script.
        return failed(f"{where} belongs to another user, so no script was tried there", "take ownership of it")
    path = os.path.join(where, f".doctor-{os.getpid()}")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="ascii") as file:
            file.write("#!/bin/sh\n")
        subprocess.run([path], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return _no_script(where, error)
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return passed(f"scripts can run in {where}")


def _no_script(where: str, error: OSError | subprocess.CalledProcessError) -> Finding:
    """The reason that a script cannot be written or run there, and the fix."""
    code = error.errno if isinstance(error, OSError) else None
    reason = str(error) if code is None else os.strerror(code)
    if os.statvfs(where).f_flag & os.ST_NOEXEC and code in (errno.EACCES, errno.EPERM):
        return failed(f"scripts cannot run in {where}: it is mounted noexec", "set GPUSCHED_HOME to another disk")
    hints = {
        errno.ENOSPC: f"free some space, see: df -h {where}; df -i {where}",
        errno.EDQUOT: "you have reached your disk quota: delete some files, see: quota -s",
        errno.EROFS: f"its disk is read-only, often after errors: check dmesg, then: mount -o remount,rw {where}",
        errno.EMFILE: "this shell has reached its limit of open files, see: ulimit -n",
        errno.ENFILE: "the machine has reached its limit of open files, see: sysctl fs.file-max",
    }
    return failed(f"scripts cannot run in {where}: {reason.lower()}", hints.get(code or 0, f"check: ls -ld {where}"))


def permissions() -> Finding:
    """Check that only the owner can change the daemon's files and read the private ones."""
    private = (paths.database(), paths.notify_file(), paths.spool_dir(), paths.state_dir(), paths.runtime_dir())
    for path in (*private, paths.config_file(), paths.log_file()):
        try:
            found = os.stat(path)
        except OSError:
            continue
        if found.st_uid not in {0, os.geteuid()}:
            chown = f"sudo chown {user_name(os.geteuid())} {path}"
            return failed(f"{path} belongs to {user_name(found.st_uid)}", f"{chown}; or set GPUSCHED_HOME")
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o022:
            return failed(f"{path} is writable by others (mode {mode:o})", f"chmod go-w {path}")
    for path in private[:2]:
        if os.path.exists(path) and (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o044:
            text = f"{path} is readable by others (mode {mode:o}) and may hold secrets"
            return warned(text, f"chmod go-rwx {path}")
    return passed("only their owner can change the files")


def table_at_rest() -> Finding:
    """Check the job table while no daemon runs; a running daemon checks it itself."""
    path = paths.database()
    lost = earlier_life().lost_table()
    if lost is not None:
        return failed(lost.message, lost.hint)
    found = store_status(path, thoroughly=True)
    if found is None:
        return passed("none yet; the first gsub creates it")
    if found.problem is not None:
        return failed(found.problem, found.hint)
    older = "; the daemon upgrades it at its next start" if found.is_older else ""
    return passed(f"{path} is sound, schema version {found.schema}{older}")


# --- the machine ------------------------------------------------------------------------------------------


def service() -> Finding:
    """Check that systemd starts the daemon at boot and has it running."""
    if not os.path.isdir("/run/systemd/system"):
        return passed("this machine does not run systemd; restart the daemon the way it was started")
    if not os.path.lexists(paths.SYSTEM_UNIT):
        hint = "it will not start at boot; install it with: sudo gpusched system install"
        return warned(f"there is no {paths.SYSTEM_UNIT}", hint)
    argv = ["systemctl", "show", "gpusched.service", "--property=ActiveState,UnitFileState,NRestarts"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return warned("systemctl does not answer", "try: systemctl status gpusched")
    return judge_service(dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line))


def judge_service(facts: Mapping[str, str]) -> Finding:
    """Args: facts: properties of the unit by name, as `systemctl show` prints them."""
    active, enabled = facts.get("ActiveState", ""), facts.get("UnitFileState", "")
    if active not in ("active", "reloading"):
        hint = "see why: journalctl -u gpusched; start it with: sudo systemctl start gpusched"
        return failed(f"gpusched.service is {active or 'unknown'}", hint)
    if enabled != "enabled":
        hint = "start it at boot: sudo systemctl enable gpusched"
        return warned(f"gpusched.service is running but {enabled or 'not enabled'}", hint)
    restarts = facts.get("NRestarts", "0")
    if restarts not in ("", "0"):
        text = f"systemd had to restart gpusched.service {plural(int(restarts), 'time')}"
        return warned(text, "see why: journalctl -u gpusched")
    return passed("gpusched.service is running and starts at boot")


def control_groups(root: str = _CGROUPS) -> Finding:
    """Check that the kernel can limit jobs to their cores and memory: cgroup v2 with its controllers."""
    try:
        with open(os.path.join(root, "cgroup.controllers"), encoding="ascii") as file:
            there = file.read().split()
    except OSError:
        hint = "boot with systemd.unified_cgroup_hierarchy=1; until then cores and memory are booked, not enforced"
        return warned(f"no cgroup v2 at {root}", hint)
    missing = [name for name in _CONTROLLERS if name not in there]
    if missing:
        hint = "enable them on the kernel command line, for example cgroup_enable=memory, and reboot"
        return warned(f"cgroup v2 without {', '.join(missing)}", hint)
    return passed(f"cgroup v2 with {', '.join(_CONTROLLERS)}")


def clock() -> Finding:
    """Check that the clock is synchronised and not behind the newest record of the job table."""
    found = store_status(paths.database(), thoroughly=False)
    newest_at = None if found is None else found.newest_at
    return judge_clock(time.time(), newest_at, _is_synchronised())


def judge_clock(now: float, newest_at: float | None, is_synchronised: bool | None) -> Finding:
    """Args: newest_at: time of the newest record. is_synchronised: None if unknown."""
    set_ntp = "sudo timedatectl set-ntp true"
    if newest_at is not None and newest_at > now + _LATE_S:
        text = f"the clock is {format_duration(newest_at - now)} behind the last job on record"
        return failed(text, f"set it, for example with: {set_ntp}")
    if is_synchronised is False:
        hint = f"begin times, deadlines and history depend on it; synchronise it with: {set_ntp}"
        return warned("the clock is unsynchronised", hint)
    return passed("plausible" if is_synchronised is None else "synchronised")


def _is_synchronised() -> bool | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        answer = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


# --- the driver -------------------------------------------------------------------------------------------

_READ_NVML = """
import pynvml
pynvml.nvmlInit()
version = pynvml.nvmlSystemGetDriverVersion()
print(version.decode() if isinstance(version, bytes) else version, pynvml.nvmlDeviceGetCount())
"""


def run_python(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run code that may hang in a separate interpreter. Raises: subprocess.TimeoutExpired.

    Not in the current folder, where Python would look for modules first: anyone may be able to write there.
    """
    argv = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=timeout_s, check=False)


def _nvml_module() -> Finding:
    """Runs in a separate process: a third-party pynvml warns on import, and the driver may hang."""
    code = "import pynvml; print(pynvml.__file__, hasattr(pynvml, 'nvmlDeviceGetTemperatureV'))"
    try:
        done = run_python(code, 20)
    except subprocess.TimeoutExpired:
        return failed("importing pynvml hangs", "reinstall nvidia-ml-py in this environment")
    where, _, is_new = done.stdout.strip().rpartition(" ")
    if not where:
        return failed("pynvml cannot be imported", "pip install 'nvidia-ml-py<14'")
    if is_new != "True":
        hint = "install gpusched in a separate environment; an old pynvml package hides nvidia-ml-py here"
        return failed(f"{where} is too old", hint)
    return passed(where)


def nvml() -> Finding:
    """Check that the driver responds; in a separate process, since it may hang."""
    if not nvidia_signs():
        return passed("no NVIDIA GPU here")
    try:
        done = run_python(_READ_NVML, 30)
    except subprocess.TimeoutExpired:
        hint = "look for Xid errors with: sudo dmesg | grep -i xid; a GPU that hangs the driver needs a reboot"
        return failed("the driver does not answer within 30 s", hint)
    words = done.stdout.split()
    if done.returncode == 0 and len(words) == 2:
        text = f"driver {words[0]}, {plural(int(words[1]), 'GPU')}"
        return passed(text) if words[1] != "0" else failed(text, "compare with: nvidia-smi")
    text = (done.stderr.strip().splitlines() or ["no error message"])[-1].rpartition(": ")[2]
    hint = "compare with nvidia-smi; reboot after a driver update; in a container, pass the GPUs through"
    return failed(f"NVML does not work: {text}", hint)


def _persistence() -> Finding:
    if not nvidia_signs():
        return passed("no NVIDIA GPU here")
    argv = ["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return passed("unknown: nvidia-smi does not answer")
    if done.returncode != 0 or all(mode in ("Enabled", "[N/A]") for mode in done.stdout.split()):
        return passed("on")
    hint = "turn it on with: sudo nvidia-smi -pm 1   (the first job on an idle GPU then starts seconds sooner)"
    return warned("off", hint)
