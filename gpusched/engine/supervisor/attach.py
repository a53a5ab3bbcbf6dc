"""The socket of a foreground run, and a connection to it."""

from __future__ import annotations

import _socket
import os
import struct

from gpusched.engine import spool as files
from gpusched.engine.attach_protocol import CHUNK, frame, take_frames

UCRED = struct.Struct("3i")
BACKLOG = 1 << 20
"""Unsent bytes of a client above which its input is not read."""
ROOM = 2 * BACKLOG
"""Unsent bytes above which a client violates the protocol."""


class AttachConnection:
    """One connection: a guest at first, the client after a HELLO."""

    def __init__(self, socket: _socket.socket, pid: int, uid: int) -> None:
        self.socket = socket
        self.pid = pid
        self.uid = uid
        self.since_at = 0.0
        """Since when it is the client."""
        self.inbox = bytearray()
        self.outbox = bytearray()

    @property
    def fd(self) -> int:
        return self.socket.fileno()

    @property
    def is_slow(self) -> bool:
        """Whether it has too much unsent data to read more from it."""
        return len(self.outbox) >= BACKLOG

    def say(self, kind: int, content: bytes = b"") -> None:
        """Queue one frame."""
        self.outbox += frame(kind, content)

    def receive(self) -> list[tuple[int, bytes]] | None:
        """Read complete frames; None when the peer is gone or sends an invalid one."""
        try:
            data = self.socket.recv(CHUNK + 64)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self.inbox += data
        try:
            return take_frames(self.inbox) if data else None
        except ValueError:
            return None

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self.outbox:
                with memoryview(self.outbox)[: 1 << 17] as piece:
                    count = self.socket.send(piece)
                del self.outbox[:count]
        except BlockingIOError:
            return
        except OSError:
            # Its end is read where it is received.
            self.outbox.clear()

    def leave(self) -> None:
        self.flush()
        self.socket.close()


def listen(path: str, uid: int) -> _socket.socket:
    """Create a socket in the spool for one user alone. Bound through its folder, as the path may exceed an address."""
    folder, name = os.path.split(path)
    files.remove([path])
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{fd}/{name}")
        os.chmod(path, 0o600)
        if uid != os.geteuid():
            os.chown(path, uid, -1)
        listener.listen(8)
    finally:
        os.close(fd)
    listener.setblocking(False)
    return listener


def accept(listener: _socket.socket, uid: int) -> AttachConnection | None:
    """Accept the next guest; None when there is none, or when it is neither this user nor ourselves."""
    try:
        fd, _ = listener._accept()  # type: ignore[attr-defined]
    except OSError:
        return None
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
    pid, peer, _ = UCRED.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, UCRED.size))
    if peer not in (uid, os.geteuid()):
        sock.close()
        return None
    sock.setblocking(False)
    return AttachConnection(sock, pid, peer)
