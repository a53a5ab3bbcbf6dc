"""Handler about processes on GPUs that no booking explains: whose they are, and what they cost the queue."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gpusched.access import is_admin
from gpusched.api.handlers.jobs import respond
from gpusched.api.visibility import Viewer, viewer_of
from gpusched.model.cluster import GpuStatus, GpuView
from gpusched.scheduler.ahead.foreign import Left

_TRIED = 50
"""Processes whose cost is worked out, those with the most memory first: each takes a plan of the whole queue."""


async def foreign(request: web.Request) -> web.Response:
    """GET /v1/foreign"""
    viewer = viewer_of(request)
    service = viewer.service
    scheduler = service.scheduler
    now = scheduler.now()
    found = [
        (node.name, view, scheduler.tracker.status(view.uuid, now=now))
        for node in scheduler.nodes(now)
        for view in node.gpus
    ]
    rows = [
        {**row, **_told(viewer, row["pid"])}
        for node, view, status in found
        for row in _rows(viewer, node, view, status, now)
    ]
    held: dict[int, int] = {}
    for row in rows:
        held[row["pid"]] = held.get(row["pid"], 0) + (row["vram_mib"] or 0)
    tried = sorted(held, key=lambda pid: (-held[pid], pid))[:_TRIED]
    cases: list[Left] = [_left(found, {pid}) for pid in tried]
    cases.append(_left(found, set(held)))
    *each, together = await service.work_out(service.daemon.starts_without(cases), viewer.caller)
    costs = dict(zip(tried, each, strict=True))
    for row in rows:
        row["jobs_kept_waiting"] = costs.get(row["pid"])
    if viewer.is_restricted:
        # How many others wait is not to be counted by asking.
        for row in rows:
            row["jobs_kept_waiting"] = None
    return respond(foreign=rows, jobs_kept_waiting=None if viewer.is_restricted else together)


def _told(viewer: Viewer, pid: int) -> dict[str, Any]:
    """When and how its owner was told last, and since when it is being ended; why they were not is for them alone."""
    notes = viewer.service.daemon.owner_notes(pid)
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
        # The card does nothing for anybody since then, so neither for this process.
        idle_since = None if status.idle_since is None else max(status.idle_since, process.started_at or 0.0)
        rows.append(
            {
                "node": node,
                "gpu": view.index,
                "uuid": view.uuid,
                "pid": process.pid,
                "user": process.user,
                "name": process.name,
                "job": viewer.job_of(process.run),
                "vram_mib": process.vram_mib,
                "started_at": process.started_at,
                "age_s": None if process.started_at is None else max(0.0, now - process.started_at),
                "gpu_idle_s": None if idle_since is None else max(0.0, now - idle_since),
            }
        )
    return rows


def _left(found: list[tuple[str, GpuView, GpuStatus]], gone: set[int]) -> Left:
    """Foreign memory that would stay on the cards of these processes without them."""
    left = {}
    for _, view, status in found:
        leaving = [process for process in status.intruders if process.pid in gone]
        if len(leaving) == len(status.intruders) > 0:
            left[view.uuid] = 0
        elif leaving:
            left[view.uuid] = max(0, view.foreign_mib - sum(process.vram_mib or 0 for process in leaving))
    return left
