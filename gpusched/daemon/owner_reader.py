"""Reads a job's files with its owner's rights, for who has none there: a root daemon opens nothing of a user's."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.remote.services import owner_of
from gpusched.errors import NotFound, Refused, TooMany
from gpusched.model.job import Job

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_GONE = 3
"""Exit status of a child that did not find the file."""
# Each child loads what it needs and then becomes the owner, who may not be able to read the interpreter or the package.
_BECOME = f"""
import os, sys
def fail(kind, error, trace):
    where = repr(error.filename) if isinstance(error, OSError) and error.filename else ""
    why = error.strerror if isinstance(error, OSError) else kind.__name__ + ": " + str(error)
    print(*filter(None, (why, where)), sep=": ", file=sys.stderr, flush=True)
    os._exit({_GONE} if isinstance(error, FileNotFoundError) else 1)
sys.excepthook = fail
def become(ids):
    if ids:
        uid, gid, *groups = map(int, ids.split())
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
"""
# Nothing of ours is imported. A pipe or a device would block.
_READ = (
    _BECOME
    + """
import stat
ids, path, at, most = sys.argv[1:]
become(ids)
fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
found = os.fstat(fd)
if not stat.S_ISREG(found.st_mode):
    sys.exit("it is not a regular file")
left, at = int(most), int(at)
os.lseek(fd, at if at >= 0 else max(0, found.st_size + at), os.SEEK_SET)
sys.stdout.buffer.write(b"%d\\n" % found.st_size)
while left and (piece := os.read(fd, left)):
    sys.stdout.buffer.write(piece)
    left -= len(piece)
"""
)
_PIECE = (
    _BECOME
    + """
ids, root, folder, at = sys.argv[1:]
sys.path.append(root)
from gpusched.snapshots import ship
become(ids)
sys.stdout.buffer.write(ship.piece_of(folder, int(at)))
"""
)


class _Gone(Exception):
    """The file is not there."""


class _Failed(Exception):
    """Why it cannot be read, as the child says."""


class _Children:
    """Short-lived processes of owners: a few at a time, each with a time limit."""

    def __init__(self, what: str, at_once: int, waiting: int, limit_s: float) -> None:
        self._what, self._most_waiting, self._limit_s = what, waiting, limit_s
        self._turns = asyncio.Semaphore(at_once)
        self._waiting = 0

    async def run(self, job: Job, program: str, *words: str) -> bytes:
        """What the program printed. Raises: TooMany, LaunchError, _Gone, _Failed."""
        if self._waiting >= self._most_waiting:
            raise TooMany(f"too many {self._what} are being read", "try again")
        owner = owner_of(job.uid, job.user)
        ids = "" if owner is None else " ".join(map(str, (owner.uid, owner.gid, *owner.groups)))
        self._waiting += 1
        try:
            async with self._turns:
                return await self._run(program, ids, *words)
        finally:
            self._waiting -= 1

    async def _run(self, program: str, *words: str) -> bytes:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", program, *words),
            cwd="/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            found, said = await asyncio.wait_for(child.communicate(), self._limit_s)
        except asyncio.TimeoutError:
            raise _Failed(f"it takes longer than {self._limit_s:g} s") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            raise _Gone if child.returncode == _GONE else _Failed(said.decode("utf-8", "replace").strip())
        return found


class OwnerReader:
    """Pieces of a run's output, and of snapshots of the code."""

    def __init__(self) -> None:
        self._outputs = _Children("outputs", at_once=2, waiting=32, limit_s=10.0)
        self._snapshots = _Children("snapshots", at_once=4, waiting=64, limit_s=60.0)

    async def output(self, job: Job, path: str, at: int, most: int) -> tuple[int, bytes] | None:
        """Size of a file and its bytes from a place on, if negative from its end; None if there is none.

        Raises: Refused, TooMany.
        """
        try:
            size, _, data = (await self._outputs.run(job, _READ, path, str(at), str(most))).partition(b"\n")
            return int(size), data
        except _Gone:
            return None
        except LaunchError as error:
            raise Refused(f"the output of job {job.shown_id} cannot be read: {error}", "see: glogs") from None
        except _Failed as error:
            raise Refused(f"{path} cannot be read: {error}", f"see: glogs {job.shown_id}") from None

    async def snapshot_piece(self, job: Job, at: int) -> bytes:
        """A piece of the archive of a job's snapshot. Raises: NotFound, Refused, TooMany."""
        name = job.spec.snapshot
        head, mark, _ = job.spec.launch.work_dir.partition(f"/{name}/tree")
        if name is None or not mark:
            raise NotFound(f"job {job.shown_id} has no snapshot", f"see: gshow {job.shown_id}")
        folder = f"{head}/{name}"
        try:
            return await self._snapshots.run(job, _PIECE, _PACKAGE_ROOT, folder, str(at))
        except LaunchError as error:
            raise Refused(f"the snapshot of job {job.shown_id} cannot be read: {error}", "see: gshow") from None
        except _Gone:
            raise Refused(f"{folder} cannot be read: it is gone", "submit the job again") from None
        except _Failed as error:
            raise Refused(f"{folder} cannot be read: {error}", "submit the job again") from None
