"""Reads processes and their descendants from /proc, and signals them without trusting a bare pid.

Source: proc(5), pidfd_open(2).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    # The public module builds enums at import; every supervisor would carry them.
    import _signal as signal

HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
KILL_ROUNDS = 50
"""How often a growing tree is frozen again before the kill; a fork bomb stands still after two or three."""
FREEZE_ROUNDS = 5
"""Looks in a row; who is inside a system call that cannot be interrupted stands still only after it."""


class Process:
    """One line of /proc/PID/stat."""

    __slots__ = ("name", "pid", "ppid", "session", "start_ticks", "state")

    def __init__(self, pid: int, name: str, state: str, ppid: int, session: int, start_ticks: int) -> None:
        self.pid = pid
        self.name = name
        self.state = state
        self.ppid = ppid
        self.session = session
        self.start_ticks = start_ticks

    @property
    def is_alive(self) -> bool:
        """Not a zombie, which no signal can move."""
        return self.state not in "ZXx"


def read_process(pid: int) -> Process | None:
    """The process with this pid now, None when there is none."""
    data = _read(f"/proc/{pid}/stat")
    # The name may hold blanks and brackets: it ends at the last bracket.
    close = data.rfind(b")")
    if close < 0:
        return None
    name = data[data.find(b"(") + 1 : close].decode("utf-8", "replace")
    rest = data[close + 2 :].split()
    return Process(pid, name, rest[0].decode(), int(rest[1]), int(rest[3]), int(rest[19]))


def lives(pid: int, start_ticks: int) -> bool:
    """Whether this very process is there, and not another one that got its pid."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.is_alive


def real_uid(pid: int) -> int | None:
    """Whose process it is: who may send it signals. None when it is gone."""
    for line in _read(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def has_other_rights(pid: int) -> bool:
    """Whether it runs a set-user-ID program, with rights that are not its owner's alone."""
    for line in _read(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(b"Uid:"):
            return len(set(line.split()[1:])) > 1
    return False


def peak_kib(pid: int) -> int:
    """The largest resident size that the process has had; 0 when it is gone or has none."""
    for line in _read(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1])
    return 0


def all_pids() -> list[int]:
    """Every pid this process can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> dict[int, Process]:
    """Live processes below `root` by pid.

    The kernel may leave out a child when a sibling ends during the walk, so callers repeat it.
    """
    try:
        found = _walk_children(root)
    except FileNotFoundError:
        # A kernel without CONFIG_PROC_CHILDREN.
        found = _walk_parents(root)
    return {pid: process for pid, process in found.items() if process.is_alive}


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process that has this pid now; None on a kernel or Python without pidfds.

    Raises: ProcessLookupError when there is none.
    """
    if not HAS_PIDFD:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def send(process: Process, number: int) -> bool:
    """Signal this process; another one that got its pid meanwhile is spared. False when it was not sent."""
    try:
        fd = open_pidfd(process.pid)
    except ProcessLookupError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return False
        if fd is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or a set-user-ID program in an unprivileged user's job: nothing more can be done.
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True


def kill_tree(root: int) -> dict[int, Process]:
    """`kill_all` of what is below `root`."""
    return kill_all(lambda: descendants(root))


def signal_all(find: Callable[[], dict[int, Process]], number: int, spared: int | None = None) -> None:
    """Send a signal once to every process that is found, also to those born during the walk.

    Args: find: live processes by pid, looked up anew; spared: left out, unless it is the only one at the beginning.
    """
    told: set[tuple[int, int]] = set()
    found = find()
    # Decided once: whoever ends at the signal must not leave the spared one behind as the only one.
    left_out = spared if len(found) > 1 else None
    for _ in range(5):
        fresh = [p for p in found.values() if p.pid != left_out and (p.pid, p.start_ticks) not in told]
        if not fresh:
            return
        for process in fresh:
            send(process, number)
            told.add((process.pid, process.start_ticks))
        found = find()


def freeze_all(find: Callable[[], dict[int, Process]]) -> bool:
    """STOP everything that is found. Whether all of it stands still now; if not, callers repeat it.

    What stands still bears no children, so one look that finds nobody running is the last one.
    """
    for _ in range(FREEZE_ROUNDS):
        running = [process for process in find().values() if process.state not in "Tt"]
        if not running:
            return True
        for process in running:
            send(process, signal.SIGSTOP)
    return False


def kill_all(find: Callable[[], dict[int, Process]]) -> dict[int, Process]:
    """KILL everything that is found: freeze first, so that nothing forks away. Returns what was killed.

    A process may come to light only when its parent is gone: callers repeat until nothing is left.
    """
    frozen: dict[int, Process] = {}
    for _ in range(KILL_ROUNDS):
        fresh = [p for pid, p in find().items() if pid not in frozen]
        if not fresh:
            break
        for process in fresh:
            send(process, signal.SIGSTOP)
            frozen[process.pid] = process
    for process in frozen.values():
        send(process, signal.SIGKILL)
    return frozen


def _walk_children(root: int) -> dict[int, Process]:
    found: dict[int, Process] = {}
    queue = [root]
    while queue:
        parent = queue.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            if parent == root:
                raise
            continue
        for thread in threads:
            path = f"/proc/{parent}/task/{thread}/children"
            for word in _read(path, must_exist=parent == root).split():
                pid = int(word)
                process = read_process(pid)
                if process is not None and pid not in found:
                    found[pid] = process
                    queue.append(pid)
    return found


def _walk_parents(root: int) -> dict[int, Process]:
    children: dict[int, list[Process]] = {}
    for pid in all_pids():
        process = read_process(pid)
        if process is not None:
            children.setdefault(process.ppid, []).append(process)
    found: dict[int, Process] = {}
    queue = [root]
    while queue:
        for process in children.get(queue.pop(), ()):
            found[process.pid] = process
            queue.append(process.pid)
    return found


def _read(path: str, must_exist: bool = False) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        if must_exist:
            raise
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
    except OSError:
        # Ended while being read: ESRCH.
        return b""
    finally:
        os.close(fd)
    return b"".join(parts)
