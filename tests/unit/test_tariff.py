"""Prices of energy over time, and files that have them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import Lab

from gpusched.config.tariff import TariffError, parse_tariff, read_tariff
from gpusched.daemon.watch.tariff import TariffWatch
from gpusched.model.settings import EnergySettings
from gpusched.model.tariff import Tariff, TariffRow
from gpusched.model.value import replace

HEAD = "start,price_per_kwh,g_per_kwh\n"
NIGHT = 1795392000.0
"""2026-11-23T00:00:00Z"""


def parse(text: str | bytes) -> tuple[tuple[TariffRow, ...], float | None]:
    return parse_tariff(text if isinstance(text, bytes) else text.encode(), "t.csv")


@pytest.mark.parametrize(
    ("text", "rows", "end_at"),
    [
        pytest.param(
            HEAD + "2026-11-23T00:00:00Z,0.2,300\n2026-11-23T01:00:00Z,0.1,200\n",
            [(0, 0.2, 300), (3600, 0.1, 200)],
            7200,
            id="the last row lasts as long as the one before",
        ),
        pytest.param(HEAD + "2026-11-23T01:00:00+01:00,0.2,300", [(0, 0.2, 300)], None, id="one row lasts for ever"),
        pytest.param(HEAD + "2026-11-23t00:00:00.25z,.2,3e2", [(0, 0.2, 300)], None, id="other spellings"),
        pytest.param(HEAD + "2026-11-23 00:00Z,0.2,", [(0, 0.2, None)], None, id="a hole: the fixed value"),
        pytest.param("start,g_per_kwh\n2026-11-23T00:00Z,300", [(0, None, 300)], None, id="emissions alone"),
        pytest.param("price_per_kwh,start\n-0.05,2026-11-23T00:00Z", [(0, -0.05, None)], None, id="a negative price"),
        pytest.param(
            "\ufeff" + HEAD + "\n 2026-11-23T00:00Z , 0.2 , 300 \n\n", [(0, 0.2, 300)], None, id="BOM, blanks"
        ),
        pytest.param(HEAD.replace("\n", "\r\n") + "2026-11-23T00:00Z,1,2\r\n", [(0, 1, 2)], None, id="CRLF"),
        pytest.param(
            HEAD + "2026-10-25T02:00:00+02:00,1,1\n2026-10-25T02:00:00+01:00,2,2\n",
            [(-2505600, 1, 1), (-2502000, 2, 2)],
            -2498400,
            id="the hour that the clocks repeat",
        ),
    ],
)
def test_a_file_is_read(text: str, rows: list[tuple[float, float | None, float | None]], end_at: float | None) -> None:
    found, end = parse(text)
    assert [(row.start_at - NIGHT, row.price_per_kwh, row.g_per_kwh) for row in found] == rows
    assert (None if end is None else end - NIGHT) == end_at


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "t.csv: it is empty"),
        ("\n\n", "t.csv: it is empty"),
        (HEAD, "t.csv: it has no rows"),
        ("start;price_per_kwh\n", "t.csv:1: fields are separated by commas, not semicolons"),
        ("begin,price_per_kwh\n", "t.csv:1: unknown column 'begin'"),
        ("start,start\n", "t.csv:1: the column start is there twice"),
        ("start\n2026-11-23T00:00Z\n", "t.csv:1: it needs a column start and one of figures"),
        ("price_per_kwh\n1\n", "t.csv:1: it needs a column start"),
        (HEAD + "2026-11-23T00:00:00,1,1", "t.csv:2: 2026-11-23T00:00:00 has no offset"),
        (HEAD + "2026-13-23T00:00:00Z,1,1", "t.csv:2: '2026-13-23T00:00:00Z' is not an instant"),
        (HEAD + "0000-01-01T00:00:00Z,1,1", "t.csv:2: '0000-01-01T00:00:00Z' is not an instant"),
        (HEAD + "2026-11-23T00:00:00+99:00,1,1", "is not an instant"),
        (HEAD + "tomorrow,1,1", "t.csv:2: 'tomorrow' is not an instant"),
        (HEAD + ",1,1", "t.csv:2: '' is not an instant"),
        (HEAD + "2026-11-23T01:00Z,1,1\n2026-11-23T00:00Z,1,1", "t.csv:3: 2026-11-23T00:00Z lies before"),
        (HEAD + "2026-11-23T01:00Z,1,1\n2026-11-23T02:00+01:00,1,1", "t.csv:3: 2026-11-23T02:00+01:00 repeats"),
        (HEAD + "2026-11-23T00:00Z,0,28,300", "t.csv:2: 4 fields where the first line has 3: write decimals with a"),
        (HEAD + '2026-11-23T00:00Z,"0,28",300', "price_per_kwh is '0,28', not a number; write decimals with a point"),
        (HEAD + "2026-11-23T00:00Z,1", "t.csv:2: 2 fields where the first line has 3"),
        (HEAD + "2026-11-23T00:00Z,cheap,1", "price_per_kwh is 'cheap', not a number"),
        (HEAD + "2026-11-23T00:00Z,nan,1", "price_per_kwh is 'nan', not a number"),
        (HEAD + "2026-11-23T00:00Z,1_0,1", "price_per_kwh is '1_0', not a number"),
        (HEAD + "2026-11-23T00:00Z,1e9,1", "price_per_kwh is 1e9; it must be from -100 to 1000"),
        (HEAD + "2026-11-23T00:00Z,1,-3", "g_per_kwh is -3; it must be from 0 to 5000"),
        (HEAD + '2026-11-23T00:00Z,"1,1', "t.csv:2: "),
        (HEAD.encode() + b"2026-11-23T00:00Z,\xff,1", "t.csv:2: it is not UTF-8"),
        (b"\0" * 20, "t.csv:1: "),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str | bytes, sentence: str) -> None:
    with pytest.raises(TariffError) as caught:
        parse(text)
    assert sentence in caught.value.message
    assert caught.value.hint


def test_a_file_that_never_ends_is_refused() -> None:
    with pytest.raises(TariffError, match="/dev/zero is larger than 16 MiB"):
        read_tariff(EnergySettings(tariff="/dev/zero"))


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: (HEAD + text).encode("utf-8", "replace")))
def test_no_file_raises_anything_else(content: bytes) -> None:
    try:
        parse(content)
    except TariffError:
        pass


TARIFF = Tariff(0.3, 400, "EUR", 1.0, (TariffRow(100.0, 0.1), TariffRow(200.0, None, 100)), end_at=300.0)


@pytest.mark.parametrize(
    ("instant", "price", "grams"),
    [(99, 0.3, 400), (100, 0.1, 400), (199.9, 0.1, 400), (200, 0.3, 100), (300, 0.3, 400)],
)
def test_a_row_holds_until_the_next_one(instant: float, price: float, grams: float) -> None:
    found = TARIFF.at(instant)
    assert (found.price_per_kwh, found.g_per_kwh) == (price, grams)


@given(st.floats(0, 400), st.floats(0, 400), st.floats(0, 400))
def test_a_charge_is_the_sum_of_its_parts(one: float, two: float, three: float) -> None:
    start, middle, end = sorted((one, two, three))
    if end - start < 1e-3:
        return
    whole = TARIFF.charge(start, end, 1e6)
    part = 1e6 * (middle - start) / (end - start)
    first, second = TARIFF.charge(start, middle, part), TARIFF.charge(middle, end, 1e6 - part)
    for at in (0, 1):
        assert whole[at] == pytest.approx((first[at] or 0) + (second[at] or 0), rel=1e-6)


def test_a_file_that_changes_is_read_again_and_a_wrong_one_leaves_the_prices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "tariff.csv"
    lab = Lab(energy=EnergySettings(price_per_kwh=0.3, tariff=str(path)))
    watch = TariffWatch(lab.scheduler)
    assert lab.scheduler.tariff_problem is not None
    assert lab.scheduler.tariff == Tariff(0.3, None, "EUR", 1.0)
    for content, rows, has_problem in (
        (HEAD + "2026-11-23T00:00Z,0.1,", 1, False),
        (HEAD + "2026-11-23T00:00,0.1,", 1, True),
        (HEAD + "2026-11-23T00:00Z,0.1,\n2026-11-24T00:00Z,0.2,", 2, False),
    ):
        path.write_text(content)
        os.utime(path, (len(content), len(content)))
        lab.clock.advance(61)
        watch.poll()
        tariff = lab.scheduler.tariff
        assert tariff is not None
        assert len(tariff.rows) == rows
        assert (lab.scheduler.tariff_problem is not None) is has_problem
        assert lab.scheduler.head.tracker.tariff is tariff
    assert "has no offset; when it is depends on the time zone; the prices in force stay" in caplog.text


def test_a_reload_changes_prices(tmp_path: Path) -> None:
    lab = Lab(energy=EnergySettings(price_per_kwh=0.3))
    TariffWatch(lab.scheduler)
    changed = replace(lab.settings, energy=EnergySettings(g_per_kwh=380, pue=1.4))
    lab.scheduler.signals.settings_changed.send(lab.scheduler.failures, changed)
    tariff = lab.scheduler.tariff
    assert tariff is not None
    assert (tariff.price_per_kwh, tariff.g_per_kwh, tariff.pue) == (None, 380, 1.4)
