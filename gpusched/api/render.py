"""The JSON that scripts rely on, from the daemon's values. Unknown is null; times are epoch seconds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from gpusched.lifecycle.arrays import swept
from gpusched.lifecycle.dependencies import as_typed, parse_dependency
from gpusched.lifecycle.output_paths import input_path, output_paths
from gpusched.lifecycle.overuse import Intruder
from gpusched.model.bundles import totals
from gpusched.model.cluster import ShareFacts
from gpusched.model.hostlist import fold
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Run, Variant
from gpusched.model.layout import count_tasks
from gpusched.model.progress import ShownProgress
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Reason
from gpusched.model.states import JobState
from gpusched.model.variants import gpu_request, gpu_requests, names_of
from gpusched.ports.daemon import Forecast, RunFindings
from gpusched.predict.calibration import Calibration
from gpusched.predict.predictor import PredictionError
from gpusched.scheduler.forecast import Accuracy, StartRange
from gpusched.scheduler.whatif import Alternative

if TYPE_CHECKING:
    from gpusched.daemon.facade import DaemonFacade

SCHEMA_VERSION = 1
_NOTHING_FOUND = RunFindings()


def document(**content: Any) -> dict[str, Any]:
    """A JSON document with the schema version first."""
    return {"schema_version": SCHEMA_VERSION, **content}


_write = msgspec.json.Encoder().encode


def encode(value: object) -> bytes:
    """ASCII JSON without spaces, as written by `json.dumps` but in a tenth of the time.

    A `msgspec.Raw`, in a list or as a value of its dicts, is written as it is.
    """
    try:
        text = _write(value)
        if text.isascii() and b"\x7f" not in text:  # DEL, which `json.dumps` escapes
            return text
    except (UnicodeEncodeError, OverflowError):
        pass  # lone surrogates (bytes that are not UTF-8), and numbers of more than 64 bits
    return _slowly(value)


def _slowly(value: object) -> bytes:
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, dict) and any(isinstance(one, msgspec.Raw) for one in value.values()):
        return b"{" + b",".join(_slowly(name) + b":" + _slowly(one) for name, one in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(_slowly, value)) + b"]"
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(slots=True)
class JobContext:
    """Input of a job's JSON beyond its row. Not frozen, since a list creates thousands."""

    settings: Settings
    node: str
    run: Run | None
    """The current or last run, if known without one query per job."""
    reason: Reason | None
    """Why a pending job is waiting, or why nothing is known of a running one."""
    priority: Callable[[Job], tuple[float, dict[str, float]]]
    """Priority of a pending job, and the weighted factors it is the sum of."""
    progress: ShownProgress | None = None
    """Progress of its run, if reported by the job and already read."""
    findings: RunFindings = _NOTHING_FOUND
    """Findings about its open run."""
    name_of_run: Callable[[str], str] = str
    """The displayed id of a run's job, by the run's handle."""
    fallback_of: str | None = None
    """For a fallback, the displayed id of the failed job."""
    paths: tuple[str, str | None] | None = None
    """Paths of its output and errors, once they were computed."""


JobFacts = Callable[[Job], JobContext]


def _gpus(run: Run, job: Job, ctx: JobContext) -> list[dict[str, Any]]:
    facts = ctx.findings.shares
    return [_gpu(part.node, share, facts.get(share.uuid)) for part in run.on_each_node for share in part.gpus]


def _gpu(node: str, share: GpuShare, facts: ShareFacts | None) -> dict[str, Any]:
    return {
        "node": node,
        "uuid": share.uuid,
        "index": share.index,
        "vram_mib": share.vram_mib,
        "fraction": share.fraction,
        "vram_used_mib": facts.used_mib if facts else None,
        "enforcement": facts.enforcement if facts else None,
        "enforcement_why": facts.enforcement_why if facts else None,
    }


def _intruder(one: Intruder, ctx: JobContext) -> dict[str, Any]:
    process = one.process
    return {
        "uuid": one.uuid,
        "index": one.index,
        "pid": process.pid,
        "user": process.user,
        "name": process.name,
        "vram_mib": one.vram_mib,
        "job": None if one.run is None else ctx.name_of_run(one.run),
    }


def _reason(job: Job, ctx: JobContext) -> str | None:
    if ctx.reason is not None:
        return str(ctx.reason.code)
    return None if job.reason is None else str(job.reason)


def _reason_text(job: Job, ctx: JobContext) -> str | None:
    return job.reason_text if ctx.reason is None else ctx.reason.text


def _path(job: Job, ctx: JobContext, which: int) -> str | None:
    paths = ctx.paths
    if paths is None:
        paths = ctx.paths = output_paths(job, max(1, job.run), ctx.node, ctx.settings.default.output)
    return paths[which] if paths[which] is not None else paths[0]


def command_line(job: Job) -> str:
    """The command in one line, in a form that can be typed."""
    launch = job.spec.launch
    words = list(launch.argv)
    if launch.script_sha is not None:
        words.insert(0, launch.script_name or "script")
    elif launch.script_name in ("batch", "fallback") and len(words) == 3:
        return words[2]
    return shlex.join(words)


def _priority(job: Job, ctx: JobContext) -> float | None:
    """Now while it waits, and afterwards the one with which its run was started."""
    if job.state is JobState.PENDING:
        return ctx.priority(job)[0]
    return None if ctx.run is None else ctx.run.priority


def _of_layout(name: str) -> Callable[[Job, JobContext], Any]:
    """An amount for tasks as asked for; null if nothing was said about it."""

    def read(job: Job, ctx: JobContext) -> Any:
        return None if job.spec.layout is None else getattr(job.spec.layout, name)

    return read


def _variants(spec: JobSpec) -> list[dict[str, Any]]:
    return [_variant(name, one) for name, one in zip(names_of(spec), spec.variants, strict=True)]


def _variant(name: str, one: Variant) -> dict[str, Any]:
    request = one.request
    return {
        "name": name,
        "gpu_request": gpu_request(request),
        "gpu_type": request.gpu_type,
        "gpus_per_node": request.gpus,
        "nodes": request.nodes,
        "cpus": request.cpus,
        "mem_mib": request.mem_mib,
        "constraint": request.constraint,
        "nodelist": request.nodelist,
        "time_limit_s": one.time_limit_s,
        "time_limit_source": one.time_limit_source or (None if one.time_limit_s is None else "user"),
    }


def _sweep(job: Job) -> dict[str, str] | None:
    array = job.spec.array
    if array is None or not array.sweep or job.task is None:
        return None
    return swept(array, job.task)


def _depends_on(job: Job) -> list[str]:
    if not job.spec.dependency:
        return []
    conditions = parse_dependency(job.spec.dependency).conditions
    by_id = {one.job_id: one.shown_id for one in conditions if one.job_id}
    return [by_id[job_id] for job_id in sorted(by_id)]


PROGRESS_FIELDS = frozenset({"progress", "progress_text", "eta_at"})
"""Keys that require reading files of jobs."""


@dataclass(frozen=True, slots=True)
class RunField:
    """A key read from the current or last run."""

    make: Callable[[Run, Job, JobContext], Any]
    without: Any = None
    """Its value for a job without a run."""


Source: TypeAlias = "str | RunField | Callable[[Job, JobContext], Any]"
"""Where a key comes from: the name of an attribute, or a function."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """A key of a job's JSON. `public` and `masked` make one: a new key has to decide."""

    source: Source
    is_public: bool
    mask: Any = None
    """Shown in its place to users without rights over the job."""


def public(source: Source) -> JobKey:
    """A key for everybody: resources held or requested, by whom, since and until when; and the name."""
    return JobKey(source, is_public=True)


def masked(source: Source, mask: Any = None) -> JobKey:
    """A key for those with rights over the job."""
    return JobKey(source, is_public=False, mask=mask)


JOB_FIELDS: dict[str, JobKey] = {
    "id": public("shown_id"),
    "job_id": public("id"),
    "array_id": public(lambda job, ctx: str(job.array_id or job.id) if job.spec.array is not None else None),
    "task": public("task"),
    "array_tasks": public(lambda job, ctx: None if job.spec.array is None else job.spec.array.tasks),
    "tasks_left": public("tasks_left"),
    "throttle": public(lambda job, ctx: None if job.spec.array is None else job.spec.array.throttle),
    "sweep": masked(lambda job, ctx: _sweep(job)),
    "name": public("spec.name"),
    "user": public("user"),
    "uid": public("uid"),
    "account": public("spec.shown_account"),
    "charged_account": public("spec.account"),
    "queue": public("spec.queue"),
    "qos": public(lambda job, ctx: job.spec.shown_qos or None),
    "state": public("state.value"),
    "reason": public(_reason),
    "reason_text": masked(_reason_text),
    "cancelled_by": masked("cancelled_by"),
    "priority": public(lambda job, ctx: _priority(job, ctx)),
    "priority_parts": masked(lambda job, ctx: ctx.priority(job)[1] if job.state is JobState.PENDING else None),
    "nice": public("spec.nice"),
    "hold": public("hold"),
    "dependency": masked(lambda job, ctx: as_typed(job.spec.dependency)),
    "never_satisfied": public("spec.never_satisfied"),
    "depends_on": masked(lambda job, ctx: _depends_on(job), []),
    "pipeline": masked("spec.pipeline"),
    "step": masked("spec.step"),
    "reservation": public("spec.reservation"),
    "deadline_at": public("spec.deadline_at"),
    "key": masked("spec.key"),
    "snapshot": masked("spec.snapshot"),
    "submit_at": public("submit_at"),
    "begin_at": public("spec.begin_at"),
    "eligible_at": public("eligible_at"),
    "start_at": public("start_at"),
    "end_at": public("end_at"),
    "preempt_at": public("preempt_at"),
    "suspended_at": public("suspended_at"),
    "suspended_s": public(RunField(lambda run, job, ctx: run.suspended_s, 0.0)),
    "time_limit_s": public("spec.time_limit_s"),
    "time_limit_source": public("spec.limit_source"),
    "exit_code": public("exit_code"),
    "signal": public("signal"),
    "node": public(RunField(lambda run, job, ctx: node_names(run))),
    "native_id": public(RunField(lambda run, job, ctx: None if run.native is None else run.native.id)),
    "gpus": public(RunField(_gpus, [])),
    "gpu_request": public(lambda job, ctx: gpu_requests(job.spec, is_pending=job.state is JobState.PENDING)),
    "variants": public(lambda job, ctx: _variants(job.spec) if job.spec.variants else []),
    "gpu_type": public("spec.request.gpu_type"),
    "gpu_fraction": public("spec.request.card_fraction"),
    "vram_mib": public("spec.request.vram_mib"),
    "cpus": public("spec.request.cpus"),
    "mem_mib": public("spec.request.mem_mib"),
    "num_tasks": public(
        lambda job, ctx: count_tasks(
            job.spec.request, job.spec.layout, len(ctx.run.nodes) if job.spec.request.bundles and ctx.run else None
        )
    ),
    "ntasks": public(_of_layout("ntasks")),
    "ntasks_per_node": public(_of_layout("ntasks_per_node")),
    "ntasks_per_gpu": public(_of_layout("ntasks_per_gpu")),
    "cpus_per_task": public(_of_layout("cpus_per_task")),
    "cpus_per_gpu": public(_of_layout("cpus_per_gpu")),
    "gpus_per_task": public(_of_layout("gpus_per_task")),
    "mem_per_cpu_mib": public(_of_layout("mem_per_cpu_mib")),
    "mem_per_gpu_mib": public(_of_layout("mem_per_gpu_mib")),
    "idle_at": public(RunField(lambda run, job, ctx: run.idle_at if job.state is JobState.RUNNING else None)),
    "vram_over": masked(RunField(lambda run, job, ctx: ctx.findings.vram_over)),
    "unbooked_gpus": public(
        RunField(
            lambda run, job, ctx: [
                {"uuid": one.uuid, "index": one.index, "vram_mib": one.vram_mib} for one in ctx.findings.unbooked
            ],
            [],
        )
    ),
    "intruders": masked(
        RunField(lambda run, job, ctx: [_intruder(one, ctx) for one in ctx.findings.intruders], []), []
    ),
    "nodes": public("spec.request.nodes"),
    "nodes_max": public(lambda job, ctx: _most_nodes(job, ctx)),
    "gpus_per_node": public("spec.request.gpus"),
    "total_gpus": public("spec.request.total_gpus"),
    "total_cpus": public(lambda job, ctx: _total(job, ctx, 0)),
    "total_mem_mib": public(lambda job, ctx: _total(job, ctx, 1)),
    "gpus_linked": public("spec.request.is_linked"),
    "nodelist": public("spec.request.nodelist"),
    "exclude": public("spec.request.exclude"),
    "constraint": public("spec.request.constraint"),
    "prefer": public("spec.request.prefer"),
    "near": masked("spec.request.near", []),
    "exclusive": public("spec.request.is_exclusive"),
    "licenses": public(lambda job, ctx: dict(job.spec.request.licenses)),
    "resources": public(lambda job, ctx: dict(job.spec.request.resources)),
    "work_dir": masked("spec.launch.work_dir", "-"),
    "submit_dir": masked(lambda job, ctx: job.spec.launch.submit_dir or job.spec.launch.work_dir, "-"),
    "stdin_path": masked(lambda job, ctx: input_path(job, ctx.node)),
    "stdout_path": masked(lambda job, ctx: _path(job, ctx, 0)),
    "stderr_path": masked(lambda job, ctx: _path(job, ctx, 1)),
    "open_mode": masked("spec.launch.open_mode"),
    "command": masked(lambda job, ctx: command_line(job), "-"),
    "script_path": masked("spec.launch.script_path"),
    "submit_line": masked("spec.launch.submit_line"),
    "comment": masked("spec.comment"),
    "wckey": masked("spec.wckey"),
    "is_foreground": public(lambda job, ctx: job.spec.interactive is not None),
    "is_batch": public(lambda job, ctx: job.spec.interactive is None and not job.spec.launch.only_holds),
    "notify": masked(lambda job, ctx: [] if job.spec.alerting is None else list(job.spec.alerting.on), []),
    "notify_to": masked(lambda job, ctx: [] if job.spec.alerting is None else list(job.spec.alerting.targets), []),
    "run": public("run"),
    "progress": masked(lambda job, ctx: ctx.progress.fraction if ctx.progress else None),
    "progress_text": masked(lambda job, ctx: ctx.progress.text if ctx.progress else None),
    "eta_at": masked(lambda job, ctx: ctx.progress.eta_at if ctx.progress else None),
    "restarts": public("restarts"),
    "requeue": public("spec.retry.requeue"),
    "retries": public("spec.retry.retries"),
    "failures": public("failures"),
    "fallback": masked("spec.fallback"),
    "fallback_id": masked(lambda job, ctx: None if job.fallback_id is None else str(job.fallback_id)),
    "fallback_of": masked(lambda job, ctx: ctx.fallback_of),
}
"""Every key of a job's JSON; `fields=` selects from these."""


def _most_nodes(job: Job, ctx: JobContext) -> int | None:
    """The upper end of a range of nodes, until it is known how many they are."""
    bundles = job.spec.request.bundles
    is_range = bundles is not None and bundles.nodes_max > job.spec.request.nodes and ctx.run is None
    return bundles.nodes_max if bundles is not None and is_range else None


def _total(job: Job, ctx: JobContext, place: int) -> float:
    """Cores, or MiB of memory, on all nodes together."""
    request, run = job.spec.request, ctx.run
    if request.bundles is None or run is None or run.native is not None:
        cpus, mem_mib = totals(request)
        return (cpus, int(mem_mib))[place]
    return (run.cpus, run.mem_mib)[place]


def node_names(run: Run) -> str:
    """Nodes of a run as a hostlist; of one that was handed over those that its scheduler chose, once it runs."""
    return fold(run.nodes) if run.native is None else run.native.nodes or run.node


def run_json(run: Run) -> dict[str, Any]:
    """One attempt as gshow lists it."""
    return {
        "run": run.number,
        "state": run.state.value,
        "node": node_names(run),
        "native_id": None if run.native is None else run.native.id,
        "gpus": [
            {
                "node": part.node,
                "uuid": share.uuid,
                "index": share.index,
                "vram_mib": share.vram_mib,
                "fraction": share.fraction,
            }
            for part in run.on_each_node
            for share in part.gpus
        ],
        "cpus": run.cpus,
        "mem_mib": run.mem_mib,
        "start_at": run.start_at,
        "end_at": run.end_at,
        "pid": run.pid,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "outcome": None if run.outcome is None else run.outcome.value,
        "reason": None if run.reason is None else run.reason.value,
        "reason_text": run.reason_text,
        "cpu_s": run.cpu_s,
        "system_cpu_s": run.system_cpu_s,
        "peak_mem_mib": run.peak_mem_mib,
        "peak_vram_mib": run.peak_vram_mib,
        "mean_utilisation": run.mean_utilisation,
        "energy_j": run.energy_j,
        "power_cap_w": run.power_cap_w,
        "is_filler": run.is_filler,
        "measured": None if run.measured is None else plain(run.measured),
        "suspended_s": run.suspended_s,
        "idle_at": run.idle_at,
        "stdout_path": run.stdout_path,
        "stderr_path": run.stderr_path,
    }


def event_json(event: JobEvent) -> dict[str, Any]:
    return {"at": event.at, "kind": event.kind, "text": event.text, "run": event.run}


def plain(value: Any) -> Any:
    """A value of the model, or a dataclass by its fields, as JSON."""
    return msgspec.to_builtins(value, str_keys=True)


def forecast_json(found: Forecast) -> dict[str, Any]:
    """The answer to a dry run."""
    return {**plain(found), "alternatives": [alternative_json(one) for one in found.alternatives]}


def range_json(found: StartRange, calibration: Calibration, now: float) -> dict[str, Any] | None:
    """Earliest and latest start, and the range that holds four in five starts; null if nothing is known."""
    if found.is_unknown:
        return None
    low_at, high_at = likely_range(found, calibration, now)
    return {"low_at": found.low_at, "high_at": found.high_at, "likely_low_at": low_at, "likely_high_at": high_at}


def likely_range(found: StartRange, calibration: Calibration, now: float) -> tuple[float | None, float | None]:
    """The range that holds four in five starts of such jobs; None twice if too few have started."""
    told_at = found.low_at if found.high_at is None else found.high_at
    likely = calibration.usual if found.high_at is None else calibration.likely
    if likely is None or told_at is None or told_at <= now:
        return None, None
    return likely.range(now, told_at)


def alternative_json(one: Alternative) -> dict[str, Any]:
    return {
        "change": plain(one.change),
        "text": one.text,
        "option": one.option,
        "update": one.update,
        "starts": "now" if one.is_now else one.starts_at,
    }


def expected_json(job: Job, daemon: DaemonFacade, *, is_whole: bool) -> dict[str, Any] | None:
    """Expected run time of a pending job, its basis, and the accuracy of its user's limits; null for other jobs.

    Args: is_whole: include everything; otherwise the run time only.
    """
    if job.state is not JobState.PENDING:
        return None
    limit_s, found = job.spec.time_limit_s, daemon.expectation(job)
    if not is_whole:
        return {"length_s": found.length_s}
    said = prediction_json(daemon.scheduler.history.measure(job.user), daemon.scheduler.settings)
    is_stated = limit_s is not None and not job.spec.time_limit_source
    return {**plain(found), "user": job.user, "time_limit_s": limit_s, "is_stated": is_stated, "predictions": said}


def prediction_json(found: PredictionError, settings: Settings) -> dict[str, Any]:
    """Accuracy of predicted run times and of users' limits, and which of them the scheduler plans with."""
    return {**plain(found), "is_used": settings.priority.predict and found.is_better}


def accuracy_json(found: Accuracy | None, calibration: Calibration) -> dict[str, Any] | None:
    """Accuracy of predictions, and the share of four-in-five ranges that held; null if none can be judged."""
    if found is None:
        return None
    return {**plain(found), "likely_count": calibration.judged, "likely_inside": calibration.share}
