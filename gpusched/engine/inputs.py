"""What the client of a run in the foreground sends for its job to read."""

from __future__ import annotations

import os

from gpusched.engine.frames import CHUNK, CLOSED, IN, WINDOW, ack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.engine.streams import Streams
    from gpusched.engine.visitor import Visitor

END_OF_TRANSMISSION = b"\x04"
"""What a person types to end the input."""


class Input:
    """Kept here until the job takes it; the window bounds how much that is."""

    __slots__ = ("_data", "_ends", "_streams", "is_taken")

    def __init__(self) -> None:
        self._streams: Streams | None = None
        self._data = bytearray()
        self._ends = False
        self.is_taken = True
        """Whether the job may still read."""

    def open(self, streams: Streams) -> None:
        """The job will read from these."""
        self._streams = streams

    @property
    def fd(self) -> int:
        """To be written to when `is_waiting`; -1 when there is none."""
        return -1 if self._streams is None else self._streams.input_fd

    @property
    def is_waiting(self) -> bool:
        """Whether something is to be written."""
        return self._streams is not None and self.is_taken and bool(self._data or self._ends)

    def put(self, content: bytes, client: Visitor) -> None:
        """Take what the client sent. Raises: ValueError when that is more than was agreed."""
        if not self.is_taken or self._ends:
            client.outbox += ack(IN, len(content))
            return
        self._data += content
        if len(self._data) > 2 * WINDOW:
            raise ValueError("it does not keep to the windows")

    def end(self) -> None:
        """The client sends no more."""
        self._ends = True

    def refuse(self) -> None:
        """Nobody is left to read."""
        self.is_taken = False

    def write(self, client: Visitor | None) -> None:
        """Hand over what the job takes now."""
        streams = self._streams
        assert streams is not None
        try:
            if self._data:
                count = os.write(streams.input_fd, bytes(self._data[:CHUNK]))
                del self._data[:count]
                if client is not None:
                    client.outbox += ack(IN, count)
            if self._ends and not self._data:
                self._finish(streams)
        except BlockingIOError:
            return
        except OSError:
            # Its reader has gone.
            self._close(streams)
            if client is not None:
                client.say(CLOSED)

    def _finish(self, streams: Streams) -> None:
        if streams.is_terminal:
            os.write(streams.input_fd, END_OF_TRANSMISSION)
            self._ends = False
        else:
            self._close(streams)

    def _close(self, streams: Streams) -> None:
        self.is_taken = False
        self._data.clear()
        if not streams.is_terminal:
            os.close(streams.input_fd)
