"""Frames survive being cut anywhere, and what is none of ours is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.attach_protocol import ACK, LARGEST, OUT, ack, frame, read_ack, take_frames

FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=20)


@given(FRAMES, st.integers(1, 50))
def test_frames_round_trip_however_they_are_split(frames: list[tuple[int, bytes]], size: int) -> None:
    stream = b"".join(frame(kind, content) for kind, content in frames)
    buffer, found = bytearray(), []
    for at in range(0, len(stream), size):
        buffer += stream[at : at + size]
        found += take_frames(buffer)
    assert found == frames
    assert not buffer


def test_a_partial_frame_is_left_for_later() -> None:
    whole = frame(OUT, b"content")
    buffer = bytearray(whole + whole[:-1])
    assert take_frames(buffer) == [(OUT, b"content")]
    assert bytes(buffer) == whole[:-1]


def test_an_oversized_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        take_frames(bytearray(bytes((OUT,)) + (LARGEST + 1).to_bytes(4, "little")))


def test_forwarded_bytes_are_counted_by_stream() -> None:
    ((kind, content),) = take_frames(bytearray(ack(OUT, 70_000)))
    assert (kind, read_ack(content)) == (ACK, (OUT, 70_000))
