"""Log files of a run, as held by its supervisor."""

from __future__ import annotations

import errno
import os
import stat

from gpusched.engine.linux.as_user import LaunchError, text_of, write_as

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpusched.engine.linux.as_user import Owner

LOG_FLAGS = (
    # Appending also after truncation: two openings of one file must not overwrite each other.
    os.O_WRONLY
    | os.O_CREAT
    | os.O_APPEND
    | os.O_NOFOLLOW
    | os.O_CLOEXEC
    | os.O_NOCTTY
    # A pipe without a reader is an error, not a supervisor that hangs.
    | os.O_NONBLOCK
)


class MovedOutput:
    """An output file in the node's own folder, since it cannot be written where it was wanted."""

    __slots__ = ("path", "why")

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self.why = why
        """A sentence."""


class OutputError(LaunchError):
    """An output file cannot be written, for a reason that lies in this machine rather than in the path."""


_FAULTS_OF_PATH = frozenset(
    {errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO}
)
"""The same on every machine: another place for the output would only hide the mistake."""


class Logs:
    """The job's open log files. The supervisor keeps them for its own last line and to inspect the tail."""

    is_copied = False
    """Whether the job writes into pipes rather than into the files themselves."""

    def __init__(self, output: int, error: int) -> None:
        self.output = output
        self.error = error
        self.owner: Owner | None = None
        """Whose files they are, if not our own."""
        self.moved: dict[str | None, MovedOutput] = {}
        """Files that are in the node's own folder, by the path at which they were wanted."""
        self.output_from = os.fstat(output).st_size
        self.error_from = self.output_from if error == output else os.fstat(error).st_size

    def job_ends(self) -> tuple[int, int]:
        """Descriptors for the job's output and error output."""
        return self.output, self.error

    def begin(self) -> None:
        """The job has started."""

    def say(self, text: str, who: str = "gpusched") -> None:
        """Add a line to the job's error output, as Slurm does; not to a pipe, which might block."""
        try:
            if stat.S_ISREG(os.fstat(self.error).st_mode):
                uid = None if self.owner is None else self.owner.uid
                write_as(uid, self.error, f"{who}: {text}\n".encode("utf-8", "surrogateescape"))
        except OSError:
            # A full disk or a vanished output: skip the line.
            pass

    def wait(self, awaited: Iterable[int], timeout_s: float | None) -> None:
        """Where `is_copied`, copy the job's output until a signal is pending."""

    def drain(self) -> None:
        """Copy the rest when no process of the run can write any more."""

    def tails(self) -> list[tuple[int, int]]:
        """Files with the last output of this run, each with the offset at which this run's output begins."""
        output = (self.output, self.output_from)
        return [output] if self.error == self.output else [output, (self.error, self.error_from)]

    def close(self) -> None:
        os.close(self.output)
        if self.error != self.output:
            os.close(self.error)


def open_log(path: str, ticket: dict[str, Any], what: str) -> int:
    """Open a log for writing, with this process's current rights; creates a missing folder. Raises: LaunchError.

    Args: what: for the sentence: `output` or `error output`.
    """
    flags = LOG_FLAGS if ticket["append"] else LOG_FLAGS | os.O_TRUNC
    try:
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            # In Slurm such a job fails silently, as it has nowhere to report it.
            _make_folder(os.path.dirname(path), os.path.join(ticket["work_dir"], path), what)
            fd = os.open(path, flags, 0o666)
    except (OSError, ValueError) as error:
        shown = os.path.join(ticket["work_dir"], path)
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.ELOOP:
            reason = "it is a symbolic link"
        elif code == errno.ENOENT:
            reason = "its folder does not exist"
        elif code == errno.ENXIO:
            reason = "it is a pipe without a reader"
        else:
            reason = text_of(error)
        failure = LaunchError if code is None or code in _FAULTS_OF_PATH or _is_device(shown) else OutputError
        raise failure(f"cannot write the {what} to {shown}: {reason}") from None
    os.set_blocking(fd, True)
    return fd


def _make_folder(path: str, shown: str, what: str) -> None:
    """Create a folder and its parents. Raises: LaunchError."""
    if not path:
        # The working directory itself was removed.
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        folder = os.path.dirname(shown)
        failure = LaunchError if error.errno in _FAULTS_OF_PATH or _is_device(shown) else OutputError
        raise failure(f"cannot make {folder} for the {what}: {text_of(error)}") from None


def _is_device(path: str) -> bool:
    return os.path.normpath(path).startswith("/dev/")
