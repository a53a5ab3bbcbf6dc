"""What an agent knows after its death: the newest session of a head, and the version applied last.

One small file beside the spool. Session and epoch are written alternately to two places and forced to the disk, so that
not even a power failure brings back an old head. Progress is only written: it must survive the agent, not the
machine, whose restart ends every run and is visible to the head by the boot id.
"""

from __future__ import annotations

import fcntl
import os
import zlib

from gpusched.errors import GpuschedError

_PLACE_BYTES = 256
_PROGRESS_AT = 2 * _PLACE_BYTES


class AgentJournal:
    """The journal of one spool; one agent at a time holds it.

    Args: path: created if missing. milliseconds: the node's clock; makes the epoch exceed earlier ones even if the
    file was lost.
    Raises: GpuschedError when another agent holds it; OSError when it cannot be written.
    """

    def __init__(self, path: str, milliseconds: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GpuschedError(f"another agent of this node is alive: it holds {path}") from None
            self._serial, self.session, last = max(self._identity(0), self._identity(1))
            self.applied, self.doubtful, self.mark, self.doubtful_run = self._progress()
            self.epoch = max(last + 1, milliseconds)
            self._write_identity()
        except BaseException:
            os.close(self._fd)
            raise

    def begin_session(self, session: int) -> None:
        """Record, durably, that a head with this session has taken over. Raises: OSError."""
        self.session = session
        self._write_identity()
        # Progress names its session: until now, that of another one counted as none.
        self.note_applied(0)

    def raise_epoch(self, above: int) -> None:
        """Go on with an epoch above this one. Raises: OSError."""
        self.epoch = above + 1
        self._write_identity()

    def note_applied(self, number: int) -> None:
        self.applied, self.doubtful, self.mark, self.doubtful_run = number, 0, 0, ""
        self._write_progress()

    def note_doubtful(self, number: int, run: str, mark: int) -> None:
        """Record that an order is about to be given to a run that must not be repeated.

        Args: mark: of the run, changes when it is given.
        """
        self.doubtful, self.mark, self.doubtful_run = number, mark, run
        self._write_progress()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _identity(self, place: int) -> tuple[int, int, int]:
        """Serial, session and epoch; zeros for a place never written, or torn by a power failure."""
        words = self._line(place * _PLACE_BYTES)
        return (int(words[0]), int(words[1]), int(words[2])) if len(words) == 3 else (0, 0, 0)

    def _progress(self) -> tuple[int, int, int, str]:
        words = self._line(_PROGRESS_AT)
        if len(words) != 5 or int(words[0]) != self.session:
            # Of another session: it was begun, and nothing of it was applied.
            return 0, 0, 0, ""
        return int(words[1]), int(words[2]), int(words[3]), words[4].strip("-")

    def _line(self, at: int) -> list[str]:
        line = os.pread(self._fd, _PLACE_BYTES, at).partition(b"\n")[0]
        text, _, check = line.rpartition(b" ")
        if not check or check != _checksum(text):
            return []
        return text.decode().split()

    def _write_identity(self) -> None:
        self._serial += 1
        self._write(self._serial % 2 * _PLACE_BYTES, self._serial, self.session, self.epoch)
        os.fsync(self._fd)

    def _write_progress(self) -> None:
        self._write(_PROGRESS_AT, self.session, self.applied, self.doubtful, self.mark, self.doubtful_run or "-")

    def _write(self, at: int, *words: int | str) -> None:
        text = " ".join(map(str, words)).encode()
        os.pwrite(self._fd, (text + b" " + _checksum(text) + b"\n").ljust(_PLACE_BYTES, b"\0"), at)


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
