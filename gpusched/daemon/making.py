"""How new jobs get into the table, whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.access import is_private, is_root
from gpusched.errors import Refused
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobEvent
from gpusched.model.units import plural

from .turn import Turn


def check_room(jobs: int, caller: Caller, turn: Turn) -> None:
    """Refuse so many new jobs when they would pass a limit. Raises: Refused."""
    known, limit = len(turn.world.jobs), turn.settings.limit.jobs
    if jobs > limit - known:
        # How many jobs others have may be nobody's to know.
        there = (
            "" if is_private("jobs", caller, turn.settings) else f"{plural(known, 'job')} waiting or running already; "
        )
        raise Refused(
            f"{there}{jobs} more would pass the limit of {limit} jobs that wait or run",
            "wait for jobs to end, or raise [limit] jobs in the config file",
        )
    own, most = turn.world.jobs_of(caller.uid), turn.settings.limit.jobs_per_user
    if jobs > most - own and not is_root(caller):
        raise Refused(
            f"{plural(own, 'job')} of {caller.user} waiting or running already; {jobs} more would pass the limit of "
            f"{most} per user",
            "wait for jobs to end, submit alike ones as an array (-a 0-999), which counts as one, or ask an admin to "
            "raise [limit] jobs_per_user",
        )


def check_stored(payloads: Mapping[str, bytes], caller: Caller, turn: Turn) -> None:
    """Refuse texts with which a user's jobs would take more of the database than one may. Raises: Refused."""
    if is_root(caller):
        return
    stored = turn.world.stored
    if caller.uid not in stored:
        stored[caller.uid] = turn.store.payload_bytes_of(caller.uid)
    new = payloads.keys() - turn.store.known_payloads(payloads) - turn.changes.payloads.keys()
    size = sum(len(payloads[sha]) for sha in new)
    most = turn.settings.limit.stored_mib_per_user
    if size and stored[caller.uid] + size > most * (1 << 20):
        # Some may have been forgotten with old jobs since.
        stored[caller.uid] = turn.store.payload_bytes_of(caller.uid)
    if size and stored[caller.uid] + size > most * (1 << 20):
        raise Refused(
            f"the scripts and environments of {caller.user}'s jobs take {stored[caller.uid] / (1 << 20):.1f} MiB in "
            f"the database, and with these they would pass the limit of {most:g} MiB",
            "submit one script with other arguments (gsub job.sh ARG), which is stored once, leave out the environment "
            "(--export=NONE), or ask an admin to raise [limit] stored_mib_per_user",
        )
    stored[caller.uid] += size


def record(job: Job, text: str, turn: Turn) -> None:
    """Take a new job in, with the first line of its story."""
    if job.spec.dependency:
        turn.world.learn_parents(turn.jobs, [job.spec.dependency])
    turn.put_job(job)
    turn.tell(JobEvent(job.id, turn.now, "submitted", text))
