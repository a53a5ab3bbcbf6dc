"""Handler that makes a job of a process that is on a GPU without one."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web

from gpusched.api.auth import caller_of
from gpusched.api.handlers.jobs import check_keys, read_body, respond
from gpusched.api.schema import SPEC_FIELDS
from gpusched.api.service import service_of
from gpusched.api.validate import check_fields, read_spec
from gpusched.errors import UsageError
from gpusched.model.commands import Adopt
from gpusched.model.units import printable
from gpusched.model.value import replace

FIELDS = ("name", "queue", "account", "qos", "time_limit_s", "vram_mib", "grace_s")
"""What may be said of a job that is adopted, as in a submission."""
_MOST_PID = 1 << 22
"""Of any Linux."""


async def adopt(request: web.Request) -> web.Response:
    """POST /v1/adopt"""
    service, caller, body = service_of(request), caller_of(request), await read_body(request)
    check_keys(body, "pid", *FIELDS)
    pid = body.pop("pid", None)
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid <= _MOST_PID:
        raise UsageError(f"pid is {printable(repr(pid), 40)}; it must be the number of a process", "ginfo --foreign")
    asked: dict[str, Any] = check_fields(body, {name: SPEC_FIELDS[name] for name in FIELDS})
    settings = service.settings
    found = await service.work_out(service.daemon.adoptable(pid, caller), caller)
    payloads: dict[str, bytes] = {}
    spec = replace(read_spec(service.daemon.adoption_fields(found, asked), settings, payloads), adopted=found.process)
    service.pace.submission(
        dataclasses.replace(caller, uid=found.uid, user=found.user),
        [spec],
        sum(map(len, payloads.values())),
        settings.limit,
    )
    return respond(adopted=await service.daemon.ask(Adopt(caller, found, spec, payloads)))
