"""What the tasks of steps use now, read from the kernel on the node where they run. Source: proc(5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from gpusched.engine.linux import proctree
from gpusched.engine.supervisor.steps import variables_of
from gpusched.model.step import TaskUsage

_STEP, _TASK = b"SLURM_STEP_ID", b"SLURM_PROCID"
_TaskKey = tuple[int | None, int | None]


@runtime_checkable
class MeasuringEngine(Protocol):
    """An engine that sees the processes of its runs."""

    def task_usage(self, run: str) -> tuple[TaskUsage, ...]:
        """What the tasks of a run's steps use on its machine; nothing of a run that it does not have."""


def usage_below(root: int) -> tuple[TaskUsage, ...]:
    """Usage of the processes below a supervisor, by step and task; of the script those of no step.

    A process belongs to the task in the environment with which it began, else to that of its parent.
    """
    below = proctree.descendants(root)
    keys: dict[int, _TaskKey] = {}
    for pid in below:
        _key_of(pid, below, keys)
    members: dict[_TaskKey, list[int]] = {}
    for pid in sorted(keys):
        members.setdefault(keys[pid], []).append(pid)
    found = (_measured(key, pids) for key, pids in members.items())
    return tuple(sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.task or 0)))


def _key_of(pid: int, below: dict[int, proctree.Process], keys: dict[int, _TaskKey]) -> _TaskKey:
    """Step and task of a process. A long chain of parents is followed without recursion."""
    chain = []
    key: _TaskKey | None = None
    at = pid
    while key is None and at in below:
        key = keys.get(at)
        if key is None:
            chain.append(at)
            given = variables_of(at, (_STEP, _TASK))
            if (step := given.get(_STEP)) is not None:
                key = step, given.get(_TASK)
            at = below[at].ppid
    for one in chain:
        keys[one] = key or (None, None)
    return key or (None, None)


def _measured(key: _TaskKey, pids: Iterable[int]) -> TaskUsage:
    there, cpu_s, peak, now, virtual = [], 0.0, 0, 0, 0
    for pid in pids:
        sizes = _sizes_kib(pid)
        if sizes is None:
            continue
        there.append(pid)
        cpu_s += proctree.cpu_s_with_children(pid)
        peak = max(peak, sizes.get("VmHWM", 0))
        virtual = max(virtual, sizes.get("VmPeak", 0))
        now += sizes.get("VmRSS", 0)
    return TaskUsage(*key, tuple(there), cpu_s, peak / 1024, now / 1024, virtual / 1024)


def _sizes_kib(pid: int) -> dict[str, int] | None:
    """Sizes in /proc/PID/status by name; None if the process is gone."""
    text = proctree.read_file(f"/proc/{pid}/status").decode("utf-8", "replace")
    pairs = (line.split() for line in text.splitlines() if line.startswith("Vm"))
    return {words[0][:-1]: int(words[1]) for words in pairs if len(words) == 3} if text else None
