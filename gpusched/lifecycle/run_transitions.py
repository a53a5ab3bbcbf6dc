"""What happens to a job's runs, from the recorded intent to start one until the job moves on after its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpusched.errors import BrokenInvariant
from gpusched.lifecycle.retry import LargerRequest, NothingLarger, backoff_s, failure_of, wants_retry
from gpusched.lifecycle.transitions import LIVE, Step, check_open, completing, move, rule_of, still_s, story_of
from gpusched.model.execution import (
    COMES_BACK,
    NativeRunStarted,
    RunAccepted,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
)
from gpusched.model.hostlist import fold
from gpusched.model.job import Job, JobEvent, NativeJob, Run, RunPart
from gpusched.model.layout import holds_other_nodes
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.units import format_duration, format_size_mib, gpu_list
from gpusched.model.value import replace
from gpusched.model.variants import names_of, started_with, with_request

Grow = Callable[[Job, Run], LargerRequest | NothingLarger | None]

_ROOM = (ReasonCode.PREEMPTED, ReasonCode.REQUEUED, ReasonCode.GPU_IDLE)
_CANCELLED = (ReasonCode.CANCELLED_BY_USER, ReasonCode.GPU_IDLE, ReasonCode.CLIENT_LOST)


_TAKEN = {
    "gpu_lost": (JobState.NODE_FAIL, ReasonCode.GPU_FAILED, "a GPU of the run was lost"),
    "vram_over": (JobState.OUT_OF_MEMORY, ReasonCode.GPU_MEMORY_OVER, "held more GPU memory than it booked"),
    "unbooked_use": (JobState.FAILED, ReasonCode.GPU_UNBOOKED_USE, "used a GPU that it did not book"),
}
"""Outcome, reason and sentence of runs that were stopped for their GPUs, unless the job has words for it."""


def start_run(
    job: Job,
    placement: Placement,
    boot_ids: Mapping[str, str],
    now: float,
    stdout_path: str | None = None,
    stderr_path: str | None = None,
    *,
    priority: float | None = None,
    master_port: int | None = None,
    power_cap_w: float | None = None,
    is_filler: bool = False,
) -> Step:
    """Record the intent to start the job's next run on this placement, with the request that the job has now.

    Args: boot_ids: by node. power_cap_w: limit to which its cards are to be set first.
    """
    if job.state is not JobState.PENDING:
        raise BrokenInvariant(f"job {job.id} cannot start while it is {job.state} ({story_of(job)})")
    holds = holds_other_nodes(job.spec)
    parts = tuple(
        RunPart(place.node, boot_ids[place.node], place.gpus, place.cpus, place.mem_mib, holds=holds and rank > 0)
        for rank, place in enumerate((placement, *placement.others))
    )
    run = Run(
        job_id=job.id,
        number=job.run + 1,
        state=RunState.STARTING,
        node=placement.node,
        boot_id=parts[0].boot_id,
        intent_at=now,
        gpus=tuple(share for part in parts for share in part.gpus),
        cpus=sum(part.cpus for part in parts),
        mem_mib=sum(part.mem_mib for part in parts),
        parts=parts if len(parts) > 1 else (),
        stdout_path=stdout_path,
        stderr_path=stderr_path,
        priority=priority,
        master_port=master_port,
        power_cap_w=power_cap_w,
        is_filler=is_filler,
    )
    job = replace(
        job,
        state=JobState.RUNNING,
        run=run.number,
        start_at=now,
        exit_code=None,
        signal=None,
        reason=None,
        reason_text=None,
        preempt_at=None,
        is_front=False,
    )
    text = f"started on {_where(placement)}"
    if (variant := started_with(job.spec)) is not None:
        text += f", with {names_of(job.spec)[variant]}"
    if is_filler:
        text += f" as a filler, since the budget of account {job.spec.account} is spent"
    return job, run, (JobEvent(job.id, now, "started", text, run.number),)


def _where(placement: Placement) -> str:
    places = (placement, *placement.others)
    if not any(place.gpus for place in places):
        return fold([place.node for place in places])
    return "; ".join(f"{place.node}, GPU {gpu_list(share.index for share in place.gpus)}" for place in places)


def run_started(job: Job, run: Run, event: RunStarted) -> Step:
    """Record that the run is alive. The job is unchanged, as its start was recorded with the intent."""
    check_open(job, run)
    told = _of_moved(job, run, event, event.at)
    run = replace(
        run,
        state=RunState.RUNNING,
        start_at=event.at,
        supervisor_pid=event.supervisor_pid,
        supervisor_start_ticks=event.supervisor_start_ticks,
        pid=event.pid,
    )
    return job, run, told


def _of_moved(job: Job, run: Run, event: RunStarted | RunEnded, now: float) -> tuple[JobEvent, ...]:
    """What to tell of output that is not where it was wanted, at the first event that says so."""
    if event.moved is None or run.start_at is not None:
        return ()
    return (JobEvent(job.id, now, "note", event.moved, run.number),)


def hand_over(job: Job, engine: str, node: str, now: float, stdout_path: str | None, stderr_path: str | None) -> Step:
    """Record the intent to hand the job's next run over to another scheduler, in which it is pending from then on."""
    if job.state is not JobState.PENDING or job.is_handed_over:
        raise BrokenInvariant(f"job {job.id} cannot be handed over while it is {job.state} ({story_of(job)})")
    run = Run(
        job_id=job.id,
        number=job.run + 1,
        state=RunState.STARTING,
        node=node,
        boot_id="",
        intent_at=now,
        stdout_path=stdout_path,
        stderr_path=stderr_path,
        native=NativeJob(engine),
    )
    job = replace(
        job,
        run=run.number,
        start_at=None,
        exit_code=None,
        signal=None,
        reason=ReasonCode.HANDED_OVER,
        reason_text=f"is being handed over to {NAMES_OF_ENGINES[engine]}",
        preempt_at=None,
        is_front=False,
    )
    text = f"is handed over to {NAMES_OF_ENGINES[engine]}"
    return job, run, (JobEvent(job.id, now, "handed_over", text, run.number),)


def run_accepted(job: Job, run: Run, event: RunAccepted) -> Step:
    """Record the job's id in the other scheduler."""
    check_open(job, run)
    if run.native is None or run.native.id == event.native_id:
        return job, run, ()
    text = f"is in {NAMES_OF_ENGINES[run.native.engine]} as job {event.native_id}"
    run = replace(run, native=replace(run.native, id=event.native_id))
    if job.is_handed_over:
        job = replace(job, reason_text=text)
    return job, run, (JobEvent(job.id, event.at, "note", text, run.number),)


def native_run_started(job: Job, run: Run, event: NativeRunStarted) -> Step:
    """Record that the other scheduler has started the run; no effect if that is known."""
    check_open(job, run)
    if run.native is None or run.state is RunState.RUNNING:
        return job, run, ()
    where = f" on {event.nodes}" if event.nodes else ""
    text = f"started in {NAMES_OF_ENGINES[run.native.engine]}{where}"
    native = replace(run.native, nodes=event.nodes)
    run = replace(run, state=RunState.RUNNING, start_at=event.at, native=native)
    if job.is_handed_over:
        job = replace(move(job, JobState.RUNNING), start_at=event.at, reason=None, reason_text=None)
    return job, run, (JobEvent(job.id, event.at, "started", text, run.number),)


NAMES_OF_ENGINES = {"slurm": "Slurm"}
"""Other schedulers, in sentences."""


def run_stopping(job: Job, run: Run, event: RunStopping) -> Step:
    """Record that the run is being ended: the job is COMPLETING until then."""
    check_open(job, run)
    if job.state not in LIVE:
        return job, run, ()
    words = {
        "cancel": "is being cancelled",
        "preempt": "is being preempted",
        "requeue": "is being requeued",
        "gpu_lost": "is being ended: it lost a GPU",
        "vram_over": "is being ended because it holds more GPU memory than it booked",
        "unbooked_use": "is being ended because it uses a GPU that it did not book",
        "timeout": "reached its time limit and is being stopped",
        "lease": "was inactive for the length of its lease; is being stopped",
        "client_lost": "lost its client; is being stopped",
        "head_lost": "its node had lost contact with the daemon; is being stopped",
        "shutdown": "is being ended because the machine is being shut down",
        "gang": "one of its ranks failed; the others are being stopped",
        "node_fail": "one of its nodes failed; is being stopped",
        "leftovers": "its first process ended; waiting for the processes it left behind",
        "epilog": "its command ended; its epilog runs",
        "other_nodes": "its command ended; its other nodes are being released",
    }
    text = words.get(event.why, f"is being stopped: {event.why}")
    return completing(job), run, (JobEvent(job.id, event.at, "stopping", text, run.number),)


def run_suspended(job: Job, run: Run, event: RunSuspended) -> Step:
    """Record the suspension. Job and run are unchanged, as it was recorded with the decision."""
    check_open(job, run)
    return job, run, (JobEvent(job.id, event.at, "note", "all of its processes are stopped", run.number),)


def run_resumed(job: Job, run: Run, event: RunResumed) -> Step:
    """Record that the run continues, with the exact time suspended as reported by the engine."""
    check_open(job, run)
    return job, replace(run, suspended_s=event.suspended_s), ()


def run_ended(
    job: Job,
    run: Run,
    event: RunEnded,
    settings: Settings,
    now: float,
    *,
    gpus_clean: bool,
    grow: Grow | None = None,
) -> Step:
    """Record how the run ended. With GPUs that are not clean yet, the job moves on only in a later `finish`.

    `grow`: see there.
    """
    check_open(job, run)
    if job.is_handed_over:
        job = completing(job)
    outcome, reason, text = _judge(job, run, event)
    told = _of_moved(job, run, event, event.end_at)
    run = replace(
        run,
        state=RunState.ENDED,
        start_at=event.start_at,
        end_at=event.end_at,
        exit_code=event.exit_code,
        signal=event.signal,
        outcome=outcome,
        reason=reason,
        reason_text=text,
        cpu_s=event.cpu_s,
        system_cpu_s=event.system_cpu_s,
        peak_mem_mib=event.peak_mem_mib,
        suspended_s=event.suspended_s,
    )
    events = [*told, JobEvent(job.id, event.end_at, "ended", f"{outcome}: {text}", run.number)]
    if (why := _why_success_counts(job, run, event)) is not None:
        events.append(JobEvent(job.id, event.end_at, "note", f"run {run.number} {why}", run.number))
    if event.detail is not None and event.detail != text:
        events.append(JobEvent(job.id, event.end_at, "note", event.detail, run.number))
    failures = [text for text in (event.epilog_failure, event.epilog_fault) if text is not None]
    events += [JobEvent(job.id, event.end_at, "note", text, run.number) for text in failures]
    if event.leftovers:
        note = "ended leftover processes: " + ", ".join(event.leftovers)
        events.append(JobEvent(job.id, event.end_at, "note", note, run.number))
    if event.oom_kills and outcome is not JobState.OUT_OF_MEMORY:
        # Other events report its end; the lack of memory is reported only here.
        events.append(JobEvent(job.id, event.end_at, "note", _out_of_host_memory(event)[1], run.number))
    if event.start_at is not None:
        job = replace(job, start_at=event.start_at)
    if gpus_clean:
        job, more = finish(job, run, settings, now, grow)
        return job, run, (*events, *more)
    if job.state in LIVE:
        job = completing(job)
    return job, run, tuple(events)


def _judge(job: Job, run: Run, event: RunEnded) -> tuple[JobState, ReasonCode, str]:
    """Outcome, reason and sentence for a run's end.

    The cause of a stop outweighs the exit status. A run that was told to stop and is to be followed by another one has
    succeeded only if it says so: exit code 0 is also that of a handler that has saved the work for the next run.
    """
    if event.launch_error is not None:
        return JobState.FAILED, ReasonCode.JOB_LAUNCH_FAILURE, event.launch_error
    if event.stopped_by == "cancel":
        reason = job.reason if job.reason in _CANCELLED else None
        text = job.reason_text if job.cancel_at is not None else event.detail
        return JobState.CANCELLED, reason or ReasonCode.CANCELLED_BY_USER, text or job.reason_text or "cancelled"
    is_requeued = job.preempt_at is not None and job.reason is ReasonCode.REQUEUED
    is_success = event.exit_code == 0 and not _is_to_continue(job, event)
    if is_requeued and (not is_success or (job.spec.launch.slurm and not event.is_done)):
        # Also without an order: a script that requeues itself exits before one reaches it.
        return JobState.PREEMPTED, ReasonCode.REQUEUED, job.reason_text or "requeued"
    if event.stopped_by in ("preempt", "requeue") and not is_success:
        if job.reason in _ROOM and job.reason_text is not None:
            return JobState.PREEMPTED, job.reason, job.reason_text
        return JobState.PREEMPTED, ReasonCode.PREEMPTED, "made room for another job"
    if event.stopped_by == "shutdown" and not is_success:
        return JobState.NODE_FAIL, ReasonCode.NODE_DOWN, "the machine was being shut down"
    if event.stopped_by == "head_lost" and not is_success:
        lost_after_s = job.spec.retry.lost_after_s
        lasted = "" if lost_after_s is None else f" for {format_duration(lost_after_s)}"
        return JobState.NODE_FAIL, ReasonCode.NODE_DOWN, f"its node had no contact with the daemon{lasted}"
    if event.prolog_fault is not None:
        return JobState.NODE_FAIL, ReasonCode.NODE_DOWN, f"not all of its nodes could start it: {event.prolog_fault}"
    if event.stopped_by in _TAKEN:
        outcome, reason, text = _TAKEN[event.stopped_by]
        return outcome, reason, (job.reason_text if job.reason is reason else None) or text
    if event.stopped_by == "timeout":
        limit = job.spec.time_limit_s
        text = "reached its time limit" + ("" if limit is None else f" of {format_duration(limit)}")
        return JobState.TIMEOUT, ReasonCode.TIME_LIMIT, text
    if event.stopped_by == "lease":
        lease_s = None if job.spec.interactive is None else job.spec.interactive.lease_s
        text = "was inactive for " + ("its lease" if lease_s is None else format_duration(lease_s))
        return JobState.TIMEOUT, ReasonCode.LEASE_EXPIRED, text
    if event.stopped_by == "client_lost":
        return JobState.CANCELLED, ReasonCode.CLIENT_LOST, "lost its client"
    if job.spec.adopted is not None:
        return JobState.COMPLETED, ReasonCode.EXIT_UNKNOWN, "ended by itself; exit status unknown, since it was adopted"
    if event.signal is not None:
        how = f"signal {event.signal}{_which_rank(run, event)}"
    elif event.exit_code == 0:
        return JobState.COMPLETED, ReasonCode.NONE, "exit code 0"
    else:
        how = f"exit code {event.exit_code}{_which_rank(run, event)}"
    if event.oom_kills:
        reason, text = _out_of_host_memory(event)
        return JobState.OUT_OF_MEMORY, reason, f"{text} ({how})"
    cause = "" if event.cause is None else f": {event.cause}"
    if event.gpu_oom:
        return JobState.OUT_OF_MEMORY, ReasonCode.OUT_OF_MEMORY, f"GPU memory ran out ({how}){cause}"
    if event.signal is not None:
        return JobState.FAILED, ReasonCode.RAISED_SIGNAL, f"ended by {how}{cause}"
    return JobState.FAILED, ReasonCode.NON_ZERO_EXIT_CODE, how + cause


def _is_to_continue(job: Job, event: RunEnded) -> bool:
    """Whether the run was stopped for another one to continue its work, and has not said that it is done."""
    return event.stopped_by in COMES_BACK and rule_of(job).requeue and not event.is_done


def _why_success_counts(job: Job, run: Run, event: RunEnded) -> str | None:
    """What exit code 0 meant where another run was ordered, as a predicate; None where none was."""
    if event.exit_code != 0 or event.launch_error is not None:
        return None
    if event.stopped_by in COMES_BACK:
        told = "ended with exit code 0 after it was told to stop"
        if event.is_done:
            return f"{told}, and had said that it was done"
        if not rule_of(job).requeue:
            return f"{told}, which completes a job with --no-requeue"
        return f"{told} for a requeue, which does not complete its job; {SAY_DONE}"
    if event.stopped_by is None and job.preempt_at is not None and run.outcome is JobState.COMPLETED:
        return "had ended by itself before it was told to stop"
    return None


SAY_DONE = 'a run that has nothing left to do says so before it ends: echo done > "$GPUSCHED_CHECKPOINT_FILE"'


def _which_rank(run: Run, event: RunEnded) -> str:
    """Which process of several an exit code is of, for a sentence."""
    node = event.failed_on or run.node
    if event.rank is not None:
        return f" of rank {event.rank} on {node}"
    return f" on {node}" if run.parts else ""


def _out_of_host_memory(event: RunEnded) -> tuple[ReasonCode, str]:
    """Reason and sentence: the run's own limit or the machine's memory, and what was killed."""
    # Without the number: if all are killed together, the kernel counts the first one twice.
    killed = "it" if event.signal is not None else "a process of it" if event.oom_kills == 1 else "processes of it"
    if event.at_mem_limit and event.mem_limit_mib is not None:
        limit = format_size_mib(event.mem_limit_mib)
        return ReasonCode.MEM_LIMIT, f"needed more than its {limit} of host memory: the kernel killed {killed}"
    if event.at_mem_limit and event.detail is not None:
        return ReasonCode.MEM_LIMIT, f"needed more host memory than it asked for: {event.detail}"
    used = "" if event.peak_mem_mib is None else f", which had used {format_size_mib(event.peak_mem_mib)}"
    text = f"the machine's memory ran out: the kernel killed {killed}{used}"
    return ReasonCode.HOST_OUT_OF_MEMORY, text


def run_lost(
    job: Job,
    run: Run,
    event: RunLost,
    settings: Settings,
    now: float,
    *,
    gpus_clean: bool,
    boot_id: str | None = None,
) -> Step:
    """Record that the run's supervisor disappeared without a result; a new `boot_id` means a restart of the machine.

    As for `run_ended`, the job moves on when its GPUs are clean.
    """
    check_open(job, run)
    if job.is_handed_over:
        job = completing(job)
    rebooted = boot_id is not None and boot_id != run.boot_id
    run = replace(
        run,
        state=RunState.ENDED,
        end_at=event.at,
        outcome=JobState.NODE_FAIL,
        reason=ReasonCode.NODE_DOWN if rebooted else ReasonCode.SUPERVISOR_LOST,
        reason_text=event.detail,
        suspended_s=run.suspended_s + still_s(job, event.at),
    )
    lost = JobEvent(job.id, event.at, "ended", f"{run.outcome}: {event.detail}", run.number)
    if gpus_clean:
        job, events = finish(job, run, settings, now)
        return job, run, (lost, *events)
    if job.state in LIVE:
        job = completing(job)
    return job, run, (lost,)


MISSING = "its run is missing in the job table"


def missing_run(job: Job, now: float) -> Run:
    """The last run of a job, lost, where a damaged table has no row of it."""
    return Run(
        job_id=job.id,
        number=job.run,
        state=RunState.ENDED,
        node="",
        boot_id="",
        intent_at=job.queued_at if job.start_at is None else job.start_at,
        end_at=now,
        outcome=JobState.NODE_FAIL,
        reason=ReasonCode.SUPERVISOR_LOST,
        reason_text=MISSING,
    )


def run_never_started(job: Job, run: Run, event: RunNeverStarted, settings: Settings, now: float) -> Step:
    """Close a run that no process ever took; the job is pending again and nothing counts against it.

    The run's number is not reused. The next attempt comes no sooner than one poll later, so that an engine
    that cannot start anything does not spin.
    """
    check_open(job, run)
    if job.is_handed_over:
        job = completing(job)
    text = f"was not started: {event.detail}"
    run = replace(
        run,
        state=RunState.ENDED,
        end_at=event.at,
        outcome=JobState.CANCELLED,
        reason=ReasonCode.NONE,
        reason_text=text,
    )
    requeued = JobEvent(job.id, event.at, "requeued", text, run.number)
    was_preempted = job.preempt_at is not None
    job = replace(job, start_at=None, preempt_at=None, suspended_at=None, suspended_by=None)
    if job.cancel_at is not None:
        return _end(job, JobState.CANCELLED, run), run, (requeued,)
    if job.spec.adopted is not None:
        return _not_adopted(job, run, event)
    job = replace(
        move(job, JobState.PENDING),
        eligible_at=max(job.eligible_at, run.intent_at + settings.daemon.poll_s),
        reason=None,
        reason_text=text,
        is_front=was_preempted and job.queued_at <= run.intent_at,
    )
    return job, run, (requeued,)


def _not_adopted(job: Job, run: Run, event: RunNeverStarted) -> Step:
    """End the job of a failed adoption: its process keeps running, without a job, and cannot start later."""
    text = f"was not adopted: {event.detail}"
    run = replace(run, outcome=JobState.FAILED, reason=ReasonCode.JOB_LAUNCH_FAILURE, reason_text=text)
    job = replace(job, reason=run.reason, reason_text=text)
    return _end(job, JobState.FAILED, run), run, (JobEvent(job.id, event.at, "ended", f"FAILED: {text}", run.number),)


def finish(
    job: Job, run: Run, settings: Settings, now: float, grow: Grow | None = None
) -> tuple[Job, tuple[JobEvent, ...]]:
    """Move the job on after its run ended and its GPUs are clean: a retry, a requeue, or the end.

    `grow` determines the next request of a job that ran out of memory. A recorded cancel forbids another run; a run
    that ended by itself before the cancel reached it keeps its own outcome if no other run would have followed.
    """
    failure = failure_of(run)
    if run.outcome is None or run.end_at is None:
        raise BrokenInvariant(f"run {run.id} of job {job.id} has not ended ({story_of(job)})")
    rule = rule_of(job)
    job = replace(
        job,
        exit_code=run.exit_code,
        signal=run.signal,
        reason=run.reason,
        reason_text=run.reason_text,
        preempt_at=None,
        suspended_at=None,
        suspended_by=None,
    )
    is_lost = run.outcome is JobState.NODE_FAIL
    is_preempted = run.outcome is JobState.PREEMPTED
    has_requeue = rule.requeue and job.requeues < settings.life.max_requeues
    if (is_lost and has_requeue) or (is_preempted and rule.requeue):
        if job.cancel_at is not None:
            return _end(job, JobState.CANCELLED, run), ()
        # An owner who gave up a turn voluntarily queues from then on, without precedence.
        gave_back = job.queued_at > run.intent_at
        was_idle = run.reason is ReasonCode.GPU_IDLE
        job = replace(
            move(job, JobState.PENDING),
            # With the age of its idle run, it would go before the jobs for which it was ended.
            queued_at=now if was_idle else job.queued_at,
            eligible_at=now,
            requeues=job.requeues + is_lost,
            is_front=is_preempted and not was_idle and not gave_back,
        )
        return job, (JobEvent(job.id, now, "requeued", f"waits again: {run.reason_text}", run.number),)
    can_retry = failure is not None and job.failures < rule.retries and not (is_lost and rule.requeue)
    if failure is not None and can_retry and wants_retry(rule, failure):
        if job.cancel_at is not None:
            return _end(job, JobState.CANCELLED, run), ()
        larger = grow(job, run) if grow is not None and failure.kind == "oom" else None
        if isinstance(larger, NothingLarger):
            job = replace(job, reason_text=f"{run.reason_text}; {larger.text}")
            return _end(job, run.outcome, run), (JobEvent(job.id, now, "note", larger.text, run.number),)
        if larger is not None:
            job = replace(job, spec=with_request(job.spec, larger.request))
        wait_s = backoff_s(rule, job.failures + 1, job.id)
        job = replace(move(job, JobState.PENDING), failures=job.failures + 1, eligible_at=max(now, run.end_at + wait_s))
        if failure.kind == "timeout":
            # It had all the time it requested. With the age of its first run, slices would go before all other jobs.
            job = replace(job, queued_at=job.eligible_at)
        text = f"retry {job.failures} of {rule.retries} in {wait_s:.1f}s"
        if larger is not None:
            text += f", with {larger.text}"
        return job, (JobEvent(job.id, now, "retry", text, run.number),)
    if is_lost and job.cancel_at is not None:
        return _end(job, JobState.CANCELLED, run), ()
    return _end(job, run.outcome, run), ()


def _end(job: Job, to: JobState, run: Run) -> Job:
    """Move to a final state; a cancelled job keeps who cancelled it as reason, not its last run's failure."""
    job = replace(move(job, to), end_at=run.end_at)
    if to is JobState.CANCELLED and run.reason not in _CANCELLED:
        text = f"cancelled; its last run: {run.reason_text}"
        job = replace(job, reason=ReasonCode.CANCELLED_BY_USER, reason_text=text)
    return job


def counts_for_usage(run: Run) -> bool:
    """Whether an ended run is charged: not if it was a filler, or the policy took its resources and its work was lost.

    A run requeued by its owner is charged: the owner chose to give up the work.
    """
    return run.reason is not ReasonCode.PREEMPTED and not run.is_filler
