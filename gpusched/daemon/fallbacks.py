"""Jobs that follow the last failure of others, recorded in the same commit as the failure."""

from __future__ import annotations

from gpusched.lifecycle.fallback import make_fallback, wants_fallback

from .turn import Turn


def follow_failures(turn: Turn) -> None:
    """Make the fallbacks of all jobs that have failed for good in this turn.

    No limit on the number of jobs refuses them: the failed job has just made room.
    """
    for job in [job for job in turn.changes.jobs.values() if wants_fallback(job)]:
        job_id = turn.world.next_id
        turn.world.next_id = job_id + 1
        failed, made, story = make_fallback(job, job_id, turn.now, turn.settings.default.output)
        turn.put_job(failed)
        turn.put_job(made)
        turn.tell(*story)
