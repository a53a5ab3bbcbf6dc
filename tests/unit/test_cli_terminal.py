"""The way out of a terminal: `~.` on a new line, and nothing else that is typed is changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.cli.relay import EscapeFilter


def typed(*pieces: bytes) -> tuple[bytes, bool]:
    escape, out = EscapeFilter(), b""
    for piece in pieces:
        passed, leaves = escape.feed(piece)
        out += passed
        if leaves:
            return out, True
    return out, False


@pytest.mark.parametrize(
    ("pieces", "passed", "leaves"),
    [
        ((b"~.",), b"", True),
        ((b"~", b"."), b"", True),
        ((b"ls\r", b"~", b"."), b"ls\r", True),
        ((b"ls\n~.rest",), b"ls\n", True),
        ((b"ls ~.",), b"ls ~.", False),
        ((b"~~.",), b"~.", False),
        ((b"~a",), b"~a", False),
        ((b"a~", b"."), b"a~.", False),
        ((b"\r~\r", b"~."), b"\r~\r", True),
    ],
)
def test_only_a_tilde_and_a_dot_at_the_start_of_a_line_detach(
    pieces: tuple[bytes, ...], passed: bytes, leaves: bool
) -> None:
    assert typed(*pieces) == (passed, leaves)


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda data: b"~" not in data), max_size=10))
def test_input_without_a_tilde_passes_unchanged(pieces: list[bytes]) -> None:
    assert typed(*pieces) == (b"".join(pieces), False)


@given(st.binary(max_size=60), st.integers(1, 7))
def test_chunking_of_keys_makes_no_difference(data: bytes, size: int) -> None:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert typed(*pieces) == typed(data)
