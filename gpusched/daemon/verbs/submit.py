"""Submit jobs: how all new jobs get into the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpusched.access import is_private, is_root
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.leanings import data_notes
from gpusched.daemon.verbs.admission import (
    check_nice,
    check_submission,
    complete_all,
    completed,
    handover_notes,
    keep_unknown_unknown,
    name_notes,
    never_starts,
    pause_notes,
    sized,
    with_auto_limits,
)
from gpusched.daemon.verbs.images import with_pull
from gpusched.daemon.verbs.variants import with_variants
from gpusched.errors import Refused
from gpusched.lifecycle.transitions import new_job
from gpusched.model.batch import Batch
from gpusched.model.commands import ENDED, FAILED, NEVER, Caller, Submit
from gpusched.model.job import Job, JobEvent, JobSpec, Launch, Request, RetryRule
from gpusched.model.spec import AUTO
from gpusched.model.states import JobState
from gpusched.model.units import name_some, plural, printable
from gpusched.model.variants import pending_again
from gpusched.ports.tables import BATCHES
from gpusched.scheduler.cheap import put_off

_MOST_NAMES = 8


def apply(command: Submit, tx: TickTransaction) -> dict[str, Any]:
    state, settings, now = tx.state, tx.settings, tx.now
    if len(command.specs) == 1:
        found = existing(command.specs[0], command.key_again, command.caller, tx)
        if found is not None:
            return found
    check_room(len(command.specs), command.caller, tx)
    for nice, queue in {(spec.nice, spec.queue) for spec in command.specs}:
        check_nice(nice, queue, command.caller, settings)
    specs, left = with_variants(command.specs, command.caller, tx)
    specs, limits = with_auto_limits(specs, command.caller.user, tx)
    specs = complete_all(specs, command.caller, tx)
    check_submission(specs, command.caller, tx)
    # One spec per dependency: a batch has thousands of jobs with the same one.
    dependent = {spec.dependency: spec for spec in specs if spec.dependency}
    shown_id = str(state.next_id) if len(specs) == 1 else "ID"
    looked = {words: never_starts(spec, tx, shown_id) for words, spec in dependent.items()}
    never = {words: text for words, text in looked.items() if text is not None}
    doomed: dict[str, list[str]] = {}
    """Jobs that can never start, by reason."""
    check_stored(command.payloads, command.caller, tx)
    keep_unknown_unknown(specs, tx)
    ids = []
    left_out = left_out_text(command.env_excluded)
    for spec, limit in zip(specs, limits, strict=True):
        spec = with_pull(spec, command.caller, tx)
        job = put_off(new_job(state.next_id, command.caller, spec, now), tx.tariff, now)
        state.next_id = job.last_id + 1
        ids.append(job.id)
        if spec.dependency in never:
            doomed.setdefault(never[spec.dependency], []).append(str(job.id))
        origin = f", as job {command.origins[len(ids) - 1]} was" if command.origins else ""
        record(job, f"submitted by {command.caller.by}{origin}{left_out}{limit and f'; {limit}'}", tx)
    tx.changes.payloads.update(command.payloads)
    notes = [*left, *(f"{name_some('job', names)} {text}" for text, names in doomed.items())]
    notes += name_notes(specs, settings)
    notes += pause_notes((spec.queue for spec in specs), tx)
    near = [(command.caller.user, spec.request.near) for spec in specs if spec.request.near]
    if near:
        notes += data_notes(near, tx.nodes, tx.has_read)
    notes += handover_notes(specs, tx.handover)
    said = list(dict.fromkeys(filter(None, limits)))
    return {"ids": ids, "notes": notes, **({"limits": said} if said else {})}


def left_out_text(names: Sequence[str]) -> str:
    """The end of a sentence on variables that are not in a job's environment; empty without any."""
    shown = ", ".join(printable(name, 60) for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"; not in its environment: {shown}{f' and {more} more' if more > 0 else ''}" if names else ""


_WORK = ("argv", "script_sha", "script_path", "work_dir", "submit_dir")
_TERMS = {
    "request": tuple(name for name in Request.__struct_fields__ if name not in ("runtime", "image_nodes")),
    "retry": tuple(RetryRule.__struct_fields__),
    # The environment differs between shells and says little about the request.
    "launch": tuple(
        name
        for name in Launch.__struct_fields__
        if name not in (*_WORK, "env_sha", "umask", "image_digest", "image_refused")
    ),
}
_SPEC_TERMS = tuple(
    name for name in JobSpec.__struct_fields__ if name not in (*_TERMS, "key", "snapshot", "array", "image_job")
)


def job_of(uid: int, key: str, tx: TickTransaction) -> Job | None:
    """The newest job of this user with this key, including jobs of this tick."""
    job_id = tx.keys.get((uid, key))
    if job_id is not None:
        return tx.changes.jobs[job_id]
    stored = tx.store.job_of_key(uid, key)
    # The changes of this tick are not in the table yet.
    return stored and tx.changes.jobs.get(stored.id, stored)


def existing(spec: JobSpec, again: str, caller: Caller, tx: TickTransaction) -> dict[str, Any] | None:
    """Reply to a submission whose key already has a job; None if it makes a new one.

    Raises: Refused if the key belongs to different work.
    """
    if spec.key is None:
        return None
    job, batch = job_of(caller.uid, spec.key, tx), batch_of(caller.uid, spec.key, tx)
    if batch is not None and (job is None or job.id < batch.first_id):
        if is_batch_over(batch, again, tx):
            return None
        raise Refused(
            f"the key {printable(repr(spec.key), 80)} belongs to {batch.shown_ids}, a batch",
            f"see it with: gshow {batch.first_id}, or use another --key for this job",
        )
    if job is None or (job.state.is_final and _is_over(job.state, again)):
        return None
    shown = f"the key {printable(repr(spec.key), 80)} belongs to job {job.shown_id}"
    for what, ours, theirs in _work(spec, job.spec):
        if ours != theirs:
            raise Refused(
                f"{shown}, which has a different {what}",
                f"see it with: gshow {job.shown_id}, or use another --key for this one",
            )
    (spec,), _ = with_variants([spec], caller, tx)
    differs = differing_terms(sized(completed(spec, caller, tx.settings), tx), pending_again(job).spec)
    if spec.time_limit_source == AUTO:
        # The learned limit may have changed since; the request has not.
        differs.discard("time_limit_s")
    return {"ids": [job.id], "existing": True, "differs": sorted(differs)}


def differing_terms(wanted: JobSpec, known: JobSpec) -> set[str]:
    """What two submissions of the same work ask for differently."""
    differs = {name.removesuffix("_label") for name in _differences(wanted, known)} - {"time_limit_source"}
    if "layout" in differs:
        # What the tasks add up to says it, if that differs.
        differs.remove("layout")
        if wanted.request == known.request:
            differs.add("tasks")
    return differs


def batch_of(uid: int, key: str, tx: TickTransaction) -> Batch | None:
    """The newest batch of this user with this key, including batches of this tick."""
    ours = [one for one in tx.changes.rows[BATCHES].values() if one is not None and (one.uid, one.key) == (uid, key)]
    return max(ours, key=lambda one: one.first_id, default=None) or tx.store.batch_of_key(uid, key)


def is_batch_over(batch: Batch, again: str, tx: TickTransaction) -> bool:
    """Whether a submission with the key of this batch makes new jobs."""
    if again == NEVER or batch.first_id in tx.state.batches:
        return False
    # The changes of this tick are not in the table yet.
    now = {job.id: job.state for job in tx.changes.jobs.values() if batch.first_id <= job.id <= batch.last_id}
    states = {*now.values(), *tx.store.states_of_batch(batch)}
    return all(state.is_final for state in states) and any(_is_over(state, again) for state in states)


def _is_over(state: JobState, again: str) -> bool:
    return again == ENDED or (again == FAILED and state is not JobState.COMPLETED)


def _work(ours: JobSpec, theirs: JobSpec) -> Iterator[tuple[str, object, object]]:
    yield "script", ours.launch.script_sha, theirs.launch.script_sha
    yield "command line", ours.launch.argv, theirs.launch.argv
    # A snapshot is in another folder, but the work comes from the same place.
    yield "working directory", folder_of(ours.launch), folder_of(theirs.launch)
    yield "set of tasks", ours.array, theirs.array


def folder_of(launch: Launch) -> str:
    return launch.submit_dir or launch.work_dir


def _differences(ours: JobSpec, theirs: JobSpec) -> Iterator[str]:
    """Names of the terms that differ."""
    for part, names in _TERMS.items():
        one, other = getattr(ours, part), getattr(theirs, part)
        yield from (name for name in names if getattr(one, name) != getattr(other, name))
    yield from (name for name in _SPEC_TERMS if getattr(ours, name) != getattr(theirs, name))


def check_room(jobs: int, caller: Caller, tx: TickTransaction) -> None:
    """Refuse new jobs that would exceed a limit on their number. Raises: Refused."""
    known, limit = len(tx.state.jobs) + tx.state.unmade, tx.settings.limit.jobs
    if jobs > limit - known:
        # The number of other users' jobs may be private.
        there = (
            "" if is_private("jobs", caller, tx.settings) else f"{plural(known, 'job')} pending or running already; "
        )
        raise Refused(
            f"{there}{jobs} more would exceed the limit of {limit} pending and running jobs",
            "wait for jobs to end, or raise [limit] jobs in the config file",
            "job_count",
        )
    own, most = tx.state.jobs_of[caller.uid], tx.settings.limit.jobs_per_user
    if jobs > most - own and not is_root(caller):
        raise Refused(
            f"{plural(own, 'job')} of {caller.user} pending or running already; {jobs} more would exceed the limit of "
            f"{most} per user",
            "wait for jobs to end, submit similar jobs as an array (-a 0-999), which counts as one, or ask an admin to "
            "raise [limit] jobs_per_user",
            "job_count",
        )


def check_stored(payloads: Mapping[str, bytes], caller: Caller, tx: TickTransaction) -> None:
    """Refuse scripts and environments that would exceed a user's share of the database. Raises: Refused."""
    if is_root(caller):
        return
    stored = tx.state.stored
    if caller.uid not in stored:
        stored[caller.uid] = tx.store.payload_bytes_of(caller.uid)
    new = payloads.keys() - tx.store.known_payloads(payloads) - tx.changes.payloads.keys()
    size = sum(len(payloads[sha]) for sha in new)
    most = tx.settings.limit.stored_mib_per_user
    if size and stored[caller.uid] + size > most * (1 << 20):
        # Some may have been pruned with old jobs since.
        stored[caller.uid] = tx.store.payload_bytes_of(caller.uid)
    if size and stored[caller.uid] + size > most * (1 << 20):
        raise Refused(
            f"the scripts and environments of {caller.user}'s jobs take {stored[caller.uid] / (1 << 20):.1f} MiB in "
            f"the database; these would exceed the limit of {most:g} MiB",
            "submit one script with other arguments (gsub job.sh ARG), which is stored once, leave out the environment "
            "(--export=NONE), or ask an admin to raise [limit] stored_mib_per_user",
        )
    stored[caller.uid] += size


def record(job: Job, text: str, tx: TickTransaction) -> None:
    """Record a new job with the first line of its story."""
    if job.spec.dependency:
        tx.state.learn_parents(tx.jobs, [job.spec.dependency])
    tx.put_job(job, JobEvent(job.id, tx.now, "submitted", text))
