"""What time and other jobs decide about waiting ones, without the policy: dependencies and deadlines."""

from __future__ import annotations

from gpusched.lifecycle import lifecycle
from gpusched.model.job import Job
from gpusched.model.states import ReasonCode

from .turn import Turn


def settle_dependencies(turn: Turn) -> bool:
    """Let go what may start now and end what never can; whether anything was lined up."""
    world = turn.world
    before = world.lined_up
    is_moving = True
    while is_moving:
        # The end of one may be what others wait for.
        is_moving = turn.settle_arrays()
        for job, verdict in world.settle_dependencies(turn.now):
            if lifecycle.ends_unsatisfied(job.spec, turn.settings, is_spared=verdict.is_spared):
                is_moving = True
                _give_up(turn, job, ReasonCode.DEPENDENCY_NEVER_SATISFIED, verdict.text)
        # Only now: the array of such a task may have been given up whole.
        for job, text in world.settle_counterparts(turn.now):
            if lifecycle.ends_unsatisfied(job.spec, turn.settings):
                is_moving = True
                _give_up(turn, job, ReasonCode.DEPENDENCY_NEVER_SATISFIED, text)
    return world.lined_up != before


def end_what_is_too_late(turn: Turn) -> None:
    """End the waiting jobs that can no longer meet their deadline, and what depends on them."""
    late = turn.world.too_late(turn.now)
    for job in late:
        if job.is_array:
            turn.stop_array(job, ReasonCode.DEADLINE, "its deadline has passed")
            continue
        after, story = lifecycle.past_deadline(job, turn.now)
        turn.put_job(after)
        turn.tell(*story)
    if late:
        settle_dependencies(turn)


def _give_up(turn: Turn, job: Job, code: ReasonCode, text: str) -> None:
    if job.is_array:
        turn.stop_array(job, code, text)
        return
    after, story = lifecycle.give_up(job, turn.now, code, text)
    turn.put_job(after)
    turn.tell(*story)
