"""The table of routes, from which the server registers handlers and the OpenAPI document is made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gpusched.api.handlers import (
    board,
    cluster,
    completions,
    daemon,
    forecast,
    foreground,
    jobs,
    logs,
    mig,
    pipelines,
    queues,
    reservations,
    series,
    statement,
    steps,
    table_settings,
)
from gpusched.api.handlers import web as web_page
from gpusched.api.schema import SPEC_FIELDS, json_schema
from gpusched.api.tokens import SCOPES
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


_IDS = {"ids": {"type": "array", "items": {"type": ["integer", "string"]}}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_CHOICE = {
    **dict.fromkeys(("users", "queues", "names", "states"), _STRINGS),
    "all": {"type": "boolean"},
    "dry_run": {"type": "boolean"},
}
"""Jobs that a command applies to, and whether it only lists them."""

_FILTERS = {
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

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/jobs",
        jobs.submit,
        "Submit a job, one per batch line, or resubmit old ones; with dry_run only forecast what would happen.",
        "job (with a key: existing, differs; with advise: vram), ids or dry_run",
        body={
            "spec": {"$ref": "#/components/schemas/Spec"},
            "batch": _STRINGS,
            "dry_run": {"type": "boolean"},
            "advise": {"type": "boolean"},
            "key_again": {"type": "string", "enum": list(AGAIN)},
            "resubmit": _IDS["ids"],
        },
    ),
    Route(
        "GET",
        "/v1/jobs",
        jobs.listing,
        "List jobs; active ones unless ids or states are given.",
        "jobs, or fields and rows",
        query={
            **_FILTERS,
            "order": "id (default), or queue: running jobs, then pending ones with the next to start first",
            "fold": "1: of pending jobs of one user with the same name, GPUs asked for and reason only the first; "
            "`folded` has by its id [ids of them all, how many]",
            "summary": "1: also count these jobs by state, and GPUs in total and free",
            "progress": "1: also the progress of jobs that report it, as id: [fraction, eta_at]",
            "notices": "1: also drained nodes and GPUs, and maintenance that is on or within a week",
        },
    ),
    Route(
        "GET",
        "/v1/history",
        jobs.history,
        "List jobs with all their runs.",
        "jobs, or fields and rows",
        query={**_FILTERS, "fields": _FILTERS["fields"] + "; `runs` is one of them"},
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
        query={name: doc for name, doc in _FILTERS.items() if name not in ("fields", "since")},
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
        "Open a door into a running job, a socket for one client of its owner; null if it is not running.",
        "enter",
        body={"node": {"type": "string"}},
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
            **_IDS,
            **_CHOICE,
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
        "changed, unchanged, running",
        body={**_IDS, **_CHOICE},
    ),
    Route(
        "POST",
        "/v1/jobs/release",
        jobs.release,
        "Undo a hold, by ids or filters.",
        "changed, unchanged",
        body={**_IDS, **_CHOICE},
    ),
    Route(
        "POST",
        "/v1/jobs/suspend",
        jobs.suspend,
        "Suspend running jobs; those under kept keep their GPUs.",
        "changed, unchanged, kept",
        body=_IDS,
    ),
    Route("POST", "/v1/jobs/resume", jobs.resume, "Resume suspended jobs.", "changed, unchanged", body=_IDS),
    Route(
        "POST",
        "/v1/jobs/requeue",
        jobs.requeue,
        "End runs and requeue their jobs; with hold until they are released.",
        "changed",
        body={**_IDS, "hold": {"type": "boolean"}},
    ),
    Route(
        "POST",
        "/v1/jobs/update",
        jobs.update,
        "Change the requests of jobs.",
        "changed",
        body={**_IDS, "changes": {"$ref": "#/components/schemas/Changes"}},
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
            "after": "a cursor of an answer before",
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
            "since": "the version of the answer before: wait until something has changed; of arrays only those tasks "
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
            "cursor": "of the answer before, to go on behind it",
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
        "run, path, node, files (labels), has_other (whether output and errors have files of their own), is_found, "
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
            **{name: doc for name, doc in _FILTERS.items() if name != "fields"},
            "open": "1: only steps that run now",
            "all_runs": "1: also steps of earlier runs of a requeued job",
        },
    ),
    Route(
        "POST",
        "/v1/steps",
        steps.begin,
        "Begin a step in the calling process's job; step is null while the resources it requests are in use.",
        "step (step, node, has_own_gpus, gpus: index, visible), why",
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
    Route(
        "GET",
        "/v1/priorities",
        queues.priorities,
        "The priority of each pending job with its parts and its tier, and the weights of the factors.",
        "priorities, weights, order",
        query={name: doc for name, doc in _FILTERS.items() if name not in ("fields", "since")},
    ),
    Route(
        "GET",
        "/v1/usage",
        queues.usage,
        "Resources that runs held within a time span, summed; open runs count up to now.",
        "usage, by, since, until",
        query={
            **{name: _FILTERS[name] for name in ("ids", "users", "names", "queues")},
            "states": "comma-separated states of the jobs; all unless given",
            "by": "user (default), account or queue",
            "since": "begin of the span; 7 days ago unless given",
        },
    ),
    Route(
        "GET",
        "/v1/statement",
        statement.statement,
        "What accounts and users held, used and may still use in a calendar month of the daemon's time zone; of "
        "callers from whom usage is hidden only their own.",
        "month, since, until, now, time_zone, cluster_name, is_final, is_complete, currency, rows (the whole machine, "
        "then each account before its users and the accounts below it)",
        query={"month": "2026-11, this (default) or last"},
    ),
    Route(
        "GET",
        "/v1/accounts",
        queues.accounts,
        "The tree of accounts: members, shares, decayed usage, fair-share factors, QOSs; and which are the caller's.",
        "accounts, half_life_s, user, own_accounts, default_account, coordinated_accounts",
        query={"name": "this account and all below it"},
    ),
    Route(
        "GET",
        "/v1/budgets",
        queues.budgets,
        "GPU-hour budgets of accounts and users in this period: granted, used, booked by running jobs, left.",
        "budgets",
        query={"name": "this account"},
    ),
    Route(
        "GET",
        "/v1/qos",
        queues.qualities_of_service,
        "Qualities of service: priority, limits and what each may preempt; empty where none is configured.",
        "qos, default",
    ),
    Route(
        "GET",
        "/v1/queues",
        queues.queues,
        "Queues: what each is guaranteed, uses, borrows and lends, and every loan.",
        "queues, loans",
        query={"name": "this queue and those right below it"},
    ),
    Route(
        "GET",
        "/v1/board",
        board.board,
        "What viewers of the queue watch: totals, nodes, cards with their holders, and a window of rows; after a "
        "version only what has changed since.",
        "version, full (whether it replaces what was known), now, parts (daemon, notices, me, totals; only those that "
        "have changed), lists (nodes, cards, rows; only those that have changed: order is all ids, null if unchanged; "
        "set are new and changed entries)",
        query=board.PARAMETERS,
    ),
    Route(
        "GET",
        "/v1/cluster",
        cluster.cluster,
        "Nodes, GPUs, queues and reservations.",
        "nodes, gpus, queues, loans, reservations, cluster_name",
    ),
    Route(
        "GET",
        "/v1/foreign",
        cluster.foreign,
        "GPU processes that belong to no job; how many pending jobs would start now without each, and without all.",
        "foreign, jobs_kept_waiting",
    ),
    Route(
        "POST",
        "/v1/adopt",
        cluster.adopt,
        "Turn a GPU process without a job into one; it keeps running, and its GPUs are booked.",
        "adopted: id, gpus, uuids",
        body={
            "pid": {"type": "integer", "minimum": 1},
            **{name: json_schema(SPEC_FIELDS[name]) for name in cluster.ADOPTION_FIELDS},
        },
    ),
    Route(
        "POST",
        "/v1/drain",
        cluster.drain,
        "Drain nodes or GPUs: keep new work off; labels names the GPUs, by UUID.",
        "changed, unchanged, labels",
        body={"targets": _STRINGS, "message": {"type": "string"}},
    ),
    Route(
        "POST",
        "/v1/down",
        cluster.down,
        "Declare nodes that do not answer down: their runs are lost, and ended when they come back; refused without "
        "confirm.",
        "changed, lost",
        body={"targets": _STRINGS, "message": {"type": "string"}, "confirm": {"type": "boolean"}},
    ),
    Route(
        "GET",
        "/v1/mig",
        mig.cards,
        "GPUs that can do MIG: their profiles, their layout, and the one that was set by command.",
        "cards",
    ),
    Route(
        "POST",
        "/v1/mig",
        mig.change,
        "Divide a GPU otherwise as soon as it is idle; a layout of null forgets the one that was set; for admins.",
        "plan (before, after, is_changed, waits_for, notes)",
        body={
            "target": {"type": "string"},
            "layout": {"type": ["string", "null"]},
            "dry_run": {"type": "boolean"},
        },
    ),
    Route(
        "POST",
        "/v1/undrain",
        cluster.undrain,
        "Undrain nodes or GPUs; labels names the GPUs, by UUID.",
        "changed, unchanged, labels",
        body={"targets": _STRINGS},
    ),
    Route(
        "GET",
        "/v1/reservations",
        reservations.listing,
        "Reservations that are not over, by their next window.",
        "reservations",
    ),
    Route(
        "POST",
        "/v1/reservations",
        reservations.reserve,
        "Reserve GPUs, cores and memory for users or accounts, once or repeatedly.",
        "reservation, notes",
        body={name: json_schema(field) for name, field in reservations.FIELDS.items()},
    ),
    Route(
        "POST",
        "/v1/unreserve",
        reservations.unreserve,
        "Remove reservations from the calendar; jobs inside keep running.",
        "changed, waiting",
        body={"names": _STRINGS},
    ),
    Route(
        "POST",
        "/v1/reload",
        daemon.reload,
        "Reload the config file; settings that need a restart are named and stay as they are.",
        "changed, needs_restart",
        body={"what": {"type": "string"}},
    ),
    Route(
        "GET",
        "/v1/settings-log",
        daemon.settings_log,
        "Changes of the settings: who, when, by which command, each key with its value before and after; for admins.",
        "entries",
        query={"since": "changes since this instant, UTC epoch seconds", "limit": "only the newest ones, at most 1000"},
    ),
    Route(
        "POST",
        "/v1/settings-log/undo",
        table_settings.undo,
        "Take back a change of the settings that live in the job table; for admins.",
        "undone, what",
        body={"id": {"type": "integer"}},
    ),
    Route(
        "GET",
        "/v1/limits",
        table_settings.limits,
        "Limits of single users: those of the config file, and those with an end or of one account.",
        "limits",
    ),
    Route(
        "POST",
        "/v1/limits",
        table_settings.set_limit,
        "Limit a user until an instant or in one account; for admins.",
        "limit",
        body={name: json_schema(field) for name, field in table_settings.LIMIT_FIELDS.items()},
    ),
    Route(
        "POST",
        "/v1/limits/remove",
        table_settings.remove_limit,
        "Remove such a limit.",
        "limit",
        body={name: json_schema(field) for name, field in table_settings.REMOVAL_FIELDS.items()},
    ),
    Route(
        "POST",
        "/v1/members",
        table_settings.change_members,
        "Add users to an account and remove users from it; for its coordinators.",
        "members",
        body={"account": {"type": "string"}, "add": _STRINGS, "remove": _STRINGS, "what": {"type": "string"}},
    ),
    Route(
        "POST",
        "/v1/credits",
        table_settings.give_credit,
        "Add GPU-hours to the budget of an account, for its present period; for admins.",
        "credit",
        body={name: json_schema(field) for name, field in table_settings.CREDIT_FIELDS.items()},
    ),
    Route(
        "GET",
        "/v1/preset",
        daemon.preset,
        "Which preset is in force and why, and how each would have performed over the last weeks.",
        "preset",
    ),
    Route(
        "POST",
        "/v1/preset/judge",
        daemon.judge_presets,
        "Replay the last weeks under every preset now; for admins.",
        "preset",
        body={},
    ),
    Route(
        "GET",
        "/v1/metrics",
        daemon.metrics,
        "Metrics of the queue, GPUs, users and the daemon itself, for Prometheus.",
        "text, see docs/reference/metrics.md",
        query={"format": "prometheus (default: text format 0.0.4) or openmetrics (1.0.0)"},
        content="text/plain",
    ),
    Route(
        "POST",
        "/v1/web/code",
        web_page.code,
        "A code with which the caller signs in to the web page once, within a minute; serving is null unless a web "
        "process runs.",
        "code, ends_at, lasts_s, serving (address, port, user)",
        body={},
    ),
    Route(
        "POST",
        "/v1/web/sessions",
        web_page.begin,
        "Begin a session of the web page, by a code or for a user whom a trusted proxy names; for the web process.",
        "token (for the header Gpusched-Session), user, uid, scope",
        body={"code": {"type": "string"}, "user": {"type": "string"}, "allow": _STRINGS},
    ),
    Route("GET", "/v1/web/session", web_page.session, "The session of the request.", "user, scope, end_at"),
    Route(
        "POST",
        "/v1/web/session/end",
        web_page.end,
        "End the session of the request; without one, or with everywhere, all sessions and codes of the caller.",
        "ended",
        body={"everywhere": {"type": "boolean"}},
    ),
    Route(
        "POST",
        "/v1/web/tokens",
        web_page.make_token,
        "Make a token with which a program uses /api/v1/ of the web page; its text is in this answer alone.",
        "token, name, user, scope, made_at, used_at, expires_at",
        body={
            "name": {"type": "string"},
            "scope": {"type": "array", "items": {"enum": list(SCOPES)}},
            "lasts_s": {"type": "number"},
        },
    ),
    Route(
        "GET",
        "/v1/web/tokens",
        web_page.tokens,
        "The caller's tokens.",
        "tokens",
        query={"all": "1: those of all users; for admins"},
    ),
    Route(
        "POST",
        "/v1/web/tokens/revoke",
        web_page.revoke_token,
        "End a token at once; those of another user for admins.",
        "revoked",
        body={"name": {"type": "string"}, "user": {"type": "string"}},
    ),
    Route(
        "GET",
        "/v1/web/token",
        web_page.token,
        "The token of the request.",
        "name, user, scope, made_at, used_at, expires_at",
    ),
    Route(
        "POST",
        "/v1/web/serving",
        web_page.serving,
        "Say where the page is served, at least once a minute; for the web process.",
        "now, user_header, proxy_users, allow",
        body={"address": {"type": "string"}, "port": {"type": ["integer", "null"]}},
    ),
    Route("GET", "/v1/status", daemon.status, "The daemon itself.", "daemon"),
    Route("POST", "/v1/shutdown", daemon.shutdown, "Stop the daemon; runs go on.", "stopping", body={}),
    Route("GET", "/v1/doctor", daemon.doctor, "Checks that only the daemon can make.", "checks"),
    Route(
        "GET",
        "/v1/snapshot",
        daemon.snapshot,
        "The scheduler's whole input right now, for replay; docs/reference/snapshot.md lists every field.",
        "snapshot_version, release, plugins, names, snapshot, settings",
    ),
    Route("GET", "/v1/openapi.json", daemon.openapi, "This description.", "the OpenAPI document itself"),
)
