"""Finds the leftovers of a killed supervisor by session and environment, and kills them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from msgspec import field

from gpusched.engine.linux import proctree
from gpusched.engine.linux.proctree import Process
from gpusched.model.value import Value, replace

RUN_VARIABLE = "GPUSCHED_RUN"
SPOOL_VARIABLE = "GPUSCHED_SPOOL"
CHECKPOINT_VARIABLE = "GPUSCHED_CHECKPOINT_FILE"
PROGRESS_VARIABLE = "GPUSCHED_PROGRESS"
_MOST_WALKS = 10
ROUNDS = (signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL)
"""Signals to send after each scan: a stopped process does not fork, and keeps its group's number in use."""


class OrphanedRun(Value):
    """A run whose supervisor is gone."""

    run: str
    supervisor_pid: int | None
    witnessed: bool
    """Whether this daemon saw the supervisor end, so that its pid, and thus the session's number, is not reused."""
    known: Mapping[int, int] = field(default_factory=dict)
    """Start ticks by pid of processes found before: one that takes long to die may have lost its link to the run."""


def kill_orphans(lost: Iterable[OrphanedRun], spool: str, spared: frozenset[int]) -> dict[str, dict[int, int]]:
    """KILL what is left of these runs; returns start ticks by pid of each run's live processes at the last scan.

    Never touches `spared` processes or ancestors of this one. A process that left the session, cleared its environment
    and lost its parent is not found: nothing links it to the run any more.
    """
    runs = list(lost)
    kept = {process.group for pid in spared if (process := proctree.read_process(pid))} | _groups_above()
    for number in ROUNDS:
        found = find_orphans(runs, spool, spared)
        runs = [
            replace(run, known={process.pid: process.start_ticks for process in found.get(run.run, ())}) for run in runs
        ]
        if not found:
            break
        for run in runs:
            for process in found.get(run.run, ()):
                # All groups of its session are the run's, and one that a stopped process is in stays in use.
                is_held = process.is_stopped and process.session == run.supervisor_pid and process.group not in kept
                if number == signal.SIGKILL and is_held:
                    proctree.send_to_group(process.group, number)
                proctree.send(process, number)
    return {run.run: dict(run.known) for run in runs}


def find_orphans(lost: list[OrphanedRun], spool: str, spared: frozenset[int]) -> dict[str, list[Process]]:
    """Find live processes of these runs, by run.

    A walk over /proc that finds none proves nothing if processes were created meanwhile: one may have been replaced by
    its child between the listing and the look at it. It is then repeated, also once more after that, since a child has
    its pid a moment before it is listed.
    """
    quiet = 0
    for _ in range(_MOST_WALKS):
        last = proctree.last_pid()
        if found := _walk(lost, spool, spared):
            return found
        quiet = quiet + 1 if proctree.last_pid() == last else 0
        if quiet == 2:
            break
    return {}


def _walk(lost: list[OrphanedRun], spool: str, spared: frozenset[int]) -> dict[str, list[Process]]:
    processes: dict[int, Process] = {}
    markers = {f"{RUN_VARIABLE}={run.run}".encode(): run.run for run in lost}
    spool_marker = os.fsencode(f"{SPOOL_VARIABLE}={spool}")
    owner: dict[int, str] = {}
    # The newest first: these are the ones that may be gone before they are looked at.
    for pid in sorted(proctree.all_pids(), reverse=True):
        process = proctree.read_process(pid)
        if process is None:
            continue
        processes[pid] = process
        variables = _environ(pid) if process.is_alive else []
        if spool_marker in variables:
            for variable in variables:
                if variable in markers:
                    owner[pid] = markers[variable]
    excluded = spared | _ancestors(os.getpid(), processes)
    owner = {pid: run for pid, run in owner.items() if pid not in excluded}
    alive = {pid: p for pid, p in processes.items() if p.is_alive and pid not in excluded}
    for run in lost:
        for pid, ticks in run.known.items():
            if pid in alive and alive[pid].start_ticks == ticks:
                owner[pid] = run.run
        session = run.supervisor_pid
        members = [pid for pid, p in alive.items() if session is not None and p.session == session]
        # After a longer time the session's number may be reused: one marked member proves it is ours.
        if run.witnessed or any(owner.get(pid) == run.run for pid in members):
            owner.update(dict.fromkeys(members, run.run))
    found: dict[str, list[Process]] = {}
    for pid, process in alive.items():
        name = _owner_above(pid, processes, owner)
        if name is not None:
            found.setdefault(name, []).append(process)
    return found


def _owner_above(pid: int, processes: dict[int, Process], owner: dict[int, str]) -> str | None:
    seen = set()
    while pid in processes and pid not in seen:
        if pid in owner:
            return owner[pid]
        seen.add(pid)
        pid = processes[pid].ppid
    return None


def _ancestors(pid: int, processes: dict[int, Process]) -> frozenset[int]:
    found = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].ppid
    return frozenset(found)


def _groups_above() -> set[int]:
    """Process groups of this process and its ancestors: a daemon may have been started from within a job."""
    groups, pid = set(), os.getpid()
    while process := proctree.read_process(pid):
        groups.add(process.group)
        pid = process.ppid
    return groups


def _environ(pid: int) -> list[bytes]:
    return proctree.read_file(f"/proc/{pid}/environ").split(b"\0")
