"""The daemon's answer that a replay begins with."""

from __future__ import annotations

from aiohttp import web

from gpusched import __version__
from gpusched.access import check_admin
from gpusched.addons.simulate.recording import Recording, encode
from gpusched.api.asked import RequestQuery
from gpusched.api.requests import respond
from gpusched.api.route import Route
from gpusched.api.visibility import Viewer


async def snapshot(viewer: Viewer, _: RequestQuery) -> web.Response:
    """The scheduler's whole input right now, for replay; docs/reference/snapshot.md lists every field."""
    service, caller = viewer.service, viewer.caller
    scheduler = service.scheduler
    check_admin(caller, "see the policy's whole input", service.settings)
    service.daemon.audit(caller, "record", "the policy's input")
    now = scheduler.now()
    seen = scheduler.snapshot_with_queue(now)
    recording = Recording.of(seen, service.settings, __version__, service.scheduler.plugins.names)
    # Immutable, and many megabytes for a long queue: serialised on another thread.
    return await service.work_out(lambda: respond(**encode(recording)), caller)


ROUTES = (Route("GET", "/v1/snapshot", snapshot, "snapshot_version, release, plugins, names, snapshot, settings"),)
