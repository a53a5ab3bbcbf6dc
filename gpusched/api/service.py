"""The handlers' view of the running daemon: its scheduler, ways to wait for changes, facts about the daemon."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiohttp import web

from gpusched.access import hides, is_private, is_root, no_job, unknown
from gpusched.api.arrays import MOST_IDS, id_range, task_ids
from gpusched.api.rate_limits import RateLimits, too_many
from gpusched.api.render import JobContext, JobFacts
from gpusched.errors import NotFound, UsageError
from gpusched.lifecycle import arrays, pipelines
from gpusched.model.commands import Caller
from gpusched.model.job import Job, Request, Run, run_id
from gpusched.model.mentions import Knows
from gpusched.model.pipeline import pipeline_id
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey
from gpusched.model.states import JobState
from gpusched.model.units import parse_job_id, parse_pipeline_id, printable, split_ids
from gpusched.ports import JobFilter
from gpusched.scheduler.priority import Priority, class_key

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

    from gpusched.daemon.core import Scheduler
    from gpusched.daemon.facade import DaemonFacade

_Answer = TypeVar("_Answer")

MOST_QUESTIONS = 8
MOST_WATCHED = 200_000
"""Each takes a few hundred bytes of memory during the wait."""
_REST_S, _LONGEST_WAIT_S = 0.005, 0.1
"""Time without a request before each step of a renewal, and for how long requests may delay it."""


@dataclass(slots=True, eq=False)
class JobWatch:
    """One client's wait: for any change of some jobs, or for the ends of all of them."""

    left: set[int] | None
    """Jobs that have not ended; None if the client waits for any change."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def notice(self, job: Job) -> None:
        """Process a changed row of one of the jobs, or of its array."""
        if self.left is None:
            self.is_over.set()
            return
        if not job.state.is_final:
            return
        self.left.discard(job.id)
        if job.is_array:
            # Its tasks without a row have ended with it.
            self.left = {job_id for job_id in self.left if not job.id < job_id <= job.last_id}
        if not self.left:
            self.is_over.set()


class Door(Protocol):
    """Through which one process asks for others, as that of the web page does; an add-on's, see `api.door`."""

    def caller_of(self, request: web.Request, peer: Caller) -> Caller:
        """For whom a request counts. Raises: Forbidden, SignedOut, TooMany."""

    def turn(self, caller: Caller) -> AbstractContextManager[None]:
        """One request of a caller with a token, while it is being answered. Raises: TooMany."""


@dataclass(slots=True)
class ApiService:
    """The API's view of the daemon."""

    daemon: DaemonFacade
    pace: RateLimits = field(default_factory=lambda: RateLimits(time.monotonic))
    door: Door | None = None
    requests: dict[Request, Request] = field(default_factory=dict)
    """Interned resource requests: equal ones share one object."""
    watchers: dict[int, set[JobWatch]] = field(default_factory=dict)
    """Waiting clients, by job."""
    thinking: dict[int, int] = field(default_factory=dict)
    """Number of forecasts in progress, by user."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Number of jobs being waited for, by user; a job counts once per request."""
    thinker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "look-ahead"))
    """Computes slow answers one at a time; its thread starts with the first one."""
    asked_at: float = 0.0
    """When a request last came or was answered, on the monotonic clock."""

    @property
    def scheduler(self) -> Scheduler:
        return self.daemon.scheduler

    @property
    def settings(self) -> Settings:
        return self.scheduler.settings

    async def work_out(self, question: Callable[[], _Answer], caller: Caller) -> _Answer:
        """Compute an answer on another thread while the queue is served. The question must read immutable data only.

        Raises: TooMany if the caller has several in progress: those of all users are computed one at a time.
        """
        with self._counted(self.thinking, caller, 1, MOST_QUESTIONS, "forecasts"):
            began = time.monotonic()
            try:
                return await asyncio.get_running_loop().run_in_executor(self.thinker, question)
            finally:
                if (renewal := self.daemon.renewal()) is not None:
                    self._renew(renewal)
                if len(self.thinking) == 1:
                    self.pace.spent(caller, time.monotonic() - began, self.settings.limit)

    def _renew(self, step: Callable[[], bool]) -> None:
        """Take the steps of a renewal on the thread of answers, each behind questions and, for a while, requests."""
        last_at = time.monotonic() + _LONGEST_WAIT_S

        def take() -> None:
            nonlocal last_at
            now = time.monotonic()
            if now < last_at and now - self.asked_at < _REST_S:
                # Threads compute in turn: beside a step a request takes two to three times as long.
                time.sleep(_REST_S)
            elif step():
                return
            else:
                last_at = time.monotonic() + _LONGEST_WAIT_S
            self.thinker.submit(take)

        self.thinker.submit(take)

    @contextmanager
    def _counted(self, counts: dict[int, int], caller: Caller, number: int, most: int, what: str) -> Iterator[None]:
        uid = caller.uid
        if counts.get(uid, 0) + number > most and not is_root(caller):
            raise too_many(
                f"{caller.user} has {counts.get(uid, 0)} {what} open; the maximum is {most}", 1.0, "ask for fewer"
            )
        counts[uid] = counts.get(uid, 0) + number
        try:
            yield
        finally:
            counts[uid] -= number
            if not counts[uid]:
                del counts[uid]

    def announce(self, jobs: Mapping[int, Job]) -> None:
        """Wake clients that wait for any of these jobs; called after each commit with the changed rows."""
        if self.watchers:
            for job_id, job in jobs.items():
                for watch in self.watchers.get(job_id, ()):
                    watch.notice(job)

    async def changed(self, ids: Iterable[int], timeout_s: float, caller: Caller) -> None:
        """Block until the row of one of these jobs changes or the timeout expires.

        Raises: TooMany if the caller already waits for too many jobs.
        """
        await self._watch(JobWatch(None), list(ids), timeout_s, caller)

    async def ended(self, ids: Iterable[int], timeout_s: float, caller: Caller) -> None:
        """Block until all of these unfinished jobs have ended or the timeout expires.

        Raises: TooMany if the caller already waits for too many jobs.
        """
        left = set(ids)
        await self._watch(JobWatch(left), list(left), timeout_s, caller)

    async def _watch(self, watch: JobWatch, ids: list[int], timeout_s: float, caller: Caller) -> None:
        # A task without a row changes and ends with its array.
        watched = dict.fromkeys([*ids, *filter(None, map(self._array_of, ids))])
        with self._counted(self.waiting, caller, len(watched), MOST_WATCHED, "watched jobs"):
            for job_id in watched:
                self.watchers.setdefault(job_id, set()).add(watch)
            try:
                await asyncio.wait_for(watch.is_over.wait(), timeout_s)
            except asyncio.TimeoutError:
                pass  # the caller checks the states again anyway
            finally:
                for job_id in watched:
                    watches = self.watchers[job_id]
                    watches.remove(watch)
                    if not watches:
                        del self.watchers[job_id]

    def _array_of(self, job_id: int) -> int | None:
        job = self.scheduler.state.find(job_id)
        return None if job is None else job.array_id

    # --- looking jobs up --------------------------------------------------------------------------

    def job_id(self, text: str, caller: Caller) -> int:
        """The id of the one job that a client named. Raises: NotFound, UsageError."""
        found = self.named(text, caller)
        if len(found) != 1:
            raise UsageError(f"{printable(text, 40)!r} names more than one job", "name one, for example: 42_7")
        return found[0]

    def named(self, text: str, caller: Caller, *, unfinished: bool = False) -> list[int]:
        """Ids for a number, a task `42_7`, several `42_[3-5]`, `221-230`, a pipeline `p42`, or `@` for the last job.

        A pipeline means the jobs of its steps and their fallbacks, and an array in a range its tasks, too; with
        `unfinished`, a pipeline or a range means the unfinished ones if there are any.
        """
        if (pipeline := parse_pipeline_id(text)) is not None:
            jobs = [job for job in self.jobs_of_pipeline(pipeline) if not hides(caller, job, self.settings)]
            return pipelines.step_ids(pipeline, jobs, unfinished=unfinished)
        if text == "@" or text.startswith("@_"):
            text = f"{self.last_id(caller)}{text[1:]}"
        if "-" in text and (ids := id_range(text)) is not None:
            return self._in_range(ids, caller, unfinished=unfinished)

        def find(job_id: int) -> Job:
            if not is_private("jobs", caller, self.settings):
                return self.find(job_id)
            job = self.find_all([job_id]).get(job_id)
            if job is None:
                raise no_job(job_id, 0)
            if hides(caller, job, self.settings):
                raise unknown(str(job_id))
            return job

        tasks = task_ids(text, find)
        if tasks is not None:
            return tasks
        try:
            return [parse_job_id(text)]
        except ValueError as error:
            raise UsageError(str(error), "list the jobs with: gq") from None

    def last_id(self, caller: Caller) -> int:
        """Id of the caller's last job, of a task that of its array. Raises: NotFound."""
        last = self.scheduler.store.last_job_id(caller.uid)
        if last is None:
            raise NotFound(f"{caller.user} has not submitted a job yet", "submit one with: gsub script.sh")
        job = self.find(last)
        return last if job.array_id is None else job.array_id

    def _in_range(self, ids: range, caller: Caller, *, unfinished: bool) -> list[int]:
        """Ids of a range, whether there are such jobs or not. Those of tasks are left out after that of their array."""
        state = self.scheduler.state.jobs
        jobs = {job_id: state[job_id] for job_id in ids if job_id in state}
        ended = frozenset(job_id for job_id in ids if job_id not in jobs)
        jobs.update({job.id: job for job in self.scheduler.store.jobs(JobFilter(ids=ended))} if ended else {})
        found: dict[int, bool] = {}
        tasks_end = 0
        for job_id in ids:
            if job_id <= tasks_end:
                continue
            job = jobs.get(job_id)
            if job is None or hides(caller, job, self.settings):
                found[job_id] = True  # to be reported as missing
            else:
                found[job_id], tasks_end = not job.state.is_final, job.last_id
        only_open = unfinished and any(found.values())
        return [job_id for job_id, is_open in found.items() if is_open or not only_open]

    def job_ids(self, text: str, caller: Caller) -> list[int]:
        """Ids for a comma-separated list, without duplicates, in the given order."""
        return list(dict.fromkeys(job_id for ids in self.ids_by_word(split_ids(text), caller) for job_id in ids))

    def ids_by_word(self, words: Iterable[str], caller: Caller, *, unfinished: bool = False) -> list[list[int]]:
        """Ids for each word, see `named`. Raises: NotFound, UsageError, also for too many."""
        found, count = [], 0
        for word in words:
            found.append(self.named(word, caller, unfinished=unfinished))
            count += len(found[-1])
            if count > MOST_IDS and len(found[-1]) > 1:
                raise UsageError(
                    f"more than {MOST_IDS} jobs were named", "name whole arrays, filter by name, or split the request"
                )
        return found

    def not_needed(self, text: str) -> list[str]:
        """Jobs of the named pipelines that were skipped because other jobs succeeded."""
        numbers = [number for word in text.split(",") if (number := parse_pipeline_id(word)) is not None]
        found = []
        for number in numbers:
            jobs = self.jobs_of_pipeline(number)
            spared = pipelines.pipeline_status(jobs).not_needed
            found += [job.shown_id for name, job in pipelines.steps_of(jobs).items() if name in spared]
        return found

    def jobs_of_pipeline(self, number: int) -> list[Job]:
        """All jobs that a pipeline has ever had, by id."""
        jobs = self.scheduler.store.jobs(JobFilter(pipelines=frozenset({pipeline_id(number)})))
        return [self.scheduler.state.jobs.get(job.id, job) for job in jobs]

    def find(self, job_id: int) -> Job:
        """An active or ended job, or a task without its own row. Raises: NotFound."""
        found = self.find_all([job_id]).get(job_id)
        if found is None:
            raise self.no_job(job_id)
        return found

    def no_job(self, job_id: int) -> NotFound:
        """The error about a job that does not exist, or no longer exists."""
        return no_job(job_id, self.scheduler.state.next_id)

    def find_all(self, ids: Iterable[int]) -> dict[int, Job]:
        """The existing jobs among these, by id."""
        wanted = list(ids)
        state, store = self.scheduler.state, self.scheduler.store
        found = {job_id: job for job_id in wanted if (job := state.find(job_id)) is not None}
        ended = frozenset(job_id for job_id in wanted if job_id not in found)
        if ended:
            found.update({job.id: job for job in store.jobs(JobFilter(ids=ended))})
        array: Job | None = None
        for job_id in sorted(ended - found.keys()):
            # The array was abandoned before the task got a row, and others of it as well.
            if array is None or not array.id < job_id <= array.last_id:
                array = store.array_around(job_id)
            if array is not None and (number := arrays.task_number(array, job_id)) is not None:
                found[job_id] = arrays.task(array, number)
        return found

    def tasks_of(self, ids: Iterable[int]) -> dict[int, set[int]]:
        """The arrays among these jobs, with the ids of their unfinished tasks that have rows."""
        state = self.scheduler.state
        found: dict[int, set[int]] = {}
        for job_id, job in self.find_all(ids).items():
            if job.is_array:
                found[job_id] = {task.id for task in state.tasks_of(job)}
        return found

    def states_of_tasks(self, array: Job) -> dict[str, int]:
        """Number of tasks of an array in each state."""
        found: Counter[JobState] = Counter()
        for _, state, tasks, _ in self.scheduler.store.task_tallies([array.id]):
            found[state] += tasks
        for task in self.scheduler.state.tasks_of(array):
            found[task.state] += 1
        found[arrays.state_left(array)] += len(arrays.tasks_left(array))
        return {state.value: found[state] for state in JobState if found[state]}

    def runs_of(self, jobs: Iterable[Job]) -> dict[int, Run]:
        """The current or last run of each job that has one."""
        state = self.scheduler.state
        runs: dict[int, Run] = {}
        stored = []
        for job in jobs:
            if not job.run:
                continue
            handle = run_id(job.id, job.run)
            run = state.open_runs.get(handle) or state.releasing.get(handle)
            if run is not None:
                runs[job.id] = run
            else:
                stored.append(job.id)
        if stored:
            last = {run.job_id: run for run in self.scheduler.store.runs(stored)}
            runs.update(last)
        return runs

    async def refresh_progress(self, jobs: Iterable[Job]) -> None:
        """Read the progress of the running jobs among these."""
        await self.daemon.refresh_progress([job for job in jobs if job.state in MOVING])

    def facts_of(self, jobs: Iterable[Job], knows: Knows | None = None) -> JobFacts:
        """A function that returns the context of each of these jobs.

        Args: knows: render reasons for a viewer, which takes less time than in the whole answer.
        """
        jobs = list(jobs)
        runs = self.runs_of(jobs)
        failed = self.find_all({job.spec.fallback_of for job in jobs if job.spec.fallback_of is not None})
        scheduler, settings, node = self.scheduler, self.settings, self.scheduler.head.name
        ranking, state = scheduler.planner().state.ranking, scheduler.state
        reason_of = scheduler.answers.reasons(knows)
        of_class: dict[int, tuple[ClassKey, Callable[[float], Priority]]] = {}
        priorities: dict[tuple[int, float], tuple[float, dict[str, float]]] = {}
        last: tuple[Job | None, tuple[float, dict[str, float]]] = None, (0.0, {})

        def priority(job: Job) -> tuple[float, dict[str, float]]:
            nonlocal last
            if job is not last[0]:
                # Asked for the sum and for its parts.
                last = job, look_up(job)
            return last[1]

        def look_up(job: Job) -> tuple[float, dict[str, float]]:
            key = state.class_of(job.id)
            # By identity, since hashing a class takes as long as the rest; an entry of `of_class` keeps it alive.
            answer = priorities.get((id(key), job.queued_at))
            if answer is not None:
                return answer
            if key is None:
                found = ranking.priority(class_key(job), job.queued_at)
                return found.total, dict(found.parts)
            if id(key) not in of_class:
                of_class[id(key)] = key, ranking.priorities(key)
            found = of_class[id(key)][1](job.queued_at)
            answer = priorities[id(key), job.queued_at] = found.total, dict(found.parts)
            return answer

        def context(job: Job) -> JobContext:
            run = runs.get(job.id)
            reason = None if job.state.is_final else reason_of(job)
            found = JobContext(settings, node, run, reason, priority, name_of_run=scheduler.answers.name_of_run)
            if run is not None and run.outcome is None:
                found.findings = self.daemon.findings(run)
            if job.state in MOVING:
                found.progress = self.daemon.progress_of(job)
            if job.spec.fallback_of in failed:
                found.fallback_of = failed[job.spec.fallback_of].shown_id
            return found

        return context


MOVING = frozenset({JobState.RUNNING, JobState.SUSPENDED})
"""States in which a job can report progress."""

SERVICE: web.AppKey[ApiService] = web.AppKey("service", ApiService)
DOCUMENT: web.AppKey[_lru_cache_wrapper[str]] = web.AppKey("document")
"""Makes the OpenAPI document, as JSON, from the table of routes, which itself names the handler that serves it.

It is made when first asked for, since it takes as long as half of the other steps of a daemon's start.
"""


def service_of(request: web.Request) -> ApiService:
    return request.app[SERVICE]
