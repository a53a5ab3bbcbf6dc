"""Processes of steps: those that `srun` started in a job, found without the daemon.

`srun` gives its tasks SLURM_STEP_ID, which the kernel keeps as part of their first environment; what they start
belongs to the same step, whatever it does to its environment. Only processes of the run are ever looked at.

Source: proc_pid_environ(5).
"""

from __future__ import annotations

import time

from gpusched.engine.linux import proctree

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Container, Iterable
else:
    import _signal as signal

_STEP = b"SLURM_STEP_ID"
_KILL_AGAIN_S = 0.05


def step_of(pid: int) -> int | None:
    """Number of the step in the environment with which a process began; None without one."""
    return variables_of(pid, (_STEP,)).get(_STEP)


def variables_of(pid: int, names: Iterable[bytes]) -> dict[bytes, int]:
    """Whole numbers in the environment with which a process began, by variable; without those that are not set."""
    content = b"\0" + proctree.read_file(f"/proc/{pid}/environ")
    found = {}
    for name in names:
        _, there, rest = content.partition(b"\0%b=" % name)
        word = rest.partition(b"\0")[0]
        if there and word.isdigit() and len(word) < 10:
            found[name] = int(word)
    return found


def tasks_in(find: proctree.Find, number: int | None = None) -> proctree.Find:
    """Finds the processes of one step, or of all with None, among those that `find` finds, parents first."""
    known: dict[int, int | None] = {}

    def found(settled: Container[int]) -> Iterable[proctree.Process]:
        for process in find(settled):
            step = step_of(process.pid)
            if step is None:
                step = known.get(process.ppid)
            known[process.pid] = step
            if step is not None and number in (None, step):
                yield process

    return found


class StepEnds:
    """Steps that are being ended while their run continues. Instants are on the monotonic clock."""

    def __init__(self, find: proctree.Find) -> None:
        self._find = find
        self._kill_at: dict[int, float] = {}

    @property
    def due_at(self) -> float | None:
        return min(self._kill_at.values(), default=None)

    def stop(self, number: int, grace_s: float) -> None:
        """End a step: TERM now, KILL after the grace; asked again, the shorter grace counts."""
        if grace_s > 0:
            tasks = tasks_in(self._find, number)
            for signal_number in (signal.SIGTERM, signal.SIGCONT):
                signal_each(tasks, signal_number)
        kill_at = time.monotonic() + grace_s
        self._kill_at[number] = min(self._kill_at.get(number, kill_at), kill_at)

    def act(self, now: float) -> None:
        """Kill what has had its grace, until nothing of it is left."""
        for number in [number for number, at in self._kill_at.items() if now >= at]:
            if any(process.is_alive for process in proctree.kill_all(tasks_in(self._find, number)).values()):
                self._kill_at[number] = now + _KILL_AGAIN_S
            else:
                del self._kill_at[number]


def signal_each(tasks: proctree.Find, number: int) -> bool:
    """Signal every process found, one by one: others may share its group. Returns whether there was any."""
    if not any(process.is_alive for process in tasks(())):
        return False
    # None is left out, and no group is signalled as a whole.
    proctree.signal_all(tasks, number, spared=())
    return True
