"""What `gpusched doctor` looks at, with and without a running daemon. Starts none."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gpusched import __version__, paths
from gpusched.cli.admin.doctor_machine import (
    advice,
    check,
    clock,
    control_groups,
    nvml,
    permissions,
    run_python,
    service,
    table_at_rest,
)
from gpusched.client import connect
from gpusched.config import load_settings
from gpusched.errors import DaemonUnreachable, GpuschedError
from gpusched.gpu.choose import choose, nvidia_signs
from gpusched.model.units import format_size_mib, plural

Check = dict[str, Any]

_LEAST_FREE_MIB = 100
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "beegfs", "9p"}


def examine() -> list[Check]:
    """All checks, the client's own first, then those that only the daemon can make.

    On a machine with a scheduler for everybody root looks at that one's files; others cannot, and need not.
    """
    is_system = paths.finds_system()
    if is_system and os.geteuid() == 0:
        paths.serve_system()
    own: tuple[Callable[[], Check], ...] = (_folder, _file_system, _disk, permissions, _spool_executes)
    if is_system:
        own = (*own, service) if os.geteuid() == 0 else (_left_to_root, service)
    of_daemon, source = _of_daemon(is_system)
    driver = (_simulated,) if source == "simulated" else (_nvml_module, nvml, _persistence)
    first = (_versions, _config, _accounts, _targets)
    steps: tuple[Callable[[], Check], ...] = (*first, *own, control_groups, clock, *driver)
    return [*(step() for step in steps), *of_daemon]


def _of_daemon(is_system: bool) -> tuple[list[Check], str | None]:
    """What the daemon says of itself, and where its GPUs come from; without one, where they would come from."""
    checks: list[Check] = []
    source = _chosen_source()
    try:
        with connect(autostart=False) as client:
            facts = client.call("GET", "/v1/status")["daemon"]
            source = facts["gpu_source"]
            same = facts["version"] == __version__
            text = f"daemon {facts['version']} answers on {facts['socket']}"
            hint = "restart it with: " + (
                "sudo systemctl restart gpusched" if is_system else "gpusched daemon stop && gpusched daemon start"
            )
            checks.append(advice("daemon", same, text if same else f"{text}, but this is {__version__}", hint))
            checks.extend(client.call("GET", "/v1/doctor")["checks"])
    except DaemonUnreachable as error:
        chosen = os.environ.get("GPUSCHED_SOCKET")
        text = error.message if chosen or is_system else "does not run; the first gsub starts it"
        hint = "see why: journalctl -u gpusched; start it with: sudo systemctl start gpusched"
        hint = "unset GPUSCHED_SOCKET, or start that daemon" if chosen else hint
        checks.append(check("daemon", not (chosen or is_system), text, hint))
        if not is_system or os.geteuid() == 0:
            checks.append(table_at_rest())
    except GpuschedError as error:
        checks.append(check("daemon", False, error.message, error.hint))
    return checks, source


def _chosen_source() -> str | None:
    try:
        return choose(load_settings(paths.config_file(), os.environ).settings.gpu, os.environ).kind
    except GpuschedError:
        return None  # another check says so


def _simulated() -> Check:
    # Device nodes may well be here, of a driver that nobody means to use.
    return check("nvml", True, "not asked: the GPUs are simulated")


def _versions() -> Check:
    text = f"gpusched {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    ok = sqlite3.sqlite_version_info >= (3, 37) and sys.platform == "linux"
    return check("versions", ok, f"{text}, {platform.system()}", "Linux and SQLite 3.37 or newer are needed")


def _config() -> Check:
    try:
        load_settings(paths.config_file(), os.environ)
    except GpuschedError as error:
        return check("config", False, error.message, error.hint)
    where = paths.config_file()
    return check("config", True, f"{where} is fine" if os.path.exists(where) else "no config file; the defaults hold")


def _accounts() -> Check:
    from gpusched.cli.admin.promises import membership_warnings

    try:
        loaded = load_settings(paths.config_file(), os.environ)
    except GpuschedError:
        return check("accounts", True, "not looked at: the config file is wrong")
    if not loaded.settings.account:
        return check("accounts", True, "none is configured: each user's use counts for that user")
    warnings = membership_warnings(loaded)
    if warnings:
        return advice("accounts", False, "; ".join(warning.message for warning in warnings), warnings[0].hint)
    return check("accounts", True, f"{plural(len(loaded.settings.account), 'account')}, each with members")


def _targets() -> Check:
    from gpusched.cli.notifying import problems_in_targets

    problems = problems_in_targets()
    if problems:
        return advice("notify", False, problems[0].message, problems[0].hint)
    where = paths.notify_file()
    text = f"{where} is fine" if os.path.exists(where) else f"no {where}: --notify has nobody to tell"
    return advice("notify", True, text, "")


def _left_to_root() -> Check:
    return check("folders", True, "the files of this machine's scheduler are root's: sudo gpusched doctor looks there")


def _nearest_existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _folder() -> Check:
    for path in (paths.state_dir(), paths.runtime_dir()):
        at = _nearest_existing(path)
        if not os.access(at, os.W_OK | os.X_OK):
            hint = "make it yours, or set GPUSCHED_HOME to a folder that you can write"
            return check("folders", False, f"{at} cannot be written", hint)
    return check("folders", True, f"{paths.state_dir()} can be written")


def _file_system() -> Check:
    where = os.path.realpath(_nearest_existing(paths.state_dir()))
    kind = _kind_of(where)
    hint = "set GPUSCHED_HOME to a local disk: SQLite and the spool need one"
    return check("file system", kind not in _REMOTE, f"{where} lies on {kind}", hint)


def _kind_of(path: str) -> str:
    best, kind = "", "unknown"
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, mount, found, *_ = line.split(" ")
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, found
    return kind


def _disk() -> Check:
    where = _nearest_existing(paths.state_dir())
    free_mib = shutil.disk_usage(where).free >> 20
    hint = "free some: a full disk stops submissions"
    return check("disk", free_mib >= _LEAST_FREE_MIB, f"{format_size_mib(free_mib)} free in {where}", hint)


def _spool_executes() -> Check:
    where = _nearest_existing(paths.spool_dir())
    if os.statvfs(where).f_flag & os.ST_RDONLY:
        return check("spool", False, *_why_no_script(where, OSError(errno.EROFS, "")))
    if not os.access(where, os.W_OK):
        return check("spool", False, f"{where} cannot be written", "make it yours")
    if os.stat(where).st_uid not in (0, os.geteuid()):
        # Its owner could put another script in the place of ours.
        return check("spool", False, f"{where} is somebody else's: no script is tried there", "make it yours")
    path = os.path.join(where, f".doctor-{os.getpid()}")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="ascii") as file:
            file.write("#!/bin/sh\n")
        subprocess.run([path], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return check("spool", False, *_why_no_script(where, error))
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return check("spool", True, f"scripts can be executed in {where}")


def _why_no_script(where: str, error: OSError | subprocess.CalledProcessError) -> tuple[str, str]:
    """What keeps a script from being written or run there, and what to do."""
    code = error.errno if isinstance(error, OSError) else None
    reason = str(error) if code is None else os.strerror(code)
    if os.statvfs(where).f_flag & os.ST_NOEXEC and code in (errno.EACCES, errno.EPERM):
        return f"no script runs in {where}: its disk is mounted noexec", "set GPUSCHED_HOME to another disk"
    hints = {
        errno.ENOSPC: f"free some space, see: df -h {where}; df -i {where}",
        errno.EDQUOT: "your quota there is used up: remove something of yours, see: quota -s",
        errno.EROFS: f"its disk is read-only, often after errors: look at dmesg, then: mount -o remount,rw {where}",
        errno.EMFILE: "this shell may not open more files, see: ulimit -n",
        errno.ENFILE: "the machine may not open more files, see: sysctl fs.file-max",
    }
    return f"no script runs in {where}: {reason.lower()}", hints.get(code or 0, f"look at it with: ls -ld {where}")


def _nvml_module() -> Check:
    """In a process of its own: a foreign pynvml warns on import, and the driver may hang."""
    code = "import pynvml; print(pynvml.__file__, hasattr(pynvml, 'nvmlDeviceGetTemperatureV'))"
    try:
        done = run_python(code, 20)
    except subprocess.TimeoutExpired:
        return check("nvml module", False, "importing pynvml hangs", "reinstall nvidia-ml-py in this environment")
    where, _, is_new = done.stdout.strip().rpartition(" ")
    hint = "install gpusched in an environment of its own; an old pynvml package hides nvidia-ml-py here"
    if not where:
        return check("nvml module", False, "pynvml cannot be imported", "pip install 'nvidia-ml-py<14'")
    return check("nvml module", is_new == "True", where if is_new == "True" else f"{where} is too old", hint)


def _persistence() -> Check:
    if not nvidia_signs():
        return check("persistence mode", True, "no NVIDIA GPU here")
    argv = ["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return check("persistence mode", True, "unknown: nvidia-smi does not answer")
    modes = done.stdout.split()
    ok = done.returncode != 0 or all(mode in ("Enabled", "[N/A]") for mode in modes)
    hint = "switch it on with: sudo nvidia-smi -pm 1   (the first job after idle starts seconds sooner)"
    return advice("persistence mode", ok, "on" if ok else "off", hint)
