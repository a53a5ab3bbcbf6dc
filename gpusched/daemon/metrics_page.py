"""The page behind `gpusched metrics`: what the daemon has in memory, as a page of numbers.

No query, and no walk over waiting jobs: a look costs the same with ten jobs in the queue and with a hundred thousand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gpusched.daemon.meters import MOST_QUEUES, OTHERS
from gpusched.daemon.tick import Scheduler
from gpusched.model import series
from gpusched.model.cluster import GpuState, GpuView
from gpusched.model.history import part_of_card
from gpusched.model.job import GpuShare
from gpusched.model.metrics import Page, label
from gpusched.model.states import FINAL_STATES, JobState
from gpusched.model.units import gpu_label
from gpusched.scheduler.draft import Layout

_MIB = 1 << 20
_GPU_STATES = tuple(word for name, word in vars(GpuState).items() if name.isupper())


def page(scheduler: Scheduler, facts: Mapping[str, Any]) -> Page:
    """All numbers of this instant. `facts` gives the daemon's version, start and database."""
    found = Page()
    found.put(series.UP, 1)
    _daemon(found, scheduler, facts)
    _queue(found, scheduler)
    _node(found, scheduler)
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
    world, meters = scheduler.world, scheduler.meters
    jobs = _labelled(world.census.by_queue)
    # Those of the settings always have their series: what comes and goes cannot be told from what is nought.
    known = {label(name) for name in scheduler.settings.queue} or {label(scheduler.settings.default.queue)}
    named = _largest(jobs) | known
    folded = _folded(jobs, named)
    for queue in sorted(known | {queue for queue, _ in folded}):
        for state in JobState:
            if state not in FINAL_STATES:
                found.put(series.JOBS, folded[queue, state], queue, state)
    for reason, count in sorted(world.waiting_reasons(scheduler.plan.reasons).items()):
        found.put(series.REASONS, count, reason)
    found.put(series.SUBMITTED, meters.submitted)
    for state in JobState:
        if state in FINAL_STATES:
            found.put(series.FINISHED, meters.finished[state], state)
    for queue, waits in meters.wait_s.items():
        found.put(series.WAIT, waits, queue)
    for queue, gpus in sorted((dict.fromkeys(known, 0.0) | _summed(meters.gpus.by_queue, named)).items()):
        found.put(series.QUEUE_GPUS, gpus, queue)


def _labelled(counted: Mapping[tuple[JobState, str], int]) -> Counter[tuple[str, JobState]]:
    """By the name as it can be a label; two names may come to the same."""
    found: Counter[tuple[str, JobState]] = Counter()
    for (state, name), count in counted.items():
        found[label(name), state] += count
    return found


def _largest(jobs: Mapping[tuple[str, JobState], int]) -> frozenset[str]:
    """The queues that have series of their own: those with the most jobs."""
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
    """By the name as it can be a label; queues that are not named go together."""
    total: dict[str, float] = {}
    for name, amount in gpus.items():
        mark = label(name)
        if named is not None and mark not in named:
            mark = OTHERS
        total[mark] = total.get(mark, 0.0) + amount
    return total


def _node(found: Page, scheduler: Scheduler) -> None:
    reading = scheduler.reading
    holds = scheduler.world.holds.values()
    (node,) = scheduler.nodes(scheduler.now())
    found.put(series.NODE_DRAINED, float(node.why_not is not None), node.name)
    found.put(series.NODE_CPUS, node.cpus, node.name)
    found.put(series.NODE_CPUS_BOOKED, sum(held.cpus for held in holds), node.name)
    found.put(series.NODE_MEMORY, node.mem_mib * _MIB, node.name)
    booked_mib = sum(map(Layout((node,), scheduler.settings).node_mem_mib, holds))
    found.put(series.NODE_MEMORY_BOOKED, booked_mib * _MIB, node.name)
    if reading is not None:
        found.put(series.GPU_READING, reading.at, node.name)
        found.put(series.GPU_DRIVER, float(reading.error is None), node.name)


def _gpus(found: Page, scheduler: Scheduler) -> None:
    now = scheduler.now()
    shares: dict[str, list[GpuShare]] = {}
    for held in scheduler.world.holds.values():
        for share in held.gpus:
            shares.setdefault(share.uuid, []).append(share)
    (node,) = scheduler.nodes(now)
    for view in node.gpus:
        _gpu(found, scheduler, (node.name, gpu_label(view.index), view.uuid), view, shares.get(view.uuid, []))


def _gpu(
    found: Page, scheduler: Scheduler, labels: tuple[str, str, str], view: GpuView, shares: Iterable[GpuShare]
) -> None:
    shares = list(shares)
    now, tracker = scheduler.now(), scheduler.tracker
    status = tracker.status(view.uuid, shares, now)
    found.put(series.GPU, 1, *labels, view.name)
    for state in _GPU_STATES:
        found.put(series.GPU_STATE, float(state == status.state), *labels, state)
    found.put(series.GPU_BOOKED, min(1.0, sum(part_of_card(share, view.vram_total_mib) for share in shares)), *labels)
    found.put(series.GPU_RUNS, len(shares), *labels)
    found.put(series.GPU_MEMORY, _bytes(view.vram_total_mib), *labels)
    sample = status.sample
    if sample is None or not tracker.is_measured(view.uuid, now):
        # What was true before the card stopped answering is not true now.
        return
    found.put(series.GPU_UTILISATION, sample.utilisation, *labels)
    found.put(series.GPU_MEMORY_USED, _bytes(sample.vram_used_mib), *labels)
    found.put(series.GPU_MEMORY_FOREIGN, _bytes(view.foreign_mib), *labels)
    found.put(series.GPU_TEMPERATURE, sample.temperature_c, *labels)
    found.put(series.GPU_POWER, sample.power_w, *labels)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * _MIB


def _users(found: Page, scheduler: Scheduler) -> None:
    for (user, state), count in sorted(_labelled(scheduler.world.census.by_user).items()):
        found.put(series.USER_JOBS, count, user, state)
    gpus = scheduler.meters.gpus
    seconds = _summed(gpus.seconds(scheduler.now()))
    for user, held in sorted((dict.fromkeys(seconds, 0.0) | _summed(gpus.by_user)).items()):
        found.put(series.USER_GPUS, held, user)
    for user, used in sorted(seconds.items()):
        found.put(series.USER_GPU_SECONDS, used, user)
