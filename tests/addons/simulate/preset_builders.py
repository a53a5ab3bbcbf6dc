"""A scheduler with weeks of ended jobs, and processes that answer for the replay in ways of their own."""

from __future__ import annotations

import subprocess
from random import Random
from typing import Any

from lab import Lab

from gpusched.addons.simulate.preset_choice import PresetGain, PresetWorth, TrialResult
from gpusched.addons.simulate.trial_export import TrialLimits
from gpusched.model import value
from gpusched.model.job import GpuShare
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.presets import CHOICES
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.testing import job, launch, request, run

DAY_S = 86400.0
PLAIN = PresetWorth(100_000, 50_000, 300_000, 80_000, 20_000)


def history(now: float, jobs: int = 240, days: float = 14) -> Changes:
    """Jobs of minutes and hours on four GPUs, of three users, that ended up to now."""
    random, changes = Random(1), Changes()
    for number in range(1, jobs + 1):
        at = now - days * DAY_S + number * (days - 1) * DAY_S / jobs
        gpus, run_s = random.choice([1, 1, 1, 2, 4]), random.choice([600, 600, 600, 7200, 14_400])
        made = job(
            number,
            submit_at=at,
            queued_at=at,
            user=random.choice(["ann", "bob", "cyd"]),
            request=request(gpus=gpus),
            launch=launch("python", "/home/ann/secret.py", "--token", "hunter2", work_dir="/home/ann"),
        )
        one = run(
            made,
            number=1,
            state=RunState.ENDED,
            intent_at=at,
            start_at=at,
            end_at=at + run_s,
            outcome=JobState.COMPLETED,
            reason=ReasonCode.NONE,
            exit_code=0,
            gpus=tuple(GpuShare(f"GPU-{index}", index) for index in range(gpus)),
            stdout_path="/home/ann/secret.out",
        )
        changes.jobs[number] = replace(made, state=JobState.COMPLETED, start_at=at, end_at=at + run_s, run=1)
        changes.runs[one.id] = one
    return changes


def lab_with_history(jobs: int = 240, days: float = 14, preset: str = "auto", **priority: Any) -> Lab:
    """A scheduler that has run these jobs on four GPUs."""
    lab = Lab(gpus=4, priority=PrioritySettings(preset=preset, **priority))
    lab.settings = replace(lab.settings, stated=tuple(sorted(priority)))
    lab.scheduler.settings = lab.scheduler.filed_settings = lab.settings
    lab.store.commit(history(lab.clock.now(), jobs, days))
    lab.ticker.reload()
    lab.ticker.tick()
    return lab


def result(in_force: str = "fair", **faster: float) -> TrialResult:
    """What the process says when these presets are better by such a part, beyond chance."""
    worth = {name: replace(PLAIN, completion_s=PLAIN.completion_s * (1 - faster.get(name, 0.0))) for name in CHOICES}
    sure, worse = PresetGain(12, 11, 1, 0.01), PresetGain(12, 1, 11, 1.0)
    gains = {name: sure if name in faster else worse for name in CHOICES if name != in_force}
    return TrialResult(240, worth, gains)


class Processes:
    """In place of the replay: each is a shell that does what `says` has it do."""

    def __init__(self) -> None:
        self.says: str = "true"
        self.started: list[subprocess.Popen[bytes]] = []
        self.limits: list[TrialLimits] = []

    def answer(self, found: TrialResult) -> None:
        """From now on they answer with this."""
        self.says = f"cat > /dev/null; printf %s '{value.encode(found).decode()}'"

    def __call__(self, fd: int, limits: TrialLimits) -> subprocess.Popen[bytes]:
        """Start one."""
        self.limits.append(limits)
        child = subprocess.Popen(["sh", "-c", self.says], stdin=fd, stdout=subprocess.PIPE, bufsize=0)
        self.started.append(child)
        return child
