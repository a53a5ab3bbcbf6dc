"""One clock for every simulation, from event to event: at each instant first ends, then arrivals, then a plan.

Two bodies live on it: the planner alone (`planner_run`) and the daemon's whole tick (`daemon_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

Progress = Callable[[int, int], None]
"""Called now and then with the number of jobs that have arrived, and of all jobs."""

_CYCLES_A_REPORT = 512


class Body(Protocol):
    """What lives on the clock. Instants are seconds; jobs go by their place among the arrivals."""

    def next_at(self, arrives_at: float) -> float:
        """The next instant at which something happens: this arrival, or an event of its own before it; inf: never."""

    def advance(self, now: float) -> None:
        """Move on to this instant, and end what ends by then."""

    def arrive(self, job: int) -> None:
        """Submit a job."""

    def settle(self, now: float) -> None:
        """Plan, now that all of this instant has happened, and carry the plan out."""


def play(arrivals_s: Sequence[float], body: Body, progress: Progress | None = None) -> int:
    """Let everything happen; jobs of one instant arrive in the order given. Returns: how often the body settled."""
    order = sorted(range(len(arrivals_s)), key=arrivals_s.__getitem__)
    coming, last, cycles = 0, len(order), 0
    arrives_at: float = arrivals_s[order[0]] if order else inf
    while (now := body.next_at(arrives_at)) < inf:
        body.advance(now)
        while arrives_at <= now:
            body.arrive(order[coming])
            coming += 1
            arrives_at = arrivals_s[order[coming]] if coming < last else inf
        body.settle(now)
        cycles += 1
        if progress is not None and cycles % _CYCLES_A_REPORT == 0:
            progress(coming, last)
    return cycles
