"""What a node does for the streams of its head, as users of jobs: it reads their output, and connects them to runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import pwd
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from gpusched.engine import spool as files
from gpusched.engine.attach_protocol import GONE, frame
from gpusched.engine.linux.as_user import LaunchError, Owner, text_of
from gpusched.engine.remote.messages import AttachCall, OutputPiece, OutputWanted, UsageFound, UsageWanted, header_from
from gpusched.engine.remote.relay import ByteStream, SocketRelay
from gpusched.model.step import TaskUsage
from gpusched.model.value import encode
from gpusched.tail import Tail

log = logging.getLogger(__name__)

MOST_READERS = 64
"""Processes that read output at the same time."""
MOST_PIECE_BYTES = 256 << 10
LONGEST_WAIT_S = 30.0
_LOOK_S = (0.02, 0.25)
_SPARE_S = 10
_NOBODY_LISTENS = b"-"
_DOOR_S = 8.0
"""How long a run may take to listen for its client."""
_KNOCK_S = (0.004, 0.25)
"""First and longest pause between tries."""
_RUN, _TOKEN = re.compile(r"\d{1,18}\.\d{1,9}"), re.compile(r"[0-9a-f]{0,64}")


class StreamServices:
    """Serves streams of the head on the running event loop.

    Args: spool: of the runs here. outputs: where their output is that cannot be written where it was wanted.
    usage: what the tasks of a run use.
    """

    def __init__(
        self, spool: str, outputs: str = "", usage: Callable[[str], tuple[TaskUsage, ...]] = lambda run: ()
    ) -> None:
        self._spool = spool
        self._usage = usage
        self._outputs = outputs
        self._readers = 0

    def serve(self, stream: ByteStream) -> None:
        """Serve a stream that was just opened, or break it off."""
        try:
            header = header_from(stream.header)
        except ValueError as error:
            log.error("the head opened a stream that cannot be understood: %s", error)
            stream.break_off()
            return
        if isinstance(header, OutputWanted) and _RUN.fullmatch(header.run):
            self._read_output(stream, header)
        elif isinstance(header, AttachCall) and _RUN.fullmatch(header.run) and _TOKEN.fullmatch(header.token):
            self._attach(stream, header, time.monotonic() + (0.0 if header.is_return else _DOOR_S), _KNOCK_S[0])
        elif isinstance(header, UsageWanted):
            stream.write(encode(UsageFound(self._usage(header.run))))
            stream.finish()
        else:
            stream.break_off()

    def _read_output(self, stream: ByteStream, wanted: OutputWanted) -> None:
        if self._readers >= MOST_READERS:
            _answer(stream, f"{MOST_READERS} readers of output are at work on this node already")
            return
        ours, theirs = socket.socketpair()
        try:
            _fork_reader(theirs, wanted, f"{self._outputs}/{wanted.run}" if self._outputs else "")
        except OSError as error:
            ours.close()
            _answer(stream, f"no process can be started to read the output: {error.strerror}")
            return
        finally:
            theirs.close()
        self._readers += 1
        SocketRelay(stream, ours, self._reader_ended)

    def _attach(self, stream: ByteStream, call: AttachCall, give_up_at: float, pause_s: float) -> None:
        """Connect to a supervisor, which may only be about to listen."""
        if stream.is_broken:
            return
        spool, run = self._spool, call.run
        path = files.door_path(spool, run, call.token) if call.token else files.attach_path(spool, run)
        try:
            owner = owner_of(call.uid, call.user)
            sock = _connect(path) if owner is None else _connect_as(owner, path)
        except (LaunchError, OSError) as error:
            log.error("no client of %s can be connected to run %s: %s", call.user, run, text_of(error))
            stream.break_off()
            return
        if sock is not None:
            SocketRelay(stream, sock)
        elif time.monotonic() < give_up_at:
            next_s = min(2 * pause_s, _KNOCK_S[1])
            asyncio.get_running_loop().call_later(pause_s, self._attach, stream, call, give_up_at, next_s)
        else:
            stream.write(frame(GONE))
            stream.finish()
            # What the client has said meanwhile is for nobody.
            stream.on_change = lambda: stream.drop(stream.waiting)
            stream.on_change()

    def _reader_ended(self) -> None:
        self._readers -= 1


def _answer(stream: ByteStream, refused: str) -> None:
    stream.write(encode(OutputPiece("", refused=refused)) + b"\n")
    stream.finish()


def _fork_reader(sock: socket.socket, wanted: OutputWanted, spare: str) -> None:
    """Start a process that answers on the socket. Whatever it hangs on, a file server say, it hangs alone."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        # Its parent is init, so no process here has to reap it.
        if os.fork() == 0:
            fd = os.dup2(sock.fileno(), 3)
            # The agent's locks and connections must end with the agent.
            os.closerange(0, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(wanted.wait_s) + _SPARE_S)
            _write_piece(fd, wanted, spare)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _write_piece(fd: int, wanted: OutputWanted, spare: str) -> None:
    data = bytearray()
    try:
        _become(wanted)
        piece = read_piece(wanted, data, lambda pause_s: _is_hung_up(fd, pause_s), spare)
    except (LaunchError, OSError, ValueError) as error:
        piece = OutputPiece("", refused=text_of(error))
    rest = encode(piece) + b"\n" + data
    while rest:
        rest = rest[os.write(fd, rest) :]


def _is_hung_up(fd: int, pause_s: float) -> bool:
    """Pause; whether the agent is gone, or wants no answer any more."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(pause_s * 1000))


def _connect(path: str) -> socket.socket | None:
    """A connection to a socket in the spool; None if no process listens. Raises: OSError."""
    folder, name = os.path.split(path)
    # An address holds 107 bytes; through its folder's descriptor any path is short.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(f"/proc/self/fd/{fd}/{name}")
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(fd)
    return sock


def _connect_as(owner: Owner, path: str) -> socket.socket | None:
    """As `_connect`, as another user, in a process of its own: all threads of this one share its identity.

    Raises: OSError.
    """
    if not os.path.lexists(path):
        return None
    ours, theirs = socket.socketpair()
    with ours:
        try:
            child = os.fork()
            if child == 0:
                _hand_over_connection(theirs, owner, path)
        finally:
            theirs.close()
        said, found, _, _ = socket.recv_fds(ours, 16, 1)
        os.waitpid(child, 0)
    if found:
        sock = socket.socket(fileno=found[0])
        sock.setblocking(False)
        return sock
    if said == _NOBODY_LISTENS:
        return None
    number = int(said or errno.EIO)
    raise OSError(number, os.strerror(number))


def _hand_over_connection(to: socket.socket, owner: Owner, path: str) -> NoReturn:
    """In a child: connect as this user, and pass the socket, or the number of the error, to the parent."""
    try:
        _take_identity(owner)
        sock = _connect(path)
        if sock is None:
            to.send(_NOBODY_LISTENS)
        else:
            socket.send_fds(to, [b"+"], [sock.fileno()])
    except OSError as error:
        to.send(b"%d" % (error.errno or errno.EIO))
    finally:
        os._exit(0)


def owner_of(uid: int, user: str) -> Owner | None:
    """A run's user, as an account of this machine; None if that is our own. Raises: LaunchError."""
    own = os.geteuid()
    if own == uid:
        return None
    if own != 0:
        raise LaunchError(f"uid {own} cannot act for {user} (uid {uid})")
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        raise LaunchError(f"there is no account with uid {uid} here") from None
    if account.pw_name != user:
        raise LaunchError(f"uid {uid} belongs to account {account.pw_name} here, not to {user}")
    return Owner(user, uid, account.pw_gid)


def _become(wanted: OutputWanted) -> None:
    """Take on the identity of the run's user for good. Raises: LaunchError."""
    owner = owner_of(wanted.uid, wanted.user)
    if owner is not None:
        _take_identity(owner)


def _take_identity(owner: Owner) -> None:
    os.setgroups(owner.groups)
    os.setresgid(owner.gid, owner.gid, owner.gid)
    os.setresuid(owner.uid, owner.uid, owner.uid)


def read_piece(
    wanted: OutputWanted, data: bytearray, is_hung_up: Callable[[float], bool], spare: str = ""
) -> OutputPiece:
    """Read output behind the cursor into `data`; wait for some as long as wanted. Raises: OSError, ValueError.

    Args: is_hung_up: pauses for so many seconds; returns whether the client is gone. spare: folder with output of
    the run that could not be written where it is wanted.
    """
    until = time.monotonic() + min(wanted.wait_s, LONGEST_WAIT_S)
    most = max(1, min(wanted.most, MOST_PIECE_BYTES))
    pause_s = _LOOK_S[0]
    moved = spare + os.path.normpath(os.path.join("/", wanted.path))
    is_moved = bool(spare) and os.path.lexists(moved)
    # One is put aside even where the job asked for no rotation.
    tail = Tail(moved, max(1, wanted.keep)) if is_moved else Tail(wanted.path, wanted.keep)
    try:
        if wanted.cursor:
            tail.resume(wanted.cursor)
        elif wanted.lines is None:
            tail.begin_whole()
        else:
            tail.begin_last(wanted.lines)
        while not tail.copy(data.extend, most) and time.monotonic() < until and not is_hung_up(pause_s):
            pause_s = min(_LOOK_S[1], 2 * pause_s)
        path = moved if is_moved else None
        return OutputPiece(tail.cursor or wanted.cursor, tail.was_found, tail.skipped, path)
    finally:
        tail.close()
