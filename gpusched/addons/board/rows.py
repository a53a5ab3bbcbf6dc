"""The rows of the board: a job or folded array, a card with its holders, a node."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from gpusched.addons.board.query import FilterTerm
from gpusched.api.render import JobContext, likely_range
from gpusched.api.visibility import Viewer
from gpusched.lifecycle import arrays
from gpusched.lifecycle.arrays import job_count
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import GpuShare, Job, Run
from gpusched.model.states import JobState
from gpusched.model.tasks import state_of_all
from gpusched.model.units import gpu_label, gpu_list, id_ranges
from gpusched.predict.calibration import Calibration
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.fairshare import AccountTree
from gpusched.scheduler.forecast import StartRange
from gpusched.scheduler.usage import capacity_of, usage_now

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

ROW_FIELDS = (
    *("id", "name", "user", "account", "queue", "qos", "state", "reason", "reason_text", "hold", "nice"),
    *("submit_at", "start_at", "end_at", "time_limit_s", "suspended_s", "suspended_at", "idle_at", "preempt_at"),
    *("cpus", "mem_mib", "exit_code", "signal", "restarts", "progress", "progress_text", "eta_at"),
)
"""Fields of a job's row that are those of GET /v1/jobs."""
MOST_PLACES = 8
"""Nodes named in the row of an array."""


@dataclass(slots=True)
class JobEntry:
    """A row before it is rendered: a job, a task, or an array with the tasks that a filter selects."""

    job: Job
    tasks: list[Job] | None = None
    """For an array: its row if it represents tasks without a row, and the tasks with one."""
    depth: int = 0
    """1 for a task below its array."""
    is_unfolded: bool = False
    alike: list[Job] | None = None
    """For a pending job without an array: itself and those that are equal to it in a table, in their order."""


def job_row(
    entry: JobEntry, ctx: JobContext, make: Callable[[Job, JobContext], dict[str, Any]], viewer: Viewer
) -> dict[str, Any]:
    """A row as the viewer may see it; `tasks` counts those of an array by state, `alike` has the ids and the number of
    equal jobs of this row; both are null for any other job."""
    job = entry.job
    row = make(job, ctx)
    row["gpus"] = job.spec.request.total_gpus
    row["depth"] = entry.depth
    row["is_open"] = entry.is_unfolded
    row["where"] = _where([ctx.run] if ctx.run is not None and ctx.run.outcome is None else [])
    row["tasks"] = None
    row["alike"] = None
    if entry.alike is not None and len(entry.alike) > 1:
        row["alike"] = [id_ranges((one.id,) for one in entry.alike), len(entry.alike)]
    if entry.tasks is None:
        return row
    tasks: Counter[str] = Counter()
    for task in entry.tasks:
        tasks[task.state.value] += job_count(task)
    running = [task for task in entry.tasks if task.state in _WITH_RUN]
    row["tasks"] = dict(tasks)
    row["state"] = state_of_all(tasks) or row["state"]
    if all(task.state.is_final for task in entry.tasks):
        # Of tasks that have ended, whether or not others of the array still run.
        row["start_at"] = min((task.start_at for task in entry.tasks if task.start_at is not None), default=None)
        row["end_at"] = max((task.end_at for task in entry.tasks if task.end_at is not None), default=None)
        row.update(reason=None, reason_text=None)
    if running:
        row["start_at"] = min((task.start_at for task in running if task.start_at is not None), default=None)
        row["where"] = _where(list(viewer.service.runs_of(running[:MOST_PLACES]).values()))
        # One figure of many would mislead.
        row.update(progress=None, progress_text=None, eta_at=None, idle_at=None)
    return row


_WITH_RUN = frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING})


def _where(runs: Sequence[Run]) -> str:
    """Nodes with the cards in use: `lab1:0,1 lab2:3`, or the names of nodes without cards."""
    cards: dict[str, set[int]] = {}
    for run in runs:
        for part in run.on_each_node:
            cards.setdefault(part.node, set()).update(share.index for share in part.gpus)
    return " ".join(f"{node}:{gpu_list(sorted(found))}" if found else node for node, found in cards.items())


def expected_json(found: StartRange | None, calibration: Calibration, now: float) -> dict[str, Any] | None:
    """Earliest and latest expected start, and the range that holds four in five; null if nothing is known."""
    if found is None or found.is_unknown:
        return None
    low_at, high_at = likely_range(found, calibration, now)
    # Whole seconds: what is recomputed every few seconds would otherwise never be the same.
    return {
        name: None if at is None else float(round(at))
        for name, at in (
            ("low_at", found.low_at),
            ("high_at", found.high_at),
            ("likely_low_at", low_at),
            ("likely_high_at", high_at),
        )
    }


def node_row(viewer: Viewer, node: NodeView) -> dict[str, Any]:
    """A node: `up`, `drained`, `unreachable`, or `down` if it has not been reached since the daemon's start."""
    scheduler = viewer.service.scheduler
    row: dict[str, Any] = {"id": node.name, "state": _node_state(node), "why": node.why_not}
    if node.is_unknown:
        return {**row, "cpus": None, "cpus_booked": None, "mem_mib": None, "mem_available_mib": None, "load": None}
    host = scheduler.cluster[node.name].host
    return {
        **row,
        "cpus": node.cpus,
        "cpus_booked": sum(held.cpus for held in scheduler.state.holds.values() if held.node == node.name),
        "mem_mib": node.mem_mib,
        "mem_available_mib": host.mem_available_mib,
        "load": None if host.cpu_fraction is None else round(host.cpu_fraction, 2),
        "gpu_error": node.gpu_error,
    }


def _node_state(node: NodeView) -> str:
    if node.is_unknown:
        return "down"
    if node.is_unreachable:
        return "unreachable"
    return "drained" if node.why_not else "up"


def card_row(
    viewer: Viewer, node: NodeView, card: GpuView, held: Sequence[tuple[Run, GpuShare]], now: float
) -> dict[str, Any]:
    """A card, its last reading, the jobs that hold it, and the processes on it that belong to no job there.

    A reading that is missing is null, never zero; `others` counts holders that are hidden from the viewer.
    """
    service = viewer.service
    scheduler = service.scheduler
    status = scheduler.cluster.status(card.uuid, [share for _, share in held], now)
    sample = status.sample
    jobs, others = [], 0
    for run, share in held:
        job = scheduler.state.jobs[run.job_id]
        if not viewer.sees(job):
            others += 1
            continue
        jobs.append(
            {
                "id": job.shown_id,
                "user": job.user,
                "name": viewer.name_of(job),
                "start_at": run.start_at,
                "idle_at": run.idle_at,
                "vram_mib": share.vram_mib,
                "fraction": share.fraction,
                "is_ending": run.outcome is not None,
            }
        )
    return {
        "id": card.uuid,
        "node": node.name,
        "index": card.index,
        "label": gpu_label(card.index),
        "name": card.name,
        "state": status.state,
        "why": status.why,
        "mig_parent": card.mig_parent,
        "mig_profile": card.mig_profile,
        "vram_total_mib": card.vram_total_mib if sample is None else sample.vram_total_mib,
        "vram_used_mib": None if sample is None else sample.vram_used_mib,
        "utilisation": None if sample is None else sample.utilisation,
        "temperature_c": None if sample is None else sample.temperature_c,
        "power_w": None if sample is None else sample.power_w,
        "jobs": jobs,
        "others": others,
        "foreign": [
            {
                "pid": process.pid,
                "user": process.user,
                "name": process.name,
                "vram_mib": process.vram_mib,
                "job": viewer.job_of(process.run),
            }
            for process in status.intruders
        ],
    }


def fair_shares(scheduler: Scheduler) -> dict[tuple[str, str], float | None]:
    """Fair-share factors in (0, 1] by account and user."""
    snapshot = scheduler.snapshot(scheduler.now())
    layout = ClusterLayout(snapshot.nodes, scheduler.settings)
    usage, members = usage_now(snapshot, layout, scheduler.settings), scheduler.state.census.members
    tree = AccountTree(scheduler.settings.account, usage, capacity_of(layout), members)
    return {(one.account, one.user): one.factor for one in tree.shares() if one.user is not None}


def planning_id(job: Job) -> int:
    """The id under which a pending job is planned; for an array, that of its next task."""
    if not job.is_array:
        return job.id
    left = arrays.tasks_left(job)
    return arrays.task_id(job, left.at(0)) if left else job.id


def matcher(term: FilterTerm) -> Callable[[str], bool]:
    """Whether a text in lower case matches a term; words on their own match anywhere."""
    whole = [translate(word if term.key is not None else f"*{word}*") for word in term.patterns]
    pattern = re.compile("|".join(f"(?:{one})" for one in whole))
    return lambda text: pattern.match(text) is not None


def _running_since(row: JobEntry) -> float:
    job = row.job
    return job.end_at or job.start_at or job.submit_at


SORT_VALUES: dict[str, Callable[[JobEntry], Any]] = {
    "id": lambda row: row.job.id,
    "user": lambda row: (row.job.user, row.job.id),
    "state": lambda row: (row.job.state.value, row.job.id),
    "gpus": lambda row: (-row.job.spec.request.total_gpus, row.job.id),
    "time": lambda row: (_running_since(row), row.job.id),
}
