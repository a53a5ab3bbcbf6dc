"""Handlers for clients of jobs in the foreground: where to attach, and whether they are inside a job."""

from __future__ import annotations

from aiohttp import web

from gpusched.access import Act
from gpusched.api.auth import pid_of
from gpusched.api.handlers.jobs import respond
from gpusched.api.service import service_of
from gpusched.api.visibility import viewer_of
from gpusched.model.job import split_run_id
from gpusched.model.states import JobState


async def attach(request: web.Request) -> web.Response:
    """GET /v1/jobs/{id}/attach"""
    service = service_of(request)
    job = viewer_of(request).read(request.match_info["id"], Act.ATTACH)
    foreground = job.spec.interactive
    path = None
    if foreground is not None and job.run and job.state is not JobState.PENDING and not job.state.is_final:
        path = service.daemon.attach_path(job)
    return respond(
        attach={
            "id": job.shown_id,
            "state": job.state.value,
            "path": path,
            "is_interactive": foreground is not None,
            "keep": foreground is not None and foreground.keep,
        }
    )


async def inside(request: web.Request) -> web.Response:
    """GET /v1/inside"""
    service = service_of(request)
    viewer = viewer_of(request)
    pid = pid_of(request)
    handle = None if pid is None else service.daemon.run_of_process(pid)
    if handle is None:
        return respond(inside=None)
    job_id, number = split_run_id(handle)
    job = service.find(job_id)
    viewer.check(job, Act.ATTACH)
    return respond(inside={"id": job.shown_id, "run": number})
