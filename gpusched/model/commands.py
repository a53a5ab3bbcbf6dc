"""What the daemon can be asked to do, as values, and who asks.

The API builds these from requests and hands them to the daemon, which applies them all before one commit and answers
after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpusched.model.job import AdoptedProcess, JobSpec
from gpusched.model.pipeline import StepNeeds
from gpusched.model.states import JobState
from gpusched.model.value import Value

NEVER, FAILED, ENDED = AGAIN = ("never", "failed", "ended")
"""When a key makes another job: never; once its job has ended but not COMPLETED; once it has ended at all."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the kernel says."""

    uid: int
    user: str
    pid: int | None = field(default=None, compare=False)
    """The process that connected, for the audit record; None when it is not known."""
    groups: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)
    """What was looked up of their groups: once for each request, as a list has thousands of rows."""


class Selection(Value):
    """Which jobs a command is about: ids, or all active jobs that match every given filter."""

    ids: tuple[int, ...] = ()
    users: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    states: frozenset[JobState] = frozenset()
    everything: bool = False
    pipelines: frozenset[int] = frozenset()
    """Numbers of pipelines: their steps that have not ended, or all when none is left, beside the ids."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Record new jobs, in order. Answers with their ids."""

    caller: Caller
    specs: Sequence[JobSpec]
    payloads: dict[str, bytes]
    key_again: str = NEVER
    """When the key of a single submission makes another job than the one it has: a word of `AGAIN`."""
    origins: Sequence[str] = ()
    """The jobs that these repeat, in order."""
    env_excluded: Sequence[str] = ()
    """Variables that [submit] env_exclude has left out of their environment."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End jobs, or send them one signal when `signal` is set."""

    caller: Caller
    selection: Selection
    signal: int | None = None
    main_only: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep pending jobs from starting; running ones are held for their next run."""

    caller: Caller
    ids: tuple[int, ...] = ()
    filters: Selection | None = None
    """In place of ids: pending jobs that match, or those in the states that it names."""
    dry_run: bool = False
    """Only say which jobs it would be."""


@dataclass(frozen=True, slots=True)
class Release:
    """Undo a hold."""

    caller: Caller
    ids: tuple[int, ...] = ()
    filters: Selection | None = None
    """In place of ids: held jobs that match, but those that the caller may not release."""
    dry_run: bool = False
    """Only say which jobs it would be."""


@dataclass(frozen=True, slots=True)
class Update:
    """Change what jobs ask for. `changes` holds fields of JobSpec, Request, RetryRule and Alerting by name."""

    caller: Caller
    ids: tuple[int, ...]
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suspend:
    """Let running jobs stand still; they keep all that they hold."""

    caller: Caller
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Let jobs go on that their owner had suspended."""

    caller: Caller
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """End the runs of jobs and let them wait again."""

    caller: Caller
    ids: tuple[int, ...]
    hold: bool = False
    """Let them wait until they are released."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Keep new work off nodes or GPUs; None as message undrains."""

    caller: Caller
    targets: tuple[str, ...]
    message: str | None


class Reserve(Value):
    """Make an entry of the calendar. `cards` are as a person types them: index, `node:index` or UUID."""

    caller: Caller
    name: str
    start_at: float
    duration_s: int
    every_s: int | None = None
    until_at: float | None = None
    gpus: int | None = None
    cards: tuple[str, ...] = ()
    is_node: bool = False
    cpus: float | None = None
    mem_mib: int | None = None
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    is_maintenance: bool = False
    """The whole node, for nobody."""
    message: str = ""
    ignore_jobs: bool = False
    """Also when running jobs may reach into it; they are not ended."""


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Take entries out of the calendar; what runs inside goes on."""

    caller: Caller
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One job of a new pipeline."""

    name: str
    spec: JobSpec
    needs: StepNeeds
    where: str
    """What messages call it: file and line."""


@dataclass(frozen=True, slots=True)
class SubmitPipeline:
    """Record a pipeline whose steps need each other without a circle. Answers with its id and those of its jobs."""

    caller: Caller
    name: str
    source: str
    steps: Sequence[PipelineStep]
    payloads: Mapping[str, bytes]
    dry_run: bool = False
    """Check only."""


@dataclass(frozen=True, slots=True)
class ResumePipeline:
    """Run again what did not finish COMPLETED. Answers with the new jobs."""

    caller: Caller
    number: int


@dataclass(frozen=True, slots=True)
class OccupiedGpu:
    """A card that the process, or one below it, is on."""

    uuid: str
    index: int
    total_mib: int | None
    used_mib: int | None
    """By them all together; None when the driver does not tell."""


@dataclass(frozen=True, slots=True)
class AdoptableProcess:
    """A process that may be adopted, as it was a moment ago."""

    process: AdoptedProcess
    uid: int
    user: str
    name: str
    argv: tuple[str, ...]
    work_dir: str
    output: str
    """The file that its output goes to; /dev/null when that is no file."""
    cards: tuple[OccupiedGpu, ...]
    tree: frozenset[int]
    """The pids of it and of what is below it."""
    above: frozenset[int]
    """Those of its ancestors."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make the process a job of its owner. Answers with the job's id and GPUs."""

    caller: Caller
    found: AdoptableProcess
    spec: JobSpec
    """A submission that asks for the cards; its work is the process's own."""
    payloads: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class LoseClients:
    """The clients of these jobs are gone."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reload:
    """Read the config file again. Answers with what changed, and with what a restart has to change."""

    caller: Caller


Command = (
    Submit
    | Cancel
    | Hold
    | Release
    | Update
    | Suspend
    | Resume
    | Requeue
    | Drain
    | Reserve
    | Unreserve
    | SubmitPipeline
    | ResumePipeline
    | Adopt
    | LoseClients
)
