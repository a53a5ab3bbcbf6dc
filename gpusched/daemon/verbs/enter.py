"""Let a client of the owner start something in a running job, from outside of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpusched.access import Act, check
from gpusched.daemon.commit import TickTransaction
from gpusched.errors import Refused
from gpusched.model.commands import EnterJob
from gpusched.model.execution import EnterOrder
from gpusched.model.job import Run
from gpusched.model.states import JobState


def apply(command: EnterJob, tx: TickTransaction) -> dict[str, Any]:
    """Order the run of a running job to open doors; `run` is its handle, None for a job that is not running."""
    job = tx.state.jobs.get(command.job_id)
    if job is None or job.state is not JobState.RUNNING:
        return {"run": None}
    check(command.caller, Act.ENTER, job, tx.settings)
    if job.spec.is_for_slurm:
        raise Refused(
            f"job {job.shown_id} runs in Slurm, where gpusched can start nothing",
            f"see its id there with: gshow {job.shown_id}, then type Slurm's own: srun --overlap --jobid=ID --pty bash",
        )
    if job.spec.adopted is not None:
        raise Refused(
            f"job {job.shown_id} is an adopted process, in which gpusched can start nothing",
            "look at it with: gshow " + job.shown_id,
        )
    run = tx.run_of(job)
    open_doors(tx, run, command.token, command.nodes)
    return {"run": run.id}


def open_doors(tx: TickTransaction, run: Run, token: str, nodes: Iterable[str]) -> None:
    """Order a running run to open doors in this tick, one on each of these nodes of it, or on all for none.

    Args: token: the name of the doors, each on its own node: 16 hexadecimal digits that nobody can guess.
    """
    tx.signal(run.id, EnterOrder(token, tuple(nodes)))
