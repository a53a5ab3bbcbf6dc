"""Events that change the planner's state between two cycles."""

from __future__ import annotations

from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, ClassKey, LimitInForce, PendingJob, Usage, Window
from gpusched.model.value import Value
from gpusched.scheduler.plugins import Extensions


class JobQueued(Value):
    """A job became pending."""

    key: ClassKey
    job: PendingJob


class TasksQueued(Value):
    """Tasks of an array that are pending without a row; replaces those sent before."""

    array_id: int
    key: ClassKey
    queued_at: float
    ids: tuple[range, ...]
    """Consecutive ids, in order and apart; empty for none."""


class JobFenced(Value):
    """Room was reserved for a pending job for the first time: no job passes it from then on. None cancels it."""

    job_id: int
    fence_at: float | None


class JobLeft(Value):
    """A job stopped pending without starting: it was cancelled, held or changed."""

    job_id: int


class RunHolds(Value):
    """A job runs: its holdings on each of its nodes. It is no longer pending, if it was."""

    allocations: tuple[Allocation, ...]


class RunChanged(Value):
    """A running job's holdings or planned end changed."""

    allocations: tuple[Allocation, ...]


class RunReleased(Value):
    """A running job released everything. `is_charged`: `UsageCharged` reports its use."""

    job_id: int
    is_charged: bool = False


class NodesChanged(Value):
    nodes: tuple[NodeView, ...]


class UsageCharged(Value):
    """Accumulated use of a user's ended runs."""

    usage: Usage


class WindowsChanged(Value):
    """New contents of the calendar."""

    windows: tuple[Window, ...]


class LimitsChanged(Value):
    """The limits of single users."""

    limits: tuple[LimitInForce, ...]


class BudgetsChanged(Value):
    """What the GPU-hour budgets have left by now."""

    budgets: tuple[Budget, ...]


class SettingsChanged(Value):
    settings: Settings
    extensions: Extensions


Event = (
    JobQueued
    | TasksQueued
    | JobFenced
    | JobLeft
    | RunHolds
    | RunChanged
    | RunReleased
    | NodesChanged
    | UsageCharged
    | WindowsChanged
    | BudgetsChanged
    | LimitsChanged
    | SettingsChanged
)
