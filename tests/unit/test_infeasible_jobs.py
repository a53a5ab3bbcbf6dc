"""Jobs that Slurm accepts although they cannot start: kept with their reason until they, or the settings, change."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, ROOT, Lab
from memory import check_memory

from gpusched.errors import Refused
from gpusched.model.commands import Cancel, Reload, Selection, Update
from gpusched.model.job import ArraySpec, Request
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.settings import NodeSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace

LIMITED = {
    "queue": {"default": QueueSettings("default", max_time_s=3600), "open": QueueSettings("open")},
    "qos": {"capped": QosSettings("capped", max_time_s=1800)},
}


def wait(lab: Lab, **parts: Any) -> int:
    return lab.submit(if_infeasible="wait", **parts)


def reason(lab: Lab, job_id: int) -> ReasonCode:
    job = lab.job(job_id)
    assert job.state is JobState.PENDING
    found = lab.scheduler.answers.reason_for(job)
    assert found is not None
    return found.code


@pytest.mark.parametrize(
    ("parts", "code", "says"),
    [
        ({"request": Request(cpus=100)}, ReasonCode.PARTITION_CONFIG, "asked for 100 CPUs; there are 8 CPUs on 1 node"),
        (
            {"request": Request(cpus=2, nodes=5)},
            ReasonCode.PARTITION_CONFIG,
            "asked for 2 CPUs on each of 5 nodes; there are 8 CPUs on 1 node",
        ),
        ({"time_limit_s": 7200}, ReasonCode.PARTITION_CONFIG, "queue default allows at most 1:00:00"),
        ({"time_limit_s": None, "time_limit_source": "unlimited"}, ReasonCode.PARTITION_CONFIG, "no time limit"),
        ({"time_limit_s": 2400, "qos": "capped"}, ReasonCode.QOS_MAX_TIME, "QOS capped allows at most 30:00"),
    ],
)
def test_a_job_that_asks_for_too_much_is_refused_or_kept_waiting(
    parts: dict[str, Any], code: ReasonCode, says: str
) -> None:
    lab = Lab(**LIMITED)
    with pytest.raises(Refused):
        lab.submit(**parts)
    job_id = wait(lab, **parts)
    behind = lab.submit(request=Request(cpus=8), time_limit_s=60)
    lab.tick(5)
    assert reason(lab, job_id) is code
    found = lab.scheduler.answers.reason_for(lab.job(job_id))
    assert found is not None
    assert says in found.text
    # It takes nothing from others, not even a place in the queue.
    assert lab.job(behind).state is JobState.RUNNING
    assert lab.scheduler.state.class_of(job_id) is None
    check_memory(lab)
    lab.restart()
    lab.tick()
    assert reason(lab, job_id) is code
    lab.ask(Cancel(ANN, Selection((job_id,))))
    assert lab.job(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    "parts",
    [
        {"request": Request(mem_mib=1 << 30)},
        {"request": Request(gpus=9)},
        {"request": Request(gpus=9, nodes=5, cpus=100)},
        {"request": Request(gpus=1, gpu_type="h100")},
        {"request": Request(nodelist=("elsewhere",))},
        {"request": Request(constraint="nvlink", cpus=100)},
        {"request": Request(licenses=(("matlab", 1),))},
        {"queue": "nowhere"},
        {"qos": "nowhere"},
        {"reservation": "nowhere"},
        {"dependency": "afterok:x"},
    ],
)
def test_what_slurm_refuses_is_refused_all_the_same(parts: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        wait(Lab(**LIMITED), **parts)


def test_a_job_starts_once_it_asks_for_less() -> None:
    lab = Lab(**LIMITED)
    job_id = wait(lab, request=Request(cpus=100), time_limit_s=7200)
    lab.ask(Update(ANN, [job_id], {"cpus": 4.0}))
    assert reason(lab, job_id) is ReasonCode.PARTITION_CONFIG
    lab.ask(Update(ANN, [job_id], {"time_limit_s": 60, "time_limit_source": ""}))
    assert lab.job(job_id).state is JobState.RUNNING
    check_memory(lab)


def test_a_job_starts_once_the_settings_allow_it_and_an_array_as_a_whole() -> None:
    lab = Lab(**LIMITED)
    job_id = wait(lab, time_limit_s=7200)
    array = wait(lab, request=Request(cpus=12), time_limit_s=60, array=ArraySpec("0-3"))
    assert [reason(lab, one) for one in (job_id, array)] == [ReasonCode.PARTITION_CONFIG] * 2
    check_memory(lab)
    lab.config = lambda: replace(lab.settings, queue={}, node=NodeSettings(name="n1", cpus=16.0))
    lab.ask(Reload(ROOT))
    lab.tick()
    assert lab.job(job_id).state is JobState.RUNNING
    # One task at a time fits beside it.
    assert lab.job(array + 1).state is JobState.RUNNING
    assert lab.scheduler.state.why_infeasible(lab.job(array)) is None
    check_memory(lab)


def test_a_dependency_on_an_unknown_job_is_kept_and_never_satisfied() -> None:
    lab = Lab()
    with pytest.raises(Refused, match="there is no job 7 to depend on"):
        lab.submit(dependency="afterok:7")
    job_id = wait(lab, dependency="afterok:7", never_satisfied="wait")
    gone = wait(lab, dependency="afterok:7", never_satisfied="cancel")
    assert reason(lab, job_id) is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    assert lab.job(gone).state is JobState.CANCELLED
    # No later job becomes the one that it waits for, not even as a part of an array.
    later = [lab.submit() for _ in range(8)]
    assert later == [3, 4, 5, 6, 8, 9, 10, 11]
    lab.tick(60)
    assert reason(lab, job_id) is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    check_memory(lab)


def test_jobs_cannot_come_to_wait_for_each_other_by_naming_the_future() -> None:
    lab = Lab()
    first = wait(lab, dependency="afterok:2", never_satisfied="wait")
    second = lab.submit(dependency=f"afterany:{first}")
    assert second == 3
    assert reason(lab, second) is ReasonCode.DEPENDENCY
    lab.ask(Cancel(ANN, Selection((first,))))
    lab.tick()
    assert lab.job(second).state is JobState.RUNNING
