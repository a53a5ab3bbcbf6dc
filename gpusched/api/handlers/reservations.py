"""Handlers about reservations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gpusched.access import is_private
from gpusched.api.auth import caller_of
from gpusched.api.requests import check_keys, read_body, respond
from gpusched.api.schema import check_fields
from gpusched.api.service import service_of
from gpusched.api.visibility import Viewer, viewer_of
from gpusched.errors import UsageError
from gpusched.model.commands import Reserve, Unreserve
from gpusched.model.option import Field
from gpusched.model.request import MAX_CPUS, MAX_GPUS
from gpusched.model.snapshot import CalendarEntry
from gpusched.model.spec import MAX_INSTANT
from gpusched.model.units import MAX_MIB, printable
from gpusched.ports.tables import CALENDAR
from gpusched.scheduler.calendar import next_window

MAX_WINDOW_S = 366 * 86400

FIELDS: Mapping[str, Field] = {
    "name": Field("string", "Name of the reservation, by which jobs request it.", nullable=False),
    "start_at": Field("number", "When its first window begins, UTC epoch seconds.", (0, MAX_INSTANT), nullable=False),
    "duration_s": Field("integer", "How long a window is, in seconds.", (1, MAX_WINDOW_S), nullable=False),
    "every_s": Field("integer", "From one window to the next, in seconds; absent for a single one.", (1, MAX_WINDOW_S)),
    "until_at": Field("number", "No window begins at or after this instant.", (0, MAX_INSTANT)),
    "gpus": Field("integer", "This many GPUs of a node.", (1, MAX_GPUS)),
    "cards": Field("strings", "These cards: index, node:index or UUID."),
    "is_node": Field("boolean", "A whole node.", nullable=False),
    "nodelist": Field("strings", "On each of these nodes; absent: on one node of the scheduler's choice."),
    "cpus": Field("number", "Cores; absent: in proportion to the cards.", (0, MAX_CPUS)),
    "mem_mib": Field("integer", "Host memory in MiB; absent: in proportion to the cards.", (0, MAX_MIB)),
    "users": Field("strings", "Users who may use it."),
    "accounts": Field("strings", "Accounts whose jobs may use it."),
    "is_maintenance": Field("boolean", "The whole node, closed to all jobs.", nullable=False),
    "message": Field("string", "Reason, shown to all users.", nullable=False),
    "ignore_jobs": Field("boolean", "Allow overlap with running jobs.", nullable=False),
}
_NEEDED = ("name", "start_at", "duration_s")
_LISTS = ("cards", "nodelist", "users", "accounts")


def reservations(viewer: Viewer) -> list[dict[str, Any]]:
    """Reservations visible to the caller that have not ended, by their next window and name."""
    service = viewer.service
    state = service.scheduler.state
    now = service.scheduler.now()
    jobs: dict[str, list[str]] = {}
    for job in state.jobs.values():
        if job.spec.reservation and viewer.sees(job):
            jobs.setdefault(job.spec.reservation, []).append(job.shown_id)
    entries = list(state.rows[CALENDAR].values())
    if is_private("reservations", viewer.caller, service.settings):
        entries = [entry for entry in entries if viewer.may_use(entry)]
    found = [_rendered(entry, now, jobs.get(entry.name, [])) for entry in entries]
    live = [one for one in found if one["next"] is not None]
    return sorted(live, key=lambda one: (one["next"]["start_at"], one["name"]))


def _rendered(entry: CalendarEntry, now: float, jobs: list[str]) -> dict[str, Any]:
    window = next_window(entry, now)
    return {
        "name": entry.name,
        "next": None if window is None else {"start_at": window.start_at, "end_at": window.end_at},
        "is_active": window is not None and window.start_at <= now,
        "start_at": entry.start_at,
        "duration_s": entry.duration_s,
        "every_s": entry.every_s,
        "until_at": entry.until_at,
        "held": [
            {
                "node": place.node,
                "gpus": [{"index": share.index, "uuid": share.uuid} for share in place.gpus],
                "cpus": place.cpus,
                "mem_mib": place.mem_mib,
                "is_node": place.is_exclusive,
            }
            for place in entry.held
        ],
        "users": list(entry.users),
        "accounts": list(entry.accounts),
        "jobs": jobs,
        "is_maintenance": entry.is_maintenance,
        "message": entry.message,
        "made_by": entry.made_by,
        "made_at": entry.made_at,
    }


async def listing(request: web.Request) -> web.Response:
    """GET /v1/reservations"""
    return respond(reservations=reservations(viewer_of(request)))


async def reserve(request: web.Request) -> web.Response:
    """POST /v1/reservations"""
    service, caller, body = service_of(request), caller_of(request), await read_body(request)
    values = check_fields(body, FIELDS)
    for name in _NEEDED:
        if name not in values:
            raise UsageError(f"{name} is missing", "for example: gctl reserve course --start 14:00 --duration 4h -g 2")
    values.update({name: tuple(values[name]) for name in _LISTS if name in values})
    if "message" in values:
        values["message"] = printable(values["message"])
    answer = await service.daemon.ask(Reserve(caller, **values))
    made = _rendered(answer["entry"], service.scheduler.now(), [])
    return respond(reservation=made, notes=answer["notes"])


async def unreserve(request: web.Request) -> web.Response:
    """POST /v1/unreserve"""
    service, caller, body = service_of(request), caller_of(request), await read_body(request)
    check_keys(body, "names")
    names = body.get("names")
    if not isinstance(names, list) or not names or not all(isinstance(word, str) for word in names):
        raise UsageError("no reservation given", "for example: gctl unreserve course")
    answer = await service.daemon.ask(Unreserve(caller, tuple(names)))
    return respond(
        changed=answer["changed"], waiting=[service.scheduler.state.name_of(job_id) for job_id in answer["waiting"]]
    )
