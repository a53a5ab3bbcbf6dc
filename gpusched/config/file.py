"""Replaces a config file by a changed one: whole or not at all, and never over a concurrent change.

The new content is written beside the file, synced, given the file's owner, mode and attributes, and renamed over it. A
process killed at any step leaves the old file or the new one; a leftover beside it is removed by the next change.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from gpusched.errors import NotReady, Refused
from gpusched.paths import MAX_TEXT, read_at_most


class ConfigFile:
    """One file; through a symbolic link, the file that it leads to."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self._folder = os.path.dirname(self.path)
        self._draft = os.path.join(self._folder, f".{os.path.basename(self.path)}.gpusched-new")

    def read(self) -> bytes | None:
        """The content; None when there is no file. Raises: Refused, NotReady."""
        if os.geteuid() == 0:
            self._check_trusted()
        try:
            with open(self.path, "rb") as file:
                return read_at_most(file, MAX_TEXT, f"the config file {self.path}", f"see: ls -l {self.path}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(
                f"the config file {self.path} cannot be read: {error.strerror}", f"see: ls -l {self.path}"
            ) from None

    def text(self, content: bytes | None) -> str:
        """Raises: Refused when it is not UTF-8."""
        try:
            return (content or b"").decode("utf-8")
        except UnicodeDecodeError:
            raise Refused(f"the config file {self.path} is not valid TOML", "see: gpusched config check") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold off other commands that change it. Raises: PermissionError."""
        # The folder, since the file itself is replaced.
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def replace(self, content: bytes | None, seen: bytes | None) -> None:
        """Give it this content, None for no file; call while locked.

        Args: seen: what the change was made from. Raises: Refused when it has become another; PermissionError.
        """
        if self.read() != seen:
            raise Refused(f"{self.path} was changed meanwhile", "look at it, and give the command again")
        if content is None:
            os.unlink(self.path)
        else:
            self._put(content)
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _put(self, content: bytes) -> None:
        try:
            os.unlink(self._draft)
        except FileNotFoundError:
            pass
        try:
            found = os.stat(self.path)
            if not os.access(self.path, os.W_OK):
                # A rename would replace even what its owner has made read-only.
                raise PermissionError(f"{self.path} is read-only")
        except FileNotFoundError:
            found = None
        fd = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                if found is None:
                    os.fchmod(file.fileno(), 0o644)
                else:
                    shutil.copystat(self.path, self._draft)
                    os.utime(file.fileno())
                    os.fchown(file.fileno(), found.st_uid, found.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._draft, self.path)
        except BaseException:
            try:
                os.unlink(self._draft)
            except OSError:
                pass
            raise

    def editors(self) -> list[str]:
        """Swap files that editors keep beside a file while it is open in them."""
        name = os.path.basename(self.path)
        beside = (f".{name}.swp", f".#{name}")
        return [one for one in beside if os.path.lexists(os.path.join(self._folder, one))]

    def _check_trusted(self) -> None:
        """Root changes only files that no other user could have put there."""
        for path in (self.path, self._folder):
            try:
                found = os.stat(path)
            except FileNotFoundError:
                continue
            is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_uid != 0 or (found.st_mode & 0o022 and not is_sticky):
                raise NotReady(
                    f"{path} is not root's alone", f"change it as its owner, or: chown root {path} && chmod go-w {path}"
                )
