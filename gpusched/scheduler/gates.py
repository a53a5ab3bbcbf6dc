"""Gates: limits that a job must pass before a place is looked for.

Each cycle makes those in force of `rules.GATES` and asks them in that order; the first that holds a job says why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from gpusched.model.resources import Resources
from gpusched.model.snapshot import ClassKey
from gpusched.model.states import ReasonCode
from gpusched.model.units import plural
from gpusched.scheduler.limits import Denial

if TYPE_CHECKING:
    from gpusched.scheduler.queue import JobClass
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.state import PlannerState


class Gate(ABC):
    """One kind of limit, during one cycle. It counts the jobs that the cycle starts unless the planner does."""

    examines_all: ClassVar[bool] = True
    """Whether each cycle examines all classes while it is in force, instead of those that `may_hold` names."""
    holds_fillers = True
    """Whether it also holds jobs that start on a spent budget, as fillers."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle

    @staticmethod
    @abstractmethod
    def is_in_force(planner: PlannerState) -> bool:
        """Whether it limits anything under the present settings and tables."""

    @staticmethod
    def may_hold(planner: PlannerState, key: ClassKey) -> bool:
        """Whether it can hold jobs of this class at any time, whatever runs."""
        return False

    @abstractmethod
    def why_not(self, job_class: JobClass) -> Denial | None:
        """The limit that a job of this class would exceed by starting now; None if it passes."""

    def started(  # noqa: B027  most count nothing themselves
        self, job_class: JobClass, amount: Resources, end_at: float, *, is_filler: bool
    ) -> None:
        """Count a job that starts now. Args: end_at: its planned end."""

    def holds_until(self, now: float) -> bool:
        """Whether its answer stays the same up to this instant unless jobs start or end."""
        return True


class ThrottleGate(Gate):
    """Tasks of one array that may run at once, which the planner counts."""

    examines_all: ClassVar[bool] = False

    @staticmethod
    def is_in_force(planner: PlannerState) -> bool:
        return True

    @staticmethod
    def may_hold(planner: PlannerState, key: ClassKey) -> bool:
        return key.throttle is not None

    def why_not(self, job_class: JobClass) -> Denial | None:
        throttle = job_class.key.throttle
        if throttle is None:
            return None
        array, limit = throttle
        held = self._cycle.planner.tasks[array]
        if held < limit:
            return None
        text = f"array {array} may run {plural(limit, 'task')} at once"
        return Denial(ReasonCode.JOB_ARRAY_TASK_LIMIT, text, {"array": array, "limit": limit, "held": held})


class QuotaGate(Gate):
    """Limits of queues and QOS, which the planner counts."""

    examines_all: ClassVar[bool] = False

    def __init__(self, cycle: Cycle) -> None:
        super().__init__(cycle)
        self._denials: dict[object, Denial] = {}
        """By what is asked, and how much has been booked."""

    @staticmethod
    def is_in_force(planner: PlannerState) -> bool:
        return planner.counts_quotas

    @staticmethod
    def may_hold(planner: PlannerState, key: ClassKey) -> bool:
        return planner.quotas.has_limits(key.terms)

    def why_not(self, job_class: JobClass) -> Denial | None:
        terms, cycle = job_class.key.terms, self._cycle
        mark = terms, job_class.shape, len(cycle.starts), len(cycle.claims)
        found = self._denials.get(mark)
        if found is None:
            found = cycle.quotas.why_not(terms, job_class.wanted)
            if found is not None:
                self._denials[mark] = found
        return found
