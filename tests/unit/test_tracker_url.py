"""Addresses of experiment trackers in a run's output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpusched.cli.gshow import tracker_url

WANDB = "wandb: 🚀 View run calm-sun-7 at \x1b[34m\x1b[4mhttps://wandb.ai/alice/vision/runs/3k2v\x1b[0m\n"
PROJECT = "wandb: ⭐️ View project at https://wandb.ai/alice/vision\n"


def run(path: Path, start_at: float | None = 0.0) -> dict[str, Any]:
    return {"stdout_path": str(path), "start_at": start_at}


@pytest.mark.parametrize(
    ("output", "address"),
    [
        (WANDB + PROJECT, "https://wandb.ai/alice/vision/runs/3k2v"),
        (PROJECT + WANDB, "https://wandb.ai/alice/vision/runs/3k2v"),
        (PROJECT, "https://wandb.ai/alice/vision"),
        ("🏃 View run bold-ox at: http://mlflow:5000/#/experiments/1/runs/9f.\n", "http://mlflow:5000/#/experiments/1/runs/9f"),
        ("COMET INFO: Experiment is live on comet.com https://www.comet.com/a/b/1\n", "https://www.comet.com/a/b/1"),
        ("ClearML results page: https://app.clear.ml/projects/1/x\n", "https://app.clear.ml/projects/1/x"),
        ("[neptune] https://app.neptune.ai/a/b/e/B-1\n", "https://app.neptune.ai/a/b/e/B-1"),
        ("View run at https://first/1\nView run at https://last/2\n", "https://last/2"),
        ("x" * 300_000 + "\n" + WANDB, "https://wandb.ai/alice/vision/runs/3k2v"),
        (WANDB + "x" * 300_000, "https://wandb.ai/alice/vision/runs/3k2v"),
        ("x" * 100_000 + WANDB + "x" * 300_000, None),
        ("downloading https://example.org/w.pt\n", None),
        ("View run at https://\n", None),
        ("View run at https://a/\x1b]0;title\x07\n", "https://a/"),
        ("", None),
    ],
)  # fmt: skip
def test_the_address_of_a_run_is_found_in_its_output(tmp_path: Path, output: str, address: str | None) -> None:
    log = tmp_path / "log"
    log.write_text(output)
    assert tracker_url(run(log)) == address


def test_what_is_not_the_runs_own_file_has_no_address(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(WANDB)
    assert tracker_url(run(log, start_at=log.stat().st_mtime + 1)) is None
    assert tracker_url(run(log, start_at=None)) is None
    assert tracker_url(run(tmp_path / "none")) is None
    assert tracker_url(run(tmp_path)) is None
    assert tracker_url({"stdout_path": None, "start_at": 0.0}) is None
    os.mkfifo(tmp_path / "pipe")
    assert tracker_url(run(tmp_path / "pipe")) is None
