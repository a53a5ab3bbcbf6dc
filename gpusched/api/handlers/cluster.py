"""Handlers about nodes, GPUs and processes without a booking."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.access import is_admin, user_name
from gpusched.api.asked import RequestBody, RequestQuery
from gpusched.api.handlers.reservations import reservations
from gpusched.api.queue_rows import queues_and_loans
from gpusched.api.requests import respond
from gpusched.api.schema import SPEC_FIELDS, check_fields, json_schema
from gpusched.api.validate import read_spec
from gpusched.api.visibility import Viewer
from gpusched.lifecycle.failures import is_hardware
from gpusched.model import commands
from gpusched.model.cluster import Enforcement, GpuProcess, GpuSample, GpuStatus, GpuView, NodeView
from gpusched.model.commands import Adopt
from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.ports.tables import DRAINERS, DRAINS
from gpusched.scheduler.cluster_state import ClusterLayout, LayoutGpu
from gpusched.scheduler.whatif import Left

Targets = Annotated[list[str], Meta(min_length=1, title="node or GPU")]
Message = Annotated[str, Meta(max_length=500)]
_SHOWN_FAULTS = 20
"""Newest faults shown for each GPU."""


async def cluster(viewer: Viewer, _: RequestQuery) -> web.Response:
    """Nodes, GPUs, queues and reservations."""
    service = viewer.service
    scheduler = service.scheduler
    views = scheduler.nodes(scheduler.now())
    layout = ClusterLayout(views, scheduler.settings)
    queues, loans = queues_and_loans(viewer)
    return respond(
        nodes=[_absent(view) if view.is_unknown else _node(viewer, view, layout) for view in views],
        gpus=[_gpu(viewer, layout.nodes[card.node].name, card) for card in layout.cards],
        queues=queues,
        loans=loans,
        reservations=reservations(viewer),
        preset=service.daemon.presets.document(),
        cluster_name=service.settings.slurm.cluster_name,
    )


def _node(viewer: Viewer, node: NodeView, layout: ClusterLayout) -> dict[str, Any]:
    service = viewer.service
    scheduler = service.scheduler
    newest = scheduler.cluster[node.name]
    load, reading = newest.host, newest.reading
    holds = [held for held in scheduler.state.holds.values() if held.node == node.name]
    drain, drainer = scheduler.state.rows[DRAINS].get(node.name), scheduler.state.rows[DRAINERS].get(node.name)
    return {
        "name": node.name,
        "state": "down" if newest.why_not else "drained" if node.why_not else "up",
        "message": (None if drain is None else drain.message) or newest.trouble,
        "drain_cause": None if drain is None else drain.cause,
        "drained_by": None if drainer is None else drainer.user,
        "drained_at": None if drainer is None else drainer.at,
        "cpus": node.cpus,
        "cpus_booked": sum(hold.cpus for hold in holds),
        "mem_mib": node.mem_mib,
        "mem_booked_mib": sum(map(layout.node_mem_mib, holds)),
        "mem_available_mib": load.mem_available_mib,
        "is_busy": bool(holds),
        "why_not": node.why_not,
        "labels": node.labels,
        "resources": dict(node.resources),
        "architecture": load.architecture,
        "system": load.system,
        "boot_at": load.boot_at,
        "load_average": load.load_average,
        "cpu_fraction": load.cpu_fraction,
        "disk_mib_s": load.disk_mib_s,
        "net_mib_s": load.net_mib_s,
        "gpu_source": reading.source if reading else None,
        "gpu_error": node.gpu_error,
        "driver_version": reading.driver_version if reading else None,
        "notes": [*filter(None, [newest.clock_note, newest.lease_note]), *([] if reading is None else reading.remarks)],
        "isolation": service.daemon.isolation(node.name),
    }


def _absent(node: NodeView) -> dict[str, Any]:
    """A node of which nothing is known but its name."""
    amounts = ("cpus", "cpus_booked", "mem_mib", "mem_booked_mib", "mem_available_mib")
    unknown = (
        *("load_average", "cpu_fraction", "disk_mib_s", "net_mib_s", "boot_at", "gpu_source", "gpu_error"),
        *("driver_version", "message", "drain_cause", "drained_by", "drained_at", "isolation"),
    )
    return {
        "name": node.name,
        "state": "down",
        "why_not": node.why_not,
        **dict.fromkeys(amounts, 0),
        **dict.fromkeys(unknown),
        "is_busy": False,
        "labels": [],
        "resources": {},
        "architecture": "",
        "system": "",
        "notes": [],
    }


_OF_CARD = ("index", "uuid", "name", "mig_parent", "mig_profile", "link_group", "numa", "foreign_mib")
_OF_SAMPLE = (
    *("vram_total_mib", "vram_used_mib", "utilisation", "temperature_c", "power_w", "slowdown_c", "ecc_errors"),
    *("remap_pending", "remap_failed", "mig_pending", "mig_instances", "pci_bus_id"),
)
"""What is shown of the last measurement of a card; null without one."""


def _gpu(viewer: Viewer, node: str, card: LayoutGpu) -> dict[str, Any]:
    scheduler, view = viewer.service.scheduler, card.view
    state = scheduler.state
    runs = [
        (run, share)
        for run in (*state.open_runs.values(), *state.releasing.values())
        for share in run.gpus
        if share.uuid == view.uuid
    ]
    status = scheduler.cluster.status(view.uuid, [share for _, share in runs], scheduler.now())
    sample = status.sample
    whole = any(share.is_whole for _, share in runs)
    booked = card.host_mib or view.vram_total_mib if whole else sum(share.vram_mib or 0 for _, share in runs)
    if whole and view.vram_total_mib is None:
        booked = None
    held = {use.run: use.used_mib for use in scheduler.cluster.shares().get(view.uuid, ())}
    has_mps = sample is not None and sample.mps and scheduler.settings.gpu.mps_dir is not None
    shown = [(run, share) for run, share in runs if viewer.sees(state.jobs[run.job_id])]
    return {
        "node": node,
        **{name: getattr(view, name) for name in _OF_CARD},
        **{name: getattr(sample, name, None) for name in _OF_SAMPLE},
        "state": status.state,
        "why": status.why,
        "detail": status.detail or status.why,
        "drain_cause": status.drain,
        "vram_booked_mib": booked,
        "unified_memory": view.has_host_memory,
        "is_declared": sample is not None and sample.is_declared,
        "vram_over_mib": view.over_mib,
        **_enforcement(viewer, sample, Enforcement.MPS if has_mps else None),
        "mig": None if sample is None else sample.mig_enabled,
        "jobs": sorted({str(run.job_id) for run, _ in shown}, key=int),
        "booked_by": [
            {
                "job": str(run.job_id),
                "user": user_name(state.jobs[run.job_id].uid),
                "vram_mib": share.vram_mib,
                "fraction": share.fraction,
                "vram_used_mib": held.get(run.id),
                **_enforcement(viewer, sample, share.limit),
            }
            for run, share in shown
        ],
        "foreign": [_process(viewer, process) for process in status.intruders],
        "faults": [
            {
                "at": fault.at,
                "xid": fault.xid,
                "meaning": fault.meaning,
                "is_hardware": is_hardware(fault, viewer.service.settings.fault),
            }
            for fault in scheduler.gpu_faults.of(view.uuid)[-_SHOWN_FAULTS:]
        ],
    }


def _enforcement(viewer: Viewer, sample: GpuSample | None, limit: str | None) -> dict[str, str]:
    word, why = viewer.service.daemon.enforcement(sample, limit)
    return {"enforcement": word, "enforcement_why": why}


def _process(viewer: Viewer, process: GpuProcess) -> dict[str, Any]:
    """A process that belongs to no job there."""
    return {
        "pid": process.pid,
        "user": process.user,
        "vram_mib": process.vram_mib,
        "name": process.name,
        "started_at": process.started_at,
        "job": viewer.job_of(process.run),
    }


class UndrainBody(RequestBody):
    hint = "for example: gctl undrain 3"
    targets: Targets


class DrainBody(RequestBody):
    hint = "for example: gctl drain 3 -m 'fan is broken'"
    targets: Targets
    message: Message = ""


class DownBody(RequestBody):
    hint = "for example: gctl down node3 -m 'power supply'"
    targets: Targets
    message: Message = ""
    confirm: bool = False


async def drain(viewer: Viewer, body: DrainBody) -> web.Response:
    """Drain nodes or GPUs: keep new work off; labels names the GPUs, by UUID."""
    caller = viewer.caller
    message = printable(body.message or f"by {caller.user}")
    return respond(**await viewer.service.daemon.ask(commands.Drain(caller, tuple(body.targets), message)))


async def down(viewer: Viewer, body: DownBody) -> web.Response:
    """Declare nodes that do not answer down: their runs are lost, and ended when they come back; refused without
    confirm."""
    message = printable(body.message or "it does not answer")
    command = commands.DeclareDown(viewer.caller, tuple(body.targets), message, body.confirm)
    return respond(**await viewer.service.daemon.ask(command))


async def undrain(viewer: Viewer, body: UndrainBody) -> web.Response:
    """Undrain nodes or GPUs; labels names the GPUs, by UUID."""
    return respond(**await viewer.service.daemon.ask(commands.Drain(viewer.caller, tuple(body.targets), None)))


_TRIED = 50
"""Processes whose cost is computed, those with the most memory first: each takes a plan of the whole queue."""


async def foreign(viewer: Viewer, _: RequestQuery) -> web.Response:
    """GPU processes that belong to no job; how many pending jobs would start now without each, and without all."""
    service = viewer.service
    scheduler = service.scheduler
    now = scheduler.now()
    found = [
        (node.name, view, scheduler.cluster.status(view.uuid, now=now))
        for node in scheduler.nodes(now)
        for view in node.gpus
    ]
    rows = [
        {**row, **_told(viewer, node, row["pid"])}
        for node, view, status in found
        for row in _rows(viewer, node, view, status, now)
    ]
    held: dict[tuple[str, int], int] = {}
    for row in rows:
        process = row["node"], row["pid"]
        held[process] = held.get(process, 0) + (row["vram_mib"] or 0)
    tried = sorted(held, key=lambda process: (-held[process], process))[:_TRIED]
    cases: list[Left] = [_left(found, {process}) for process in tried]
    cases.append(_left(found, set(held)))
    *each, together = await service.work_out(service.daemon.starts_without(cases), viewer.caller)
    costs = dict(zip(tried, each, strict=True))
    for row in rows:
        row["jobs_kept_waiting"] = costs.get((row["node"], row["pid"]))
    if viewer.is_restricted:
        # The answer must not reveal how many other users' jobs wait.
        for row in rows:
            row["jobs_kept_waiting"] = None
    return respond(
        foreign=rows,
        jobs_kept_waiting=None if viewer.is_restricted else together,
        nodes=[node.name for node in scheduler.nodes(now)],
    )


def _told(viewer: Viewer, node: str, pid: int) -> dict[str, Any]:
    """When its owner was notified, and since when it is being ended; means and failures only for owner and admins."""
    # A pid is one of its node alone, and owners are notified on the daemon's.
    notes = viewer.service.daemon.owner_notes(pid) if node == viewer.service.scheduler.head.name else None
    if notes is None:
        return {"told_at": None, "told_by": [], "untold": None, "ending_at": None}
    is_theirs = notes.uid == viewer.caller.uid or is_admin(viewer.caller, viewer.service.settings)
    return {
        "told_at": notes.told_at,
        "told_by": list(notes.told_by) if is_theirs else [],
        "untold": notes.untold if is_theirs else None,
        "ending_at": notes.ending_at,
    }


def _rows(viewer: Viewer, node: str, view: GpuView, status: GpuStatus, now: float) -> list[dict[str, Any]]:
    rows = []
    for process in status.intruders:
        # The whole card has been idle since then, and so has this process.
        idle_since = None if status.idle_since is None else max(status.idle_since, process.started_at or 0.0)
        rows.append(
            {
                "node": node,
                "gpu": view.index,
                "uuid": view.uuid,
                **_process(viewer, process),
                "age_s": None if process.started_at is None else max(0.0, now - process.started_at),
                "gpu_idle_s": None if idle_since is None else max(0.0, now - idle_since),
            }
        )
    return rows


def _left(found: list[tuple[str, GpuView, GpuStatus]], gone: set[tuple[str, int]]) -> Left:
    """Foreign memory that would remain on the cards of these processes after they exit. Args: gone: nodes and pids."""
    left = {}
    for node, view, status in found:
        leaving = [process for process in status.intruders if (node, process.pid) in gone]
        if len(leaving) == len(status.intruders) > 0:
            left[view.uuid] = 0
        elif leaving:
            left[view.uuid] = max(0, view.foreign_mib - sum(process.vram_mib or 0 for process in leaving))
    return left


_MOST_PID = 1 << 22
"""Maximum pid on any Linux."""


def _of_job(name: str) -> Meta:
    return Meta(extra_json_schema=json_schema(SPEC_FIELDS[name]))


class AdoptBody(RequestBody):
    """Fields of the job besides are those of a submission."""

    hint = "list processes with: ginfo --foreign"
    pid: Annotated[int, Meta(ge=1, le=_MOST_PID, title="process id")]
    name: Annotated[Any, _of_job("name")] = None
    queue: Annotated[Any, _of_job("queue")] = None
    account: Annotated[Any, _of_job("account")] = None
    qos: Annotated[Any, _of_job("qos")] = None
    time_limit_s: Annotated[Any, _of_job("time_limit_s")] = None
    vram_mib: Annotated[Any, _of_job("vram_mib")] = None
    grace_s: Annotated[Any, _of_job("grace_s")] = None


async def adopt(viewer: Viewer, body: AdoptBody) -> web.Response:
    """Turn a GPU process without a job into one; it keeps running, and its GPUs are booked."""
    service, caller = viewer.service, viewer.caller
    settings = service.settings
    asked = body.given()
    found = await service.work_out(service.daemon.adoptable(asked.pop("pid"), caller), caller)
    payloads: dict[str, bytes] = {}
    spec = replace(
        read_spec(service.daemon.adoption_fields(found, check_fields(asked, SPEC_FIELDS)), settings, payloads),
        adopted=found.process,
    )
    service.pace.submission(
        dataclasses.replace(caller, uid=found.uid, user=found.user),
        [spec],
        sum(map(len, payloads.values())),
        settings.limit,
    )
    return respond(adopted=await service.daemon.ask(Adopt(caller, found, spec, payloads)))
