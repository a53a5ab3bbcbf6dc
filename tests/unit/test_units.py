"""Sizes, times, ids as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.units import (
    format_duration,
    format_size_mib,
    parse_duration_s,
    parse_job_id,
    parse_size_mib,
    printable,
)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("8192", 8192),
        ("8G", 8192),
        ("8GiB", 8192),
        ("8gb", 8192),
        ("8192M", 8192),
        ("0.5T", 524288),
        ("1K", 1),
        ("1.5G", 1536),
        (" 2 G ", 2048),
        ("100MB", 100),
    ],
)
def test_sizes(text: str, mib: int) -> None:
    assert parse_size_mib(text) == mib


@pytest.mark.parametrize("text", ["", "G", "8X", "-1", "0", "1e3", "8 G G", "nan", "inf", "8GiBiB", "٣", "9" * 30])
def test_what_is_no_size_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size_mib(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("0:5:0", 300),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-2:3:4", 93784),
        ("90s", 90),
        ("30m", 1800),
        ("4h", 14400),
        ("2d", 172800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("0.1s", 1),
        ("1w", 604800),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1x", "-5", "0", "1:2:3:4", "1-", "-1-2", "1:-2", "5 minutes", "9" * 25])
def test_what_is_no_time_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration_s(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 3650 * 86400))
def test_a_printed_time_reads_back(seconds: int) -> None:
    text = format_duration(seconds)
    assert parse_duration_s(text) == seconds


@given(st.text())
def test_no_text_breaks_a_reader(text: str) -> None:
    for parse in (parse_size_mib, parse_duration_s, parse_job_id):
        sentence = repr(text)
        try:
            assert parse(text) > 0
        except ValueError as error:
            sentence = str(error)
        assert repr(text) in sentence


@given(st.text(st.characters()))
def test_printable_text_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")


def test_printable_cuts_with_a_plus() -> None:
    assert printable("abcdef", 4) == "abc+"
    assert printable("\x1b[31mred\n") == "\\x1b[31mred\\n"
    assert printable("\udcff") == "\\udcff"


@pytest.mark.parametrize(
    ("mib", "text"),
    [(None, "-"), (512, "512M"), (1024, "1G"), (1536, "1.5G"), (24564, "24.0G"), (1 << 21, "2T")],
)
def test_sizes_are_printed_short(mib: float | None, text: str) -> None:
    assert format_size_mib(mib) == text.replace(".0G", "G")


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "x", "1_0", "9" * 19])
def test_what_is_no_job_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a job id"):
        parse_job_id(text)
