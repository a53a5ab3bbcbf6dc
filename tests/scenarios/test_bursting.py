"""Which pending jobs burst to Slurm: the pure decision, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.model.job import ArraySpec, Job
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import BurstSettings, Settings
from gpusched.model.value import replace
from gpusched.scheduler.burst import BurstCandidate, allows_burst, burst_limit_s, choose_bursts, why_kept
from gpusched.scheduler.forecast import UNKNOWN, StartRange
from gpusched.testing import NOW, job

HOUR = 3600.0
RULE = BurstSettings(interval_s=60, max_per_interval=2, max_jobs=3)


def settings(*queues: QueueSettings) -> Settings:
    return Settings(burst=RULE, queue={one.name: one for one in queues})


def one(job_id: int, waited_s: float = HOUR, limit_s: float = HOUR) -> BurstCandidate:
    return BurstCandidate(job_id, NOW - waited_s, limit_s)


def starts(**hours: float | None) -> dict[int, StartRange]:
    return {
        int(name[1:]): UNKNOWN if wait is None else StartRange(NOW + wait * HOUR, NOW + 2 * wait * HOUR)
        for name, wait in hours.items()
    }


CHOSEN: dict[str, tuple[list[BurstCandidate], dict[int, StartRange], int, list[int]]] = {
    "a start beyond the limit": ([one(1)], starts(j1=5), 0, [1]),
    "a start within the limit": ([one(1)], starts(j1=0.5), 0, []),
    "a start exactly at the limit": ([one(1)], starts(j1=1), 0, []),
    "no estimate": ([one(1)], starts(j1=None), 0, []),
    "no answer": ([one(1)], {}, 0, []),
    "only the late end is beyond": ([one(1)], {1: StartRange(NOW + 60, NOW + 9 * HOUR)}, 0, []),
    "only the early end is known": ([one(1)], {1: StartRange(NOW + 9 * HOUR, None)}, 0, [1]),
    "has just come": ([one(1, waited_s=59)], starts(j1=5), 0, []),
    "has come an interval ago": ([one(1, waited_s=60)], starts(j1=5), 0, [1]),
    "each by its own limit": ([one(1, limit_s=6 * HOUR), one(2)], starts(j1=5, j2=5), 0, [2]),
    "a limit of 0 is any wait": ([one(1, limit_s=0)], starts(j1=0.01), 0, [1]),
    "a limit of 0 is no start at once": ([one(1, limit_s=0)], starts(j1=0), 0, []),
    "as many as one look may, oldest first": (
        [one(1, 100), one(2, 300), one(3, 200)],
        starts(j1=5, j2=5, j3=5),
        0,
        [2, 3],
    ),
    "ids where they came together": ([one(3), one(2), one(1)], starts(j1=5, j2=5, j3=5), 0, [1, 2]),
    "those without reason take no room": ([one(1), one(2), one(3)], starts(j1=0.1, j2=5, j3=5), 0, [2, 3]),
    "one place left in Slurm": ([one(1), one(2)], starts(j1=5, j2=5), 2, [1]),
    "no place left in Slurm": ([one(1), one(2)], starts(j1=5, j2=5), 3, []),
    "more in Slurm than may be, after a reload": ([one(1)], starts(j1=5), 9, []),
}


@pytest.mark.parametrize(("candidates", "expected", "in_slurm", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_jobs_burst_when(
    candidates: list[BurstCandidate], expected: dict[int, StartRange], in_slurm: int, chosen: list[int]
) -> None:
    found = choose_bursts(candidates, expected, NOW, in_slurm, settings())
    assert [burst.job_id for burst in found] == chosen


def test_a_burst_says_the_wait_and_the_limit() -> None:
    (found,) = choose_bursts([one(1)], starts(j1=5), NOW, 0, settings())
    assert found.text == "burst to Slurm: expected start in 5:00:00, limit 1:00:00"


ASK, ALLOW = QueueSettings("q", burst="ask"), QueueSettings("q", burst="allow")
CHILD = QueueSettings("q", parent="top")
ALLOWED: dict[str, tuple[list[QueueSettings], dict[str, Any], bool]] = {
    "nobody asked": ([QueueSettings("q")], {}, False),
    "the job asked": ([QueueSettings("q")], {"burst": True}, True),
    "the queue wants to be asked": ([ASK], {}, False),
    "the queue wants to be asked, and is": ([ASK], {"burst": True}, True),
    "the queue allows it": ([ALLOW], {}, True),
    "the queue allows it, the job does not": ([ALLOW], {"burst": False}, False),
    "the parent allows it": ([CHILD, QueueSettings("top", burst="allow")], {}, True),
    "the child has another word": ([replace(CHILD, burst="ask"), QueueSettings("top", burst="allow")], {}, False),
    "the job was kept by its engine": ([ALLOW], {"engine": "local"}, False),
    "the job is Slurm's already": ([ALLOW], {"engine": "slurm", "burst": True}, False),
}


@pytest.mark.parametrize(("queues", "parts", "allowed"), ALLOWED.values(), ids=ALLOWED)
def test_a_job_allows_it_when(queues: list[QueueSettings], parts: dict[str, Any], allowed: bool) -> None:
    assert allows_burst(replace(job(1).spec, queue="q", **parts), settings(*queues)) is allowed


@pytest.mark.parametrize(
    ("queues", "limit"),
    [
        ([], None),
        ([QueueSettings("q")], None),
        ([QueueSettings("q", burst_after_s=60)], 60),
        ([CHILD, QueueSettings("top", burst_after_s=60)], 60),
        ([replace(CHILD, burst_after_s=5), QueueSettings("top", burst_after_s=60)], 5),
        ([QueueSettings("other", burst_after_s=60)], None),
    ],
)
def test_the_limit_is_that_of_the_nearest_queue(queues: list[QueueSettings], limit: float | None) -> None:
    assert burst_limit_s("q", settings(*queues)) == limit


def asking(**parts: Any) -> Job:
    made = job(1)
    return replace(made, spec=replace(made.spec, request=replace(made.spec.request, **parts)))


def with_spec(**parts: Any) -> Job:
    made = job(1)
    return replace(made, spec=replace(made.spec, **parts))


KEPT: dict[str, tuple[Job, str | None]] = {
    "whole GPUs": (asking(gpus=2), None),
    "cores alone": (asking(gpus=0), None),
    "two nodes": (asking(gpus=1, nodes=2), None),
    "a fraction": (asking(gpus=1, gpu_fraction=0.5), "it asks for a fraction of a GPU"),
    "a type": (asking(gpus=1, gpu_type="A100"), "it names a GPU type of this cluster"),
    "a node": (asking(nodelist=("n1",)), "it names a node of this cluster"),
    "not a node": (asking(exclude=("n1",)), "it names a node of this cluster"),
    "a label": (asking(constraint="nvlink"), "it names a feature of this cluster"),
    "a wish": (asking(prefer="nvlink"), "it names a feature of this cluster"),
    "a license": (asking(licenses=(("matlab", 1),)), "it names a license of this cluster"),
    "a resource": (asking(resources=(("disk", 1),)), "it names a resource of this cluster"),
    "a reservation": (with_spec(reservation="course"), "it names a reservation of this cluster"),
    "an array": (with_spec(array=ArraySpec("0-3")), None),
    "an array with few tasks at once": (
        with_spec(array=ArraySpec("0-3", throttle=2)),
        "its array runs at most 2 tasks at once",
    ),
    "a task": (replace(with_spec(array=ArraySpec("0-3")), id=7, array_id=5, task=1), None),
    "a task of few at once": (
        replace(with_spec(array=ArraySpec("0-3", throttle=1)), id=7, array_id=5, task=1),
        "its array runs at most 1 task at once",
    ),
    "a second run": (replace(job(1), run=1), "it has already run here"),
}


@pytest.mark.parametrize(("made", "why"), KEPT.values(), ids=KEPT)
def test_a_job_is_kept_for(made: Job, why: str | None) -> None:
    assert why_kept(made) == why
