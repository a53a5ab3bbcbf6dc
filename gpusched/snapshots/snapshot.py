"""Makes a snapshot, or finds an equal one."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpusched import paths
from gpusched.errors import Refused
from gpusched.model.units import format_size_mib, plural, printable
from gpusched.paths import make_private
from gpusched.snapshots.file_list import Listing, changes, list_tree, unreadable
from gpusched.snapshots.retention import ABOUT, prune, remove

_FICLONE = 0x40049409
"""Linux: share a file's blocks until either copy is written to."""
_BLOCK = 1 << 20
_TRIES = 3
"""A file that changes while it is copied is copied again; one that keeps changing is a log."""


@dataclass
class CopiedTree:
    """What was copied, or would have been."""

    tree: bytes | None
    """Destination; None to compute only the name."""
    name: str = ""
    """Equal trees have equal names."""
    folders: set[bytes] = field(default_factory=set)
    paths: set[bytes] = field(default_factory=set)
    """All entries except folders."""
    unsettled: list[bytes] = field(default_factory=list)
    """Files that kept changing."""

    def make_folders(self, path: bytes) -> None:
        """Create the parents of a path."""
        folder = os.path.dirname(path)
        if folder and folder not in self.folders:
            self.make_folders(folder)
            if self.tree is not None:
                os.mkdir(os.path.join(self.tree, folder))
            self.folders.add(folder)

    def link(self, path: bytes, target: bytes) -> None:
        self.make_folders(path)
        if self.tree is not None:
            os.symlink(target, os.path.join(self.tree, path))
        self.paths.add(path)

    def has(self, path: bytes) -> bool:
        """Whether an entry of this name exists."""
        return path in self.paths or path in self.folders


def copy_tree(listing: Listing, tree: bytes | None) -> CopiedTree:
    """Copy the listed entries into an empty folder, or only hash them. Vanished ones are removed from the list.

    Raises: Refused when a part is unreadable; OSError when the copy cannot be written.
    """
    copied = CopiedTree(tree)
    digest = hashlib.sha256(listing.root + b"\0")
    for path in sorted(listing.files):
        copied.make_folders(path)
        target = None if tree is None else os.path.join(tree, path)
        try:
            content, mode, is_settled = _copy(os.path.join(listing.root, path), target)
        except FileNotFoundError:
            del listing.files[path]  # deleted since it was listed, as editors do with files of theirs
            continue
        if not is_settled:
            copied.unsettled.append(path)
        copied.paths.add(path)
        digest.update(b"f%o %b %b\0" % (mode, content, path))
    for path, target in sorted(listing.links.items()):
        copied.link(path, target)
        digest.update(b"l%b\0%b\0" % (target, path))
    for path in sorted(listing.live):
        if not _is_below(path, listing.live) and not copied.has(path):
            copied.link(path, os.path.join(listing.root, path))
            digest.update(b"i%b\0" % path)
    for path in sorted(listing.folders):
        if not _is_below(path, listing.live) and not copied.has(path):
            copied.make_folders(os.path.join(path, b"."))
            digest.update(b"d%b\0" % path)
    for repository in listing.repositories:
        digest.update(os.fsencode(f"r{repository.path} {repository.commit}\0"))
    copied.name = digest.hexdigest()[:32]
    return copied


def _is_below(path: bytes, folders: set[bytes]) -> bool:
    while path := os.path.dirname(path):
        if path in folders:
            return True
    return False


def _copy(source: bytes, target: bytes | None) -> tuple[bytes, int, bool]:
    """Copy a file, read-only; returns the SHA-256 of the copy, as hex, its mode, and whether it remained unchanged.

    Without a target it is only read. Raises: FileNotFoundError when it is gone; Refused when it is unreadable.
    """
    try:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(source, error) from None
    try:
        if target is None:
            found = os.fstat(reader)
            return _digest(reader, found.st_size), _mode(found), _mark(os.fstat(reader)) == _mark(found)
        writer = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(_TRIES):
                found = os.fstat(reader)
                copy_content(reader, writer, found.st_size)
                is_settled = _mark(os.fstat(reader)) == _mark(found)
                if is_settled:
                    break
            digest = _digest(writer, os.fstat(writer).st_size)
            # As old as the original, so that make and others that compare ages see no change.
            os.utime(writer, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fchmod(writer, _mode(found))
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    return digest, _mode(found), is_settled


def _mode(found: os.stat_result) -> int:
    return 0o555 if found.st_mode & 0o100 else 0o444


def _mark(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _digest(fd: int, size: int) -> bytes:
    digest = hashlib.sha256()
    at = 0
    while at < size and (piece := os.pread(fd, min(_BLOCK, size - at), at)):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest().encode()


def copy_content(reader: int, writer: int, size: int) -> None:
    """Copy at most `size` bytes: a log may grow for as long as it is read."""
    os.ftruncate(writer, 0)
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
        return
    except OSError:
        pass  # another file system, or one without shared blocks
    os.lseek(writer, 0, os.SEEK_SET)
    at = 0
    while at < size and (piece := os.pread(reader, min(_BLOCK, size - at), at)):
        at += len(piece)
        view = memoryview(piece)
        while view:
            view = view[os.write(writer, view) :]


PATCH = "changes.patch"
TREE = "tree"


@dataclass(frozen=True)
class SnapshotLimits:
    """Limits of snapshots."""

    mib: float
    files: int
    keep_days: float
    """Retention of one that no job needs, after its last submission."""
    total_mib: float
    """Above this total, unneeded ones are removed earlier."""


@dataclass(frozen=True)
class CodeSnapshot:
    """A copy that a job can start in."""

    name: str
    work_dir: str
    """The folder inside the copy that corresponds to the submitted one."""
    about: dict[str, Any]


def folder_of(socket_path: str) -> str:
    """Folder of the snapshots for one daemon's jobs: only that daemon knows which are needed."""
    mark = hashlib.sha256(os.fsencode(os.path.abspath(socket_path))).hexdigest()[:8]
    return os.path.join(paths.state_dir(), "snapshots", mark)


def freeze(
    work_dir: str, mode: str, socket_path: str, limits: SnapshotLimits, needed: Callable[[], set[str]]
) -> CodeSnapshot:
    """Keep the current tree of a folder.

    Args: mode: `auto`, `git` or `copy`, see `list_tree`. needed: returns the names that unfinished jobs need.
    Raises: Refused when it is too large or a part is unreadable; OSError when the copy cannot be written.
    """
    place = os.path.realpath(os.fsencode(work_dir))
    if not os.path.isdir(place):
        raise Refused(f"there is no folder {printable(work_dir)}", "name another one with -D")
    if place == b"/":
        raise Refused("cannot take a snapshot of /", "go to the folder of your code, or name it with -D")
    listing = list_tree(place, mode)
    _check_size(listing, limits)
    if place != listing.root:
        # Also where nothing in it is kept: the job starts there.
        listing.folders.add(os.path.relpath(place, listing.root))
    home = folder_of(socket_path)
    own = os.path.relpath(os.path.realpath(os.fsencode(home)), listing.root) + b"/"
    if any(path.startswith(own) for path in listing.files):
        raise Refused(
            f"{printable(os.fsdecode(listing.root))} holds the scheduler's own files",
            "name their folder in .gitignore or .gpuschedignore",
        )
    make_private(paths.state_dir())
    # One by one: makedirs gives the mode to the last folder only.
    for folder in (os.path.dirname(home), home):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    with lock(home, fcntl.LOCK_SH):
        name = _keep(listing, home)
    inside = os.path.relpath(place, listing.root)
    prune(home, limits.keep_days, limits.total_mib, needed, lambda: lock(home, fcntl.LOCK_EX))
    tree = os.path.join(home, name, TREE)
    return CodeSnapshot(
        name, os.path.normpath(os.path.join(tree, os.fsdecode(inside))), about(os.path.join(home, name))
    )


def sweep(home: str, needed: Callable[[], set[str]]) -> list[str]:
    """Remove all that no unfinished job needs, except ones chosen within the last hour; returns their names."""
    if not os.path.isdir(home):
        return []
    return prune(home, 0, 0, needed, lambda: lock(home, fcntl.LOCK_EX))


def about(folder: str) -> dict[str, Any]:
    """Metadata of a snapshot. Raises: FileNotFoundError when it is gone."""
    with open(os.path.join(folder, ABOUT), encoding="utf-8") as file:
        return dict(json.load(file))


def folder_in(work_dir: str, name: str) -> str | None:
    """Folder of a snapshot, from the working directory of a job that starts in it."""
    head, mark, _ = work_dir.partition(f"/{name}/{TREE}")
    return f"{head}/{name}" if mark else None


def renew(work_dir: str, name: str) -> bool:
    """Extend the life of a job's snapshot as if it was new; False when it is gone."""
    folder = folder_in(work_dir, name)
    try:
        if folder is None:
            return False
        with lock(os.path.dirname(folder), fcntl.LOCK_SH):
            return _touch(folder)
    except PermissionError:
        return True  # another user's: the daemon says what is wrong with that
    except FileNotFoundError:
        return False


@contextmanager
def lock(home: str, kind: int) -> Iterator[None]:
    """Shared while one is made or chosen, exclusive while some are removed."""
    fd = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def _check_size(listing: Listing, limits: SnapshotLimits) -> None:
    total = sum(found.st_size for found in listing.files.values())
    count = len(listing.files) + len(listing.links)
    if total <= limits.mib * (1 << 20) and count <= limits.files:
        return
    too_large = total > limits.mib * (1 << 20)
    sums: dict[bytes, int] = {}
    for path, found in listing.files.items():
        top, slash, _ = path.partition(b"/")
        sums[top + slash] = sums.get(top + slash, 0) + (found.st_size if too_large else 1)
    largest = sorted(sums, key=lambda path: (-sums[path], path))[:3]
    amount = show_size if too_large else str
    shown = ", ".join(f"{printable(os.fsdecode(path), 80)} ({amount(sums[path])})" for path in largest)
    what = (
        f"{show_size(total)}, more than the {show_size(round(limits.mib * (1 << 20)))}"
        if too_large
        else f"{plural(count, 'file')}, more than the {limits.files}"
    )
    raise Refused(
        f"the snapshot would hold {what} of [limit] snapshot_{'mib' if too_large else 'files'}; most is in {shown}",
        "name data in .gitignore or .gpuschedignore: what is ignored is linked, not copied; or raise the limit",
    )


def show_size(number: int) -> str:
    """Format bytes for people."""
    return format_size_mib(number / (1 << 20)) if number >= 1 << 20 else f"{(number + 1023) >> 10}K"


def _keep(listing: Listing, home: str) -> str:
    """Find an equal copy, or make one, named by what was copied: the tree may change meanwhile."""
    # Read first: resubmitting the same code should not wait for a copy that is then discarded.
    name = copy_tree(listing, None).name
    if _touch(os.path.join(home, name)):
        return name
    new = tempfile.mkdtemp(prefix=".new-", dir=home)
    try:
        tree = os.path.join(os.fsencode(new), TREE.encode())
        os.mkdir(tree)
        copied = copy_tree(listing, tree)
        place = os.path.join(home, copied.name)
        if not _touch(place):
            _describe(listing, new, copied)
            for folder in sorted(copied.folders, reverse=True):
                os.chmod(os.path.join(tree, folder), 0o555)
            os.chmod(tree, 0o555)
            try:
                os.rename(new, place)
            except OSError:
                # Another process was as fast with the same tree.
                if not _touch(place):
                    raise
        return copied.name
    finally:
        remove(new)


def _touch(folder: str) -> bool:
    try:
        os.utime(os.path.join(folder, ABOUT))
    except FileNotFoundError:
        return False
    return True


def _describe(listing: Listing, folder: str, copied: CopiedTree) -> None:
    repositories = []
    patch = b""
    for one in listing.repositories:
        change = b"" if one.commit is None else changes(listing, one)
        is_dirty = change != b"" or one.has_new_files or one.commit is None
        repositories.append({"path": one.path, "commit": one.commit, "is_dirty": is_dirty})
        if change:
            patch += (b"" if one.path == "." else b"# in " + os.fsencode(one.path) + b"\n") + change
        elif change is None:
            patch += b"# git could not tell the changes in " + os.fsencode(one.path) + b"\n"
    known = {
        "name": copied.name,
        "root": os.fsdecode(listing.root),
        "commit": repositories[0]["commit"] if repositories else None,
        "is_dirty": any(one["is_dirty"] for one in repositories) if repositories else None,
        "repositories": repositories,
        "files": len(listing.files) + len(listing.links),
        "bytes": sum(found.st_size for found in listing.files.values()),
        "linked": sorted(os.fsdecode(path) for path in listing.live),
        "left_out": sorted(os.fsdecode(path) for path in listing.left_out),
        "unsettled": [os.fsdecode(path) for path in copied.unsettled],
        "made_at": time.time(),
    }
    if patch:
        with open(os.path.join(folder, PATCH), "wb") as file:
            file.write(patch)
    with open(os.path.join(folder, ABOUT), "w", encoding="utf-8") as about_file:
        json.dump(known, about_file, indent=1)
