"""Streams deliver every byte once and in order, whatever the channel does to their frames."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.remote.streams import (
    HEADER_BYTES,
    MOST_IN_FLIGHT,
    MOST_STREAMS,
    NEVER,
    WINDOW,
    Segment,
    Stream,
    StreamMux,
    pack_segment,
    read_segment,
)

SESSION, EPOCH = 7, 1234


@dataclass
class End:
    """What one side has written to a stream, and read of it."""

    stream: Stream
    wrote: bytearray = field(default_factory=bytearray)
    got: bytearray = field(default_factory=bytearray)
    is_finished: bool = False
    has_broken: bool = False


class Link:
    """A head and a node with a channel between them that does what the story says."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.now = 0.0
        self.wires: dict[bool, list[bytes]] = {True: [], False: []}
        """Frames under way, by whether the head sent them."""
        self.ends: dict[tuple[bool, int], End] = {}
        self.headers: dict[int, bytes] = {}
        self.sides = {side: self.side(side) for side in (True, False)}
        for mux in self.sides.values():
            mux.associate(SESSION, EPOCH)

    def side(self, is_head: bool) -> StreamMux:
        def accept(stream: Stream) -> None:
            assert (is_head, stream.number) not in self.ends, "a stream was opened twice"
            assert stream.header == self.headers[stream.number]
            self.ends[is_head, stream.number] = End(stream)

        return StreamMux(self.wires[is_head].append, is_head=is_head, on_open=accept, monotonic=lambda: self.now)

    def open(self, is_head: bool) -> None:
        header = b"h" * self.source.randint(1, 300)
        stream = self.sides[is_head].open(header)
        self.headers[stream.number] = header
        self.ends[is_head, stream.number] = End(stream)

    def write(self, end: End, size: int) -> None:
        data = self.source.randbytes(min(size, end.stream.room))
        assert end.stream.write(data) == len(data)
        end.wrote += data

    def read(self, end: End, most: int) -> None:
        end.got += end.stream.read(most)

    def finish(self, end: End) -> None:
        end.stream.finish()
        end.is_finished = True

    def deliver(self, is_head: bool, at: int, fate: str) -> None:
        wire = self.wires[is_head]
        if not wire:
            return
        frame = wire[at % len(wire)] if fate == "copy" else wire.pop(at % len(wire))
        if fate != "drop":
            self.sides[not is_head].take(frame)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for mux in self.sides.values():
            mux.tick()

    def check(self) -> None:
        for (is_head, number), end in self.ends.items():
            other = self.ends.get((not is_head, number))
            assert bytes(end.got) == bytes(other.wrote[: len(end.got)] if other is not None else b"")
            assert end.stream.waiting <= WINDOW
            if end.stream.is_at_end and other is not None:
                assert other.is_finished
                assert len(end.got) == len(other.wrote)
        for mux in self.sides.values():
            assert sum(stream.in_flight for stream in mux._streams.values()) <= MOST_IN_FLIGHT + WINDOW

    def settle(self) -> None:
        """Fair weather until nothing is left to do."""
        for _ in range(4000):
            if not any(self.wires.values()):
                due = min(mux.next_at() for mux in self.sides.values())
                if due == NEVER and not any(end.stream.waiting for end in self.ends.values()):
                    return
                self.wait(0.0 if due == NEVER else max(0.0, due - self.now))
            for is_head in (True, False):
                for _ in range(len(self.wires[is_head])):
                    self.deliver(is_head, 0, "deliver")
            for end in list(self.ends.values()):
                self.read(end, WINDOW)
        raise AssertionError("it never comes to rest")


def tell(source: random.Random, steps: int) -> None:
    link = Link(source)
    for _ in range(steps):
        ends = list(link.ends.values())
        act = source.choice(
            ["deliver"] * 8 + ["drop", "drop", "copy", "wait", "wait", "write", "write", "read", "read"]
        )
        if not ends or source.random() < 0.03:
            link.open(source.random() < 0.5)
        elif source.random() < 0.02:
            link.finish(source.choice(ends))
        elif act == "write":
            end = source.choice(ends)
            if not end.is_finished:
                link.write(end, source.choice([1, 50, 5000, 70_000, WINDOW]))
        elif act == "read":
            link.read(source.choice(ends), source.choice([1, 1000, WINDOW]))
        elif act == "wait":
            link.wait(source.choice([0.01, 0.4, 5.0]))
        else:
            link.deliver(source.random() < 0.5, source.choice([0, 0, source.randrange(50)]), act)
        link.check()
    link.settle()
    for end in link.ends.values():
        link.finish(end)
    link.settle()
    link.check()
    for (is_head, number), end in link.ends.items():
        other = link.ends[not is_head, number]
        assert bytes(end.got) == bytes(other.wrote)
        assert not end.stream.is_broken
        assert end.stream.is_at_end
    assert not any(mux._streams for mux in link.sides.values())


@given(st.integers(0, 2**32), st.integers(10, 300))
def test_streams_deliver_everything_once_and_in_order(seed: int, steps: int) -> None:
    tell(random.Random(seed), steps)


def test_a_broken_stream_is_broken_on_both_sides() -> None:
    link = Link(random.Random(1))
    link.open(True)
    link.settle()
    link.ends[False, 1].stream.break_off()
    link.settle()
    assert link.ends[True, 1].stream.is_broken
    assert link.ends[True, 1].stream.room == 0
    # A late copy of its beginning opens nothing.
    link.sides[False].take(pack_segment(Segment(SESSION, EPOCH, 1, "o", 0, 0, WINDOW, link.headers[1])))
    assert not link.sides[False]._streams


def test_a_broken_stream_is_noticed_by_who_has_still_to_write() -> None:
    link = Link(random.Random(1))
    link.open(True)
    link.settle()
    link.finish(link.ends[False, 1])
    link.settle()
    link.ends[False, 1].stream.break_off()
    link.settle()
    assert link.ends[True, 1].stream.is_broken


def test_a_stalled_reader_stops_its_own_stream_only() -> None:
    link = Link(random.Random(2))
    link.open(True)
    link.open(True)
    for _ in range(100):
        for number in (1, 3):
            link.write(link.ends[True, number], WINDOW)
        for is_head in (True, False):
            for _ in range(len(link.wires[is_head])):
                link.deliver(is_head, 0, "deliver")
        if (False, 3) in link.ends:
            link.read(link.ends[False, 3], WINDOW)
        link.wait(0.1)
    assert len(link.ends[True, 1].wrote) <= 2 * WINDOW
    assert len(link.ends[True, 3].wrote) > 20 * WINDOW


def test_another_session_or_epoch_breaks_what_was_open() -> None:
    link = Link(random.Random(3))
    link.open(True)
    link.settle()
    link.write(link.ends[True, 1], 1000)
    link.sides[False].associate(SESSION, EPOCH + 1)
    assert link.ends[False, 1].stream.is_broken
    # What is still under way to the one before reaches nobody.
    link.deliver(True, 0, "deliver")
    assert not link.sides[False]._streams
    link.sides[True].associate(SESSION, EPOCH + 1)
    assert link.ends[True, 1].stream.is_broken
    link.wires[True].clear()
    link.open(True)
    link.settle()
    assert not link.ends[True, 3].stream.is_broken


def test_streams_opened_before_the_node_is_known_wait_for_it() -> None:
    sent: list[bytes] = []
    mux = StreamMux(sent.append, is_head=True)
    mux.open(b"x")
    mux.associate(SESSION, 0)
    assert not sent
    assert mux.next_at() == NEVER
    mux.associate(SESSION, EPOCH)
    assert len(sent) == 1


def test_there_are_limits() -> None:
    mux = StreamMux(lambda frame: None, is_head=True)
    with pytest.raises(ValueError, match="header"):
        mux.open(b"x" * (HEADER_BYTES + 1))
    for _ in range(MOST_STREAMS):
        mux.open(b"x")
    with pytest.raises(ValueError, match="streams already"):
        mux.open(b"x")


@given(st.binary(max_size=200))
def test_anything_is_a_segment_or_a_value_error(noise: bytes) -> None:
    for frame in (noise, b"gpusched-flow " + noise, b"gpusched-flow 1 " + noise, b"gpusched-flow 1 1 2 " + noise):
        try:
            read_segment(frame)
        except ValueError:
            pass


@given(
    *(st.integers(0, 2**40) for _ in range(3)),
    st.sampled_from(["", "o", "f", "r", "p"]),
    *(st.integers(0, 2**40) for _ in range(3)),
    st.binary(max_size=100),
)
def test_segments_survive_the_round_trip(
    session: int, epoch: int, stream: int, flags: str, offset: int, ack: int, limit: int, data: bytes
) -> None:
    segment = Segment(session, epoch, stream, flags, offset, ack, limit, data)
    assert read_segment(pack_segment(segment)) == segment


def test_another_wire_version_is_no_segment_for_us() -> None:
    assert read_segment(b"gpusched-flow 999 what ever\n") is None
