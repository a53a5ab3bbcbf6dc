"""Commands to the daemon as values, with their callers.

The API builds these from requests and passes them to the daemon, which applies them all before one commit and
answers after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusched.model.job import AdoptedProcess, JobSpec
from gpusched.model.pipeline import StepNeeds
from gpusched.model.states import JobState
from gpusched.model.step import StepRequest
from gpusched.model.value import Value

NEVER, FAILED, ENDED = AGAIN = ("never", "failed", "ended")
"""When a reused key makes a new job: never; after its job ended in a state other than COMPLETED; after any end."""


THROUGH_HEADER = "Gpusched-Through"
THROUGH = {"mcp": "MCP"}
"""Values of the header by which a client says that it acts for its user, and how stories name it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of the caller, as reported by the kernel."""

    uid: int
    user: str
    pid: int | None = field(default=None, compare=False)
    """The process that connected, for the audit record; None when unknown."""
    groups: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)
    """Cache of the caller's group memberships for one request, as a list has thousands of rows."""
    through: str = field(default="", compare=False)
    """What acts for the user: a program by its own account, one of THROUGH, which gives no right and takes none; or a
    token."""
    is_token: bool = field(default=False, compare=False)
    """A token of the user was presented, over the network."""

    @property
    def by(self) -> str:
        """Who acted, as stories tell it: `alice`, `alice through MCP`, `alice through token ci`."""
        return f"{self.user} through {self.through}" if self.through else self.user


@dataclass(frozen=True, slots=True)
class NodePeer:
    """A program of a job on another node that is connected to the daemon, as the kernel there reports it."""

    node: str
    uid: int
    pid: int
    start_ticks: int
    run: str | None
    """The open run of that user there to which it belongs; None for a program that belongs to none."""


class Selection(Value):
    """Jobs that a command applies to: ids, or all active jobs that match every given filter."""

    ids: tuple[int, ...] = ()
    users: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    states: frozenset[JobState] = frozenset()
    everything: bool = False
    pipelines: frozenset[int] = frozenset()
    """Pipelines, in addition to the ids: selects their unfinished steps, or all steps if none is left."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Record new jobs, in order. Answers with their ids."""

    caller: Caller
    specs: Sequence[JobSpec]
    payloads: dict[str, bytes]
    key_again: str = NEVER
    """When the key of a single submission makes a new job despite its earlier one: a word of `AGAIN`."""
    origins: Sequence[str] = ()
    """The original jobs of these repeats, in order."""
    env_excluded: Sequence[str] = ()
    """Variables that [submit] env_exclude removed from their environment."""


@dataclass(frozen=True, slots=True)
class SubmitBatch:
    """Record a job for each line, in order, all or none. Answered with their ids once all of them are made."""

    caller: Caller
    spec: JobSpec
    """What they have in common, and their key, which is that of the batch."""
    lines: Sequence[str]
    is_named: bool
    """Whether they have the name of the spec, or those of their commands."""
    document: bytes
    """The lines as `lines_sha` of a Batch stands for them."""
    payloads: dict[str, bytes]
    key_again: str = NEVER
    env_excluded: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """End jobs, or send them one signal if `signal` is set."""

    caller: Caller
    selection: Selection
    signal: int | None = None
    to: str = "tree"
    """Which processes get the signal, as `SignalOrder.to`: tree, main, steps or full."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep pending jobs from starting; a running job is held from its next run on."""

    caller: Caller
    ids: tuple[int, ...] = ()
    filters: Selection | None = None
    """Instead of ids: pending jobs that match, or jobs in the states of the selection."""
    dry_run: bool = False
    """List the affected jobs without holding them."""


@dataclass(frozen=True, slots=True)
class Release:
    """Undo a hold."""

    caller: Caller
    ids: tuple[int, ...] = ()
    filters: Selection | None = None
    """Instead of ids: matching held jobs that the caller may release."""
    dry_run: bool = False
    """List the affected jobs without releasing them."""


@dataclass(frozen=True, slots=True)
class Update:
    """Change the requests of jobs. `changes` holds fields of JobSpec, Request, RetryRule and Alerting by name."""

    caller: Caller
    ids: tuple[int, ...]
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suspend:
    """Suspend running jobs; they keep all their resources."""

    caller: Caller
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume jobs that their owner suspended."""

    caller: Caller
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """End the runs of jobs and return the jobs to the queue."""

    caller: Caller
    ids: tuple[int, ...]
    hold: bool = False
    """Hold the jobs after the requeue."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Keep new work off nodes or GPUs; with None as message, undrain."""

    caller: Caller
    targets: tuple[str, ...]
    message: str | None


class DeclareDown(Value):
    """Give up the runs of nodes that do not answer. Without confirmation it is refused with what would be lost."""

    caller: Caller
    nodes: tuple[str, ...]
    message: str
    is_confirmed: bool = False


@dataclass(frozen=True, slots=True)
class SetMigLayout:
    """Have a card divided differently as soon as it is idle; without a layout, forget the one that was set."""

    caller: Caller
    target: str
    """As typed: index, `node:index` or UUID."""
    layout: str | None
    """As typed: `3g.40gb,2x2g.20gb`, `on`, `off`."""
    dry_run: bool = False


class Reserve(Value):
    """Add a reservation to the calendar. `cards` are as typed: index, `node:index` or UUID."""

    caller: Caller
    name: str
    start_at: float
    duration_s: int
    every_s: int | None = None
    until_at: float | None = None
    gpus: int | None = None
    cards: tuple[str, ...] = ()
    is_node: bool = False
    nodelist: tuple[str, ...] = ()
    """Nodes on each of which to reserve this; empty: one node of the scheduler's choice."""
    cpus: float | None = None
    mem_mib: int | None = None
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    is_maintenance: bool = False
    """Reserves the whole node and admits no jobs."""
    message: str = ""
    ignore_jobs: bool = False
    """Accept the reservation even if running jobs may overlap it; they are not ended."""


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Remove reservations from the calendar; jobs inside them keep running."""

    caller: Caller
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One job of a new pipeline."""

    name: str
    spec: JobSpec
    needs: StepNeeds
    where: str
    """Location for messages: file and line."""


@dataclass(frozen=True, slots=True)
class SubmitPipeline:
    """Record a pipeline with acyclic dependencies. Answers with its id and the ids of its jobs."""

    caller: Caller
    name: str
    source: str
    steps: Sequence[PipelineStep]
    payloads: Mapping[str, bytes]
    dry_run: bool = False
    """Validate without recording."""


@dataclass(frozen=True, slots=True)
class ResumePipeline:
    """Run the steps again that did not end COMPLETED. Answers with the new jobs."""

    caller: Caller
    number: int


@dataclass(frozen=True, slots=True)
class OccupiedGpu:
    """A card in use by the process or its descendants."""

    uuid: str
    index: int
    total_mib: int | None
    used_mib: int | None
    """Their total; None when the driver does not report it."""


@dataclass(frozen=True, slots=True)
class AdoptableProcess:
    """A candidate process for adoption, as read a moment ago."""

    process: AdoptedProcess
    uid: int
    user: str
    name: str
    argv: tuple[str, ...]
    work_dir: str
    output: str
    """Its output file; /dev/null when its output is not a file."""
    cards: tuple[OccupiedGpu, ...]
    tree: frozenset[int]
    """Pids of the process and its descendants."""
    above: frozenset[int]
    """Pids of its ancestors."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make the process a job of its owner. Answers with the job's id and GPUs."""

    caller: Caller
    found: AdoptableProcess
    spec: JobSpec
    """A submission that requests the cards; its work is the process itself."""
    payloads: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class LoseClients:
    """Record that the clients of these jobs disconnected for good."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Record that a process of a run starts a step of it. Answers with its number and GPUs, or None while it waits."""

    caller: Caller
    run: str
    """Handle of the run that the caller's process belongs to, as found by the daemon."""
    pid: int
    start_ticks: int
    """The caller's process: it has one open step at most."""
    name: str
    command: str
    request: StepRequest = field(default_factory=StepRequest)
    time_limit_s: int | None = None
    node: str = ""
    """That of the process; by default the first of the run."""
    token: str = ""
    """Of the doors to open on the other nodes of the step, see `EnterJob`; empty for none."""


@dataclass(frozen=True, slots=True)
class EndStep:
    """Record how a step of the caller's run has ended."""

    caller: Caller
    run: str
    number: int
    exit_code: int | None = None
    signal: int | None = None
    is_timeout: bool = False
    is_node_lost: bool = False
    """`srun` gave up the connection to a node of it, where tasks may still run."""
    user_cpu_s: float | None = None
    """What its tasks have used, as in `JobStep`."""
    system_cpu_s: float | None = None
    peak_mem_mib: float | None = None
    mean_mem_mib: float | None = None


@dataclass(frozen=True, slots=True)
class CancelStep:
    """End a step, or send its processes one signal if `signal` is set."""

    caller: Caller
    job_id: int
    number: int
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class EnterJob:
    """Let a client of the owner start something in a running job."""

    caller: Caller
    job_id: int
    token: str
    """Of `EnterOrder`."""
    nodes: tuple[str, ...] = ()
    """Of the run, where to open a door; empty for all of them."""


@dataclass(frozen=True, slots=True)
class LoseSteps:
    """Record that the processes of these steps are gone: job, run and number of each."""

    steps: tuple[tuple[int, int, int], ...]
    is_seen: bool = True
    """They were there at the last look; otherwise they may have ended in any way while no daemon ran."""


@dataclass(frozen=True, slots=True)
class Reload:
    """Reread the config file. Answers with the changes, and with those that need a restart."""

    caller: Caller
    what: str = "gctl reload"
    """The command behind it, for the record of settings."""


@dataclass(frozen=True, slots=True)
class GiveCredit:
    """Add GPU-hours to the budget of an account, for its present period."""

    caller: Caller
    account: str
    gpu_hours: float
    message: str = ""
    what: str = "gctl budget"
    """The command behind it, for the record of settings."""


@dataclass(frozen=True, slots=True)
class SetUserLimit:
    """Limit one user until an instant, or in one account; with `is_removed`, no longer."""

    caller: Caller
    user: str
    account: str = ""
    max_gpus: float | None = None
    max_jobs: int | None = None
    message: str = ""
    until_at: float | None = None
    is_removed: bool = False
    what: str = "gctl limit"


@dataclass(frozen=True, slots=True)
class ChangeMembers:
    """Add users to an account and remove users from it, on the word of a coordinator."""

    caller: Caller
    account: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    what: str = "gctl account members"


@dataclass(frozen=True, slots=True)
class PauseQueue:
    """Start nothing new from a queue and those below it; with `is_resumed`, go on."""

    caller: Caller
    queue: str
    message: str = ""
    is_resumed: bool = False
    what: str = "gctl queue pause"


@dataclass(frozen=True, slots=True)
class UndoTableSettings:
    """Give settings of the job table the values that they had before one change."""

    caller: Caller
    number: int
    changes: tuple[tuple[tuple[str, str], dict[str, Any] | None, dict[str, Any] | None], ...]
    """Section of the record and name, with the values before and after that change."""
    what: str = "gctl undo"


Command = (
    Submit
    | SubmitBatch
    | Cancel
    | Hold
    | Release
    | Update
    | Suspend
    | Resume
    | Requeue
    | Drain
    | DeclareDown
    | SetMigLayout
    | Reserve
    | Unreserve
    | SubmitPipeline
    | ResumePipeline
    | Adopt
    | LoseClients
    | BeginStep
    | EndStep
    | CancelStep
    | LoseSteps
    | EnterJob
    | GiveCredit
    | SetUserLimit
    | ChangeMembers
    | PauseQueue
    | UndoTableSettings
)
