"""Ranks of a run: what each process learns of its place among the others, and where it writes.

A job that asks for tasks gets all of them started, each a rank with the variables of torchrun and of a step of Slurm.
Any other job on several nodes has one process on each, which starts ranks of its own, as torchrun does: RANK and
LOCAL_RANK are not set for it. Source: "Environment variables" of torchrun's documentation; srun(1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusched.lifecycle.output_paths import input_path, output_paths
from gpusched.model.execution import RankLaunch
from gpusched.model.hostlist import fold
from gpusched.model.job import Job, Run
from gpusched.model.layout import ranks_on_nodes, starts_ranks
from gpusched.model.static_gpus import CUDA_VARIABLE
from gpusched.model.units import folded_counts

_LOCAL = "127.0.0.1"
OF_RANKS = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "NNODES"),
        *("MASTER_ADDR", "MASTER_PORT"),
        *(f"GPUSCHED_{name}" for name in ("NODE_RANK", "NODELIST", "TASK", "NTASKS")),
    }
)
"""All variables of this module but Slurm's."""
MARK = "GPUSCHED_NODE_RANK"
"""Every process that has any of them has this one."""


def node_environment(job: Job, run: Run, node: int, master: str) -> dict[str, str]:
    """Variables of all processes of a run on one node; none where a single process is the whole run.

    Args: node: its rank in the run. master: address of the first node.
    """
    has_ranks = starts_ranks(job.spec)
    if not (run.parts or has_ranks):
        return {}
    env = {
        # On one machine a name need not even resolve.
        "MASTER_ADDR": master if run.parts else _LOCAL,
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "NNODES": str(len(run.nodes)),
        MARK: str(node),
        "GPUSCHED_NODELIST": fold(run.nodes),
    }
    if run.master_port is not None:
        env["MASTER_PORT"] = str(run.master_port)
    if not has_ranks:
        return env
    ranks = ranks_on_nodes(job.spec, run.on_each_node)
    counts = [len(one) for one in ranks]
    total = str(sum(counts))
    if len(set(counts)) == 1:
        env["SLURM_NTASKS_PER_NODE"] = str(counts[0])
    return {
        **env,
        "WORLD_SIZE": total,
        "LOCAL_WORLD_SIZE": str(counts[node]),
        "GPUSCHED_NTASKS": total,
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": fold(run.nodes),
        "SLURM_STEP_NUM_NODES": str(len(run.nodes)),
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_STEP_TASKS_PER_NODE": folded_counts(counts),
        "SLURM_GTIDS": ",".join(map(str, ranks[node])),
        "SLURM_DISTRIBUTION": "block",
        "SLURM_LAUNCH_NODE_IPADDR": env["MASTER_ADDR"],
    }


def launches(
    job: Job, run: Run, node: int, default: str, devices: Sequence[str], variable: str = CUDA_VARIABLE
) -> tuple[RankLaunch, ...]:
    """The ranks to start on one node of a run; empty where one process is started there.

    Args: run: as on that node. default: pattern of output files. devices: what the variable names there.
    """
    if not starts_ranks(job.spec):
        return ()
    layout = job.spec.layout
    each = None if layout is None else layout.gpus_per_task
    found = []
    for local, rank in enumerate(ranks_on_nodes(job.spec, run.on_each_node)[node]):
        stdout_path, stderr_path = output_paths(job, run.number, run.node, default, node, rank)
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "GPUSCHED_TASK": str(rank),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
        }
        gpus: tuple[str, ...] = ()
        if each and devices:
            # As srun binds them; otherwise each rank sees all of its node's, and selects one by LOCAL_RANK.
            env[variable] = ",".join(devices[local * each : (local + 1) * each])
            gpus = tuple(share.uuid for share in run.gpus[local * each : (local + 1) * each])
        path = input_path(job, run.node, node, rank)
        found.append(RankLaunch(env, rank, stdout_path, stderr_path, path, gpus))
    return tuple(found)


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """A captured environment without the place of the rank that it was captured in, if it was."""
    if MARK not in environment:
        return dict(environment)
    return {name: value for name, value in environment.items() if name not in OF_RANKS}
