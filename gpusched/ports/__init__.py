"""The seams: what the core needs from the outside, as protocols. Implementations live at the edges.

    Clock       wall clock
    Store       the job table                      store/sqlite.py, store/memory.py
    GpuSource   one reading of this node's GPUs    gpu/nvml.py, gpu/simulated.py
    HostSource  one reading of this node's load    gpu/host.py
    Engine      starts and ends runs               engine/local.py, engine/simulated.py

`tests/contract/` runs one suite over every implementation of a seam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpusched.errors import GpuschedError
from gpusched.model.alerts import Alert
from gpusched.model.cluster import Clearance, GpuReading, HostSample
from gpusched.model.execution import EngineEvent, OpenRun, Order, Ticket
from gpusched.model.history import UsageSum
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.pipeline import Pipeline
from gpusched.model.snapshot import CalendarEntry, Estimate, Placement, Usage
from gpusched.model.states import JobState
from gpusched.model.value import Value


class Clock(Protocol):
    """Time as the daemon sees it."""

    def now(self) -> float:
        """UTC epoch seconds."""


@dataclass(slots=True)
class Changes:
    """Everything one tick records, committed as one transaction or not at all.

    `jobs` and `runs` are whole rows, inserted or replaced; the last one of an id wins.
    """

    jobs: dict[int, Job] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    events: list[JobEvent] = field(default_factory=list)
    payloads: dict[str, bytes] = field(default_factory=dict)
    """Scripts and environments by SHA-256 (hex); one that is stored already is left as it is."""
    drains: dict[str, str | None] = field(default_factory=dict)
    """Node name or GPU UUID -> the message it is drained with; None undrains."""
    fences: dict[int, float | None] = field(default_factory=dict)
    """From when on nothing passes a pending job that room was reserved for, by job; None takes it back."""
    kept_places: dict[int, Placement | None] = field(default_factory=dict)
    """Where room stays reserved for a pending job past its fence, by job; None takes it back."""
    clearances: dict[str, Clearance] = field(default_factory=dict)
    """GPUs that somebody said are well, by UUID."""
    usage: dict[tuple[str, str], Usage] = field(default_factory=dict)
    """By account and user."""
    reservations: dict[str, CalendarEntry | None] = field(default_factory=dict)
    """By name; None takes it out of the calendar."""
    estimates: dict[int, Estimate] = field(default_factory=dict)
    """By job."""
    pipelines: dict[int, Pipeline] = field(default_factory=dict)
    """New ones, by number."""
    alerts: dict[str, Alert | None] = field(default_factory=dict)
    """What is to be told, by key; None takes it out of the outbox."""

    def __bool__(self) -> bool:
        return bool(
            self.jobs
            or self.runs
            or self.events
            or self.payloads
            or self.drains
            or self.fences
            or self.kept_places
            or self.clearances
            or self.usage
            or self.reservations
            or self.estimates
            or self.pipelines
            or self.alerts
        )


class JobFilter(Value):
    """Which jobs to list; empty fields do not restrict."""

    ids: frozenset[int] = frozenset()
    states: frozenset[JobState] = frozenset()
    users: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    pipelines: frozenset[str] = frozenset()
    """Ids of pipelines, `p42`."""
    arrays: frozenset[int] = frozenset()
    """Tasks of these arrays, beside the jobs of `ids`."""
    leaves_out_arrays: bool = False
    """Without arrays all of whose tasks have rows of their own."""
    since: float | None = None
    """Only jobs that were still unfinished, or ended, at or after this instant."""
    limit: int | None = None
    """The newest this many."""


class Archive(Protocol):
    """How the job table lets go of jobs that ended long ago. None of it has to be durable when it returns: what a power
    cut brings back goes the next time."""

    def ended_jobs(self, before: float, after: tuple[float, int], limit: int) -> list[Job]:
        """The first so many jobs that ended before an instant, by end and id, behind this end and id."""

    def pipeline_ends(self, pipeline: str) -> list[tuple[int, float | None]]:
        """Every job of a pipeline with its end, by id."""

    def prune(self, jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        """Forget these jobs, their runs, stories, estimates and alerts, and these pipelines; all or nothing.

        Their ids and numbers stay used up. Payloads stay until `drop_payloads`.
        """

    def used_payloads(self, after: int, limit: int) -> tuple[int | None, set[str]]:
        """What the next so many jobs behind this id need of scripts and environments: the last id, and SHA-256s.

        The id is None when there are no more.
        """

    def payload_shas(self, after: str, limit: int) -> list[str]:
        """The next so many SHA-256s of stored scripts and environments."""

    def drop_payloads(self, shas: Iterable[str]) -> None:
        """Forget these scripts and environments."""

    def give_back(self, pages: int) -> bool:
        """Give so many pages that nothing uses back to the disk; whether there are more to give."""


class Store(Archive, Protocol):
    """The job table: the only truth. One writer; a commit is durable when it returns.

    Raises: StoreFull when the disk is full (nothing of the commit is kept); StoreBroken when the
    database is corrupt or newer than this release.
    """

    def load_active(self) -> tuple[list[Job], list[Run]]:
        """All jobs that are not final, and all runs that are not ENDED, by id."""

    def load_drains(self) -> dict[str, str]:
        """Drained nodes and GPUs with their messages."""

    def load_clearances(self) -> list[Clearance]:
        """When each GPU was last said to be well, by UUID."""

    def load_fences(self) -> dict[int, float]:
        """From when on nothing passes pending jobs that have had a reservation, by job."""

    def load_kept_places(self) -> dict[int, Placement]:
        """Where room was last reserved for pending jobs past their fence, by job."""

    def load_usage(self) -> list[Usage]:
        """Decayed usage, by account and user."""

    def load_reservations(self) -> list[CalendarEntry]:
        """The calendar, by name."""

    def load_estimates(self, limit: int) -> list[Estimate]:
        """The newest this many by job id, newest first."""

    def load_alerts(self) -> list[Alert]:
        """The outbox, oldest first."""

    def next_job_id(self) -> int:
        """One above every id ever used, also after old jobs were pruned."""

    def next_pipeline(self) -> int:
        """One above the number of every pipeline ever recorded."""

    def pipelines(self, numbers: Iterable[int]) -> list[Pipeline]:
        """Those of these pipelines that exist, by number."""

    def commit(self, changes: Changes) -> None:
        """Record all of it in one transaction, durably."""

    def lost(self) -> GpuschedError | None:
        """Why nothing that is committed now would be found again: the table's file was deleted, replaced or emptied.

        Every write raises the same. None while all is well, also again after the file was put back.
        """

    def changed(self) -> bool:
        """Whether somebody else wrote to the table since the last call; the daemon then loads it anew."""

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Jobs of the whole table, final ones included, by ascending id."""

    def runs(self, job_ids: Iterable[int]) -> list[Run]:
        """Every run of these jobs, by job and number."""

    def events(self, job_id: int) -> list[JobEvent]:
        """The job's story, oldest first."""

    def task_tallies(self, array_ids: Iterable[int]) -> list[tuple[int, JobState, int, int | None]]:
        """Ended tasks of these arrays: array, state, how many, and the largest exit code among them."""

    def array_around(self, job_id: int) -> Job | None:
        """The array that this id belongs to as that of a task, whether or not the task has a row."""

    def known_payloads(self, shas: Iterable[str]) -> set[str]:
        """Those of these texts, by SHA-256, that are stored."""
        ...

    def payload_bytes_of(self, uid: int) -> int:
        """Bytes of the scripts and environments of a user's jobs, ended ones included; equal ones count once."""
        ...

    def payload(self, sha: str) -> bytes:
        """A stored script or environment. Raises: KeyError."""

    def usage_sums(self, by: str, wanted: JobFilter, since: float, now: float) -> list[UsageSum]:
        """What the runs of these jobs held between two instants, summed by a word of `model.history.GROUPS`.

        By name. `wanted.since` and `wanted.limit` do not count.
        """

    def last_job_id(self, uid: int) -> int | None:
        """Newest job of this user."""

    def job_of_key(self, uid: int, key: str) -> Job | None:
        """Newest job of this user that was submitted with this key; of an array the array, not a task."""

    def save_gpus(self, node: str, reading: GpuReading) -> None:
        """Keep the inventory (uuid, index, name, memory) of a node, for history; not per poll."""

    def check(self) -> str | None:
        """Look for damage; None when the table is sound, else a sentence."""

    def close(self) -> None:
        """Checkpoint and release the file."""


class GpuSource(Protocol):
    """Reads the GPUs of one node. May be slow or hang: the caller runs it in a worker with a deadline."""

    def read(self) -> GpuReading:
        """One reading; never raises for a device fault, which is reported per device and field."""

    def close(self) -> None:
        """Release the driver."""


class HostSource(Protocol):
    """Reads the load of one node."""

    def read(self) -> HostSample:
        """One sample; rates are since the previous call and None in the first."""


class Engine(Protocol):
    """Starts runs, ends them and says what became of them.

    Every run that it was told of yields exactly one of RunEnded, RunLost or RunNeverStarted through
    `events` until it is forgotten, also over restarts of the daemon (by `adopt`): an event that was
    handed out but not followed by `forget` is handed out again after a restart.

    The daemon has the engine brought in line with the table by `adopt` once and `reconcile` after every commit.
    """

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        """Take over all runs recorded before a restart. Each will yield an event, RunStarted if alive.

        Files of runs that are not among them are cleared away, and what lives of those is stopped.
        """

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        """Bring these runs in line with the table; idempotent, so that what an exception cut short is made up for.

        One that is not known yet is started by its ticket. Without a ticket it is taken over as by `adopt`. Orders
        that a run lacks are given, those that it was given are not repeated. RunStarted of a living run is handed
        out again when the table does not know its supervisor. The ends of `ended` are recorded: they are forgotten.
        """

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Ask for these runs; returns at once. A handle that was claimed before is not started again."""

    def order(self, run: str, order: Order) -> None:
        """Stop, signal, re-limit, suspend or resume a run. Unknown and ended runs are ignored."""

    def events(self) -> list[EngineEvent]:
        """What happened since the last call, in order per run; does not block."""

    def forget(self, runs: Iterable[str]) -> None:
        """The ends of these runs are recorded: their spool may go."""

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        """Which of these processes belong to a run: pid -> handle. Foreign ones are left out."""

    def checkpoints(self) -> Mapping[str, float]:
        """When living runs last said that they have saved their work; those that never did are left out."""

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        """CPU time that all processes of these runs have used so far; only differences mean something.

        Runs of which nobody knows are left out.
        """

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """Called from the event loop's thread whenever `events` has something new."""

    def close(self) -> None:
        """Stop helpers; runs go on."""
