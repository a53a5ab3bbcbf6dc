"""The spool: small files by which a daemon and its supervisors agree, even after either crashes.

    JOB.RUN.record   one per run. While it is empty, the holder of its lock may decide the run's fate:
                     a supervisor claims it and keeps the lock for life, the daemon revokes it.
    JOB.RUN.env      the environment of its container
    JOB.RUN.order    one order a line, appended by the daemon
    JOB.RUN.script   the job's script
    JOB.RUN.attach   socket of a foreground run, for its client
    JOB.RUN.door-TOKEN  socket for one client that wants to run something in the run, until it is attached;
                     `door-new-PID` is one of these two before its owner may connect
    JOB.RUN.checkpoint  touched by the job when it has saved its work; holds DONE when nothing is left to do
    JOB.RUN.progress the job's progress, as it reports it
    server.lock      share-locked by every process that may claim: fork servers, units and supervisors
    engine.log       complaints of fork servers and supervisors

Lines of a record, each complete only with its newline:

    claim PID START_TICKS UID BOOT_ID      or a NUL: revoked
    moved SENTENCE                         where output is, if not where it was wanted
    start PID INSTANT
    {...}                                  the result

Claim and result share one file because every name created or removed waits for the file system's journal, which
8 supervisors keep busy with their fsyncs: one name instead of four yields three times as many runs a second. And
the result goes into a block that the claim has allocated, so that a full disk cannot refuse it.

For the same reason a claim reuses the file of a recorded, ended run where the ticket names one: the claim is written
over its first line, NULs over the others, and a hard link, which fails if the run already has a record, gives it its
new name. The lock is held throughout.
"""

from __future__ import annotations

import fcntl
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HOLE_MEANS = b"\nstop cancel - - .\n"
SUSPEND_LINE = "suspend ."
DONE = b"done"
"""First word of the checkpoint file of a job that need not run again."""
ROOM_BYTES, ROOM_FILES = 1 << 20, 64
"""A spool with less room starts nothing, so that what runs can record its end."""
CLAIM_TRIES = 200
CLAIM_PAUSE_S = 0.005


class Record:
    """Contents of a record. A plain class: this module must not import dataclasses."""

    def __init__(self, is_held: bool) -> None:
        self.is_held = is_held
        """Whether the supervisor that claimed it lives: the lock goes with the process, not with its pid."""
        self.is_revoked = False
        self.pid: int | None = None
        """None: not claimed (yet)."""
        self.start_ticks = 0
        self.uid = -1
        self.boot_id = ""
        self.job_pid: int | None = None
        self.start_at: float | None = None
        self.moved: str | None = None
        self.outcome: bytes | None = None
        """The result of a run whose epilogs have begun, for the case that they do not end."""
        self.result: bytes | None = None


def make_spool(path: str) -> tuple[int, int]:
    """Create the folder if needed; returns its device and inode. Raises: OSError."""
    os.makedirs(path, exist_ok=True)
    # A root daemon's users execute their scripts from here, and may list nothing.
    os.chmod(path, 0o711 if os.geteuid() == 0 else 0o700)
    status = os.stat(path)
    return status.st_dev, status.st_ino


def record_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.record"


def order_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.order"


def script_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.script"


def env_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.env"


def checkpoint_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.checkpoint"


def attach_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.attach"


def door_path(spool: str, run: str, token: str) -> str:
    return f"{spool}/{run}.door-{token}"


def progress_path(spool: str, run: str) -> str:
    return f"{spool}/{run}.progress"


def why_full(spool: str, needed: int = 0) -> str | None:
    """Why no run can be started in this spool, as a sentence; None while there is room.

    Args: needed: bytes of the run's own files, beyond what each needs. Raises: OSError.
    """
    try:
        found = os.statvfs(spool)
    except FileNotFoundError:
        # The next start of a run makes it again.
        return None
    if found.f_flag & os.ST_RDONLY:
        return f"the spool {spool} is read-only"
    # Root may use the blocks that file systems reserve for it.
    free = found.f_frsize * (found.f_bavail if os.geteuid() else found.f_bfree)
    if free < ROOM_BYTES + needed:
        return f"only {free >> 10} KiB are free in the spool {spool}"
    # Some file systems do not count them.
    if found.f_files and found.f_ffree < ROOM_FILES:
        return f"no more files can be made in the spool {spool}"
    return None


# --- the supervisor's side --------------------------------------------------------------------------


def take_claim(
    spool: str, run: str, pid: int, start_ticks: int, uid: int, boot_id: str, spare: str | None = None
) -> int | None:
    """Claim a run for this process, exclusively and for good.

    Args: spare: a run whose record may be reused, and is gone afterwards.
    Returns: the record, locked, to be kept open for life; None when the run is claimed or revoked.
    Raises: OSError when the spool cannot be written.
    """
    path = record_path(spool, run)
    claim = f"claim {pid} {start_ticks} {uid} {boot_id}\n".encode()
    if spare is not None and (taken := _take_spare(record_path(spool, spare), path, claim)) is not None:
        return taken
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not _lock_empty(fd):
        os.close(fd)
        return None
    try:
        _write_all(fd, claim)
    except OSError:
        os.ftruncate(fd, 0)
        os.close(fd)
        raise
    return fd


def _take_spare(spare: str, path: str, claim: bytes) -> int | None:
    """Reuse an old record's file; None when it is unavailable, or the run has a record already."""
    try:
        fd = os.open(spare, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not _try_lock(fd, fcntl.LOCK_EX):
            # The supervisor of its last run is about to close it.
            raise BlockingIOError
        # Anything behind the last newline is ignored.
        _write_all(fd, claim.ljust(os.fstat(fd).st_size, b"\0"))
        os.lseek(fd, len(claim), os.SEEK_SET)
        os.link(spare, path)
    except OSError:
        os.close(fd)
        fd = -1
    try:
        os.unlink(spare)
    except OSError:
        # The daemon sweeps it at its next start.
        pass
    return None if fd < 0 else fd


def start_line(job_pid: int, start_at: float, moved: str | None = None) -> bytes:
    """The job's start, for a daemon that missed the event. Args: moved: where output is instead: a sentence."""
    told = b"" if moved is None else f"moved {moved}".replace("\n", "?").encode("utf-8", "surrogateescape") + b"\n"
    return told + b"start %d %r\n" % (job_pid, start_at)


def note_start(fd: int, line: bytes) -> None:
    """Record the job's start, a line of `start_line`."""
    try:
        _append(fd, line)
    except OSError:
        # A full disk: the run's start is then known from its end.
        pass


def note_outcome(fd: int, started: bytes, content: bytes) -> None:
    """Record how the command ended, before its epilogs: a line as for `write_result`.

    Args: started: the line of the start if it is not recorded yet.
    """
    try:
        _append(fd, started + b"outcome " + content)
        os.fsync(fd)
    except OSError:
        # A full disk: without its result, the run counts as lost.
        pass


def says_done(spool: str, run: str) -> bool:
    """Whether the job has written DONE into its checkpoint file."""
    try:
        # It is the user's, who may have put a pipe there.
        fd = os.open(checkpoint_path(spool, run), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.read(fd, 64).split()[:1] == [DONE]
    except OSError:
        return False
    finally:
        os.close(fd)


def restore_record(spool: str, run: str, fd: int) -> int:
    """Recreate this process's record if it was removed; returns the descriptor to use from now on.

    A daemon started since then reads it by name.
    """
    if os.fstat(fd).st_nlink:
        return fd
    try:
        again = os.open(
            record_path(spool, run), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError:
        # It was revoked meanwhile, or its folder is gone as well.
        return fd
    try:
        fcntl.flock(again, fcntl.LOCK_EX)
        _write_all(again, os.pread(fd, os.fstat(fd).st_size, 0).rstrip(b"\0"))
    except OSError:
        remove([record_path(spool, run)])
        os.close(again)
        return fd
    os.close(fd)
    return again


def write_result(fd: int, content: bytes) -> None:
    """Complete this process's record with the result, one line. May be repeated after a failure.

    Raises: OSError (a full disk).
    """
    _append(fd, content)


def flush(fd: int) -> None:
    """Have this process's record survive a power failure from now on."""
    try:
        os.fsync(fd)
    except OSError:
        # A broken disk: short of a power failure, the record says what was written to it.
        pass


def flush_again(spool: str, run: str) -> None:
    """The same for a record that is closed. One that is gone, or a later run's, is in the table."""
    try:
        fd = os.open(record_path(spool, run), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    flush(fd)
    os.close(fd)


def read_orders(spool: str, run: str, offset: int) -> tuple[list[str], int]:
    """Read complete order lines after `offset`; returns them and the offset behind them."""
    try:
        fd = os.open(order_path(spool, run), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return [], offset
    try:
        os.lseek(fd, offset, os.SEEK_SET)
        data = _read_all(fd)
    finally:
        os.close(fd)
    end = max(data.rfind(b"\n"), data.rfind(b"\0")) + 1
    text = data[:end].replace(b"\0", HOLE_MEANS).decode("ascii", "replace")
    return [line for line in text.split("\n") if line], offset + end


# --- the daemon's side --------------------------------------------------------------------------------


def read_record(spool: str, run: str) -> Record | None:
    try:
        fd = os.open(record_path(spool, run), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        # The lock first, so that everything a supervisor wrote before its end is visible.
        record = Record(is_held=not _try_lock(fd, fcntl.LOCK_SH))
        data = _read_all(fd)
    finally:
        os.close(fd)
    if data[:1] == b"\0":
        record.is_revoked = True
        return record
    for line in data.split(b"\n")[:-1]:
        if line.startswith(b"moved "):
            record.moved = line[6:].decode("utf-8", "surrogateescape")
            continue
        if line.startswith(b"outcome {") and line.endswith(b"}"):
            # As for a result, below.
            record.outcome = line[8:] if line.startswith(b'outcome {"run":"%s"' % run.encode()) else None
            continue
        words = line.decode().split(" ")
        if words[0] == "claim" and len(words) == 5:
            record.pid, record.start_ticks, record.uid = int(words[1]), int(words[2]), int(words[3])
            record.boot_id = words[4]
        elif words[0] == "start" and len(words) == 3:
            record.job_pid, record.start_at = int(words[1]), float(words[2])
        elif line[:1] == b"{" and line[-1:] == b"}":
            # The new name of a file that a claim took over may survive a power failure that the claim itself did not.
            record.result = line if line.startswith(b'{"run":"%s"' % run.encode()) else None
        else:
            raise ValueError(f"the record of run {run} holds {line[:80]!r}")
    return record


def revoke(spool: str, run: str) -> bool:
    """Prevent supervisors from claiming the run; False when one has, or is about to.

    Raises: OSError when not even an empty file can be created.
    """
    fd = os.open(record_path(spool, run), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not _try_lock(fd, fcntl.LOCK_EX) or os.fstat(fd).st_size:
            return os.pread(fd, 1, 0) == b"\0"
        # One byte beyond the end: a hole, which takes no space even on a full disk.
        os.ftruncate(fd, 1)
    finally:
        os.close(fd)
    return True


def share_lock(spool: str) -> int:
    """Take a share of the server lock, for launchers: processes that inherit the descriptor may claim runs."""
    fd = _open_lock(spool, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_server_gone(spool: str) -> bool:
    """Whether no fork server and no supervisor is left, so that no claim can come any more."""
    fd = _open_lock(spool, os.O_RDWR)
    try:
        return _try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def has_lock(spool: str) -> bool:
    """Whether any run was ever to be started here."""
    return os.path.exists(f"{spool}/server.lock")


def append_order(spool: str, run: str, line: str) -> None:
    """Append one order. A line torn by a crash stays a separate line, which readers skip.

    Raises: OSError (a full disk).
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(order_path(spool, run), flags, 0o600)
    try:
        _write_all(fd, f"\n{line}\n".encode())
    finally:
        os.close(fd)


def order_cancel(spool: str, run: str) -> None:
    """Order a cancel where no line can be written: a hole at the end of the file takes no space."""
    fd = os.open(order_path(spool, run), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, os.fstat(fd).st_size + 1)
    finally:
        os.close(fd)


def order_mark(spool: str, run: str) -> int:
    """A number that changes with every order written for a run."""
    try:
        return os.stat(order_path(spool, run)).st_size
    except FileNotFoundError:
        return 0


def has_orders(spool: str, run: str) -> bool:
    return os.path.exists(order_path(spool, run))


def checkpoint_at(spool: str, run: str) -> float | None:
    """When the run last reported a checkpoint; None if never."""
    try:
        found = os.lstat(checkpoint_path(spool, run))
    except OSError:
        return None
    # The supervisor of another user's job makes the file, dated to the epoch.
    return found.st_mtime or None


def write_for(uid: int | None, path: str, data: bytes, mode: int) -> None:
    """Write a file for a user, or for ourselves with None. Raises: OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        _write_all(fd, data)
        if uid is not None:
            os.fchown(fd, uid, -1)
    finally:
        os.close(fd)


def runs_in(spool: str) -> set[str]:
    """Every run with a file here."""
    found = set()
    for name in os.listdir(spool):
        parts = name.split(".")
        if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            found.add(f"{parts[0]}.{parts[1]}")
    return found


def remove_doors(spool: str, is_open: Callable[[str], bool]) -> None:
    """Remove the doors that killed supervisors have left, of runs that are not open."""
    for name in os.listdir(spool):
        run, door, _ = name.rpartition(".door-")
        if door and not is_open(run):
            remove([f"{spool}/{name}"])


def remove(paths: Iterable[str]) -> None:
    """Remove files, existing or not."""
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


# --- both ---------------------------------------------------------------------------------------------


def _lock_empty(fd: int) -> bool:
    for _ in range(CLAIM_TRIES):
        if os.fstat(fd).st_size:
            return False
        if _try_lock(fd, fcntl.LOCK_EX):
            return os.fstat(fd).st_size == 0
        # A daemon that reads at this very moment, or a rival about to write.
        time.sleep(CLAIM_PAUSE_S)
    return False


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(spool: str, how: int) -> int:
    return os.open(f"{spool}/server.lock", how | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 65536):
        parts.append(part)
    return b"".join(parts)


def _append(fd: int, line: bytes) -> None:
    left = line
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        # Half a line must not spoil the next attempt.
        os.ftruncate(fd, os.lseek(fd, len(left) - len(line), os.SEEK_CUR))
        raise


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
