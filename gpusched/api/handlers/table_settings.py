"""Handlers about settings that live in the job table: limits of users, credits of budgets, and their undo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gpusched.access import check_admin, is_private
from gpusched.api.auth import caller_of
from gpusched.api.requests import check_keys, read_body, respond
from gpusched.api.schema import check_fields
from gpusched.api.service import service_of
from gpusched.api.visibility import viewer_of
from gpusched.errors import NotFound, Refused, UsageError
from gpusched.model.commands import ChangeMembers, GiveCredit, SetUserLimit, UndoTableSettings
from gpusched.model.option import Field
from gpusched.model.request import MAX_GPUS
from gpusched.model.spec import MAX_INSTANT
from gpusched.model.table_settings import SECTIONS, UserLimit
from gpusched.model.units import printable

_MOST_GPU_HOURS = 1e9
LIMIT_FIELDS: Mapping[str, Field] = {
    "user": Field("string", "The user that is limited.", nullable=False, most=256),
    "account": Field("string", "Only jobs of this account and those below it count; absent: all.", most=256),
    "max_gpus": Field("number", "GPUs of all running jobs together.", (0, MAX_GPUS)),
    "max_jobs": Field("integer", "Running jobs; with 0 none starts.", (0, 10**9)),
    "until_at": Field("number", "When the limit ends by itself, UTC epoch seconds; absent: never.", (0, MAX_INSTANT)),
    "message": Field("string", "Why, for the user."),
    "what": Field("string", "The command behind it, for the record of settings."),
}
REMOVAL_FIELDS: Mapping[str, Field] = {name: LIMIT_FIELDS[name] for name in ("user", "account", "what")}
CREDIT_FIELDS: Mapping[str, Field] = {
    "account": Field("string", "The account whose budget gets it.", nullable=False, most=256),
    "gpu_hours": Field("number", "GPU-hours; below 0 takes some away.", (-_MOST_GPU_HOURS, _MOST_GPU_HOURS)),
    "message": Field("string", "Why, for the record."),
    "what": Field("string", "The command behind it, for the record of settings."),
}


async def limits(request: web.Request) -> web.Response:
    """GET /v1/limits"""
    viewer = viewer_of(request)
    caller, settings = viewer.caller, viewer.service.settings
    is_own = any(is_private(what, caller, settings) for what in ("usage", "accounts"))
    found = (one.limit for one in viewer.service.scheduler.user_limits())
    return respond(limits=[limit_json(one) for one in found if not is_own or one.user == caller.user])


async def set_limit(request: web.Request) -> web.Response:
    """POST /v1/limits"""
    return await _limit(request, LIMIT_FIELDS, is_removed=False)


async def remove_limit(request: web.Request) -> web.Response:
    """POST /v1/limits/remove"""
    return await _limit(request, REMOVAL_FIELDS, is_removed=True)


async def _limit(request: web.Request, known: Mapping[str, Field], *, is_removed: bool) -> web.Response:
    service, caller = service_of(request), caller_of(request)
    values = _texts(check_fields(await read_body(request), known))
    if not values.get("user"):
        raise UsageError("no user is named", "for example: gctl limit user bob max_gpus=4 --until 1w")
    answer = await service.daemon.ask(SetUserLimit(caller, is_removed=is_removed, **values))
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


async def give_credit(request: web.Request) -> web.Response:
    """POST /v1/credits"""
    service, caller = service_of(request), caller_of(request)
    values = _texts(check_fields(await read_body(request), CREDIT_FIELDS))
    if not values.get("account") or not values.get("gpu_hours"):
        raise UsageError("no credit is given", "for example: gctl budget vision credit=500 -m 'grant'")
    credit = (await service.daemon.ask(GiveCredit(caller, **values)))["credit"]
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


MEMBER_FIELDS: Mapping[str, Field] = {
    "account": Field("string", "The account.", nullable=False, most=256),
    "add": Field("strings", "Users to add."),
    "remove": Field("strings", "Users to remove."),
    "what": Field("string", "The command behind it, for the record of settings."),
}


async def change_members(request: web.Request) -> web.Response:
    """POST /v1/members"""
    service, caller = service_of(request), caller_of(request)
    values = _texts(check_fields(await read_body(request), MEMBER_FIELDS))
    if not values.get("account"):
        raise UsageError("no account is named", "for example: gctl account members vision add=bob")
    values.update({name: tuple(values[name]) for name in ("add", "remove") if name in values})
    answer = await service.daemon.ask(ChangeMembers(caller, **values))
    return respond(members=answer["members"])


async def undo(request: web.Request) -> web.Response:
    """POST /v1/settings-log/undo"""
    service, caller = service_of(request), caller_of(request)
    check_admin(caller, "undo a change of the settings", service.settings)
    body = await read_body(request)
    check_keys(body, "id")
    number = body.get("id")
    found = next((entry for entry in service.daemon.settings_log(0.0, 1 << 30) if entry["id"] == number), None)
    if found is None:
        raise NotFound(f"there is no change {printable(str(number), 20)}", "see them with: gctl log --since 30d")
    changes = found["changes"]
    if not changes or any(one["key"][0] not in SECTIONS.values() for one in changes):
        raise Refused(f"change {number} is one of the config file", f"undo it with: gctl undo {number}")
    pairs = tuple(((one["key"][0], one["key"][1]), one["before"], one["after"]) for one in changes)
    await service.daemon.ask(UndoTableSettings(caller, found["id"], pairs, f"gctl undo {number}"))
    return respond(undone=found["id"], what=found["what"])


def _texts(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with texts that hold nothing for terminals."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in values.items()}
