"""Events that alerts are about, and the facts for message templates; listed in `docs/reference/alerts.md`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "begin": "a run of the job has started",
        "end": "the job has ended, successfully or not",
        "fail": "the job has failed and will not be retried",
        "retry": "a run failed or was lost, and the job is retried",
        "preempt": "a run of the job was preempted or requeued by hand",
        "time_limit_80": "a run has used 80 % of its time limit",
        "held": "the job is held because its runs hit the same GPU fault repeatedly",
        "pending": "the job has been pending for `[alert] pending_s` since it became eligible",
        "gpu_idle": "the GPUs of a run are idle",
        "efficiency": "the job has ended and had held its GPUs, or a time limit, for little",
        "vram_over": "a run holds more of a shared GPU's memory than it booked",
        "gpu_unbooked": "a run uses a GPU it did not book",
        "gpu_intruder": "a foreign process, or a job that did not book it, uses a GPU of a run",
        "node_unreachable": "a node of a run has not answered for `[alert] unreachable_s`",
        "queue_empty": "all your jobs have ended",
    }
)
"""Job events for --notify, with their meanings."""

OWNER_EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "gpu_foreign": "a process of yours outside any job uses a GPU that pending jobs need",
        "budget": "a budget of yours, or of an account of yours, has reached a mark of `[budget] alert_at`",
    }
)
"""Events sent to users of the machine even without a request, see `[foreign]` and `[budget]`."""

ADMIN_EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "gpu_lost": "a GPU, or the driver for all of them, no longer answers",
        "mig_failed": "a MIG layout that was set by command could not be made",
        "gpu_suspect": "a GPU is suspect and gets no jobs",
        "gpu_drained": "a GPU or a node was drained",
        "node_down": "a node has not answered for `[alert] unreachable_s`",
        "node_full": "a node starts nothing: its spool has no room or is read-only",
        "job_held": "jobs were held because their runs hit the same GPU fault repeatedly",
        "daemon_restarted": "the daemon has restarted with an existing job table",
        "database": "the job table cannot be written",
        "foreign_ended": "a foreign process was killed for pending jobs, as set in `[foreign]`",
    }
)
"""Events sent to the users in `[alert] admin`."""

EACH_TASK = "array_tasks"
"""A modifier, not an event: alert for each array task, not for the array as a whole."""

NO_EFFICIENCY = "no_efficiency"
"""A modifier, not an event: leave out `efficiency`, which is included in `end` and `fail`."""

ONCE = frozenset(
    {"time_limit_80", "pending", "gpu_idle", "vram_over", "gpu_unbooked", "gpu_intruder", "node_unreachable"}
)
"""Events that a restart would detect again: kept in the table until the job ends, so that each is sent once."""

_GROUPS: Mapping[str, tuple[str, ...]] = {"all": tuple(EVENTS), "requeue": ("preempt", "retry"), "none": ()}
_OTHERS = {
    "time_limit": "fail",
    "time_limit_90": "time_limit_80",
    "time_limit_50": "time_limit_80",
    "invalid_depend": "fail",
}
"""Slurm words that gpusched lacks, with the nearest word that it has."""

FACTS: Mapping[str, str] = MappingProxyType(
    {
        "event": "the event, as in --notify",
        "message": "what has happened, in one sentence",
        "at": "when it happened",
        "job": "id of the job: `42`, of an array's task `42_7`",
        "name": "name of the job",
        "user": "owner of the job",
        "account": "account of the job",
        "queue": "queue of the job",
        "state": "state of the job, as `gq` shows it",
        "reason": "why it ended, or what its last run failed with",
        "exit_code": "exit code of the last run",
        "signal": "number of the signal that ended the last run",
        "run": "number of the run",
        "node": "node of the run, or of the GPU",
        "gpus": "indices of the run's GPUs, `0,1`",
        "submit_at": "when the job was submitted",
        "start_at": "when the run started",
        "end_at": "when the job ended",
        "elapsed": "how long the run has taken so far",
        "time_limit": "time limit of the job",
        "work_dir": "working directory",
        "output": "file with the run's output",
        "report": "after the end, what the job used of what it asked for, in several lines",
    }
)
"""Facts for templates, written as `{name}`; a fact that an event lacks becomes `-`."""


def parse_events(text: str) -> tuple[str, ...]:
    """Parse `--notify` and Slurm's `--mail-type`: words separated by commas, in either case, `-` for `_`.

    Returns: words of EVENTS and modifiers, sorted, without duplicates.
    Raises: ValueError with a sentence that quotes the bad word.
    """
    found: set[str] = set()
    for part in text.split(","):
        word = part.strip().lower().replace("-", "_")
        if not word:
            continue
        if word in _GROUPS:
            found.update(_GROUPS[word])
        elif word in EVENTS or word in (EACH_TASK, NO_EFFICIENCY):
            found.add(word)
        else:
            near = f"the nearest is {_OTHERS[word]}" if word in _OTHERS else f"write {', '.join(EVENTS)} or all"
            raise ValueError(f"{part.strip()[:40]!r} is not an event; {near}")
    return tuple(sorted(found))
