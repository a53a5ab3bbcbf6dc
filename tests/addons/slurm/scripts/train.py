"""A training program that is told its rank in torch's variables, else in Slurm's, as many programs read them."""

from __future__ import annotations

import os

from stand_ins import meet, report


def variable(*names: str) -> str:
    return next(os.environ[name] for name in names if name in os.environ)


rank = int(variable("RANK", "SLURM_PROCID"))
world = int(variable("WORLD_SIZE", "SLURM_NTASKS"))
local = int(variable("LOCAL_RANK", "SLURM_LOCALID"))
table = meet(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), local=local)
if rank == 0:
    report(table)
