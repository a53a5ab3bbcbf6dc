"""The socket on a node that leads to the daemon, for programs of jobs there.

Each connection to a `CommandDoor` becomes a stream to the head, whose header says what the kernel here says of the
process: its user, its pid, and the run to which it belongs. The head decides what such a program may do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable

from gpusched.engine.linux import proctree
from gpusched.engine.remote.messages import CommandCall
from gpusched.engine.remote.relay import SocketRelay
from gpusched.engine.remote.streams import StreamMux
from gpusched.model.value import encode

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 1024
MOST_PER_USER = 512
"""A script with 100 steps in the background has one for each of them, and one for each node on which they run."""
_UCRED = struct.Struct("3i")
_LOOK_S, _LOOKS = 0.05, 40
"""A run's first process may ask before the start of the run has been noted."""
_LISTEN_AGAIN_S = 1.0


class CommandDoor:
    """Listens on a socket. Must be made and closed on the running event loop. Raises: OSError.

    Args: serves_all: users other than this process's own may connect. run_of: the run that a process belongs to.
    """

    def __init__(self, path: str, streams: StreamMux, *, serves_all: bool, run_of: Callable[[int], str | None]) -> None:
        self._path = path
        self._streams = streams
        self._serves_all = serves_all
        self._run_of = run_of
        self._open: dict[int, int] = {}
        """By user."""
        self._loop = asyncio.get_running_loop()
        self._listener = listen(path, 0o666 if serves_all else 0o600)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass  # removed by another process

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("programs of jobs cannot reach the daemon: %s", error.strerror)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_LISTEN_AGAIN_S, self._loop.add_reader, self._listener.fileno(), self._accept)
            return
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        is_full = sum(self._open.values()) >= MOST_CONNECTIONS or self._open.get(uid, 0) >= MOST_PER_USER
        if is_full or not (self._serves_all or uid == os.geteuid()):
            sock.close()
            return
        self._open[uid] = self._open.get(uid, 0) + 1
        self._announce(sock, uid, pid, _LOOKS)

    def _announce(self, sock: socket.socket, uid: int, pid: int, looks: int) -> None:
        """Open the stream once it is known to which run the process belongs, or that it belongs to none."""
        try:
            run = self._run_of(pid)
        except Exception as error:
            log.error("the run of process %d cannot be found: %s", pid, error)
            run, looks = None, 0
        process = proctree.read_process(pid)
        if run is None and looks and process is not None:
            self._loop.call_later(_LOOK_S, self._announce, sock, uid, pid, looks - 1)
            return
        call = CommandCall(uid, pid, 0 if process is None else process.start_ticks, run)
        try:
            stream = self._streams.open(encode(call))
        except ValueError as error:
            log.error("a program of a job cannot reach the daemon: %s", error)
            sock.close()
            self._ended(uid)
            return
        SocketRelay(stream, sock, lambda: self._ended(uid), peer="client")

    def _ended(self, uid: int) -> None:
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]


def listen(path: str, mode: int) -> socket.socket:
    """Listen on a socket in a folder that only this process's user can write. Raises: OSError."""
    folder, name = os.path.split(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # no earlier agent
    # An address holds 107 bytes; through its folder's descriptor any path is short.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(f"/proc/self/fd/{fd}/{name}")
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
        os.close(fd)
    listener.setblocking(False)
    return listener
