"""What changes the planner's state between two cycles."""

from __future__ import annotations

from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingJob, Usage, Window
from gpusched.model.value import Value
from gpusched.scheduler.plugins import Extensions


class JobQueued(Value):
    """A job is pending from now on."""

    key: ClassKey
    job: PendingJob


class JobFenced(Value):
    """Room was reserved for a pending job for the first time: from this instant on nothing passes it; None takes that
    back."""

    job_id: int
    fence_at: float | None


class JobLeft(Value):
    """A job is not pending any more: it was cancelled, held or changed, but not started."""

    job_id: int


class JobsHidden(Value):
    """Further jobs of this class are pending that the planner is not shown, such as tasks of an array."""

    key: ClassKey
    count: int


class RunHolds(Value):
    """A job runs: what it holds, on each of its nodes. It is not pending any more, if it was."""

    allocations: tuple[Allocation, ...]


class RunChanged(Value):
    """A running job holds something else, or is to end at another time."""

    allocations: tuple[Allocation, ...]


class RunReleased(Value):
    """A running job holds nothing any more. `is_charged`: its use is told by `UsageCharged`."""

    job_id: int
    is_charged: bool = False


class RunExpected(Value):
    """A running job that may run on is expected to end then, or at its limit; infinite: unknown."""

    job_id: int
    end_at: float


class NodesChanged(Value):
    """All nodes as they are now."""

    nodes: tuple[NodeView, ...]


class UsageCharged(Value):
    """What the ended runs of a user have used."""

    usage: Usage


class WindowsChanged(Value):
    """What the calendar holds from now on."""

    windows: tuple[Window, ...]


class SettingsChanged(Value):
    """Other settings are in force."""

    settings: Settings
    extensions: Extensions


Event = (
    JobQueued
    | JobFenced
    | JobLeft
    | JobsHidden
    | RunHolds
    | RunChanged
    | RunReleased
    | RunExpected
    | NodesChanged
    | UsageCharged
    | WindowsChanged
    | SettingsChanged
)
