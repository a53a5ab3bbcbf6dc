"""A stream within one process, with the interface of one between two machines."""

from __future__ import annotations

from collections.abc import Callable

WINDOW = 256 << 10
"""Bytes of one direction that wait to be read."""


class LocalStream:
    """One end of a stream, as `streams.Stream`. Made by `stream_pair`."""

    def __init__(self, header: bytes) -> None:
        self.header = header
        self.on_change: Callable[[], None] | None = None
        self.is_broken = False
        self._peer: LocalStream | None = None
        self._inbox = bytearray()
        self._is_finished = False

    @property
    def room(self) -> int:
        """Bytes that `write` accepts now."""
        peer = self._peer
        return 0 if peer is None or self._is_finished or self.is_broken else max(0, WINDOW - len(peer._inbox))

    def write(self, data: bytes) -> int:
        """Pass on what there is room for; returns how many bytes that were."""
        count = min(len(data), self.room)
        if count and self._peer is not None:
            self._peer._inbox += data[:count]
            self._tell_peer()
        return count

    def finish(self) -> None:
        """Send no more."""
        if not self._is_finished and not self.is_broken:
            self._is_finished = True
            self._tell_peer()

    @property
    def waiting(self) -> int:
        """Bytes that can be read."""
        return len(self._inbox)

    @property
    def is_at_end(self) -> bool:
        """Whether everything that the other side has sent was read."""
        return self._peer is not None and self._peer._is_finished and not self._inbox

    def peek(self, most: int) -> bytes:
        return bytes(self._inbox[:most])

    def drop(self, count: int) -> None:
        """Take bytes as read."""
        was_full = len(self._inbox) >= WINDOW
        del self._inbox[:count]
        if was_full and count:
            self._tell_peer()

    def break_off(self) -> None:
        """Give the stream up; the other side learns of it."""
        if not self.is_broken:
            self.is_broken = True
            if self._peer is not None:
                self._peer.is_broken = True
                self._tell_peer()

    def _tell_peer(self) -> None:
        if self._peer is not None and self._peer.on_change is not None:
            self._peer.on_change()


def stream_pair(header: bytes) -> tuple[LocalStream, LocalStream]:
    """Both ends of a new stream."""
    one, other = LocalStream(header), LocalStream(header)
    one._peer, other._peer = other, one
    return one, other
