"""The larger request of a job whose memory ran out, judged by the machines and limits of this turn."""

from __future__ import annotations

from gpusched.daemon.verbs.admission import check_admitted
from gpusched.errors import Refused
from gpusched.lifecycle.growth import Larger, NothingLarger, grown
from gpusched.model.job import Job, Request, Run
from gpusched.model.value import replace
from gpusched.scheduler.capacity import refusal

from .turn import Turn


def grow(job: Job, run: Run, turn: Turn) -> Larger | NothingLarger | None:
    """What the job's next run asks for; None: the same."""
    spec = job.spec

    def is_admitted(request: Request) -> bool:
        if refusal(request, turn.nodes, turn.settings) is not None:
            return False
        with turn.world.active.with_more(spec, job.user, -1):
            try:
                check_admitted(replace(spec, request=request), job.user, turn)
            except Refused:
                return False
        return True

    return grown(spec.request, run, turn.nodes, turn.settings, is_admitted)
