"""Whatever happens to GPUs while jobs run and wait: none is given to a job unless the newest reading shows it fit."""

from __future__ import annotations

from random import Random

import pytest
from accidents import AccidentLab
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.cluster import GpuState
from gpusched.model.commands import Drain
from gpusched.model.settings import GpuSettings
from gpusched.scheduler.invariants import check_invariants
from gpusched.testing import request

GPUS = 4
LEAST_MIB = 256 + 1024
"""More than the baseline and what idle processes may hold."""


class Story:
    """A lab to which things happen by the roll of dice, and what every start is held to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dice: Random) -> None:
        self.dice = dice
        self.lab = AccidentLab(
            monkeypatch, GPUS, gpu=GpuSettings(free_polls=dice.choice([1, 2]), release_wait_s=3, foreign_peak_s=5)
        )
        self.read_at = self.lab.clock.now()
        self.used_mib = [0] * GPUS
        """Of each GPU, in the newest reading."""
        self.lost: set[int] = set()
        self.seen: set[str] = set()
        self.starts = 0

    def happen(self) -> None:
        dice, lab = self.dice, self.lab
        gpu = dice.randrange(GPUS)
        runs = [run for run in lab.scheduler.state.open_runs.values() if run.pid is not None]
        kind = dice.randrange(9)
        if kind <= 2:
            lab.outcome = SimulatedOutcome(runs_s=dice.choice([1.0, 3.0, 8.0]), exit_code=dice.choice([0, 0, 1]))
            slice_mib = dice.choice([None, None, 20_000])
            wanted = request(gpus=1 if slice_mib else dice.choice([1, 2, 4]), vram_mib=slice_mib)
            lab.ticker.submit(lab.submission(dice.choice([ANN, BOB]), request=wanted), lambda answer: None)
        elif kind == 3 and runs:
            run = dice.choice(runs)
            lab.use(run.id, dice.choice(run.gpus).index, dice.choice([9_000, 60_000]), leaves=dice.choice([0, 20_000]))
        elif kind == 4:
            lab.clean(gpu)
        elif kind == 5:
            lab.strangers = {} if dice.random() < 0.5 else {gpu: dice.choice([500, 40_000])}
        elif kind == 6:
            (lab.find if lab.devices[gpu].lost else lab.lose)(gpu)
        elif kind == 7:
            lab.raise_xid(gpu, dice.choice([31, 48]))
        else:
            lab.ticker.submit(Drain(ROOT, (str(gpu),), dice.choice(["dust", None])), lambda answer: None)

    def tick(self) -> None:
        lab = self.lab
        lab.clock.advance(self.dice.choice([0.0, 0.3, 0.5, 2.0]))
        if self.dice.random() < 0.7:
            lab.read()
            self.read_at = lab.clock.now()
            self.used_mib = [device.used_mib for device in lab.devices]
            self.lost = {number for number, device in enumerate(lab.devices) if device.lost}
        lab.ticker.tick()
        assert check_invariants(lab.scheduler.snapshot(lab.clock.now()), lab.settings) == []
        self.judge()

    def judge(self) -> None:
        lab = self.lab
        for run in lab.scheduler.state.open_runs.values():
            if run.id in self.seen or not run.gpus:
                continue
            self.seen.add(run.id)
            self.starts += 1
            assert lab.clock.now() - self.read_at <= lab.settings.daemon.poll_s
            for share in run.gpus:
                state = lab.scheduler.head.tracker.status(share.uuid, now=lab.clock.now()).state
                assert state not in (GpuState.SUSPECT, GpuState.LOST, GpuState.DRAINED, GpuState.UNKNOWN)
                assert share.index not in self.lost
                if share.is_whole:
                    assert self.used_mib[share.index] <= LEAST_MIB


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=15)
def test_no_job_starts_on_an_unfit_gpu(seed):
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch, Random(seed))
        try:
            for _ in range(60):
                story.happen()
                story.tick()
        finally:
            story.lab.close()
    assert story.starts
