"""Handlers about the steps of jobs: `srun` in a job begins and ends them; others list, cancel and signal them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gpusched.access import Act
from gpusched.api.auth import caller_of, node_peer_of, pid_of
from gpusched.api.handlers.foreground import doors, run_of_process
from gpusched.api.handlers.jobs import filter_of, selected
from gpusched.api.requests import read_body, respond, respond_list
from gpusched.api.schema import check_fields
from gpusched.api.service import ApiService, service_of
from gpusched.api.visibility import NO_NAME, Viewer, viewer_of
from gpusched.errors import NotFound, NotReady, TooMany, UsageError
from gpusched.model.commands import BeginStep, CancelStep, EndStep, NodePeer
from gpusched.model.hostlist import MAX_NODES, fold
from gpusched.model.job import Job, Run, run_id, split_run_id
from gpusched.model.option import Field
from gpusched.model.request import MAX_CPUS, MAX_GPUS
from gpusched.model.step import (
    ARBITRARY,
    BLOCK,
    COMMAND_LENGTH,
    DISTRIBUTION,
    MOST_STEPS,
    MOST_TASKS,
    NAME_LENGTH,
    JobStep,
    StepRequest,
)
from gpusched.model.units import MAX_MIB, MAX_SECONDS, printable
from gpusched.model.value import plain

_MOST_NAMES = 1 << 16
_MOST_HOSTS = 1 << 20
"""Characters in all."""
BEGIN_FIELDS: Mapping[str, Field] = {
    "name": Field("string", "Name of the step.", most=NAME_LENGTH, nullable=False),
    "command": Field("string", "Command line, for display.", most=COMMAND_LENGTH, nullable=False),
    "tasks": Field("integer", "Number of tasks; absent: as srun has it.", (1, MOST_TASKS)),
    "ntasks_per_node": Field("integer", "Tasks on each node; with `tasks` the most on each.", (1, MOST_TASKS)),
    "nodes_min": Field(
        "integer", "Least number of nodes; absent: all nodes of the job that it has tasks for.", (1, MAX_NODES)
    ),
    "nodes_max": Field("integer", "Most nodes; absent: `nodes_min`.", (1, MAX_NODES)),
    "nodelist": Field("strings", "Nodes that the step is to have; with others if it needs more.", most=_MOST_NAMES),
    "exclude": Field("strings", "Nodes that it is not to have.", most=_MOST_NAMES),
    "relative": Field("integer", "Number in the job of the first node that it may have.", (0, MAX_NODES)),
    "cpus_per_task": Field("number", "CPUs per task; absent: 1.", (0, MAX_CPUS)),
    "gpus": Field(
        "integer",
        "GPUs of the job to reserve for the step on all its nodes; absent, as the next two: it shares the job's.",
        (0, MAX_GPUS),
    ),
    "gpus_per_node": Field("integer", "GPUs to reserve for it on each node.", (0, MAX_GPUS)),
    "gpus_per_task": Field("integer", "GPUs to reserve for it for each task.", (0, MAX_GPUS)),
    "gpu_type": Field("string", "Part of the model's name of these GPUs; absent: any of the job's.", most=NAME_LENGTH),
    "distribution": Field(
        "string", "How tasks are numbered over nodes: block, cyclic, plane=SIZE or arbitrary; absent: block.", most=20
    ),
    "hosts": Field("strings", "For an arbitrary distribution the node of each task.", most=_MOST_HOSTS),
    "is_exact": Field("boolean", "Reserve its CPUs: no other exclusive step gets them.", nullable=False),
    "overlaps": Field("boolean", "Share CPUs and GPUs with other steps.", nullable=False),
    "overcommits": Field("boolean", "Allow more tasks than the job has CPUs.", nullable=False),
    "time_limit_s": Field("integer", "Time limit, enforced by `srun`.", (1, MAX_SECONDS)),
}
_MAX_CPU_S = 10**12
_NUMBER = Field("integer", "Number of the step in its run.", (0, MOST_STEPS), nullable=False)
END_FIELDS: Mapping[str, Field] = {
    "step": _NUMBER,
    "exit_code": Field("integer", "Highest exit code of its tasks.", (0, 255)),
    "signal": Field("integer", "Signal that ended a task.", (1, 64)),
    "is_timeout": Field("boolean", "The step reached its own time limit.", nullable=False),
    "is_node_lost": Field("boolean", "A node of it was given up: what it still runs is killed.", nullable=False),
    "user_cpu_s": Field("number", "User CPU time of its tasks.", (0, _MAX_CPU_S)),
    "system_cpu_s": Field("number", "System CPU time of its tasks.", (0, _MAX_CPU_S)),
    "peak_mem_mib": Field("number", "Peak resident size of its largest process.", (0, MAX_MIB)),
    "mean_mem_mib": Field("number", "Peak resident size of each task's largest process, on average.", (0, MAX_MIB)),
}
_USAGE = ("user_cpu_s", "system_cpu_s", "peak_mem_mib", "mean_mem_mib")
CANCEL_FIELDS: Mapping[str, Field] = {
    "id": Field("string", "Its job.", nullable=False),
    "step": _NUMBER,
    "signal": Field("integer", "Send its processes this signal instead of ending them.", (1, 64)),
}


def step_json(step: JobStep, job: Job, viewer: Viewer) -> dict[str, Any]:
    """A step as visible to a caller, who may see its name, command and usage if those of its job."""
    is_whole = viewer.sees_all_of(job)
    return {
        "id": f"{job.shown_id}.{step.number}",
        "job": job.shown_id,
        "job_id": job.id,
        "run": step.run,
        "step": step.number,
        "name": step.name if viewer.sees_name(job) else NO_NAME,
        "command": step.command if is_whole else "-",
        "user": job.user,
        "uid": job.uid,
        "queue": job.spec.queue,
        "account": job.spec.shown_account,
        "node": step.node,
        "nodes": list(step.nodes),
        "nodelist": fold(step.nodes),
        "state": step.state.value,
        "start_at": step.start_at,
        "end_at": step.end_at,
        "tasks": step.tasks,
        "cpus": step.cpus,
        "gpus": [share.index for share in step.gpus],
        "parts": [
            {
                "node": part.node,
                "tasks": len(part.tasks),
                "task_ids": list(part.tasks),
                "cpus": part.cpus,
                "gpus": [share.index for share in part.gpus],
            }
            for part in step.on_each_node
        ],
        "time_limit_s": step.time_limit_s,
        "exit_code": step.exit_code,
        "signal": step.signal,
        "cancel_uid": step.cancel_uid,
        **{name: getattr(step, name) if is_whole else None for name in _USAGE},
        "pid": step.pid if is_whole else None,
    }


async def listing(request: web.Request) -> web.Response:
    """GET /v1/steps"""
    service, viewer = service_of(request), viewer_of(request)
    wanted = filter_of(request, service, viewer.caller)
    jobs = {job.id: job for job in selected(viewer, wanted)}
    is_open, has_all_runs = (request.query.get(name) == "1" for name in ("open", "all_runs"))
    if is_open:
        found = [step for step in service.scheduler.state.steps.all().values() if step.job_id in jobs]
    else:
        found = service.scheduler.store.steps(jobs)
    shown = (
        step_json(step, jobs[step.job_id], viewer)
        for step in found
        if has_all_runs or step.run == jobs[step.job_id].run
    )
    return await respond_list("steps", shown, {}, {})


async def usage(request: web.Request) -> web.Response:
    """GET /v1/jobs/{id}/usage"""
    service, viewer = service_of(request), viewer_of(request)
    job = viewer.read(request.match_info["id"])
    run = service.scheduler.state.open_runs.get(run_id(job.id, job.run))
    found: list[dict[str, Any]] = []
    if run is not None and run.native is None:
        found = await asyncio.gather(*(_usage_on(service, run, node) for node in run.nodes))
    return respond(usage={"id": job.shown_id, "nodes": found})


async def _usage_on(service: ApiService, run: Run, node: str) -> dict[str, Any]:
    """The answer of one node, which does not depend on whether others answer."""
    try:
        tasks = [plain(task) for task in await service.daemon.task_usage(run, node)]
    except (NotReady, TooMany):
        return {"node": node, "tasks": None}
    return {"node": node, "tasks": tasks}


async def _own_run(request: web.Request, viewer: Viewer) -> tuple[str, NodePeer]:
    """The run that the calling process belongs to, according to the kernel, and that process on its node.

    Raises: NotFound if it belongs to none; Forbidden if that is another user's; NotReady.
    """
    service = viewer.service
    peer, pid = node_peer_of(request), pid_of(request)
    if peer is None and pid is not None:
        process = service.daemon.client_process(pid)
        handle = await run_of_process(service, pid, viewer.caller.uid)
        peer = NodePeer(service.scheduler.cluster.head.name, viewer.caller.uid, pid, process.start_ticks, handle)
    if peer is None or peer.run is None:
        raise NotFound("the calling process belongs to no job", "call it from a job's script")
    job_id, _ = split_run_id(peer.run)
    viewer.check(service.find(job_id), Act.ATTACH)
    return peer.run, peer


async def begin(request: web.Request) -> web.Response:
    """POST /v1/steps"""
    viewer, body = viewer_of(request), await read_body(request)
    values = check_fields(body, BEGIN_FIELDS)
    for name in ("name", "command"):
        values[name] = printable(values.get(name, ""), COMMAND_LENGTH)
    wanted = _request_of({key: values.pop(key) for key in list(values) if key in StepRequest.__struct_fields__})
    handle, peer = await _own_run(request, viewer)
    token = secrets.token_hex(8)
    command = BeginStep(
        viewer.caller, handle, peer.pid, peer.start_ticks, request=wanted, node=peer.node, token=token, **values
    )
    answer = await viewer.service.daemon.ask(command)
    if answer["step"] is not None:
        _add_ways(answer["step"], handle, peer, token, viewer.service)
    return respond(**answer)


def _add_ways(step: dict[str, Any], handle: str, peer: NodePeer, token: str, service: ApiService) -> None:
    """Add the addresses of the nodes of a step, and its doors on those that are not the caller's."""
    for place in step["nodes"]:
        node = service.scheduler.cluster.get(place["node"])
        # Of a node that has left the cluster its name is all that is known.
        place["address"] = place["node"] if node is None else node.address
    others = [place["node"] for place in step["nodes"] if place["node"] != step["node"]]
    run = service.scheduler.state.open_runs.get(handle) if others else None
    job_id, _ = split_run_id(handle)
    step["doors"] = [] if run is None else doors(service, service.find(job_id), run, others, token, peer.node)


def _request_of(values: dict[str, Any]) -> StepRequest:
    """What a step asks for. Raises: UsageError."""
    distribution, hosts = values.get("distribution", BLOCK), values.get("hosts", ())
    if not DISTRIBUTION.fullmatch(distribution):
        shown = printable(distribution, 60)
        raise UsageError(f"{shown!r} is not a distribution", "write block, cyclic, plane=SIZE or arbitrary")
    if bool(hosts) != (distribution == ARBITRARY):
        raise UsageError("hosts belong to an arbitrary distribution, and it needs them", "see GET /v1/openapi.json")
    if len(hosts) > MOST_TASKS:
        raise UsageError(f"{len(hosts)} hosts are named; at most {MOST_TASKS} tasks are accepted", "name fewer")
    for name in ("nodelist", "exclude", "hosts"):
        if name in values:
            values[name] = tuple(values[name])
    least, most = values.get("nodes_min"), values.get("nodes_max")
    if most is not None and most < (least or 1):
        raise UsageError(f"the minimum of {least} nodes exceeds the maximum of {most}", "write MIN-MAX")
    return StepRequest(**values)


async def end(request: web.Request) -> web.Response:
    """POST /v1/steps/end"""
    viewer, body = viewer_of(request), await read_body(request)
    values = check_fields(body, END_FIELDS)
    number = _number(values)
    handle, _ = await _own_run(request, viewer)
    return respond(**await viewer.service.daemon.ask(EndStep(viewer.caller, handle, number, **values)))


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/steps/cancel"""
    service, caller, body = service_of(request), caller_of(request), await read_body(request)
    values = check_fields(body, CANCEL_FIELDS)
    number = _number(values)
    job = viewer_of(request).find(service.job_id(values.get("id", ""), caller))
    return respond(**await service.daemon.ask(CancelStep(caller, job.id, number, values.get("signal"))))


def _number(values: dict[str, Any]) -> int:
    if "step" not in values:
        raise UsageError("step is required", "see GET /v1/openapi.json")
    number: int = values.pop("step")
    return number
