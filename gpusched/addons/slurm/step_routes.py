"""The daemon's answers about steps: `srun` in a job begins and ends them; others list, cancel and signal them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.access import Act
from gpusched.api.asked import Cores, Name, OneJob, RequestBody, Signal, about
from gpusched.api.auth import node_peer_of, pid_of
from gpusched.api.handlers.foreground import doors, run_of_process
from gpusched.api.handlers.jobs import FilterQuery, filter_of, selected
from gpusched.api.requests import respond, respond_list
from gpusched.api.route import Route
from gpusched.api.service import ApiService
from gpusched.api.visibility import NO_NAME, Viewer
from gpusched.errors import NotFound, NotReady, TooMany, UsageError
from gpusched.model.commands import BeginStep, CancelStep, EndStep, NodePeer
from gpusched.model.hostlist import MAX_NODES, fold
from gpusched.model.job import Job, Run, run_id, split_run_id
from gpusched.model.request import MAX_GPUS
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

_MAX_CPU_S = 10**12
_USAGE = ("user_cpu_s", "system_cpu_s", "peak_mem_mib", "mean_mem_mib")
_Number = Annotated[int, about("Number of the step in its run.", ge=0, le=MOST_STEPS)]
_Tasks = Annotated[int, Meta(ge=1, le=MOST_TASKS)]
_Nodes = Annotated[int, Meta(ge=1, le=MAX_NODES)]
_Gpus = Annotated[int, Meta(ge=0, le=MAX_GPUS)]
_NodeNames = Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)]
_CpuTime = Annotated[float, Meta(ge=0, le=_MAX_CPU_S)]
_Size = Annotated[float, Meta(ge=0, le=MAX_MIB)]
_Rank = Annotated[int, Meta(ge=0, le=MAX_NODES)]
_Label = Annotated[str, Meta(max_length=NAME_LENGTH)]
_Seconds = Annotated[int, Meta(ge=1, le=MAX_SECONDS)]
_ExitCode = Annotated[int, Meta(ge=0, le=255)]


class StepsQuery(FilterQuery):
    open: Annotated[bool, about("1: only steps that run now")] = False
    all_runs: Annotated[bool, about("1: also steps of earlier runs of a requeued job")] = False


class BeginStepBody(RequestBody):
    name: Annotated[_Label, about("Name of the step.")] = ""
    command: Annotated[str, about("Command line, for display.", max_length=COMMAND_LENGTH)] = ""
    tasks: Annotated[_Tasks | None, about("Number of tasks; absent: as srun has it.")] = None
    ntasks_per_node: Annotated[_Tasks | None, about("Tasks on each node; with `tasks` the most on each.")] = None
    nodes_min: Annotated[
        _Nodes | None, about("Least number of nodes; absent: all nodes of the job that it has tasks for.")
    ] = None
    nodes_max: Annotated[_Nodes | None, about("Most nodes; absent: `nodes_min`.")] = None
    nodelist: Annotated[_NodeNames | None, about("Nodes that the step is to have; with others if it needs more.")] = (
        None
    )
    exclude: Annotated[_NodeNames | None, about("Nodes that it is not to have.")] = None
    relative: Annotated[_Rank | None, about("Number in the job of the first node that it may have.")] = None
    cpus_per_task: Annotated[Cores | None, about("CPUs per task; absent: 1.")] = None
    gpus: Annotated[
        _Gpus | None,
        about(
            "GPUs of the job to reserve for the step on all its nodes; absent, as the next two: it shares the job's."
        ),
    ] = None
    gpus_per_node: Annotated[_Gpus | None, about("GPUs to reserve for it on each node.")] = None
    gpus_per_task: Annotated[_Gpus | None, about("GPUs to reserve for it for each task.")] = None
    gpu_type: Annotated[_Label | None, about("Part of the model's name of these GPUs; absent: any of the job's.")] = (
        None
    )
    distribution: Annotated[
        str,
        about(
            "How tasks are numbered over nodes: block, cyclic, plane=SIZE or arbitrary; absent: block.", max_length=20
        ),
    ] = BLOCK
    hosts: Annotated[
        tuple[Name, ...], about("For an arbitrary distribution the node of each task.", max_length=MOST_TASKS)
    ] = ()
    is_exact: Annotated[bool, about("Reserve its CPUs: no other exclusive step gets them.")] = False
    overlaps: Annotated[bool, about("Share CPUs and GPUs with other steps.")] = False
    overcommits: Annotated[bool, about("Allow more tasks than the job has CPUs.")] = False
    time_limit_s: Annotated[_Seconds | None, about("Time limit, enforced by `srun`.")] = None


class EndStepBody(RequestBody):
    step: _Number
    exit_code: Annotated[_ExitCode | None, about("Highest exit code of its tasks.")] = None
    signal: Annotated[Signal | None, about("Signal that ended a task.")] = None
    is_timeout: Annotated[bool, about("The step reached its own time limit.")] = False
    is_node_lost: Annotated[bool, about("A node of it was given up: what it still runs is killed.")] = False
    user_cpu_s: Annotated[_CpuTime | None, about("User CPU time of its tasks.")] = None
    system_cpu_s: Annotated[_CpuTime | None, about("System CPU time of its tasks.")] = None
    peak_mem_mib: Annotated[_Size | None, about("Peak resident size of its largest process.")] = None
    mean_mem_mib: Annotated[_Size | None, about("Peak resident size of each task's largest process, on average.")] = (
        None
    )


class CancelStepBody(RequestBody):
    id: Annotated[str, about("Its job.", min_length=1, title="job")]
    step: _Number
    signal: Annotated[Signal | None, about("Send its processes this signal instead of ending them.")] = None


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


async def listing(viewer: Viewer, query: StepsQuery) -> web.Response:
    """Steps of jobs, as started by srun; without filters those of active jobs."""
    service = viewer.service
    jobs = {job.id: job for job in selected(viewer, filter_of(viewer, query))}
    if query.open:
        found = [step for step in service.scheduler.state.steps.all().values() if step.job_id in jobs]
    else:
        found = service.scheduler.store.steps(jobs)
    shown = (
        step_json(step, jobs[step.job_id], viewer)
        for step in found
        if query.all_runs or step.run == jobs[step.job_id].run
    )
    return await respond_list("steps", shown, {}, {})


async def usage(viewer: Viewer, query: OneJob) -> web.Response:
    """What the tasks of a running job's steps use on each of its nodes now; tasks is null for a node that does not
    answer."""
    service = viewer.service
    job = viewer.read(query.path_id)
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


async def begin(viewer: Viewer, body: BeginStepBody, request: web.Request) -> web.Response:
    """Begin a step in the calling process's job, on its nodes; step is null while it has to wait: why is busy while
    other steps have what it requests, starting while nodes of the job have not started."""
    wanted = _request_of(body)
    handle, peer = await _own_run(request, viewer)
    token = secrets.token_hex(8)
    command = BeginStep(
        viewer.caller,
        handle,
        peer.pid,
        peer.start_ticks,
        name=printable(body.name),
        command=printable(body.command, COMMAND_LENGTH),
        request=wanted,
        time_limit_s=body.time_limit_s,
        node=peer.node,
        token=token,
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


def _request_of(body: BeginStepBody) -> StepRequest:
    """What a step asks for. Raises: UsageError."""
    if not DISTRIBUTION.fullmatch(body.distribution):
        shown = printable(body.distribution, 60)
        raise UsageError(f"{shown!r} is not a distribution", "write block, cyclic, plane=SIZE or arbitrary")
    if bool(body.hosts) != (body.distribution == ARBITRARY):
        raise UsageError("hosts belong to an arbitrary distribution, and it needs them", body.hint)
    if body.nodes_max is not None and body.nodes_max < (body.nodes_min or 1):
        raise UsageError(
            f"the minimum of {body.nodes_min} nodes exceeds the maximum of {body.nodes_max}", "write MIN-MAX"
        )
    values = body.given()
    return StepRequest(**{name: values[name] for name in StepRequest.__struct_fields__ if name in values})


async def end(viewer: Viewer, body: EndStepBody, request: web.Request) -> web.Response:
    """Record how a step of the calling process's job has ended; only the first end counts."""
    values = body.given()
    handle, _ = await _own_run(request, viewer)
    return respond(**await viewer.service.daemon.ask(EndStep(viewer.caller, handle, values.pop("step"), **values)))


async def cancel(viewer: Viewer, body: CancelStepBody) -> web.Response:
    """End a step, or send its processes a signal."""
    service, caller = viewer.service, viewer.caller
    job = viewer.find(service.job_id(body.id, caller))
    return respond(**await service.daemon.ask(CancelStep(caller, job.id, body.step, body.signal)))


ROUTES = (
    Route("GET", "/v1/steps", listing, "steps"),
    Route(
        "GET",
        "/v1/jobs/{id}/usage",
        usage,
        "usage (id, nodes: node, tasks: step, task, pids, cpu_s, peak_mem_mib, mem_mib, peak_virtual_mib)",
    ),
    Route(
        "POST",
        "/v1/steps",
        begin,
        "step (step, node, has_own_gpus, tasks, nodes (node, nodeid, rank, tasks, cpus, gpus, address)), why",
    ),
    Route("POST", "/v1/steps/end", end, "step"),
    Route("POST", "/v1/steps/cancel", cancel, "cancelled, signalled, ended"),
)
