"""Jobs from gpusched's own job table, and the machine that they ran on.

A job arrives when only the scheduler kept it from starting: after its submission or requested begin time, its
release, and the end of its last dependency. Requests, time limit, retries, user, account, queue and QOS are as
recorded. Each run that ended by itself provides a run time and an outcome; preempted runs and those lost with the
machine provide neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

from gpusched.addons.simulate.trace import BadTrace, Trace, TraceJob
from gpusched.gpu.host import PsutilHost
from gpusched.lifecycle.dependencies import parse_dependency
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import JobFilter, Store
from gpusched.store.read_only import open_to_read

_NAME = "the history"
_NOT_ITS_OWN = frozenset({JobState.PREEMPTED, JobState.NODE_FAIL})
"""Ends of runs that do not measure the job's length."""


def read_history(path: str, since_at: float | None = None) -> Trace:
    """The ended jobs of a table submitted since an instant (UTC epoch seconds).

    Raises: NotFound, Forbidden and NotReady as `open_to_read`; BadTrace when none of them can be replayed.
    """
    store = open_to_read(path)
    try:
        trace = trace_of(store, since_at)
    finally:
        store.close()
    if not trace.jobs:
        why = "; ".join(f"{reason}: {one}" for reason, one in trace.dropped.items())
        raise BadTrace(
            f"{path} holds no job to replay{f' ({why})' if why else ''}", "look further back: --since 365d; see: ghist"
        )
    return trace


def read_machine(path: str, settings: Settings) -> NodeView:
    """This machine, with the cards from its daemon's last inventory.

    Raises: NotFound, Forbidden and NotReady as `open_to_read`.
    """
    store = open_to_read(path)
    try:
        cards = store.last_gpus()
    finally:
        store.close()
    host = PsutilHost(settings.node).read()
    node = settings.node
    gpus = tuple(
        # The table does not say. A card with all of the host's memory has no dedicated memory.
        GpuView(uuid, index, name, total_mib, has_host_memory=total_mib == host.mem_total_mib)
        for uuid, index, name, total_mib in cards
    )
    return NodeView(
        name=host.name,
        cpus=float(host.cpus) if node.cpus is None else node.cpus,
        mem_mib=host.mem_total_mib if node.mem_mib is None else node.mem_mib,
        gpus=gpus,
        labels=tuple(sorted(set(node.labels))),
        resources=tuple(sorted(node.resources.items())),
    )


def trace_of(store: Store, since_at: float | None = None) -> Trace:
    """The ended jobs of a table, in its order; may be empty."""
    jobs = [
        job
        for job in store.jobs(JobFilter(since=since_at))
        if not job.is_array and (since_at is None or job.submit_at >= since_at)
    ]
    runs: dict[int, list[Run]] = {}
    for run in store.runs(job.id for job in jobs):
        runs.setdefault(run.job_id, []).append(run)
    ends = _ends_of_others(store, jobs)
    trace = Trace(_NAME, [])
    found: list[tuple[float, TraceJob]] = []
    for job in jobs:
        if not job.state.is_final:
            trace.drop("had not ended yet", job.shown_id)
            continue
        attempts = tuple(_attempts(runs.get(job.id, ())))
        if not attempts:
            trace.drop("did not run", job.shown_id)
            continue
        arrives_at = _arrives_at(store, job, runs[job.id][0], ends)
        found.append((arrives_at, _of(job, attempts)))
    trace.begins_at = first_at = floor(min((at for at, _ in found), default=0.0))
    trace.jobs = [
        replace(
            job,
            submit_s=floor(at) - first_at,
            deadline_s=None if job.deadline_s is None else job.deadline_s - first_at,
        )
        for at, job in found
    ]
    trace.notes.append("the machine starts empty; dependencies release jobs when they actually did")
    return trace


def _of(job: Job, attempts: tuple[tuple[int, str], ...]) -> TraceJob:
    spec, request = job.spec, job.spec.request
    run_s, outcome = attempts[-1]
    return TraceJob(
        id=job.shown_id,
        submit_s=0,
        run_s=run_s,
        estimate_s=max(run_s, spec.time_limit_s or 0),
        gpus=request.total_gpus,
        cpus=request.cpus,
        mem_mib=request.mem_mib,
        user=job.user,
        queue=spec.queue,
        name=spec.name,
        gpu_fraction=request.gpu_fraction,
        outcome=outcome,
        spec=_alone(spec),
        attempts=attempts,
        # Counted, not enforced: another policy may miss deadlines that were met.
        deadline_s=None if spec.deadline_at is None else floor(spec.deadline_at),
    )


def _alone(spec: JobSpec) -> JobSpec:
    """A submission without references to instants, other jobs, files or people."""
    return replace(
        spec,
        begin_at=None,
        deadline_at=None,
        dependency=None,
        hold=False,
        reservation=None,
        array=None,
        fallback=None,
        fallback_of=None,
        alerting=None,
        interactive=None,
        adopted=None,
        key=None,
        snapshot=None,
        pipeline=None,
        step=None,
    )


def _attempts(runs: Iterable[Run]) -> Iterable[tuple[int, str]]:
    """Length and outcome of each run that ended by itself; for a job lost for good, of its last run."""
    ended = [run for run in runs if run.start_at is not None and run.end_at is not None and run.outcome is not None]
    own = [run for run in ended if run.outcome not in _NOT_ITS_OWN] or ended[-1:]
    for run in own:
        moved_s = (run.end_at or 0.0) - (run.start_at or 0.0) - run.suspended_s
        yield max(1, round(moved_s)), str(run.outcome).lower()


def _ends_of_others(store: Store, jobs: Iterable[Job]) -> dict[int, float]:
    """Ends of all dependencies of these jobs."""
    wanted = {job_id for job in jobs for job_id in _named(job)}
    if not wanted:
        return {}
    found = store.jobs(JobFilter(ids=frozenset(wanted)))
    return {job.id: job.end_at for job in found if job.end_at is not None}


def _named(job: Job) -> tuple[int, ...]:
    if not job.spec.dependency:
        return ()
    try:
        return tuple(one.job_id for one in parse_dependency(job.spec.dependency).conditions if one.job_id)
    except ValueError:
        return ()  # written by a release with another format


def _arrives_at(store: Store, job: Job, first: Run, ends: dict[int, float]) -> float:
    """When only the scheduler kept the job from starting; at most its start."""
    at = [job.submit_at, job.queued_at]
    at += [ends[job_id] for job_id in _named(job) if job_id in ends]
    if job.spec.hold:
        at += [event.at for event in store.events(job.id) if event.kind == "released"]
    start_at = first.intent_at if first.start_at is None else first.start_at
    return max(one for one in at if one <= max(start_at, job.submit_at))
