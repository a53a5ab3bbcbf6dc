"""Handlers about settings that live in the job table: limits of users, credits of budgets, and their undo."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.access import check_admin, is_private
from gpusched.api.asked import Count, Instant, Name, Names, RequestBody, RequestQuery, Text, What, about
from gpusched.api.requests import respond
from gpusched.api.visibility import Viewer
from gpusched.errors import NotFound, Refused, UsageError
from gpusched.model.commands import ChangeMembers, GiveCredit, SetUserLimit, UndoTableSettings
from gpusched.model.request import MAX_GPUS
from gpusched.model.table_settings import SECTIONS, UserLimit
from gpusched.model.units import printable

_MOST_GPU_HOURS = 1e9
_Gpus = Annotated[float, Meta(ge=0, le=MAX_GPUS)]


class RemoveLimitBody(RequestBody):
    hint = "for example: gctl limit remove user bob"
    user: Annotated[Name, about("The user that is limited.", min_length=1)]
    account: Annotated[Name | None, about("Only jobs of this account and those below it count; absent: all.")] = None
    what: What | None = None


class LimitBody(RemoveLimitBody):
    hint = "for example: gctl limit user bob max_gpus=4 --until 1w"
    max_gpus: Annotated[_Gpus | None, about("GPUs of all running jobs together.")] = None
    max_jobs: Annotated[Count | None, about("Running jobs; with 0 none starts.")] = None
    until_at: Annotated[Instant | None, about("When the limit ends by itself, UTC epoch seconds; absent: never.")] = (
        None
    )
    message: Annotated[Text | None, about("Why, for the user.")] = None


class CreditBody(RequestBody):
    hint = "for example: gctl budget vision credit=500 -m 'grant'"
    account: Annotated[Name, about("The account whose budget gets it.", min_length=1)]
    gpu_hours: Annotated[
        float, about("GPU-hours; below 0 takes some away.", ge=-_MOST_GPU_HOURS, le=_MOST_GPU_HOURS, title="credit")
    ]
    message: Annotated[Text | None, about("Why, for the record.")] = None
    what: What | None = None


class MembersBody(RequestBody):
    hint = "for example: gctl account members vision add=bob"
    account: Annotated[Name, about("The account.", min_length=1)]
    add: Annotated[Names, about("Users to add.")] = ()
    remove: Annotated[Names, about("Users to remove.")] = ()
    what: What | None = None


class UndoBody(RequestBody):
    hint = "see changes with: gctl log --since 30d"
    id: Annotated[int, Meta(title="change")]


async def limits(viewer: Viewer, _: RequestQuery) -> web.Response:
    """Limits of single users: those of the config file, and those with an end or of one account."""
    caller, settings = viewer.caller, viewer.service.settings
    is_own = any(is_private(what, caller, settings) for what in ("usage", "accounts"))
    found = (one.limit for one in viewer.service.scheduler.user_limits())
    return respond(limits=[limit_json(one) for one in found if not is_own or one.user == caller.user])


async def set_limit(viewer: Viewer, body: LimitBody) -> web.Response:
    """Limit a user until an instant or in one account; for admins."""
    return await _limit(viewer, body, is_removed=False)


async def remove_limit(viewer: Viewer, body: RemoveLimitBody) -> web.Response:
    """Remove such a limit."""
    return await _limit(viewer, body, is_removed=True)


async def _limit(viewer: Viewer, body: RemoveLimitBody, *, is_removed: bool) -> web.Response:
    command = SetUserLimit(viewer.caller, is_removed=is_removed, **body.printable())
    answer = await viewer.service.daemon.ask(command)
    return respond(limit=limit_json(answer["limit"]))


def limit_json(limit: UserLimit) -> dict[str, Any]:
    return {
        "user": limit.user,
        "account": limit.account or None,
        "max_gpus": limit.max_gpus,
        "max_jobs": limit.max_jobs,
        "message": limit.message,
        "set_by": limit.by or None,
        "set_at": limit.at or None,
        "until_at": limit.until_at,
    }


async def give_credit(viewer: Viewer, body: CreditBody) -> web.Response:
    """Add GPU-hours to the budget of an account, for its present period; for admins."""
    if not body.gpu_hours:
        raise UsageError("no credit given", body.hint)
    answer = await viewer.service.daemon.ask(GiveCredit(viewer.caller, **body.printable()))
    credit = answer["credit"]
    return respond(
        credit={
            "number": credit.number,
            "account": credit.account,
            "gpu_hours": credit.gpu_hours,
            "given_by": credit.by,
            "given_at": credit.at,
            "message": credit.message,
        }
    )


async def change_members(viewer: Viewer, body: MembersBody) -> web.Response:
    """Add users to an account and remove users from it; for its coordinators."""
    answer = await viewer.service.daemon.ask(ChangeMembers(viewer.caller, **body.printable()))
    return respond(members=answer["members"])


async def undo(viewer: Viewer, body: UndoBody) -> web.Response:
    """Take back a change of the settings that live in the job table; for admins."""
    service, caller = viewer.service, viewer.caller
    check_admin(caller, "undo a change of the settings", service.settings)
    number = body.id
    found = next((entry for entry in service.daemon.settings_log(0.0, 1 << 30) if entry["id"] == number), None)
    if found is None:
        raise NotFound(f"there is no change {printable(str(number), 20)}", "see them with: gctl log --since 30d")
    changes = found["changes"]
    if not changes or any(one["key"][0] not in SECTIONS.values() for one in changes):
        raise Refused(f"change {number} is one of the config file", f"undo it with: gctl undo {number}")
    pairs = tuple(((one["key"][0], one["key"][1]), one["before"], one["after"]) for one in changes)
    await service.daemon.ask(UndoTableSettings(caller, found["id"], pairs, f"gctl undo {number}"))
    return respond(undone=found["id"], what=found["what"])
