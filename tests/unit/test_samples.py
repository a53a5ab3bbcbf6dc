"""Records of samples, and buckets that fold them."""

from __future__ import annotations

import pytest

from gpusched.model.samples import CARD, MOST_BUCKETS, QUEUE, FoldingSeries, card_values, fold, fold_records

BUSY = card_values(0.97, 0.4, 68.0, 71 * 1024.0, 391.2, 391.0)
IDLE = card_values(0.0, 0.0, 35.0, 0.0, 60.0, 60.0)
NOTHING = card_values(None, None, None, None, None, None)


def test_a_record_has_the_size_of_the_design() -> None:
    assert (CARD.record.size, QUEUE.record.size) == (16, 20)


@pytest.mark.parametrize("values", [BUSY, IDLE, NOTHING, card_values(None, 0.5, None, 1024.0, None, 7.0)])
def test_a_record_holds_its_values(values: tuple[float | None, ...]) -> None:
    assert CARD.unpack(CARD.pack(values)) == pytest.approx(values)


def test_unknown_is_not_zero() -> None:
    assert CARD.pack(NOTHING) == CARD.nothing
    assert CARD.unpack(CARD.pack(IDLE))[0] == 0.0
    assert CARD.unpack(CARD.nothing) == (None,) * 9


def test_a_record_clips_what_it_cannot_hold() -> None:
    found = CARD.unpack(CARD.pack(card_values(9.0, -1.0, 900.0, 1e9, 1e9, 1e12)))
    assert found[0] == 2.54
    assert found[2] == 0.0
    assert None not in found


def test_a_fold_has_means_maxima_and_sums() -> None:
    found = dict(zip(CARD.names, fold(CARD, [BUSY, IDLE, NOTHING]), strict=True))
    assert found["use"] == pytest.approx(0.485)
    assert found["use_max"] == 0.97
    assert found["power_max_w"] == pytest.approx(391.2)
    assert found["energy_j"] == 451.0


def test_a_fold_of_records_equals_one_of_values() -> None:
    rows = [BUSY, IDLE, NOTHING, BUSY, NOTHING]
    columns = fold_records(CARD, b"".join(map(CARD.pack, rows)), 2, CARD.names)
    expected = [fold(CARD, rows[at : at + 2]) for at in (0, 2, 4)]
    for at, name in enumerate(CARD.names):
        assert columns[name] == pytest.approx([row[at] for row in expected])


def test_a_fold_of_no_records_is_empty() -> None:
    assert fold_records(CARD, b"", 3, ["use"]) == {"use": []}


def test_a_series_keeps_every_joule_while_it_folds() -> None:
    series = FoldingSeries(CARD, 1000.0)
    for second in range(0, 12 * 3600, 10):
        series.add(1000.0 + second, BUSY)
    assert len(series) <= MOST_BUCKETS
    assert series.step_s == 256
    assert sum(row[-1] or 0 for row in series.rows()) == pytest.approx(12 * 360 * 391.0)
    assert len(series.pack()) <= 4096


def test_a_series_goes_through_its_record() -> None:
    series = FoldingSeries(CARD, 1000.0)
    for second in range(0, 700, 7):
        series.add(1000.0 + second, BUSY)
    again = FoldingSeries.unpack(CARD, 1000.0, series.step_s, series.pack())
    assert (again.end_at, len(again)) == (series.end_at, len(series))
    for row, expected in zip(again.rows(), series.rows(), strict=True):
        assert [value is None for value in row] == [value is None for value in expected]
        assert [value or 0 for value in row] == pytest.approx([value or 0 for value in expected], rel=0.01)


@pytest.mark.parametrize(
    ("second", "length"),
    [
        pytest.param(-5000.0, 10, id="set back: into the last bucket"),
        pytest.param(1e9, MOST_BUCKETS, id="set forward by decades: folded, not stored"),
    ],
)
def test_a_series_survives_steps_of_the_clock(second: float, length: int) -> None:
    series = FoldingSeries(CARD, 1000.0)
    for at in range(10):
        series.add(1000.0 + at, BUSY)
    series.add(1000.0 + second, IDLE)
    assert len(series) <= length
    assert sum(row[-1] or 0 for row in series.rows()) == pytest.approx(10 * 391.0 + 60.0)


@pytest.mark.parametrize(("step_s", "data"), [(1, b"x"), (0, b""), (1, b"x" * 16 * 257)])
def test_a_damaged_series_is_refused(step_s: int, data: bytes) -> None:
    with pytest.raises(ValueError, match="not a series of card"):
        FoldingSeries.unpack(CARD, 0.0, step_s, data)
