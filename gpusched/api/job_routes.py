"""What a route is, and the routes of jobs, their output, steps and pipelines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gpusched.api.handlers import completions, forecast, foreground, jobs, logs, pipelines, series, steps
from gpusched.api.schema import json_schema
from gpusched.model.commands import AGAIN
from gpusched.model.execution import SIGNAL_SCOPES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: its path, purpose, parameters and answer."""

    method: str
    path: str
    handler: Handler
    summary: str
    answer: str
    """Key of the document that holds the result."""
    query: dict[str, str] = field(default_factory=dict)
    """Query parameters and their meaning."""
    body: dict[str, Any] | None = None
    """JSON Schema of the request's properties; None for no body."""
    content: str = "application/json"
    """Media type of the answer."""


UPGRADED = "application/octet-stream"
"""Media type of a connection that is HTTP no more."""
IDS = {"ids": {"type": "array", "items": {"type": ["integer", "string"]}}}
STRINGS = {"type": "array", "items": {"type": "string"}}
CHOICE = {
    **dict.fromkeys(("users", "queues", "names", "states"), STRINGS),
    "all": {"type": "boolean"},
    "dry_run": {"type": "boolean"},
}
"""Jobs that a command applies to, and whether it only lists them."""

FILTERS = {
    "ids": "comma-separated ids; @ is the caller's last job",
    "states": "comma-separated states, or all; active ones unless ids or states are given",
    "users": "comma-separated user names",
    "names": "comma-separated job names",
    "queues": "comma-separated queues",
    "since": "only jobs unfinished or ended at or after this instant",
    "limit": "the newest this many",
    "before": "only jobs before the one with this id: with the first id of a page and `limit`, the next older page",
    "fields": "comma-separated keys: rows of bare values instead of objects",
}

JOB_ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/jobs",
        jobs.submit,
        "Submit a job, one per batch line, or resubmit old ones; with dry_run only forecast what would happen.",
        "job (with advise: vram) or ids (of a batch, once all of its jobs are made), with a key: existing, differs; or "
        "dry_run",
        body={
            "spec": {"$ref": "#/components/schemas/Spec"},
            "batch": STRINGS,
            "dry_run": {"type": "boolean"},
            "advise": {"type": "boolean"},
            "key_again": {"type": "string", "enum": list(AGAIN)},
            "resubmit": IDS["ids"],
        },
    ),
    Route(
        "GET",
        "/v1/jobs",
        jobs.listing,
        "List jobs; active ones unless ids or states are given.",
        "jobs, or fields and rows",
        query={
            **FILTERS,
            "order": "id (default), or queue: running jobs, then pending ones with the next to start first",
            "fold": "1: of pending jobs of one user with the same name, GPUs asked for and reason only the first; "
            "`folded` has by its id [ids of them all, how many]",
            "summary": "1: also count these jobs by state, and GPUs in total and free",
            "progress": "1: also the progress of jobs that report it, as id: [fraction, eta_at]",
            "notices": "1: also drained nodes and GPUs, paused queues, and maintenance that is on or within a week",
        },
    ),
    Route(
        "GET",
        "/v1/history",
        jobs.history,
        "List jobs with all their runs.",
        "jobs, or fields and rows",
        query={**FILTERS, "fields": FILTERS["fields"] + "; `runs` is one of them"},
    ),
    Route("GET", "/v1/jobs/{id}", jobs.show, "Everything about one job: request, runs, story.", "job"),
    Route(
        "GET",
        "/v1/jobs/{id}/why",
        forecast.why,
        "Why a job is pending, with the facts; its place, when it starts, and what would make it start now.",
        "why",
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/limit-hint",
        forecast.limit,
        "How long jobs like a pending one ran, and when it would start with a time limit; null if none would help.",
        "hint",
    ),
    Route(
        "GET",
        "/v1/starts",
        forecast.starts,
        "Earliest and latest start of pending jobs; null is unknown.",
        "starts, accuracy, predictions",
        query={name: doc for name, doc in FILTERS.items() if name not in ("fields", "since")},
    ),
    Route(
        "GET",
        "/v1/series",
        series.show,
        "What cards, queues or one job's runs did over time, in a bounded number of steps; null is unknown.",
        "series",
        query={
            "cards": "all (the default), or comma-separated UUIDs, indexes or NODE:INDEX",
            "queues": "all, or comma-separated names; the whole cluster is the one without a name",
            "job": "id of a job: its last run, or that of `run`",
            "run": "number of a run of the job",
            "from": "first instant (epoch seconds); a negative one is that long ago. Default: an hour ago",
            "to": "last instant; default: now",
            "points": "steps at most; default 256",
            "fields": "comma-separated names; default all",
            "holders": "1: with cards, also the runs that used each; those of hidden jobs have no job",
        },
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/attach",
        foreground.attach,
        "The socket of a foreground job's current run, for its client.",
        "attach",
    ),
    Route(
        "POST",
        "/v1/jobs/{id}/enter",
        foreground.enter,
        "Open doors into a running job, each for one client of its owner, on the nodes named, else one on "
        "that of the caller or its first; none if it is not running.",
        "enter",
        body={"node": {"type": "string"}, "nodes": {"type": "array", "items": {"type": "string"}}},
    ),
    Route(
        "POST",
        "/v1/jobs/{id}/connect",
        foreground.connect,
        "Connect a client of the owner to a part of a run on any node: with a token to a door, else to its foreground. "
        "Needs `Upgrade: tcp`; after the answer 101 the connection is the client's.",
        "",
        query={
            "run": "handle of the run, such as 12.1",
            "node": "of the run",
            "token": "of a door; absent: the foreground of the run",
            "return": "1: the client was connected before, so that where nobody listens now nobody will",
        },
        content=UPGRADED,
    ),
    Route("GET", "/v1/inside", foreground.inside, "The job that the calling process belongs to, if any.", "inside"),
    Route("GET", "/v1/jobs/{id}/script", jobs.script, "The script or command as submitted.", "script, argv"),
    Route(
        "POST",
        "/v1/jobs/cancel",
        jobs.cancel,
        "End jobs, or send them a signal.",
        "cancelled, signalled, ended, missing",
        body={
            **IDS,
            **CHOICE,
            "signal": {"type": ["integer", "null"], "minimum": 1, "maximum": 64},
            "main_only": {"type": "boolean"},
            "to": {"type": "string", "enum": list(SIGNAL_SCOPES)},
        },
    ),
    Route(
        "POST",
        "/v1/jobs/hold",
        jobs.hold,
        "Hold jobs, by ids or filters; those under running are held from their next run on.",
        "changed, unchanged, running, notes (on tasks that are in Slurm, if there are any)",
        body={**IDS, **CHOICE},
    ),
    Route(
        "POST",
        "/v1/jobs/release",
        jobs.release,
        "Undo a hold, by ids or filters.",
        "changed, unchanged",
        body={**IDS, **CHOICE},
    ),
    Route(
        "POST",
        "/v1/jobs/suspend",
        jobs.suspend,
        "Suspend running jobs; those under kept keep their GPUs.",
        "changed, unchanged, kept",
        body=IDS,
    ),
    Route("POST", "/v1/jobs/resume", jobs.resume, "Resume suspended jobs.", "changed, unchanged", body=IDS),
    Route(
        "POST",
        "/v1/jobs/requeue",
        jobs.requeue,
        "End runs and requeue their jobs; with hold until they are released.",
        "changed",
        body={**IDS, "hold": {"type": "boolean"}},
    ),
    Route(
        "POST",
        "/v1/jobs/update",
        jobs.update,
        "Change the requests of jobs.",
        "changed",
        body={**IDS, "changes": {"$ref": "#/components/schemas/Changes"}},
    ),
    Route(
        "GET",
        "/v1/wait",
        jobs.wait,
        "Wait until jobs have ended, or until one has left a state or run.",
        "done, jobs",
        query={
            "ids": "comma-separated ids; @ is the caller's last job",
            "timeout_s": "answer after this long at the latest; at most 300",
            "state_not": "one id only: answer once its state differs from this",
            "run_not": "one id only: answer once its run number differs from this",
        },
    ),
    Route(
        "GET",
        "/v1/ended",
        completions.ended,
        "The caller's jobs that end after a cursor, as they end; without one, the current cursor.",
        "cursor, jobs, missed (the cursor is too old: look at the jobs themselves)",
        query={
            "after": "the cursor of an earlier answer",
            "timeout_s": "answer after this long at the latest; at most 300",
        },
    ),
    Route(
        "GET",
        "/v1/logs",
        logs.logs,
        "Where the runs of jobs write, and whether more output may follow; for an array, all tasks that have run.",
        "jobs, arrays, done, version, more (ask again at once with this version for further tasks)",
        query={
            "ids": "comma-separated ids; @ is the caller's last job",
            "since": "the version of the previous answer: wait until something has changed; of arrays only those tasks "
            "that have not ended, or have since",
            "timeout_s": "answer after this long at the latest; at most 300",
        },
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/output",
        logs.output,
        "Output of a run on another node: a line of JSON with the cursor behind it, then its bytes; none if nothing "
        "new was written. Runs on the daemon's own node are read from their files.",
        "cursor, is_found, is_skipped, path",
        query={
            "run": "number of the run; the last one unless given",
            "file": "number of the file among outputs (with err, errors) of the run in /v1/logs, from 0",
            "err": "1: its error output",
            "cursor": "of the previous answer, to continue after it",
            "lines": "begin at the last this many lines; with the oldest output unless given",
            "wait_s": "wait this long for new output; at most 20",
        },
        content="application/octet-stream",
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/tail",
        logs.tail,
        "The end of what a run wrote, at most 64 KiB, on whatever node; read with the rights of the job's user.",
        "run, path, node, files (how many it writes), is_found, is_cut, text",
        query={
            "run": "number of the run; the last one unless given",
            "file": "number of the file among outputs (with err, errors) of the run in /v1/logs, from 0",
            "err": "1: its error output",
            "lines": "the last this many lines; at most 2000, and 200 unless given",
        },
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/log",
        logs.log_page,
        "What a run wrote, in pages of 64 KiB that end with a line where lines are short; read with the rights of the "
        "job's user. Files that were put aside are left out.",
        "run, path, node, files (labels), has_other (whether output and errors have separate files), is_found, "
        "page, pages, size, text",
        query={
            "run": "number of the run; the last one unless given",
            "file": "number of the file among files, from 0",
            "err": "1: its error output",
            "page": "from 1; the last one unless given",
        },
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/snapshot",
        logs.snapshot,
        "A piece of a tar archive of the job's code snapshot, for nodes that do not have it; one of less than 8 MiB is "
        "the last. For the job's owner.",
        "nothing else",
        query={"at": "where the piece begins, in bytes; 0 unless given"},
        content="application/octet-stream",
    ),
    Route(
        "GET",
        "/v1/steps",
        steps.listing,
        "Steps of jobs, as started by srun; without filters those of active jobs.",
        "steps",
        query={
            **{name: doc for name, doc in FILTERS.items() if name != "fields"},
            "open": "1: only steps that run now",
            "all_runs": "1: also steps of earlier runs of a requeued job",
        },
    ),
    Route(
        "GET",
        "/v1/jobs/{id}/usage",
        steps.usage,
        "What the tasks of a running job's steps use on each of its nodes now; tasks is null for a node that does not "
        "answer.",
        "usage (id, nodes: node, tasks: step, task, pids, cpu_s, peak_mem_mib, mem_mib, peak_virtual_mib)",
    ),
    Route(
        "POST",
        "/v1/steps",
        steps.begin,
        "Begin a step in the calling process's job, on its nodes; step is null while it has to wait: why is busy while "
        "other steps have what it requests, starting while nodes of the job have not started.",
        "step (step, node, has_own_gpus, tasks, nodes (node, nodeid, rank, tasks, cpus, gpus, address)), why",
        body={name: json_schema(field) for name, field in steps.BEGIN_FIELDS.items()},
    ),
    Route(
        "POST",
        "/v1/steps/end",
        steps.end,
        "Record how a step of the calling process's job has ended; only the first end counts.",
        "step",
        body={name: json_schema(field) for name, field in steps.END_FIELDS.items()},
    ),
    Route(
        "POST",
        "/v1/steps/cancel",
        steps.cancel,
        "End a step, or send its processes a signal.",
        "cancelled, signalled, ended",
        body={name: json_schema(field) for name, field in steps.CANCEL_FIELDS.items()},
    ),
    Route(
        "POST",
        "/v1/pipelines",
        pipelines.submit,
        "Submit all jobs of a pipeline at once, or with dry_run check them; pipeline is its id, jobs are ids by step.",
        "pipeline, jobs",
        body={
            "name": {"type": "string"},
            "source": {"type": "string"},
            "environments": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "string"}}},
            "steps": {"type": "array", "items": pipelines.step_schema()},
            "dry_run": {"type": "boolean"},
        },
    ),
    Route(
        "GET",
        "/v1/pipelines",
        pipelines.listing,
        "The state of pipelines; those with unfinished jobs unless ids are given.",
        "pipelines",
        query={"ids": "comma-separated ids of pipelines"},
    ),
    Route("GET", "/v1/pipelines/{id}", pipelines.show, "A pipeline with its steps and its text.", "pipeline"),
    Route(
        "POST",
        "/v1/pipelines/{id}/resume",
        pipelines.resume,
        "Rerun the steps that did not end COMPLETED; jobs are the new ids by step.",
        "pipeline, jobs",
        body={},
    ),
)
