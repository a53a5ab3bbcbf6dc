"""Who is at a job in the foreground, and how long its lease lasts: asked of the run itself, when somebody asks."""

from __future__ import annotations

from typing import Any

from gpusched.api.service import Service
from gpusched.model.job import Interactive, Job
from gpusched.model.states import JobState


async def foreground_json(job: Job, service: Service) -> dict[str, Any] | None:
    """For `gshow`; None for a job in the background. `client` is null also when nobody knows: see `is_known`."""
    spec = job.spec.interactive
    if spec is None:
        return None
    facts: dict[str, Any] = {
        "terminal": spec.pty,
        "keep": spec.keep,
        "lease_s": spec.lease_s,
        "client": None,
        "lease_ends_at": None,
        "is_known": True,
    }
    if job.state is JobState.PENDING:
        return {**facts, "client": _waiting(job, spec, service)}
    if job.state.is_final:
        return facts
    status = await service.daemon.foreground_status(job)
    if status is None:
        return {**facts, "is_known": False}
    pid, since_at, lease_ends_at = status
    if pid is not None:
        facts["client"] = {"pid": int(pid), "since_at": since_at}
    if job.state is not JobState.SUSPENDED:
        facts["lease_ends_at"] = lease_ends_at
    return facts


def _waiting(job: Job, spec: Interactive, service: Service) -> dict[str, Any] | None:
    client = spec.client
    if client is None or not service.daemon.is_alive(client):
        return None
    return {"pid": client.pid, "since_at": job.submit_at}
