"""Protocols of the core's outside world. Implementations live at the edges.

    Clock       wall clock
    Store       the job table                      store/sqlite.py
    GpuSource   one reading of this node's GPUs    gpu/nvml.py, gpu/amd.py, gpu/simulated.py
    HostSource  one reading of this node's load    gpu/host.py
    Engine      starts and ends runs               engine/local.py

`tests/contract/` runs one suite over every implementation of a protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gpusched.errors import GpuschedError
from gpusched.model.batch import Batch
from gpusched.model.cluster import GpuReading, HostSample, PowerLimit
from gpusched.model.execution import EngineEvent, OpenRun, Order
from gpusched.model.history import AccountUse, UsageSum
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.spec import JobSpec
from gpusched.model.states import JobState
from gpusched.model.step import JobStep
from gpusched.model.value import Value
from gpusched.ports.tables import ChangedRows, Table

K = TypeVar("K")
V = TypeVar("V")


class Clock(Protocol):
    """Time as the daemon sees it."""

    def now(self) -> float:
        """UTC epoch seconds."""


@dataclass(slots=True)
class Changes:
    """All records of one tick, committed as one transaction or not at all.

    `jobs` and `runs` are whole rows, inserted or replaced; the last one per id wins.
    """

    jobs: dict[int, Job] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    events: list[JobEvent] = field(default_factory=list)
    payloads: dict[str, bytes] = field(default_factory=dict)
    """Scripts and environments by SHA-256 (hex); existing ones are left unchanged."""
    rows: ChangedRows = field(default_factory=ChangedRows)
    """Of the small tables; None deletes one."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self.runs or self.events or self.payloads or any(self.rows.values()))


class JobFilter(Value):
    """Filter for lists of jobs; empty fields do not restrict."""

    ids: frozenset[int] = frozenset()
    states: frozenset[JobState] = frozenset()
    users: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    pipelines: frozenset[str] = frozenset()
    """Ids of pipelines, `p42`."""
    arrays: frozenset[int] = frozenset()
    """Select the tasks of these arrays, in addition to the jobs of `ids`."""
    leaves_out_arrays: bool = False
    """Omit arrays with a row for each of their tasks."""
    since: float | None = None
    """Only jobs that ended at or after this instant, or have not ended."""
    before: int | None = None
    """Only jobs with a smaller id."""
    limit: int | None = None
    """At most this many jobs, the newest."""


class Archive(Protocol):
    """Removal of jobs that ended long ago. None of it needs to be durable on return: rows restored by a power failure
    are removed the next time."""

    def ended_jobs(self, before: float, after: tuple[float, int], limit: int) -> list[Job]:
        """Up to `limit` jobs that ended before an instant, by end and id, after the given end and id."""

    def pipeline_ends(self, pipeline: str) -> list[tuple[int, float | None]]:
        """All jobs of a pipeline with their ends, by id."""

    def prune(self, jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        """Delete these jobs with their runs, histories, estimates and alerts, these pipelines, and batches of which no
        job is left; all or nothing.

        Their ids and numbers are never reused. Payloads stay until `drop_payloads`.
        """

    def used_payloads(self, after: int, limit: int) -> tuple[int | None, set[str]]:
        """SHA-256s of the scripts and environments of the next `limit` jobs after this id, with the last id.

        The id is None when there are no more.
        """

    def payload_shas(self, after: str, limit: int) -> list[str]:
        """The next `limit` SHA-256s of stored scripts and environments."""

    def drop_payloads(self, shas: Iterable[str]) -> None:
        """Delete these scripts and environments, except lines of batches whose jobs are not all made."""

    def give_back(self, pages: int) -> bool:
        """Return up to `pages` unused pages to the disk; returns whether more are left."""


class Store(Archive, Protocol):
    """The job table: the only source of truth. One writer; a commit is durable on return.

    Raises: StoreFull when the disk is full (nothing of the commit is stored); StoreBroken when the
    database is corrupt or newer than this release.
    """

    def load_active(self) -> tuple[list[Job], list[Run]]:
        """All jobs that are not final, and all runs that are not ENDED, by id."""

    def begin(self, jobs: Iterable[Job]) -> None:
        """Take these active jobs, as just loaded, for what the writer knows: a commit writes what differs from them.

        Without it a commit writes every job whole, which is right and slow.
        """

    def load(self, table: Table[K, V], limit: int | None = None) -> dict[K, V]:
        """The rows of a table that are loaded, in its order. Args: limit: at most so many."""
        ...

    def find(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        """The existing ones of these rows, also those that are not loaded."""
        ...

    def next_job_id(self) -> int:
        """One above the highest id ever used, pruned jobs included."""

    def next_pipeline(self) -> int:
        """One above the highest pipeline number ever recorded."""

    def commit(self, changes: Changes) -> None:
        """Commit all changes durably in one transaction."""

    def lost(self) -> GpuschedError | None:
        """Why commits would be lost: the table's file was deleted, replaced or emptied.

        Every write raises the same error. None while all is well, also after the file was restored.
        """

    def changed(self) -> bool:
        """Whether another process wrote to the table since the last call; the daemon then reloads it."""

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs of the whole table, final ones included, by ascending id."""

    def runs(self, job_ids: Iterable[int]) -> list[Run]:
        """Every run of these jobs, by job and number."""

    def steps(self, job_ids: Iterable[int]) -> list[JobStep]:
        """Every step of these jobs, by job, run and number."""

    def next_step(self, job_id: int, run: int) -> int:
        """One above the highest number of a step of this run; 0 before its first."""
        ...

    def events(self, job_id: int) -> list[JobEvent]:
        """The job's history, oldest first."""

    def task_tallies(self, array_ids: Iterable[int]) -> list[tuple[int, JobState, int, int | None]]:
        """Ended tasks of these arrays: array, state, count, and their highest exit code."""

    def array_around(self, job_id: int) -> Job | None:
        """The array that contains this id as a task, whether or not the task has a row."""

    def known_payloads(self, shas: Iterable[str]) -> set[str]:
        """The stored subset of these payloads, by SHA-256."""
        ...

    def payload_bytes_of(self, uid: int) -> int:
        """Total bytes of the scripts and environments of a user's jobs, ended ones included, without duplicates."""
        ...

    def payload(self, sha: str) -> bytes:
        """A stored script or environment. Raises: KeyError."""

    def usage_sums(self, by: str, wanted: JobFilter, since: float, now: float) -> list[UsageSum]:
        """Sum the resources held by these jobs between two instants, grouped by a word of `model.history.GROUPS`.

        Sorted by name. Ignores `wanted.since` and `wanted.limit`.
        """

    def account_uses(self, since: float, until: float, now: float, user: str | None = None) -> list[AccountUse]:
        """What runs held and used within a period up to `until`, by account and user; of one user, or of all.

        Open runs count up to `now`. Amounts of a run are spread evenly over its time, so that the sums of adjacent
        periods add up. Sorted by account and user.
        """

    def budget_sums(self, since: float, now: float) -> dict[tuple[str, str, str], float]:
        """GPU-seconds of ended runs since an instant, by account, user and model of card, without time suspended.

        Runs on nodes that failed, runs that made room for others, and runs handed over to another scheduler cost
        nothing.
        """

    def last_job_id(self, uid: int) -> int | None:
        """Newest job of this user."""

    def job_of_key(self, uid: int, key: str) -> Job | None:
        """Newest job that this user submitted with this key; for an array the array, not a task."""

    def batch_of_key(self, uid: int, key: str) -> Batch | None:
        """Newest batch that this user submitted with this key."""

    def states_of_batch(self, batch: Batch) -> set[JobState]:
        """States of its jobs that are in the table."""
        ...

    def save_gpus(self, node: str, reading: GpuReading) -> None:
        """Record a node's inventory (uuid, index, name, memory) for history; not called per poll."""

    def check(self) -> str | None:
        """Check for corruption; None when the table is sound, else a sentence."""

    def close(self) -> None:
        """Checkpoint and release the file."""


class GpuSource(Protocol):
    """Reads the GPUs of one node. May be slow or hang, so that the caller uses a worker with a timeout."""

    def read(self) -> GpuReading:
        """Take one reading; never raises for a device fault, which is reported per device and field."""

    def close(self) -> None:
        """Release the driver."""


class PowerLimits(Protocol):
    """A source of GPUs that can also set their power limits. Both return why they cannot, as a clause."""

    def power_limit(self, uuid: str) -> PowerLimit | str:
        """Read the limit that was set for a card."""
        ...

    def set_power_limit(self, uuid: str, limit_w: float) -> str | None:
        """Set the limit of a card; None on success."""


class HostSource(Protocol):
    """Reads the load of one node."""

    def read(self) -> HostSample:
        """Take one sample; rates cover the time since the previous call and are None in the first."""


class Handover(Protocol):
    """Another scheduler, to which jobs are handed over whole."""

    node: str
    """In place of a node in the runs that it has."""

    def why_not(self) -> str | None:
        """Why it takes no jobs now, as a sentence; None if it does. Does not block."""

    def status(self, run: str) -> str | None:
        """What it says of a run, as a clause; None for a run that it does not have."""

    def losses(self, spec: JobSpec) -> list[str]:
        """What a job loses there, a sentence each. Raises: Refused for a job that cannot be without it."""

    def check(self, job: Job, queue: QueueSettings | None) -> None:
        """Raises: Refused for a job that `script` would refuse."""

    def script(
        self, job: Job, run: Run, queue: QueueSettings | None, script: bytes | None, env: Mapping[str, str]
    ) -> bytes:
        """What it gets of a run. Args: queue: of the job; script: its text; None for a command; env: all variables.

        Raises: Refused for what it cannot say.
        """


class Engine(Protocol):
    """Starts and ends runs, and reports their outcomes.

    Every known run yields exactly one of RunEnded, RunLost or RunNeverStarted through `events` until it is
    forgotten (as `ended`), also across restarts of the daemon (by `adopt`): an event that was delivered before is
    delivered again after a restart.

    The daemon calls `adopt` once and `reconcile` after every commit to bring the engine in line with the table.
    """

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        """Take over all runs recorded before a restart. Each will yield an event, RunStarted if alive.

        Files of all other runs are removed, and their live processes are stopped.
        """

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        """Bring these runs in line with the table; idempotent, so that it completes work cut short by an exception.

        Requests the start of unknown runs by their tickets and returns at once; a handle that was claimed before is not
        started again. Takes over those without a ticket as `adopt` does. Gives each run its missing orders, without
        repeating earlier ones. Delivers RunStarted of a live run again if the table lacks its supervisor. Releases the
        spool of the runs in `ended`, whose ends are recorded.
        """

    def order(self, run: str, order: Order) -> None:
        """Stop, signal, suspend or resume a run, or change its limit. Unknown and ended runs are ignored."""

    def events(self) -> list[EngineEvent]:
        """Events since the last call, in order per run; does not block."""

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        """Map processes to their runs: pid -> handle. Foreign processes are left out."""

    def checkpoints(self) -> Mapping[str, float]:
        """Time of the last reported checkpoint of each live run; runs without a report are left out."""

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        """Cumulative CPU time of all processes of these runs; only differences are meaningful.

        Runs without data are left out.
        """

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """Register a callback for new `events`, called on the event loop's thread."""

    def close(self) -> None:
        """Stop helpers; runs continue."""


class HandoverEngine(Engine, Handover, Protocol):
    """Another scheduler with the runs that it has."""
