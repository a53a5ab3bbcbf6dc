"""What runs say about how far they are, how it is read from their files, and when they will be done."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.cli.tables import bar, sentence
from gpusched.daemon.watch import progress as reading
from gpusched.daemon.watch.progress import ProgressReader, look, read_tail
from gpusched.engine.spool import progress_path
from gpusched.model.job import Job, Run
from gpusched.model.progress import (
    MOST_SAMPLES,
    TEXT_WIDTH,
    Progress,
    Sample,
    left_s,
    parse_bar,
    parse_progress,
    with_sample,
)
from gpusched.model.states import RunState
from gpusched.testing import job

UID = os.geteuid()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("0.35", Progress(0.35)),
        ("0.35\n", Progress(0.35)),
        (".5", Progress(0.5)),
        ("0", Progress(0.0)),
        ("1", Progress(1.0)),
        ("35%", Progress(0.35)),
        ("35 %", Progress(0.35)),
        ("101%", Progress(1.0)),
        ("120/1000", Progress(0.12, "120/1000")),
        ("120 / 1000 epoch 3", Progress(0.12, "120/1000 epoch 3")),
        ("1001/1000", Progress(1.0, "1001/1000")),
        ("0.1\n0.2\n0.3 third\n\n", Progress(0.3, "third")),
        ("0.5, loss=0.1", Progress(0.5, "loss=0.1")),
        ("7%\ttwo\twords", Progress(0.07, "two words")),
        ("0.5 \x1b[31mred", Progress(0.5, "\\x1b[31mred")),
        ("35", None),
        ("1.5", None),
        ("-0.5", None),
        ("nan", None),
        ("inf", None),
        ("1e-1", None),
        ("3/0", None),
        ("done", None),
        ("0.5x", None),
        ("", None),
        ("\n\n", None),
        ("9" * 400 + "%", None),
    ],
)
def test_lines_of_a_progress_file_are_parsed(content: str, expected: Progress | None) -> None:
    assert parse_progress(content) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "45%|####5     | 450/1000 [01:23<01:41, 5.4it/s]",
            Progress(0.45, "450/1000 5.4it/s", 101.0),
        ),
        (
            "start\n\r  0%|          | 0/8 [00:00<?, ?it/s]\r 12%|█▎        | 1/8 [00:02<00:14,  2.01s/it]",
            Progress(0.125, "1/8 2.01s/it", 14.0),
        ),
        (
            "Epoch 3:  45%|████▌     | 9/20 [1:01:23<1:01:41,  5.40it/s, loss=0.3]",
            Progress(0.45, "9/20 5.40it/s", 3701.0),
        ),
        ("100%|##########| 20/20 [00:20<00:00,  1.00it/s]\n", Progress(1.0, "20/20 1.00it/s", 0.0)),
        ("45%|####5     | 1.20k/2.67k [01:23<01:41, 5.4kB/s]", Progress(0.45, "1.20k/2.67k 5.4kB/s", 101.0)),
        ("45%|####5     | 450/1000 [01:23<?, ?it/s]", Progress(0.45, "450/1000 ?it/s", None)),
        ("45%|####5     | 450/1000 [01:23<01:41, 5.4it/s]\nsaved\n", None),
        ("450it [01:23, 5.4it/s]", None),
        ("45% of the data", None),
        ("| 450/1000 [", None),
        ("", None),
    ],
)
def test_bars_at_the_end_of_an_output_are_parsed(output: str, expected: Progress | None) -> None:
    assert parse_bar(output) == expected


NEARLY = st.lists(
    st.sampled_from(
        ["45", "%", "|", "##", "/", " ", "[", "]", "<", ":", "1", "0.5", "\r", "\n", "?", ",", "k", "٣", "²"]
    ),
    max_size=30,
).map("".join)


@given(
    st.one_of(st.text(max_size=200), NEARLY, st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")))
)
def test_any_text_parses_to_a_fraction_or_nothing(text: str) -> None:
    for found in (parse_progress(text), parse_bar(text), parse_bar(f"5%|#| {text}"), parse_progress(f"0.5 {text}")):
        if found is not None:
            assert 0 <= found.fraction <= 1
            assert found.text.isprintable()
            assert len(found.text) <= TEXT_WIDTH
            assert found.left_s is None or found.left_s >= 0


def paced(*pairs: tuple[float, float]) -> tuple[Sample, ...]:
    samples: tuple[Sample, ...] = ()
    for elapsed_s, fraction in pairs:
        samples = with_sample(samples, Sample(elapsed_s, fraction))
    return samples


@pytest.mark.parametrize(
    ("samples", "began_anew", "expected"),
    [
        ((), False, None),
        (paced((2.0, 0.5)), False, None),
        (paced((100.0, 0.001)), False, None),
        (paced((100.0, 0.25)), False, 300.0),
        (paced((100.0, 1.0)), False, 0.0),
        (paced((1.0, 1.0)), False, 0.0),
        # It began in the middle, as from a checkpoint: what was seen counts.
        (paced((1.0, 0.5), (101.0, 0.6)), False, 400.0),
        # A slow beginning is forgotten.
        (paced((1000.0, 0.1), (1100.0, 0.4), (1400.0, 0.7)), False, 200.0),
        # The next epoch's bar: the time before it says nothing.
        (paced((100.0, 0.9), (110.0, 0.1)), True, None),
        (paced((100.0, 0.9), (110.0, 0.1), (120.0, 0.3)), True, 35.0),
        # It stands still.
        (paced((100.0, 0.5), (200.0, 0.5)), False, None),
    ],
)
def test_remaining_time_follows_the_recent_pace(
    samples: tuple[Sample, ...], began_anew: bool, expected: float | None
) -> None:
    found = left_s(samples, began_anew)
    assert found == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1)), max_size=200), st.booleans())
def test_samples_stay_few_and_ordered_and_remaining_time_is_valid(
    pairs: list[tuple[float, float]], began_anew: bool
) -> None:
    samples = paced(*pairs)
    assert len(samples) <= MOST_SAMPLES
    assert all(a.elapsed_s < b.elapsed_s and a.fraction <= b.fraction for a, b in pairwise(samples))
    found = left_s(samples, began_anew)
    assert found is None or 0 <= found < float("inf")


def test_bars_are_full_only_at_the_end() -> None:
    assert bar(0.0, None, 0.0) == "[..........]   0% ?"
    assert bar(0.456, 223.0, 100.0) == "[####......]  45% 2:03"
    assert bar(0.999, 50.0, 100.0) == "[#########.]  99% 0:00"
    assert bar(1.0, 100.0, 100.0) == "[##########] 100% 0:00"
    assert sentence(0.5, "1/2", None, 0.0) == "[#####.....]  50%, 1/2"
    assert sentence(0.5, "", 60.0, 0.0).startswith("[#####.....]  50%; done in about 1:00, at ")


# --- files ---------------------------------------------------------------------------------------------------


def a_run(folder: Path, number: int = 1, start_at: float = 0.0) -> Run:
    return Run(
        job_id=number,
        number=1,
        state=RunState.RUNNING,
        node="lab1",
        boot_id="boot",
        intent_at=start_at,
        start_at=start_at,
        stdout_path=str(folder / f"{number}.out"),
    )


def test_only_regular_files_of_the_owner_are_read(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("0.5")
    tail = read_tail(str(good), UID, None)
    assert tail is not None
    assert tail.content == b"0.5"
    again = read_tail(str(good), UID, tail.mark)
    assert again is not None
    assert again.content is None, "what has not changed is not read again"
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        assert read_tail(str(path), path.stat().st_uid if path.exists() else UID, None) is None, path
    assert read_tail(str(good), UID + 1, None) is None


def test_only_the_end_of_a_huge_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n 50%|#####     | 1/2 [00:10<00:10, 0.1it/s]")
    tail = read_tail(str(path), UID, None)
    assert tail is not None
    assert tail.content is not None
    assert len(tail.content) == reading.TAIL_BYTES
    assert parse_bar(tail.content.decode()) == Progress(0.5, "1/2 0.1it/s", 10.0)


def test_the_file_takes_precedence_over_the_bar(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    said, output = Path(progress_path(str(tmp_path), run.id)), tmp_path / "1.out"
    output.write_text("50%|#####     | 1/2 [00:10<00:10, 0.1it/s]")
    seen = look(str(tmp_path), run, UID, None, 100.0, 0.0)
    assert seen.said is not None
    assert seen.said.progress == Progress(0.5, "1/2 0.1it/s", 10.0)
    said.write_text("nonsense")
    seen = look(str(tmp_path), run, UID, seen, 101.0, 1.0)
    assert seen.said is not None, "a file that says nothing leaves it to the bar"
    output.write_text("75%|#######   | 3/4 [00:10<00:10, 0.1it/s]")
    seen = look(str(tmp_path), run, UID, seen, 102.0, 2.0)
    assert seen.said is not None
    assert seen.said.progress == Progress(0.75, "3/4 0.1it/s", 10.0)
    said.write_text("0.8 better")
    seen = look(str(tmp_path), run, UID, seen, 103.0, 3.0)
    assert seen.said is not None
    assert seen.said.progress == Progress(0.8, "better")
    said.unlink()
    output.unlink()
    assert look(str(tmp_path), run, UID, seen, 104.0, 4.0).said is None


def jobs_and_runs(folder: Path, count: int) -> tuple[list[Job], dict[str, Run]]:
    runs = [a_run(folder, number) for number in range(1, count + 1)]
    return [job(run.job_id, uid=UID, run=1) for run in runs], {run.id: run for run in runs}


def test_a_run_is_sampled_periodically_and_forgotten_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, runs = jobs_and_runs(tmp_path, 2)
    looks: list[str] = []
    really = reading.look

    def counting(spool: str, run: Run, *rest: object) -> object:
        looks.append(run.id)
        return really(spool, run, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "look", counting)
    Path(progress_path(str(tmp_path), "1.1")).write_text("0.25")
    reader = ProgressReader(str(tmp_path), lambda: 100.0)
    for _ in range(3):
        asyncio.run(reader.refresh(jobs, runs))
    assert looks == ["1.1", "2.1"]
    shown = reader.of("1.1")
    assert shown is not None
    assert (shown.fraction, shown.eta_at) == (0.25, 400.0)
    assert reader.of("2.1") is None
    monkeypatch.setattr(reading, "FRESH_S", 0.0)
    asyncio.run(reader.refresh(jobs[1:], {"2.1": runs["2.1"]}))
    assert reader.of("1.1") is None


def test_two_concurrent_readers_see_the_same(tmp_path: Path) -> None:
    jobs, runs = jobs_and_runs(tmp_path, 1)
    Path(progress_path(str(tmp_path), "1.1")).write_text("0.25")
    reader = ProgressReader(str(tmp_path), lambda: 100.0)

    async def fraction() -> float | None:
        await reader.refresh(jobs, runs)
        shown = reader.of("1.1")
        return None if shown is None else shown.fraction

    async def both() -> list[float | None]:
        return await asyncio.gather(fraction(), fraction())

    assert asyncio.run(both()) == [0.25, 0.25]


def test_a_hanging_file_system_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, runs = jobs_and_runs(tmp_path, 1)
    let_go = threading.Event()
    calls = []
    really = reading.read_tail

    def hanging(*words: object) -> object:
        calls.append(words)
        let_go.wait(20)
        return really(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "read_tail", hanging)
    monkeypatch.setattr(reading, "FRESH_S", 0.0)
    Path(progress_path(str(tmp_path), "1.1")).write_text("0.25")
    reader = ProgressReader(str(tmp_path), lambda: 100.0)

    async def look_often() -> None:
        began = time.monotonic()
        for _ in range(20):
            await reader.refresh(jobs, runs)
        assert time.monotonic() - began < 15
        assert len(calls) == 1, "nothing more is asked of it"
        let_go.set()
        while reader.of("1.1") is None:
            await reader.refresh(jobs, runs)

    asyncio.run(look_often())


def test_a_bars_own_estimate_counts_until_it_has_passed(tmp_path: Path) -> None:
    jobs, runs = jobs_and_runs(tmp_path, 1)
    output = tmp_path / "1.out"
    output.write_text("50%|#####     | 1/2 [00:10<00:10, 0.1it/s]")
    os.utime(output, (1000.0, 1000.0))
    now = 1005.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    reader = ProgressReader(str(tmp_path), clock)
    asyncio.run(reader.refresh(jobs, runs))
    shown = reader.of("1.1")
    assert shown is not None
    assert shown.eta_at == 1010.0
    now = 1100.0
    shown = reader.of("1.1")
    assert shown is not None
    assert shown.eta_at is None
