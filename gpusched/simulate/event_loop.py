"""One clock for every simulation, from event to event: at each instant first ends, then arrivals, then a plan.

Two bodies live on it: the planner alone (`planner_run`) and the daemon's whole tick (`daemon_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from gpusched.simulate.outcome import RunLog

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


class Walk:
    """A finished schedule on the clock once more: a body of `event_loop.play` with hooks for begins and ends.

    At each instant first `end`, then `arrive`, then `begin`. A run that takes no time ends as its instant comes again.
    """

    def __init__(self, runs: RunLog) -> None:
        self.runs = runs
        self._begins = sorted(range(len(runs)), key=runs.begin_s.__getitem__)
        self._ends = sorted(range(len(runs)), key=lambda run: (runs.end_s[run], runs.begin_s[run]))
        self._begun = bytearray(len(runs))
        self._next_begin = self._next_end = 0

    def next_at(self, arrives_at: float) -> float:
        """The next arrival, begin or end."""
        at, runs = arrives_at, self.runs
        if self._next_begin < len(self._begins):
            at = min(at, runs.begin_s[self._begins[self._next_begin]])
        if self._next_end < len(self._ends):
            at = min(at, runs.end_s[self._ends[self._next_end]])
        return at

    def advance(self, now: float) -> None:
        """Move on, and end the runs that end now."""
        end_s, ends, begun = self.runs.end_s, self._ends, self._begun
        while self._next_end < len(ends) and end_s[ends[self._next_end]] == now and begun[ends[self._next_end]]:
            self.end(ends[self._next_end])
            self._next_end += 1

    def arrive(self, job: int) -> None:
        """A job waits from now on."""

    def settle(self, now: float) -> None:
        """Begin the runs that begin now."""
        begin_s, begins = self.runs.begin_s, self._begins
        while self._next_begin < len(begins) and begin_s[begins[self._next_begin]] == now:
            self._begun[begins[self._next_begin]] = 1
            self.begin(begins[self._next_begin])
            self._next_begin += 1

    def begin(self, run: int) -> None:
        """A run begins."""

    def end(self, run: int) -> None:
        """A run ends."""
