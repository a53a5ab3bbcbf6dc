"""Copying a tree, and naming it by what was copied."""

from __future__ import annotations

import fcntl
import hashlib
import os
from dataclasses import dataclass, field

from gpusched.snapshots.listing import Listing, unreadable

_FICLONE = 0x40049409
"""Linux: share the blocks of a file until one of both is written to."""
_BLOCK = 1 << 20
_TRIES = 3
"""A file that is written to while it is copied is copied again; one that never stands still is a log."""


@dataclass
class Copied:
    """What was copied, or would have been."""

    tree: bytes | None
    """Where to; None to learn the name alone."""
    name: str = ""
    """Equal trees have equal names."""
    folders: set[bytes] = field(default_factory=set)
    paths: set[bytes] = field(default_factory=set)
    """Everything that is no folder."""
    unsettled: list[bytes] = field(default_factory=list)
    """Files that were written to all the time."""

    def make_folders(self, path: bytes) -> None:
        """Those above a path."""
        folder = os.path.dirname(path)
        if folder and folder not in self.folders:
            self.make_folders(folder)
            if self.tree is not None:
                os.mkdir(os.path.join(self.tree, folder))
            self.folders.add(folder)

    def link(self, path: bytes, target: bytes) -> None:
        """A symbolic link."""
        self.make_folders(path)
        if self.tree is not None:
            os.symlink(target, os.path.join(self.tree, path))
        self.paths.add(path)

    def has(self, path: bytes) -> bool:
        """Whether something of this name is there."""
        return path in self.paths or path in self.folders


def copy_tree(listing: Listing, tree: bytes | None) -> Copied:
    """Copy what is listed into an empty folder, or into none. What has gone meanwhile is taken off the list.

    Raises: Refused when a part cannot be read; OSError when the copy cannot be written.
    """
    copied = Copied(tree)
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
    """Copy a file, read-only; returns the SHA-256 of the copy, as hex, its mode, and whether it stood still meanwhile.

    Without a target it is only read. Raises: FileNotFoundError when it is gone; Refused when it cannot be read.
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
            # As old as the original: whoever compares ages, as make does, sees no change.
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
    """Copy so many bytes at most: a log may grow for as long as somebody reads it."""
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
