"""NVIDIA's MPS: which cards have a control daemon, and control daemons for the runs that need one.

There is one control daemon per card, so that a fault ends the clients of no other card, and it serves one user. Either
the administrator runs them, with their pipes in `[gpu] mps_dir`/UUID; or gpusched starts them as the users of the runs,
with their pipes in `FOLDER/UID/UUID`, and ends them after the last run. They outlive this process, and the folders are
the only record of them: the next reader finds them there.

A file in a user's folder is that user's word. A pid in it is believed only of a process of this name and this user, and
ending one is done with the user's rights. Of the administrator's folders, those that another user could have written to
prove nothing, and jobs would connect to that user: the folder must belong to root or to the user of this process, with
no other user able to write there, and so must the file that names the process.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpusched.gpu.mig_layout import make_layouts
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.mig import MigOrder
from gpusched.model.value import replace

if TYPE_CHECKING:
    from gpusched.ports import GpuSource

MPS_PID_FILE = "nvidia-cuda-mps-control.pid"
MPS_NAME = "nvidia-cuda-mps"
"""The kernel's name of the control daemon and the servers: at most 15 characters."""
CONTROL = "nvidia-cuda-mps-control"
VOLTA = 7.0
"""Compute capability from which MPS limits each client."""

_START_S = 2.0
"""Longest time for a control daemon to go into the background."""
_QUIT_S = 5
"""Time for servers to end before the control daemon kills them."""
_KILL_S = 15.0
"""Time after which a control daemon that was asked to quit is killed."""
_RETRY_S = 5.0
_SEARCH_S = 10.0
"""Interval between searches of PATH for the control daemon: there may be a hundred readings a second."""
_CLOSE_S = 0.5


def is_mps_running(folder: str, proc: str = "/proc") -> bool:
    """Whether a live control daemon of the administrator has its pipes in this folder."""
    if not (_is_ours(os.path.realpath(os.path.dirname(folder))) and _is_ours(folder)):
        return False
    return control_pid(folder, frozenset({0, os.geteuid()}), proc) is not None


def control_pid(folder: str, uids: frozenset[int], proc: str = "/proc") -> int | None:
    """The control daemon with its pipes in this folder; None unless file and process belong to one of these users."""
    try:
        fd = os.open(os.path.join(folder, MPS_PID_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_uid not in uids:
            return None
        word = file.read(32).strip()
    if not word.isdigit():
        return None
    process = f"{proc}/{int(word)}"
    try:
        if os.stat(process).st_uid not in uids:
            return None
        with open(f"{process}/comm", encoding="utf-8", errors="replace") as comm:
            return int(word) if comm.read().strip() == MPS_NAME else None
    except OSError:
        return None


def _is_ours(folder: str) -> bool:
    """Whether no other user can replace its content; the sticky bit protects each user's files."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid()) and not is_shared


def why_not_mps(gpu: GpuSample, has_control: bool) -> str | None:
    """Why jobs cannot have a share of a card through MPS, as a clause; None if they can."""
    if gpu.mig_enabled or gpu.mig_parent is not None:
        return "it is divided by MIG"
    if gpu.cuda_capability is None:
        return "it is not known to be an NVIDIA GPU"
    if gpu.cuda_capability < VOLTA:
        return "MPS limits clients only on GPUs since Volta"
    return None if has_control else f"{CONTROL} is not installed"


class WithMps:
    """A source that also says which cards MPS serves, and keeps control daemons for runs.

    Args: source: that reads the cards; given: folder of the administrator's control daemons; own: folder for those of
    runs. With the first, none are started.
    """

    def __init__(
        self, source: GpuSource, given: str | None, own: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._given = given
        self._own = own
        self._clock = clock
        self._wanted: dict[str, int] | None = None
        self._troubles: dict[str, tuple[float, str]] = {}
        """When and why starting one failed, by UUID."""
        self._ending: dict[str, float] = {}
        """Folders of those that were asked to quit, and when."""
        self._helpers: list[subprocess.Popen[bytes]] = []
        """Commands that were not waited for."""
        self._has_control = False
        self._next_search = float("-inf")
        self._users: list[int] = []
        """Who has a folder for control daemons."""

    def want(self, mps: Mapping[str, int]) -> None:
        """Replace what is wanted: the uid of the user whom MPS is to serve, by UUID; the next reading acts on it."""
        self._wanted = dict(mps)

    def read(self) -> GpuReading:
        """Read the source once; notes what MPS does on each card; not on MIG instances."""
        reading = self._source.read()
        if self._given is not None:
            return replace(reading, gpus=tuple(self._with_given(gpu) for gpu in reading.gpus))
        if self._own is None:
            return reading
        self._helpers = [helper for helper in self._helpers if helper.poll() is None]
        if self._clock() >= self._next_search:
            self._next_search = self._clock() + _SEARCH_S
            self._has_control = shutil.which(CONTROL) is not None
        self._users = self._list_users()
        return replace(reading, gpus=tuple(self._with_own(gpu, self._has_control) for gpu in reading.gpus))

    def carry_out(self, orders: Sequence[MigOrder], is_wanted: Callable[[], bool]) -> None:
        """Have layouts made by the source. Raises: Abandoned."""
        make_layouts(self._source, orders, is_wanted)

    def close(self) -> None:
        for helper in self._helpers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(_CLOSE_S)
        self._source.close()

    def _with_given(self, gpu: GpuSample) -> GpuSample:
        if gpu.mig_parent is not None:
            return gpu
        is_there = is_mps_running(f"{self._given}/{gpu.uuid}")
        why_not = why_not_mps(gpu, has_control=True)
        if why_not is None and not is_there:
            why_not = "no MPS control daemon of [gpu] mps_dir runs for it"
        return replace(gpu, mps=is_there, why_not_mps=why_not)

    def _with_own(self, gpu: GpuSample, has_control: bool) -> GpuSample:
        why_not = why_not_mps(gpu, has_control)
        if self._wanted is None or gpu.mig_parent is not None or "/" in gpu.uuid:
            return replace(gpu, why_not_mps=why_not)
        uid = self._wanted.get(gpu.uuid)
        running = self._running(gpu.uuid)
        self._ending = {folder: at for folder, at in self._ending.items() if not self._is_over(folder, gpu, running)}
        # One that was asked to quit takes no further clients.
        leaving = {one for one in running if one != uid or self._folder(one, gpu.uuid) in self._ending}
        for one in leaving:
            self._end(one, self._folder(one, gpu.uuid), running[one])
        trouble = None
        if uid is None:
            self._troubles.pop(gpu.uuid, None)
        elif not running:
            trouble = self._start(uid, gpu.uuid)
            self._users = self._list_users()
            running = self._running(gpu.uuid)
        # Servers that are about to end hold memory, too.
        is_served = bool(running) if uid is None else uid in running and uid not in leaving
        is_expected = uid is not None or is_served
        return replace(gpu, why_not_mps=why_not, mps=is_served if is_expected else None, mps_trouble=trouble)

    def _is_over(self, folder: str, gpu: GpuSample, running: Mapping[int, int]) -> bool:
        """Whether a control daemon of this card has quit."""
        parent, uuid = os.path.split(folder)
        return uuid == gpu.uuid and int(os.path.basename(parent)) not in running

    def _folder(self, uid: int, uuid: str) -> str:
        return f"{self._own}/{uid}/{uuid}"

    def _running(self, uuid: str) -> dict[int, int]:
        """Pids of the control daemons of a card, by uid."""
        found = ((uid, control_pid(self._folder(uid, uuid), frozenset({uid}))) for uid in self._users)
        return {uid: pid for uid, pid in found if pid is not None}

    def _list_users(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._own) if name.isdigit()]
        except OSError:
            return []

    def _start(self, uid: int, uuid: str) -> str | None:
        """Start a control daemon as its user. Returns why that failed, as a clause."""
        failed_at, why = self._troubles.get(uuid, (float("-inf"), ""))
        if self._clock() - failed_at < _RETRY_S:
            return why
        why_not = self._try_to_start(uid, uuid)
        if why_not is None:
            self._troubles.pop(uuid, None)
        else:
            self._troubles[uuid] = self._clock(), why_not
        return why_not

    def _try_to_start(self, uid: int, uuid: str) -> str | None:
        program = shutil.which(CONTROL)
        if program is None:
            return f"{CONTROL} is not installed"
        try:
            self._make_folder(uid)
            code, said = _start_as(uid, program, self._folder(uid, uuid))
        except subprocess.TimeoutExpired:
            return f"{CONTROL} -d did not return within {_START_S:g} s"
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            return f"{CONTROL} cannot be started: {error}"
        return f"{CONTROL} ended with code {code}{': ' if said else ''}{said}" if code else None

    def _make_folder(self, uid: int) -> None:
        """A folder that only the user can read and write, in one that only this process's user can change."""
        assert self._own is not None
        os.makedirs(self._own, mode=0o711, exist_ok=True)
        if os.geteuid() == 0:
            os.chmod(self._own, 0o711)
        folder = f"{self._own}/{uid}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            if os.geteuid() == 0:
                os.chown(folder, uid, pwd.getpwuid(uid).pw_gid)
        if os.lstat(folder).st_uid != uid:
            raise OSError(f"{folder} does not belong to uid {uid}")

    def _end(self, uid: int, folder: str, pid: int) -> None:
        """Ask a control daemon to quit; kill it when it does not. Both with its user's rights."""
        program, asked_at, now = shutil.which(CONTROL), self._ending.get(folder), self._clock()
        try:
            if asked_at is None and program is not None:
                self._ending[folder] = now
                self._helpers.append(_tell_as(uid, [program], folder, f"quit -t {_QUIT_S}\n".encode()))
            elif asked_at is None or now - asked_at >= _KILL_S:
                self._ending[folder] = now
                self._helpers.append(_tell_as(uid, ["/bin/kill", "-KILL", str(pid)], folder))
        except (OSError, KeyError, subprocess.SubprocessError):
            # The next reading tries again, or finds it gone.
            return


_SET_UP = 'umask 077; mkdir -p "$CUDA_MPS_LOG_DIRECTORY" && exec "$@"'
"""Makes the folders with the user's rights."""


def _environment(folder: str) -> dict[str, str]:
    return {
        "CUDA_MPS_PIPE_DIRECTORY": folder,
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_VISIBLE_DEVICES": os.path.basename(folder),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }


def _rights(uid: int) -> dict[str, Any]:
    """What makes `Popen` run a command as this user. Raises: KeyError for an unknown one."""
    if os.geteuid() != 0 or uid == 0:
        return {}
    account = pwd.getpwuid(uid)
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return {"user": uid, "group": account.pw_gid, "extra_groups": groups}


def _start_as(uid: int, program: str, folder: str) -> tuple[int, str]:
    """Start a control daemon in the background: the exit code, and what it said.

    Raises: KeyError for an unknown user, OSError, SubprocessError.
    """
    # A pipe would be kept open by the background process.
    with tempfile.TemporaryFile() as said:
        code = subprocess.run(
            ["/bin/sh", "-c", _SET_UP, "sh", program, "-d"],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=_environment(folder),
            cwd="/",
            start_new_session=True,
            timeout=_START_S,
            check=False,
            **_rights(uid),
        ).returncode
        said.seek(0)
        return code, " ".join(said.read(4096).decode("utf-8", "replace").split())[:200]


def _tell_as(uid: int, argv: list[str], folder: str, text: bytes = b"") -> subprocess.Popen[bytes]:
    """Run a command without waiting for it. Raises: as `_start_as`."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(folder),
        cwd="/",
        start_new_session=True,
        **_rights(uid),
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(text)
        process.stdin.close()
    return process
