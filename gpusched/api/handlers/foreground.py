"""The client attached to a foreground job, and its lease: requested from the run itself on demand; doors into runs."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, field

from gpusched.access import Act
from gpusched.api.asked import OneJob, RequestBody, RequestQuery, about
from gpusched.api.auth import node_peer_of, pid_of
from gpusched.api.connection_limits import CONNECTION_LIMITER
from gpusched.api.requests import respond
from gpusched.api.service import ApiService, service_of
from gpusched.api.visibility import Viewer
from gpusched.errors import NotFound, NotReady, Refused, UsageError
from gpusched.model.commands import EnterJob
from gpusched.model.job import Interactive, Job, Run, run_id, split_run_id
from gpusched.model.layout import count_tasks, holds_other_nodes
from gpusched.model.states import JobState, RunState
from gpusched.model.units import printable
from gpusched.model.value import replace

_START_S = 10.0
"""Longest wait for a run to report its start."""
_LOOK_S = 0.02
UPGRADE = "tcp"
"""The protocol of a connection to a run, as Docker calls its own: bytes both ways."""
_TOKEN = re.compile(r"[0-9a-f]{0,64}")


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


async def attach(viewer: Viewer, query: OneJob, request: web.Request) -> web.Response:
    """The socket of a foreground job's current run, for its client."""
    service = viewer.service
    job = viewer.read(query.path_id, Act.ATTACH)
    foreground = job.spec.interactive
    path = node = handle = None
    if foreground is not None and job.run and job.state is not JobState.PENDING and not job.state.is_final:
        run = service.scheduler.state.open_runs.get(run_id(job.id, job.run))
        if run is not None:
            handle, near = run.id, node_of_caller(request)
            node = None if run.node == near else run.node
            path = service.daemon.client_path(run, run.node) if node is None else None
    return respond(
        attach={
            "id": job.shown_id,
            "state": job.state.value,
            "run": handle,
            "path": path,
            "node": node,
            "is_interactive": foreground is not None,
            "keep": foreground is not None and foreground.keep,
        }
    )


def node_of_caller(request: web.Request) -> str:
    """The node of the process that sent the request."""
    peer = node_peer_of(request)
    return service_of(request).scheduler.cluster.head.name if peer is None else peer.node


def doors(service: ApiService, job: Job, run: Run, nodes: Iterable[str], token: str, near: str) -> list[dict[str, Any]]:
    """Where a client on node `near` finds the doors that an order opens on nodes of a run: behind a path on its own
    node, and elsewhere with `connect`.
    """
    return [
        {
            "job": job.shown_id,
            "run": run.id,
            "node": node,
            "token": token,
            "path": service.daemon.client_path(run, node, token) if node == near else None,
        }
        for node in nodes
    ]


class EnterBody(RequestBody):
    path_id: str
    node: str | None = None
    nodes: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None


async def enter(viewer: Viewer, body: EnterBody, request: web.Request) -> web.Response:
    """Open doors into a running job, each for one client of its owner, on the nodes named, else one on that of the
    caller or its first; none if it is not running."""
    service = viewer.service
    job = viewer.read(body.path_id, Act.ENTER)
    if body.node is not None and body.nodes is not None:
        raise UsageError("a request has node or nodes, not both", "send one of them")
    wanted = body.nodes or (() if body.node is None else (body.node,))
    near = node_of_caller(request)
    open_run = service.scheduler.state.open_runs.get(run_id(job.id, job.run))
    if open_run is not None:
        for node in wanted:
            if node not in open_run.nodes:
                raise Refused(
                    f"job {job.shown_id} does not run on node {printable(node, 60)}",
                    f"it runs on: {', '.join(open_run.nodes)}",
                )
        wanted = wanted or (near if near in open_run.nodes else open_run.node,)
    token = secrets.token_hex(8)
    command = EnterJob(viewer.caller, job.id, token, tuple(dict.fromkeys(wanted)))
    run = service.scheduler.state.open_runs.get((await service.daemon.ask(command))["run"] or "")
    found = [] if run is None else doors(service, job, run, command.nodes, token, near)
    return respond(
        enter={
            "id": job.shown_id,
            "state": service.find(job.id).state.value,
            "path": found[0]["path"] if found else None,
            "doors": found,
        }
    )


class ConnectQuery(OneJob):
    """Where to connect to."""

    run: Annotated[str, about("handle of the run, such as 12.1")] = ""
    node: Annotated[str, about("of the run")] = ""
    token: Annotated[str, about("of a door; absent: the foreground of the run")] = ""
    is_return: Annotated[
        bool, about("1: the client was connected before, so that where nobody listens now nobody will")
    ] = field(name="return", default=False)


async def connect(viewer: Viewer, query: ConnectQuery, request: web.Request) -> web.StreamResponse:
    """Connect a client of the owner to a part of a run on any node: with a token to a door, else to its foreground.
    Needs `Upgrade: tcp`; after the answer 101 the connection is the client's."""
    service, token, handle, node = viewer.service, query.token, query.run, query.node
    job = viewer.read(query.path_id, Act.ENTER if token else Act.ATTACH)
    if request.headers.get("Upgrade", "").lower() != UPGRADE or not _TOKEN.fullmatch(token):
        raise UsageError(
            "this connects a client to a run, which gpusched's commands do", f"send: Upgrade: {UPGRADE}, and a token"
        )
    run = service.scheduler.state.open_runs.get(handle)
    if run is None or run.job_id != job.id:
        raise NotFound(f"job {job.shown_id} has no run {printable(handle, 60)} now", f"see: gshow {job.shown_id}")
    if node not in run.nodes:
        raise Refused(
            f"job {job.shown_id} does not run on node {printable(node, 60)}", f"it runs on: {', '.join(run.nodes)}"
        )
    call = service.daemon.call_run(job, run, node, token, is_return=query.is_return)
    try:
        response = web.StreamResponse(status=101, headers={"Connection": "Upgrade", "Upgrade": UPGRADE})
        await response.prepare(request)
        # What comes after this is not HTTP's business.
        response.force_close()
        sock = request.app[CONNECTION_LIMITER].take_over(request, call.close)
        if sock is not None:
            await call.splice(sock, is_relayed=node_peer_of(request) is not None)
    finally:
        call.close()
    return response


async def run_of_process(service: ApiService, pid: int, uid: int) -> str | None:
    """The run that a process of a user belongs to; waits for runs of that user that are being started.

    A run's first process may ask before its supervisor has reported the start. Raises: NotReady.
    """
    until = asyncio.get_running_loop().time() + _START_S
    while (handle := service.daemon.run_of_process(pid)) is None:
        state = service.scheduler.state
        is_starting = any(
            run.state is RunState.STARTING and state.jobs[run.job_id].uid == uid for run in state.open_runs.values()
        )
        if not is_starting:
            break
        if asyncio.get_running_loop().time() > until:
            raise NotReady("a job of yours is still being started, and its processes are unknown", "try again")
        await asyncio.sleep(_LOOK_S)
    return handle


async def inside(viewer: Viewer, _: RequestQuery, request: web.Request) -> web.Response:
    """The job that the calling process belongs to, if any."""
    service = viewer.service
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
    run = service.scheduler.state.open_runs.get(handle)
    nodes = [service.scheduler.head.name] if run is None else list(run.nodes)
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
            "node": service.scheduler.head.name if run is None else run.node,
            "nodes": nodes,
            "holds_nodes": holds_other_nodes(job.spec),
            "cpus": max(1, int(job.spec.request.cpus if run is None else run.cpus)),
            "gpus": 0 if run is None else len(run.gpus),
            "ntasks": count_tasks(job.spec.request, job.spec.layout, len(nodes)),
            "open_mode": job.spec.launch.open_mode,
            "supervisor_pid": None if run is None else run.supervisor_pid,
        }
    )
