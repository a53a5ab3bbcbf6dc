"""Tasks of a job through the scheduler: sizes that only the nodes tell, updates, hints."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab
from memory import check_memory

from gpusched.api.resources import read_request
from gpusched.api.validate import read_changes
from gpusched.daemon.forecast import QueueForecast
from gpusched.errors import Refused
from gpusched.model.commands import Update
from gpusched.model.job import Job
from gpusched.model.states import JobState


def submit(lab: Lab, **wanted: Any) -> Job:
    request, layout = read_request(wanted, lab.settings)
    return lab.job(lab.submit(request=request, layout=layout))


def update(lab: Lab, job: Job, **changes: Any) -> Job:
    (answer,) = lab.ask(Update(ANN, [job.id], read_changes(changes, lab.settings)))
    if isinstance(answer, Refused):
        raise answer
    return lab.job(job.id)


def test_all_memory_of_a_node_is_booked_and_shown_as_a_number() -> None:
    lab = Lab()
    job = submit(lab, mem_mib="all")
    assert (job.spec.request.mem_mib, job.state) == (65536, JobState.RUNNING)
    assert job.spec.layout is not None
    assert job.spec.layout.is_all_mem
    # Nothing is left for another one that asks for any.
    assert submit(lab, mem_mib=1).state is JobState.PENDING
    check_memory(lab)


@pytest.mark.parametrize(("wanted", "nodes"), [({"nodes": 1, "nodes_max": 3}, 1), ({"nodes": 1, "ntasks": 8}, 1)])
def test_of_a_range_the_smallest_number_of_nodes_that_can_hold_the_job_is_taken(
    wanted: dict[str, Any], nodes: int
) -> None:
    job = submit(Lab(), **wanted)
    assert (job.spec.request.nodes, job.state) == (nodes, JobState.RUNNING)


def test_a_range_that_no_number_of_nodes_satisfies_is_refused_for_the_fewest() -> None:
    with pytest.raises(Refused, match="asked for 12 CPUs; the most this scheduler can give is 8") as raised:
        submit(Lab(), nodes=1, nodes_max=2, ntasks=12, cpus=1)
    assert raised.value.hint == "ask for fewer tasks (-n), or for fewer cores for each of them (-c)"


def test_an_update_of_cores_is_for_each_task() -> None:
    lab = Lab()
    blocker = submit(lab, cpus=8)
    job = submit(lab, ntasks=2, cpus=1, mem_per_cpu_mib=100)
    assert (job.spec.request.cpus, job.spec.request.mem_mib) == (2.0, 200)
    job = update(lab, job, cpus=3)
    assert (job.spec.request.cpus, job.spec.request.mem_mib) == (6.0, 600)
    job = update(lab, job, ntasks=1)
    assert (job.spec.request.cpus, job.spec.request.mem_mib) == (3.0, 300)
    job = update(lab, job, mem_mib="all")
    assert job.spec.request.mem_mib == 65536
    job = update(lab, job, mem_mib=None)
    assert job.spec.request.mem_mib == 0
    assert job.spec.layout is not None
    assert (job.spec.layout.mem_per_cpu_mib, job.spec.layout.is_all_mem) == (None, False)
    with pytest.raises(Refused, match="for only 1 task"):
        update(lab, job, nodes=2)
    with pytest.raises(Refused, match="asked for 9 CPUs"):
        update(lab, job, ntasks=3)
    assert lab.job(blocker.id).state is JobState.RUNNING
    check_memory(lab)


def test_an_update_of_a_job_without_tasks_is_what_it_was() -> None:
    lab = Lab()
    submit(lab, cpus=8)
    job = update(lab, submit(lab, gpus=1), mem_mib=100, gpus=2)
    assert (job.spec.request.gpus, job.spec.request.mem_mib, job.spec.layout) == (2, 100, None)
    job = update(lab, job, cpus=2)
    assert job.spec.layout is not None
    assert job.spec.layout.cpus_per_task == 2.0


def test_only_changes_that_mean_the_same_for_its_tasks_are_proposed() -> None:
    lab = Lab()
    submit(lab, cpus=6)
    plain, tasks = submit(lab, cpus=4), submit(lab, ntasks=4)
    lab.tick(1)
    changes = [
        [one.change for one in QueueForecast.of(lab.scheduler).alternatives(job, None) if "cpus" in one.change]
        for job in (plain, tasks)
    ]
    assert changes == [[{"cpus": 2.0}], []]
