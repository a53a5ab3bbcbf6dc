"""What a node reports of the progress of its runs."""

from __future__ import annotations

import os
from pathlib import Path

from gpusched.daemon.watch.progress import look
from gpusched.engine.remote import run_progress
from gpusched.engine.remote.run_progress import SpoolProgress
from gpusched.model.job import Run
from gpusched.model.progress import Progress, ToldProgress
from gpusched.model.states import RunState


def say(spool: Path, run: str, text: str | bytes, at: float) -> None:
    file = spool / f"{run}.progress"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(file, (at, at))


def test_runs_that_report_progress_are_told_of_with_the_instant(tmp_path: Path) -> None:
    say(tmp_path, "1.1", "0.5 half", 100)
    say(tmp_path, "2.1", "", 0)
    say(tmp_path, "3.1", b"\xff\x00 no number", 100)
    say(tmp_path, "4.1", "x\n" * 5000 + "3/4", 200)
    os.mkfifo(tmp_path / "5.1.progress")
    (tmp_path / "6.1.progress").symlink_to(tmp_path / "1.1.progress")
    (tmp_path / "1.1.record").write_text("0.7")
    assert SpoolProgress(str(tmp_path)).read() == {
        "4.1": ToldProgress(200.0, Progress(0.75, "3/4")),
        "1.1": ToldProgress(100.0, Progress(0.5, "half")),
    }


def test_a_change_is_seen_and_an_ended_run_is_forgotten(tmp_path: Path) -> None:
    spool = SpoolProgress(str(tmp_path))
    say(tmp_path, "1.1", "0.5", 100)
    assert spool.read()["1.1"].progress.fraction == 0.5
    say(tmp_path, "1.1", "0.6", 101)
    assert spool.read()["1.1"].progress.fraction == 0.6
    (tmp_path / "1.1.progress").unlink()
    assert spool.read() == {}


def test_a_report_has_the_runs_that_reported_last(tmp_path: Path) -> None:
    for number in range(run_progress.MOST_RUNS + 10):
        say(tmp_path, f"{number}.1", "0.5", 1000 + number)
    found = SpoolProgress(str(tmp_path)).read()
    assert (len(found), "9.1" in found, "10.1" in found) == (run_progress.MOST_RUNS, False, True)


def test_what_a_node_says_counts_instead_of_files_of_the_same_name_here(tmp_path: Path) -> None:
    (tmp_path / "7.1.progress").write_text("0.1")
    run = Run(7, 1, RunState.RUNNING, "n2", "b", 0.0, start_at=0.0)
    seen = None
    for at, fraction in ((100.0, 0.2), (120.0, 0.4), (140.0, 0.6)):
        told = ToldProgress(at, Progress(fraction))
        seen = look(str(tmp_path), run, os.getuid(), seen, at, at, told)
    assert seen is not None
    assert seen.said is not None
    assert seen.said.progress == Progress(0.6)
    assert [sample.fraction for sample in seen.samples] == [0.2, 0.4, 0.6]
