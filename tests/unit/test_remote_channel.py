"""Frames over a socket: whole or not at all, in any pieces, over a connection that breaks and is replaced."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.engine.remote.channel import StreamChannel
from gpusched.engine.remote.messages import MAX_FRAME_BYTES, USUAL_BYTES


@pytest.fixture
def pair() -> Iterator[tuple[StreamChannel, StreamChannel]]:
    here, there = socket.socketpair()
    left, right = StreamChannel(here), StreamChannel(there, "the head")
    yield left, right
    left.close()
    right.close()


def is_readable(channel: StreamChannel) -> bool:
    return bool(select.select([channel.fileno()], [], [], 0)[0])


def test_frames_arrive_whole_and_in_order(pair: tuple[StreamChannel, StreamChannel]) -> None:
    left, right = pair
    assert not is_readable(right)
    for frame in (b"one", b"", b"three" * 1000):
        left.send(frame)
    assert is_readable(right)
    assert right.receive() == [b"one", b"", b"three" * 1000]
    assert not is_readable(right)


def test_a_frame_larger_than_the_sockets_buffer_is_sent_in_turns(pair: tuple[StreamChannel, StreamChannel]) -> None:
    left, right = pair
    large = bytes(range(256)) * 40_000
    left.send(large)
    got: list[bytes] = []
    for _ in range(10_000):
        got += right.receive()
        if got:
            break
        assert is_readable(left), "nobody would send the rest"
        left.receive()
    assert got == [large]
    assert not is_readable(left), "nothing is left to send, so nobody may be woken for it"


def test_repetitions_do_not_pile_up_on_a_slow_connection(pair: tuple[StreamChannel, StreamChannel]) -> None:
    left, right = pair
    frame = bytes(USUAL_BYTES)
    for _ in range(20):
        left.send(frame)
    got: list[bytes] = []
    while is_readable(left) or is_readable(right):
        got += right.receive()
        left.receive()
    assert 1 <= len(got) <= 4


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_frames_are_found_in_any_pieces(frames: list[bytes], sizes: list[int]) -> None:
    here, there = socket.socketpair()
    channel = StreamChannel(there)
    stream = b"".join(struct.pack(">I", len(frame)) + frame for frame in frames)
    got: list[bytes] = []
    for size in sizes * (len(stream) + 1):
        if not stream:
            break
        here.sendall(stream[:size])
        stream = stream[size:]
        got += channel.receive()
    assert got == frames
    here.close()
    channel.close()


def test_a_closed_connection_is_trouble_until_the_next_one(pair: tuple[StreamChannel, StreamChannel]) -> None:
    left, right = pair
    left.send(b"last words")
    left.close()
    assert right.receive() == [b"last words"]
    assert right.trouble() == "the head has closed the connection"
    right.send(b"into the void")
    assert right.receive() == []
    here, there = socket.socketpair()
    right.attach(there)
    again = StreamChannel(here)
    assert right.trouble() is None
    right.send(b"hello")
    assert again.receive() == [b"hello"]
    again.close()


def test_half_a_frame_of_an_old_connection_is_not_completed_by_the_next_one(
    pair: tuple[StreamChannel, StreamChannel],
) -> None:
    _, right = pair
    for part in (struct.pack(">I", 10) + b"half", struct.pack(">I", 5) + b"whole"):
        here, there = socket.socketpair()
        right.attach(there)
        here.sendall(part)
        got = right.receive()
        here.close()
    assert got == [b"whole"]


def test_a_length_that_no_frame_has_ends_the_connection() -> None:
    here, there = socket.socketpair()
    channel = StreamChannel(there, "the head")
    here.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    assert channel.receive() == []
    assert channel.trouble() == "the head sent something other than frames"
    channel.close()
    here.close()


def test_a_channel_without_a_connection_says_so() -> None:
    channel = StreamChannel(None, "the agent of n2")
    assert channel.trouble() == "the agent of n2 has not been reached yet"
    channel.send(b"nothing")
    assert channel.receive() == []
    channel.close()
