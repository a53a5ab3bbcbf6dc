"""`paths.read_at_most`, by which files that others wrote are read."""

from __future__ import annotations

import io

import pytest

from gpusched.errors import Refused
from gpusched.paths import read_at_most


class Endless(io.RawIOBase):
    """Zeros in pieces of any size asked for, counted."""

    def __init__(self) -> None:
        self.taken = 0

    def read(self, size: int = -1, /) -> bytes:
        assert size >= 0
        self.taken += size
        return bytes(size)


@pytest.mark.parametrize("most", [0, 1, 1 << 16, (1 << 16) - 1, 1 << 20])
def test_no_more_than_the_limit_and_one_byte_is_read(most: int) -> None:
    stream = Endless()
    with pytest.raises(Refused, match="the list is larger than .*, the most that is read"):
        read_at_most(stream, most, "the list", "shorten it")
    assert stream.taken == most + 1


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 100_000])
def test_a_file_up_to_the_limit_is_read_whole(size: int) -> None:
    content = bytes(range(256)) * 400
    assert read_at_most(io.BytesIO(content[:size]), size, "the list", "") == content[:size]
