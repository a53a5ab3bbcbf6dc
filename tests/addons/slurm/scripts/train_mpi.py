"""A program of MPI: Open MPI's launcher says which rank it is; the ranks meet where rank 0 is."""

from __future__ import annotations

import os

from stand_ins import meet, report

rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
local = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
table = meet(rank, world, os.environ["STAND_IN_ROOT"], int(os.environ["STAND_IN_PORT"]), local=local)
if rank == 0:
    report(table)
