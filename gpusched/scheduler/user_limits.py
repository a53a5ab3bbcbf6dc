"""Limits of single users: how many GPUs and running jobs, everywhere or in one account and those below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusched.model.queue_settings import chain_of
from gpusched.model.resources import Resources
from gpusched.model.snapshot import LimitInForce
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_amount, plural
from gpusched.scheduler.gates import Gate
from gpusched.scheduler.limits import Denial

if TYPE_CHECKING:
    from gpusched.scheduler.queue import JobClass
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.state import PlannerState


class _Counted:
    """A limit with what counts against it."""

    __slots__ = ("gpus", "in_force", "jobs")

    def __init__(self, in_force: LimitInForce) -> None:
        self.in_force = in_force
        self.gpus, self.jobs = 0.0, 0


class UserLimitGate(Gate):
    """The limits of users; jobs that the cycle starts count at once."""

    def __init__(self, cycle: Cycle) -> None:
        super().__init__(cycle)
        self._limits: dict[str, list[_Counted]] = {}
        for one in cycle.planner.limits:
            self._limits.setdefault(one.limit.user, []).append(_Counted(one))
        for run in cycle.planner.runs.values():
            if run.terms.user in self._limits:
                self._count(run.terms.user, run.terms.account, run.amount.gpus)

    @staticmethod
    def is_in_force(planner: PlannerState) -> bool:
        return bool(planner.limits)

    def why_not(self, job_class: JobClass) -> Denial | None:
        gpus = job_class.wanted.gpus
        for one in self._over(job_class.key.terms.user, job_class.key.terms.account):
            limit = one.in_force.limit
            if limit.until_at is not None and limit.until_at <= self._cycle.now:
                continue
            if limit.max_jobs is not None and one.jobs >= limit.max_jobs:
                most = f"at most {plural(limit.max_jobs, 'running job')}" if limit.max_jobs else "no running jobs"
                return _denial(one.in_force, most, f"{one.jobs} running" if limit.max_jobs else "")
            if limit.max_gpus is not None and gpus and one.gpus + gpus > limit.max_gpus + 1e-6:
                most = f"at most {format_amount(limit.max_gpus)} {'GPU' if limit.max_gpus == 1 else 'GPUs'}"
                return _denial(one.in_force, most, f"{format_amount(one.gpus)} held, this asks {format_amount(gpus)}")
        return None

    def started(self, job_class: JobClass, amount: Resources, end_at: float, *, is_filler: bool) -> None:
        self._count(job_class.key.terms.user, job_class.key.terms.account, amount.gpus)

    def _count(self, user: str, account: str, gpus: float) -> None:
        for one in self._over(user, account):
            one.gpus += gpus
            one.jobs += 1

    def _over(self, user: str, account: str) -> list[_Counted]:
        limits = self._limits.get(user)
        if limits is None:
            return []
        names = {"", account, *(one.name for one in chain_of(account, self._cycle.settings.account))}
        return [one for one in limits if one.in_force.limit.account in names]


def _denial(one: LimitInForce, most: str, now: str) -> Denial:
    limit = one.limit
    where = f" in account {limit.account}" if limit.account else ""
    text = f"user {limit.user} may have {most}{where}" + (f"; {now}" if now else "")
    if limit.message:
        text += f": {limit.message}"
    text += f" ({f'set by {limit.by}' if limit.by else 'in the config file'}"
    text += f", until {one.until})" if one.until else ")"
    facts = {
        "user": limit.user,
        "account": limit.account or None,
        "max_gpus": limit.max_gpus,
        "max_jobs": limit.max_jobs,
        "message": limit.message,
        "set_by": limit.by or None,
        "until_at": limit.until_at,
    }
    return Denial(ReasonCode.USER_LIMIT, text, facts)
