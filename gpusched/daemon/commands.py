"""What clients may ask for, as values, and what each does to the world.

The API builds these from requests and hands them to the tick, which applies them all before one
commit. A handler changes nothing outside the `Turn` it is given and refuses by raising UserError;
what it returns is answered only after the commit.
"""

from __future__ import annotations

from signal import SIGCONT
from typing import Any

from gpusched.access import Act, check, check_admin, hides, is_admin, is_operator, may, operates
from gpusched.errors import Forbidden, Refused
from gpusched.lifecycle import lifecycle
from gpusched.lifecycle.dependencies import as_typed
from gpusched.lifecycle.lifecycle import new_job
from gpusched.lifecycle.pipelines import step_ids
from gpusched.model.alerts import EACH_TASK
from gpusched.model.cluster import SUSPECT, Clearance
from gpusched.model.commands import (
    Adopt,
    Caller,
    Cancel,
    Command,
    Drain,
    Hold,
    LoseClients,
    Release,
    Requeue,
    Reserve,
    Resume,
    ResumePipeline,
    Selection,
    Submit,
    SubmitPipeline,
    Suspend,
    Unreserve,
    Update,
)
from gpusched.model.execution import SignalOrder
from gpusched.model.job import (
    AUTO,
    DEFAULT,
    MAXIMUM,
    Alerting,
    Job,
    JobEvent,
    Request,
    gpus_of_each_node,
)
from gpusched.model.pipeline import pipeline_id
from gpusched.model.states import JobState
from gpusched.model.units import format_duration, gpu_label, printable
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.scheduler.sharing.admission import limit_as_asked
from gpusched.scheduler.words import name_some

from . import adopting, deserting, keys, pipelines, reserving, yielding
from .admitting import (
    check_nice,
    check_submission,
    check_update,
    complete_all,
    completed,
    never_starts,
    queue_notes,
    with_auto_limits,
)
from .making import check_room, check_stored, record
from .selection import named, no_job_for, select, with_tasks
from .turn import Deed, Turn

UPDATABLE_WHILE_RUNNING = frozenset(
    {
        "name",
        "time_limit_s",
        "time_limit_source",
        "nice",
        "retries",
        "throttle",
        "fallback",
        "ignore_idle",
        "notify",
        "notify_to",
    }
)
REWRITING = frozenset({"name", "fallback", "notify", "notify_to"})
"""Changes of what runs as the owner, where it writes, and who is told of it."""
_REQUEST_FIELDS = frozenset(Request.__struct_fields__)
_MOST_NAMES = 8
_WORDS = {"gpu_fraction": "gpus", "gpu_type": "gpus", "never_satisfied": "kill-on-invalid-dep"}
"""Fields whose word for `gctl update` is another one."""
_FILLED_IN = frozenset({"queue", "account", "qos", "time_limit_s"})
"""What a submission gets by default, and a change of it anew."""


def apply(command: Command, turn: Turn) -> dict[str, Any]:
    """Apply one command. Raises: UserError, with nothing of this command applied."""
    if isinstance(command, Submit):
        return _submit(command, turn)
    if isinstance(command, Cancel):
        return _cancel(command, turn)
    if isinstance(command, (Hold, Release)):
        return _set_hold(command, turn)
    if isinstance(command, Update):
        return _update(command, turn)
    if isinstance(command, (Suspend, Resume, Requeue)):
        return yielding.apply(command, turn)
    if isinstance(command, (Reserve, Unreserve)):
        return reserving.apply(command, turn)
    if isinstance(command, (SubmitPipeline, ResumePipeline)):
        return pipelines.apply(command, turn)
    if isinstance(command, LoseClients):
        return deserting.apply(command, turn)
    if isinstance(command, Adopt):
        return adopting.apply(command, turn)
    return _drain(command, turn)


def _submit(command: Submit, turn: Turn) -> dict[str, Any]:
    world, settings, now = turn.world, turn.settings, turn.now
    if len(command.specs) == 1:
        found = keys.existing(command.specs[0], command.key_again, command.caller, turn)
        if found is not None:
            return found
    check_room(len(command.specs), command.caller, turn)
    for nice, queue in {(spec.nice, spec.queue) for spec in command.specs}:
        check_nice(nice, queue, command.caller, settings)
    specs, limits = with_auto_limits(command.specs, command.caller.user, turn)
    specs = complete_all(specs, command.caller, settings)
    check_submission(specs, command.caller, turn)
    # One of each kind: a batch has thousands of lines with the same dependency.
    dependent = {spec.dependency: spec for spec in specs if spec.dependency}
    shown_id = str(world.next_id) if len(specs) == 1 else "ID"
    looked = {words: never_starts(spec, turn, shown_id) for words, spec in dependent.items()}
    never = {words: text for words, text in looked.items() if text is not None}
    doomed: dict[str, list[str]] = {}
    """Jobs that can never start, by why."""
    check_stored(command.payloads, command.caller, turn)
    ids = []
    names = ", ".join(printable(name, 60) for name in command.env_excluded[:_MOST_NAMES])
    more = len(command.env_excluded) - _MOST_NAMES
    left_out = f"; not in its environment: {names}{f' and {more} more' if more > 0 else ''}" if names else ""
    for spec, limit in zip(specs, limits, strict=True):
        job = new_job(world.next_id, command.caller, spec, now)
        world.next_id = job.last_id + 1
        ids.append(job.id)
        if spec.dependency in never:
            doomed.setdefault(never[spec.dependency], []).append(str(job.id))
        origin = f", as job {command.origins[len(ids) - 1]} was" if command.origins else ""
        record(job, f"submitted by {command.caller.user}{origin}{left_out}{limit and f'; {limit}'}", turn)
    turn.changes.payloads.update(command.payloads)
    notes = [f"{name_some('job', names)} {text}" for text, names in doomed.items()]
    notes += queue_notes((spec.queue for spec in specs), settings)
    said = list(dict.fromkeys(filter(None, limits)))
    return {"ids": ids, "notes": notes, **({"limits": said} if said else {})}


def _cancel(command: Cancel, turn: Turn) -> dict[str, Any]:
    selection = _with_steps(command.selection, command.caller, turn)
    caller, act = command.caller, Act.CANCEL if command.signal is None else Act.SIGNAL
    jobs, missing = select(selection, turn, caller)
    if selection.ids:
        for job in jobs:
            check(caller, act, job, turn.settings)
        if missing and len(selection.ids) == 1:
            raise no_job_for(caller, missing[0], turn)
    else:
        jobs = _in_reach(jobs, selection, act, caller, turn)
    if not command.dry_run:
        for job in jobs:
            turn.note(caller, act, job)
    answer: dict[str, Any] = {"cancelled": [], "signalled": [], "ended": [], "missing": [str(one) for one in missing]}
    for job in jobs:
        if job.state.is_final:
            answer["ended"].append(job.shown_id)
        elif command.signal is None:
            answer["cancelled"].append(job.shown_id)
            if not command.dry_run:
                turn.cancel(job, by=command.caller.user)
        elif job.is_array:
            _signal_tasks(command, job, turn, answer["signalled"], is_alone=len(selection.ids) == 1)
        elif job.state is JobState.SUSPENDED and command.signal == SIGCONT:
            if len(selection.ids) == 1:
                raise Refused(
                    f"job {job.shown_id} is suspended, and a signal does not let it go on",
                    f"see why with: gq --why {job.shown_id}, or let it go on with: gctl resume {job.shown_id}",
                )
        elif job.state in (JobState.RUNNING, JobState.SUSPENDED):
            answer["signalled"].append(job.shown_id)
            if not command.dry_run:
                turn.signal(turn.run_of(job).id, SignalOrder(command.signal, command.main_only))
        elif len(selection.ids) == 1:
            raise Refused(
                f"job {job.shown_id} is {job.state} and has no process to signal",
                f"end it with: gcancel {job.shown_id}",
            )
    return answer


def _in_reach(jobs: list[Job], selection: Selection, act: Act, caller: Caller, turn: Turn) -> list[Job]:
    """Those that a filter is about: the caller's own, or of the users it names those that the caller may do this to.

    Raises: Forbidden when it names others and the caller has no rights over anybody's jobs.
    """
    others = sorted(selection.users - {caller.user})
    if not others:
        return [job for job in jobs if job.uid == caller.uid]
    settings = turn.settings
    if not (is_admin(caller, settings) or is_operator(caller, settings)):
        raise Forbidden(
            f"only an admin or an operator may {act} jobs of {printable(others[0], 60)}, not {caller.user}",
            "leave -u out for your own jobs",
        )
    return [job for job in jobs if may(caller, act, job, settings)]


def _with_steps(selection: Selection, caller: Caller, turn: Turn) -> Selection:
    """The selection by ids. Looked up in the turn, so that no fallback of a step that has just failed is left out."""
    ids = list(selection.ids)
    for number in sorted(selection.pipelines):
        jobs = turn.jobs(JobFilter(pipelines=frozenset({pipeline_id(number)})))
        for job in [job for job in jobs if hides(caller, job, turn.settings)]:
            turn.hid(caller, job)
            jobs.remove(job)
        ids += step_ids(number, jobs, unfinished=True)
    return replace(selection, ids=tuple(dict.fromkeys(ids)))


def _signal_tasks(command: Cancel, array: Job, turn: Turn, signalled: list[str], *, is_alone: bool) -> None:
    for task in turn.world.tasks_of(array):
        if task.state is JobState.RUNNING and command.signal is not None:
            signalled.append(task.shown_id)
            if not command.dry_run:
                turn.signal(turn.run_of(task).id, SignalOrder(command.signal, command.main_only))
    if not signalled and is_alone:
        raise Refused(
            f"no task of array {array.id} is running, so there is no process to signal",
            f"end it with: gcancel {array.id}",
        )


def _set_hold(command: Hold | Release, turn: Turn) -> dict[str, Any]:
    """Hold or release jobs. `running`, of those that were held: the ones that go on until their run ends."""
    hold, caller = isinstance(command, Hold), command.caller
    jobs = _named_to_hold(command, turn) if command.filters is None else _filtered_to_hold(command, turn)
    answer: dict[str, list[str]] = {"changed": [], "unchanged": [], **({"running": []} if hold else {})}
    for job in jobs:
        if not _changes_hold(job, caller, hold=hold):
            answer["unchanged"].append(job.shown_id)
            continue
        answer["changed"].append(job.shown_id)
        if hold and job.state is not JobState.PENDING and not job.is_array:
            answer["running"].append(job.shown_id)
        if command.dry_run:
            continue
        after, event = (
            lifecycle.hold(job, turn.now, caller.user, admin=caller.uid != job.uid)
            if hold
            else lifecycle.release(job, turn.now, caller.user)
        )
        turn.put_job(after)
        turn.tell(event)
    return answer


def _named_to_hold(command: Hold | Release, turn: Turn) -> list[Job]:
    caller, hold = command.caller, isinstance(command, Hold)
    found = named(caller, Act.HOLD if hold else Act.RELEASE, command.ids, turn)
    for job in found:
        if job.state.is_final:
            raise _has_ended(job)
        if hold and job.state is not JobState.PENDING and not job.is_array and not lifecycle.may_run_again(job):
            raise Refused(
                f"job {job.shown_id} is {job.state} and has no other run to hold",
                f"let it stand still with: gctl suspend {job.shown_id}, or end it with: gcancel {job.shown_id}",
            )
    jobs = with_tasks(found, turn)
    for job in jobs:
        if not hold and not _may_release(caller, job, turn):
            raise Forbidden(
                f"job {job.shown_id} was held by an admin or operator, and {caller.user} cannot release it",
                f"see who it was with: gshow {job.shown_id}",
            )
    return jobs


def _filtered_to_hold(command: Hold | Release, turn: Turn) -> list[Job]:
    """Those that match and would change, so that the rest of a long queue is not listed."""
    assert command.filters is not None
    filters, caller, hold = command.filters, command.caller, isinstance(command, Hold)
    act = Act.HOLD if hold else Act.RELEASE
    matching, _ = select(filters, turn, caller)
    found = []
    for job in with_tasks(_in_reach(matching, filters, act, caller, turn), turn):
        if hold:
            states = filters.states or {JobState.PENDING}
            is_meant = job.state in states and (job.state is JobState.PENDING or lifecycle.may_run_again(job))
        else:
            is_meant = _may_release(caller, job, turn)
        if is_meant and _changes_hold(job, caller, hold=hold):
            found.append(job)
    if not command.dry_run:
        for job in found:
            turn.note(caller, act, job)
    return found


def _changes_hold(job: Job, caller: Caller, *, hold: bool) -> bool:
    if not hold:
        return job.hold is not None
    # A hold by others is added to one by its owner, who could otherwise undo both.
    return job.hold != "admin" and not (job.hold and caller.uid == job.uid)


def _may_release(caller: Caller, job: Job, turn: Turn) -> bool:
    return job.hold != "admin" or caller.uid != job.uid or _overrules(caller, job, turn)


def _overrules(caller: Caller, job: Job, turn: Turn) -> bool:
    return is_admin(caller, turn.settings) or operates(caller, job.spec.queue, turn.settings)


def _update(command: Update, turn: Turn) -> dict[str, Any]:
    jobs = named(command.caller, Act.UPDATE, command.ids, turn)
    if not REWRITING.isdisjoint(command.changes):
        for job in jobs:
            check(command.caller, Act.REWRITE, job, turn.settings)
    for job in jobs:
        queue = command.changes.get("queue", job.spec.queue)
        # One that goes first in its user's own queue must not be moved before the jobs of others.
        if "nice" in command.changes or queue != job.spec.queue:
            check_nice(command.changes.get("nice", job.spec.nice), queue, command.caller, turn.settings)
    updated = []
    limits: dict[str, None] = {}
    """What was found for `time=auto`."""
    named_ids = {job.id for job in jobs}
    owners: dict[tuple[int, str], Caller] = {}
    for job in jobs:
        if job.state.is_final:
            raise _has_ended(job)
        adopting.check_changes(job, command.changes)
        if "throttle" in command.changes and job.spec.array is None:
            raise Refused(
                f"job {job.shown_id} is no array, so that no number of its tasks can be limited",
                f"see it with: gshow {job.shown_id}",
            )
        if "dependency" in command.changes and job.array_id is not None and job.run:
            raise Refused(
                f"task {job.shown_id} has been started before and waits for no other job any more",
                f"keep it from starting with: gctl hold {job.shown_id}",
            )
    for job in with_tasks(jobs, turn):
        if job.state is not JobState.PENDING:
            fixed = sorted(set(command.changes) - UPDATABLE_WHILE_RUNNING)
            if fixed and job.id not in named_ids:
                # A task that has begun stays as it is; the change is for those that have not.
                continue
            if fixed and not (job.is_array and job.state is JobState.RUNNING):
                raise _fixed(fixed[0], job)
            if _raises_limit(job, command, turn):
                if job.id not in named_ids:
                    continue
                raise _cannot_outlast(job)
        is_named_task = job.array_id is not None and job.id in named_ids
        # What the owner may is asked, not what the caller may.
        owner = owners.setdefault((job.uid, job.user), Caller(job.uid, job.user))
        after = _changed(job, _for_task(command.changes) if is_named_task else command.changes)
        if not _FILLED_IN.isdisjoint(command.changes):
            after = _filled_in(job, after, owner, command.changes, turn, limits)
        check_update(job, after, owner, turn)
        updated.append((job, after))
    for before, after in updated:
        if _rests_on(after) != _rests_on(before):
            turn.world.replace_dependency(after)
            if after.spec.dependency:
                turn.world.learn_parents(turn.jobs, [after.spec.dependency])
        turn.put_job(after)
        words = ", ".join(f"{name}={_said(name, value)}" for name, value in sorted(_told(command.changes).items()))
        turn.tell(JobEvent(after.id, turn.now, "updated", f"{words} by {command.caller.user}"))
        has_run = before.state in (JobState.RUNNING, JobState.SUSPENDED) and not before.is_array
        if has_run and "time_limit_s" in command.changes:
            turn.world.put_run(turn.run_of(before))
    answer: dict[str, Any] = {"changed": [job.shown_id for job in jobs]}
    if limits:
        answer["notes"] = list(limits)
    if command.changes.get("dependency"):
        found = ((after, never_starts(after.spec, turn, after.shown_id)) for _, after in updated)
        notes = [f"job {after.shown_id} {text}" for after, text in found if text is not None]
        answer["notes"] = [*answer.get("notes", ()), *notes]
    if command.changes.get("queue"):
        answer["notes"] = [*answer.get("notes", ()), *queue_notes([command.changes["queue"]], turn.settings)]
    return answer


def _filled_in(
    before: Job, after: Job, owner: Caller, changes: dict[str, Any], turn: Turn, limits: dict[str, None]
) -> Job:
    """The job with what a submission gets by default; `limits` takes what was found for `time=auto`."""
    spec = after.spec
    if "time_limit_s" not in changes and spec.time_limit_source in (DEFAULT, MAXIMUM):
        # Nobody asked for it: in another queue it is that of the other queue.
        spec = limit_as_asked(spec)
    if changes.get("time_limit_source") == AUTO and before.state is not JobState.PENDING:
        raise Refused(
            f"job {before.shown_id} is {before.state}; time=auto is worked out only while a job waits",
            f"say how long it may run in all: gctl update {before.shown_id} time=4h",
        )
    (spec,), found = with_auto_limits([spec], after.user, turn)
    limits.update(dict.fromkeys(filter(None, found)))
    return replace(after, spec=completed(spec, owner, turn.settings))


def _told(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes as the job's story tells them."""
    told = {name: value for name, value in changes.items() if name != "time_limit_source"}
    return {**told, "time_limit_s": source} if (source := changes.get("time_limit_source")) else told


def _fixed(field: str, job: Job) -> Refused:
    word, shown = _word(field), job.shown_id
    hint = f"cancel it and submit it again: gcancel {shown}"
    if job.spec.retry.requeue and job.spec.interactive is None:
        hint = (
            f"change it while it waits: gctl requeue --hold {shown}, then gctl update {shown} {word}=..., "
            f"then gctl release {shown}"
        )
    return Refused(f"{word} of job {shown} cannot change while it is {job.state}", hint)


def _raises_limit(job: Job, command: Update, turn: Turn) -> bool:
    """Whether somebody without rights over the queue wants a run to go on for longer than it was started for."""
    limit_s = job.spec.time_limit_s
    if limit_s is None or job.is_array or job.spec.adopted is not None or "time_limit_s" not in command.changes:
        return False
    wanted_s = command.changes["time_limit_s"]
    return (wanted_s is None or wanted_s > limit_s) and not _overrules(command.caller, job, turn)


def _cannot_outlast(job: Job) -> Refused:
    limit = format_duration(job.spec.time_limit_s)
    text = f"job {job.shown_id} is {job.state}, and others count on its time limit of {limit}: it cannot be raised now"
    return Refused(text, "ask an admin or an operator of its queue; a shorter limit is yours to set")


def _has_ended(job: Job) -> Refused:
    return Refused(f"job {job.shown_id} has ended ({job.state})", f"see it with: gshow {job.shown_id}")


def _rests_on(job: Job) -> tuple[str | None, str | None]:
    """What it waits for, and what becomes of it when that cannot come."""
    return job.spec.dependency, job.spec.never_satisfied


def _word(name: str) -> str:
    """A field as it is typed for `gctl update`."""
    if name in _WORDS:
        return _WORDS[name]
    return name.removesuffix("_at").removesuffix("_mib").replace("_", "-")


def _said(name: str, value: object) -> str:
    """A value as the job's story tells it."""
    if name == "dependency" and isinstance(value, str):
        return as_typed(value) or "none"
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(f"{part[0]}:{part[1]}" if isinstance(part, tuple) else str(part) for part in value)
    return str(value)


def _gpus_on_each_node(changes: dict[str, Any], nodes_before: int) -> dict[str, Any]:
    """The changes with GPUs counted on each node: `gpus` of an update counts all nodes together."""
    if not {"gpus", "gpus_per_node"} & changes.keys():
        return changes
    left = {name: value for name, value in changes.items() if name not in ("gpus", "gpus_per_node")}
    nodes = changes.get("nodes", nodes_before)
    try:
        return {**left, "gpus": gpus_of_each_node(changes.get("gpus"), changes.get("gpus_per_node"), nodes)}
    except ValueError as error:
        hint = "say how many all nodes give together, gpus=N, or each of them, gpus-per-node=N"
        raise Refused(str(error), hint) from None


def _changed(job: Job, changes: dict[str, Any]) -> Job:
    spec = job.spec
    changes = _gpus_on_each_node(changes, spec.request.nodes)
    request_changes = {name: value for name, value in changes.items() if name in _REQUEST_FIELDS}
    rest = {name: value for name, value in changes.items() if name not in _REQUEST_FIELDS}
    if request_changes:
        rest["request"] = replace(spec.request, **request_changes)
    if "throttle" in rest and spec.array is not None:
        rest["array"] = replace(spec.array, throttle=rest.pop("throttle"))
    if "retries" in rest:
        rest["retry"] = replace(spec.retry, retries=rest.pop("retries"))
    if "notify" in rest or "notify_to" in rest:
        rest["alerting"] = _alerting(job, rest.pop("notify", None), rest.pop("notify_to", None))
    job = replace(job, spec=replace(spec, **rest))
    if "begin_at" in changes and job.state is JobState.PENDING:
        begin_at = max(job.submit_at, changes["begin_at"] or job.submit_at)
        job = replace(job, queued_at=begin_at, eligible_at=begin_at)
    return job


def _for_task(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes for one task that was named: what is told of an array is to be told of it alone."""
    if not changes.get("notify"):
        return changes
    return {**changes, "notify": tuple(sorted({*changes["notify"], EACH_TASK}))}


def _alerting(job: Job, on: tuple[str, ...] | None, targets: tuple[str, ...] | None) -> Alerting | None:
    """Whom to tell what from now on; None is as before. Who is told of nothing any more is no longer named."""
    before = job.spec.alerting or Alerting()
    now_on = before.on if on is None else on
    if now_on:
        return Alerting(now_on, before.targets if targets is None else targets)
    if targets:
        raise Refused(
            f"{printable(targets[0], 60)} is to be told of job {job.shown_id}, but nothing of what",
            f"say of what: gctl update {job.shown_id} notify=end notify-to={printable(targets[0], 60)}",
        )
    return None


def _drain(command: Drain, turn: Turn) -> dict[str, Any]:
    check_admin(command.caller, "drain nodes and GPUs, or let work back", turn.settings)
    changed: list[str] = []
    unchanged: list[str] = []
    for target in command.targets:
        name = turn.resolve_device(target)
        is_change = True
        if command.message is None:
            is_change = turn.undrain(name)
            for gpu in [gpu for node in turn.nodes for gpu in node.gpus if gpu.uuid == name]:
                is_change = is_change or (gpu.why_not or "").startswith(SUSPECT)
                # What is known by now does not speak against the card any more.
                turn.clear(Clearance(gpu.uuid, turn.now, gpu.ecc_errors))
        else:
            turn.drain(name, command.message)
        (changed if is_change else unchanged).append(name)
        turn.deeds.append(Deed(command.caller, "undrain" if command.message is None else "drain", name))
    labels = {gpu.uuid: f"GPU {gpu_label(gpu.index)}" for node in turn.nodes for gpu in node.gpus}
    labels = {name: label for name, label in labels.items() if name in changed or name in unchanged}
    return {"changed": changed, "unchanged": unchanged, "labels": labels}
