"""How frames travel between the head and a node: the `Channel` protocol, and a channel over a connected socket."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from typing import IO, Protocol

from gpusched.engine.remote.messages import MAX_FRAME_BYTES, USUAL_BYTES

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 18
_MOST_WAITING_BYTES = 2 * USUAL_BYTES
_TAIL_BYTES = 2000


class Channel(Protocol):
    """Carries frames both ways without blocking. Any of them may be lost, delayed, duplicated or reordered."""

    def send(self, frame: bytes) -> None:
        """Send a frame, or drop it; never blocks and never raises."""

    def receive(self) -> list[bytes]:
        """All frames that have arrived; also sends what is still waiting to be sent."""

    def fileno(self) -> int:
        """A descriptor that is readable when `receive` has something to do; always the same."""

    def trouble(self) -> str | None:
        """Why the other side surely gets nothing now; None if it may."""

    def hang_up(self, why: str) -> None:
        """End the connection, for this reason: the next one may lead to another agent."""

    def close(self) -> None:
        """Release the descriptors."""


class StreamChannel:
    """Frames over a connected stream socket, each behind its length; for both sides.

    Args: stream: connected; None until `attach`. peer: names the other side in sentences. silence_s: a connection over
    which nothing came for this long is given up, as what hangs behind it never ends by itself.
    """

    def __init__(self, stream: socket.socket | None, peer: str = "the agent", silence_s: float = float("inf")) -> None:
        self._peer, self._silence_s = peer, silence_s
        self._heard_at = 0.0
        self._epoll = select.epoll()
        self._stream: socket.socket | None = None
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._trouble: str | None = f"{peer} has not been reached yet"
        self._why: str | None = None
        """What more is known of that."""
        if stream is not None:
            self.attach(stream)

    def attach(self, stream: socket.socket) -> None:
        """Go on over another connection; what the old one has not delivered is lost."""
        self._detach("")
        stream.setblocking(False)
        self._stream, self._trouble, self._heard_at = stream, None, time.monotonic()
        self._epoll.register(stream, select.EPOLLIN)

    def send(self, frame: bytes) -> None:
        if self._stream is None or len(self._outgoing) > _MOST_WAITING_BYTES:
            # On a slow connection, repetitions would only delay what they repeat.
            return
        is_waiting = bool(self._outgoing)
        self._outgoing += _LENGTH.pack(len(frame)) + frame
        if not is_waiting:
            self._flush()

    def receive(self) -> list[bytes]:
        if self._outgoing:
            self._flush()
        frames: list[bytes] = []
        while self._stream is not None:
            try:
                data = self._stream.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._detach(f"the connection to {self._peer} failed: {error.strerror}")
                break
            if not data:
                self._detach(f"{self._peer} has closed the connection")
                break
            self._incoming += data
            if not self._take(frames):
                self._detach(f"{self._peer} sent something other than frames")
        if frames:
            self._heard_at, self._why = time.monotonic(), None
        elif self._stream is not None and time.monotonic() - self._heard_at > self._silence_s:
            self._detach(f"nothing came from {self._peer} for {self._silence_s:g} s")
        return frames

    def fileno(self) -> int:
        return self._epoll.fileno()

    def trouble(self) -> str | None:
        return self._trouble and (self._why or self._trouble)

    def hang_up(self, why: str) -> None:
        self._detach(why)

    def close(self) -> None:
        self._detach("closed")
        self._epoll.close()

    def _take(self, frames: list[bytes]) -> bool:
        """Move complete frames; False for a length that none can have."""
        at, incoming = 0, self._incoming
        while len(incoming) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(incoming, at)
            if length > MAX_FRAME_BYTES:
                return False
            start = at + _LENGTH.size
            if len(incoming) - start < length:
                break
            frames.append(bytes(memoryview(incoming)[start : start + length]))
            at = start + length
        if at:
            del incoming[:at]
        return True

    def _flush(self) -> None:
        if self._stream is None:
            return
        try:
            while self._outgoing:
                sent = self._stream.send(memoryview(self._outgoing)[:_READ_BYTES])
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._detach(f"the connection to {self._peer} failed: {error.strerror}")
            return
        self._epoll.modify(self._stream, select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))

    def _detach(self, why: str) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._trouble = why
            self._epoll.unregister(stream)
            stream.close()
        self._incoming, self._outgoing = bytearray(), bytearray()


class Backoff:
    """When to try again: at once after a long success, then ever later. All in seconds.

    Args: first_s, longest_s: between two tries, the first time, and at most. stable_s: what counts as a long success.
    """

    def __init__(self, first_s: float, longest_s: float, stable_s: float) -> None:
        self._first_s, self._longest_s, self._stable_s = first_s, longest_s, stable_s
        self._wait_s = 0.0
        self._began = self.at = float("-inf")

    def begin(self) -> None:
        self._began = time.monotonic()

    def failed(self) -> None:
        now = time.monotonic()
        if now - self._began > self._stable_s:
            self._wait_s = 0.0
        self.at = now + self._wait_s
        self._wait_s = min(self._longest_s, max(self._first_s, 2 * self._wait_s))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


def last_words(errors: IO[bytes], settled_bytes: int = 0) -> str:
    """The last line that a program wrote, as the end of a sentence on why it ended. Args: settled_bytes: left out."""
    errors.seek(max(settled_bytes, errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
    words = errors.read().decode("utf-8", "replace").strip().splitlines()
    return f": {words[-1][:200]}" if words else ""
