"""Finds its place as `jax.distributed.initialize()` does under Slurm, from the variables of the step alone."""

from __future__ import annotations

import os

from stand_ins import meet, report

env = os.environ


def coordinator(nodelist: str) -> str:
    """The first name of a folded list, as far as JAX unfolds it."""
    name, bracket, rest = nodelist.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    return name + rest.replace("-", ",").replace("]", ",").split(",")[0]


rank, world = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
port = int(env["SLURM_JOB_ID"]) % 2**12 + (65535 - 2**12 + 1)
table = meet(rank, world, coordinator(env["SLURM_STEP_NODELIST"]), port, local=int(env["SLURM_LOCALID"]))
assert int(env["SLURM_STEP_NUM_NODES"]) == len({one["node"] for one in table}), table
if rank == 0:
    report(table)
