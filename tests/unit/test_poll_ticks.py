"""How often a daemon ticks that has nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import Lab
from loop_bench import loop_bench

from gpusched.model.cluster import GpuReading
from gpusched.model.settings import DaemonSettings

# aiohttp's, of the gate that is put around the application.
pytestmark = pytest.mark.filterwarnings("ignore:Changing state of started")


def test_a_poll_and_the_reading_that_it_asks_for_share_a_tick(tmp_path: Path) -> None:
    lab = Lab(gpus=1, daemon=DaemonSettings(poll_s=0.03, idle_poll_s=0.03))
    with loop_bench(lab, tmp_path) as bench:
        bench.worker.answer = lambda: GpuReading(lab.scheduler.now(), "simulated")
        bench.run_until(lambda: bench.worker.requests >= 20)
    assert lab.ticker.ticks <= bench.worker.requests + 5


def test_without_an_answer_a_poll_ticks_all_the_same(tmp_path: Path) -> None:
    lab = Lab(gpus=1, daemon=DaemonSettings(poll_s=0.03, idle_poll_s=0.03))
    with loop_bench(lab, tmp_path) as bench:
        bench.worker.is_asked = True
        bench.run_until(lambda: bench.worker.requests >= 5)
    assert lab.ticker.ticks >= bench.worker.requests - 1
