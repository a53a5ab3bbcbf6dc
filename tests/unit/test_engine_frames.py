"""Frames survive being cut anywhere, and what is none of ours is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.attach_protocol import (
    ACK,
    LARGEST,
    OUT,
    SentBytes,
    Wanted,
    ack,
    frame,
    pack_wanted,
    read_ack,
    read_wanted,
    take_frames,
)

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


@given(st.lists(st.tuples(st.binary(max_size=40), st.floats(0, 1), st.booleans()), max_size=30))
def test_what_was_sent_is_sent_again_from_where_the_other_side_has_it(turns: list[tuple[bytes, float, bool]]) -> None:
    sent, whole, known = SentBytes(), b"", 0
    for piece, part, is_broken in turns:
        sent.add(piece)
        whole += piece
        received = known + int(part * (len(whole) - known))
        if is_broken:
            rest = bytes(sent.take_rest(received))
            assert rest == whole[received:]
            sent.add(rest)
        else:
            sent.confirm(received)
        known = received
        sent.confirm(received // 2)
        assert len(sent) == len(whole) - known


def test_a_count_of_bytes_that_were_never_sent_or_are_forgotten_is_refused() -> None:
    sent = SentBytes()
    sent.add(b"abcdef")
    with pytest.raises(ValueError, match="7 bytes received of 6"):
        sent.confirm(7)
    sent.confirm(4)
    with pytest.raises(ValueError, match="are forgotten"):
        sent.take_rest(3)


WORD = st.binary(max_size=20).map(lambda word: word.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
NAME = WORD.filter(lambda text: bool(text) and "=" not in text)


@given(
    st.lists(WORD, min_size=1, max_size=5),
    st.dictionaries(NAME, WORD, max_size=5),
    st.booleans(),
    st.integers(0, 0o777),
    WORD,
    st.sampled_from(["tree", "main"]),
)
def test_what_is_wanted_round_trips(
    argv: list[str], env: dict[str, str], is_terminal: bool, umask: int, work_dir: str, to: str
) -> None:
    wanted = Wanted(argv, env, is_terminal=is_terminal, umask=umask, work_dir=work_dir, signals_to=to)
    found = read_wanted(pack_wanted(wanted))
    assert [getattr(found, name) for name in Wanted.__slots__] == [getattr(wanted, name) for name in Wanted.__slots__]


@given(st.binary() | st.text("pty iesramn0123456789-_\0=x").map(str.encode))
def test_what_is_no_request_is_a_value_error(content: bytes) -> None:
    try:
        found = read_wanted(content)
    except ValueError:
        return
    assert found.argv
    assert 0 <= found.umask <= 0o777
    assert found.signals_to in ("tree", "main")
    assert not any("\0" in word for word in (*found.argv, found.work_dir, *found.env, *found.env.values()))
