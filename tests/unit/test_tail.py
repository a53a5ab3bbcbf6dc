"""Files read as they grow: emptied, put aside, moved, removed; and lines of several jobs that keep whole."""

from __future__ import annotations

import os
import sys
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.cli.follow import PrefixedOutput
from gpusched.model.units import put_aside
from gpusched.tail import LONGEST_LINE, Tail


def rest_of(tail: Tail) -> bytes:
    pieces: list[bytes] = []
    tail.copy(pieces.append)
    return b"".join(pieces)


def rotate(path: Path, keep: int) -> None:
    for number in range(keep, 0, -1):
        older = Path(put_aside(str(path), number - 1))
        if older.exists():
            older.rename(put_aside(str(path), number))


def test_a_file_that_appears_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = Tail(str(path))
    tail.begin_last(3)
    assert rest_of(tail) == b""
    assert not tail.was_found
    path.write_bytes(b"one\n")
    assert (rest_of(tail), tail.was_found) == (b"one\n", True)


def test_a_file_instead_of_its_folder_is_not_output(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file now")
    tail = Tail(str(tmp_path / "logs" / "out"), 2)
    tail.begin_whole()
    assert (rest_of(tail), tail.was_found) == (b"", False)


def test_a_truncated_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"long before\n")
    tail = Tail(str(path))
    assert rest_of(tail) == b"long before\n"
    os.truncate(path, 0)
    assert rest_of(tail) == b""
    with path.open("ab") as file:
        file.write(b"new\n")
    assert rest_of(tail) == b"new\n"
    os.truncate(path, 0)
    with path.open("ab") as file:
        file.write(b"as long as it was, and longer\n")
    assert rest_of(tail) == b"as long as it was, and longer\n"


def test_a_removed_file_is_read_to_its_end_before_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb", buffering=0) as file:
        file.write(b"a")
        tail = Tail(str(path))
        assert rest_of(tail) == b"a"
        path.unlink()
        file.write(b"b")
        assert rest_of(tail) == b"b"
        path.write_bytes(b"other")
        file.write(b"c")
        assert rest_of(tail) == b"cother"


def test_several_rotations_between_two_reads_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"0 ")
    tail = Tail(str(path), keep=3)
    assert rest_of(tail) == b"0 "
    with path.open("ab") as file:
        file.write(b"0b ")
    for number in range(1, 4):
        rotate(path, 3)
        path.write_bytes(b"%d " % number)
    assert rest_of(tail) == b"0b 1 2 3 "
    assert not tail.skipped


def test_output_rotated_away_unread_is_reported_missing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"0 ")
    tail = Tail(str(path), keep=2)
    assert rest_of(tail) == b"0 "
    for number in range(1, 6):
        rotate(path, 2)
        path.write_bytes(b"%d " % number)
    assert rest_of(tail) == b"3 4 5 "
    assert tail.skipped


def test_a_gap_among_rotated_files_does_not_stop_reading(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"0 ")
    tail = Tail(str(path), keep=3)
    assert rest_of(tail) == b"0 "
    for number in range(1, 4):
        rotate(path, 3)
        path.write_bytes(b"%d " % number)
    Path(put_aside(str(path), 2)).unlink()
    assert rest_of(tail) == b"2 3 "
    rotate(path, 3)
    assert rest_of(tail) == b""


@pytest.mark.parametrize(
    ("lines", "expected"), [(0, b""), (1, b"f\n"), (2, b"e\nf\n"), (3, b"d\ne\nf\n"), (99, b"a\nb\nc\nd\ne\nf\n")]
)
def test_the_last_lines_reach_back_into_rotated_files(tmp_path: Path, lines: int, expected: bytes) -> None:
    path = tmp_path / "out"
    Path(put_aside(str(path), 2)).write_bytes(b"a\nb\n")
    Path(put_aside(str(path), 1)).write_bytes(b"c\nd\n")
    path.write_bytes(b"e\nf\n")
    tail = Tail(str(path), keep=2)
    tail.begin_last(lines)
    assert rest_of(tail) == expected


def test_the_whole_output_begins_with_the_oldest_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    Path(put_aside(str(path), 1)).write_bytes(b"a")
    path.write_bytes(b"b")
    tail = Tail(str(path), keep=3)
    tail.begin_whole()
    assert rest_of(tail) == b"ab"


def test_only_the_end_of_a_huge_file_is_read_for_a_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        file.truncate(50 * LONGEST_LINE)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    read = 0
    pread = os.pread

    def counting(fd: int, size: int, at: int) -> bytes:
        nonlocal read
        found = pread(fd, size, at)
        read += len(found)
        return found

    monkeypatch.setattr(os, "pread", counting)
    tail = Tail(str(path))
    tail.begin_last(1)
    assert read <= 1 << 17
    assert rest_of(tail) == b"last\n"
    read = 0
    tail.begin_last(3)
    assert read <= 5 * LONGEST_LINE, "an endless line is not read from its beginning"


def test_a_pipe_is_left_to_its_readers(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    tail = Tail(str(path))
    tail.begin_whole()
    assert (rest_of(tail), tail.was_found) == (b"", False)


class Screen:
    """Stands for stdout."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.buffer = BytesIO()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_prefixed_lines_are_complete_however_chunks_are_split(pieces: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        screen = Screen()
        patch.setattr(sys, "stdout", screen)
        printer = PrefixedOutput("[7 x] ")
        for piece in pieces:
            printer.write(piece)
        printer.finish()
    text = b"".join(pieces)
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    assert screen.buffer.getvalue() == b"".join(b"[7 x] " + line + b"\n" for line in lines)


def test_a_bar_on_a_terminal_does_not_overwrite_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", screen)
    printer = PrefixedOutput("[7 x] ", 36)
    printer.write(b"\r 10%\r 50%\r100%\nplain \xff\n")
    assert screen.buffer.getvalue() == b"\x1b[36m[7 x] \x1b[0m100%\n\x1b[36m[7 x] \x1b[0mplain \xff\n"
