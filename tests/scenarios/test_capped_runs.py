"""Runs of a capped queue start once their cards have the cap, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.model.cluster import GpuTargets
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Run
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.states import JobState, RunState
from gpusched.testing import request

QUEUES = {
    "top": QueueSettings("top", power_cap_w=300.0),
    "eco": QueueSettings("eco", parent="top"),
    "night": QueueSettings("night", power_cap_w=200.0),
    "free": QueueSettings("free"),
}


class CappedLab(Lab):
    """A lab whose cards take caps, unless they are named in `refusing`."""

    def __init__(self, **options: Any) -> None:
        self.refusing: dict[int, str] = {}
        self.is_silent = False
        super().__init__(queue=QUEUES, **options)

    @property
    def caps(self) -> dict[str, float]:
        return self.targets.power_caps

    def read(self) -> None:
        self.health = {}
        for uuid, cap_w in self.caps.items():
            index = int(uuid.removeprefix("GPU-"))
            why = self.refusing.get(index)
            if not self.is_silent:
                self.health[index] = {"power_cap_refused": why} if why else {"power_cap_w": cap_w}
        super().read()

    def run(self, job_id: int) -> Run:
        """Its newest run; starts that are confirmed are committed later."""
        (stored,) = self.store.runs([job_id])[-1:]
        return self.scheduler.state.open_runs.get(stored.id, stored)

    def notes(self, job_id: int) -> list[str]:
        return [event.text for event in self.store.events(job_id) if event.kind == "note"]


def submit(lab: CappedLab, queue: str = "eco", **wanted: Any) -> int:
    return lab.submit(queue=queue, request=request(**{"gpus": 1, **wanted}))


def test_a_run_starts_once_its_card_has_the_cap_and_the_card_is_set_back_after_it() -> None:
    lab = CappedLab(gpus=1)
    job = submit(lab)
    assert lab.caps == {"GPU-0": 300.0}
    assert lab.run(job).state is RunState.STARTING
    lab.tick(0.1)
    lab.tick(0.1)
    assert lab.run(job).state is RunState.RUNNING
    assert lab.run(job).power_cap_w == 300.0
    assert lab.notes(job) == ["GPU 0: power limit 300 W"]
    lab.tick(20)
    lab.tick(1)
    lab.tick(1)
    assert lab.job(job).state is JobState.COMPLETED
    assert lab.caps == {}
    assert lab.run(job).power_cap_w == 300.0


def test_a_run_waits_for_the_answer_but_not_for_ever() -> None:
    lab = CappedLab(gpus=1)
    lab.is_silent = True
    job = submit(lab)
    for _ in range(3):
        lab.tick(1)
        assert lab.run(job).state is RunState.STARTING
    lab.tick(20)
    lab.tick(1)
    assert lab.run(job).state is RunState.RUNNING
    assert lab.run(job).power_cap_w is None
    assert lab.notes(job) == ["runs without the queue's power cap of 300 W: GPU 0: no answer from the driver"]


def test_a_card_that_does_not_permit_it_runs_the_job_all_the_same() -> None:
    lab = CappedLab(gpus=2)
    lab.refusing = {0: "only root may set it", 1: "only root may set it"}
    job = submit(lab, gpus=2)
    for _ in range(3):
        lab.tick(0.1)
    assert lab.run(job).state is RunState.RUNNING
    assert lab.run(job).power_cap_w is None
    assert lab.notes(job) == ["runs without the queue's power cap of 300 W: GPUs 0, 1: only root may set it"]
    assert lab.caps == {}


def test_a_cancel_is_not_held_up_by_the_cap() -> None:
    lab = CappedLab(gpus=1)
    lab.is_silent = True
    job = submit(lab)
    lab.ask(Cancel(ANN, Selection((job,))))
    for _ in range(4):
        lab.tick(1)
    assert lab.job(job).state is JobState.CANCELLED
    assert lab.caps == {}


@pytest.mark.parametrize(
    ("queue", "wanted", "cap_w"),
    [
        ("eco", {"gpus": 1}, 300.0),
        ("night", {"gpus": 2}, 200.0),
        ("free", {"gpus": 1}, None),
        ("eco", {"gpus": 1, "gpu_fraction": 0.5}, None),
        ("eco", {"gpus": 1, "vram_mib": 8192}, None),
        ("eco", {"gpus": 0}, None),
    ],
)
def test_only_whole_cards_of_capped_queues_are_capped(queue: str, wanted: dict[str, Any], cap_w: float | None) -> None:
    lab = CappedLab(gpus=2)
    job = submit(lab, queue, **wanted)
    lab.tick(0.1)
    lab.tick(0.1)
    run = lab.run(job)
    assert (run.power_cap_w, run.state) == (cap_w, RunState.RUNNING)
    assert lab.caps == {share.uuid: cap_w for share in run.gpus if cap_w is not None}


def test_a_restart_wants_what_its_runs_have() -> None:
    lab = CappedLab(gpus=2)
    submit(lab)
    lab.tick(0.1)
    lab.tick(0.1)
    lab.targets = GpuTargets()
    lab.restart()
    lab.ticker.request_gpu_targets()
    assert lab.caps == {"GPU-0": 300.0}


def test_a_job_of_another_cap_follows_on_the_same_card() -> None:
    lab = CappedLab(gpus=1)
    submit(lab)
    later = submit(lab, "night")
    lab.tick(0.1)
    lab.tick(30)
    for _ in range(4):
        lab.tick(0.5)
    assert lab.run(later).power_cap_w == 200.0
    assert lab.caps == {"GPU-0": 200.0}
