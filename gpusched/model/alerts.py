"""What people can be told of, and the facts that a message may use. `docs/reference/alerts.md` lists both."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpusched.model.value import Value

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
        "vram_over": "a run holds more of a shared GPU's memory than it booked",
        "gpu_unbooked": "a run uses a GPU it did not book",
        "gpu_intruder": "a foreign process, or a job that did not book it, uses a GPU of a run",
        "queue_empty": "all your jobs have ended",
    }
)
"""What a job can be told of with --notify, and what it means."""

OWNER_EVENTS: Mapping[str, str] = MappingProxyType(
    {"gpu_foreign": "a process of yours outside any job uses a GPU that pending jobs need"}
)
"""What users of the machine are told who may never have asked, see `[foreign]`."""

ADMIN_EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "gpu_lost": "a GPU, or the driver for all of them, no longer answers",
        "gpu_suspect": "a GPU is suspect and gets no jobs",
        "gpu_drained": "a GPU or a node was drained",
        "job_held": "jobs were held because their runs hit the same GPU fault repeatedly",
        "daemon_restarted": "the daemon has restarted with an existing job table",
        "database": "the job table cannot be written",
        "foreign_ended": "a foreign process was killed for pending jobs, as set in `[foreign]`",
    }
)
"""What those are told whom `[alert] admin` names."""

EACH_TASK = "array_tasks"
"""Not an event: tell of each task of an array, not of the array as a whole."""

ONCE = frozenset({"time_limit_80", "pending", "gpu_idle", "vram_over", "gpu_unbooked", "gpu_intruder"})
"""What would be found again after a restart: kept in the table until the job has ended, so that it is told once."""

_GROUPS: Mapping[str, tuple[str, ...]] = {"all": tuple(EVENTS), "requeue": ("preempt", "retry"), "none": ()}
_OTHERS = {
    "time_limit": "fail",
    "time_limit_90": "time_limit_80",
    "time_limit_50": "time_limit_80",
    "invalid_depend": "fail",
}
"""Words of Slurm that are not known here, and the nearest that is."""

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
    }
)
"""What a template may use in braces, as `{name}`; what an event does not have is `-`."""

Facts = tuple[tuple[str, str | int | float], ...]
"""Names of FACTS with their values; instants as UTC epoch seconds."""


class Alert(Value):
    """One thing to tell one user: a row of the outbox, gone when everybody concerned was told."""

    key: str
    """What makes it the same alert: `42.1 end`."""
    event: str
    counts_as: tuple[str, ...]
    """A target gets it when it asks for any of these."""
    uid: int
    """Whose targets are told."""
    at: float
    facts: Facts = ()
    targets: tuple[str, ...] = ()
    """Only these of the user's targets, or mail addresses; none means all."""
    job_id: int | None = None
    run: int | None = None
    state: str = "waiting"
    """`armed`: to be told when the user's queue is empty; `waiting`; `told`: kept so that it is not told again."""
    settled: tuple[str, ...] = ()
    """Targets that were told, or given up on."""


def parse_events(text: str) -> tuple[str, ...]:
    """Read `--notify` and Slurm's `--mail-type`: words with commas, in either case, `-` for `_`.

    Returns: words of EVENTS and EACH_TASK, sorted, each once.
    Raises: ValueError with a sentence that quotes the bad word.
    """
    found: set[str] = set()
    for part in text.split(","):
        word = part.strip().lower().replace("-", "_")
        if not word:
            continue
        if word in _GROUPS:
            found.update(_GROUPS[word])
        elif word in EVENTS or word == EACH_TASK:
            found.add(word)
        else:
            near = f"the nearest is {_OTHERS[word]}" if word in _OTHERS else f"write {', '.join(EVENTS)} or all"
            raise ValueError(f"{part.strip()[:40]!r} is not an event; {near}")
    return tuple(sorted(found))
