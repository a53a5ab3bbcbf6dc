"""Reliable byte streams over a channel that loses, delays, duplicates and reorders frames.

Either side opens streams, each with a header that says what it is for. A frame is one line and the bytes of one
segment:

    gpusched-flow WIRE_VERSION SESSION EPOCH STREAM FLAGS OFFSET ACK LIMIT

    FLAGS    - none, o opens the stream: its bytes are the header, f the last segment, r the stream is broken,
             p only asks for an answer
    OFFSET   place of the segment's bytes in its direction; the header comes first
    ACK      bytes received of the other direction, in order; one more once its end was
    LIMIT    place up to which the other side may send: what was read by then, and a window

Everything that is not acknowledged is sent again, and what was received twice changes nothing. A stream lives as long
as the session of the head and the epoch of the agent between which it was opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from gpusched.engine.remote.messages import WIRE_VERSION

MAGIC = b"gpusched-flow"
WINDOW = 256 << 10
"""Bytes of one direction that wait to be read, and of the other that wait to be acknowledged."""
SEGMENT = 32 << 10
HEADER_BYTES = 16 << 10
MOST_STREAMS = 2048
MOST_IN_FLIGHT = 512 << 10
"""Unacknowledged bytes of all streams: the head's requests and their answers must still get through."""
RETRY_S, RETRY_MAX_S = 0.3, 3.0
_REMEMBERED = 4096
"""Numbers of ended streams: a late copy of their beginning must not open them again."""
NEVER = float("inf")


class Segment(NamedTuple):
    """A parsed frame."""

    session: int
    epoch: int
    stream: int
    flags: str
    offset: int
    ack: int
    limit: int
    data: bytes


def pack_segment(segment: Segment) -> bytes:
    numbers = (segment.session, segment.epoch, segment.stream, segment.flags or "-", *segment[4:7])
    return b"%s %d %s\n" % (MAGIC, WIRE_VERSION, " ".join(map(str, numbers)).encode()) + segment.data


def read_segment(frame: bytes) -> Segment | None:
    """Parse a frame; None for one of another wire version. Raises: ValueError when it is none."""
    line, newline, data = frame.partition(b"\n")
    words = line.split(b" ")
    if not newline or words[0] != MAGIC or len(words) < 2:
        raise ValueError(f"not a segment of a stream: {frame[:40]!r}")
    if int(words[1]) != WIRE_VERSION:
        return None
    if len(words) != 9:
        raise ValueError(f"not a segment of a stream: {frame[:80]!r}")
    session, epoch, stream, offset, ack, limit = (int(words[at]) for at in (2, 3, 4, 6, 7, 8))
    flags = words[5].decode("ascii")
    if set(flags) - set("-ofrp") or min(session, epoch, stream, offset, ack, limit) < 0 or len(data) > WINDOW:
        raise ValueError(f"not a segment of a stream: {frame[:80]!r}")
    return Segment(session, epoch, stream, "" if flags == "-" else flags, offset, ack, limit, data)


class Stream:
    """One side of a stream. Made by `StreamMux`."""

    def __init__(self, mux: StreamMux, number: int, header: bytes, is_opener: bool) -> None:
        self._mux = mux
        self.number = number
        self.header = header
        self.on_change: Callable[[], None] | None = None
        """Called when there is something to read, room to write, or when it is broken."""
        self.is_broken = False
        self._header_bytes = len(header) if is_opener else 0
        self._out = bytearray(header if is_opener else b"")
        """Not acknowledged, from `_acked` on."""
        self._acked = self._sent = 0
        self._limit = WINDOW
        self._is_finished = self._is_end_acked = False
        self._burst = 4 * SEGMENT
        self.retry_at, self._retry_s = NEVER, RETRY_S
        self._inbox = bytearray()
        self._received = 0 if is_opener else len(header)
        self._has_ended = False
        self._owes_ack = False
        self._told_limit = WINDOW

    # --- for its user ------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that `write` accepts now."""
        return 0 if self._is_finished or self.is_broken else max(0, WINDOW - len(self._out))

    def write(self, data: bytes) -> int:
        """Send what there is room for; returns how many bytes that were."""
        count = min(len(data), self.room)
        if count:
            self._out += data[:count]
            self._mux.flush()
        return count

    def finish(self) -> None:
        """Send no more."""
        if not self._is_finished and not self.is_broken:
            self._is_finished = True
            self._mux.flush()

    @property
    def waiting(self) -> int:
        """Bytes that can be read."""
        return len(self._inbox)

    @property
    def is_at_end(self) -> bool:
        """Whether everything that the other side has sent was read."""
        return self._has_ended and not self._inbox

    def peek(self, most: int) -> bytes:
        return bytes(self._inbox[:most])

    def drop(self, count: int) -> None:
        """Take bytes as read."""
        del self._inbox[:count]
        # Told in steps of half a window.
        self._owes_ack |= self._received - len(self._inbox) + WINDOW >= self._told_limit + WINDOW // 2
        if self._owes_ack or self.is_done:
            self._mux.flush()

    def read(self, most: int = WINDOW) -> bytes:
        data = self.peek(most)
        self.drop(len(data))
        return data

    def break_off(self) -> None:
        """Give the stream up; the other side learns of it."""
        if not self.is_broken:
            self._mux.drop(self, is_broken=True)

    # --- for the mux --------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._sent - self._acked

    @property
    def is_complete(self) -> bool:
        """Whether both sides have said their last."""
        return self._is_finished and self._has_ended

    @property
    def is_done(self) -> bool:
        return self._is_end_acked and self._has_ended and not self._inbox

    def take(self, segment: Segment, now: float) -> None:
        if segment.ack > self._acked:
            self._take_ack(segment.ack)
        self._limit = max(self._limit, segment.limit)
        if segment.data or "f" in segment.flags or "p" in segment.flags:
            self._owes_ack = True
        # The header was taken with the stream.
        fresh = segment.data[max(0, self._received - segment.offset) :] if segment.offset <= self._received else b""
        fresh = fresh[: max(0, WINDOW - len(self._inbox))]
        self._inbox += fresh
        self._received += len(fresh)
        if "f" in segment.flags and segment.offset + len(segment.data) == self._received:
            self._has_ended = True

    def _take_ack(self, ack: int) -> None:
        end = self._acked + len(self._out)
        if ack > end + 1 or (ack > end and not self._is_finished):
            return
        self._is_end_acked |= ack > end
        ack = min(ack, end)
        del self._out[: ack - self._acked]
        self._acked = ack
        self._sent = max(self._sent, ack)
        self._burst = min(WINDOW, 2 * self._burst)
        self.retry_at, self._retry_s = NEVER, RETRY_S

    def segments(self, now: float, most: int) -> list[tuple[str, int, bytes]]:
        """Flags, offset and bytes of what is to be sent now. Args: most: bytes that may be in flight."""
        found: list[tuple[str, int, bytes]] = []
        if now >= self.retry_at:
            # Perhaps all of it is under way: one segment finds out.
            self._sent, self._burst = self._acked, SEGMENT
            self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)
            self.retry_at, is_late = NEVER, True
        else:
            is_late = False
        end = self._acked + len(self._out)
        while self._sent < end and self._sent - self._acked < min(self._burst, most):
            size = min(SEGMENT, end - self._sent, self._limit - self._sent)
            if self._sent < self._header_bytes:
                size = self._header_bytes - self._sent
            if size <= 0:
                break
            at = self._sent - self._acked
            flags = "o" if self._sent < self._header_bytes else ""
            found.append((flags, self._sent, bytes(self._out[at : at + size])))
            self._sent += size
        if self._is_finished and not self._is_end_acked and self._sent == end and self._header_bytes <= self._acked:
            if found:
                flags, offset, data = found[-1]
                found[-1] = (flags + "f", offset, data)
            elif self.retry_at == NEVER:
                found.append(("f", self._sent, b""))
        if not found and is_late:
            found.append(("p", self._sent, b""))
        is_waiting = self._sent > self._acked or (self._is_finished and not self._is_end_acked) or self._sent < end
        if is_waiting and self.retry_at == NEVER:
            self.retry_at = now + self._retry_s
        if not found and self._owes_ack:
            found.append(("", self._sent, b""))
        return found

    def reply(self) -> tuple[int, int]:
        """ACK and LIMIT to send."""
        self._owes_ack = False
        self._told_limit = self._received - len(self._inbox) + WINDOW
        return self._received + (1 if self._has_ended else 0), self._told_limit


class StreamMux:
    """All streams between a head and a node.

    Args: send: gets frames. is_head: its streams have odd numbers. on_open: gets streams that the other side opens;
    None: there are none. on_timer: called when `next_at` may be earlier than before.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        *,
        is_head: bool,
        on_open: Callable[[Stream], None] | None = None,
        on_timer: Callable[[], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self.on_open = on_open
        self.on_timer = on_timer
        self._monotonic = monotonic
        self._is_head = is_head
        self._next = 1 if is_head else 2
        self._streams: dict[int, Stream] = {}
        self._gone: dict[int, None] = {}
        self._highest = 0
        """Of the other side's streams."""
        self._session = self._epoch = 0
        self._is_flushing = self._is_flush_due = False

    def associate(self, session: int, epoch: int) -> None:
        """Note who is talking. Streams between others are broken; nothing is sent while either number is 0."""
        if (session, epoch) == (self._session, self._epoch):
            return
        was_open = self._session and self._epoch
        self._session, self._epoch = session, epoch
        if was_open:
            for stream in list(self._streams.values()):
                self.drop(stream, is_broken=True, is_silent=True)
            self._gone.clear()
            self._highest = 0
        self.flush()

    @property
    def is_up(self) -> bool:
        """Whether both sides are known."""
        return bool(self._session and self._epoch)

    def open(self, header: bytes) -> Stream:
        """Open a stream. Raises: ValueError when its header is too long, or there are too many streams."""
        if len(header) > HEADER_BYTES or not header:
            raise ValueError(f"a header of {len(header)} bytes")
        if len(self._streams) >= MOST_STREAMS:
            raise ValueError(f"there are {MOST_STREAMS} streams already")
        stream = Stream(self, self._next, header, is_opener=True)
        self._streams[self._next] = stream
        self._next += 2
        self.flush()
        return stream

    def take(self, frame: bytes) -> None:
        """Handle a frame. Raises: ValueError for one that is none."""
        segment = read_segment(frame)
        if segment is None or (segment.session, segment.epoch) != (self._session, self._epoch) or not self.is_up:
            return
        stream = self._streams.get(segment.stream) or self._accept(segment)
        if stream is None:
            return
        if "r" in segment.flags:
            # Only a side that has everything forgets a stream: what comes late then breaks nothing.
            self.drop(stream, is_broken=not stream.is_complete, is_silent=True)
            return
        stream.take(segment, self._monotonic())
        if stream.is_done:
            self.drop(stream)
            self._answer_for(stream)
        self.flush()
        if stream.on_change is not None:
            stream.on_change()

    def _accept(self, segment: Segment) -> Stream | None:
        """The stream that a segment opens, if it does."""
        number = segment.stream
        is_theirs = number % 2 == (0 if self._is_head else 1)
        is_over = number in self._gone or number <= self._highest - 2 * _REMEMBERED or not is_theirs
        if is_over or len(self._streams) >= MOST_STREAMS or (self.on_open is None and "o" in segment.flags):
            if "r" not in segment.flags:
                self._tell(number, "r", 0, 0, 0)
            return None
        if "o" not in segment.flags or segment.offset or self.on_open is None:
            # Its beginning is still to come.
            return None
        self._highest = max(self._highest, number)
        stream = self._streams[number] = Stream(self, number, segment.data, is_opener=False)
        self.on_open(stream)
        return stream if number in self._streams else None

    def drop(self, stream: Stream, *, is_broken: bool = False, is_silent: bool = False) -> None:
        if self._streams.pop(stream.number, None) is None:
            return
        self._gone[stream.number] = None
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        if is_broken:
            stream.is_broken = True
            if not is_silent:
                self._tell(stream.number, "r", 0, 0, 0)
            if stream.on_change is not None:
                stream.on_change()

    def tick(self) -> None:
        """Send what is due by the clock."""
        self.flush()

    def now(self) -> float:
        """The monotonic clock of `next_at`."""
        return self._monotonic()

    def next_at(self) -> float:
        """Monotonic instant of the next repetition."""
        if not self.is_up:
            return NEVER
        return min((stream.retry_at for stream in self._streams.values()), default=NEVER)

    def flush(self) -> None:
        """Send everything that may be sent now."""
        if not self.is_up:
            return
        if self._is_flushing:
            self._is_flush_due = True
            return
        self._is_flushing = True
        try:
            while True:
                self._is_flush_due = False
                now = self._monotonic()
                in_flight = sum(stream.in_flight for stream in self._streams.values())
                for stream in list(self._streams.values()):
                    others = in_flight - stream.in_flight
                    for flags, offset, data in stream.segments(now, MOST_IN_FLIGHT - others):
                        self._tell(stream.number, flags, offset, *stream.reply(), data)
                    in_flight = others + stream.in_flight
                    if stream.is_done:
                        self.drop(stream)
                if not self._is_flush_due:
                    break
        finally:
            self._is_flushing = False
        if self.on_timer is not None:
            self.on_timer()

    def _answer_for(self, stream: Stream) -> None:
        """The last answer of a stream that is being forgotten."""
        self._tell(stream.number, "", 0, *stream.reply())

    def _tell(self, number: int, flags: str, offset: int, ack: int, limit: int, data: bytes = b"") -> None:
        self._send(pack_segment(Segment(self._session, self._epoch, number, flags, offset, ack, limit, data)))
