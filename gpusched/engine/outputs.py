"""What the job of a run in the foreground writes: kept in its log, and passed on to its client as that takes it."""

from __future__ import annotations

import os

from gpusched.engine.frames import CHUNK, OUT, WINDOW
from gpusched.engine.users import write_as

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.engine.logs import Logs
    from gpusched.engine.streams import Streams
    from gpusched.engine.visitor import Visitor

REPLAY_BYTES = 1 << 14
"""What somebody who comes back to a terminal is shown of what was on it."""
DRAIN_PIECES = 64


class Flow:
    """One stream out of the job."""

    __slots__ = ("backlog", "credit", "fd", "is_open", "kind", "log_fd")

    def __init__(self, kind: int, fd: int) -> None:
        self.kind = kind
        self.fd = fd
        self.log_fd = -1
        self.is_open = True
        self.credit = WINDOW
        self.backlog = b""
        """Read at the end of the run, and still to be sent."""


class Outputs:
    """All streams out of one job; none before it has any."""

    __slots__ = ("_writer", "flows", "log_left", "replay", "shows_again")

    def __init__(self, log_bytes: int, writer: int | None) -> None:
        """Args: writer: uid as which the log is written; None for our own."""
        self._writer = writer
        self.flows: list[Flow] = []
        self.log_left = log_bytes
        self.shows_again = False
        self.replay = b""

    def open(self, streams: Streams) -> None:
        """The job will write into these."""
        self.flows = [Flow(kind, fd) for kind, fd in streams.outputs]
        self.shows_again = streams.is_terminal

    def begin(self, logs: Logs) -> None:
        """The job has started, and these are its logs."""
        for flow in self.flows:
            flow.log_fd = logs.output if flow.kind == OUT else logs.error
            # A pipe as log that nobody empties must not stop the supervisor.
            os.set_blocking(flow.log_fd, False)

    def welcome(self, client: Visitor) -> None:
        """A client has come: its windows are empty, and it is shown what was there last."""
        for flow in self.flows:
            flow.credit = WINDOW
        if self.replay:
            client.say(OUT, self.replay)
            self.flows[0].credit -= len(self.replay)

    def acknowledge(self, stream: int, count: int) -> None:
        """The client has passed on so much."""
        for flow in self.flows:
            if flow.kind == stream:
                flow.credit = min(WINDOW, flow.credit + count)

    def may_read(self, flow: Flow, client: Visitor | None) -> bool:
        """Whether there is room for more of this stream."""
        if not flow.is_open:
            return False
        # Without a client it goes to the log alone.
        return client is None or (flow.credit > 0 and not client.is_slow)

    def read(self, flow: Flow, client: Visitor | None) -> None:
        """Pass on one piece, if there is one now."""
        data = self._piece(flow, CHUNK if client is None else min(CHUNK, flow.credit))
        if data and client is not None:
            flow.credit -= len(data)
            client.say(flow.kind, data)

    def _piece(self, flow: Flow, size: int) -> bytes:
        """What the job wrote, kept in the log already; empty when there is nothing now."""
        try:
            data = os.read(flow.fd, size)
        except BlockingIOError:
            return b""
        except OSError:
            # EIO: nobody has the terminal open any more.
            data = b""
        if not data:
            flow.is_open = False
            return b""
        self._log(flow, data)
        if self.shows_again:
            self.replay = (self.replay + data)[-REPLAY_BYTES:]
        return data

    def note(self, text: str) -> None:
        """Leave a line in the log of errors."""
        if self.flows:
            self._log(self.flows[-1], f"\ngpusched: {text}\n".encode())

    def _log(self, flow: Flow, data: bytes) -> None:
        if self.log_left <= 0 or flow.log_fd < 0:
            return
        if len(data) >= self.log_left:
            data = data[: self.log_left] + b"\ngpusched: the rest is not kept; see [interactive] log_mib\n"
            self.log_left = 0
        else:
            self.log_left -= len(data)
        try:
            while data:
                data = data[write_as(self._writer, flow.log_fd, data) :]
        except OSError:
            # A full disk: what the person sees goes on.
            pass

    def drain(self) -> None:
        """The run is over: take what is left in its streams, so that nobody has to wait for a slow client."""
        for flow in self.flows:
            pieces: list[bytes] = []
            # Somebody outside the run who has an end of a pipe could write for ever.
            while flow.is_open and len(pieces) < DRAIN_PIECES and (data := self._piece(flow, CHUNK)):
                pieces.append(data)
            flow.backlog = b"".join(pieces)
            flow.is_open = False

    def send_backlog(self, client: Visitor) -> bool:
        """Send of what was drained as much as the windows allow; whether something is left."""
        for flow in self.flows:
            while flow.backlog and flow.credit > 0:
                piece = flow.backlog[: min(CHUNK, flow.credit)]
                flow.backlog = flow.backlog[len(piece) :]
                flow.credit -= len(piece)
                client.say(flow.kind, piece)
        return any(flow.backlog for flow in self.flows)
