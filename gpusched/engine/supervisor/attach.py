"""The socket of a foreground run, and a connection to it."""

from __future__ import annotations

import _socket
import os
import select
import struct

from gpusched.engine import spool as files
from gpusched.engine.attach_protocol import CHUNK, COUNT, COUNT_BYTES, RESUMED, SentBytes, frame, take_frames

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
        self.token = os.urandom(8).hex()
        self.is_holding = False
        """Whether its place is kept if the connection breaks."""
        self.is_lost = False
        """Whether it is; then `outbox` gathers what it will get."""
        self._sent: SentBytes | None = SentBytes()
        self._received = self._told = 0

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
        self._received += len(data)
        try:
            found = take_frames(self.inbox) if data else None
        except ValueError:
            self.is_holding = False
            return None
        if self.is_holding and self._received - self._told >= COUNT_BYTES:
            self.tell_count()
        return found

    def flush(self) -> None:
        """Send what the socket takes now."""
        if self.is_lost:
            return
        try:
            while self.outbox:
                with memoryview(self.outbox)[: 1 << 17] as piece:
                    count = self.socket.send(piece)
                    if self._sent is not None:
                        with piece[:count] as done:
                            self._sent.add(done)
                del self.outbox[:count]
                if self._sent is not None and len(self._sent) > ROOM:
                    # It never counts, so it will not come back.
                    self._sent, self.is_holding = None, False
        except BlockingIOError:
            return
        except OSError:
            # Its end is read where it is received.
            if not self.is_holding:
                self.outbox.clear()

    # --- breaks -----------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep its place from now on, if everything that it may have missed is still there."""
        self.is_holding = self._sent is not None

    def tell_count(self) -> None:
        self._told = self._received
        self.say(COUNT, b"%d" % self._received)

    def take_count(self, received: int) -> None:
        """Note what the client has. Raises: ValueError."""
        if self._sent is not None:
            self._sent.confirm(received)

    def is_broken(self) -> bool:
        """Whether the connection broke on its way here. A client that ends only stops sending, as a relay passes on."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return self.is_holding and bool(poll.poll(0))

    def lose(self) -> None:
        self.is_lost = True
        self.socket.close()

    def resume(self, other: AttachConnection, received: int) -> None:
        """Go on over the connection of `other`, which is taken over. Raises: ValueError."""
        if self._sent is None:
            raise ValueError("nothing was kept for it")
        self.outbox[:0] = self._sent.take_rest(received)
        self.socket.close()
        self.socket, self.pid, self.is_lost = other.socket, other.pid, False
        # The first bytes of a connection always fit, and these are not counted.
        self.socket.send(frame(RESUMED, b"%d" % self._received))

    def begin_again(self) -> None:
        """Count from here on: the connection before this one brought nothing."""
        self._received = 0
        self.socket.send(frame(RESUMED, b"0"))

    def leave(self) -> None:
        self.flush()
        self.socket.close()


def listen(path: str, unready: str, uid: int) -> _socket.socket:
    """Create a socket in the spool for one user alone, and return it listening. Raises: OSError.

    It gets its path when that user may connect: a client that came between binding and chown would be refused for good.

    Args: unready: its path until then, in the same folder.
    """
    folder, name = os.path.split(unready)
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    # Bound through its folder, as the path may exceed an address.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.remove([unready])
        listener.bind(f"/proc/self/fd/{fd}/{name}")
        os.chmod(unready, 0o600)
        if uid != os.geteuid():
            os.chown(unready, uid, -1)
        listener.listen(8)
        os.rename(unready, path)
    except OSError:
        listener.close()
        files.remove([unready])
        raise
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
