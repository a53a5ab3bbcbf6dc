"""Handlers about reservations."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.access import is_private
from gpusched.api.asked import Cores, Instant, Names, RequestBody, RequestQuery, Text, about
from gpusched.api.requests import respond
from gpusched.api.visibility import Viewer
from gpusched.model.commands import Reserve, Unreserve
from gpusched.model.request import MAX_GPUS
from gpusched.model.snapshot import CalendarEntry
from gpusched.model.spec import MAX_INSTANT
from gpusched.model.units import MAX_MIB, printable
from gpusched.ports.tables import CALENDAR
from gpusched.scheduler.calendar import next_window

MAX_WINDOW_S = 366 * 86400


_Span = Annotated[int, Meta(ge=1, le=MAX_WINDOW_S)]
_Gpus = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
_Memory = Annotated[int, Meta(ge=0, le=MAX_MIB)]


class ReserveBody(RequestBody):
    hint = "for example: gctl reserve course --start 14:00 --duration 4h -g 2"
    name: Annotated[Text, about("Name of the reservation, by which jobs request it.")]
    start_at: Annotated[float, about("When its first window begins, UTC epoch seconds.", ge=0, le=MAX_INSTANT)]
    duration_s: Annotated[int, about("How long a window is, in seconds.", ge=1, le=MAX_WINDOW_S)]
    every_s: Annotated[_Span | None, about("From one window to the next, in seconds; absent for a single one.")] = None
    until_at: Annotated[Instant | None, about("No window begins at or after this instant.")] = None
    gpus: Annotated[_Gpus | None, about("This many GPUs of a node.")] = None
    cards: Annotated[Names, about("These cards: index, node:index or UUID.")] = ()
    is_node: Annotated[bool, about("A whole node.")] = False
    nodelist: Annotated[Names, about("On each of these nodes; absent: on one node of the scheduler's choice.")] = ()
    cpus: Annotated[Cores | None, about("Cores; absent: in proportion to the cards.")] = None
    mem_mib: Annotated[_Memory | None, about("Host memory in MiB; absent: in proportion to the cards.")] = None
    users: Annotated[Names, about("Users who may use it.")] = ()
    accounts: Annotated[Names, about("Accounts whose jobs may use it.")] = ()
    is_maintenance: Annotated[bool, about("The whole node, closed to all jobs.")] = False
    message: Annotated[Text, about("Reason, shown to all users.")] = ""
    ignore_jobs: Annotated[bool, about("Allow overlap with running jobs.")] = False


class UnreserveBody(RequestBody):
    hint = "for example: gctl unreserve course"
    names: Annotated[list[str], Meta(min_length=1, title="reservation")]


def reservations(viewer: Viewer) -> list[dict[str, Any]]:
    """Reservations visible to the caller that have not ended, by their next window and name."""
    service = viewer.service
    state = service.scheduler.state
    entries = list(state.rows[CALENDAR].values())
    if not entries:
        return []
    now = service.scheduler.now()
    jobs: dict[str, list[str]] = {}
    for job in state.jobs.values():
        if job.spec.reservation and viewer.sees(job):
            jobs.setdefault(job.spec.reservation, []).append(job.shown_id)
    if is_private("reservations", viewer.caller, service.settings):
        entries = [entry for entry in entries if viewer.audience.may_use(entry)]
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


async def listing(viewer: Viewer, _: RequestQuery) -> web.Response:
    """Reservations that are not over, by their next window."""
    return respond(reservations=reservations(viewer))


async def reserve(viewer: Viewer, body: ReserveBody) -> web.Response:
    """Reserve GPUs, cores and memory for users or accounts, once or repeatedly."""
    service = viewer.service
    values = {**body.given(), "message": printable(body.message)}
    answer = await service.daemon.ask(Reserve(viewer.caller, **values))
    made = _rendered(answer["entry"], service.scheduler.now(), [])
    return respond(reservation=made, notes=answer["notes"])


async def unreserve(viewer: Viewer, body: UnreserveBody) -> web.Response:
    """Remove reservations from the calendar; jobs inside keep running."""
    service = viewer.service
    answer = await service.daemon.ask(Unreserve(viewer.caller, tuple(body.names)))
    return respond(
        changed=answer["changed"], waiting=[service.scheduler.state.name_of(job_id) for job_id in answer["waiting"]]
    )
