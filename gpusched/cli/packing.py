"""gpusched simulate --pack: how many of a cluster's GPUs each strategy of placement gives away before it is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from gpusched.cli import output, schedules, tables
from gpusched.errors import UsageError
from gpusched.simulate import packing

_EXAMPLE = "gpusched simulate --pack nodes.csv pods.csv --policy first,pack"
_HEADINGS = ["STRATEGY", "ALLOCATED", "LEAST", "MOST", "AT 100 %", "FRAGMENTS", "DROPPED", "MS/JOB"]


def show_packing(
    pack: tuple[str, str] | None, policy: str | None, orders: int | None, as_json: bool, others: Sequence[str]
) -> None:
    """Print a line for each strategy. Raises: UsageError, and what reading the two files raises."""
    if pack is None:
        raise UsageError("--orders is about orders of arrival, and nothing is packed", _EXAMPLE)
    if others:
        raise UsageError(f"--pack fills a cluster without a clock, where {others[0]} has no meaning", _EXAMPLE)
    rules = packing.RULES if policy is None else tuple(policy.split(","))
    for rule in rules:
        if rule not in packing.RULES:
            raise UsageError(f"{rule!r} names no strategy that is known: {', '.join(packing.RULES)}", _EXAMPLE)
    if orders is not None and orders < 1:
        raise UsageError(f"--orders {orders} leaves nothing to try", "--orders 10")
    nodes, jobs = packing.cluster_of(Path(pack[0])), packing.jobs_of(Path(pack[1]))
    capacity = sum(len(node.gpus) for node in nodes)
    if not capacity:
        raise UsageError(f"{pack[0]} names no GPU", f"head {pack[0]}")
    if not any(map(packing.gpus_asked, jobs)):
        raise UsageError(f"{pack[1]} asks for no GPU", f"head {pack[1]}")
    typical, wanted = packing.usual(jobs), packing.wanted_of(jobs)
    lines, rows = [], []
    for rule in rules:
        runs = []
        for seed in range(packing.FIRST_SEED, packing.FIRST_SEED + (orders or 1)):
            coming = packing.arrivals(jobs, packing.DEMAND * capacity, seed)
            with schedules.progress(rule) as progress:
                runs.append(packing.fill(nodes, coming, rule, typical, wanted=wanted, seed=seed, progress=progress))
        rows.append({"strategy": rule, "orders": [asdict(run) for run in runs]})
        lines.append(_line(rule, runs))
    if as_json:
        output.print_json({"nodes": len(nodes), "gpus": capacity, "jobs": len(jobs), "strategies": rows})
    else:
        tables.print_table(_HEADINGS, lines, frozenset(range(1, len(_HEADINGS))))


def _line(rule: str, runs: Sequence[packing.Filled]) -> list[str]:
    ends = [run.at_end for run in runs]
    jobs = sum(run.placed + run.dropped for run in runs)
    return [
        rule,
        f"{fmean(ends):.2%}",
        f"{min(ends):.2%}",
        f"{max(ends):.2%}",
        f"{fmean(run.at_full for run in runs):.2%}",
        f"{fmean(run.fragments for run in runs):.2%}",
        f"{fmean(run.dropped for run in runs):,.0f}",
        f"{1e3 * sum(run.seconds for run in runs) / jobs:.2f}",
    ]
