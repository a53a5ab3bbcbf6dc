"""Formats of Slurm's commands: `%` fields, `-O` fields, columns of sacct."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm.format import (
    AccountingColumn,
    PrintField,
    keys_of,
    long_pieces,
    percent_pieces,
    render,
    render_columns,
    render_parsable,
)

FIELDS = {
    "i": PrintField("JOBID", lambda row: row[0], keys="id"),
    "j": PrintField("NAME", lambda row: row[1], keys="name"),
}
LONG = {"jobid": FIELDS["i"], "name": FIELDS["j"], "tres-alloc": FIELDS["j"]}
ROWS = [("42", "train"), ("43_7", "a long name")]


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("%i %j", ["JOBID NAME", "42 train", "43_7 a long name"]),
        ("%.6i|%4j|", [" JOBID|NAME|", "    42|trai|", "  43_7|a lo|"]),
        ('"%i","%j"', ['"JOBID","NAME"', '"42","train"', '"43_7","a long name"']),
        ("%i\\x1f", ["JOBID\\x1f", "42\\x1f", "43_7\\x1f"]),
        ("%!", ["%!", "%!", "%!"]),
        ("100%", ["100%", "100%", "100%"]),
        ("%5", ["%5", "%5", "%5"]),
        ("%%i 50%", ["%%i 50%", "%%i 50%", "%%i 50%"]),
        ("", ["", "", ""]),
    ],
)
def test_a_percent_format_is_printed_as_written(form: str, lines: list[str]) -> None:
    assert render(percent_pieces(form, FIELDS), ROWS).splitlines() == lines


def test_a_negative_width_is_refused() -> None:
    with pytest.raises(ValueError, match="%-8i"):
        percent_pieces("%-8i", FIELDS)


@given(st.text("%.0123456789ij!|x", max_size=20))
def test_literal_text_survives_in_any_format(form: str) -> None:
    pieces = percent_pieces(form, FIELDS)
    literal = "".join(piece.text for piece in pieces)
    assert all(char in form for char in literal)
    assert render(pieces, ROWS, header=False).count("\n") == 2


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("jobid,name", f"{'42':20}{'train':20}"),
        ("JobID:6,Name:3", "42    tra"),
        ("jobid:###turm###,name:|", "42###turm###train|"),
        ("jobid:.6", "    42"),
        ("TRES_ALLOC:4", "trai"),
    ],
)
def test_a_long_field_has_a_width_or_a_suffix(form: str, line: str) -> None:
    pieces, unknown = long_pieces(form, LONG)
    assert (render(pieces, ROWS[:1], header=False), unknown) == (f"{line}\n", [])


def test_unknown_long_fields_are_named() -> None:
    pieces, unknown = long_pieces("jobid,nosuch,name", LONG)
    assert (len(pieces), unknown) == (2, ["nosuch"])


def test_keys_are_those_of_the_fields_in_use() -> None:
    assert keys_of(percent_pieces("%j %i %j", FIELDS)) == ["name", "id"]


COLUMNS = [AccountingColumn("JobID", -6, lambda row: row[0]), AccountingColumn("JobName", 8, lambda row: row[1])]


def test_columns_are_cut_with_a_plus() -> None:
    assert render_columns(COLUMNS, ROWS).splitlines() == [
        "JobID   JobName ",
        "------ -------- ",
        "42        train ",
        "43_7   a long + ",
    ]


def test_parsable_columns_are_never_cut() -> None:
    assert render_parsable(COLUMNS, ROWS) == "JobID|JobName\n42|train\n43_7|a long name\n"
    assert render_parsable(COLUMNS, ROWS, "^|^", ends_with_delimiter=True, header=False).startswith("42^|^train^|^\n")
