"""Tables: cells, not characters; whole in a pipe, and no wider than a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from gpusched.cli import tables
from gpusched.cli.query import folded_ids, places, where

TITLES = ("ID", "NAME", "ST", "NODE/REASON")


class Stream(io.StringIO):
    """Standard output that goes to a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no descriptor")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A terminal that can be made any size."""
    monkeypatch.setenv("TERM", "dumb")

    def resize(columns: int, lines: int = 24) -> None:
        monkeypatch.setattr(sys, "stdout", Stream())
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(lines))

    return resize


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("", 0),
        ("größe", 5),
        ("日本語", 6),
        ("🚀x", 3),
        ("e\u0301", 1),
        ("\u1112\u1161\u11ab", 2),
        ("ｗｉｄｅ", 8),
    ],
)
def test_width_counts_cells(text: str, cells: int) -> None:
    assert tables.cells(text) == cells
    assert tables.cells(tables.pad(text, 10)) == 10
    assert tables.pad(text, 10, is_right=True).endswith(text)


def test_head_never_splits_a_wide_character() -> None:
    assert tables.head("日本語", 5) == "日本"
    assert tables.head("abc", 2) == "ab"
    assert tables.head("e\u0301e\u0301", 1) == "e\u0301"


def test_columns_align_whatever_their_characters() -> None:
    rows = [("1", "日本語", "R", "lab1"), ("2", "größe", "PD", "(Priority)"), ("3", "🚀", "PD", "(Resources)")]
    lines = tables.table(TITLES, rows)
    before = [line[: line.index(cell)] for line, cell in zip(lines[1:], ("lab1", "(P", "(R"), strict=True)]
    assert list(map(tables.cells, before)) == [lines[0].index("NODE")] * 3


def test_a_pipe_gets_whole_names_on_one_line_each() -> None:
    rows = [("1", "n" * 500, "PD", "a sentence of several words " * 9)]
    lines = tables.table(TITLES, rows, cut={1: 6})
    assert len(lines) == 2
    assert "n" * 500 in lines[1]


@pytest.mark.parametrize("columns", [30, 50, 80, 120])
@pytest.mark.parametrize("rows", [1, 3, 2000])
def test_cut_rows_take_one_line_each_and_fit_the_terminal(terminal: Any, columns: int, rows: int) -> None:
    terminal(columns)
    row = ("412-9999 (9,588 jobs)", "a-name-that-goes-on-and-on-and-on", "PD", "(Resources)")
    lines = tables.table(TITLES, [row] * rows, cut={0: 4, 1: 6, 3: 12})
    assert len(lines) == rows + 1
    assert max(map(tables.cells, lines)) <= columns
    assert lines[0].split() == list(TITLES) or columns < 40
    assert ("…" in lines[1]) == (columns < 75)


def test_sentences_fold_within_their_column(terminal: Any) -> None:
    terminal(60)
    sentence = "needs 1 free GPU, none of 2 is free; " * 3
    lines = tables.table(TITLES, [("1", "x", "PD", sentence), ("2", "y", "R", "lab1")])
    assert max(map(len, lines)) <= 60
    at = lines[0].index("NODE/REASON")
    assert [line[:at].strip() for line in lines[2:-1]] == [""] * (len(lines) - 3)
    assert len(lines) > 4


QUEUE = [
    tables.Column("ID", lambda row: row[0], least=8),
    tables.Column("NAME", lambda row: row[1], least=12),
    tables.Column("USER", lambda row: row[2], order=1),
    tables.Column("PROGRESS", lambda row: row[3], below=True),
    tables.Column("NODE/REASON", lambda row: row[4], below=True),
]
WAITING = [
    ("1", "train-a-network-for-days", "alice", "[####......]  45% 1:23:45", "lab1:0,1"),
    ("4_[7-39]", "sweep", "bob", "", "(QOSMaxWallDurationPerJobLimit)"),
    ("52", "waits", "bob", "", ""),
]


def test_cells_that_may_be_below_are_whole_there_or_in_their_column(terminal: Any) -> None:
    terminal(40)
    assert tables.lines_of(QUEUE, WAITING) == [
        "ID        NAME                     USER",
        "1         train-a-network-for-da…  alice",
        "    lab1:0,1  [####......]  45% 1:23:45",
        "4_[7-39]  sweep                    bob",
        "    (QOSMaxWallDurationPerJobLimit)",
        "52        waits                    bob",
    ]
    for columns in range(30, 130, 3):
        terminal(columns)
        text = "\n".join(tables.lines_of(QUEUE, WAITING))
        for row in WAITING:
            for cell in (row[0], *row[3:]):
                assert all(word in text.split() for word in cell.split()), (columns, cell)
        assert max(map(len, text.splitlines())) <= max(columns, 4 + len(WAITING[1][4]))


def test_sentences_below_rows_follow_what_had_no_room_beside_them(terminal: Any) -> None:
    said = {"1": "", "4_[7-39]": "its limit is too long", "52": "waits for 1"}
    terminal(40)
    lines = tables.lines_of(QUEUE, WAITING, sentence=lambda row: said[row[0]])
    assert lines[4] == "    (QOSMaxWallDurationPerJobLimit) its\n    limit is too long"
    assert lines[-1] == "    waits for 1"
    terminal(140)
    wide = tables.lines_of(QUEUE, WAITING, sentence=lambda row: said[row[0]])
    assert [line.strip() for line in wide if line.startswith("    ")] == ["its limit is too long", "waits for 1"]


def test_lists_break_behind_a_comma(terminal: Any) -> None:
    terminal(30)
    lines = tables.table(("GPU", "JOBS"), [("0", ",".join(map(str, range(100, 120))))])
    assert all(line.endswith(",") for line in lines[1:-1])


def test_a_fixed_column_is_never_cut(terminal: Any) -> None:
    terminal(20)
    lines = tables.table(("SETTING", "VALUE"), [("priority.order", "multifactor-and-more")])
    assert lines[1].split() == ["priority.order", "multifactor-and-more"]


def test_colours_do_not_move_columns(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(80)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    titles, *lines = tables.table(TITLES, [("1", "a", "R", "lab1"), ("2", "b", "PD", "(Priority)")])
    assert titles == "\x1b[1mID  NAME  ST  NODE/REASON\x1b[0m"
    assert lines == ["1   a     \x1b[32mR \x1b[0m  lab1", "2   b     \x1b[33mPD\x1b[0m  (Priority)"]


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (["42"], "42"),
        (["3", "5", "4"], "3-5 (3 jobs)"),
        (["3", "5", "7"], "3,5,7 (3 jobs)"),
        ([str(one) for one in range(412, 10000)], "412-9999 (9,588 jobs)"),
        (["42_7", "42_9"], "42_7,42_9 (2 jobs)"),
        (["1000000001", "1000000002"], "1000000001-1000000002 (2 jobs)"),
        (["1000000001", "1000000002", "1000000007"], "1000000001-1000000002,... (3 jobs)"),
        ([str(one) for one in range(100, 200, 2)], "100,102,104,... (50 jobs)"),
    ],
)
def test_ids_of_folded_jobs_are_ranges(ids: list[str], shown: str) -> None:
    assert folded_ids(ids) == shown


@pytest.mark.parametrize(
    ("cards", "shown"),
    [
        ({}, ""),
        ({"n1": [0]}, "n1:0"),
        ({"n1": [0, 1, 2], "n2": [0, 1, 2]}, "n[1-2]:0-2"),
        ({"n1": [0], "n2": [3], "n3": [0]}, "n[1,3]:0 n2:3"),
    ],
)
def test_nodes_with_the_same_gpus_share_a_word(cards: dict[str, list[int]], shown: str) -> None:
    gpus = [{"node": node, "index": index} for node, indexes in cards.items() for index in indexes]
    assert places(gpus) == shown
    job = {"state": "RUNNING", "gpus": gpus, "node": "n[1-2]", "reason": None}
    assert where(job, 0.0) == shown or (not gpus and where(job, 0.0) == "n[1-2]")
