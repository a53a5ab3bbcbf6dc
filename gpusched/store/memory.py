"""The job table in memory: keeps the promises of `ports.Store` without a file, for simulations and tests.

Values are frozen, so nothing is copied. Nothing survives the object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from gpusched.errors import BrokenInvariant, GpuschedError
from gpusched.model.alerts import Alert
from gpusched.model.batch import Batch
from gpusched.model.cluster import Clearance, Drainer, GpuReading
from gpusched.model.history import AccountUse, UsageSum, cards_in, group_of, models_in, seconds_in
from gpusched.model.job import Job, JobEvent, Run, RunMeasures, run_id
from gpusched.model.mig import CardLayout
from gpusched.model.pipeline import Pipeline
from gpusched.model.snapshot import CalendarEntry, Estimate, Placement, Usage
from gpusched.model.spec import NICE_MAX, NICE_MIN
from gpusched.model.states import JobState, RunState
from gpusched.model.step import JobStep
from gpusched.model.table_settings import Key, TableSetting
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter

K = TypeVar("K")
V = TypeVar("V")


class MemoryStore:
    """A table that lives as long as the object; see `ports.Store` for its methods."""

    def __init__(self) -> None:
        self.inventory: dict[str, GpuReading] = {}
        """What `save_gpus` was given last, by node."""
        self._jobs: dict[int, Job] = {}
        self._active: dict[int, Job] = {}
        self._runs: dict[int, dict[int, Run]] = {}
        self._open: dict[str, Run] = {}
        self._events: dict[int, list[JobEvent]] = {}
        self._payloads: dict[str, bytes] = {}
        self._drains: dict[str, str] = {}
        self._drainers: dict[str, Drainer] = {}
        self._mig_layouts: dict[str, CardLayout] = {}
        self._clearances: dict[str, Clearance] = {}
        self._fences: dict[int, float] = {}
        self._kept_places: dict[int, Placement] = {}
        self._usage: dict[tuple[str, str], Usage] = {}
        self._reservations: dict[str, CalendarEntry] = {}
        self._table_settings: dict[Key, TableSetting] = {}
        self._estimates: dict[int, Estimate] = {}
        self._pipelines: dict[int, Pipeline] = {}
        self._batches: dict[int, Batch] = {}
        self._alerts: dict[str, Alert] = {}
        self._steps: dict[int, dict[tuple[int, int], JobStep]] = {}
        self._open_steps: dict[tuple[int, int, int], JobStep] = {}
        self._next_id = 1
        self._next_pipeline = 1

    def load_active(self) -> tuple[list[Job], list[Run]]:
        """All jobs that are not final, and all runs that are not ENDED, by id."""
        runs = sorted(self._open.values(), key=lambda run: (run.job_id, run.number))
        return [self._active[job_id] for job_id in sorted(self._active)], runs

    def load_drains(self) -> dict[str, str]:
        """Drained nodes and GPUs with their messages."""
        return dict(sorted(self._drains.items()))

    def load_drainers(self) -> dict[str, Drainer]:
        """Who drained nodes and GPUs, of those that a user drained."""
        return dict(sorted(self._drainers.items()))

    def load_mig_layouts(self) -> list[CardLayout]:
        """MIG layouts that were set for cards, by UUID."""
        return [self._mig_layouts[uuid] for uuid in sorted(self._mig_layouts)]

    def load_clearances(self) -> list[Clearance]:
        """Newest clearance of each GPU, by UUID."""
        return [self._clearances[uuid] for uuid in sorted(self._clearances)]

    def load_fences(self) -> dict[int, float]:
        """Start of the fence of each pending job that has had a reservation, by job: nothing passes it afterwards."""
        return dict(sorted(self._fences.items()))

    def load_kept_places(self) -> dict[int, Placement]:
        """Last reserved placement of each pending job past its fence, by job."""
        return dict(sorted(self._kept_places.items()))

    def load_table_settings(self) -> dict[Key, TableSetting]:
        """Dated limits, credits and the like, by kind and name."""
        return dict(sorted(self._table_settings.items()))

    def load_usage(self) -> list[Usage]:
        """Decayed usage, by account and user."""
        return [self._usage[key] for key in sorted(self._usage)]

    def load_reservations(self) -> list[CalendarEntry]:
        """The calendar, by name."""
        return [self._reservations[name] for name in sorted(self._reservations)]

    def load_estimates(self, limit: int) -> list[Estimate]:
        """The newest `limit` estimates by job id, newest first."""
        return [self._estimates[job_id] for job_id in sorted(self._estimates, reverse=True)[:limit]]

    def load_alerts(self) -> list[Alert]:
        """The outbox, oldest first."""
        return sorted(self._alerts.values(), key=lambda alert: (alert.at, alert.key))

    def load_batches(self) -> list[Batch]:
        """Batches with jobs to be made, by first id."""
        return [batch for _, batch in sorted(self._batches.items()) if batch.left]

    def load_steps(self) -> list[JobStep]:
        """Every step that has not ended, by job, run and number."""
        return [self._open_steps[key] for key in sorted(self._open_steps)]

    def next_job_id(self) -> int:
        return self._next_id

    def next_pipeline(self) -> int:
        return self._next_pipeline

    def pipelines(self, numbers: Iterable[int]) -> list[Pipeline]:
        """The existing ones of these pipelines, by number."""
        return [self._pipelines[number] for number in sorted(set(numbers) & self._pipelines.keys())]

    def commit(self, changes: Changes) -> None:
        """Record all changes or none. Raises: BrokenInvariant where the table on disk would refuse them."""
        problem = self._refusal(changes)
        if problem:
            raise BrokenInvariant(f"the job table refused a record: {problem}")
        for job in changes.jobs.values():
            self._jobs[job.id] = job
            if job.state.is_final:
                self._active.pop(job.id, None)
            else:
                self._active[job.id] = job
            self._next_id = max(self._next_id, job.last_id + 1)
        for run in changes.runs.values():
            self._runs.setdefault(run.job_id, {})[run.number] = run
            if run.state is RunState.ENDED:
                self._open.pop(run.id, None)
            else:
                self._open[run.id] = run
        for step in changes.steps.values():
            self._steps.setdefault(step.job_id, {})[step.run, step.number] = step
            if step.is_open:
                self._open_steps[step.id] = step
            else:
                self._open_steps.pop(step.id, None)
        for event in changes.events:
            self._events.setdefault(event.job_id, []).append(event)
        for sha, body in changes.payloads.items():
            self._payloads.setdefault(sha, body)
        _put_or_drop(self._drains, changes.drains)
        _put_or_drop(self._drainers, changes.drainers)
        _put_or_drop(self._mig_layouts, changes.mig_layouts)
        _put_or_drop(self._fences, changes.fences)
        _put_or_drop(self._kept_places, changes.kept_places)
        self._clearances.update(changes.clearances)
        self._usage.update(changes.usage)
        _put_or_drop(self._reservations, changes.reservations)
        _put_or_drop(self._table_settings, changes.table_settings)
        self._estimates.update(changes.estimates)
        self._pipelines.update(changes.pipelines)
        self._next_pipeline = max(self._next_pipeline, max(changes.pipelines, default=0) + 1)
        _put_or_drop(self._batches, changes.batches)
        for batch in filter(None, changes.batches.values()):
            self._next_id = max(self._next_id, batch.last_id + 1)
        _put_or_drop(self._alerts, changes.alerts)

    def _refusal(self, changes: Changes) -> str | None:
        """What the CHECK and FOREIGN KEY clauses of the table on disk would reject."""
        for job in changes.jobs.values():
            if job.id < 1 or not job.spec.name or not NICE_MIN <= job.spec.nice <= NICE_MAX:
                return f"job {job.id} named {job.spec.name!r} with nice {job.spec.nice}"
            if job.state.is_final != (job.end_at is not None):
                return f"job {job.id} is {job.state} and its end is {job.end_at}"
            if job.hold not in (None, "user", "admin") or min(job.run, job.failures, job.requeues) < 0:
                return f"job {job.id} is held by {job.hold!r}, or counts below zero"
        for run in changes.runs.values():
            if run.job_id not in self._jobs and run.job_id not in changes.jobs:
                return f"run {run.id} is of no job"
            ended = run.state is RunState.ENDED
            if run.number < 1 or ended != (run.outcome is not None) or ended != (run.end_at is not None):
                return f"run {run.id} is {run.state}, its outcome {run.outcome}, its end {run.end_at}"
            if run.outcome is not None and not run.outcome.is_final:
                return f"run {run.id} ended as {run.outcome}"
        for step in changes.steps.values():
            before = self._steps.get(step.job_id, {}).get((step.run, step.number))
            if step.run not in self._runs.get(step.job_id, {}) and run_id(step.job_id, step.run) not in changes.runs:
                return f"step {step.number} of run {step.job_id}.{step.run}, which is none"
            if step.number < 0 or step.tasks < 1 or step.is_open != (step.state is JobState.RUNNING):
                return f"step {step.id} is {step.state}, its end {step.end_at}"
            if before is not None and not before.is_open:
                return f"the end of step {step.id}, which is final"
        for event in changes.events:
            if event.job_id not in self._jobs and event.job_id not in changes.jobs:
                return f"a line of the story of job {event.job_id}, which is none"
        for pipeline in changes.pipelines.values():
            if pipeline.number in self._pipelines or pipeline.number < 1 or not pipeline.name:
                return f"pipeline {pipeline.number} named {pipeline.name!r}"
        for job_id in changes.estimates:
            if job_id not in self._jobs and job_id not in changes.jobs:
                return f"an estimate of job {job_id}, which is none"
        for alert in changes.alerts.values():
            if alert is None:
                continue
            if alert.job_id is not None and alert.job_id not in self._jobs and alert.job_id not in changes.jobs:
                return f"an alert about job {alert.job_id}, which is none"
            if not alert.key or alert.state not in ("armed", "waiting", "told"):
                return f"an alert {alert.key!r} that is {alert.state}"
        return None

    def lost(self) -> GpuschedError | None:
        """None: there is no file to lose."""
        return None

    def changed(self) -> bool:
        """False: there is no other writer."""
        return False

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Matching jobs of the whole table, including final ones, by ascending id."""
        found = [
            job
            for job in self._jobs.values()
            if (not (wanted.ids or wanted.arrays) or job.id in wanted.ids or job.array_id in wanted.arrays)
            and not (wanted.leaves_out_arrays and job.tasks_left == "")
            and (not wanted.states or job.state in wanted.states)
            and (not wanted.users or job.user in wanted.users)
            and (not wanted.names or job.is_named(wanted.names, self._jobs))
            and (not wanted.queues or job.spec.queue in wanted.queues)
            and (not wanted.pipelines or job.spec.pipeline in wanted.pipelines)
            and (wanted.since is None or job.end_at is None or job.end_at >= wanted.since)
            and (wanted.before is None or job.id < wanted.before)
        ]
        found.sort(key=lambda job: job.id)
        return found if wanted.limit is None else found[max(0, len(found) - max(0, wanted.limit)) :]

    def runs(self, job_ids: Iterable[int]) -> list[Run]:
        """Every run of these jobs, by job and number."""
        return [
            self._runs[job_id][number]
            for job_id in sorted(set(job_ids) & self._runs.keys())
            for number in sorted(self._runs[job_id])
        ]

    def steps(self, job_ids: Iterable[int]) -> list[JobStep]:
        """Every step of these jobs, by job, run and number."""
        found = (self._steps.get(job_id, {}) for job_id in sorted(set(job_ids)))
        return [steps[key] for steps in found for key in sorted(steps)]

    def next_step(self, job_id: int, run: int) -> int:
        """One above the highest number of a step of this run."""
        return max((number for of_run, number in self._steps.get(job_id, ()) if of_run == run), default=-1) + 1

    def events(self, job_id: int) -> list[JobEvent]:
        """The job's history, oldest first."""
        return list(self._events.get(job_id, ()))

    def task_tallies(self, array_ids: Iterable[int]) -> list[tuple[int, JobState, int, int | None]]:
        """Ended tasks of these arrays."""
        wanted = set(array_ids)
        kinds: dict[tuple[int, JobState], list[int | None]] = {}
        for job in self._jobs.values():
            if job.array_id in wanted and job.state.is_final:
                kinds.setdefault((job.array_id, job.state), []).append(job.exit_code)
        return [
            (array_id, state, len(codes), max((code for code in codes if code is not None), default=None))
            for (array_id, state), codes in sorted(kinds.items())
        ]

    def array_around(self, job_id: int) -> Job | None:
        """The array whose task this id is."""
        before = [job for job in self._jobs.values() if job.is_array and job.id < job_id]
        array = max(before, key=lambda job: job.id, default=None)
        return array if array is not None and job_id <= array.last_id else None

    def known_payloads(self, shas: Iterable[str]) -> set[str]:
        """The stored ones of these payloads."""
        return {sha for sha in shas if sha in self._payloads}

    def payload_bytes_of(self, uid: int) -> int:
        """Total bytes of a user's scripts and environments."""
        launches = [job.spec.launch for job in self._jobs.values() if job.uid == uid]
        shas = {sha for launch in launches for sha in (launch.script_sha, launch.env_sha)}
        return sum(len(body) for sha, body in self._payloads.items() if sha in shas)

    def payload(self, sha: str) -> bytes:
        """A stored script or environment. Raises: KeyError."""
        return self._payloads[sha]

    def usage_sums(self, by: str, wanted: JobFilter, since: float, now: float) -> list[UsageSum]:
        """Resources held by the runs of these jobs between two instants."""
        sizes = self._card_sizes()
        sums: dict[str, UsageSum] = {}
        for job in self.jobs(replace(wanted, since=since, limit=None)):
            inside = [
                run
                for run in self._runs.get(job.id, {}).values()
                if run.start_at is not None and run.start_at < now and (run.end_at is None or run.end_at >= since)
            ]
            if inside:
                name = group_of(job, by)
                total = sums.setdefault(name, UsageSum(name))
                total.jobs += 1
                for run in inside:
                    self._add(total, job, run, since, now, sizes)
        return [sums[name] for name in sorted(sums)]

    def account_uses(self, since: float, until: float, now: float, user: str | None = None) -> list[AccountUse]:
        """What runs held and used within a period, by account and user."""
        cards = self._cards()
        found: dict[tuple[str, str], AccountUse] = {}
        for job in self.jobs(JobFilter(since=since, users=frozenset(() if user is None else (user,)))):
            inside = [run for run in self._runs.get(job.id, {}).values() if _is_inside(run, since, until)]
            if not inside:
                continue
            mark = job.spec.account, job.user
            total = found.setdefault(mark, AccountUse(*mark))
            total.jobs += 1
            for run in inside:
                assert run.start_at is not None
                end_at = now if run.end_at is None else run.end_at
                whole_s = end_at - run.start_at
                still_s = run.suspended_s
                if run.end_at is None and job.suspended_at is not None:
                    still_s += max(0.0, now - job.suspended_at)
                part = max(0.0, min(end_at, until) - max(run.start_at, since)) / whole_s if whole_s > 0 else 0.0
                seconds = part * max(0.0, whole_s - still_s)
                held = {model: amount * seconds for model, amount in models_in(run.gpus, cards).items()}
                total.runs += 1
                total.open_runs += run.end_at is None
                total.cpu_s += seconds * run.cpus
                total.add_cards(held, is_free=run.is_free, is_filler=run.is_filler)
                busy = run.mean_utilisation
                measured = run.measured or RunMeasures()
                total.add_known(
                    busy_gpu_s=None if busy is None or not held else sum(held.values()) * busy,
                    busy_cpu_s=None if run.cpu_s is None else run.cpu_s * part,
                    energy_j=None if run.energy_j is None else run.energy_j * part,
                    cost=None if measured.cost is None else measured.cost * part,
                    grams=None if measured.grams is None else measured.grams * part,
                )
        return [found[mark] for mark in sorted(found)]

    def budget_sums(self, since: float, now: float) -> dict[tuple[str, str, str], float]:
        """GPU-seconds of ended runs that cost something, by account, user and model of card."""
        cards = self._cards()
        sums: dict[tuple[str, str, str], float] = {}
        for job in self.jobs(JobFilter(since=since)):
            for run in self._runs.get(job.id, {}).values():
                if run.start_at is not None and run.end_at is not None and run.end_at >= since and not run.is_free:
                    for model, amount in models_in(run.gpus, cards).items():
                        mark = job.spec.account, job.user, model
                        sums[mark] = sums.get(mark, 0.0) + seconds_in(run, since, now) * amount
        return sums

    def _cards(self) -> dict[str, tuple[str, int | None]]:
        """Model and VRAM of each card, by UUID."""
        return {gpu.uuid: (gpu.name, gpu.vram_total_mib) for one in self.inventory.values() for gpu in one.gpus}

    def _card_sizes(self) -> dict[str, int]:
        return {
            gpu.uuid: gpu.vram_total_mib
            for reading in self.inventory.values()
            for gpu in reading.gpus
            if gpu.vram_total_mib is not None
        }

    def _add(self, total: UsageSum, job: Job, run: Run, since: float, now: float, sizes: Mapping[str, int]) -> None:
        seconds = seconds_in(run, since, now, job.suspended_at)
        total.runs += 1
        total.gpu_s += seconds * cards_in(run.gpus, sizes)
        total.cpu_s += seconds * run.cpus
        total.mem_mib_s += seconds * run.mem_mib
        end_at = now if run.end_at is None else run.end_at
        if run.start_at is not None and end_at > run.start_at:
            inside = max(0.0, min(end_at, now) - max(run.start_at, since)) / (end_at - run.start_at)
            cost, grams = (None, None) if run.measured is None else (run.measured.cost, run.measured.grams)
            total.add_energy(*(amount and amount * inside for amount in (run.energy_j, cost, grams)))
        if run.number == 1 and run.start_at is not None and run.start_at >= since:
            total.started += 1
            total.wait_s += max(0.0, run.start_at - job.queued_at)

    def last_job_id(self, uid: int) -> int | None:
        """Newest job of this user."""
        return max((job.id for job in self._jobs.values() if job.uid == uid), default=None)

    def job_of_key(self, uid: int, key: str) -> Job | None:
        """Newest job that this user submitted with this key."""
        found = (job for job in self._jobs.values() if (job.uid, job.spec.key, job.array_id) == (uid, key, None))
        return max(found, key=lambda job: job.id, default=None)

    def batch_of_key(self, uid: int, key: str) -> Batch | None:
        """Newest batch that this user submitted with this key."""
        found = (batch for batch in self._batches.values() if (batch.uid, batch.key) == (uid, key))
        return max(found, key=lambda batch: batch.first_id, default=None)

    def states_of_batch(self, batch: Batch) -> set[JobState]:
        """States of its jobs that are in the table."""
        ids = range(batch.first_id, batch.last_id + 1)
        return {self._jobs[job_id].state for job_id in ids if job_id in self._jobs}

    # --- letting go -------------------------------------------------------------------------------

    def ended_jobs(self, before: float, after: tuple[float, int], limit: int) -> list[Job]:
        """The first `limit` jobs that ended before an instant, by end and id, following this end and id."""
        ended = ((job.end_at, job.id, job) for job in self._jobs.values() if job.end_at is not None)
        found = sorted(one for one in ended if one[0] < before and one[:2] > after)
        return [job for _, _, job in found[:limit]]

    def pipeline_ends(self, pipeline: str) -> list[tuple[int, float | None]]:
        """Every job of a pipeline with its end, by id."""
        return [(job.id, job.end_at) for job in self.jobs(JobFilter(pipelines=frozenset({pipeline})))]

    def prune(self, jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        """Delete these jobs with all their records, and these pipelines."""
        for job_id in jobs:
            self._jobs.pop(job_id, None)
            self._active.pop(job_id, None)
            self._events.pop(job_id, None)
            self._estimates.pop(job_id, None)
            self._steps.pop(job_id, None)
            for run in self._runs.pop(job_id, {}).values():
                self._open.pop(run.id, None)
            self._alerts = {key: one for key, one in self._alerts.items() if one.job_id != job_id}
        for number in pipelines:
            self._pipelines.pop(number, None)
        for batch in list(self._batches.values()):
            if not batch.left and not self.states_of_batch(batch):
                del self._batches[batch.first_id]

    def used_payloads(self, after: int, limit: int) -> tuple[int | None, set[str]]:
        """Payloads of the next `limit` jobs after this id: the last id, None at the end, and SHA-256s."""
        ids = sorted(job_id for job_id in self._jobs if job_id > after)[:limit]
        launches = [self._jobs[job_id].spec.launch for job_id in ids]
        shas = {sha for launch in launches for sha in (launch.script_sha, launch.env_sha) if sha is not None}
        return (ids[-1] if ids else None), shas

    def payload_shas(self, after: str, limit: int) -> list[str]:
        """The next `limit` SHA-256s of stored scripts and environments."""
        return sorted(sha for sha in self._payloads if sha > after)[:limit]

    def drop_payloads(self, shas: Iterable[str]) -> None:
        """Delete these scripts and environments."""
        needed = {batch.lines_sha for batch in self._batches.values() if batch.left}
        for sha in shas:
            if sha not in needed:
                self._payloads.pop(sha, None)

    def give_back(self, pages: int) -> bool:
        """False: there is no disk space to give back."""
        return False

    # --- upkeep -----------------------------------------------------------------------------------

    def save_gpus(self, node: str, reading: GpuReading) -> None:
        """Keep the inventory of a node."""
        self.inventory[node] = reading

    def check(self) -> str | None:
        """None: nothing can be damaged."""
        return None

    def close(self) -> None:
        """Nothing is held."""


def _is_inside(run: Run, since: float, until: float) -> bool:
    if run.start_at is None or run.start_at >= until:
        return False
    return run.end_at is None or run.end_at > since or run.start_at >= since


def _put_or_drop(table: dict[K, V], changes: Mapping[K, V | None]) -> None:
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
