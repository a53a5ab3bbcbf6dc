"""What the daemon counts about itself and its queue while it lives; it begins at nought with every start.

Only what is in the table is counted: a tick whose commit failed leaves no trace but the failure. Nothing here grows
with the number of jobs or of looks at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from gpusched.lifecycle import arrays
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.execution import (
    EngineEvent,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
)
from gpusched.model.history import cards_in
from gpusched.model.job import Job
from gpusched.model.metrics import Histogram, label
from gpusched.model.states import JobState

TICK_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COMMIT_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WAIT_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)

OTHERS = "(others)"
"""Stands for the queues beyond MOST_QUEUES: without settings, a queue is any name that somebody types."""
MOST_QUEUES = 50
RECENT_S = 86400.0
"""Who has held no GPU for so long is forgotten."""

EVENT_WORDS: dict[type, str] = {
    RunStarted: "started",
    RunStopping: "stopping",
    RunSuspended: "suspended",
    RunResumed: "resumed",
    RunEnded: "ended",
    RunLost: "lost",
    RunNeverStarted: "never_started",
}


class Meters:
    """All that is counted, by what it is about."""

    def __init__(self) -> None:
        self.tick_s = Histogram(TICK_BOUNDS_S)
        self.tick_failures = 0
        self.last_tick_at: float | None = None
        self.commit_s = Histogram(COMMIT_BOUNDS_S)
        self.commit_failures = 0
        self.events: Counter[str] = Counter(dict.fromkeys(EVENT_WORDS.values(), 0))
        self.submitted = 0
        self.finished: Counter[JobState] = Counter()
        self.wait_s: dict[str, Histogram] = {}
        """By queue, of the starts so far."""
        self.gpus = GpuMeter()

    def ticked(self, seconds: float, at: float) -> None:
        """A tick is over."""
        self.tick_s.add(seconds)
        self.last_tick_at = at

    def received(self, events: Iterable[EngineEvent]) -> None:
        """The engine has said these."""
        for event in events:
            self.events[EVENT_WORDS[type(event)]] += 1

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Around a commit."""
        began = perf_counter()
        try:
            yield
        except Exception:
            self.commit_failures += 1
            raise
        self.commit_s.add(perf_counter() - began)

    def recorded(
        self, before: Mapping[int, Job | None], changed: Mapping[int, Job], waited: Iterable[tuple[str, float]]
    ) -> None:
        """These rows are in the table now; `waited` is the queue and the wait (s) of each start among them."""
        for job in changed.values():
            earlier = before.get(job.id)
            if earlier is None and job.array_id is None:
                self.submitted += len(arrays.all_tasks(job)) if job.is_array else 1
            if job.state.is_final and (earlier is None or not earlier.state.is_final):
                # The row of an array stands for those of its tasks that never got one.
                self.finished[job.state] += len(arrays.tasks_left(job)) if job.is_array else 1
        for name, seconds in waited:
            queue = label(name)
            if queue not in self.wait_s and len(self.wait_s) >= MOST_QUEUES:
                queue = OTHERS
            self.wait_s.setdefault(queue, Histogram(WAIT_BOUNDS_S)).add(max(0.0, seconds))


class GpuMeter:
    """Who holds how many GPUs, and the integral of that over time.

    A card counts from the booking until it is proven clean, a slice as the part of the card that it books. The
    integral only ever grows; it is of what was known at each instant, so an end that is learned of late counts late.
    """

    def __init__(self) -> None:
        self.by_user: dict[str, float] = {}
        self.by_queue: dict[str, float] = {}
        self._totals: dict[str, int] = {}
        self._used: dict[str, tuple[float, float]] = {}
        """GPU seconds, and when there was a GPU last, by user."""
        self._at: float | None = None

    def hold(self, now: float, holds: Iterable[Allocation], nodes: Iterable[NodeView] | None = None) -> None:
        """From now on runs hold these; `nodes` tell how large the cards are, as before unless they are given."""
        self.advance(now)
        if nodes is not None:
            self._totals = {card.uuid: card.vram_total_mib or 0 for node in nodes for card in node.gpus}
        self.by_user, self.by_queue = {}, {}
        for held in holds:
            if held.gpus:
                parts = cards_in(held.gpus, self._totals)
                self.by_user[held.user] = self.by_user.get(held.user, 0.0) + parts
                self.by_queue[held.queue] = self.by_queue.get(held.queue, 0.0) + parts

    def advance(self, now: float) -> None:
        """Count what was held up to now. A clock that was set back counts nothing."""
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        for user, gpus in self.by_user.items():
            used, _ = self._used.get(user, (0.0, now))
            self._used[user] = used + gpus * elapsed_s, now

    def seconds(self, now: float) -> dict[str, float]:
        """GPU seconds by user, of those who hold or have recently held any."""
        self.advance(now)
        for user in [user for user, (_, at) in self._used.items() if now - at > RECENT_S]:
            del self._used[user]
        return {user: used for user, (used, _) in self._used.items()}
