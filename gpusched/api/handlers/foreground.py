"""The client attached to a foreground job, and its lease: requested from the run itself on demand; doors into runs."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from aiohttp import web

from gpusched.access import Act
from gpusched.api.auth import node_peer_of, pid_of
from gpusched.api.requests import check_keys, read_body, respond
from gpusched.api.service import ApiService, service_of
from gpusched.api.visibility import viewer_of
from gpusched.errors import NotReady, Refused, UsageError
from gpusched.model.commands import EnterJob
from gpusched.model.job import Interactive, Job, run_id, split_run_id
from gpusched.model.layout import count_tasks
from gpusched.model.states import JobState, RunState
from gpusched.model.units import printable
from gpusched.model.value import replace

_START_S = 10.0
"""Longest wait for a run to report its start."""
_LOOK_S = 0.02


async def foreground_json(job: Job, service: ApiService) -> dict[str, Any] | None:
    """For `gshow`; None for a job in the background. `client` is also null if unknown: see `is_known`."""
    spec = job.spec.interactive
    if spec is None:
        return None
    facts: dict[str, Any] = {
        "terminal": spec.pty,
        "keep": spec.keep,
        "lease_s": spec.lease_s,
        "client": None,
        "lease_ends_at": None,
        "is_known": True,
    }
    if job.state is JobState.PENDING:
        return {**facts, "client": _waiting(job, spec, service)}
    if job.state.is_final:
        return facts
    status = await service.daemon.foreground_status(job)
    if status is None:
        return {**facts, "is_known": False}
    pid, since_at, lease_ends_at = status
    if pid is not None:
        facts["client"] = {"pid": int(pid), "since_at": since_at}
    if job.state is not JobState.SUSPENDED:
        facts["lease_ends_at"] = lease_ends_at
    return facts


def _waiting(job: Job, spec: Interactive, service: ApiService) -> dict[str, Any] | None:
    client = spec.client
    if client is None or not service.daemon.is_alive(client):
        return None
    return {"pid": client.pid, "since_at": job.submit_at}


async def attach(request: web.Request) -> web.Response:
    """GET /v1/jobs/{id}/attach"""
    service = service_of(request)
    job = viewer_of(request).read(request.match_info["id"], Act.ATTACH)
    foreground = job.spec.interactive
    path = node = None
    if foreground is not None and job.run and job.state is not JobState.PENDING and not job.state.is_final:
        run = service.scheduler.world.open_runs.get(run_id(job.id, job.run))
        if run is not None:
            near = _node_of_caller(request)
            node = None if run.node == near else run.node
            path = service.daemon.client_path(job, run, run.node, near)
    return respond(
        attach={
            "id": job.shown_id,
            "state": job.state.value,
            "path": path,
            "node": node,
            "is_interactive": foreground is not None,
            "keep": foreground is not None and foreground.keep,
        }
    )


def _node_of_caller(request: web.Request) -> str:
    peer = node_peer_of(request)
    return service_of(request).scheduler.cluster.head.name if peer is None else peer.node


async def enter(request: web.Request) -> web.Response:
    """POST /v1/jobs/{id}/enter"""
    service, viewer = service_of(request), viewer_of(request)
    job = viewer.read(request.match_info["id"], Act.ENTER)
    body = await read_body(request)
    check_keys(body, "node")
    node = body.get("node")
    if node is not None and not isinstance(node, str):
        raise UsageError("node is no text", "see GET /v1/openapi.json")
    open_run = service.scheduler.world.open_runs.get(run_id(job.id, job.run))
    if open_run is not None and node is not None and node not in open_run.nodes:
        raise Refused(
            f"job {job.shown_id} does not run on node {printable(node, 60)}", f"it runs on: {', '.join(open_run.nodes)}"
        )
    token = secrets.token_hex(8)
    handle = (await service.daemon.ask(EnterJob(viewer.caller, job.id, token)))["run"]
    run, path = service.scheduler.world.open_runs.get(handle or ""), None
    if run is not None:
        near = _node_of_caller(request)
        there = node or (near if near in run.nodes else run.node)
        path = service.daemon.client_path(job, run, there, near, token)
    return respond(enter={"id": job.shown_id, "state": service.find(job.id).state.value, "path": path})


async def run_of_process(service: ApiService, pid: int, uid: int) -> str | None:
    """The run that a process of a user belongs to; waits for runs of that user that are being started.

    A run's first process may ask before its supervisor has reported the start. Raises: NotReady.
    """
    until = asyncio.get_running_loop().time() + _START_S
    while (handle := service.daemon.run_of_process(pid)) is None:
        world = service.scheduler.world
        is_starting = any(
            run.state is RunState.STARTING and world.jobs[run.job_id].uid == uid for run in world.open_runs.values()
        )
        if not is_starting:
            break
        if asyncio.get_running_loop().time() > until:
            raise NotReady("a job of yours is still being started, and its processes are unknown", "try again")
        await asyncio.sleep(_LOOK_S)
    return handle


async def inside(request: web.Request) -> web.Response:
    """GET /v1/inside"""
    service = service_of(request)
    viewer = viewer_of(request)
    pid, peer = pid_of(request), node_peer_of(request)
    if peer is not None:
        handle = peer.run
    else:
        handle = None if pid is None else await run_of_process(service, pid, viewer.caller.uid)
    if handle is None:
        return respond(inside=None)
    job_id, number = split_run_id(handle)
    job = service.find(job_id)
    viewer.check(job, Act.ATTACH)
    run = service.scheduler.world.open_runs.get(handle)
    if run is not None and peer is not None and peer.node in run.nodes:
        rank = run.nodes.index(peer.node)
        # The daemon knows the supervisor on the first node alone.
        run = replace(run.on(rank), supervisor_pid=None) if rank else run
    return respond(
        inside={
            "id": job.shown_id,
            "run": number,
            "job_id": job.id,
            "array_id": job.array_id,
            "task": job.task,
            "name": job.spec.name,
            "user": job.user,
            "uid": job.uid,
            "account": job.spec.shown_account,
            "queue": job.spec.queue,
            "node": service.scheduler.node_name if run is None else run.node,
            "cpus": max(1, int(job.spec.request.cpus if run is None else run.cpus)),
            "gpus": 0 if run is None else len(run.gpus),
            "ntasks": count_tasks(job.spec.request, job.spec.layout),
            "open_mode": job.spec.launch.open_mode,
            "supervisor_pid": None if run is None else run.supervisor_pid,
        }
    )
