"""Reads snapshots of the code for other nodes, each as the user who made it: a root daemon opens no user's tree."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.remote.services import owner_of
from gpusched.errors import NotFound, Refused, TooMany
from gpusched.model.job import Job

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path.append(sys.argv.pop()); from gpusched.snapshots.ship import main; main()"
_READ_S = 60.0
MOST_AT_ONCE = 4
MOST_WAITING = 64


class SnapshotReader:
    """Runs `gpusched.snapshots.ship` for a few callers at a time."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._waiting = 0

    async def read(self, job: Job, at: int) -> bytes:
        """A piece of the archive of a job's snapshot. Raises: NotFound, Refused, TooMany."""
        name = job.spec.snapshot
        head, mark, _ = job.spec.launch.work_dir.partition(f"/{name}/tree")
        if name is None or not mark:
            raise NotFound(f"job {job.shown_id} has no snapshot", f"see: gshow {job.shown_id}")
        if self._waiting >= MOST_WAITING:
            raise TooMany("too many snapshots are being read", "try again")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._run(job, f"{head}/{name}", at)
        finally:
            self._waiting -= 1

    async def _run(self, job: Job, folder: str, at: int) -> bytes:
        try:
            owner = owner_of(job.uid, job.user)
        except LaunchError as error:
            raise Refused(f"the snapshot of job {job.shown_id} cannot be read: {error}", "see: gshow") from None
        rights: dict[str, Any] = {}
        if owner is not None:
            rights = {"user": owner.uid, "group": owner.gid, "extra_groups": owner.groups}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _PROGRAM, "send", folder, str(at), _PACKAGE_ROOT),
            cwd="/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            **rights,
        )
        try:
            found, said = await asyncio.wait_for(child.communicate(), _READ_S)
        except asyncio.TimeoutError:
            child.kill()
            await child.wait()
            raise Refused(f"{folder} cannot be read within {_READ_S:g} s", "submit the job again") from None
        if child.returncode:
            why = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise Refused(f"{folder} cannot be read: {why}", "submit the job again")
        return found
