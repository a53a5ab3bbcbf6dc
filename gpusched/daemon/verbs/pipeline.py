"""Record a pipeline as a unit, and resume one that has not finished.

All jobs of a pipeline are recorded in the commit of one tick, so that no crash leaves part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gpusched.access import Hidden, is_admin
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs.admission import (
    check_nice,
    check_submission,
    complete_all,
    keep_unknown_unknown,
    name_notes,
    never_starts,
    pause_notes,
    with_auto_limits,
)
from gpusched.daemon.verbs.images import with_pull
from gpusched.daemon.verbs.submit import check_room, check_stored, record
from gpusched.daemon.verbs.variants import with_variants
from gpusched.errors import Forbidden, GpuschedError, Refused
from gpusched.lifecycle import pipelines as policy
from gpusched.lifecycle.dependencies import as_typed
from gpusched.lifecycle.pipelines import unknown
from gpusched.lifecycle.transitions import new_job
from gpusched.model.commands import Caller, ResumePipeline, SubmitPipeline
from gpusched.model.job import Job, JobEvent, JobSpec
from gpusched.model.pipeline import Pipeline, pipeline_id
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import JobFilter, Store
from gpusched.ports.tables import PIPELINES
from gpusched.scheduler.admission import as_submitted


def jobs_of(number: int, state: DaemonState, store: Store) -> list[Job]:
    """All jobs that a pipeline has ever had, by id."""
    jobs = store.jobs(JobFilter(pipelines=frozenset({pipeline_id(number)})))
    return [state.jobs.get(job.id, job) for job in jobs]


def find(number: int, store: Store) -> Pipeline:
    """The pipeline with this number. Raises: NotFound."""
    found = store.find(PIPELINES, [number])
    if not found:
        raise unknown(number)
    return found[number]


def not_needed(number: int, state: DaemonState, store: Store) -> list[Job]:
    """Jobs of steps that were skipped because others succeeded."""
    jobs = jobs_of(number, state, store)
    spared = policy.pipeline_status(jobs).not_needed
    return [job for name, job in policy.steps_of(jobs).items() if name in spared]


def submit(command: SubmitPipeline, tx: TickTransaction) -> dict[str, Any]:
    state, now = tx.state, tx.now
    caller, steps = command.caller, {step.name: step for step in command.steps}
    check_room(len(steps), caller, tx)
    for nice, queue in {(step.spec.nice, step.spec.queue) for step in command.steps}:
        check_nice(nice, queue, caller, tx.settings)
    admitted, notes = _with_variants([(step.where, step.spec) for step in command.steps], caller, tx)
    steps = {
        step.name: dataclasses.replace(step, spec=spec) for step, spec in zip(command.steps, admitted, strict=True)
    }
    _check([(step.where, step.spec) for step in steps.values()], caller, tx)
    ordered = policy.in_order({name: step.needs for name, step in steps.items()})
    if command.dry_run:
        return {"pipeline": None, "jobs": dict.fromkeys(steps)}
    check_stored(command.payloads, caller, tx)
    number = state.next_pipeline
    state.next_pipeline += 1
    pipeline = Pipeline(number, caller.uid, caller.user, command.name, now, command.source)
    tx.changes.rows[PIPELINES][number] = pipeline
    specs, found = with_auto_limits([steps[name].spec for name in ordered], caller.user, tx)
    specs = complete_all(specs, caller, tx)
    ids: dict[str, int] = {}
    for name, spec, limit in zip(ordered, specs, found, strict=True):
        if (text := never_starts(replace(spec, step=name), tx)) is not None:
            notes.append(f"step {name} {text}")
        dependency = policy.dependency_of(steps[name].needs, ids, spec.dependency)
        made = replace(spec, dependency=dependency, pipeline=pipeline.id, step=name)
        text = f"submitted by {caller.by} as step {name} of {pipeline.id}{limit and f'; {limit}'}"
        ids[name] = _make(made, text, caller, tx)
    tx.changes.payloads.update(command.payloads)
    notes += name_notes(specs, tx.settings)
    notes += pause_notes((spec.queue for spec in specs), tx)
    limits = [f"step {name}: {limit}" for name, limit in zip(ordered, found, strict=True) if limit]
    jobs = {name: str(ids[name]) for name in steps}
    return {"pipeline": pipeline.id, "jobs": jobs, "notes": notes, **({"limits": limits} if limits else {})}


def _make(spec: JobSpec, text: str, caller: Caller, tx: TickTransaction) -> int:
    keep_unknown_unknown([spec], tx)
    spec = with_pull(spec, caller, tx)
    job = new_job(tx.state.next_id, caller, spec, tx.now)
    tx.state.next_id = job.last_id + 1
    record(job, text, tx)
    return job.id


def _with_variants(
    steps: Sequence[tuple[str, JobSpec]], owner: Caller, tx: TickTransaction
) -> tuple[list[JobSpec], list[str]]:
    """As `with_variants`; messages and notes name the step. Raises: Refused."""
    specs, notes, mistakes = list[JobSpec](), list[str](), list[GpuschedError]()
    for where, spec in steps:
        try:
            (made,), said = with_variants([spec], owner, tx)
        except Refused as error:
            mistakes.append(Refused(f"{where}: {error.message}", error.hint))
            continue
        specs.append(made)
        notes += [f"{where}: {text}" for text in said]
    if mistakes:
        raise Refused.of(mistakes)
    return specs, notes


def _check(steps: Sequence[tuple[str, JobSpec]], owner: Caller, tx: TickTransaction) -> None:
    """Refuse steps that cannot be granted; messages name the step. Raises: Refused."""
    specs, _ = with_auto_limits([spec for _, spec in steps], owner.user, tx)
    specs = complete_all(specs, owner, tx)
    try:
        check_submission(specs, owner, tx)
        return
    except Refused as error:
        whole = error
    # The whole is refused; check steps one by one to find the one at fault.
    mistakes: list[GpuschedError] = []
    for (where, _), spec in zip(steps, specs, strict=True):
        try:
            check_submission([spec], owner, tx)
        except Refused as error:
            mistakes.append(Refused(f"{where}: {error.message}", error.hint))
    raise Refused.of(mistakes) if mistakes else whole


def resume(command: ResumePipeline, tx: TickTransaction) -> dict[str, Any]:
    caller = command.caller
    pipeline = find(command.number, tx.store)
    if pipeline.uid != caller.uid:
        if "jobs" in tx.settings.access.private_data and not is_admin(caller, tx.settings):
            hidden = unknown(pipeline.number)
            raise Hidden(hidden.message, hidden.hint)
        raise Forbidden(
            f"pipeline {pipeline.id} belongs to {pipeline.user}, not to {caller.user}",
            f"see it with: gshow {pipeline.id}",
        )
    jobs = tx.jobs(JobFilter(pipelines=frozenset({pipeline.id})))
    steps, names = policy.steps_of(jobs), policy.names_of(jobs)
    again = policy.to_resume(jobs)
    if not again:
        active = sum(not job.state.is_final for job in steps.values())
        text = f"{active} of its steps are still pending or running" if active else "all of its steps have completed"
        raise Refused(f"no step of {pipeline.id} needs to run again: {text}", f"see it with: gshow {pipeline.id}")
    for fallback in policy.fallbacks_of(jobs):
        if not fallback.state.is_final and fallback.spec.step in again:
            raise Refused(
                f"the fallback of step {fallback.spec.step}, job {fallback.id}, is still {fallback.state}",
                f"wait for it with: gwait {fallback.id}, or end it with: gcancel {fallback.id}",
            )
    check_room(len(again), caller, tx)
    ids = {name: job.id for name, job in steps.items()}
    renewed = [(f"step {name}", as_submitted(_anew(steps[name].spec, tx.now))) for name in again]
    asked, notes = _with_variants(renewed, caller, tx)
    specs, limits = with_auto_limits(asked, caller.user, tx)
    fresh = dict(zip(again, complete_all(specs, caller, tx), strict=True))
    outside = [
        (f"step {name}", replace(spec, dependency=None if _is_inside(steps[name], names) else spec.dependency))
        for name, spec in fresh.items()
    ]
    _check(outside, caller, tx)
    for name, limit in zip(again, limits, strict=True):
        spec = replace(fresh[name], dependency=policy.moved(steps[name], names, ids))
        text = f"submitted by {caller.by} to resume step {name} of {pipeline.id}, after job {steps[name].id}"
        if spec.deadline_at != steps[name].spec.deadline_at:
            text += ", without its deadline, which it can no longer meet"
        ids[name] = _make(spec, f"{text}{limit and f'; {limit}'}", caller, tx)
    _turn_over(steps, again, names, ids, tx)
    said = [f"step {name}: {limit}" for name, limit in zip(again, limits, strict=True) if limit]
    jobs_again = {name: str(ids[name]) for name in again}
    found = {"notes": notes, "limits": said}
    return {"pipeline": pipeline.id, "jobs": jobs_again, **{name: texts for name, texts in found.items() if texts}}


def _anew(spec: JobSpec, now: float) -> JobSpec:
    """A step to run again as if submitted now: not held, and without a deadline it can no longer meet."""
    begin_at = max(now, spec.begin_at or now)
    shortest_s = min(one.time_limit_s or 0 for one in spec.variants or (spec,))
    is_late = spec.deadline_at is not None and spec.deadline_at - shortest_s < begin_at
    return replace(spec, hold=False, deadline_at=None if is_late else spec.deadline_at)


def _is_inside(job: Job, names: Mapping[int, str]) -> bool:
    return all(job_id in names for job_id in policy.conditions_of(job).job_ids)


def _turn_over(
    steps: Mapping[str, Job],
    again: Sequence[str],
    names: Mapping[int, str],
    ids: Mapping[str, int],
    tx: TickTransaction,
) -> None:
    """Make kept steps that have not begun depend on the new jobs instead of the old ones."""
    renewed = set(again)
    old = {job_id for job_id, name in names.items() if name in renewed}
    for name, job in steps.items():
        if name in renewed or job.state is not JobState.PENDING or job.start_at is not None:
            continue
        if old.isdisjoint(policy.conditions_of(job).job_ids):
            continue
        dependency = policy.moved(job, names, ids)
        after = replace(job, spec=replace(job.spec, dependency=dependency))
        tx.state.forget_dependency(after.id)
        tx.state.learn_parents(tx.jobs, [dependency] if dependency else [])
        tx.put_job(
            after, JobEvent(job.id, tx.now, "updated", f"dependency={as_typed(dependency)}, as other steps run again")
        )
