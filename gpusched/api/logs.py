"""What a reader of output has to know of jobs: which runs there are, where they write, whether more is to come."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import Any

from aiohttp import web

from gpusched.api.identity import caller_of
from gpusched.api.jobs import MAX_WAIT_S, respond
from gpusched.api.service import Service, number, service_of
from gpusched.errors import NotFound, UsageError
from gpusched.model.job import Job, Run
from gpusched.model.states import JobState
from gpusched.ports import JobFilter


async def logs(request: web.Request) -> web.Response:
    """GET /v1/logs"""
    service = service_of(request)
    ids = service.job_ids(request.query.get("ids", ""), caller_of(request))
    if not ids:
        raise UsageError("no jobs are named", "list the jobs with: gq")
    timeout_s = number(request, "timeout_s", 0.0, 0, MAX_WAIT_S) or 0.0
    seen = request.query.get("since", "")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        named, tasks = _find(service, ids)
        runs = _runs_of(service, [job for job in (*named, *tasks) if job.run])
        version = _version((*named, *tasks), runs)
        left_s = deadline - loop.time()
        if version != seen or left_s <= 0:
            break
        await service.changed([job.id for job in (*named, *tasks)], left_s)
    arrays = [job for job in named if job.is_array]
    singles = [job for job in named if not job.is_array]
    shown = [*singles, *[task for task in tasks if task.run]]
    return respond(
        version=version,
        done=all(job.state.is_final for job in (*singles, *tasks)) and not any(map(_has_more, arrays)),
        arrays=[_head(service, job) for job in arrays],
        jobs=[_job_json(service, job, runs.get(job.id, [])) for job in shown],
    )


def _find(service: Service, ids: list[int]) -> tuple[list[Job], list[Job]]:
    """The named jobs in the order given, and the tasks of the arrays among them. Raises: NotFound."""
    found = service.find_all(ids)
    for job_id in ids:
        if job_id not in found:
            raise NotFound(f"there is no job {job_id}", "list the jobs with: gq -a")
    named = [found[job_id] for job_id in ids]
    arrays = frozenset(job.id for job in named if job.is_array)
    if not arrays:
        return named, []
    tasks = {job.id: job for job in service.scheduler.store.jobs(JobFilter(arrays=arrays)) if job.id not in found}
    active = service.scheduler.world.jobs
    return named, sorted((active.get(job_id, job) for job_id, job in tasks.items()), key=_place)


def _place(job: Job) -> tuple[int, int]:
    return job.array_id or 0, job.task or 0


def _runs_of(service: Service, jobs: list[Job]) -> dict[int, list[Run]]:
    """Every run of these jobs by number; of those that are open, what is known before it is written down."""
    world = service.scheduler.world
    ids = [job.id for job in jobs]
    runs = {(run.job_id, run.number): run for run in service.scheduler.store.runs(ids)} if ids else {}
    wanted = set(ids)
    for run in (*world.open_runs.values(), *world.releasing.values()):
        if run.job_id in wanted:
            runs[run.job_id, run.number] = run
    found: dict[int, list[Run]] = {}
    for job_id, run_number in sorted(runs):
        found.setdefault(job_id, []).append(runs[job_id, run_number])
    return found


def _version(jobs: tuple[Job, ...], runs: dict[int, list[Run]]) -> str:
    """A mark that changes with whatever a reader of output cares about."""
    marks = []
    for job in jobs:
        started = [run.start_at is not None for run in runs.get(job.id, ())]
        marks.append((job.id, job.state.value, job.run, sum(started), job.tasks_left))
    return blake2b(repr(marks).encode(), digest_size=8).hexdigest()


def _has_more(array: Job) -> bool:
    return bool(array.tasks_left) and not array.state.is_final


def _head(service: Service, job: Job) -> dict[str, Any]:
    reason = str(job.reason) if job.reason else None
    text = job.reason_text
    if job.state is JobState.PENDING:
        waits = service.scheduler.reason_for(job)
        reason, text = (None, None) if waits is None else (str(waits.code), waits.text)
    return {
        "id": job.shown_id,
        "name": job.spec.name,
        "state": job.state.value,
        "reason": reason,
        "reason_text": text,
    }


def _job_json(service: Service, job: Job, runs: list[Run]) -> dict[str, Any]:
    return {
        **_head(service, job),
        "exit_code": job.exit_code,
        "signal": job.signal,
        "run": job.run,
        "log_keep": job.spec.launch.log_keep if job.spec.launch.log_max_mib is not None else 0,
        "runs": [
            {
                "run": run.number,
                "start_at": run.start_at,
                "outcome": None if run.outcome is None else run.outcome.value,
                "exit_code": run.exit_code,
                "signal": run.signal,
                "reason_text": run.reason_text,
                "stdout_path": run.stdout_path,
                "stderr_path": run.stderr_path or run.stdout_path,
            }
            for run in runs
        ],
    }
