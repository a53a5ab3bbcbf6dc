"""Ports where the ranks of a run meet: one on the run's first node, that no other open run there has.

Which ports are taken follows from the rows of open runs alone, so a restarted daemon knows it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.job import Job, Run
from gpusched.model.layout import starts_ranks
from gpusched.model.snapshot import Placement


def needs_port(job: Job, placement: Placement) -> bool:
    """Whether the ranks of the job have to find each other: on several nodes, or several processes started by us."""
    return bool(placement.others) or starts_ranks(job.spec)


def taken_ports(node: str, runs: Iterable[Run]) -> set[int]:
    """Ports of the open runs that begin on this node."""
    return {run.master_port for run in runs if run.master_port is not None and run.node == node}


def choose_port(ports: Sequence[int], taken: set[int], job: Job) -> int | None:
    """A port for the job's next run; None when all are taken.

    A job's runs begin the search at one port after the other: where another program has the first, the next run gets
    another.
    """
    first = job.id + job.run
    for place in range(min(len(ports), len(taken) + 1)):
        port = ports[(first + place) % len(ports)]
        if port not in taken:
            return port
    return None
