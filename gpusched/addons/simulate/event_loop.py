"""The event loop of every simulation: at each instant first ends, then arrivals, then a plan.

Two bodies run on it: the planner alone (`planner_run`) and the daemon's complete tick (`daemon_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from gpusched.addons.simulate.outcome import RunLog

Progress = Callable[[int, int], None]
"""Called occasionally with the number of arrived jobs and the total."""

_CYCLES_A_REPORT = 512


class Body(Protocol):
    """A simulated system on the clock. Instants are seconds; jobs are identified by their index among the arrivals."""

    def next_at(self, arrives_at: float) -> float:
        """Next event: this arrival, or an earlier event of the body's own; inf: never."""

    def advance(self, now: float) -> None:
        """Move to this instant, and end the runs due by then."""

    def arrive(self, job: int) -> None:
        """Submit a job."""

    def settle(self, now: float) -> None:
        """Plan after all events of this instant, and carry the plan out."""


def play(arrivals_s: Sequence[float], body: Body, progress: Progress | None = None) -> int:
    """Run all events; simultaneous arrivals keep their order. Returns: number of calls of `settle`."""
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
    """Replays a finished schedule: a body of `event_loop.play` with hooks for the starts and ends of runs.

    At each instant first `end`, then `arrive`, then `begin`. A run of length 0 ends in a second pass of its instant.
    """

    def __init__(self, runs: RunLog) -> None:
        self.runs = runs
        self._begins = sorted(range(len(runs)), key=runs.begin_s.__getitem__)
        self._ends = sorted(range(len(runs)), key=lambda run: (runs.end_s[run], runs.begin_s[run]))
        self._begun = bytearray(len(runs))
        self._next_begin = self._next_end = 0

    def next_at(self, arrives_at: float) -> float:
        at, runs = arrives_at, self.runs
        if self._next_begin < len(self._begins):
            at = min(at, runs.begin_s[self._begins[self._next_begin]])
        if self._next_end < len(self._ends):
            at = min(at, runs.end_s[self._ends[self._next_end]])
        return at

    def advance(self, now: float) -> None:
        """Move on, and end the runs due now."""
        end_s, ends, begun = self.runs.end_s, self._ends, self._begun
        while self._next_end < len(ends) and end_s[ends[self._next_end]] == now and begun[ends[self._next_end]]:
            self.end(ends[self._next_end])
            self._next_end += 1

    def arrive(self, job: int) -> None:
        """Hook: a job becomes pending."""

    def settle(self, now: float) -> None:
        """Start the runs due now."""
        begin_s, begins = self.runs.begin_s, self._begins
        while self._next_begin < len(begins) and begin_s[begins[self._next_begin]] == now:
            self._begun[begins[self._next_begin]] = 1
            self.begin(begins[self._next_begin])
            self._next_begin += 1

    def begin(self, run: int) -> None:
        """Hook: a run starts."""

    def end(self, run: int) -> None:
        """Hook: a run ends."""
