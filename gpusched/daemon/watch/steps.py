"""Open steps whose process, `srun`, is gone without a word: they end, and what they started is killed."""

from __future__ import annotations

from typing import Any

from gpusched.daemon.state import DaemonState
from gpusched.daemon.tick import Scheduler
from gpusched.engine.linux import proctree
from gpusched.errors import GpuschedError
from gpusched.model.commands import LoseSteps
from gpusched.model.execution import StepStopOrder
from gpusched.model.job import run_id


class StepWatch:
    """Checks at each poll whether the processes of open steps are alive."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._world: DaemonState | None = None

    def poll(self) -> None:
        """Have the next tick end the steps whose process is gone."""
        world, own = self._scheduler.world, self._scheduler.head.name
        steps = world.steps.all()
        is_first = self._world is None
        if self._world is not world:
            self._world = world
            for step in steps.values():
                if step.cancel_uid is not None:
                    # The order may have been lost with the daemon that recorded the cancel.
                    self._scheduler.engine.order(run_id(step.job_id, step.run), StepStopOrder(step.number))
        gone = [
            step.id
            for step in steps.values()
            if step.pid is not None and step.node == own and not proctree.lives(step.pid, step.start_ticks or 0)
        ]
        if gone:
            self._scheduler.submit(LoseSteps(tuple(gone), is_seen=not is_first), _nobody_asked)


def _nobody_asked(answer: dict[str, Any] | GpuschedError) -> None:
    """Ignore the reply: a failed commit is retried at the next poll."""
