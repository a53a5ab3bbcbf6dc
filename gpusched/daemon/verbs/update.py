"""Update jobs: change their requests and options."""

from __future__ import annotations

from typing import Any

from gpusched.access import Act, check, manages
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs import adopt
from gpusched.daemon.verbs.admission import (
    check_nice,
    check_update,
    completed,
    name_notes,
    never_starts,
    pause_notes,
    sized,
    with_auto_limits,
    without_queue_engine,
)
from gpusched.daemon.verbs.selection import has_ended, named, with_tasks
from gpusched.daemon.verbs.variants import VARIANTS, check_is_clear, merged
from gpusched.errors import Refused
from gpusched.lifecycle.dependencies import as_typed
from gpusched.model.alert_events import EACH_TASK
from gpusched.model.bundles import bundles_of
from gpusched.model.commands import Caller, Update
from gpusched.model.job import Alerting, Job, JobEvent, JobSpec, Launch, Request, RetryRule, TaskLayout
from gpusched.model.layout import LAYOUT_KEYS, rearranged
from gpusched.model.option import RUNNING
from gpusched.model.spec import AUTO, DEFAULT, FIELDS, MAXIMUM
from gpusched.model.states import JobState
from gpusched.model.units import format_duration, plural, printable
from gpusched.model.value import replace
from gpusched.model.variants import each_variant, of_specs, why_not_distinct
from gpusched.scheduler.admission import limit_as_asked
from gpusched.scheduler.cheap import put_off, why_not_cheap

UPDATABLE_WHILE_RUNNING = frozenset(
    {"time_limit_source", *(n for n, field in FIELDS.items() if field.update == RUNNING)}
)
REWRITING = frozenset(name for name, field in FIELDS.items() if field.owner_only)
"""Changes to what runs as the owner, where it writes, and who is notified."""
_WORDS = {field.attribute: field.word for field in FIELDS.values()}
_PARTS: dict[str, frozenset[str]] = {
    part: frozenset(kind.__struct_fields__)
    for part, kind in (("request", Request), ("retry", RetryRule), ("launch", Launch))
}
"""Nested attributes by attribute of a spec."""
_FILLED_IN = frozenset({"queue", "account", "qos", "time_limit_s"})
"""Fields with defaults, which a change computes again."""


def apply(command: Update, tx: TickTransaction) -> dict[str, Any]:
    """Change all of the jobs or, with an error, none."""
    caller, changes = command.caller, command.changes
    act = Act.PRIORITISE if set(command.changes) == {"nice"} else Act.UPDATE
    jobs = named(caller, act, command.ids, tx)
    for job in jobs:
        if not REWRITING.isdisjoint(changes):
            check(caller, Act.REWRITE, job, tx.settings)
    for job in jobs:
        queue = changes.get("queue", job.spec.queue)
        # A low nice value from the user's own queue must not overtake other users' jobs elsewhere.
        if "nice" in changes or queue != job.spec.queue:
            check_nice(changes.get("nice", job.spec.nice), queue, caller, tx.settings)
    for job in jobs:
        _check(job, changes)
    updated = []
    limits: dict[str, None] = {}
    """Notes on `time=auto`."""
    named_ids = {job.id for job in jobs}
    owners: dict[tuple[int, str], Caller] = {}
    for job in with_tasks(jobs, tx):
        refusal = _why_fixed(job, command, tx)
        if refusal is not None:
            if job.id in named_ids:
                raise refusal
            # Tasks that have started stay as they are; the change applies to the others.
            continue
        is_named_task = job.array_id is not None and job.id in named_ids
        # The owner's rights count here, not the caller's.
        owner = owners.setdefault((job.uid, job.user), Caller(job.uid, job.user))
        own = _for_task(changes) if is_named_task else changes
        if VARIANTS in own or (job.spec.variants and (job.state is JobState.PENDING or job.is_array)):
            after = _with_variants(job, own, owner, tx, limits)
        else:
            after = _after(job, own, owner, tx, limits)
        updated.append((job, after))
    text = ", ".join(f"{name}={_shown(name, value)}" for name, value in sorted(_recorded(changes).items()))
    for before, after in updated:
        if _dependency_of(after) != _dependency_of(before):
            tx.state.forget_dependency(after.id)
            if after.spec.dependency:
                tx.state.learn_parents(tx.jobs, [after.spec.dependency])
        tx.put_job(after, JobEvent(after.id, tx.now, "updated", f"{text} by {caller.by}"))
    notes = list(limits)
    if changes.get("dependency"):
        found = ((after, never_starts(after.spec, tx, after.shown_id)) for _, after in updated)
        notes += [f"job {after.shown_id} {why}" for after, why in found if why is not None]
    is_renamed = any(changes.get(name) for name in ("queue", "account", "qos"))
    if is_renamed:
        # Of the names that were changed alone.
        unchanged: dict[str, Any] = {} if changes.get("queue") else {"queue": tx.settings.default.queue}
        unchanged |= {f"{name}_label": "" for name in ("account", "qos") if not changes.get(name)}
        notes += name_notes([replace(after.spec, **unchanged) for _, after in updated], tx.settings)
    if changes.get("queue"):
        notes += pause_notes([changes["queue"]], tx)
    has_notes = limits or changes.get("dependency") or is_renamed
    return {"changed": [job.shown_id for job in jobs], **({"notes": notes} if has_notes else {})}


def _after(job: Job, changes: dict[str, Any], owner: Caller, tx: TickTransaction, limits: dict[str, None]) -> Job:
    """The job after the changes. Raises: Refused. Args: limits: collects notes on `time=auto`."""
    after = _changed(job, changes)
    if not _FILLED_IN.isdisjoint(changes):
        after = _filled_in(job, after, owner, changes, tx, limits)
    after = replace(after, spec=sized(after.spec, tx))
    if after.spec.start_when is not None and not _OF_WINDOW.isdisjoint(changes):
        after = _rescheduled(after, tx)
    check_update(job, after, owner, tx)
    return after


def _with_variants(
    job: Job, changes: dict[str, Any], owner: Caller, tx: TickTransaction, limits: dict[str, None]
) -> Job:
    """The job after changes that hold for each of its variants, or that name all of them anew. Raises: Refused."""
    specs, stated = each_variant(job.spec), [one.stated for one in job.spec.variants] or [()]
    wanted: list[dict[str, Any]] = [changes] * len(specs)
    if VARIANTS in changes:
        common = {name: value for name, value in changes.items() if name != VARIANTS}
        wanted = [common, *(merged(common, own) for _, own in changes[VARIANTS])]
        specs, stated = (specs[0],) * len(wanted), [(), *(names for names, _ in changes[VARIANTS])]
    else:
        check_is_clear(job, changes)
    found = [_after(replace(job, spec=spec), own, owner, tx, limits) for spec, own in zip(specs, wanted, strict=True)]
    if (why := why_not_distinct([one.spec for one in found])) is not None:
        hint = "leave one of them out, or have them differ"
        raise Refused(f"job {job.shown_id} cannot be changed like this: {why}", hint)
    return replace(found[0], spec=of_specs([one.spec for one in found], stated))


def _check(job: Job, changes: dict[str, Any]) -> None:
    """Refuse changes that the job cannot take in its state. Raises: Refused."""
    if job.state.is_final:
        raise has_ended(job)
    adopt.check_changes(job, changes)
    if "throttle" in changes and job.spec.array is None:
        raise Refused(
            f"job {job.shown_id} is not an array, so it has no tasks to throttle", f"see it with: gshow {job.shown_id}"
        )
    if "dependency" in changes and job.array_id is not None and job.run:
        raise Refused(
            f"task {job.shown_id} has already started and no longer depends on other jobs",
            f"keep it from starting with: gctl hold {job.shown_id}",
        )


def _why_fixed(job: Job, command: Update, tx: TickTransaction) -> Refused | None:
    """Why a job that is no longer pending cannot take these changes; None if it can."""
    if job.spec.is_for_slurm and job.is_handed_over_or_runs and not job.is_array:
        return Refused(
            f"job {job.shown_id} is in Slurm and cannot change",
            f"take it back with: gctl requeue --hold {job.shown_id}, change it, then: gctl release {job.shown_id}",
        )
    if job.state is JobState.PENDING:
        return None
    fixed = sorted(set(command.changes) - UPDATABLE_WHILE_RUNNING)
    if fixed and not (job.is_array and job.state is JobState.RUNNING):
        return _fixed(fixed[0], job)
    return _cannot_outlast(job) if _raises_limit(job, command, tx) else None


def _filled_in(
    before: Job, after: Job, owner: Caller, changes: dict[str, Any], tx: TickTransaction, limits: dict[str, None]
) -> Job:
    """Fill in the defaults of a submission; `limits` collects notes on `time=auto`."""
    spec = after.spec
    if "time_limit_s" not in changes and spec.time_limit_source in (DEFAULT, MAXIMUM):
        # A default limit changes with the queue.
        spec = limit_as_asked(spec)
    if changes.get("time_limit_source") == AUTO and before.state is not JobState.PENDING:
        raise Refused(
            f"job {before.shown_id} is {before.state}; time=auto works only while a job is pending",
            f"give its total run time: gctl update {before.shown_id} time=4h",
        )
    if changes.get("queue", before.spec.queue) != before.spec.queue:
        spec = without_queue_engine(spec, before.spec.queue, tx.settings)
    (spec,), found = with_auto_limits([spec], after.user, tx)
    limits.update(dict.fromkeys(filter(None, found)))
    spec = completed(spec, owner, tx.settings)
    old = before.spec
    if "account" not in changes:
        # It may have gone from the settings since.
        spec = replace(spec, account=old.account, account_label=old.account_label)
    if "qos" not in changes:
        spec = replace(spec, qos=old.qos, qos_label=old.qos_label)
    if spec.is_for_slurm and spec.burst and not before.spec.is_for_slurm:
        # It does not burst: all jobs of its queue go there.
        spec = replace(spec, burst=None)
    return replace(after, spec=spec)


def _recorded(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes to record in the job's story."""
    told = {name: value for name, value in changes.items() if name != "time_limit_source"}
    return {**told, "time_limit_s": source} if (source := changes.get("time_limit_source")) else told


def _fixed(field: str, job: Job) -> Refused:
    word, shown = _WORDS.get(field, field), job.shown_id
    hint = f"cancel it and submit it again: gcancel {shown}"
    if job.spec.retry.requeue and job.spec.interactive is None:
        hint = (
            f"change it while it waits: gctl requeue --hold {shown}, then gctl update {shown} {word}=..., "
            f"then gctl release {shown}"
        )
    return Refused(f"{word} of job {shown} cannot change while it is {job.state}", hint)


def _raises_limit(job: Job, command: Update, tx: TickTransaction) -> bool:
    """Whether a caller without rights over the queue wants to extend a run beyond the limit it was started with."""
    limit_s = job.spec.time_limit_s
    if limit_s is None or job.is_array or job.spec.adopted is not None or "time_limit_s" not in command.changes:
        return False
    wanted_s = command.changes["time_limit_s"]
    return (wanted_s is None or wanted_s > limit_s) and not manages(command.caller, job.spec.queue, tx.settings)


def _cannot_outlast(job: Job) -> Refused:
    limit = format_duration(job.spec.time_limit_s)
    return Refused(
        f"job {job.shown_id} is {job.state}, and other jobs are planned around its time limit of {limit}: "
        "it cannot be raised now",
        "ask an admin or an operator of its queue; you may set a shorter limit",
    )


def _dependency_of(job: Job) -> tuple[str | None, str | None]:
    """A job's dependency, and the rule for one that can never be satisfied."""
    return job.spec.dependency, job.spec.never_satisfied


def _shown(name: str, value: object) -> str:
    """A value as shown in the job's story."""
    if name == "dependency" and isinstance(value, str):
        return as_typed(value) or "none"
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == VARIANTS and isinstance(value, tuple):
        return plural(len(value), "further request")
    if isinstance(value, tuple):
        return ",".join(f"{part[0]}:{part[1]}" if isinstance(part, tuple) else str(part) for part in value)
    return str(value)


def _arranged(spec: JobSpec, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes with the amounts that each node books, and with the task layout if one is stated."""
    if LAYOUT_KEYS.isdisjoint(changes):
        return changes
    left = {name: value for name, value in changes.items() if name not in LAYOUT_KEYS}
    try:
        found, layout = rearranged(spec.request, spec.layout, changes)
    except ValueError as error:
        hint = "say how many all nodes give together, gpus=N, or each of them, gpus-per-node=N"
        raise Refused(str(error), hint if {"gpus", "gpus_per_node"} & changes.keys() else "see gsub --help") from None
    stated = {"bundles": bundles_of(found), "layout": TaskLayout(**layout) if layout else None}
    return {**left, **found.amounts(), **stated}


_OF_WINDOW = frozenset({"deadline_at", "time_limit_s", "begin_at", "reservation"})


def _rescheduled(job: Job, tx: TickTransaction) -> Job:
    """A job that waits for cheap or clean energy, with its new window. Raises: Refused."""
    if (why := why_not_cheap(job.spec, tx.tariff)) is not None:
        raise Refused(*why, "deadline")
    if job.state is not JobState.PENDING or job.run:
        return job
    earliest_at = max(tx.now, job.spec.begin_at or tx.now)
    return put_off(replace(job, eligible_at=earliest_at), tx.tariff, tx.now)


def _changed(job: Job, changes: dict[str, Any]) -> Job:
    spec = job.spec
    changes = _arranged(spec, changes)
    rest = dict(changes)
    for part, names in _PARTS.items():
        if found := {name: rest.pop(name) for name in names & rest.keys()}:
            rest[part] = replace(getattr(spec, part), **found)
    if "throttle" in rest and spec.array is not None:
        rest["array"] = replace(spec.array, throttle=rest.pop("throttle"))
    if "notify" in rest or "notify_to" in rest:
        rest["alerting"] = _alerting(job, rest.pop("notify", None), rest.pop("notify_to", None))
    for name in ("account", "qos"):
        if name in rest:
            rest[f"{name}_label"] = ""
    job = replace(job, spec=replace(spec, **rest))
    if "begin_at" in changes and job.state is JobState.PENDING:
        begin_at = max(job.submit_at, changes["begin_at"] or job.submit_at)
        job = replace(job, queued_at=begin_at, eligible_at=begin_at)
    return job


def _for_task(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes for one named task: alerts of an array become alerts of this task."""
    if not changes.get("notify"):
        return changes
    return {**changes, "notify": tuple(sorted({*changes["notify"], EACH_TASK}))}


def _alerting(job: Job, on: tuple[str, ...] | None, targets: tuple[str, ...] | None) -> Alerting | None:
    """New alerting settings; None keeps a part. Without events there are no targets."""
    before = job.spec.alerting or Alerting()
    now_on = before.on if on is None else on
    if now_on:
        return Alerting(now_on, before.targets if targets is None else targets)
    if targets:
        raise Refused(
            f"{printable(targets[0], 60)} is a target of job {job.shown_id} without events to report",
            f"name the events: gctl update {job.shown_id} notify=end notify-to={printable(targets[0], 60)}",
        )
    return None
