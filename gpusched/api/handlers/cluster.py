"""Handlers about the machines and the daemon itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from aiohttp import web

from gpusched import __version__
from gpusched.access import check_admin, is_private, user_name
from gpusched.api.auth import caller_of
from gpusched.api.handlers.jobs import check_keys, read_body, respond
from gpusched.api.handlers.queues import queues_and_loans
from gpusched.api.handlers.reservations import reservations
from gpusched.api.render import plain
from gpusched.api.service import DOCUMENT, service_of
from gpusched.api.visibility import Viewer, viewer_of
from gpusched.errors import UsageError
from gpusched.lifecycle.arrays import job_count
from gpusched.lifecycle.blame import is_hardware
from gpusched.model import commands
from gpusched.model.cluster import Enforcement, GpuSample
from gpusched.model.commands import Reload
from gpusched.model.metrics import CONTENT_TYPES, FORMATS, PROMETHEUS
from gpusched.model.recording import Recording, encode
from gpusched.model.units import printable
from gpusched.scheduler.draft import Card, Layout

_SHOWN_FAULTS = 20
"""Of each GPU, the newest."""


async def cluster(request: web.Request) -> web.Response:
    """GET /v1/cluster"""
    viewer = viewer_of(request)
    service = viewer.service
    scheduler = service.scheduler
    now = scheduler.now()
    (node,) = scheduler.nodes(now)
    holds = scheduler.world.holds.values()
    layout = Layout((node,), scheduler.settings)
    load = scheduler.host
    reading = scheduler.reading
    nodes = [
        {
            "name": node.name,
            "state": "drained" if node.why_not else "up",
            "message": scheduler.world.drains.get(node.name),
            "cpus": node.cpus,
            "cpus_booked": sum(hold.cpus for hold in holds),
            "mem_mib": node.mem_mib,
            "mem_booked_mib": sum(map(layout.node_mem_mib, holds)),
            "mem_available_mib": load.mem_available_mib,
            "cpu_fraction": load.cpu_fraction,
            "disk_mib_s": load.disk_mib_s,
            "net_mib_s": load.net_mib_s,
            "gpu_source": reading.source if reading else None,
            "gpu_error": node.gpu_error,
            "driver_version": reading.driver_version if reading else None,
            "notes": [] if reading is None else reading.remarks,
            "isolation": service.daemon.isolation(),
        }
    ]
    queues, loans = queues_and_loans(viewer)
    return respond(
        nodes=nodes,
        gpus=[_gpu(viewer, node.name, card) for card in layout.cards],
        queues=queues,
        loans=loans,
        reservations=reservations(viewer),
        preset=service.daemon.preset(),
    )


_LIMIT = ("enforcement", "enforcement_why")


def _limit_of(sample: GpuSample | None, viewer: Viewer, limit: str | None) -> tuple[str, str]:
    return viewer.service.daemon.enforcement(sample, limit)


def _gpu(viewer: Viewer, node: str, card: Card) -> dict[str, Any]:
    scheduler = viewer.service.scheduler
    view = card.view
    world = scheduler.world
    runs = [
        (run, share)
        for run in (*world.open_runs.values(), *world.releasing.values())
        for share in run.gpus
        if share.uuid == view.uuid
    ]
    status = scheduler.tracker.status(view.uuid, [share for _, share in runs], scheduler.now())
    sample = status.sample
    whole = any(share.is_whole for _, share in runs)
    booked = card.host_mib or view.vram_total_mib if whole else sum(share.vram_mib or 0 for _, share in runs)
    if whole and view.vram_total_mib is None:
        booked = None
    held = {use.run: use.used_mib for use in scheduler.tracker.shares().get(view.uuid, ())}
    word, enforcement_why = _limit_of(sample, viewer, Enforcement.MPS if sample and sample.mps else None)
    shown = [(run, share) for run, share in runs if viewer.sees(world.jobs[run.job_id])]
    return {
        "node": node,
        "index": view.index,
        "uuid": view.uuid,
        "name": view.name,
        "state": status.state,
        "why": viewer.text(status.why),
        "vram_total_mib": sample.vram_total_mib if sample else None,
        "vram_used_mib": sample.vram_used_mib if sample else None,
        "vram_booked_mib": booked,
        "unified_memory": view.has_host_memory,
        "vram_over_mib": view.over_mib,
        "enforcement": word,
        "enforcement_why": enforcement_why,
        "utilisation": sample.utilisation if sample else None,
        "temperature_c": sample.temperature_c if sample else None,
        "power_w": sample.power_w if sample else None,
        "slowdown_c": sample.slowdown_c if sample else None,
        "ecc_errors": sample.ecc_errors if sample else None,
        "remap_pending": sample.remap_pending if sample else None,
        "remap_failed": sample.remap_failed if sample else None,
        "mig": sample.mig_enabled if sample else None,
        "mig_pending": sample.mig_pending if sample else None,
        "mig_instances": sample.mig_instances if sample else None,
        "mig_parent": view.mig_parent,
        "mig_profile": view.mig_profile,
        "link_group": view.link_group,
        "numa": view.numa,
        "pci_bus_id": sample.pci_bus_id if sample else None,
        "jobs": sorted({str(run.job_id) for run, _ in shown}, key=int),
        "booked_by": [
            {
                "job": str(run.job_id),
                "user": user_name(world.jobs[run.job_id].uid),
                "vram_mib": share.vram_mib,
                "fraction": share.fraction,
                "vram_used_mib": held.get(run.id),
                **dict(zip(_LIMIT, _limit_of(sample, viewer, share.limit), strict=True)),
            }
            for run, share in shown
        ],
        "foreign": [
            {
                "pid": process.pid,
                "user": process.user,
                "vram_mib": process.vram_mib,
                "name": process.name,
                "started_at": process.started_at,
                "job": viewer.job_of(process.run),
            }
            for process in status.intruders
        ],
        "foreign_mib": view.foreign_mib,
        "faults": [
            {
                "at": fault.at,
                "xid": fault.xid,
                "meaning": fault.meaning,
                "is_hardware": is_hardware(fault, viewer.service.settings.fault),
            }
            for fault in viewer.service.daemon.gpu_faults(view.uuid)[-_SHOWN_FAULTS:]
        ],
    }


def _targets(body: dict[str, Any]) -> tuple[str, ...]:
    targets = body.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(word, str) for word in targets):
        raise UsageError("no node or GPU is named", "for example: gctl drain 3 -m 'fan is broken'")
    return tuple(targets)


async def drain(request: web.Request) -> web.Response:
    """POST /v1/drain"""
    service, caller, body = service_of(request), caller_of(request), await read_body(request)
    check_keys(body, "targets", "message")
    message = body.get("message") or f"by {caller.user}"
    if not isinstance(message, str) or len(message) > 500:
        raise UsageError("the message must be a text of at most 500 characters", "use -m 'why'")
    return respond(**await service.daemon.ask(commands.Drain(caller, _targets(body), printable(message))))


async def undrain(request: web.Request) -> web.Response:
    """POST /v1/undrain"""
    service, caller, body = service_of(request), caller_of(request), await read_body(request)
    check_keys(body, "targets")
    return respond(**await service.daemon.ask(commands.Drain(caller, _targets(body), None)))


async def reload(request: web.Request) -> web.Response:
    """POST /v1/reload"""
    return respond(**await service_of(request).daemon.ask(Reload(caller_of(request))))


async def preset(request: web.Request) -> web.Response:
    """GET /v1/preset"""
    return respond(preset=viewer_of(request).service.daemon.preset_table())


async def judge_presets(request: web.Request) -> web.Response:
    """POST /v1/preset/judge"""
    service, caller = service_of(request), caller_of(request)
    check_admin(caller, "have the presets judged", service.settings)
    service.daemon.judge_presets()
    service.daemon.audit(caller, "judge", "the presets")
    return respond(preset=service.daemon.preset_table())


async def status(request: web.Request) -> web.Response:
    """GET /v1/status"""
    viewer = viewer_of(request)
    service = viewer.service
    scheduler = service.scheduler
    reading, health = scheduler.reading, service.daemon.health()
    return respond(
        daemon={
            **service.daemon.facts,
            "now": time.time(),
            "jobs": _counts(viewer),
            "gpu_source": reading.source if reading else None,
            "warnings": health.warnings,
            "limits": plain(service.settings.limit),
            "tick": {"count": health.ticks, "last_ms": health.last_tick_ms, "p95_ms": health.p95_tick_ms},
            "failing_steps": health.failing_steps,
        }
    )


def _counts(viewer: Viewer) -> dict[str, int]:
    """Unfinished jobs that the caller may know of, by state."""
    world = viewer.service.scheduler.world
    counts = world.counts()
    if not viewer.is_restricted:
        return counts
    seen: Counter[str] = Counter()
    for job in world.jobs.values():
        if viewer.sees(job):
            seen[job.state.value.lower()] += job_count(job)
    return {state: seen[state] for state in counts}


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
    # After the answer is out: the loop ends when the server has sent it.
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
    recording = Recording.of(scheduler.snapshot(now), service.settings, __version__, service.daemon.plugin_names())
    # Frozen, and of a long queue many megabytes: another thread writes it down.
    return await service.work_out(lambda: respond(**encode(recording)), caller)


async def openapi(request: web.Request) -> web.Response:
    """GET /v1/openapi.json"""
    caller_of(request)
    return web.json_response(request.app[DOCUMENT])
