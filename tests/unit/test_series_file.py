"""The file of the time series: sizes, restarts, damage, and clocks that jump."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gpusched.model.samples import CARD, QUEUE, FoldingSeries, card_values, fold_records
from gpusched.store.series import MINUTE_S, RunCurve, SeriesFile

DAY_S = 86400
NOON = 20_000 * DAY_S + 12 * 3600


def values(use: float = 0.5, joules: float = 18_000.0) -> tuple[float | None, ...]:
    return tuple(card_values(use, 0.25, 60.0, 40960.0, 300.0, joules))


def minutes(file: SeriesFile, subject: str, start_at: int, count: int) -> list[float | None]:
    data = file.records(CARD, subject, 60, start_at, start_at + 60 * count)
    return fold_records(CARD, data, 1, ["energy_j"])["energy_j"]


def test_minutes_are_kept_over_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "series.db")
    file = SeriesFile(path)
    for minute in (0, 1, 3):
        file.write(NOON + 60 * minute, NOON + 60 * minute, [("card", "GPU-0", values(joules=minute + 1.0))])
    file.close()
    assert minutes(SeriesFile(path), "GPU-0", NOON, 5) == [1.0, 2.0, None, 4.0, None]


def test_ten_minutes_are_the_sum_of_their_minutes_across_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "series.db")
    for minute in range(10):
        file = SeriesFile(path)
        file.write(NOON, NOON + 60 * minute, [("card", "GPU-0", values(use=minute / 10, joules=100.0))])
        file.close()
    data = SeriesFile(path).records(CARD, "GPU-0", 600, NOON, NOON + 600)
    found = fold_records(CARD, data, 1, CARD.names)
    assert found["energy_j"] == [1000.0]
    assert found["use"] == pytest.approx([0.45])
    assert found["use_max"] == [0.9]


def test_a_minute_that_the_clock_repeats_is_overwritten(tmp_path: Path) -> None:
    file = SeriesFile(str(tmp_path / "series.db"))
    for joules, minute_at in ((1.0, NOON), (2.0, NOON + 60), (3.0, NOON), (4.0, NOON + 600_000_000)):
        file.write(minute_at, minute_at, [("card", "GPU-0", values(joules=joules))])
    assert minutes(file, "GPU-0", NOON, 2) == [3.0, 2.0]


def test_records_of_a_future_that_never_came_are_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "series.db")
    file = SeriesFile(path)
    file.write(NOON, NOON, [("card", "GPU-0", values())])
    file.write(NOON + 1e8, NOON + 100_000_080, [("card", "GPU-0", values())])
    assert minutes(file, "GPU-0", NOON, 1) == [18_000.0], "a clock that is wrong for a moment costs nothing"
    for hour in range(26):
        file.write(NOON + 3600 * hour, NOON + 3600 * hour, [("card", "GPU-0", values())])
    file.close()
    starts = [row[0] for row in sqlite3.connect(path).execute("SELECT start_at FROM series")]
    assert max(starts) <= NOON + 26 * 3600


def test_a_curve_of_a_run_is_kept(tmp_path: Path) -> None:
    file = SeriesFile(str(tmp_path / "series.db"))
    series = FoldingSeries(CARD, float(NOON))
    for second in range(90):
        series.add(NOON + second, values(joules=300.0))
    file.write(NOON, NOON, [], curves=[RunCurve("41.1", "GPU-0", series)])
    ((found),) = file.curves(["41.1", "42.1"], CARD)
    assert (found.run, found.uuid, found.series.end_at) == ("41.1", "GPU-0", NOON + 90)
    assert file.holders("GPU-0", NOON + 80, NOON + 100, 10) == [("41.1", NOON, NOON + 90)]
    assert file.holders("GPU-0", NOON + 90, NOON + 100, 10) == []
    for day in range(91, 94):
        file.write(NOON + day * DAY_S, NOON + day * DAY_S, [])
    assert file.curves(["41.1"], CARD) == []


def test_states_of_meters_are_replaced_and_counters_stay(tmp_path: Path) -> None:
    path = str(tmp_path / "series.db")
    file = SeriesFile(path)
    file.write(NOON, NOON, [], counters={"GPU-0": "a"}, meters={("lab1", "1.1"): "x"})
    file.write(NOON, NOON, [], counters={"GPU-1": "b"}, meters={("lab1", "2.1"): "y"})
    file.close()
    again = SeriesFile(path)
    assert sorted(again.counters()) == ["a", "b"]
    assert again.meters() == {("lab1", "2.1"): "y"}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_bytes(b"not a database" * 1000), id="overwritten"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:5000]), id="cut off"),
        pytest.param(lambda path: sqlite3.connect(path).execute("PRAGMA user_version = 99"), id="of a later release"),
        pytest.param(lambda path: path.unlink(), id="deleted"),
    ],
)
def test_a_spoilt_file_is_begun_again_with_a_line_in_the_log(
    spoil: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "series.db"
    file = SeriesFile(str(path))
    for minute in range(50):
        file.write(NOON, NOON + 60 * minute, [("card", f"GPU-{gpu}", values()) for gpu in range(20)])
    file.close()
    assert callable(spoil)
    spoil(path)
    again = SeriesFile(str(path))
    again.write(NOON, NOON, [("card", "GPU-0", values(joules=5.0))])
    again.write(NOON, NOON + 60, [("card", "GPU-0", values(joules=6.0))])
    assert minutes(again, "GPU-0", NOON, 2)[1] == 6.0
    if path.name + ".damaged" in os.listdir(tmp_path):
        assert "the time series begin again" in caplog.text


def test_a_file_deleted_under_the_daemon_is_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "series.db"
    file = SeriesFile(str(path))
    file.write(NOON, NOON, [("card", "GPU-0", values(joules=5.0))])
    path.unlink()
    file.write(NOON, NOON + 60, [("card", "GPU-0", values(joules=6.0))])
    assert "was deleted" in caplog.text
    assert minutes(SeriesFile(str(path)), "GPU-0", NOON, 2) == [None, 6.0]


def test_a_folder_that_cannot_be_written_costs_a_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SeriesFile(str(tmp_path / "missing" / "series.db"))
    for _ in range(3):
        file.write(NOON, NOON, [("card", "GPU-0", values())])
    assert minutes(file, "GPU-0", NOON, 1) == [None]
    assert caplog.text.count("time series are not kept") == 1
    (tmp_path / "missing").mkdir()
    file.write(NOON, NOON, [("card", "GPU-0", values(joules=5.0))])
    assert minutes(file, "GPU-0", NOON, 1) == [5.0]


WRITER = """
import sys
from gpusched.model.samples import card_values
from gpusched.store.series import SeriesFile
file = SeriesFile(sys.argv[1])
for minute in range(100000):
    at = int(sys.argv[2]) + 60 * minute
    file.write(at, at, [("card", f"GPU-{gpu}", card_values(.5, .5, 50, 1024, 300, minute)) for gpu in range(8)])
    print(minute, flush=True)
"""


def test_a_writer_killed_while_writing_loses_no_whole_minute(tmp_path: Path) -> None:
    path = str(tmp_path / "series.db")
    with subprocess.Popen([sys.executable, "-c", WRITER, path, str(NOON)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.strip() == "40":
                break
        writer.send_signal(signal.SIGKILL)
    assert minutes(SeriesFile(path), "GPU-7", NOON, 41) == [float(minute) for minute in range(41)]


def synthetic(draw: random.Random, phase: float) -> tuple[float | None, ...]:
    """Ten minutes of a card of a lab: idle, or busy with a level that wanders."""
    if phase < 0.3:
        return tuple(card_values(0.0, 0.0, 36.0, 4.0, 62.0, 37_000.0))
    use = min(1.0, max(0.0, draw.gauss(0.93, 0.03)))
    return tuple(card_values(use, use / 2, draw.gauss(66, 2), 61440.0, draw.gauss(380, 8), draw.gauss(228_000, 4000)))


def fill(path: Path, cards: int, days: int) -> None:
    draw = random.Random(7)
    file = SeriesFile(str(path))
    phases = {f"GPU-{card:08d}-0000-0000-0000-000000000000": 0.0 for card in range(cards)}
    for window in range(days * 144):
        at = NOON - NOON % DAY_S + window * 600
        for uuid, phase in phases.items():
            phases[uuid] = draw.random() if draw.random() < 0.03 else phase
        # One minute stands for ten: it is folded into the record that is kept for a year.
        file.write(at, at, [("card", uuid, synthetic(draw, phase)) for uuid, phase in phases.items()])
    file.close()


def test_a_day_of_a_card_is_no_larger_than_in_the_design(tmp_path: Path) -> None:
    """2.9 MB for a year of 8 cards are 993 bytes."""
    path = tmp_path / "series.db"
    fill(path, cards=1, days=4)
    (size,) = sqlite3.connect(path).execute("SELECT avg(length(data)) FROM series WHERE step_s = 600").fetchone()
    assert 300 < size < 993


def test_a_year_of_eight_cards_has_the_size_of_the_design(tmp_path: Path) -> None:
    """The design measured 2.9 MB, and 0.5 MB go to the last two days of minutes."""
    path, once = tmp_path / "series.db", tmp_path / "some_days.db"
    fill(once, cards=1, days=4)
    blocks = [data for (data,) in sqlite3.connect(once).execute("SELECT data FROM series WHERE step_s = 600")]
    hours = [data for (data,) in sqlite3.connect(once).execute("SELECT data FROM series WHERE step_s = 60")]
    SeriesFile(str(path)).close()
    db = sqlite3.connect(path)
    uuids = [f"GPU-{card:08d}-0000-0000-0000-000000000000" for card in range(8)]
    for day in range(366):
        db.executemany(
            "INSERT INTO series VALUES ('card', ?, 600, ?, ?)",
            [(uuid, day * DAY_S, blocks[(day + at) % len(blocks)]) for at, uuid in enumerate(uuids)],
        )
    for hour in range(26):
        db.executemany(
            "INSERT INTO series VALUES ('card', ?, 60, ?, ?)",
            [(uuid, hour * 3600, hours[hour % len(hours)] * 4) for uuid in uuids],
        )
    db.commit()
    db.close()
    print(f"a year of 8 cards: {path.stat().st_size / 1e6:.2f} MB")
    assert path.stat().st_size < 3.4e6


def test_old_days_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "series.db"
    file = SeriesFile(str(path))
    for day in range(500):
        at = NOON + day * DAY_S
        file.write(at, at, [("card", "GPU-0", values()), ("queue", "", (1.0, 2.0, 0.0, 4.0, None))])
    file.close()
    rows = sqlite3.connect(path).execute("SELECT kind, step_s, count(*) FROM series GROUP BY 1, 2").fetchall()
    counts = {(kind, step_s): count for kind, step_s, count in rows}
    assert counts.keys() == {(kind.name, step) for kind in (CARD, QUEUE) for step in (MINUTE_S, 600)}
    assert max(counts[kind, 600] for kind in ("card", "queue")) <= 368
    assert max(counts[kind, MINUTE_S] for kind in ("card", "queue")) <= 3
