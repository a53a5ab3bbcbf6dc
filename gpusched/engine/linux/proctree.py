"""Reads processes and their descendants from /proc, and signals them without trusting a bare pid.

Source: proc(5), pidfd_open(2).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Container, Iterable, Iterator

    Find = Callable[[Container[int]], Iterable["Process"]]
    """Finds processes, parents first; those whose pid is in the argument are stopped or dead, and are skipped."""
else:
    # The public module builds enums at import; every supervisor would carry them.
    import _signal as signal

HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
KILL_ROUNDS = 50
"""Maximum rounds of freezing a growing tree before the kill; a fork bomb is stopped after two or three."""
SIGNAL_SCANS = 5
"""Maximum scans for processes before they are signalled."""
SHELLS = frozenset(
    {"ash", "bash", "bsd-csh", "busybox", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "yash", "zsh"}
)
FREEZE_ROUNDS = 5
"""Maximum consecutive scans; a process in an uninterruptible system call stops only after it."""


class Process:
    """One line of /proc/PID/stat."""

    __slots__ = ("group", "name", "pid", "ppid", "session", "start_ticks", "state", "threads")

    def __init__(
        self,
        pid: int,
        name: str,
        state: str,
        ppid: int,
        session: int,
        start_ticks: int,
        group: int = 0,
        threads: int = 1,
    ) -> None:
        self.pid = pid
        self.name = name
        self.state = state
        self.ppid = ppid
        self.session = session
        self.start_ticks = start_ticks
        self.group = group
        self.threads = threads

    @property
    def is_alive(self) -> bool:
        """Not a zombie, which no signal can affect. A zombie leader with other threads left counts as alive."""
        return self.state not in "ZXx" or self.threads > 1

    @property
    def is_stopped(self) -> bool:
        """Stopped: it neither forks nor changes its group until continued."""
        return self.state in "Tt"


def read_process(pid: int) -> Process | None:
    """The process with this pid now, None when there is none."""
    data = read_file(f"/proc/{pid}/stat")
    # The name may hold blanks and brackets: it ends at the last bracket.
    close = data.rfind(b")")
    if close < 0:
        return None
    name = data[data.find(b"(") + 1 : close].decode("utf-8", "replace")
    rest = data[close + 2 :].split()
    return Process(pid, name, rest[0].decode(), int(rest[1]), int(rest[3]), int(rest[19]), int(rest[2]), int(rest[17]))


def lives(pid: int, start_ticks: int) -> bool:
    """Whether this very process is alive, not another with a reused pid."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.is_alive


def _status(pid: int, field: bytes) -> list[bytes]:
    """Values of one line of /proc/PID/status; empty when the process or the line is missing."""
    for line in read_file(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(field):
            return line.split()[1:]
    return []


def real_uid(pid: int) -> int | None:
    """Owner of the process, who may signal it; None when it is gone."""
    uids = _status(pid, b"Uid:")
    return int(uids[0]) if uids else None


def has_other_rights(pid: int) -> bool:
    """Whether it runs a set-user-ID program, with privileges beyond its owner's."""
    return len(set(_status(pid, b"Uid:"))) > 1


def catches(pid: int, number: int) -> bool:
    """Whether the process handles this signal itself."""
    return any(int(mask, 16) >> (number - 1) & 1 for mask in _status(pid, b"SigCgt:"))


def is_shell(pid: int) -> bool:
    """Whether the process runs a shell; True where that cannot be determined."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return True
    # As in `zsh-5.9`, `ksh93`, `bash (deleted)`.
    return program.rpartition("/")[2].split(" ")[0].rstrip("0123456789.-") in SHELLS


def peak_kib(pid: int) -> int:
    """Peak resident size of the process; 0 when it is gone or has none."""
    return int((_status(pid, b"VmHWM:") or [b"0"])[0])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def last_pid() -> int:
    """Pid of the process created last; it changes with each."""
    return int(read_file("/proc/loadavg").split()[-1])


def walk(root: int, settled: Container[int] = ()) -> Iterator[Process]:
    """Yield processes below `root`, zombies included, as they are found: the children of `root` first, youngest first.

    Acting on each as it comes keeps up with a fork bomb. The kernel may omit a child when a sibling ends during the
    walk, so callers repeat it.
    """
    try:
        yield from _walk_children(root, settled)
    except FileNotFoundError:
        # A kernel without CONFIG_PROC_CHILDREN.
        yield from _walk_parents(root, settled)


def descendants(root: int) -> dict[int, Process]:
    """Live processes below `root` by pid."""
    return {process.pid: process for process in walk(root) if process.is_alive}


def open_pidfd(pid: int) -> int | None:
    """Open a pidfd of the process that has this pid now; None on a kernel or Python without pidfds.

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
    """Signal exactly this process, not another with a reused pid. False when it was not sent."""
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
    """Apply `kill_all` to everything below `root`."""
    return kill_all(lambda settled: walk(root, settled))


def signal_all(find: Find, number: int, spared: Collection[int] | None = None) -> bool:
    """Send a signal once to every process found, but to none that starts because of it.

    A handler that saves and requeues its job runs other programs; the signal is not theirs, and most would die of it.
    So no process is searched for after the first signal.

    Args: spared: left out, unless there is nothing else at the beginning. Returns: whether they were left out.
    """
    found: dict[tuple[int, int], Process] = {}
    for _ in range(SIGNAL_SCANS):
        # Until a scan shows nothing new: one may miss a newborn, or the sibling of a process that ends.
        fresh = {(process.pid, process.start_ticks): process for process in find(())}
        is_settled = fresh.keys() <= found.keys()
        found |= fresh
        if is_settled:
            break
    others = sum(process.is_alive for process in fresh.values()) - len(spared or ())
    left_out = spared if spared and others > 0 else ()
    groups = _Groups(number)
    if spared is None:
        # Groups before single processes: a process signalled with its group is signalled once.
        for process in found.values():
            groups.reach(process)
    for process in found.values():
        if process.is_alive and process.pid not in left_out and process.group not in groups.reached:
            send(process, number)
    return bool(left_out)


def freeze_all(find: Find) -> bool:
    """STOP everything found. Returns whether all of it is stopped now; if not, callers repeat it.

    Stopped processes do not fork, so a scan that finds none running is the last one.
    """
    freeze = _Freeze(find)
    for _ in range(FREEZE_ROUNDS):
        freeze.look()
        if not freeze.is_running:
            return True
    return False


def kill_all(find: Find) -> dict[int, Process]:
    """KILL everything found, frozen first, so that nothing escapes by forking. Returns the killed processes.

    Some processes are found only after their parent is gone: callers repeat until nothing is left.
    """
    freeze = _Freeze(find)
    for _ in range(KILL_ROUNDS):
        if not freeze.look():
            break
    held = freeze.groups.held()
    for group in held:
        send_to_group(group, signal.SIGKILL)
    for process in freeze.frozen.values():
        if process.group not in held:
            send(process, signal.SIGKILL)
    return freeze.frozen


def send_to_group(group: int, number: int) -> None:
    """Signal a process group, in one step that no fork escapes. The caller must know that its number was not reused."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or set-user-ID programs alone.
        pass


class _Groups:
    """Process groups of a run that received one signal as a whole.

    An unused number may soon be another group's, so only groups count whose number is held by a child of this process:
    no other process can reap it, and a dead or stopped one does not change its group. All members of such a group are
    below this process: groups do not extend beyond a session, and each session here was created below it.
    """

    def __init__(self, number: int) -> None:
        self.reached: dict[int, int] = {}
        """By group, the child that keeps its number in use."""
        self._number = number
        self._parent = os.getpid()
        self._own = os.getpgrp()

    def reach(self, process: Process) -> bool:
        """Return whether its whole group has got the signal, now or before."""
        group = process.group
        if group in self.reached:
            return True
        if group == self._own or process.ppid != self._parent:
            return False
        if process.pid != group and process.is_alive and not process.is_stopped:
            return False
        self.reached[group] = process.pid
        send_to_group(group, self._number)
        return True

    def held(self) -> list[int]:
        """Groups reached whose numbers are still held: a stopped child's user can continue it, and it can then join
        another group.
        """
        children = ((group, read_process(pid)) for group, pid in self.reached.items())
        return [group for group, child in children if child is not None and child.group == group]


class _Freeze:
    """Stops processes that fork as fast as they are found."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._settled: set[int] = set()
        """Seen dead or stopped: their children were all found, and are not looked for again."""
        self.frozen: dict[int, Process] = {}
        self.groups = _Groups(signal.SIGSTOP)
        self.is_running = True
        """Whether the last look found a running process."""

    def look(self) -> bool:
        """STOP every process found, at once; returns whether any of them was new."""
        is_news = self.is_running = False
        for process in self._find(self._settled):
            is_reached = self.groups.reach(process)
            if process.is_stopped or not process.is_alive:
                self._settled.add(process.pid)
            else:
                self.is_running = True
            if not process.is_alive:
                continue
            known = self.frozen.get(process.pid)
            if known is not None and known.start_ticks == process.start_ticks:
                continue
            is_news = True
            self.frozen[process.pid] = process
            if not is_reached and not process.is_stopped:
                send(process, signal.SIGSTOP)
        return is_news


def _walk_children(root: int, settled: Container[int] = ()) -> Iterator[Process]:
    seen = {root}
    level = [root]
    while level:
        below: list[int] = []
        for parent in level:
            try:
                threads = os.listdir(f"/proc/{parent}/task")
            except OSError:
                if parent == root:
                    raise
                continue
            for thread in threads:
                path = f"/proc/{parent}/task/{thread}/children"
                for word in reversed(read_file(path, must_exist=parent == root).split()):
                    pid = int(word)
                    if pid in seen or pid in settled:
                        continue
                    process = read_process(pid)
                    if process is not None:
                        seen.add(pid)
                        below.append(pid)
                        yield process
        level = below


def _walk_parents(root: int, settled: Container[int] = ()) -> Iterator[Process]:
    children: dict[int, list[Process]] = {}
    for pid in all_pids():
        process = read_process(pid)
        if process is not None:
            children.setdefault(process.ppid, []).append(process)
    level = [root]
    while level:
        below = [process for parent in level for process in children.get(parent, ())]
        yield from (process for process in below if process.pid not in settled)
        level = [process.pid for process in below]


def read_file(path: str, must_exist: bool = False) -> bytes:
    """Content of a file of /proc; empty when it is gone or another user's. Raises: OSError with `must_exist`."""
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


_TICKS_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14
"""Indexes of fields after the name of the process."""


def tree_cpu_s(root: int, *, with_root: bool = False) -> float | None:
    """CPU seconds of all past and present processes below `root`, and its own on request; None when it is gone.

    Processes that end during the walk may be missed or counted twice, with their CPU time since birth.
    """
    times = _times(root)
    if times is None:
        return None
    try:
        below_s = descendants_cpu_s(root)
    except OSError:
        return None
    return sum(times if with_root else times[2:]) / _TICKS_S + below_s


def descendants_cpu_s(root: int) -> float:
    """CPU time in seconds of live processes below `root` and of their reaped children. Raises: OSError."""
    return sum(sum(_times(pid) or ()) for pid in descendants(root)) / _TICKS_S


def cpu_s_with_children(pid: int) -> float:
    """CPU time in seconds of one process and of its reaped children; 0 when it is gone."""
    return sum(_times(pid) or ()) / _TICKS_S


def own_cpu_s(pid: int) -> float:
    """CPU time in seconds of one process without its children; 0 when it is gone."""
    times = _times(pid)
    return 0.0 if times is None else (times[0] + times[1]) / _TICKS_S


def _times(pid: int) -> tuple[int, int, int, int] | None:
    """User and system time, and those of reaped children, in ticks; see proc_pid_stat(5)."""
    data = read_file(f"/proc/{pid}/stat")
    rest = data[data.rfind(b")") + 2 :].split()
    if len(rest) <= _CSTIME:
        return None
    return int(rest[_UTIME]), int(rest[_STIME]), int(rest[_CUTIME]), int(rest[_CSTIME])
