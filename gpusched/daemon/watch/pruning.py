"""Prunes jobs that ended long ago, a few at a time, in idle moments.

A round visits the ended jobs, oldest first, then drops unused scripts and environments and returns space to
the disk. Each step is one transaction between two ticks, when the memory matches the table. If the daemon is
killed meanwhile, nothing is lost: the next round finds the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from logging import getLogger

from gpusched.daemon.tick import Ticker
from gpusched.errors import GpuschedError
from gpusched.model.job import Job
from gpusched.model.units import parse_pipeline_id
from gpusched.ports import JobFilter
from gpusched.ports.tables import PIPELINES


def may_go(
    job: Job, before: float, arrays: Collection[int], pipelines: Collection[str], is_needed: Callable[[Job], bool]
) -> bool:
    """Whether a job may be pruned now.

    Args: before: instant before which it must have ended. arrays, pipelines: existing ones. is_needed: whether
    anything unfinished needs the job.
    """
    if job.end_at is None or job.end_at >= before:
        return False
    if job.array_id in arrays or job.spec.pipeline in pipelines:
        return False
    return not is_needed(job)


def pipeline_may_go(ends: Iterable[tuple[int, float | None]], before: float, is_named: Callable[[int], bool]) -> bool:
    """Whether a pipeline may be pruned: all its jobs ended before an instant, and no job waits for one."""
    return all(end_at is not None and end_at < before and not is_named(job_id) for job_id, end_at in ends)


log = getLogger("gpusched.daemon")
ROUND_S = 3600.0
"""Time from the end of a round to the start of the next."""
SWEEP_S = 86400.0
"""Time between sweeps: finding the scripts still in use takes a walk over the whole table."""
BITE_S = 0.002
"""Target duration of one step; its size adapts to the duration of the last one."""
_DAY_S = 86400.0
_LEAST, _MOST = 16, 512
_WALKED_AT_ONCE = 8
"""Ratio of the speeds of reading and deleting rows."""
_FIRST = (float("-inf"), 0)


class Pruner:
    """Prunes the history step by step until nothing is left to prune, then rests.

    Args: drop_folder: removes the checkpoint folder of a pruned job.
    """

    def __init__(self, ticker: Ticker, drop_folder: Callable[[Job], None]) -> None:
        self.pruned = 0
        """Jobs pruned since the daemon started."""
        self._ticker, self._scheduler = ticker, ticker.scheduler
        self._drop_folder = drop_folder
        self._size = _LEAST
        self._round: Iterator[None] | None = None
        self._rest_until = 0.0
        self._sweep_after = 0.0
        self._has_left_payloads = False

    def bite(self) -> bool:
        """Do one step if the scheduler is quiet; return whether to call again soon."""
        began = time.perf_counter()
        scheduler = self._scheduler
        if scheduler.settings.history.keep_days <= 0:
            self._round = None
            return False
        if not self._ticker.is_quiet or (self._round is None and time.monotonic() < self._rest_until):
            return False
        if self._round is None:
            self._round = self._steps()
        try:
            next(self._round)
        except (StopIteration, GpuschedError) as stop:
            if isinstance(stop, GpuschedError):
                log.error("history: %s", stop.message)
            self._round = None
            self._rest_until = time.monotonic() + ROUND_S
            return False
        took_s = time.perf_counter() - began
        if took_s > BITE_S:
            self._size = max(_LEAST, self._size // 2)
        elif took_s < BITE_S / 2:
            self._size = min(_MOST, self._size * 2)
        return True

    def _steps(self) -> Generator[None, None, None]:
        before = self.pruned
        # Members of an array or a pipeline may be pruned only after it: walk again whenever one was pruned.
        while (yield from self._walk()):
            pass
        if self.pruned > before:
            self._has_left_payloads = True
            log.info("history: pruned %d old jobs", self.pruned - before)
        if self._has_left_payloads and time.monotonic() >= self._sweep_after:
            yield from self._sweep()
            self._has_left_payloads = False
            self._sweep_after = time.monotonic() + SWEEP_S
        while self._scheduler.store.give_back(self._size):
            yield

    def _before(self) -> float:
        settings = self._scheduler.settings
        keep_s = max(settings.history.keep_days * _DAY_S, settings.life.checkpoint_keep_s)
        return self._scheduler.now() - keep_s

    # --- jobs -------------------------------------------------------------------------------------

    def _walk(self) -> Generator[None, None, bool]:
        """Visit every job that is old enough; return whether an array or a pipeline was pruned."""
        store = self._scheduler.store
        after, opened = _FIRST, False
        kept: set[str] = set()
        while jobs := store.ended_jobs(self._before(), after, self._size):
            after = (jobs[-1].end_at or 0.0, jobs[-1].id)
            named = {job.spec.pipeline for job in jobs if job.spec.pipeline}
            there = {one.id: one.number for one in store.find(PIPELINES, _numbers(named)).values()}
            going = {name for name in there if name not in kept and self._may_go_whole(name)}
            kept.update(there.keys() - going)
            gone = self._may_go(jobs, frozenset(there) - going)
            for job in gone:
                self._drop_folder(job)
            if gone or going:
                store.prune([job.id for job in gone], [there[name] for name in going])
                self.pruned += len(gone)
                opened = opened or bool(going) or any(job.is_array for job in gone)
            yield
        return opened

    def _may_go(self, jobs: list[Job], pipelines: frozenset[str]) -> list[Job]:
        scheduler = self._scheduler
        ids = frozenset(job.array_id for job in jobs if job.array_id is not None)
        arrays = {job.id for job in scheduler.store.jobs(JobFilter(ids=ids))} if ids else set()

        def is_needed(job: Job) -> bool:
            return scheduler.state.is_needed(job) or scheduler.alerts.mentions(job.id)

        return [job for job in jobs if may_go(job, self._before(), arrays, pipelines, is_needed)]

    def _may_go_whole(self, pipeline: str) -> bool:
        ends = self._scheduler.store.pipeline_ends(pipeline)
        return pipeline_may_go(ends, self._before(), self._scheduler.state.dependents.is_named)

    # --- scripts and environments -----------------------------------------------------------------

    def _sweep(self) -> Generator[None, None, None]:
        """Drop unused payloads. A restart forgets that this is due; the next round that prunes a job sweeps again."""
        store = self._scheduler.store
        used: set[str] = set()
        last = 0
        while (found := store.used_payloads(last, self._size * _WALKED_AT_ONCE))[0] is not None:
            last, shas = found[0], found[1]
            used |= shas
            yield
        after = ""
        while stored := store.payload_shas(after, self._size):
            # Include new jobs: their ids are higher, except for tasks, which share the payloads of their array.
            while (found := store.used_payloads(last, _MOST))[0] is not None:
                last, shas = found[0], found[1]
                used |= shas
            after = stored[-1]
            if unused := [sha for sha in stored if sha not in used]:
                store.drop_payloads(unused)
            yield


def _numbers(pipelines: set[str]) -> list[int]:
    return [number for name in pipelines if (number := parse_pipeline_id(name)) is not None]
