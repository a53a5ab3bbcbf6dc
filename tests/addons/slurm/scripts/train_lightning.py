"""Finds its place as Lightning's SLURMEnvironment does, and refuses what that refuses."""

from __future__ import annotations

import os
import re
import sys

from stand_ins import meet, report

devices, nodes = int(sys.argv[1]), int(sys.argv[2])


def root_node(nodelist: str) -> str:
    """The first name of `n[1-2]`, `n1,n2`, `gpu[01,03]`."""
    first = re.sub(r"\[(.*?)[,-].*\]", r"\1", nodelist)
    return re.sub(r"\[(.*?)\]", r"\1", first).split(",")[0]


env = os.environ
if "SLURM_NTASKS" not in env or env["SLURM_JOB_NAME"] in ("bash", "interactive"):
    sys.exit("Slurm was not detected")
if int(env["SLURM_NTASKS"]) > 1 and "SLURM_NTASKS_PER_NODE" not in env:
    sys.exit("--ntasks is not supported; use --ntasks-per-node")
if int(env["SLURM_NTASKS_PER_NODE"]) != devices:
    sys.exit(f"{devices} devices do not match --ntasks-per-node={env['SLURM_NTASKS_PER_NODE']}")
if int(env["SLURM_NNODES"]) != nodes:
    sys.exit(f"{nodes} nodes do not match --nodes={env['SLURM_NNODES']}")
rank, local = int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"])
if rank != int(env["SLURM_NODEID"]) * devices + local:
    sys.exit(f"rank {rank} is not number {local} on node {env['SLURM_NODEID']}")
address = env.get("MASTER_ADDR") or root_node(env["SLURM_NODELIST"])
port = int(env.get("MASTER_PORT") or int(env["SLURM_JOB_ID"][-4:]) + 15000)
table = meet(rank, int(env["SLURM_NTASKS"]), address, port, local=local)
if rank == 0:
    report(table)
