"""GPU models of different speeds: which ones jobs take, and how long jobs are expected to run on them."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab
from scenario import HOUR, Scenario, running, settings, wants

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.job import Request, Run
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import GpuSpeeds
from gpusched.scheduler.planner import decide
from gpusched.testing import gpu_view, node, snapshot

SPEEDS = {"A100": 1.0, "V100": 0.5, "A100-SXM": 1.25}
FOREVER = SimulatedOutcome(runs_s=1e9)


def make_lab(speed: dict[str, float] | None = None, **sections: Any) -> Lab:
    """Two nodes of two V100, then one of two A100."""
    gpu = GpuSettings(free_polls=1, speed=SPEEDS if speed is None else speed)
    lab = Lab(more_nodes=("n2", "n3"), models={"n1": "V100", "n2": "V100"}, outcome=FOREVER, gpu=gpu, **sections)
    lab.scheduler.history.load()
    return lab


def run_of(lab: Lab, job_id: int) -> Run:
    return lab.store.runs([job_id])[-1]


def node_of(lab: Lab, job_id: int) -> str | None:
    return run_of(lab, job_id).node if lab.job(job_id).state is JobState.RUNNING else None


MODELS = {"a100": 1.0, "v100": 0.5, "nvidiaa100sxm480gb": 1.25, "teslav100pcie": 0.5, "t4": 1.0, "": 1.0}


@pytest.mark.parametrize(("model", "speed"), MODELS.items())
def test_the_longest_name_that_matches_counts(model: str, speed: float) -> None:
    assert GpuSpeeds(SPEEDS).of(model) == speed


def test_fast_gpus_are_taken_first() -> None:
    lab = make_lab()
    jobs = [lab.submit(request=Request(1)) for _ in range(5)]
    assert [node_of(lab, job) for job in jobs] == ["n3", "n3", "n1", "n1", "n2"]
    stories = [event.text for job in jobs for event in lab.store.events(job) if event.kind == "started"]
    assert stories[0] == "started on n3, GPU 0"
    assert stories[-1] == "started on n2, GPU 0 (n2 its GPUs have speed 0.5)"


def test_without_speeds_nothing_changes() -> None:
    lab = make_lab({})
    assert node_of(lab, lab.submit(request=Request(1))) == "n1"


def test_a_job_takes_slow_gpus_rather_than_wait() -> None:
    lab = make_lab()
    jobs = [lab.submit(request=Request(2)) for _ in range(4)]
    assert [node_of(lab, job) for job in jobs] == ["n3", "n1", "n2", None]


def test_fast_gpus_are_left_to_jobs_that_insist_on_them() -> None:
    lab = make_lab()
    blocker = lab.submit(request=Request(1, gpu_type="a100"))
    insisting = lab.submit(request=Request(2, gpu_type="a100"))
    assert (node_of(lab, blocker), node_of(lab, insisting)) == ("n3", None)
    assert node_of(lab, lab.submit(request=Request(1))) == "n1"


def test_data_nearby_weighs_less_than_half_the_speed() -> None:
    """Two points against four."""
    views = [
        node("n1", [gpu_view(0, "n1", name="V100")], data=("coco",)),
        node("n2", [gpu_view(0, "n2", name="A100")]),
    ]
    rules = settings(gpu={"speed": SPEEDS})
    assert Scenario(views, [wants(1, 1, near=("coco",))], settings=rules).outcome().starts == {1: "n2:0"}
    mild = settings(gpu={"speed": {"V100": 0.9}})
    assert Scenario(views, [wants(1, 1, near=("coco",))], settings=mild).outcome().starts == {1: "n1:0"}


def test_fast_cards_of_a_node_come_first() -> None:
    views = [node("n1", [gpu_view(index, "n1", name=("V100", "A100")[index % 2]) for index in range(4)])]
    jobs = [wants(1, 2), wants(2, 1), wants(3, 1)]
    rules = settings(gpu={"speed": SPEEDS})
    assert Scenario(views, jobs, settings=rules).outcome().starts == {1: "n1:1,3", 2: "n1:0", 3: "n1:2"}


def predicted_s(lab: Lab, job_id: int) -> float | None:
    held = lab.scheduler.state.holds[run_of(lab, job_id).id]
    return None if held.predicted_end_at is None else held.predicted_end_at - held.start_at


def test_runs_are_expected_to_take_longer_on_slow_gpus() -> None:
    """Learned from runs on both, as if all had been at speed 1."""
    lab = make_lab(priority=PrioritySettings(calc_period_s=0.0))
    for name, lasts_s in (("n1", 2000), ("n3", 1000), ("n2", 2000), ("n3", 1000)):
        lab.outcome = SimulatedOutcome(runs_s=lasts_s)
        job = lab.submit(request=Request(1, nodelist=(name,)))
        for _ in range(3):
            lab.tick(lasts_s)
        assert lab.job(job).state is JobState.COMPLETED
    lab.outcome = FOREVER
    fast, slow = (lab.submit(request=Request(1, nodelist=(name,))) for name in ("n3", "n1"))
    expected_s = predicted_s(lab, fast)
    assert expected_s is not None
    assert 900 < expected_s < 1100
    assert predicted_s(lab, slow) == 2 * expected_s
    assert not lab.scheduler.history.leaning(lab.job(slow)), "the slow node is not blamed twice"


def test_backfill_relies_on_the_time_that_slow_gpus_take() -> None:
    """A job of an hour at speed 1 would run two on the free card, and delay a reservation in an hour and a half."""
    view = node("n1", [gpu_view(index, "n1", name="V100") for index in range(2)])
    before = snapshot(
        view,
        running=[running(9, "n1:0", ends_in=1.5 * HOUR)],
        waiting=[wants(1, 2, limit=HOUR), wants(2, 1, name="short")],
    )
    pending = tuple(
        replace(one, key=replace(one.key, predicted_s=3600)) if one.key.time_limit_s is None else one
        for one in before.pending
    )

    def starts(speed: float) -> list[int]:
        rules = settings(priority={"backfill_by": "prediction"}, gpu={"speed": {"V100": speed}})
        return [start.job_id for start in decide(replace(before, pending=pending), rules).starts]

    assert (starts(1.0), starts(0.7), starts(0.5)) == ([2], [2], [])
