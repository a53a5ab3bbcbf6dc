"""After a restart: what is open in the table, handed to the engine, which knows what became of it.

    alive                          adopted: RunStarted, later its end
    result file in the spool       RunEnded, as if it had just happened
    recorded but never started     the claim is revoked: RunNeverStarted, the job waits again
    supervisor gone, no result     what it left is ended: RunLost, the requeue rule decides
    another boot of the machine    nothing can be alive: RunLost

The engine tells these apart (`Engine.adopt`); the tick applies what it says. Ended runs whose GPUs
were not proven clean before the crash are watched again by the scheduler itself.
"""

from __future__ import annotations

from logging import getLogger

from gpusched.daemon.world import World
from gpusched.daemon.yielding import pending_order
from gpusched.model.execution import OpenRun
from gpusched.ports import Engine

log = getLogger("gpusched.daemon")


def adopt_open_runs(world: World, engine: Engine) -> None:
    """Hand every open run to the engine, with the stop or suspension that was recorded for it, if any."""
    open_runs = [
        OpenRun(
            run=run.id,
            boot_id=run.boot_id,
            supervisor_pid=run.supervisor_pid,
            supervisor_start_ticks=run.supervisor_start_ticks,
            pending_order=pending_order(world.jobs[run.job_id]),
            adopted=world.jobs[run.job_id].spec.adopted,
        )
        for _, run in sorted(world.open_runs.items())
    ]
    if open_runs:
        log.info("adopting %d open runs", len(open_runs))
    # Also with none: the engine then clears what no row of the table knows.
    engine.adopt(open_runs)
