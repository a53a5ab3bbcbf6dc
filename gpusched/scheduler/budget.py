"""GPU-hour budgets of accounts and their users: what is left, and whether a job may start on it.

A budget counts what runs held, without decay, and what running jobs may still hold until their limits or the end of the
period. A job starts only where it fits into what is left to its user, its account and every account above.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpusched.model.resources import Resources
from gpusched.model.snapshot import Budget, ClassKey
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration, format_hours
from gpusched.model.value import replace
from gpusched.scheduler.gates import Gate
from gpusched.scheduler.limits import Denial
from gpusched.scheduler.request_units import squeeze

if TYPE_CHECKING:
    from gpusched.scheduler.queue import JobClass
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.state import PlannerState

HOUR_S = 3600.0
UNLIMITED_S = 86400.0
"""What a job without a time limit books ahead."""
_SHORTEST_S = 600
"""Shortest time limit that is proposed."""


class BudgetGate(Gate):
    """The budgets of accounts and users; jobs that the cycle starts book at once."""

    holds_fillers = False

    def __init__(self, cycle: Cycle) -> None:
        super().__init__(cycle)
        self._spent: dict[tuple[str, str | None], tuple[float, float]] = {}
        """By account and user, as `spent_of`, for those that were asked for."""
        self._started: dict[tuple[str, str], float] = {}
        """GPU-seconds booked in this cycle, by account and user."""

    @staticmethod
    def is_in_force(planner: PlannerState) -> bool:
        return bool(planner.budgets)

    def why_not(self, job_class: JobClass) -> Denial | None:
        key, gpus = job_class.key, job_class.wanted.gpus
        lacking = list(self._lacking(key, gpus)) if gpus else []
        if not lacking:
            return None
        waits = next((denial for budget, denial in lacking if budget.when_spent == "wait"), None)
        if waits is not None:
            return waits
        _, denial = lacking[0]
        # A job that could not be requeued would be lost to the first job that needs its GPUs.
        if not key.terms.can_requeue:
            return replace(denial, text=f"{denial.text}; with --requeue it may run as a filler")
        if key.terms.reservation is not None:
            return denial
        text = f"{denial.text}; runs as a filler once GPUs are idle that no other job needs"
        return replace(denial, text=text, may_fill=True)

    def started(self, job_class: JobClass, amount: Resources, end_at: float, *, is_filler: bool) -> None:
        key = job_class.key
        for budget in () if is_filler else self._over(key):
            mark = budget.account, key.terms.user
            self._started[mark] = self._started.get(mark, 0.0) + self._asked_s(budget, key, amount.gpus)

    def _lacking(self, key: ClassKey, gpus: float) -> Iterator[tuple[Budget, Denial]]:
        """Budgets that do not have what a job of this class asks, each with the reason."""
        for budget in self._over(key):
            asked_s = self._asked_s(budget, key, gpus)
            for user, granted_s in ((key.terms.user, budget.user_gpu_s), (None, budget.gpu_s)):
                if granted_s is None:
                    continue
                mark = budget.account, user
                if mark not in self._spent:
                    self._spent[mark] = spent_of(budget, user)
                used_s, booked_s = self._spent[mark]
                booked_s += sum(
                    amount
                    for (account, one), amount in self._started.items()
                    if account == budget.account and user in (None, one)
                )
                left_s = granted_s - used_s - booked_s
                if asked_s > left_s + 1e-6:
                    counted = gpus * _weight(budget, key)
                    yield budget, _denial(budget, user, granted_s, used_s, booked_s, asked_s, counted)

    def _over(self, key: ClassKey) -> Iterator[Budget]:
        return (
            budget
            for budget in self._cycle.planner.budgets
            if key.terms.account in budget.accounts and (budget.until_at is None or self._cycle.now < budget.until_at)
        )

    def _asked_s(self, budget: Budget, key: ClassKey, gpus: float) -> float:
        return gpus * _weight(budget, key) * booked_ahead_s(key.time_limit_s, budget, self._cycle.now)


def _weight(budget: Budget, key: ClassKey) -> float:
    """What an hour of one of its GPUs counts: of the heaviest model that it may get."""
    if not budget.weights:
        return 1.0
    asked = squeeze(key.terms.request.gpu_type or "")
    return max((weight for model, weight in budget.weights if asked in model), default=1.0)


def booked_ahead_s(limit_s: float | None, budget: Budget, now: float) -> float:
    """How long a job is counted ahead: its limit, else a day, within the period; in seconds."""
    ahead_s = UNLIMITED_S if limit_s is None else limit_s
    return ahead_s if budget.until_at is None else max(0.0, min(ahead_s, budget.until_at - now))


def spent_of(budget: Budget, user: str | None) -> tuple[float, float]:
    """GPU-seconds used and booked by this user, None for all together."""
    found = [(used_s, booked_s) for one, used_s, booked_s in budget.spent if user in (None, one)]
    return sum(used_s for used_s, _ in found), sum(booked_s for _, booked_s in found)


def _denial(
    budget: Budget,
    user: str | None,
    granted_s: float,
    used_s: float,
    booked_s: float,
    asked_s: float,
    gpus: float,
) -> Denial:
    left_s = max(0.0, granted_s - used_s - booked_s)
    who = budget.account if user is None else f"user {user} of {budget.account}"
    used, granted, booked, asked = map(hours_of, (used_s, granted_s, booked_s, asked_s))
    left = hours_of(left_s, down=True)
    text = f"{who} used {used} of {granted} GPU-hours{budget.period}, {booked} booked; {left} left, this asks {asked}"
    ways = [f"again {budget.again}"] if budget.again and asked_s <= granted_s else []
    shorter_s = int(left_s / gpus) // _SHORTEST_S * _SHORTEST_S if gpus else 0
    if shorter_s:
        ways.append(f"with -t {format_duration(shorter_s)}")
    facts = {
        "account": budget.account,
        "user": user,
        "granted_gpu_hours": granted_s / HOUR_S,
        "used_gpu_hours": used_s / HOUR_S,
        "booked_gpu_hours": booked_s / HOUR_S,
        "asked_gpu_hours": asked_s / HOUR_S,
        "until_at": budget.until_at,
    }
    return Denial(ReasonCode.BUDGET_SPENT, text + (f"; {', or '.join(ways)}" if ways else ""), facts)


def hours_of(seconds: float, *, down: bool = False) -> str:
    """`1,960`, `3.5`, `0.005`. Args: down: round down, for what is left."""
    hours = seconds / HOUR_S
    if hours >= 100:
        return f"{int(hours + 1e-6) if down else hours:,.0f}"
    return format_hours(hours, down=down).rstrip("0").rstrip(".")
