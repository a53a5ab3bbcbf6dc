"""Life cycle of a job: events in, new values out.

Every function takes values and returns new ones, with events for the job's history. `TRANSITIONS` lists every legal
move; any other raises BrokenInvariant. Final states never change. A SUSPENDED run may end in every way that a RUNNING
one may.

                          SUSPENDED
                           ^     |
                      suspend   resume
                           |     v
    PENDING ----start----> RUNNING ----stop, preempt, leftovers, GPUs not clean----> COMPLETING
       ^                      |                                                          |
       |                      +------------------> finish <------------------------------+
       |                                             |
       +--- retry, requeue, never started -----------+----> a final state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpusched.errors import BrokenInvariant, Refused
from gpusched.lifecycle.retry import LargerRequest, NothingLarger, backoff_s, failure_of, wants_retry
from gpusched.model.commands import Caller
from gpusched.model.execution import (
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
from gpusched.model.job import Job, JobEvent, JobSpec, NativeJob, RetryRule, Run, RunPart
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.spec import SLURM_ENGINE
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.units import format_duration, format_size_mib, gpu_list
from gpusched.model.value import replace

Step = tuple[Job, Run, tuple[JobEvent, ...]]
"""A job and its run after an event, with the new events of the job's history."""

_ENDS = (
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.OUT_OF_MEMORY,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
)

LIVE = (JobState.RUNNING, JobState.SUSPENDED)
"""States with a run that is not being ended."""

TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (JobState.PENDING, JobState.RUNNING),
        (JobState.PENDING, JobState.CANCELLED),
        (JobState.PENDING, JobState.COMPLETING),
        (JobState.PENDING, JobState.DEADLINE),
        (JobState.RUNNING, JobState.SUSPENDED),
        (JobState.SUSPENDED, JobState.RUNNING),
        *((live, JobState.COMPLETING) for live in LIVE),
        *((live, JobState.PENDING) for live in (*LIVE, JobState.COMPLETING)),
        *((live, end) for live in (*LIVE, JobState.COMPLETING) for end in _ENDS),
    }
)


def check_transition(job: Job, to: JobState) -> None:
    """Raises: BrokenInvariant, with the job's details, for an illegal move."""
    if (job.state, to) not in TRANSITIONS:
        raise BrokenInvariant(f"job {job.id} cannot go from {job.state} to {to} ({story_of(job)})")


def story_of(job: Job) -> str:
    """Details of the job for a broken invariant."""
    parts = [f"submitted at {job.submit_at:.3f}", f"run {job.run}"]
    for name in ("start_at", "end_at", "cancel_at", "hold", "exit_code", "signal", "reason"):
        value = getattr(job, name)
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join([*parts, f"failures {job.failures}", f"requeues {job.requeues}"])


def check_open(job: Job, run: Run) -> None:
    """Raises: BrokenInvariant if this is not the open run of the job."""
    is_current = run.job_id == job.id and run.number == job.run
    has_run = job.state in (*LIVE, JobState.COMPLETING) or job.is_handed_over
    if not is_current or not has_run or run.state is RunState.ENDED:
        raise BrokenInvariant(f"run {run.id} ({run.state}) has news, but job {job.id} is {job.state} ({story_of(job)})")


def move(job: Job, to: JobState) -> Job:
    """The job in another state. Raises: BrokenInvariant."""
    check_transition(job, to)
    return replace(job, state=to)


def completing(job: Job) -> Job:
    """Move a job to COMPLETING; a suspended run is resumed for its end.

    `suspended_by` is kept, as a job suspended to make room no longer has cores of its own.
    """
    by = "policy" if job.suspended_by == "policy" else None
    return replace(move(job, JobState.COMPLETING), suspended_at=None, suspended_by=by)


def still_s(job: Job, now: float) -> float:
    """Length of the run's current suspension, in seconds."""
    return 0.0 if job.suspended_at is None else max(0.0, now - job.suspended_at)


Grow = Callable[[Job, Run], LargerRequest | NothingLarger | None]

_ONCE = RetryRule(requeue=False)
"""For adopted jobs, which cannot be restarted."""
_ROOM = (ReasonCode.PREEMPTED, ReasonCode.REQUEUED, ReasonCode.GPU_IDLE)
_CANCELLED = (ReasonCode.CANCELLED_BY_USER, ReasonCode.GPU_IDLE, ReasonCode.CLIENT_LOST)


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
    """Record the intent to start the job's next run on this placement.

    Args: boot_ids: by node. power_cap_w: limit to which its cards are to be set first.
    """
    if job.state is not JobState.PENDING:
        raise BrokenInvariant(f"job {job.id} cannot start while it is {job.state} ({story_of(job)})")
    places = (placement, *placement.others)
    parts = tuple(RunPart(place.node, boot_ids[place.node], place.gpus, place.cpus, place.mem_mib) for place in places)
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


def burst(job: Job, now: float, text: str) -> tuple[Job, JobEvent]:
    """Make a pending job one for Slurm, where it stays through retries, until a person requeues it."""
    if job.state is not JobState.PENDING or job.is_handed_over:
        raise BrokenInvariant(f"job {job.id} cannot burst while it is {job.state} ({story_of(job)})")
    return replace(job, spec=replace(job.spec, engine=SLURM_ENGINE, burst=True)), JobEvent(job.id, now, "note", text)


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
        "leftovers": "its first process ended; waiting for the processes it left behind",
        "epilog": "its command ended; its epilog runs",
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

    The cause of a stop outweighs the exit status, except for a run that was preempted or shut down and
    ended successfully within its grace. With Slurm's commands a requeue outweighs success as well.
    """
    if event.launch_error is not None:
        return JobState.FAILED, ReasonCode.JOB_LAUNCH_FAILURE, event.launch_error
    if event.stopped_by == "cancel":
        reason = job.reason if job.reason in _CANCELLED else None
        text = job.reason_text if job.cancel_at is not None else event.detail
        return JobState.CANCELLED, reason or ReasonCode.CANCELLED_BY_USER, text or job.reason_text or "cancelled"
    is_requeued = job.preempt_at is not None and job.reason is ReasonCode.REQUEUED
    if is_requeued and (event.exit_code != 0 or job.spec.launch.slurm):
        # Also without an order: a script that requeues itself exits before one reaches it.
        return JobState.PREEMPTED, ReasonCode.REQUEUED, job.reason_text or "requeued"
    if event.stopped_by in ("preempt", "requeue") and event.exit_code != 0:
        if job.reason in _ROOM and job.reason_text is not None:
            return JobState.PREEMPTED, job.reason, job.reason_text
        return JobState.PREEMPTED, ReasonCode.PREEMPTED, "made room for another job"
    if event.stopped_by == "shutdown" and event.exit_code != 0:
        return JobState.NODE_FAIL, ReasonCode.NODE_DOWN, "the machine was being shut down"
    if event.stopped_by == "head_lost" and event.exit_code != 0:
        lost_after_s = job.spec.retry.lost_after_s
        lasted = "" if lost_after_s is None else f" for {format_duration(lost_after_s)}"
        return JobState.NODE_FAIL, ReasonCode.NODE_DOWN, f"its node had no contact with the daemon{lasted}"
    if event.prolog_fault is not None:
        return JobState.NODE_FAIL, ReasonCode.NODE_DOWN, f"not all of its nodes could start it: {event.prolog_fault}"
    if event.stopped_by == "gpu_lost":
        text = job.reason_text if job.reason is ReasonCode.GPU_FAILED else None
        return JobState.NODE_FAIL, ReasonCode.GPU_FAILED, text or "a GPU of the run was lost"
    if event.stopped_by == "vram_over":
        is_told = job.reason is ReasonCode.GPU_MEMORY_OVER and job.reason_text is not None
        text = job.reason_text if is_told else None
        return JobState.OUT_OF_MEMORY, ReasonCode.GPU_MEMORY_OVER, text or "held more GPU memory than it booked"
    if event.stopped_by == "unbooked_use":
        is_told = job.reason is ReasonCode.GPU_UNBOOKED_USE and job.reason_text is not None
        text = job.reason_text if is_told else None
        return JobState.FAILED, ReasonCode.GPU_UNBOOKED_USE, text or "used a GPU that it did not book"
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
    rule = _rule_of(job)
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
        job = replace(
            move(job, JobState.PENDING),
            eligible_at=now,
            requeues=job.requeues + is_lost,
            is_front=is_preempted and run.reason is not ReasonCode.GPU_IDLE and not gave_back,
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
            job = replace(job, spec=replace(job.spec, request=larger.request))
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


def cancel(job: Job, now: float, by: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """End a pending job at once; mark a job with a run, which is COMPLETING until the run has ended.

    A second cancel has no effect.
    """
    text = f"cancelled by {by}"
    if job.state is JobState.PENDING and not job.is_handed_over:
        job = replace(move(job, JobState.CANCELLED), end_at=now, reason=ReasonCode.CANCELLED_BY_USER, reason_text=text)
        return job, (JobEvent(job.id, now, "ended", f"{job.state}: {text}"),)
    if job.cancel_at is not None and job.state is JobState.COMPLETING:
        return job, ()
    if job.state is not JobState.COMPLETING:
        job = completing(job)
    job = replace(job, cancel_at=now, reason=ReasonCode.CANCELLED_BY_USER, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", text, job.run),)


def lose_gpu(job: Job, now: float, lost: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Order the end of a run on a lost GPU, named by `lost`. No effect if it is already being ended."""
    if job.state not in LIVE:
        return job, ()
    text = f"lost {lost}"
    job = replace(completing(job), reason=ReasonCode.GPU_FAILED, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", f"is being ended: it {text}", job.run),)


def ends_unsatisfied(spec: JobSpec, settings: Settings, *, is_spared: bool = False) -> bool:
    """Whether a job whose dependency can never be satisfied is ended rather than left pending until it is changed.

    A pipeline step that `is_spared`, because others succeeded, needs no repair and would keep the pipeline from
    ending.
    """
    if is_spared and spec.step is not None and spec.never_satisfied is None:
        return True
    return (spec.never_satisfied or settings.life.never_satisfied) == "cancel"


def give_up(job: Job, now: float, code: ReasonCode, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Cancel a pending job for a reason other than a user's request."""
    if job.state is not JobState.PENDING:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot be given up ({story_of(job)})")
    job = replace(move(job, JobState.CANCELLED), end_at=now, reason=code, reason_text=text)
    return job, (JobEvent(job.id, now, "ended", f"{job.state}: {text}"),)


def last_start_at(job: Job) -> float | None:
    """Latest start of a pending job that meets its deadline, by its time limit; None without a constraint."""
    if job.state is not JobState.PENDING or job.spec.deadline_at is None or job.is_handed_over:
        return None
    return job.spec.deadline_at - (job.spec.time_limit_s or 0)


def misses_deadline(job: Job, now: float) -> bool:
    """Whether a pending job can no longer end by its deadline."""
    latest_at = last_start_at(job)
    return latest_at is not None and now > latest_at


def past_deadline(job: Job, now: float) -> tuple[Job, tuple[JobEvent, ...]]:
    """End a pending job that can no longer meet its deadline."""
    limit = job.spec.time_limit_s
    text = "its deadline has passed"
    if limit is not None:
        text = f"can no longer end by its deadline: its time limit is {format_duration(limit)}"
    job = replace(move(job, JobState.DEADLINE), end_at=now, reason=ReasonCode.DEADLINE, reason_text=text)
    return job, (JobEvent(job.id, now, "ended", f"{job.state}: {text}"),)


def may_run_again(job: Job) -> bool:
    """Whether another run may follow the open one: a requeue or a retry."""
    rule = _rule_of(job)
    return job.cancel_at is None and (rule.requeue or job.failures < rule.retries)


def _rule_of(job: Job) -> RetryRule:
    return job.spec.retry if job.spec.adopted is None else _ONCE


def hold(job: Job, now: float, by: str, *, admin: bool = False) -> tuple[Job, JobEvent]:
    """Keep the job from starting; a running job is held for its next run."""
    _check_active(job, "held")
    job = replace(job, hold="admin" if admin else "user")
    return job, JobEvent(job.id, now, "held", f"held by {by}")


def hold_for_fault(job: Job, now: float, text: str) -> tuple[Job, JobEvent]:
    """Hold a job to keep it from taking out more cards, until its owner has looked into it."""
    _check_active(job, "held")
    job = replace(job, hold="user", reason=ReasonCode.JOB_HELD_GPU_FAULT, reason_text=text)
    return job, JobEvent(job.id, now, "held", text)


def held_code(job: Job) -> ReasonCode:
    """Reason of a held job: held by its owner, an admin or a fault."""
    if job.hold == "admin":
        return ReasonCode.JOB_HELD_ADMIN
    is_for_fault = job.reason is ReasonCode.JOB_HELD_GPU_FAULT
    return ReasonCode.JOB_HELD_GPU_FAULT if is_for_fault else ReasonCode.JOB_HELD_USER


def release(job: Job, now: float, by: str) -> tuple[Job, JobEvent]:
    _check_active(job, "released")
    if job.reason is ReasonCode.JOB_HELD_GPU_FAULT:
        job = replace(job, reason=None, reason_text=None)
    return replace(job, hold=None), JobEvent(job.id, now, "released", f"released by {by}")


def _end(job: Job, to: JobState, run: Run) -> Job:
    """Move to a final state; a cancelled job keeps who cancelled it as reason, not its last run's failure."""
    job = replace(move(job, to), end_at=run.end_at)
    if to is JobState.CANCELLED and run.reason not in _CANCELLED:
        text = f"cancelled; its last run: {run.reason_text}"
        job = replace(job, reason=ReasonCode.CANCELLED_BY_USER, reason_text=text)
    return job


def _check_active(job: Job, word: str) -> None:
    if job.state.is_final:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot be {word} ({story_of(job)})")


def new_job(job_id: int, caller: Caller, spec: JobSpec, now: float) -> Job:
    """Row of a newly submitted job."""
    queued_at = max(now, spec.begin_at or now)
    return Job(
        id=job_id,
        uid=caller.uid,
        user=caller.user,
        spec=spec,
        state=JobState.PENDING,
        submit_at=now,
        queued_at=queued_at,
        eligible_at=queued_at,
        hold="user" if spec.hold else None,
        tasks_left=None if spec.array is None else spec.array.tasks,
    )


def refuse_to_repeat(job: Job) -> None:
    """Reject adopted jobs, whose process cannot be restarted. Raises: Refused."""
    if job.spec.adopted is not None:
        raise Refused(
            f"job {job.shown_id} was adopted while running, so its command and environment are unknown",
            "submit it as a job: gsub",
        )


def preempt(job: Job, now: float, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Preempt a job's run: it is COMPLETING until the run has ended, and then pending again.

    A job that does not consent to a requeue ends as PREEMPTED. No effect if it is already being ended.
    `text` names the beneficiary, phrased to follow "preempted: ".
    """
    return _make_room(job, now, ReasonCode.PREEMPTED, text, f"preempted: {text}")


def requeue(job: Job, now: float, by: str, *, is_owner: bool) -> tuple[Job, tuple[JobEvent, ...]]:
    """As `preempt`, for a person who wants the job to start over.

    If that is its owner, the age of a job with a time limit starts over: otherwise, requeued repeatedly just before its
    limit, it would rank before others thanks to a limit that never ends it. A job that has burst comes back for good.
    """
    text = f"requeued by {by}"
    after, story = _make_room(job, now, ReasonCode.REQUEUED, text, text)
    if job.spec.is_burst:
        # The open run keeps its engine.
        after = replace(after, spec=replace(after.spec, engine=None, burst=False))
    is_late = is_owner and job.spec.time_limit_s is not None and bool(story)
    return (replace(after, queued_at=now) if is_late else after), story


def requeue_idle(job: Job, now: float, why: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """As `preempt`, for idle GPUs; the job returns to the queue without precedence."""
    return _make_room(job, now, ReasonCode.GPU_IDLE, why, f"is being requeued: {why}")


def cancel_idle(job: Job, now: float, why: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Cancel a job because of idle GPUs."""
    if job.state is JobState.COMPLETING:
        return job, ()
    text = f"cancelled by the scheduler: {why}"
    job = replace(completing(job), cancel_at=now, reason=ReasonCode.GPU_IDLE, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", text, job.run),)


def _make_room(job: Job, now: float, reason: ReasonCode, text: str, told: str) -> tuple[Job, tuple[JobEvent, ...]]:
    if job.state is JobState.COMPLETING:
        return job, ()
    job = replace(completing(job), preempt_at=now, reason=reason, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", told, job.run),)


def counts_for_usage(run: Run) -> bool:
    """Whether an ended run is charged: not if it was a filler, or the policy took its resources and its work was lost.

    A run requeued by its owner is charged: the owner chose to give up the work.
    """
    return run.reason is not ReasonCode.PREEMPTED and not run.is_filler


def suspend(job: Job, now: float, by: str, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Suspend a running job. `by` is `user` or `policy`, `text` says why; no effect if suspended."""
    if job.state is JobState.SUSPENDED:
        return job, ()
    reason = ReasonCode.PREEMPTED if by == "policy" else None
    job = replace(move(job, JobState.SUSPENDED), suspended_at=now, suspended_by=by, reason=reason, reason_text=text)
    return job, (JobEvent(job.id, now, "suspended", text, job.run),)


def resume(job: Job, run: Run, now: float, text: str) -> Step:
    """Resume a suspended job. The run's suspended time is corrected once the engine reports it."""
    if job.state is not JobState.SUSPENDED:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot go on ({story_of(job)})")
    run = replace(run, suspended_s=run.suspended_s + still_s(job, now))
    job = replace(move(job, JobState.RUNNING), suspended_at=None, suspended_by=None, reason=None, reason_text=None)
    return job, run, (JobEvent(job.id, now, "resumed", text, run.number),)
