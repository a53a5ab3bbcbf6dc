"""Counters of the daemon and its queue; they start at zero with every start.

Only committed changes are counted: a failed commit leaves no trace but the failure. Memory does not grow with
the number of jobs or of reads.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from gpusched.lifecycle import arrays
from gpusched.model import series
from gpusched.model.cluster import Allocation, GpuReading, GpuState, GpuView, NodeView
from gpusched.model.execution import (
    EngineEvent,
    NativeRunStarted,
    RunAccepted,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
)
from gpusched.model.history import cards_in, part_of_card
from gpusched.model.job import GpuShare, Job
from gpusched.model.metrics import Histogram, Page, label
from gpusched.model.states import FINAL_STATES, JobState
from gpusched.model.units import gpu_label
from gpusched.scheduler.cluster_state import ClusterLayout

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

TICK_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COMMIT_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WAIT_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)
SLOW_S = 1.0
"""From this duration on a tick is slow: commands feel instant no more."""
OTHERS = "(others)"
"""Label of the queues beyond MOST_QUEUES: without settings, users may type any queue name."""
MOST_QUEUES = 50
RECENT_S = 86400.0
"""Users who have held no GPU for this time are forgotten."""
EVENT_WORDS: dict[type, str] = {
    RunStarted: "started",
    RunStopping: "stopping",
    RunSuspended: "suspended",
    RunResumed: "resumed",
    RunEnded: "ended",
    RunLost: "lost",
    RunNeverStarted: "never_started",
    RunAccepted: "accepted",
    NativeRunStarted: "native_started",
}


class SlowTick(NamedTuple):
    at: float
    seconds: float
    commit_s: float
    """How long of it the commit took."""


class Meters:
    def __init__(self) -> None:
        self.tick_s = Histogram(TICK_BOUNDS_S)
        self.tick_failures = 0
        self.recent_tick_s: deque[float] = deque(maxlen=512)
        self.slow_ticks: deque[SlowTick] = deque(maxlen=64)
        """The newest of those that kept everybody waiting."""
        self.last_tick_at: float | None = None
        self.commit_s = Histogram(COMMIT_BOUNDS_S)
        self.commit_failures = 0
        self.last_commit_s = 0.0
        """Time of the last commit, or attempt at one."""
        self.events: Counter[str] = Counter(dict.fromkeys(EVENT_WORDS.values(), 0))
        self.submitted = 0
        self.finished: Counter[JobState] = Counter()
        self.wait_s: dict[str, Histogram] = {}
        """Waits of all starts, by queue."""
        self.gpus = GpuMeter()

    def ticked(self, seconds: float, at: float) -> None:
        self.tick_s.add(seconds)
        self.recent_tick_s.append(seconds)
        self.last_tick_at = at
        if seconds >= SLOW_S:
            self.slow_ticks.append(SlowTick(at, seconds, self.last_commit_s))

    def received(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            self.events[EVENT_WORDS[type(event)]] += 1

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Context manager: time a commit."""
        began = perf_counter()
        try:
            yield
        except Exception:
            self.commit_failures += 1
            raise
        finally:
            self.last_commit_s = perf_counter() - began
        self.commit_s.add(self.last_commit_s)

    def recorded(
        self, before: Mapping[int, Job | None], changed: Mapping[int, Job], waited: Iterable[tuple[str, float]]
    ) -> None:
        """Count committed rows; `waited` is the queue and wait (s) of each start among them."""
        for job in changed.values():
            earlier = before.get(job.id)
            if earlier is None and job.array_id is None:
                self.submitted += len(arrays.all_tasks(job)) if job.is_array else 1
            if job.state.is_final and (earlier is None or not earlier.state.is_final):
                # The row of an array represents its tasks without a row.
                self.finished[job.state] += len(arrays.tasks_left(job)) if job.is_array else 1
        for name, seconds in waited:
            queue = label(name)
            if queue not in self.wait_s and len(self.wait_s) >= MOST_QUEUES:
                queue = OTHERS
            self.wait_s.setdefault(queue, Histogram(WAIT_BOUNDS_S)).add(max(0.0, seconds))


class GpuMeter:
    """GPUs held by each user, and the integral of that over time.

    A GPU counts from its booking until it is proven clean, a slice as the booked part of the GPU. The integral
    never decreases; it follows what was known at each instant, so an end that is noticed late counts late.
    """

    def __init__(self) -> None:
        self.by_user: dict[str, float] = {}
        self.by_queue: dict[str, float] = {}
        self._totals: dict[str, int] = {}
        self._used: dict[str, tuple[float, float]] = {}
        """By user: GPU seconds, and when the user last held a GPU."""
        self._at: float | None = None

    def hold(self, now: float, holds: Iterable[Allocation], nodes: Iterable[NodeView] | None = None) -> None:
        """Set what runs hold from now on; `nodes` gives the sizes of GPUs, unchanged if omitted."""
        self.advance(now)
        if nodes is not None:
            self._totals = {card.uuid: card.vram_total_mib or 0 for node in nodes for card in node.gpus}
        self.by_user, self.by_queue = {}, {}
        for held in holds:
            if held.gpus:
                parts = cards_in(held.gpus, self._totals)
                self.by_user[held.terms.user] = self.by_user.get(held.terms.user, 0.0) + parts
                self.by_queue[held.terms.queue] = self.by_queue.get(held.terms.queue, 0.0) + parts

    def advance(self, now: float) -> None:
        """Integrate up to now. A clock that was set back adds nothing."""
        elapsed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        for user, gpus in self.by_user.items():
            used, _ = self._used.get(user, (0.0, now))
            self._used[user] = used + gpus * elapsed_s, now

    def seconds(self, now: float) -> dict[str, float]:
        """GPU seconds by user, for current and recent holders."""
        self.advance(now)
        for user in [user for user, (_, at) in self._used.items() if now - at > RECENT_S]:
            del self._used[user]
        return {user: used for user, (used, _) in self._used.items()}


_MIB = 1 << 20
_GPU_STATES = tuple(word for name, word in vars(GpuState).items() if name.isupper())


def page(scheduler: Scheduler, facts: Mapping[str, Any]) -> Page:
    """All metrics of this instant. `facts` gives the daemon's version, start and database."""
    found = Page()
    found.put(series.UP, 1)
    _daemon(found, scheduler, facts)
    _queue(found, scheduler)
    _nodes(found, scheduler)
    _gpus(found, scheduler)
    _users(found, scheduler)
    return found


def _daemon(found: Page, scheduler: Scheduler, facts: Mapping[str, Any]) -> None:
    meters = scheduler.meters
    found.put(series.BUILD, 1, str(facts["version"]))
    found.put(series.STARTED, facts["started_at"])
    found.put(series.TICK, meters.tick_s)
    found.put(series.TICK_FAILURES, meters.tick_failures)
    found.put(series.STEP_FAILURES, scheduler.failures.counts.total())
    found.put(series.LAST_TICK, meters.last_tick_at)
    found.put(series.COMMIT, meters.commit_s)
    found.put(series.COMMIT_FAILURES, meters.commit_failures)
    found.put(series.WRITABLE, float(scheduler.trouble is None))
    found.put(series.STORE_SIZE, _size(facts["database"]))
    for event, count in meters.events.items():
        found.put(series.EVENTS, count, event)
    found.put(series.ALERTS_WAITING, sum(map(len, scheduler.alerts.waiting().values())))
    found.put(series.ALERTS_DROPPED, scheduler.alerts.dropped)


def _size(database: str) -> int | None:
    """Bytes of the database and its log; None when it has no file."""
    sizes = []
    for path in (database, database + "-wal"):
        try:
            sizes.append(os.stat(path).st_size)
        except OSError:
            pass  # there is no log right after a clean start
    return sum(sizes) if sizes else None


def _queue(found: Page, scheduler: Scheduler) -> None:
    state, meters = scheduler.state, scheduler.meters
    jobs = _labelled(state.census.by_queue)
    # Configured queues always have a series: a missing series looks the same as zero.
    known = {label(name) for name in scheduler.settings.queue} or {label(scheduler.settings.default.queue)}
    named = _largest(jobs) | known
    folded = _folded(jobs, named)
    for queue in sorted(known | {queue for queue, _ in folded}):
        for each in JobState:
            if each not in FINAL_STATES:
                found.put(series.JOBS, folded[queue, each], queue, each)
    for reason, count in sorted(state.waiting_reasons(scheduler.plan.reasons).items()):
        found.put(series.REASONS, count, reason)
    found.put(series.SUBMITTED, meters.submitted)
    for each in JobState:
        if each in FINAL_STATES:
            found.put(series.FINISHED, meters.finished[each], each)
    for queue, waits in meters.wait_s.items():
        found.put(series.WAIT, waits, queue)
    for queue, gpus in sorted((dict.fromkeys(known, 0.0) | _summed(meters.gpus.by_queue, named)).items()):
        found.put(series.QUEUE_GPUS, gpus, queue)


def _labelled(counted: Mapping[tuple[JobState, str], int]) -> Counter[tuple[str, JobState]]:
    """Counts by label; two names may map to the same label."""
    found: Counter[tuple[str, JobState]] = Counter()
    for (state, name), count in counted.items():
        found[label(name), state] += count
    return found


def _largest(jobs: Mapping[tuple[str, JobState], int]) -> frozenset[str]:
    """Queues with their own series: those with the most jobs."""
    sizes: Counter[str] = Counter()
    for (queue, _), count in jobs.items():
        sizes[queue] += count
    return frozenset(queue for queue, _ in sizes.most_common(MOST_QUEUES))


def _folded(jobs: Mapping[tuple[str, JobState], int], named: frozenset[str]) -> Counter[tuple[str, JobState]]:
    folded: Counter[tuple[str, JobState]] = Counter()
    for (queue, state), count in jobs.items():
        folded[queue if queue in named else OTHERS, state] += count
    return folded


def _summed(gpus: Mapping[str, float], named: frozenset[str] | None = None) -> dict[str, float]:
    """Sums by label; queues not in `named` are combined."""
    total: dict[str, float] = {}
    for name, amount in gpus.items():
        mark = label(name)
        if named is not None and mark not in named:
            mark = OTHERS
        total[mark] = total.get(mark, 0.0) + amount
    return total


def _nodes(found: Page, scheduler: Scheduler) -> None:
    views = scheduler.nodes(scheduler.now())
    layout = ClusterLayout(views, scheduler.settings)
    for node in views:
        if node.is_unknown:
            continue
        holds = [held for held in scheduler.state.holds.values() if held.node == node.name]
        _node(found, node, holds, layout, scheduler.cluster[node.name].reading)


def _node(
    found: Page, node: NodeView, holds: Sequence[Allocation], layout: ClusterLayout, reading: GpuReading | None
) -> None:
    found.put(series.NODE_DRAINED, float(node.why_not is not None), node.name)
    found.put(series.NODE_CPUS, node.cpus, node.name)
    found.put(series.NODE_CPUS_BOOKED, sum(held.cpus for held in holds), node.name)
    found.put(series.NODE_MEMORY, node.mem_mib * _MIB, node.name)
    booked_mib = sum(map(layout.node_mem_mib, holds))
    found.put(series.NODE_MEMORY_BOOKED, booked_mib * _MIB, node.name)
    if reading is not None:
        found.put(series.GPU_READING, reading.at, node.name)
        found.put(series.GPU_DRIVER, float(reading.error is None), node.name)


def _gpus(found: Page, scheduler: Scheduler) -> None:
    now = scheduler.now()
    shares: dict[str, list[GpuShare]] = {}
    for held in scheduler.state.holds.values():
        for share in held.gpus:
            shares.setdefault(share.uuid, []).append(share)
    for node in scheduler.nodes(now):
        for view in node.gpus:
            _gpu(found, scheduler, (node.name, gpu_label(view.index), view.uuid), view, shares.get(view.uuid, []))


def _gpu(
    found: Page, scheduler: Scheduler, labels: tuple[str, str, str], view: GpuView, shares: Iterable[GpuShare]
) -> None:
    shares = list(shares)
    now, cluster = scheduler.now(), scheduler.cluster
    status = cluster.status(view.uuid, shares, now)
    found.put(series.GPU, 1, *labels, view.name)
    for state in _GPU_STATES:
        found.put(series.GPU_STATE, float(state == status.state), *labels, state)
    found.put(series.GPU_BOOKED, min(1.0, sum(part_of_card(share, view.vram_total_mib) for share in shares)), *labels)
    found.put(series.GPU_RUNS, len(shares), *labels)
    found.put(series.GPU_MEMORY, _bytes(view.vram_total_mib), *labels)
    sample = status.sample
    if sample is None or not cluster.is_measured(view.uuid, now):
        # Values from before the GPU stopped responding are stale.
        return
    found.put(series.GPU_UTILISATION, sample.utilisation, *labels)
    found.put(series.GPU_MEMORY_USED, _bytes(sample.vram_used_mib), *labels)
    found.put(series.GPU_MEMORY_FOREIGN, _bytes(view.foreign_mib), *labels)
    found.put(series.GPU_TEMPERATURE, sample.temperature_c, *labels)
    found.put(series.GPU_POWER, sample.power_w, *labels)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * _MIB


def _users(found: Page, scheduler: Scheduler) -> None:
    jobs: Counter[tuple[JobState, str]] = Counter()
    for (status, (_, name)), count in scheduler.state.census.by_user.items():
        jobs[status, name] += count
    for (user, state), count in sorted(_labelled(jobs).items()):
        found.put(series.USER_JOBS, count, user, state)
    gpus = scheduler.meters.gpus
    seconds = _summed(gpus.seconds(scheduler.now()))
    for user, held in sorted((dict.fromkeys(seconds, 0.0) | _summed(gpus.by_user)).items()):
        found.put(series.USER_GPUS, held, user)
    for user, used in sorted(seconds.items()):
        found.put(series.USER_GPU_SECONDS, used, user)
