"""Handlers about the steps of jobs: `srun` in a job begins and ends them; others list, cancel and signal them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gpusched.access import Act
from gpusched.api.auth import caller_of, node_peer_of, pid_of
from gpusched.api.handlers.foreground import run_of_process
from gpusched.api.handlers.jobs import filter_of, selected
from gpusched.api.requests import read_body, respond, respond_list
from gpusched.api.schema import check_fields
from gpusched.api.service import service_of
from gpusched.api.visibility import NO_NAME, Viewer, viewer_of
from gpusched.errors import NotFound, UsageError
from gpusched.model.commands import BeginStep, CancelStep, EndStep, NodePeer
from gpusched.model.job import Job, split_run_id
from gpusched.model.option import Field
from gpusched.model.request import MAX_CPUS, MAX_GPUS
from gpusched.model.step import COMMAND_LENGTH, MOST_STEPS, MOST_TASKS, NAME_LENGTH, JobStep
from gpusched.model.units import MAX_MIB, MAX_SECONDS, printable

BEGIN_FIELDS: Mapping[str, Field] = {
    "name": Field("string", "Name of the step.", most=NAME_LENGTH, nullable=False),
    "command": Field("string", "Command line, for display.", most=COMMAND_LENGTH, nullable=False),
    "tasks": Field("integer", "Number of tasks.", (1, MOST_TASKS), nullable=False),
    "cpus_per_task": Field("number", "CPUs per task.", (0, MAX_CPUS), nullable=False),
    "gpus": Field("integer", "GPUs of the job to reserve for the step; absent: it shares all of them.", (0, MAX_GPUS)),
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
        "state": step.state.value,
        "start_at": step.start_at,
        "end_at": step.end_at,
        "tasks": step.tasks,
        "cpus": step.cpus,
        "gpus": [share.index for share in step.gpus],
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
        found = [step for step in service.scheduler.world.steps.all().values() if step.job_id in jobs]
    else:
        found = service.scheduler.store.steps(jobs)
    shown = (
        step_json(step, jobs[step.job_id], viewer)
        for step in found
        if has_all_runs or step.run == jobs[step.job_id].run
    )
    return await respond_list("steps", shown, {}, {})


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
    handle, peer = await _own_run(request, viewer)
    command = BeginStep(viewer.caller, handle, peer.pid, peer.start_ticks, node=peer.node, **values)
    return respond(**await viewer.service.daemon.ask(command))


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
