"""Ends of steps that nobody reports: that of their run, and of the process that began them."""

from __future__ import annotations

from typing import Any

from gpusched.daemon.commit import TickTransaction
from gpusched.lifecycle import steps
from gpusched.model.commands import LoseSteps
from gpusched.model.execution import StepStopOrder
from gpusched.model.job import Run


def lose(command: LoseSteps, tx: TickTransaction) -> dict[str, Any]:
    """End steps whose process is gone, and kill what it started."""
    for job_id, number, step_number in command.steps:
        handle = f"{job_id}.{number}"
        for step in tx.state.steps.of(handle):
            if step.number == step_number:
                tx.put_step(steps.lost(step, tx.now, is_seen=command.is_seen))
                tx.signal(handle, StepStopOrder(step.number, 0.0))
    return {}


def close_steps(run: Run, tx: TickTransaction) -> None:
    """End the open steps of a run that has ended."""
    for step in tx.state.steps.of(run.id):
        tx.put_step(steps.closed(step, run))
    tx.state.steps.forget(run.id)
