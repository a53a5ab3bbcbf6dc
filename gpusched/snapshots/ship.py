"""Carries a snapshot to another node. Both ends run as its user: `piece_of` on the head, and on the node the program

    JOB FOLDER SOCKET MIB FILES DAYS TOTAL       asks the daemon for the pieces, unless an equal one is there

A snapshot never changes, so that its archive, made again for each piece, is the same each time. It is fetched whole or
not at all: what is there under its name is complete. On the node it lies where it is on the head.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable

from gpusched import errors
from gpusched.client import DaemonConnection
from gpusched.snapshots.retention import ABOUT, prune, remove, stored_snapshots
from gpusched.snapshots.snapshot import TREE, SnapshotLimits, lock

PIECE_BYTES = 8 << 20
TRY_S, PAUSE_S = 300.0, 1.0
"""How long the daemon may be out of reach, and the pause between attempts."""


class _End(Exception):
    """Enough was written."""


class _Window(io.RawIOBase):
    """Keeps one piece of what is written to it."""

    def __init__(self, at: int) -> None:
        self.kept = bytearray()
        self._skip = at

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        passed = min(self._skip, len(data))
        self._skip -= passed
        self.kept += memoryview(data)[passed : passed + PIECE_BYTES - len(self.kept)]
        if len(self.kept) == PIECE_BYTES:
            raise _End
        return len(data)


def piece_of(folder: str, at: int) -> bytes:
    """A piece of the archive of a snapshot; shorter than PIECE_BYTES at its end. Raises: OSError."""
    window = _Window(at)
    try:
        with tarfile.open(fileobj=window, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for name in sorted(os.listdir(folder)):
                archive.add(os.path.join(folder, name), name, filter=_anonymous)
    except _End:
        pass
    return bytes(window.kept)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    # It is renewed with every use.
    member.mtime = 0 if member.name == ABOUT else int(member.mtime)
    return member


class _Pieces(io.RawIOBase):
    """Reads the archive from the daemon, piece by piece."""

    def __init__(self, ask: Callable[[int], bytes | bytearray]) -> None:
        self._ask = ask
        self._at = 0
        self._piece = memoryview(b"")
        self._is_last = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._piece and not self._is_last:
            self._piece = memoryview(self._ask(self._at))
            self._at += len(self._piece)
            self._is_last = len(self._piece) < PIECE_BYTES
        size = min(len(buffer), len(self._piece))
        buffer[:size], self._piece = self._piece[:size], self._piece[size:]
        return size


def unpack(source: io.RawIOBase, folder: str, limits: SnapshotLimits) -> None:
    """Unpack an archive into an empty folder. Raises: ValueError for too large or an odd one; OSError."""
    files, size = 0, 0
    folders: list[str] = []
    links: set[str] = set()
    with tarfile.open(fileobj=io.BufferedReader(source, 1 << 20), mode="r|") as archive:
        for member in archive:
            parts = member.name.split("/")
            if parts[0] not in (TREE, ABOUT, "changes.patch") or ".." in parts or "" in parts:
                raise ValueError(f"it contains {member.name!r}")
            if any("/".join(parts[:end]) in links for end in range(1, len(parts))):
                raise ValueError(f"{member.name!r} is behind a link")
            path = os.path.join(folder, member.name)
            files, size = files + (not member.isdir()), size + member.size
            # Descriptions of the snapshot come on top.
            if files > limits.files + 2 or size > 2 * limits.mib * (1 << 20):
                raise ValueError("it is larger than [limit] snapshot_mib and snapshot_files allow")
            if member.isdir():
                os.mkdir(path, 0o700)
                folders.append(path)
            elif member.issym():
                os.symlink(member.linkname, path)
                links.add(member.name)
            elif member.isfile():
                _write(archive, member, path)
            else:
                raise ValueError(f"{member.name!r} is neither a file, a folder nor a link")
    if not os.path.isfile(os.path.join(folder, ABOUT)) or not os.path.isdir(os.path.join(folder, TREE)):
        raise ValueError("it is incomplete")
    for path in reversed(folders):
        os.chmod(path, 0o555)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    content = archive.extractfile(member)
    assert content is not None
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        while piece := content.read(1 << 20):
            file.write(piece)
        file.flush()
        os.fchmod(fd, stat.S_IMODE(member.mode) | (0o200 if member.name == ABOUT else 0))
        os.utime(fd, None if member.name == ABOUT else (member.mtime, member.mtime))


def fetch(folder: str, ask: Callable[[int], bytes | bytearray], limits: SnapshotLimits) -> None:
    """Make a folder with a snapshot, unless it is there. Args: ask: for the piece of the archive at an offset.

    Raises: ValueError, OSError, GpuschedError; nothing is left then.
    """
    home = os.path.dirname(folder)
    os.makedirs(home, mode=0o700, exist_ok=True)
    # One at a time: the runs of an array want the same one at once.
    turn = os.open(os.path.join(home, "fetching"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(folder, ABOUT)):
            return
        new = tempfile.mkdtemp(prefix=".new-", dir=home)
        try:
            unpack(_Pieces(ask), new, limits)
            os.rename(new, folder)
        finally:
            remove(new)
        prune(home, limits.keep_days, limits.total_mib, lambda: _in_use(home), lambda: lock(home, fcntl.LOCK_EX))
    finally:
        os.close(turn)


def _in_use(home: str) -> set[str]:
    """Snapshots that runs here have locked."""
    found = set()
    for one in stored_snapshots(home):
        try:
            fd = os.open(os.path.join(home, one.name, ABOUT), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.add(one.name)
        finally:
            os.close(fd)
    return found


def _asking(client: DaemonConnection, job: str) -> Callable[[int], bytearray]:
    def ask(at: int) -> bytearray:
        until = time.monotonic() + TRY_S
        while True:
            try:
                return client.raw(f"/v1/jobs/{job}/snapshot?at={at}", 120.0)
            except (OSError, errors.NotReady):
                # An agent or a daemon that is being restarted.
                client.close()
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)

    return ask


def main() -> None:
    """Fetch a snapshot; when that fails, the last line on standard output is why."""
    job, folder, socket_path, mib, files, days, total = sys.argv[1:]
    limits = SnapshotLimits(float(mib), int(files), float(days), float(total))
    why = ""
    try:
        fetch(folder, _asking(DaemonConnection(socket_path), job), limits)
    except errors.GpuschedError as error:
        why = error.message
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
    except (ValueError, tarfile.TarError) as error:
        why = str(error)
    if why:
        print(why.replace("\n", "?"))
        sys.exit(1)


if __name__ == "__main__":
    main()
