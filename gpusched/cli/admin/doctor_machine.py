"""What `gpusched doctor` looks at in the machine: control groups, clock, permissions, the driver, a table at rest."""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
import subprocess
import sys
import time

from gpusched import paths
from gpusched.gpu.choose import nvidia_signs
from gpusched.model.units import format_duration, plural
from gpusched.store.look import look

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Check = dict[str, Any]

_CGROUPS = "/sys/fs/cgroup"
_WANTED = ("cpu", "memory", "pids")
_LATE_S = 60.0
_TIME_ERROR = 5
"""What adjtimex(2) answers when nothing keeps the clock."""
_TIMEX_BYTES = 512
"""More than `struct timex` has on any platform."""


def check(name: str, ok: bool, text: str, hint: str = "") -> Check:
    """One line of the report; a failure means that something does not work."""
    return {"check": name, "ok": ok, "level": "ok" if ok else "fail", "text": text, "hint": "" if ok else hint}


def advice(name: str, ok: bool, text: str, hint: str) -> Check:
    """A check whose failure costs something but breaks nothing."""
    return {"check": name, "ok": True, "level": "ok" if ok else "warn", "text": text, "hint": "" if ok else hint}


def control_groups(root: str = _CGROUPS) -> Check:
    """Whether the kernel can keep jobs to their cores and memory: version 2 with its controllers."""
    try:
        with open(os.path.join(root, "cgroup.controllers"), encoding="ascii") as file:
            there = file.read().split()
    except OSError:
        hint = "boot with systemd.unified_cgroup_hierarchy=1; until then cores and memory are booked, not enforced"
        return advice("control groups", False, f"no cgroup v2 at {root}", hint)
    missing = [name for name in _WANTED if name not in there]
    if missing:
        hint = "enable them on the kernel's command line, as with cgroup_enable=memory, then reboot"
        return advice("control groups", False, f"cgroup v2 without {', '.join(missing)}", hint)
    return advice("control groups", True, f"cgroup v2 with {', '.join(_WANTED)}", "")


def clock() -> Check:
    """Whether the clock is kept, and not behind what the table has recorded."""
    found = look(paths.database(), thoroughly=False)
    newest_at = None if found is None else found.newest_at
    return judge_clock(time.time(), newest_at, _is_kept())


def judge_clock(now: float, newest_at: float | None, is_kept: bool | None) -> Check:
    """Args: newest_at: the last instant on record. is_kept: whether something sets the clock; None when unknown."""
    if newest_at is not None and newest_at > now + _LATE_S:
        text = f"the clock is {format_duration(newest_at - now)} behind the last job on record"
        return check("clock", False, text, "set it, for example with: sudo timedatectl set-ntp true")
    if is_kept is False:
        hint = "begin times, deadlines and history go by it; keep it with: sudo timedatectl set-ntp true"
        return advice("clock", False, "nothing keeps the clock right (the kernel calls it unsynchronised)", hint)
    return check("clock", True, "plausible" if is_kept is None else "synchronised")


def _is_kept() -> bool | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        answer = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


def permissions() -> Check:
    """Whether what is the daemon's is changed by nobody else, and what is private is read by nobody else."""
    mine = {0, os.geteuid()}
    private = (paths.database(), paths.notify_file(), paths.spool_dir(), paths.state_dir(), paths.runtime_dir())
    for path in (*private, paths.config_file(), paths.log_file()):
        try:
            found = os.stat(path)
        except OSError:
            continue
        if found.st_uid not in mine:
            me = _name(os.geteuid())
            text = f"{path} belongs to {_name(found.st_uid)}"
            return check("permissions", False, text, f"give it back: sudo chown {me} {path}; or set GPUSCHED_HOME")
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o022:
            text = f"{path} can be changed by others (mode {mode:o})"
            return check("permissions", False, text, f"chmod go-w {path}")
    for path in private[:2]:
        if os.path.exists(path) and (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o044:
            text = f"{path} can be read by others (mode {mode:o}), and may hold secrets"
            return advice("permissions", False, text, f"chmod go-rwx {path}")
    return check("permissions", True, "files are changed by their owner alone")


def service() -> Check:
    """Whether systemd starts the daemon with the machine, and has it running."""
    if not os.path.isdir("/run/systemd/system"):
        return check("service", True, "no systemd here: whoever started the daemon looks after it")
    if not os.path.lexists(paths.SYSTEM_UNIT):
        hint = "it does not come back after a reboot; install it with: sudo gpusched system install"
        return advice("service", False, f"there is no {paths.SYSTEM_UNIT}", hint)
    argv = ["systemctl", "show", "gpusched.service", "--property=ActiveState,UnitFileState,NRestarts"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return advice("service", False, "systemctl does not answer", "try: systemctl status gpusched")
    facts = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return judge_service(facts)


def judge_service(facts: Mapping[str, str]) -> Check:
    """Args: facts: properties of the unit by name, as `systemctl show` prints them."""
    active, enabled = facts.get("ActiveState", ""), facts.get("UnitFileState", "")
    if active not in ("active", "reloading"):
        hint = "see why: journalctl -u gpusched; start it with: sudo systemctl start gpusched"
        return check("service", False, f"gpusched.service is {active or 'unknown'}", hint)
    if enabled != "enabled":
        hint = "start it with the machine: sudo systemctl enable gpusched"
        return advice("service", False, f"gpusched.service runs and is {enabled or 'not enabled'}", hint)
    restarts = facts.get("NRestarts", "0")
    if restarts not in ("", "0"):
        hint = "see why: journalctl -u gpusched"
        return advice(
            "service", False, f"gpusched.service had to be started again {plural(int(restarts), 'time')}", hint
        )
    return check("service", True, "gpusched.service runs, and starts with the machine")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_READ_NVML = """
import pynvml
pynvml.nvmlInit()
version = pynvml.nvmlSystemGetDriverVersion()
print(version.decode() if isinstance(version, bytes) else version, pynvml.nvmlDeviceGetCount())
"""


def run_python(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Have another interpreter do this, which may hang. Raises: subprocess.TimeoutExpired.

    Not in the folder where the command was typed, in which it would look for modules first: that may be anybody's.
    """
    argv = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=timeout_s, check=False)


def nvml() -> Check:
    """Whether the driver answers; in a process of its own, since it may hang."""
    if not nvidia_signs():
        return check("nvml", True, "no NVIDIA GPU here")
    try:
        done = run_python(_READ_NVML, 30)
    except subprocess.TimeoutExpired:
        hint = "look for XID lines in: sudo dmesg | grep -i xid; a card that hangs the driver needs a reboot"
        return check("nvml", False, "the driver does not answer within 30 s", hint)
    words = done.stdout.split()
    if done.returncode == 0 and len(words) == 2:
        return check(
            "nvml",
            words[1] != "0",
            f"driver {words[0]}, {plural(int(words[1]), 'GPU')}",
            "see whether nvidia-smi lists any",
        )
    text = (done.stderr.strip().splitlines() or ["it says nothing"])[-1].rpartition(": ")[2]
    hint = "see what nvidia-smi says; after an update of the driver reboot; in a container pass the GPUs in"
    return check("nvml", False, f"NVML does not work: {text}", hint)


def table_at_rest() -> Check:
    """The job table, of which the daemon says nothing while it does not run."""
    path = paths.database()
    found = look(path, thoroughly=True)
    if found is None:
        return check("database", True, "there is none yet; the first gsub makes it")
    if found.problem is not None:
        return check(
            "database", False, found.problem, f"{found.hint}; a backup is put back with: gpusched restore FILE"
        )
    older = ", which the daemon brings up to date when it starts" if found.is_older else ""
    return check("database", True, f"{path} is sound, schema version {found.schema}{older}")
