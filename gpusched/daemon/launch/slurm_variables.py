"""SLURM_* variables of a run's first process, named and written as in the batch script of a Slurm job.

`srun` sets those of a step on top of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.lifecycle.dependencies import as_typed
from gpusched.model.hostlist import fold
from gpusched.model.job import ArraySpec, Job, Request, Run
from gpusched.model.layout import count_tasks, spread_tasks, states_tasks, tasks_on_nodes
from gpusched.model.settings import Settings
from gpusched.model.tasks import tasks_of
from gpusched.model.units import folded_counts
from gpusched.scheduler.admission import NORMAL_QOS


def is_of_a_job(name: str) -> bool:
    """Whether a variable describes the job that its process belongs to, and so must not be passed on to another job.

    What users set for Slurm's commands, such as SLURM_TIME_FORMAT, is theirs to pass on.
    """
    return name.startswith(_PREFIXES) or name in _NAMES


_PREFIXES = (
    *("SLURMD_", "SLURM_JOB", "SLURM_ARRAY_", "SLURM_STEP", "SLURM_HET_", "SLURM_PACK_", "SLURM_SUBMIT_"),
    *("SLURM_NTASKS", "SLURM_TASK", "SLURM_NODE", "SLURM_CPU", "SLURM_MEM_", "SLURM_GPU", "SLURM_TRES_"),
    *("SLURM_SRUN_", "SLURM_LAUNCH_", "SLURM_TOPOLOGY_", "SLURM_PTY_", "SLURM_SCRIPT_"),
)
_NAMES = frozenset(
    {
        *("SLURM_NNODES", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_RESTART_COUNT"),
        *("SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER", "SLURM_PRIO_PROCESS", "SLURM_UMASK", "SLURM_OPEN_MODE"),
        *("SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE", "SLURM_DIST_LLLP", "SLURM_OVERCOMMIT", "SLURM_HINT"),
        *("SLURM_THREADS_PER_CORE", "SLURM_PROFILE", "SLURM_NETWORK", "SLURM_RESERVATION", "SLURM_CONF"),
        *("SLURM_LABELIO", "SLURM_UNBUFFEREDIO", "SLURM_KILL_BAD_EXIT", "SLURM_EXACT", "SLURM_WHOLE"),
    }
)


def slurm_variables(
    job: Job, run: Run, host: str, settings: Settings, gpu_ids: str, node_cpus: int = 0, rank: int = 0
) -> dict[str, str]:
    """All SLURM_* variables of a run but SLURM_JOB_GID and SLURM_TASK_PID, which its supervisor adds.

    Args: host: where the job was submitted. gpu_ids: indexes of its GPUs with commas. node_cpus: cores of its node.
    rank: of that node in the run.
    """
    spec, request = job.spec, job.spec.request
    booked = [request.cpus] * request.nodes
    tasks = spread_tasks(count_tasks(request, spec.layout), request.nodes)
    if request.bundles is not None:
        booked = [part.cpus for part in run.on_each_node]
        tasks = tasks_on_nodes(request, spec.layout, run.on_each_node)
    least = node_cpus if request.is_exclusive else 0
    nodes, cpus = len(booked), [max(1, int(each), least) for each in booked]
    node_list = fold(run.nodes)
    env = {
        "SLURM_JOB_ID": str(job.id),
        "SLURM_JOBID": str(job.id),
        "SLURM_JOB_NAME": spec.name,
        "SLURM_JOB_USER": job.user,
        "SLURM_JOB_UID": str(job.uid),
        "SLURM_JOB_ACCOUNT": spec.shown_account or job.user,
        "SLURM_JOB_QOS": spec.shown_qos or NORMAL_QOS,
        "SLURM_JOB_PARTITION": spec.queue,
        "SLURM_CLUSTER_NAME": settings.slurm.cluster_name,
        "SLURM_SUBMIT_DIR": spec.launch.submit_dir or spec.launch.work_dir,
        "SLURM_SUBMIT_HOST": host,
        "SLURM_UMASK": f"{spec.launch.umask:04o}",
        "SLURM_PRIO_PROCESS": "0",
        "SLURMD_NODENAME": run.node,
        "SLURM_JOB_NODELIST": node_list,
        "SLURM_NODELIST": node_list,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODEID": str(rank),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": str(rank),
        "SLURM_TOPOLOGY_ADDR": run.node,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "SLURM_CPUS_ON_NODE": str(cpus[rank]),
        "SLURM_JOB_CPUS_PER_NODE": folded_counts(cpus),
        "SLURM_TASKS_PER_NODE": folded_counts(tasks),
    }
    env.update(_of_time(job, run))
    env.update(_of_layout(job, nodes))
    if job.restarts:
        env["SLURM_RESTART_COUNT"] = str(job.restarts)
    if spec.dependency:
        env["SLURM_JOB_DEPENDENCY"] = as_typed(spec.dependency) or ""
    if spec.reservation is not None:
        env["SLURM_JOB_RESERVATION"] = spec.reservation
    if spec.launch.open_mode is not None:
        env["SLURM_OPEN_MODE"] = spec.launch.open_mode[0]
    if run.gpus:
        env.update(_of_gpus(request, run, gpu_ids))
    if spec.array is not None and job.task is not None:
        env.update({f"SLURM_ARRAY_{name}": value for name, value in array_facts(job, spec.array, job.task).items()})
    return env


def array_facts(job: Job, array: ArraySpec, task: int) -> Mapping[str, str]:
    """What a task learns of itself and its array, by the ending of the variables' names."""
    tasks = tasks_of(array.tasks)
    first = tasks.ranges[0]
    return {
        "JOB_ID": str(job.array_id),
        "TASK_ID": str(task),
        "TASK_COUNT": str(len(tasks)),
        "TASK_MIN": str(first[0]),
        "TASK_MAX": str(tasks.ranges[-1][-1]),
        "TASK_STEP": str(first.step),
    }


def _of_time(job: Job, run: Run) -> dict[str, str]:
    start = int(run.intent_at if run.start_at is None else run.start_at)
    limit_s = job.spec.time_limit_s
    end = {} if limit_s is None else {"SLURM_JOB_END_TIME": str(start + limit_s)}
    return {"SLURM_JOB_START_TIME": str(start), **end}


def _of_layout(job: Job, nodes: int) -> dict[str, str]:
    """Variables of what was asked for tasks, cores and memory: only those that were stated."""
    request, layout = job.spec.request, job.spec.layout
    if layout is None:
        return {"SLURM_MEM_PER_NODE": str(request.mem_mib)} if request.mem_mib else {}
    tasks = count_tasks(request, layout, nodes)
    is_counted = states_tasks(layout, request)
    kind = f"{request.gpu_type}:" if request.gpu_type else ""
    is_per_node = layout.mem_per_cpu_mib is None and layout.mem_per_gpu_mib is None
    found = {
        "NTASKS": tasks if is_counted else None,
        "NPROCS": tasks if is_counted else None,
        "NTASKS_PER_NODE": layout.ntasks_per_node,
        "NTASKS_PER_GPU": layout.ntasks_per_gpu,
        "CPUS_PER_TASK": None if layout.cpus_per_task is None else max(1, int(layout.cpus_per_task)),
        "CPUS_PER_GPU": layout.cpus_per_gpu,
        "GPUS_PER_TASK": None if layout.gpus_per_task is None else f"{kind}{layout.gpus_per_task}",
        "MEM_PER_CPU": layout.mem_per_cpu_mib,
        "MEM_PER_GPU": layout.mem_per_gpu_mib,
        "MEM_PER_NODE": (request.mem_mib or None) if is_per_node else None,
    }
    return {f"SLURM_{name}": str(value) for name, value in found.items() if value is not None}


def _of_gpus(request: Request, run: Run, gpu_ids: str) -> dict[str, str]:
    kind = f"{request.gpu_type}:" if request.gpu_type else ""
    asked = {} if request.bundles is not None else {"SLURM_GPUS_PER_NODE": f"{kind}{request.gpus}"}
    if request.bundles is not None or len(run.nodes) == 1:
        # As in Slurm a number for each of several nodes says nothing of a total.
        asked["SLURM_GPUS"] = f"{kind}{request.total_gpus}"
    return {
        "SLURM_JOB_GPUS": gpu_ids,
        "SLURM_GPUS_ON_NODE": str(len(run.gpus)),
        **asked,
    }
