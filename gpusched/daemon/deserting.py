"""The command that ends jobs in the foreground whose client is gone while they wait."""

from __future__ import annotations

from typing import Any

from gpusched.lifecycle import lifecycle
from gpusched.model.commands import LoseClients
from gpusched.model.job import ClientProcess, Job
from gpusched.model.states import JobState, ReasonCode

from .turn import Turn


def apply(command: LoseClients, turn: Turn) -> dict[str, Any]:
    """End those that still wait; a run finds out by itself."""
    for job_id in command.ids:
        job = turn.world.jobs.get(job_id)
        if job is not None and (client := awaited(job)) is not None:
            text = f"its client, process {client.pid}, was gone before it began"
            after, events = lifecycle.give_up(job, turn.now, ReasonCode.CLIENT_LOST, text)
            turn.put_job(after)
            turn.tell(*events)
    return {}


def awaited(job: Job) -> ClientProcess | None:
    """The process without which this job is not to start; None when there is no such."""
    foreground = job.spec.interactive
    if job.state is not JobState.PENDING or foreground is None or foreground.keep:
        return None
    return foreground.client
