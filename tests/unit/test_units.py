"""Sizes, times, ids as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.units import (
    format_amount_floor,
    format_duration,
    format_hours,
    format_size_mib,
    gpu_list,
    mig_index,
    parse_duration_s,
    parse_job_id,
    parse_size_mib,
    plural,
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
def test_sizes_are_parsed(text: str, mib: int) -> None:
    assert parse_size_mib(text) == mib


@pytest.mark.parametrize("text", ["", "G", "8X", "-1", "0", "1e3", "8 G G", "nan", "inf", "8GiBiB", "٣", "9" * 30])
def test_an_invalid_size_is_refused_with_its_text(text: str) -> None:
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
def test_times_are_parsed(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1x", "-5", "0", "1:2:3:4", "1-", "-1-2", "1:-2", "5 minutes", "9" * 25])
def test_an_invalid_time_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration_s(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 3650 * 86400))
def test_a_printed_time_reads_back(seconds: int) -> None:
    text = format_duration(seconds)
    assert parse_duration_s(text) == seconds


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
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
def test_an_invalid_job_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a job id"):
        parse_job_id(text)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 GPUs"),
        (1, "1 GPU"),
        (1.0, "1 GPU"),
        (2, "2 GPUs"),
        (0.5, "0.5 GPUs"),
        (7 / 6, "1.17 GPUs"),
        (10, "10 GPUs"),
        (10503, "10503 GPUs"),
        (0.1 + 0.2, "0.3 GPUs"),
        (1.9999999, "2 GPUs"),
        (1.998, "1.998 GPUs"),
        (0.004, "0.004 GPUs"),
        (1.001, "1.001 GPUs"),
        (0.335, "0.335 GPUs"),
        (0.5625, "0.56 GPUs"),
        (0.9996, "0.9996 GPUs"),
    ],
)
def test_plural_prints_amounts_with_their_noun(amount: float, text: str) -> None:
    assert plural(amount, "GPU") == text


@pytest.mark.parametrize(
    ("hours", "rounded", "down"),
    [
        (0.0, "0.00", "0.00"),
        (0.005, "0.005", "0.005"),
        (0.00599, "0.006", "0.0059"),
        (0.00001, "0.00", "0.00"),
        (0.3, "0.30", "0.30"),
        (2.675, "2.67", "2.67"),
        (1.999, "2.00", "1.99"),
        (1959.996, "1960.00", "1959.99"),
        (0.09999, "0.10", "0.0999"),
    ],
)
def test_hours_that_are_left_are_never_rounded_up(hours: float, rounded: str, down: str) -> None:
    assert (format_hours(hours), format_hours(hours, down=True)) == (rounded, down)


@pytest.mark.parametrize(("amount", "text"), [(7 / 6, "1.16"), (2.0, "2"), (1.999, "1.99"), (0.25, "0.25")])
def test_requestable_amounts_are_never_rounded_up(amount: float, text: str) -> None:
    assert format_amount_floor(amount) == text


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0,1"),
        ([0, 1, 2], "0-2"),
        (range(8), "0-7"),
        ([5, 0, 2, 1], "0-2,5"),
        ([0, 2, 3, 4, 7, 8], "0,2-4,7,8"),
        ([mig_index(2, slot) for slot in range(3)], "2:0,2:1,2:2"),
        ([1, 2, 3, mig_index(0, 0)], "1-3,0:0"),
    ],
)
def test_lists_of_gpus_are_printed_as_ranges(indices: list[int], text: str) -> None:
    assert gpu_list(indices) == text
