"""Handlers about the daemon: its state, settings and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from aiohttp import web

from gpusched import __version__
from gpusched.access import check_admin, is_private
from gpusched.api.auth import caller_of
from gpusched.api.render import plain
from gpusched.api.requests import check_keys, number, read_body, respond
from gpusched.api.service import DOCUMENT, service_of
from gpusched.api.visibility import Viewer, viewer_of
from gpusched.errors import UsageError
from gpusched.lifecycle.arrays import job_count
from gpusched.model.commands import Reload
from gpusched.model.metrics import CONTENT_TYPES, FORMATS, PROMETHEUS
from gpusched.model.recording import Recording, encode
from gpusched.model.spec import MAX_INSTANT
from gpusched.model.units import printable

MOST_ENTRIES = 1000
"""Changes of settings in one answer."""


async def reload(request: web.Request) -> web.Response:
    """POST /v1/reload"""
    body = await read_body(request)
    check_keys(body, "what")
    what = body.get("what", "gctl reload")
    if not isinstance(what, str):
        raise UsageError("what is not a text", "leave it out, or give the command line")
    return respond(**await service_of(request).daemon.ask(Reload(caller_of(request), printable(what))))


async def settings_log(request: web.Request) -> web.Response:
    """GET /v1/settings-log"""
    service, caller = service_of(request), caller_of(request)
    check_admin(caller, "see who changed the settings", service.settings)
    since = number(request, "since", 0.0, 0.0, MAX_INSTANT) or 0.0
    limit = number(request, "limit", MOST_ENTRIES, 1, MOST_ENTRIES) or MOST_ENTRIES
    found = service.daemon.settings_log(since, int(limit))
    return respond(entries=found)


async def preset(request: web.Request) -> web.Response:
    """GET /v1/preset"""
    return respond(preset=viewer_of(request).service.daemon.presets.table())


async def judge_presets(request: web.Request) -> web.Response:
    """POST /v1/preset/judge"""
    service, caller = service_of(request), caller_of(request)
    check_admin(caller, "have the presets judged", service.settings)
    service.daemon.presets.judge_now()
    service.daemon.audit(caller, "judge", "the presets")
    return respond(preset=service.daemon.presets.table())


async def status(request: web.Request) -> web.Response:
    """GET /v1/status"""
    viewer = viewer_of(request)
    service = viewer.service
    scheduler = service.scheduler
    reading, health = scheduler.cluster.head.reading, service.daemon.health()
    return respond(
        daemon={
            **service.daemon.facts,
            "now": time.time(),
            "jobs": _counts(viewer),
            "gpu_source": reading.source if reading else None,
            "warnings": health.warnings,
            "limits": plain(service.settings.limit),
            "grace_s": service.settings.life.grace_s,
            "tick": {"count": health.ticks, "last_ms": health.last_tick_ms, "p95_ms": health.p95_tick_ms},
            "failing_steps": health.failing_steps,
        }
    )


def _counts(viewer: Viewer) -> dict[str, int]:
    """Unfinished jobs visible to the caller, by state."""
    state = viewer.service.scheduler.state
    counts = state.counts()
    if not viewer.is_restricted:
        return counts
    seen: Counter[str] = Counter()
    for job in state.jobs.values():
        if viewer.sees(job):
            seen[job.state.value.lower()] += job_count(job)
    return {name: seen[name] for name in counts}


async def metrics(request: web.Request) -> web.Response:
    """GET /v1/metrics"""
    service, caller = service_of(request), caller_of(request)
    if any(is_private(what, caller, service.settings) for what in ("jobs", "usage")):
        check_admin(caller, "see the numbers of all users", service.settings)
    form = request.query.get("format", PROMETHEUS)
    if form not in FORMATS:
        raise UsageError(f"format is {printable(form, 40)!r}; it must be one of {', '.join(FORMATS)}", "leave it out")
    body = service.daemon.metrics().text(form).encode()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPES[form]})


async def shutdown(request: web.Request) -> web.Response:
    """POST /v1/shutdown"""
    service, caller = service_of(request), caller_of(request)
    check_admin(caller, "stop the daemon", service.settings)
    service.daemon.audit(caller, "shutdown", "the daemon")
    # After the answer: the loop ends once the server has sent it.
    asyncio.get_running_loop().call_later(0.01, service.daemon.stop)
    return respond(stopping=True)


async def doctor(request: web.Request) -> web.Response:
    """GET /v1/doctor"""
    viewer = viewer_of(request)
    return respond(
        checks=[
            {**check.document(), "text": viewer.text(check.text), "hint": viewer.text(check.hint)}
            for check in viewer.service.daemon.checks()
        ]
    )


async def snapshot(request: web.Request) -> web.Response:
    """GET /v1/snapshot"""
    service, caller = service_of(request), caller_of(request)
    scheduler = service.scheduler
    check_admin(caller, "see the policy's whole input", service.settings)
    service.daemon.audit(caller, "record", "the policy's input")
    now = scheduler.now()
    seen = scheduler.snapshot_with_queue(now)
    recording = Recording.of(seen, service.settings, __version__, service.scheduler.plugins.names)
    # Immutable, and many megabytes for a long queue: serialised on another thread.
    return await service.work_out(lambda: respond(**encode(recording)), caller)


async def openapi(request: web.Request) -> web.Response:
    """GET /v1/openapi.json"""
    caller_of(request)
    return web.json_response(request.app[DOCUMENT])
