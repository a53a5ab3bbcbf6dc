"""SLURM_* variables of jobs: from what was asked to the exact set, as in batch scripts of Slurm 22.05."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.api.resources import read_request
from gpusched.daemon.launch.environment import captured, job_environment
from gpusched.daemon.launch.slurm_variables import is_of_a_job, slurm_variables
from gpusched.model.execution import LaunchSite, pack_environment
from gpusched.model.job import ArraySpec, GpuShare, Job, Run
from gpusched.model.settings import Settings, SlurmSettings
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.testing import job as make_job

SETTINGS = Settings(slurm=SlurmSettings(cluster_name="lab"))
ALWAYS = {
    "JOB_ID": "42",
    "JOBID": "42",
    "JOB_NAME": "train",
    "JOB_USER": "ann",
    "JOB_UID": "1001",
    "JOB_ACCOUNT": "vision",
    "JOB_QOS": "normal",
    "JOB_PARTITION": "main",
    "CLUSTER_NAME": "lab",
    "SUBMIT_DIR": "/home/ann",
    "SUBMIT_HOST": "login1",
    "UMASK": "0027",
    "PRIO_PROCESS": "0",
    "JOB_NODELIST": "gpu1",
    "NODELIST": "gpu1",
    "JOB_NUM_NODES": "1",
    "NNODES": "1",
    "NODEID": "0",
    "PROCID": "0",
    "LOCALID": "0",
    "GTIDS": "0",
    "TOPOLOGY_ADDR": "gpu1",
    "TOPOLOGY_ADDR_PATTERN": "node",
    "CPUS_ON_NODE": "1",
    "JOB_CPUS_PER_NODE": "1",
    "TASKS_PER_NODE": "1",
    "JOB_START_TIME": "1000",
}


def a_job(wanted: dict[str, Any], run: int = 1, **spec: Any) -> Job:
    job = make_job(42)
    request, layout = read_request(wanted, SETTINGS)
    launch = replace(job.spec.launch, work_dir="/home/ann", umask=0o027, **spec.pop("launch", {}))
    made = {"name": "train", "account": "vision", "queue": "main", "time_limit_s": None, **spec}
    spec = replace(job.spec, request=request, layout=layout, launch=launch, **made)
    return replace(job, uid=1001, user="ann", spec=spec, state=JobState.RUNNING, run=run)


def variables(job: Job, gpus: int = 0) -> dict[str, str]:
    shares = tuple(GpuShare(f"GPU-{number}", number) for number in range(gpus))
    run = Run(42, job.run, RunState.STARTING, "gpu1", "boot", 1000.7, gpus=shares)
    return slurm_variables(job, run, "login1", SETTINGS, ",".join(str(share.index) for share in shares))


def beyond(found: dict[str, str]) -> dict[str, str]:
    """What differs from a job that asks for nothing, without the prefix."""
    assert found.pop("SLURMD_NODENAME") == "gpu1"
    assert all(name.startswith("SLURM_") for name in found)
    plain = {name.removeprefix("SLURM_"): value for name, value in found.items()}
    assert plain.keys() >= ALWAYS.keys()
    return {name: value for name, value in plain.items() if ALWAYS.get(name) != value}


def cpus(on_node: int, tasks: str = "1", per_node: str = "") -> dict[str, str]:
    found = {"CPUS_ON_NODE": str(on_node), "JOB_CPUS_PER_NODE": per_node or str(on_node), "TASKS_PER_NODE": tasks}
    return {name: value for name, value in found.items() if value != "1"}


def nodes(count: int) -> dict[str, str]:
    return {"JOB_NUM_NODES": str(count), "NNODES": str(count)}


def ntasks(count: int) -> dict[str, str]:
    return {"NTASKS": str(count), "NPROCS": str(count)}


def gpus(count: int, ids: str, kind: str = "", nodes: int = 1) -> dict[str, str]:
    on_node = {"JOB_GPUS": ids, "GPUS_ON_NODE": str(count), "GPUS_PER_NODE": f"{kind}{count}"}
    return {**on_node, "GPUS": f"{kind}{count * nodes}"}


@pytest.mark.parametrize(
    ("wanted", "held", "expected"),
    [
        ({}, 0, {}),
        # tasks and cores: only what was asked
        ({"cpus": 4}, 0, {**cpus(4), "CPUS_PER_TASK": "4"}),
        ({"cpus": 1}, 0, {"CPUS_PER_TASK": "1"}),
        ({"cpus": 0.5}, 0, {"CPUS_PER_TASK": "1"}),
        ({"ntasks": 1}, 0, ntasks(1)),
        ({"ntasks": 4, "cpus": 2}, 0, {**cpus(8, "4"), **ntasks(4), "CPUS_PER_TASK": "2"}),
        ({"ntasks_per_node": 2}, 0, {**cpus(2, "2"), **ntasks(2), "NTASKS_PER_NODE": "2"}),
        ({"nodes": 2, "ntasks": 3}, 0, {**cpus(2, "2,1", "2(x2)"), **nodes(2), **ntasks(3)}),
        (
            {"nodes": 2, "ntasks_per_node": 4, "cpus": 2},
            0,
            {**cpus(8, "4(x2)", "8(x2)"), **nodes(2), **ntasks(8), "NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "2"},
        ),
        ({"nodes": 3}, 0, {**nodes(3), "JOB_CPUS_PER_NODE": "1(x3)", "TASKS_PER_NODE": "1(x3)"}),
        # memory
        ({"mem_mib": 2048}, 0, {"MEM_PER_NODE": "2048"}),
        ({"mem_mib": 2048, "cpus": 2}, 0, {**cpus(2), "CPUS_PER_TASK": "2", "MEM_PER_NODE": "2048"}),
        ({"mem_per_cpu_mib": 100, "ntasks": 2}, 0, {**cpus(2, "2"), **ntasks(2), "MEM_PER_CPU": "100"}),
        ({"mem_per_gpu_mib": 100, "gpus": 2}, 2, {**gpus(2, "0,1"), "MEM_PER_GPU": "100"}),
        # GPUs
        ({"gpus": 2}, 2, gpus(2, "0,1")),
        ({"gpus": 2, "gpu_type": "a100"}, 2, gpus(2, "0,1", "a100:")),
        ({"gpus_per_node": 2, "nodes": 2}, 2, {**gpus(2, "0,1", nodes=2), **nodes(2), **cpus(1, "1(x2)", "1(x2)")}),
        ({"gpu_fraction": 0.5, "gpus": 1}, 1, gpus(1, "0")),
        (
            {"gpus_per_task": 1, "ntasks": 2},
            2,
            {**gpus(2, "0,1"), **cpus(2, "2"), **ntasks(2), "GPUS_PER_TASK": "1"},
        ),
        (
            {"gpus_per_task": 2, "gpus": 4, "gpu_type": "h100"},
            4,
            {**gpus(4, "0,1,2,3", "h100:"), **cpus(2, "2"), **ntasks(2), "GPUS_PER_TASK": "h100:2"},
        ),
        ({"gpus_per_task": 1}, 1, {**gpus(1, "0"), "GPUS_PER_TASK": "1"}),
        (
            {"ntasks_per_gpu": 2, "gpus": 1, "cpus_per_gpu": 3},
            1,
            {**gpus(1, "0"), **cpus(3, "2"), **ntasks(2), "NTASKS_PER_GPU": "2", "CPUS_PER_GPU": "3"},
        ),
    ],
)
def test_a_job_has_exactly_the_variables_of_what_it_asked(
    wanted: dict[str, Any], held: int, expected: dict[str, str]
) -> None:
    found = beyond(variables(a_job(wanted), held))
    assert found == {name: value for name, value in expected.items() if ALWAYS.get(name) != value}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"time_limit_s": 3600}, {"JOB_END_TIME": "4600"}),
        ({"qos": "high"}, {"JOB_QOS": "high"}),
        ({"account": ""}, {"JOB_ACCOUNT": "ann"}),
        ({"reservation": "course"}, {"JOB_RESERVATION": "course"}),
        ({"dependency": "afterok:40,afterany:41_7=48"}, {"JOB_DEPENDENCY": "afterok:40,afterany:41_7"}),
        ({"launch": {"open_mode": "append"}}, {"OPEN_MODE": "a"}),
        ({"launch": {"open_mode": "truncate"}}, {"OPEN_MODE": "t"}),
        ({"launch": {"submit_dir": "/data"}}, {"SUBMIT_DIR": "/data"}),
        ({"run": 2}, {"RESTART_COUNT": "1"}),
    ],
)
def test_further_variables_follow_the_job(spec: dict[str, Any], expected: dict[str, str]) -> None:
    assert beyond(variables(a_job({}, **spec))) == expected


def test_a_task_of_an_array_knows_its_array() -> None:
    job = replace(a_job({}, array=ArraySpec("3-11:4")), array_id=30, task=7)
    assert beyond(variables(job)) == {
        "ARRAY_JOB_ID": "30",
        "ARRAY_TASK_ID": "7",
        "ARRAY_TASK_COUNT": "3",
        "ARRAY_TASK_MIN": "3",
        "ARRAY_TASK_MAX": "11",
        "ARRAY_TASK_STEP": "4",
    }


def test_no_variable_of_the_submitters_own_job_is_passed_on() -> None:
    job = replace(a_job({"gpus": 1, "ntasks": 2, "cpus": 1, "mem_per_cpu_mib": 1}, run=2), array_id=30, task=7)
    job = replace(job, spec=replace(job.spec, array=ArraySpec("7"), reservation="x", dependency="afterok:1"))
    outer = dict.fromkeys((*variables(job, 1), "SLURM_JOB_GID", "SLURM_TASK_PID"), "outer")
    of_step = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_GPUS", "SLURM_LAUNCH_NODE_IPADDR")
    outer |= dict.fromkeys((*of_step, "SLURM_CPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION"), "outer")
    assert all(map(is_of_a_job, outer))
    kept = {"SLURM_TIME_FORMAT": "standard", "SLURM_EXPORT_ENV": "ALL", "SBATCH_PARTITION": "main", "SLURMISH": "1"}
    base = captured(pack_environment({**outer, **kept, "A": "1"}))
    assert base == {**kept, "A": "1"}


def test_the_variables_arrive_in_the_environment_with_threads_for_one_task() -> None:
    job = a_job({"ntasks": 4, "cpus": 2})
    run = Run(42, 1, RunState.STARTING, "gpu1", "boot", 1000.7)
    env = job_environment(job, run, {}, LaunchSite("login1", "/run/api.sock"), SETTINGS, {})
    assert {name: value for name, value in env.items() if name.startswith("SLURM")} == variables(job)
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("2", "")
    assert (env["GPUSCHED_CPUS_ON_NODE"], env["GPUSCHED_RESTART_COUNT"]) == ("8", "0")
