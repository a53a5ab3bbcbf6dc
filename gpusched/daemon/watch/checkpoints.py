"""Checkpoint folders of jobs: named and removed here, created by the supervisor.

Each job has one folder for all its runs. It is removed when the job COMPLETED or has left nothing in it, and
[life] checkpoint_keep_s after any other end. Folders that belong to no job of the table are left alone.
"""

from __future__ import annotations

import asyncio
import math
import os
import pwd
import shutil
import stat
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from logging import getLogger

from gpusched.daemon.core import Scheduler
from gpusched.daemon.launch.environment import checkpoint_folder
from gpusched.engine.janitor import Janitor
from gpusched.model.job import Job
from gpusched.model.states import JobState
from gpusched.model.units import is_digits
from gpusched.ports import JobFilter

log = getLogger("gpusched.daemon")
SWEEP_S = 3600.0
_CHUNK = 500
_DIGITS = 18
_REMOVE_S = 600.0
_NOGROUP = 65534


class CheckpointKeeper:
    """Removes folders on its own thread in quiet moments, since they may be large and on any file system."""

    def __init__(self, scheduler: Scheduler, spares: deque[tuple[int, str]]) -> None:
        """Args: spares: gets folders of this daemon's own user that new jobs may have, until they are removed."""
        self._scheduler = scheduler
        self._spares = spares
        self._uid = os.geteuid()
        self._janitor: Janitor[Callable[[], None]] = Janitor(lambda action: action(), "checkpoints")
        self._next_sweep = 0.0

    def changed(self, jobs: Mapping[int, Job]) -> None:
        """Called after each commit with the jobs whose rows changed."""
        for job in jobs.values():
            if job.state.is_final and job.run:
                folder = self._remove(job)
                if folder is not None and job.state is JobState.COMPLETED and job.uid == self._uid:
                    self._spares.append((job.uid, folder))

    def forget(self, job: Job) -> None:
        """Remove the folder of a job that is about to be pruned."""
        if job.run:
            self._remove(job, keep_s=0)

    def poll(self) -> None:
        """Look at intervals for folders that are due, or were left by a daemon that died."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._next_sweep:
            return
        self._next_sweep = loop.time() + SWEEP_S
        scheduler = self._scheduler
        base = scheduler.settings.life.checkpoint_dir or scheduler.head.site.checkpoints
        next_id = scheduler.state.next_id

        def look(base: str) -> None:
            ids = _numbers(base, next_id)
            try:
                loop.call_soon_threadsafe(self._sweep, ids)
            except RuntimeError:
                # The daemon has exited meanwhile.
                return

        if base:
            self._janitor.add(partial(look, base))

    def close(self) -> None:
        """Stop; work that has not begun is left to the next daemon."""
        self._janitor.close(finish=False)

    def _sweep(self, ids: list[int]) -> None:
        settings = self._scheduler.settings.life
        for at in range(0, len(ids), _CHUNK):
            for job in self._scheduler.store.jobs(JobFilter(ids=frozenset(ids[at : at + _CHUNK]))):
                if job.state.is_final:
                    self._remove(job, settings.checkpoint_keep_s)

    def _remove(self, job: Job, keep_s: float = math.inf) -> str | None:
        """Remove the folder of a job that has COMPLETED or ended that long ago; of any other job only if empty.

        Returns: the folder, which is there until a quiet moment comes.
        """
        scheduler = self._scheduler
        folder = checkpoint_folder(job, scheduler.head.site, scheduler.settings)
        if folder is not None:
            before = scheduler.now() - keep_s
            only_empty = job.state is not JobState.COMPLETED and (job.end_at is None or job.end_at > before)
            self._janitor.add(partial(remove, folder, job.uid, only_empty=only_empty))
        return folder


def _numbers(base: str, next_id: int) -> list[int]:
    """Ids of jobs that have a folder; any user may have made folders with other numbers."""
    try:
        names = [name for name in os.listdir(base) if is_digits(name) and len(name) <= _DIGITS]
    except OSError:
        return []
    return sorted(number for number in map(int, names) if number < next_id)


def _group_of(uid: int) -> int:
    """The user's own group, or an unprivileged one if the account is gone: the owner's rights are enough."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return _NOGROUP


def remove(folder: str, uid: int, *, only_empty: bool = False) -> None:
    """Remove a user's folder, and its contents with the user's rights only, since users control the contents.

    Links and folders of other users are left alone: the job did not use them.
    """
    try:
        found = os.lstat(folder)
    except OSError:
        return
    if found.st_uid != uid or not stat.S_ISDIR(found.st_mode):
        return
    if _remove_empty(folder) or only_empty:
        return
    if uid == os.geteuid():
        shutil.rmtree(folder, ignore_errors=True)
    elif os.geteuid() == 0:
        try:
            gid = _group_of(uid)
            command = ["/bin/rm", "-rf", "--one-file-system", "--", folder]
            subprocess.run(
                command,
                user=uid,
                group=gid,
                extra_groups=[],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_REMOVE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("the checkpoint folder %s was not removed: %s", folder, error)
    # The parent belongs to root, so users cannot remove the folder themselves.
    if not _remove_empty(folder):
        log.warning("could not empty the checkpoint folder %s; it will be retried later", folder)


def _remove_empty(folder: str) -> bool:
    """Remove an empty folder; return whether it is gone."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
