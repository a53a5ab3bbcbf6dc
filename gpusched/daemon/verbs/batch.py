"""Submit a batch: many jobs that are accepted together, and made in pieces between the commands of others.

The commit that accepts a batch records what it is to become, its lines and its ids. From then on all of its jobs will
be made, by this daemon or the next one, a piece in each tick with its progress in the same commit; before it there is
nothing of the batch. A small one is made in the tick that accepts it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

from gpusched.access import Act
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.leanings import data_notes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs.admission import (
    check_nice,
    check_submission,
    complete_all,
    handover_notes,
    keep_unknown_unknown,
    name_notes,
    never_starts,
    pause_notes,
    with_auto_limits,
)
from gpusched.daemon.verbs.images import with_pull
from gpusched.daemon.verbs.selection import matches, permitted
from gpusched.daemon.verbs.submit import (
    batch_of,
    check_room,
    check_stored,
    differing_terms,
    folder_of,
    is_batch_over,
    job_of,
    left_out_text,
    record,
)
from gpusched.daemon.verbs.variants import with_variants
from gpusched.errors import BrokenInvariant, Refused
from gpusched.lifecycle.transitions import new_job
from gpusched.model.batch import Batch, specs_of
from gpusched.model.commands import Caller, Selection, SubmitBatch
from gpusched.model.job import JobSpec
from gpusched.model.spec import AUTO
from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.scheduler.cheap import put_off

PIECE = 200
"""Jobs made in one tick: a few milliseconds, and as long for the commit."""


def apply(command: SubmitBatch, tx: TickTransaction) -> dict[str, Any]:
    """Accept a batch; `batch` in the answer is its first id while jobs remain to be made."""
    caller, count, settings = command.caller, len(command.lines), tx.settings
    sha = hashlib.sha256(command.document).hexdigest()
    found = _existing(command, sha, tx)
    if found is not None:
        return found
    check_room(count, caller, tx)
    check_nice(command.spec.nice, command.spec.queue, caller, settings)
    key, spec = command.spec.key, replace(command.spec, key=None)
    # Only for another scheduler the command lines are checked, too.
    (admitted,), left = with_variants([command.spec], caller, tx, copies=count)
    command, spec = dataclasses.replace(command, spec=admitted), replace(admitted, key=None)
    checked = complete_all(with_auto_limits(_first_of(command, 1), caller.user, tx)[0], caller, tx)
    if checked[0].is_for_slurm:
        checked = complete_all(with_auto_limits(_first_of(command, count), caller.user, tx)[0], caller, tx)
    check_submission(checked, caller, tx, copies=count // len(checked))
    is_small = count <= PIECE
    texts = {} if is_small else {sha: command.document}
    check_stored({**command.payloads, **texts}, caller, tx)
    tx.changes.payloads.update({**command.payloads, **texts})
    # A pull of their image, if they need one, has its id before theirs.
    with_pull(checked[0], caller, tx)
    keep_unknown_unknown([checked[0]] * count, tx)
    common = _common(spec, checked[0])
    batch = Batch(
        tx.state.next_id,
        count,
        caller.uid,
        caller.user,
        tx.now,
        common,
        sha,
        f"submitted by {caller.by}{left_out_text(command.env_excluded)}",
        is_named=command.is_named,
        key=key,
    )
    tx.state.next_id = batch.last_id + 1
    if not is_small:
        tx.state.batch_lines[batch.first_id] = command.lines
    limits = _make(batch, command.lines[:PIECE], tx)
    notes = left + name_notes([common], settings) + pause_notes([common.queue], tx)
    if (text := never_starts(common, tx)) is not None:
        notes.insert(0, f"{batch.shown_ids} {text}")
    if common.request.near:
        notes += data_notes([(caller.user, common.request.near)], tx.nodes, tx.has_read)
    notes += handover_notes([common], tx.handover)
    answer = _answer(batch, tx)
    if key is not None:
        answer.update(existing=False, differs=[])
    return {**answer, "notes": notes, **({"limits": limits} if limits else {})}


def _answer(batch: Batch, tx: TickTransaction) -> dict[str, Any]:
    answer: dict[str, Any] = {"ids": range(batch.first_id, batch.last_id + 1)}
    if batch.first_id in tx.state.batches:
        answer["batch"] = batch.first_id
    return answer


def _existing(command: SubmitBatch, sha: str, tx: TickTransaction) -> dict[str, Any] | None:
    """Reply to a batch whose key already has one; None if it makes new jobs.

    Raises: Refused if the key belongs to a job, or to other work.
    """
    key, caller = command.spec.key, command.caller
    if key is None:
        return None
    batch, job = batch_of(caller.uid, key, tx), job_of(caller.uid, key, tx)
    shown, another = f"the key {printable(repr(key), 80)} belongs to", "or use another --key for this batch"
    if job is not None and (batch is None or batch.first_id < job.id):
        raise Refused(
            f"{shown} job {job.shown_id}, which is not a batch", f"see it with: gshow {job.shown_id}, {another}"
        )
    if batch is None or is_batch_over(batch, command.key_again, tx):
        return None
    spec = replace(command.spec, key=None)
    for what, is_other in (
        ("list of commands", sha != batch.lines_sha),
        ("working directory", folder_of(spec.launch) != folder_of(batch.spec.launch)),
    ):
        if is_other:
            raise Refused(
                f"{shown} {batch.shown_ids}, a batch with a different {what}",
                f"see it with: gshow {batch.first_id}, {another}",
            )
    wanted = _common(spec, complete_all([spec], caller, tx)[0])
    return {**_answer(batch, tx), "existing": True, "differs": sorted(differing_terms(wanted, batch.spec))}


def _first_of(command: SubmitBatch, count: int) -> list[JobSpec]:
    return specs_of(replace(command.spec, key=None), command.lines[:count], is_named=command.is_named)


def _common(asked: JobSpec, checked: JobSpec) -> JobSpec:
    """What the jobs have in common of one that was completed."""
    spec = replace(checked, launch=asked.launch, name=asked.name)
    if asked.time_limit_source == AUTO and asked.time_limit_s is None:
        # Learned for each command line.
        spec = replace(spec, time_limit_s=None, time_limit_source=AUTO)
    return spec


def next_of(state: DaemonState, without: Collection[int] = ()) -> Batch | None:
    """The oldest batch with jobs to be made. Args: without: batches that are left alone, by first id."""
    return next((batch for first_id, batch in state.batches.items() if first_id not in without), None)


def go_on(batch: Batch, tx: TickTransaction) -> None:
    """Make the next piece of a batch."""
    _make(batch, _lines(batch, tx)[batch.made : batch.made + PIECE], tx)


def cut_short(selection: Selection, caller: Caller, tx: TickTransaction) -> None:
    """Make no more jobs of the batches that these filters cover: they are cancelled with those that are made."""
    for batch in list(tx.state.batches.values()):
        if selection.names and not batch.is_named:
            continue  # the name of each job is that of its command
        job = new_job(batch.last_id, Caller(batch.uid, batch.user), batch.spec, batch.submit_at)
        if matches(job, selection, tx.state) and permitted([job], selection, Act.CANCEL, caller, tx):
            tx.cut_short[batch.first_id] = Refused(
                f"{caller.by} cancelled the batch when {batch.made} of its {batch.jobs} jobs were made",
                f"see them with: gq -a {batch.first_id}-{batch.first_id + batch.made - 1}",
            )
            tx.put_batch(replace(batch, jobs=batch.made))


def _lines(batch: Batch, tx: TickTransaction) -> Sequence[str]:
    lines = tx.state.batch_lines.get(batch.first_id)
    if lines is None:
        try:
            lines = tx.state.batch_lines[batch.first_id] = json.loads(tx.store.payload(batch.lines_sha))
        except (KeyError, ValueError):
            raise BrokenInvariant(f"the lines of {batch.shown_ids}, a batch, are not in the job table") from None
    return lines


def _make(batch: Batch, lines: Sequence[str], tx: TickTransaction) -> list[str]:
    """Record the next jobs of a batch; returns what is to be said of their time limits."""
    owner = Caller(batch.uid, batch.user)
    specs, limits = with_auto_limits(batch.specs(lines), batch.user, tx)
    if any(limits):
        specs = complete_all(specs, owner, tx)
    tx.put_batch(replace(batch, made=batch.made + len(lines)))
    for job_id, spec, limit in zip(range(batch.first_id + batch.made, batch.last_id + 1), specs, limits, strict=False):
        job = new_job(job_id, owner, with_pull(spec, owner, tx), batch.submit_at)
        record(put_off(job, tx.tariff, tx.now), f"{batch.story}{limit and f'; {limit}'}", tx)
    return list(dict.fromkeys(filter(None, limits)))
