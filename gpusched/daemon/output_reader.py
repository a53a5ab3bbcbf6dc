"""Reads the end of what a run on this node wrote, with the rights of the job's user, for viewers who have no files."""

from __future__ import annotations

import asyncio
import os
import sys

from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.remote.services import owner_of
from gpusched.errors import Refused, TooMany
from gpusched.model.job import Job

# The child becomes the user before it looks at anything, and only after the interpreter has started: the user may not
# be able to read that. Nothing of ours is imported. A pipe or a device would block.
_PROGRAM = """
import os, stat, sys
if len(sys.argv) > 3:
    uid, gid, *groups = map(int, sys.argv[3:])
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
found = os.fstat(fd)
if not stat.S_ISREG(found.st_mode):
    sys.exit("it is no regular file")
os.lseek(fd, max(0, found.st_size - int(sys.argv[2])), os.SEEK_SET)
left = int(sys.argv[2])
while left and (piece := os.read(fd, left)):
    sys.stdout.buffer.write(piece)
    left -= len(piece)
"""
_READ_S = 10.0
MOST_AT_ONCE = 2
MOST_WAITING = 32


class OutputReader:
    """Reads files for a few viewers at a time, each in a short-lived process."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._waiting = 0

    async def tail(self, job: Job, path: str, most: int) -> bytes | None:
        """The last bytes of a file; None if there is none. Raises: Refused, TooMany."""
        if self._waiting >= MOST_WAITING:
            raise TooMany("too many outputs are being read", "try again")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._run(job, path, most)
        finally:
            self._waiting -= 1

    async def _run(self, job: Job, path: str, most: int) -> bytes | None:
        ids: list[int] = []
        try:
            owner = owner_of(job.uid, job.user)
        except LaunchError as error:
            raise Refused(f"the output of job {job.shown_id} cannot be read: {error}", "see: glogs") from None
        if owner is not None:
            ids = [owner.uid, owner.gid, *owner.groups]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _PROGRAM, path, str(most), *map(str, ids)),
            cwd="/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            found, said = await asyncio.wait_for(child.communicate(), _READ_S)
        except asyncio.TimeoutError:
            child.kill()
            await child.wait()
            raise Refused(f"{path} cannot be read within {_READ_S:g} s", "see: glogs") from None
        if child.returncode:
            why = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            if "FileNotFoundError" in why:
                return None
            raise Refused(f"{path} cannot be read: {why.partition('] ')[2] or why}", f"see: glogs {job.shown_id}")
        return found
