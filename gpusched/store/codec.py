"""How jobs, runs and their parts become columns, and how they come back.

Texts may hold lone surrogates for bytes that are not UTF-8 (`os.fsdecode`), which SQLite's TEXT cannot
hold: such a text is stored as a JSON string. A high surrogate that is followed by a low one reads back
as the character they stand for; `os.fsdecode` never makes one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from json import JSONEncoder, loads
from operator import attrgetter
from typing import Any

from gpusched.model.alerts import Alert
from gpusched.model.calendar import CalendarEntry, Estimate
from gpusched.model.job import (
    Alerting,
    ArraySpec,
    ClientProcess,
    GpuShare,
    Interactive,
    Job,
    JobEvent,
    JobSpec,
    Launch,
    Notice,
    Request,
    RetryRule,
    Run,
)
from gpusched.model.pipeline import Pipeline
from gpusched.model.resources import Resources
from gpusched.model.snapshot import Placement, Usage
from gpusched.model.states import JobState, ReasonCode, RunState

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
RUN_COLUMNS = tuple(Run.__dataclass_fields__)
USAGE_COLUMNS = ("account", "user", "gpu_s", "vram_mib_s", "cpu_s", "mem_mib_s", "at")
RESERVATION_COLUMNS = (
    "name",
    "start_at",
    "duration_s",
    "every_s",
    "until_at",
    "held",
    "users",
    "accounts",
    "made_by",
    "made_at",
)
ESTIMATE_COLUMNS = tuple(Estimate.__dataclass_fields__)
PIPELINE_COLUMNS = tuple(Pipeline.__dataclass_fields__)
ALERT_COLUMNS = tuple(Alert.__dataclass_fields__)
EVENT_COLUMNS = ("job_id", "at", "kind", "text", "run")

_SPEC_FROM, _STATE_FROM = len(IDENTITY_COLUMNS), len(IDENTITY_COLUMNS) + len(SPEC_COLUMNS)
_JOB_STATES = {state.value: state for state in JobState}
_RUN_STATES = {state.value: state for state in RunState}
_REASONS = {code.value: code for code in ReasonCode}


# --- texts and documents ------------------------------------------------------------------------

_needs_quoting = re.compile('\\A"|[\0\ud800-\udfff]').search


def pack_text(text: str) -> str:
    """A text as TEXT can hold it: itself nearly always, else a JSON string."""
    return _ENCODER.encode(text) if _needs_quoting(text) else text


def unpack_text(stored: str) -> str:
    """The text that was packed."""
    return str(loads(stored)) if stored.startswith('"') else stored


def _pack_or_none(text: str | None) -> str | None:
    return None if text is None else pack_text(text)


def _unpack_or_none(stored: str | None) -> str | None:
    return None if stored is None else unpack_text(stored)


_DOCUMENTS = (Request, RetryRule, Launch, Notice, GpuShare, Placement, ArraySpec, Alerting, Interactive, ClientProcess)
_PARTS = {kind: tuple(kind.__dataclass_fields__) for kind in _DOCUMENTS}
_GETTERS = {kind: attrgetter(*names) for kind, names in _PARTS.items()}


def _plain(value: object) -> dict[str, Any]:
    """One of the small values as a document with every field, so that a later default changes no old job."""
    kind: Any = type(value)
    return dict(zip(_PARTS[kind], _GETTERS[kind](value), strict=True))


_ENCODER = JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_plain)

# Thousands of jobs share these, equal or even the same object, so each is written out once.
pack_request = lru_cache(maxsize=1024)(_ENCODER.encode)
pack_retry = lru_cache(maxsize=256)(_ENCODER.encode)
pack_launch = lru_cache(maxsize=64)(_ENCODER.encode)
pack_gpus = lru_cache(maxsize=256)(_ENCODER.encode)


def unpack_request(stored: str) -> Request:
    """Raises: TypeError, ValueError when it is no request."""
    parts = loads(stored)
    for name in _REQUEST_LISTS & parts.keys():
        parts[name] = tuple(parts[name])
    for name in _REQUEST_COUNTS & parts.keys():
        parts[name] = _counts(parts[name])
    return Request(**parts)


_REQUEST_LISTS = {"nodelist", "exclude"}
_REQUEST_COUNTS = {"licenses", "resources"}


def _counts(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, count) for name, count in pairs)


EXTRAS = (
    "array",
    "fallback",
    "alerting",
    "interactive",
    "snapshot",
    "step",
    "ignore_idle",
    "never_satisfied",
    "fallback_of",
)
"""Parts of a spec that few jobs have."""
_extras_of = attrgetter(*EXTRAS)
_NO_EXTRAS = tuple(JobSpec.__dataclass_fields__[name].default for name in EXTRAS)


def pack_extras(spec: JobSpec) -> str:
    """What is not the default among the parts that few jobs have."""
    values = _extras_of(spec)
    if values == _NO_EXTRAS:
        return "{}"
    given = zip(EXTRAS, values, _NO_EXTRAS, strict=True)
    return _ENCODER.encode({name: value for name, value, default in given if value != default})


def unpack_extras(stored: str) -> dict[str, Any]:
    """Parts of a spec by name. Raises: KeyError, TypeError, ValueError when they make no sense."""
    if stored == "{}":
        return {}
    parts: dict[str, Any] = loads(stored)
    unknown = parts.keys() - set(EXTRAS)
    if unknown:
        raise KeyError(min(unknown))
    if (array := parts.get("array")) is not None:
        array["sweep"] = tuple((name, tuple(values)) for name, values in array["sweep"])
        parts["array"] = ArraySpec(**array)
    if (alerting := parts.get("alerting")) is not None:
        parts["alerting"] = Alerting(**{name: tuple(words) for name, words in alerting.items()})
    if (interactive := parts.get("interactive")) is not None:
        if (client := interactive.get("client")) is not None:
            interactive["client"] = ClientProcess(**client)
        parts["interactive"] = Interactive(**interactive)
    return parts


def unpack_retry(stored: str) -> RetryRule:
    """Raises: KeyError, TypeError, ValueError when it is no retry rule."""
    parts = loads(stored)
    parts["retry_on"] = tuple(parts["retry_on"])
    return RetryRule(**parts)


def unpack_launch(stored: str) -> Launch:
    """Raises: KeyError, TypeError, ValueError when it is no launch."""
    parts = loads(stored)
    parts["argv"] = tuple(parts["argv"])
    if parts["notice"] is not None:
        parts["notice"] = Notice(**parts["notice"])
    return Launch(**parts)


@lru_cache(maxsize=256)
def unpack_gpus(stored: str) -> tuple[GpuShare, ...]:
    """Raises: TypeError, ValueError when it is no list of bookings."""
    return tuple(GpuShare(**share) for share in loads(stored))


# --- rows ---------------------------------------------------------------------------------------


def spec_row(spec: JobSpec) -> tuple[Any, ...]:
    """SPEC_COLUMNS of a job."""
    return (
        pack_text(spec.name),
        pack_text(spec.queue),
        pack_text(spec.account),
        spec.nice,
        spec.time_limit_s,
        spec.begin_at,
        _pack_or_none(spec.dependency),
        int(spec.hold),
        pack_text(spec.qos),
        spec.deadline_at,
        _pack_or_none(spec.reservation),
        pack_request(spec.request),
        pack_launch(spec.launch),
        pack_retry(spec.retry),
        _pack_or_none(spec.key),
        _pack_or_none(spec.pipeline),
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
        _pack_or_none(job.reason_text),
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
            reason_text=_unpack_or_none(reason_text),
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
                dependency=_unpack_or_none(dependency),
                hold=bool(hold),
                qos=unpack_text(qos),
                deadline_at=deadline_at,
                reservation=_unpack_or_none(reservation),
                key=_unpack_or_none(key),
                pipeline=_unpack_or_none(pipeline),
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
        _pack_or_none(run.reason_text),
        run.cpu_s,
        run.peak_mem_mib,
        run.peak_vram_mib,
        run.mean_utilisation,
        run.energy_j,
        run.suspended_s,
        _pack_or_none(run.stdout_path),
        _pack_or_none(run.stderr_path),
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
        parts[name] = _unpack_or_none(parts[name])
    return Run(**parts)


def usage_row(usage: Usage) -> tuple[Any, ...]:
    """USAGE_COLUMNS of what a user has used."""
    used = usage.used
    amounts = (used.gpus, used.vram_mib, used.cpus, used.mem_mib)
    return (pack_text(usage.account), pack_text(usage.user), *amounts, usage.at)


def read_usage(row: Row) -> Usage:
    """The usage of USAGE_COLUMNS."""
    account, user, *amounts, at = row
    return Usage(unpack_text(account), unpack_text(user), Resources(*amounts), at)


def reservation_row(entry: CalendarEntry) -> tuple[Any, ...]:
    """RESERVATION_COLUMNS of an entry of the calendar."""
    return (
        pack_text(entry.name),
        entry.start_at,
        entry.duration_s,
        entry.every_s,
        entry.until_at,
        _ENCODER.encode(entry.held),
        _ENCODER.encode(entry.users),
        _ENCODER.encode(entry.accounts),
        pack_text(entry.made_by),
        entry.made_at,
    )


def read_reservation(row: Row) -> CalendarEntry:
    """The entry of RESERVATION_COLUMNS. Raises: KeyError, TypeError, ValueError when the row makes no sense."""
    name, start_at, duration_s, every_s, until_at, held, users, accounts, made_by, made_at = row
    return CalendarEntry(
        name=unpack_text(name),
        start_at=start_at,
        duration_s=duration_s,
        held=tuple(map(_placement, loads(held))),
        users=tuple(loads(users)),
        accounts=tuple(loads(accounts)),
        every_s=every_s,
        until_at=until_at,
        made_by=unpack_text(made_by),
        made_at=made_at,
    )


def _placement(parts: dict[str, Any]) -> Placement:
    parts["gpus"] = tuple(GpuShare(**share) for share in parts["gpus"])
    parts["others"] = tuple(map(_placement, parts["others"]))
    parts["resources"], parts["licenses"] = _counts(parts["resources"]), _counts(parts["licenses"])
    return Placement(**parts)


def estimate_row(estimate: Estimate) -> tuple[Any, ...]:
    """ESTIMATE_COLUMNS of an estimate."""
    return (estimate.job_id, estimate.made_at, estimate.low_at, estimate.high_at, estimate.start_at)


def read_estimate(row: Row) -> Estimate:
    """The estimate of ESTIMATE_COLUMNS."""
    return Estimate(*row)


def pipeline_row(pipeline: Pipeline) -> tuple[Any, ...]:
    """PIPELINE_COLUMNS of a pipeline."""
    user, name, source = map(pack_text, (pipeline.user, pipeline.name, pipeline.source))
    return (pipeline.number, pipeline.uid, user, name, pipeline.submit_at, source)


def read_pipeline(row: Row) -> Pipeline:
    """The pipeline of PIPELINE_COLUMNS."""
    number, uid, user, name, submit_at, source = row
    return Pipeline(number, uid, unpack_text(user), unpack_text(name), submit_at, unpack_text(source))


def alert_row(alert: Alert) -> tuple[Any, ...]:
    """ALERT_COLUMNS of a row of the outbox."""
    parts = {name: getattr(alert, name) for name in ALERT_COLUMNS}
    parts["key"] = pack_text(alert.key)
    for name in _ALERT_LISTS:
        parts[name] = _ENCODER.encode(parts[name])
    return tuple(parts.values())


def read_alert(row: Row) -> Alert:
    """The alert of ALERT_COLUMNS. Raises: KeyError, TypeError, ValueError when the row makes no sense."""
    parts = dict(zip(ALERT_COLUMNS, row, strict=True))
    parts["key"] = unpack_text(parts["key"])
    for name in _ALERT_LISTS:
        parts[name] = tuple(loads(parts[name]))
    parts["facts"] = tuple((name, value) for name, value in parts["facts"])
    return Alert(**parts)


_ALERT_LISTS = ("counts_as", "facts", "targets", "settled")


def event_row(event: JobEvent) -> tuple[Any, ...]:
    """EVENT_COLUMNS of a line of a story."""
    return (event.job_id, event.at, event.kind, pack_text(event.text), event.run)


def read_event(row: Row) -> JobEvent:
    """The line of EVENT_COLUMNS."""
    job_id, at, kind, text, run = row
    return JobEvent(job_id, at, kind, unpack_text(text), run)
