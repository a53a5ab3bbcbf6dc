"""How jobs and runs become rows of columns, and how they come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpusched.model.job import Job, JobSpec, Launch, Request, RetryRule, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.store.packing import (
    pack_extras,
    pack_gpus,
    pack_launch,
    pack_or_none,
    pack_request,
    pack_retry,
    pack_text,
    unpack_extras,
    unpack_gpus,
    unpack_launch,
    unpack_or_none,
    unpack_request,
    unpack_retry,
    unpack_text,
)

Row = Sequence[Any]

IDENTITY_COLUMNS = ("id", "uid", "user", "submit_at")
SPEC_COLUMNS = (
    "name",
    "queue",
    "account",
    "nice",
    "time_limit_s",
    "begin_at",
    "dependency",
    "submit_hold",
    "qos",
    "deadline_at",
    "reservation",
    "request",
    "launch",
    "retry",
    "key",
    "pipeline",
    "extras",
)
STATE_COLUMNS = (
    "state",
    "queued_at",
    "eligible_at",
    "start_at",
    "end_at",
    "hold",
    "run",
    "failures",
    "requeues",
    "exit_code",
    "signal",
    "reason",
    "reason_text",
    "cancel_at",
    "preempt_at",
    "is_front",
    "suspended_at",
    "suspended_by",
    "array_id",
    "task",
    "tasks_left",
    "fallback_id",
)
JOB_COLUMNS = IDENTITY_COLUMNS + SPEC_COLUMNS + STATE_COLUMNS
RUN_COLUMNS = tuple(Run.__struct_fields__)
_SPEC_FROM, _STATE_FROM = len(IDENTITY_COLUMNS), len(IDENTITY_COLUMNS) + len(SPEC_COLUMNS)
_JOB_STATES = {state.value: state for state in JobState}
_RUN_STATES = {state.value: state for state in RunState}
_REASONS = {code.value: code for code in ReasonCode}


def spec_row(spec: JobSpec) -> tuple[Any, ...]:
    """SPEC_COLUMNS of a job."""
    return (
        pack_text(spec.name),
        pack_text(spec.queue),
        pack_text(spec.account),
        spec.nice,
        spec.time_limit_s,
        spec.begin_at,
        pack_or_none(spec.dependency),
        int(spec.hold),
        pack_text(spec.qos),
        spec.deadline_at,
        pack_or_none(spec.reservation),
        pack_request(spec.request),
        pack_launch(spec.launch),
        pack_retry(spec.retry),
        pack_or_none(spec.key),
        pack_or_none(spec.pipeline),
        pack_extras(spec),
    )


def state_row(job: Job) -> tuple[Any, ...]:
    """STATE_COLUMNS of a job."""
    return (
        job.state.value,
        job.queued_at,
        job.eligible_at,
        job.start_at,
        job.end_at,
        job.hold,
        job.run,
        job.failures,
        job.requeues,
        job.exit_code,
        job.signal,
        None if job.reason is None else job.reason.value,
        pack_or_none(job.reason_text),
        job.cancel_at,
        job.preempt_at,
        int(job.is_front),
        job.suspended_at,
        job.suspended_by,
        job.array_id,
        job.task,
        job.tasks_left,
        job.fallback_id,
    )


def job_row(job: Job, spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """JOB_COLUMNS of a job whose spec has been packed already."""
    return (job.id, job.uid, pack_text(job.user), job.submit_at, *spec, *state_row(job))


class JobReader:
    """Makes jobs of rows. What is equal becomes one object: specs, requests, retry rules, user names."""

    def __init__(self) -> None:
        self._specs: dict[Row, JobSpec] = {}
        self._requests: dict[str, Request] = {}
        self._launches: dict[str, Launch] = {}
        self._retries: dict[str, RetryRule] = {}
        self._users: dict[str, str] = {}

    def job(self, row: Row) -> Job:
        """The job of JOB_COLUMNS. Raises: KeyError, TypeError, ValueError when the row makes no sense."""
        job_id, uid, user, submit_at = row[:_SPEC_FROM]
        state, queued_at, eligible_at, start_at, end_at, hold, run, *rest = row[_STATE_FROM:]
        failures, requeues, exit_code, signal, reason, reason_text, cancel_at, *making_room = rest
        preempt_at, is_front, suspended_at, suspended_by, array_id, task, tasks_left, fallback_id = making_room
        return Job(
            id=job_id,
            uid=uid,
            user=self._users.get(user) or self._users.setdefault(user, unpack_text(user)),
            spec=self._spec(row[_SPEC_FROM:_STATE_FROM]),
            state=_JOB_STATES[state],
            submit_at=submit_at,
            queued_at=queued_at,
            eligible_at=eligible_at,
            start_at=start_at,
            end_at=end_at,
            hold=hold,
            run=run,
            failures=failures,
            requeues=requeues,
            exit_code=exit_code,
            signal=signal,
            reason=None if reason is None else _REASONS[reason],
            reason_text=unpack_or_none(reason_text),
            cancel_at=cancel_at,
            preempt_at=preempt_at,
            is_front=bool(is_front),
            suspended_at=suspended_at,
            suspended_by=suspended_by,
            array_id=array_id,
            task=task,
            tasks_left=tasks_left,
            fallback_id=fallback_id,
        )

    def _spec(self, row: Row) -> JobSpec:
        spec = self._specs.get(row)
        if spec is None:
            name, queue, account, nice, time_limit_s, begin_at, dependency, hold, *rest = row
            qos, deadline_at, reservation, request, launch, retry, key, pipeline, extras = rest
            if (request_value := self._requests.get(request)) is None:
                request_value = self._requests[request] = unpack_request(request)
            if (launch_value := self._launches.get(launch)) is None:
                launch_value = self._launches[launch] = unpack_launch(launch)
            if (retry_value := self._retries.get(retry)) is None:
                retry_value = self._retries[retry] = unpack_retry(retry)
            spec = self._specs[row] = JobSpec(
                name=unpack_text(name),
                request=request_value,
                launch=launch_value,
                retry=retry_value,
                account=unpack_text(account),
                queue=unpack_text(queue),
                nice=nice,
                time_limit_s=time_limit_s,
                begin_at=begin_at,
                dependency=unpack_or_none(dependency),
                hold=bool(hold),
                qos=unpack_text(qos),
                deadline_at=deadline_at,
                reservation=unpack_or_none(reservation),
                key=unpack_or_none(key),
                pipeline=unpack_or_none(pipeline),
                **unpack_extras(extras),
            )
        return spec


def run_row(run: Run) -> tuple[Any, ...]:
    """RUN_COLUMNS of a run."""
    return (
        run.job_id,
        run.number,
        run.state.value,
        pack_text(run.node),
        pack_text(run.boot_id),
        run.intent_at,
        pack_gpus(run.gpus),
        run.cpus,
        run.mem_mib,
        run.start_at,
        run.end_at,
        run.supervisor_pid,
        run.supervisor_start_ticks,
        run.pid,
        run.exit_code,
        run.signal,
        None if run.outcome is None else run.outcome.value,
        None if run.reason is None else run.reason.value,
        pack_or_none(run.reason_text),
        run.cpu_s,
        run.peak_mem_mib,
        run.peak_vram_mib,
        run.mean_utilisation,
        run.energy_j,
        run.suspended_s,
        pack_or_none(run.stdout_path),
        pack_or_none(run.stderr_path),
        run.idle_at,
        run.idle_step,
    )


def read_run(row: Row) -> Run:
    """The run of RUN_COLUMNS. Raises: KeyError, TypeError, ValueError when the row makes no sense."""
    parts = dict(zip(RUN_COLUMNS, row, strict=True))
    parts["state"] = _RUN_STATES[parts["state"]]
    parts["node"] = unpack_text(parts["node"])
    parts["boot_id"] = unpack_text(parts["boot_id"])
    parts["gpus"] = unpack_gpus(parts["gpus"])
    if parts["outcome"] is not None:
        parts["outcome"] = _JOB_STATES[parts["outcome"]]
    if parts["reason"] is not None:
        parts["reason"] = _REASONS[parts["reason"]]
    for name in ("reason_text", "stdout_path", "stderr_path"):
        parts[name] = unpack_or_none(parts[name])
    return Run(**parts)
