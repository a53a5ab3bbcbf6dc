"""Handlers about jobs. Each reads its request, calls the service and renders a document."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.access import Act
from gpusched.api import validate
from gpusched.api.arrays import MOST_IDS, resolve_tasks
from gpusched.api.asked import OneJob, RequestBody, RequestQuery, Signal, Timeout, about, one_of
from gpusched.api.auth import node_peer_of, pid_of
from gpusched.api.handlers.foreground import foreground_json
from gpusched.api.interactive import submitted_by
from gpusched.api.notices import notices
from gpusched.api.queue_rows import table_key
from gpusched.api.remarks import begin_remark
from gpusched.api.render import JOB_FIELDS, PROGRESS_FIELDS, expected_json, forecast_json, plain
from gpusched.api.requests import in_pieces, respond, respond_list, states_of, words
from gpusched.api.resubmit import read_resubmission
from gpusched.api.service import MOVING, ApiService
from gpusched.api.visibility import Viewer
from gpusched.errors import Concerning, Refused, UsageError
from gpusched.lifecycle.arrays import job_count
from gpusched.lifecycle.dependencies import as_typed
from gpusched.lifecycle.transitions import new_job
from gpusched.model import commands
from gpusched.model.batch import specs_of
from gpusched.model.bundles import totals
from gpusched.model.cluster import GpuState
from gpusched.model.commands import Caller, ResumePipeline, Selection
from gpusched.model.execution import SIGNAL_SCOPES
from gpusched.model.job import GpuShare, Job, Run
from gpusched.model.states import ACTIVE_STATES, JobState
from gpusched.model.units import id_ranges, parse_pipeline_id, printable, split_ids
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.ports.daemon import Forecast
from gpusched.predict.efficiency import report_lines
from gpusched.scheduler import whatif

ORDERS = ("id", "queue")
"""Sort orders of a list of jobs."""
_RUNS = "runs"
"""Key of the runs in a history."""
EVENT_BYTES = 256
"""Estimated size of one event in a job's history."""
JobWords = tuple[int | str, ...]
"""Ids of jobs as commands take them: `42`, `42_7`, `p42`, `@`."""
Ids = Annotated[str, about("comma-separated ids; @ is the caller's last job")]
States = Annotated[str, about("comma-separated states, or all; active ones unless ids or states are given")]
Users = Annotated[str, about("comma-separated user names")]
NameWords = Annotated[str, about("comma-separated job names")]
Queues = Annotated[str, about("comma-separated queues")]
Since = Annotated[float, about("only jobs unfinished or ended at or after this instant", ge=0, le=1e12)]
Limit = Annotated[int, about("the newest this many", ge=1, le=10_000_000)]
Before = Annotated[
    str, about("only jobs before the one with this id: with the first id of a page and `limit`, the next older page")
]


class FilterQuery(RequestQuery):
    """Selects jobs."""

    ids: Ids = ""
    states: States = ""
    users: Users = ""
    names: NameWords = ""
    queues: Queues = ""
    since: Since | None = None
    limit: Limit | None = None
    before: Before | None = None


class JobsQuery(FilterQuery):
    hint = "see gq --help"
    fields: Annotated[str | None, about("comma-separated keys: rows of bare values instead of objects")] = None
    order: Annotated[
        str, one_of(ORDERS, "id (default), or queue: running jobs, then pending ones with the next to start first")
    ] = ORDERS[0]
    fold: Annotated[
        bool,
        about(
            "1: of pending jobs of one user with the same name, GPUs asked for and reason only the first; "
            "`folded` has by its id [ids of them all, how many]"
        ),
    ] = False
    shared: Annotated[
        bool,
        about(
            "1: with `fields`, what many jobs have in common is given once: each row is the number of its entry in "
            "`shared`, which has the values of `shared_fields`, and then its own values of `fields`"
        ),
    ] = False
    summary: Annotated[bool, about("1: also count these jobs by state, and GPUs in total and free")] = False
    progress: Annotated[bool, about("1: also the progress of jobs that report it, as id: [fraction, eta_at]")] = False
    notices: Annotated[
        bool, about("1: also drained nodes and GPUs, paused queues, and maintenance that is on or within a week")
    ] = False


class HistoryQuery(FilterQuery):
    fields: Annotated[
        str | None, about("comma-separated keys: rows of bare values instead of objects; `runs` is one of them")
    ] = None


class WaitQuery(RequestQuery):
    ids: Ids = ""
    timeout_s: Timeout = 30.0
    state_not: Annotated[str | None, about("one id only: answer once its state differs from this")] = None
    run_not: Annotated[str | None, about("one id only: answer once its run number differs from this")] = None


class SubmitBody(RequestBody):
    hint = "see gsub --help"
    spec: Annotated[Any, Meta(extra_json_schema={"$ref": "#/components/schemas/Spec"})] = None
    batch: list[str] | None = None
    dry_run: bool = False
    advise: bool = False
    key_again: Annotated[str, one_of(commands.AGAIN)] = commands.NEVER
    resubmit: JobWords | None = None


class JobsBody(RequestBody):
    """Names jobs."""

    hint = "list the jobs with: gq"
    ids: JobWords = ()


class HoldBody(JobsBody):
    """Jobs by ids or filters, and whether to list them only."""

    users: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    all: bool = False
    dry_run: bool = False


class CancelBody(HoldBody):
    hint = "see: gcancel --help"
    signal: Signal | None = None
    main_only: bool = False
    to: Annotated[str, one_of(SIGNAL_SCOPES)] | None = None


class RequeueBody(JobsBody):
    hold: bool = False


class UpdateBody(JobsBody):
    changes: Annotated[Any, Meta(extra_json_schema={"$ref": "#/components/schemas/Changes"})] = None


Change = (
    commands.Cancel
    | commands.Hold
    | commands.Release
    | commands.Update
    | commands.Suspend
    | commands.Resume
    | commands.Requeue
    | ResumePipeline
)
"""An operation on existing jobs."""


async def change(service: ApiService, command: Change) -> dict[str, Any]:
    """Apply a user's command, and count what it adds to the database. Raises: Refused."""
    limit, caller = service.settings.limit, command.caller
    service.pace.check_writing(caller, limit)
    answer = await service.daemon.ask(command)
    rows = sum(len(found) for found in answer.values() if isinstance(found, (list, dict)))
    words = sum(len(repr(value)) for value in command.changes.values()) if isinstance(command, commands.Update) else 0
    service.pace.written(caller, rows * (EVENT_BYTES + words), limit)
    return answer


async def submit(viewer: Viewer, body: SubmitBody, request: web.Request) -> web.Response:
    """Submit a job, one per batch line, or resubmit old ones; with dry_run only forecast what would happen."""
    service = viewer.service
    caller, key_again = viewer.caller, body.key_again
    origins: list[str] = []
    if body.resubmit is not None:
        submission, origins = _repeated(viewer, body, body.resubmit)
    else:
        submission = validate.read_submission(
            with_task_ids(body.spec, viewer),
            body.batch,
            service.settings,
            service.requests,
            service.scheduler.now(),
        )
    left_out = {"env_excluded": submission.env_excluded} if submission.env_excluded else {}
    if submission.lines is not None and not submission.lines:
        raise UsageError("the batch is empty", "give it one shell line a job")
    if body.dry_run:
        spec = submission.specs[0]
        if submission.lines is not None:
            (spec,) = specs_of(replace(spec, key=None), submission.lines[:1], is_named=submission.is_named)
        outlook = await service.work_out(service.daemon.forecast(spec, caller, key_again), caller)
        planned = new_job(service.scheduler.state.next_id, caller, spec, service.scheduler.now())
        would_be = {"job_id": planned.shown_id, "queue": planned.spec.queue, "cpus": _cores(planned)}
        return respond(dry_run={**_forecast(viewer, outlook), "vram": _vram(service, planned), **would_be}, **left_out)
    if submission.lines is not None:
        return await _submit_batch(service, caller, submission, submission.lines, key_again, left_out)
    service.pace.submission(
        caller, submission.specs, sum(map(len, submission.payloads.values())), service.settings.limit
    )
    peer = node_peer_of(request)
    if caller.is_token and any(spec.interactive is not None for spec in submission.specs):
        raise Refused("a token cannot start jobs in the foreground", "submit it to the background, without interactive")
    if peer is not None and any(spec.interactive is not None for spec in submission.specs):
        head = service.scheduler.cluster.head.name
        raise Refused(
            f"a foreground job is started on the daemon's own node {head}, not on {peer.node}", "submit it with gsub"
        )
    specs = submitted_by(submission.specs, pid_of(request), service.daemon)
    answer = await service.daemon.ask(
        commands.Submit(caller, specs, submission.payloads, key_again, origins, submission.env_excluded)
    )
    _put_notes(answer, submission)
    for key in ("notes", "limits"):
        if answer.get(key):
            left_out[key] = answer[key]
    if len(origins) > 1:
        return respond(ids=answer["ids"], **left_out)
    job = service.find(answer["ids"][0])
    # With a key, clients must be able to distinguish a new job from an existing one.
    found: dict[str, Any] = (
        {"existing": "existing" in answer, "differs": answer.get("differs", [])} if job.spec.key else {}
    )
    if body.advise:
        found["vram"] = _vram(service, job)
    return respond(job=viewer.job_json(job, service.facts_of([job])(job)), **found, **left_out)


async def _submit_batch(
    service: ApiService,
    caller: Caller,
    submission: validate.Submission,
    lines: Sequence[str],
    key_again: str,
    left_out: dict[str, Any],
) -> web.Response:
    document = json.dumps(lines).encode()
    size = sum(map(len, submission.payloads.values())) + len(document)
    service.pace.submission(caller, submission.specs, size, service.settings.limit, copies=len(lines))
    answer = await service.daemon.ask(
        commands.SubmitBatch(
            caller,
            submission.specs[0],
            lines,
            submission.is_named,
            document,
            submission.payloads,
            key_again,
            submission.env_excluded,
        )
    )
    _put_notes(answer, submission)
    for key in ("notes", "limits", "existing", "differs"):
        if answer.get(key) or (key in ("existing", "differs") and key in answer):
            left_out[key] = answer[key]
    return await respond_list("ids", answer["ids"], {}, left_out)


def _put_notes(answer: dict[str, Any], submission: validate.Submission) -> None:
    """Put the notes on a submission before those of the scheduler, unless nothing new was made."""
    if submission.notes and not answer.get("existing"):
        answer["notes"] = [*submission.notes, *answer.get("notes", ())]


def _cores(job: Job) -> float:
    """Cores that a job books on all of its nodes."""
    return totals(job.spec.request)[0]


def _vram(service: ApiService, job: Job) -> dict[str, Any] | None:
    """GPU memory used by similar jobs, and a suggested request; null if too few have ended."""
    scheduler = service.scheduler
    if not job.spec.request.gpus:
        return None
    seen = service.daemon.vram_seen(job)
    if seen is None:
        return None
    cards = [card for node in scheduler.nodes(scheduler.now()) for card in node.gpus]
    return {
        **plain(seen),
        "text": whatif.vram_seen(job.spec.request, seen),
        "proposal": whatif.vram_advice(job.spec.request, seen, cards, service.settings.gpu),
    }


def _forecast(viewer: Viewer, outlook: Forecast) -> dict[str, Any]:
    found = forecast_json(outlook)
    found["facts"] = viewer.facts(found["facts"])
    return found


def _repeated(viewer: Viewer, body: SubmitBody, words: Sequence[int | str]) -> tuple[validate.Submission, list[str]]:
    """The submission that repeats the jobs that these words name, and their ids."""
    if body.batch is not None:
        raise UsageError("both a batch and jobs to resubmit were given", "give only one of them")
    service, caller = viewer.service, viewer.caller
    jobs = [viewer.find(job_id) for job_id in _named_ids(viewer, words, unfinished=False)]
    spec = with_task_ids({} if body.spec is None else body.spec, viewer)
    submission = read_resubmission(jobs, spec, caller, service.settings, service.scheduler.store)
    return submission, [job.shown_id for job in jobs]


def with_task_ids(spec: Any, viewer: Viewer) -> Any:
    """A submission or change with the tasks in its dependency replaced by ids.

    Raises: NotFound, Refused, UsageError.
    """
    if isinstance(spec, dict) and isinstance(dependency := spec.get("dependency"), str):
        with Concerning("dependency"):
            dependency = resolve_tasks(dependency, viewer.find, lambda: viewer.service.last_id(viewer.caller))
        viewer.check_dependency(dependency)
        return {**spec, "dependency": dependency}
    return spec


async def listing(viewer: Viewer, query: JobsQuery) -> web.Response:
    """List jobs; active ones unless ids or states are given."""
    service = viewer.service
    wanted = filter_of(viewer, query)
    jobs = selected(viewer, wanted)
    extra = _missing(viewer, sorted(wanted.ids))
    if query.order == "queue":
        jobs = service.scheduler.answers.in_queue_order(jobs)
    if query.summary:
        extra["summary"] = _summary(service, jobs)
    names = query.fields
    if query.progress or names is None or not PROGRESS_FIELDS.isdisjoint(names.split(",")):
        await service.refresh_progress(jobs)
    if query.progress:
        moving = (
            (job, service.daemon.progress_of(job)) for job in jobs if job.state in MOVING and viewer.sees_all_of(job)
        )
        extra["progress"] = {job.shown_id: [shown.fraction, shown.eta_at] for job, shown in moving if shown}
    if query.notices and (found := notices(service.scheduler)):
        extra["notices"] = found
    if query.fold:
        jobs, extra["folded"] = await _folded(jobs, viewer)
    facts = service.facts_of(jobs, viewer.audience.knows)
    if names is None:
        whole = viewer.encodable_rows(JOB_FIELDS)
        return await respond_list("jobs", (whole(job, facts(job)) for job in jobs), {}, extra)
    fields = _fields(names, JOB_FIELDS)
    if query.shared:
        divided = viewer.divided_rows(fields)
        extra["shared"] = divided.common
        named = {"fields": divided.own_fields, "shared_fields": divided.common_fields}
        return await respond_list("rows", (divided(job, facts(job)) for job in jobs), named, extra)
    row = viewer.rows(fields)
    shown = (row(job, facts(job)) for job in jobs)
    rows = (list(map(found.__getitem__, fields)) for found in shown)
    return await respond_list("rows", rows, {"fields": fields}, extra)


async def _folded(jobs: list[Job], viewer: Viewer) -> tuple[list[Job], dict[str, list[Any]]]:
    """Fold pending jobs with equal table rows into the first of each; also returns the ids and count of each group."""
    key_of = table_key(viewer)
    groups: dict[object, list[Job]] = {}
    async for piece in in_pieces(jobs):
        for job in piece:
            key = key_of(job) if job.state is JobState.PENDING and not job.tasks_left else job.id
            group = groups.get(key)
            if group is None:
                groups[key] = [job]
            else:
                group.append(job)
    folded: dict[str, list[Any]] = {}
    async for some in in_pieces(groups.values()):
        for group in some:
            if len(group) > 1:
                folded[group[0].shown_id] = [id_ranges(map(_numbers_of, group)), len(group)]
    return [group[0] for group in groups.values()], folded


def _numbers_of(job: Job) -> tuple[int, ...]:
    return (job.id,) if job.array_id is None or job.task is None else (job.array_id, job.task)


def _summary(service: ApiService, jobs: Iterable[Job]) -> dict[str, Any]:
    """Number of these jobs in each state, pending tasks of arrays counted one by one, and of free GPUs."""
    states: Counter[str] = Counter()
    for job in jobs:
        states[job.state.value] += job_count(job)
    scheduler = service.scheduler
    now = scheduler.now()
    nodes = scheduler.nodes(now)
    booked: dict[str, list[GpuShare]] = {}
    for held in scheduler.state.holds.values():
        for share in held.gpus:
            booked.setdefault(share.uuid, []).append(share)
    free = sum(
        not node.why_not and scheduler.cluster.status(gpu.uuid, booked.get(gpu.uuid, []), now).state == GpuState.IDLE
        for node in nodes
        for gpu in node.gpus
    )
    return {"states": states, "gpus_free": free, "gpus": sum(len(node.gpus) for node in nodes)}


def _missing(viewer: Viewer, ids: list[int]) -> dict[str, Any]:
    """Named ids that do not exist, and which of them existed before. Raises: NotFound if only one id was named."""
    known = viewer.find_all(ids)
    missing = [job_id for job_id in ids if job_id not in known]
    if missing and len(ids) == 1:
        raise viewer.missing(missing[0])
    # Pruned jobs must not be distinguishable from hidden ones.
    next_id = 0 if viewer.is_restricted else viewer.service.scheduler.state.next_id
    pruned = [job_id for job_id in missing if job_id < next_id]
    found = {"missing": [str(one) for one in missing], "pruned": [str(one) for one in pruned]}
    return {name: those for name, those in found.items() if those}


def filter_of(viewer: Viewer, query: FilterQuery) -> JobFilter:
    """The jobs selected by the query, by default the active ones. Raises: UsageError."""
    service, caller = viewer.service, viewer.caller
    ids = service.job_ids(query.ids, caller)
    states = states_of(words(query.states))
    tasks = service.tasks_of(ids)
    return JobFilter(
        ids=frozenset(ids).union(*tasks.values()),
        arrays=frozenset(tasks if states and not states <= ACTIVE_STATES else ()),
        leaves_out_arrays=not ids,
        states=states if states or ids else ACTIVE_STATES,
        users=words(query.users),
        names=words(query.names),
        queues=words(query.queues),
        since=query.since,
        before=None if query.before is None else service.job_id(query.before, caller),
        limit=query.limit,
    )


def selected(viewer: Viewer, wanted: JobFilter) -> list[Job]:
    """The selected jobs visible to the caller, by id; a name selects only jobs whose name the caller may see."""
    service = viewer.service
    by_hidden_name = viewer.hides_names and bool(wanted.names)
    if viewer.is_admin or not (viewer.is_restricted or by_hidden_name):
        return _selected(service, wanted)
    is_seen = viewer.sees_all_of if by_hidden_name else viewer.sees
    if not viewer.is_operator:
        # Only the caller's own, so the table need not be read for the rest.
        own = viewer.caller.user
        if wanted.users and own not in wanted.users:
            return []
        return [job for job in _selected(service, replace(wanted, users=frozenset({own}))) if is_seen(job)]
    jobs = [job for job in _selected(service, replace(wanted, limit=None)) if is_seen(job)]
    return jobs if wanted.limit is None else jobs[-wanted.limit :]


def _selected(service: ApiService, wanted: JobFilter) -> list[Job]:
    if wanted.states and wanted.states <= ACTIVE_STATES and not wanted.ids:
        jobs = [
            job
            for job in service.scheduler.state.jobs.values()
            if job.state in wanted.states
            and job.tasks_left != ""
            and (not wanted.users or job.user in wanted.users)
            and (not wanted.names or job.is_named(wanted.names, service.scheduler.state.jobs))
            and (not wanted.queues or job.spec.queue in wanted.queues)
            and (wanted.before is None or job.id < wanted.before)
        ]
        jobs.sort(key=lambda job: job.id)
        return jobs if wanted.limit is None else jobs[-wanted.limit :]
    found = service.scheduler.store.jobs(wanted)
    if not wanted.ids:
        return found
    there = {job.id: job for job in found}
    missing = [job_id for job_id in wanted.ids if job_id not in there]
    if missing:
        # Tasks without their own row.
        there.update(
            {
                job.id: job
                for job in service.find_all(missing).values()
                if job.array_id is not None
                and (not wanted.states or job.state in wanted.states)
                and (wanted.before is None or job.id < wanted.before)
            }
        )
    return [there[job_id] for job_id in sorted(there)]


async def history(viewer: Viewer, query: HistoryQuery) -> web.Response:
    """List jobs with all their runs."""
    service = viewer.service
    wanted = filter_of(viewer, query)
    jobs = selected(viewer, wanted)
    extra = _missing(viewer, sorted(wanted.ids))
    facts = service.facts_of(jobs)
    names = query.fields
    fields = JOB_FIELDS if names is None else _fields(names, (*JOB_FIELDS, _RUNS))
    known = {job.id: job for job in jobs} if names is None or _RUNS in fields else {}
    runs: dict[int, list[dict[str, Any]]] = {}
    for run in service.scheduler.store.runs(list(known)) if known else ():
        runs.setdefault(run.job_id, []).append(viewer.run_json(known[run.job_id], run))
    row = viewer.rows([name for name in fields if name != _RUNS])
    found = ({**row(job, facts(job)), _RUNS: runs.get(job.id, [])} for job in jobs)
    if names is None:
        return await respond_list("jobs", found, {}, extra)
    rows = (list(map(one.__getitem__, fields)) for one in found)
    return await respond_list("rows", rows, {"fields": fields}, extra)


def _fields(names: str, known: Collection[str]) -> list[str]:
    """The keys that `fields=` names. Raises: UsageError."""
    fields = [name for name in names.split(",") if name]
    for name in fields:
        if name not in known:
            raise UsageError(f"unknown field {printable(name, 40)!r}", "fields: " + ", ".join(known))
    return fields


async def show(viewer: Viewer, query: OneJob) -> web.Response:
    """Everything about one job: request, runs, story."""
    service = viewer.service
    job = viewer.find(service.job_id(query.path_id, viewer.caller))
    is_whole = viewer.sees_all_of(job)
    store = service.scheduler.store
    runs = {run.number: run for run in store.runs([job.id])}
    runs.update({run.number: run for run in service.scheduler.state.open_runs.values() if run.job_id == job.id})
    spec = {**plain(job.spec), "dependency": as_typed(job.spec.dependency)}
    if is_whole:
        await service.refresh_progress([job])
    return respond(
        job={
            **viewer.job_json(job, service.facts_of([job])(job)),
            **(_wrapped(job, service) if is_whole else {}),
            "tasks": service.states_of_tasks(job) if job.is_array else None,
            "runs": [viewer.run_json(job, runs[number]) for number in sorted(runs)],
            "report": _report_json(job, [runs[number] for number in sorted(runs)], service) if is_whole else None,
            "events": viewer.story(job, store.events(job.id)),
            "related": _related(job, viewer) if is_whole else [],
            "foreground": await foreground_json(job, service) if is_whole else None,
            "request": spec.pop("request"),
            "expected": expected_json(job, service.daemon, is_whole=is_whole),
            # Command and alerts are private to the owner.
            "spec": spec if is_whole else None,
        }
    )


def _report_json(job: Job, runs: Sequence[Run], service: ApiService) -> dict[str, Any] | None:
    """What an ended job used of what it asked for, and the same as text; null if it has not ended or never ran."""
    found = service.scheduler.end_report(job, runs)
    return None if found is None else {**plain(found), "lines": report_lines(found)}


def _wrapped(job: Job, service: ApiService) -> dict[str, str]:
    """The shell line of `gsub --wrap`, shown in place of the script's name."""
    launch = job.spec.launch
    if launch.script_sha is None or launch.script_name != "wrap":
        return {}
    try:
        text = service.scheduler.store.payload(launch.script_sha).decode("utf-8", "surrogateescape")
    except KeyError:
        return {}
    return {"command": text.partition("\n")[2].rstrip("\n")}


def _related(job: Job, viewer: Viewer) -> list[dict[str, Any]]:
    """The fallback of a job and the job that it is the fallback of, if any; both have the same owner."""
    service = viewer.service
    named = {"fallback": job.fallback_id, "fallback_of": job.spec.fallback_of}
    known = service.find_all([job_id for job_id in named.values() if job_id is not None])
    facts = service.facts_of(known.values())
    row = viewer.rows(("id", "state", "reason", "reason_text", "exit_code", "stdout_path"))
    return [
        {"relation": relation, **row(known[job_id], facts(known[job_id]))}
        for relation, job_id in named.items()
        if job_id in known
    ]


async def script(viewer: Viewer, query: OneJob) -> web.Response:
    """The script or command as submitted."""
    service = viewer.service
    job = viewer.read(query.path_id, Act.SCRIPT)
    launch = job.spec.launch
    body = None
    if launch.script_sha is not None:
        body = service.scheduler.store.payload(launch.script_sha).decode("utf-8", "surrogateescape")
    return respond(script=body, argv=list(launch.argv))


async def cancel(viewer: Viewer, body: CancelBody) -> web.Response:
    """End jobs, or send them a signal."""
    service, caller = viewer.service, viewer.caller
    named = {word: parse_pipeline_id(word) for word in _words(body.ids)}
    others = [word for word, number in named.items() if number is None]
    filters = _filters(body)
    if not (named or filters):
        raise UsageError("no jobs given", "give ids, a filter such as -n NAME, or --all")
    selection = replace(
        filters or Selection(),
        ids=tuple(_ids(viewer, others)),
        pipelines=frozenset(number for number in named.values() if number is not None),
    )
    to = body.to or ("main" if body.main_only else "tree")
    return respond(**await change(service, commands.Cancel(caller, selection, body.signal, to, body.dry_run)))


def _filters(body: HoldBody) -> Selection | None:
    """Jobs selected by filters instead of ids; None without filters. Raises: UsageError."""
    if not (body.users or body.queues or body.names or body.states or body.all):
        return None
    return Selection(
        users=frozenset(body.users),
        queues=frozenset(body.queues),
        names=frozenset(body.names),
        states=states_of(body.states),
        everything=body.all,
    )


def _words(ids: Sequence[int | str]) -> list[str]:
    """Ids as written by the client."""
    if len(ids) > MOST_IDS:
        raise UsageError(f"{len(ids)} jobs named; the maximum per request is {MOST_IDS}", "split the request")
    return list(map(str, ids))


def _ids(viewer: Viewer, words: Sequence[int | str], *, unfinished: bool = True) -> list[int]:
    named = viewer.service.ids_by_word(_words(words), viewer.caller, unfinished=unfinished)
    return list(dict.fromkeys(job_id for ids in named for job_id in ids))


def _named_ids(viewer: Viewer, words: Sequence[int | str], *, unfinished: bool = True) -> tuple[int, ...]:
    ids = _ids(viewer, words, unfinished=unfinished)
    if not ids:
        raise UsageError("no jobs given", "list the jobs with: gq")
    return tuple(ids)


async def _set_hold(viewer: Viewer, body: HoldBody, command: type[commands.Hold | commands.Release]) -> web.Response:
    filters = _filters(body)
    if filters is not None and body.ids:
        raise UsageError("both ids and filters were given", "give only one of them")
    ids = () if filters is not None else _named_ids(viewer, body.ids)
    return respond(**await change(viewer.service, command(viewer.caller, ids, filters, body.dry_run)))


async def hold(viewer: Viewer, body: HoldBody) -> web.Response:
    """Hold jobs, by ids or filters; those under running are held from their next run on."""
    return await _set_hold(viewer, body, commands.Hold)


async def release(viewer: Viewer, body: HoldBody) -> web.Response:
    """Undo a hold, by ids or filters."""
    return await _set_hold(viewer, body, commands.Release)


async def _to_runs(viewer: Viewer, body: JobsBody, command: type[commands.Suspend | commands.Resume]) -> web.Response:
    return respond(**await change(viewer.service, command(viewer.caller, _named_ids(viewer, body.ids))))


async def suspend(viewer: Viewer, body: JobsBody) -> web.Response:
    """Suspend running jobs; those under kept keep their GPUs."""
    return await _to_runs(viewer, body, commands.Suspend)


async def resume(viewer: Viewer, body: JobsBody) -> web.Response:
    """Resume suspended jobs."""
    return await _to_runs(viewer, body, commands.Resume)


async def requeue(viewer: Viewer, body: RequeueBody) -> web.Response:
    """End runs and requeue their jobs; with hold until they are released."""
    command = commands.Requeue(viewer.caller, _named_ids(viewer, body.ids), body.hold)
    return respond(**await change(viewer.service, command))


async def update(viewer: Viewer, body: UpdateBody) -> web.Response:
    """Change the requests of jobs."""
    service, caller = viewer.service, viewer.caller
    changes = validate.read_changes(with_task_ids(body.changes, viewer), service.settings)
    answer = await change(service, commands.Update(caller, _named_ids(viewer, body.ids), changes))
    if (late := begin_remark(changes.get("begin_at"), service.scheduler.now())) is not None:
        answer["notes"] = [late, *answer.get("notes", ())]
    return respond(**answer)


async def wait(viewer: Viewer, query: WaitQuery) -> web.Response:
    """Wait until jobs have ended, or until one has left a state or run."""
    service = viewer.service
    caller = viewer.caller
    asked = split_ids(query.ids)
    named = dict(zip(asked, service.ids_by_word(asked, caller), strict=True))
    ids = _each_once(named)
    if not ids:
        raise UsageError("no jobs given", "list the jobs with: gq")
    state_not, run_not = query.state_not, query.run_not
    loop = asyncio.get_running_loop()
    deadline = loop.time() + query.timeout_s
    while True:
        jobs = viewer.find_all(ids)
        for job_id in ids:
            if job_id not in jobs:
                raise viewer.missing(job_id)
        left = [job_id for job_id, job in jobs.items() if not job.state.is_final]
        done = not left
        if done and (now := _each_once(_as_now(named, service, caller))) != ids:
            ids = now
            continue
        left_s = deadline - loop.time()
        if done or left_s <= 0 or _moved(jobs[ids[0]], state_not, run_not):
            break
        if state_not is None and run_not is None:
            # Of a thousand short jobs one ends every millisecond or two: check only after the last end.
            await service.ended(left, left_s, caller)
        else:
            await service.changed(ids, left_s, caller)
    spared = service.not_needed(query.ids)
    return respond(
        done=done,
        **({"not_needed": spared} if spared else {}),
        jobs=[viewer.outcome(jobs[job_id]) for job_id in ids],
    )


def _each_once(named: Mapping[str, Sequence[int]]) -> list[int]:
    return list(dict.fromkeys(job_id for ids in named.values() for job_id in ids))


def _as_now(named: Mapping[str, Sequence[int]], service: ApiService, caller: Caller) -> dict[str, Sequence[int]]:
    """The current jobs of each named pipeline, which gains jobs during a wait: fallbacks and repeated steps."""
    return {
        word: ids if parse_pipeline_id(word) is None else service.named(word, caller) for word, ids in named.items()
    }


def _moved(job: Job, state_not: str | None, run_not: str | None) -> bool:
    if state_not is None and run_not is None:
        return False
    return (state_not is not None and job.state.value != state_not) or (run_not is not None and str(job.run) != run_not)
