"""Handlers about the daemon: its state, settings and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated

from aiohttp import web

from gpusched.access import check_admin, is_private
from gpusched.api.asked import RequestBody, RequestQuery, about, one_of
from gpusched.api.render import plain
from gpusched.api.requests import respond
from gpusched.api.service import DOCUMENT
from gpusched.api.visibility import Viewer
from gpusched.lifecycle.arrays import job_count
from gpusched.model.commands import Reload
from gpusched.model.metrics import CONTENT_TYPES, FORMATS, PROMETHEUS
from gpusched.model.spec import MAX_INSTANT
from gpusched.model.units import printable

MOST_ENTRIES = 1000
"""Changes of settings in one answer."""


class ReloadBody(RequestBody):
    what: str = "gctl reload"


async def reload(viewer: Viewer, body: ReloadBody) -> web.Response:
    """Reload the config file; settings that need a restart are named and stay as they are."""
    return respond(**await viewer.service.daemon.ask(Reload(viewer.caller, printable(body.what))))


class ChangesQuery(RequestQuery):
    since: Annotated[float, about("changes since this instant, UTC epoch seconds", ge=0, le=MAX_INSTANT)] = 0.0
    limit: Annotated[int, about("only the newest ones", ge=1, le=MOST_ENTRIES)] = MOST_ENTRIES


async def settings_log(viewer: Viewer, query: ChangesQuery) -> web.Response:
    """Changes of the settings: who, when, by which command, each key with its value before and after; for admins."""
    service, caller = viewer.service, viewer.caller
    check_admin(caller, "see who changed the settings", service.settings)
    return respond(entries=service.daemon.settings_log(query.since, query.limit))


async def preset(viewer: Viewer, _: RequestQuery) -> web.Response:
    """Which preset is in force and why, and how each would have performed over the last weeks."""
    return respond(preset=viewer.service.daemon.presets.table())


async def judge_presets(viewer: Viewer, _: RequestBody) -> web.Response:
    """Replay the last weeks under every preset now; for admins."""
    service, caller = viewer.service, viewer.caller
    check_admin(caller, "have the presets judged", service.settings)
    service.daemon.presets.judge_now()
    service.daemon.audit(caller, "judge", "the presets")
    return respond(preset=service.daemon.presets.table())


async def status(viewer: Viewer, _: RequestQuery) -> web.Response:
    """The daemon itself."""
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


class MetricsQuery(RequestQuery):
    format: Annotated[str, one_of(FORMATS, "prometheus (default: text format 0.0.4) or openmetrics (1.0.0)")] = (
        PROMETHEUS
    )


async def metrics(viewer: Viewer, query: MetricsQuery) -> web.Response:
    """Metrics of the queue, GPUs, users and the daemon itself, for Prometheus."""
    service, caller = viewer.service, viewer.caller
    if any(is_private(what, caller, service.settings) for what in ("jobs", "usage")):
        check_admin(caller, "see the numbers of all users", service.settings)
    body = service.daemon.metrics().text(query.format).encode()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPES[query.format]})


async def shutdown(viewer: Viewer, _: RequestBody) -> web.Response:
    """Stop the daemon; runs continue."""
    service, caller = viewer.service, viewer.caller
    check_admin(caller, "stop the daemon", service.settings)
    service.daemon.audit(caller, "shutdown", "the daemon")
    # After the answer: the loop ends once the server has sent it.
    asyncio.get_running_loop().call_later(0.01, service.daemon.stop)
    return respond(stopping=True)


async def doctor(viewer: Viewer, _: RequestQuery) -> web.Response:
    """Checks that only the daemon can make."""
    return respond(checks=[check.document() for check in viewer.service.daemon.checks()])


async def openapi(viewer: Viewer, _: RequestQuery, request: web.Request) -> web.Response:
    """This description."""
    make = request.app[DOCUMENT]
    if not make.cache_info().currsize:
        await viewer.service.work_out(make, viewer.caller)
    return web.json_response(text=make())
