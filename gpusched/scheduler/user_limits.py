"""Limits of single users: how many GPUs and running jobs, everywhere or in one account and those below it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from gpusched.model.queue_settings import chain_of
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, LimitInForce, Reason
from gpusched.model.states import ReasonCode
from gpusched.model.table_settings import UserLimit
from gpusched.model.units import format_amount, plural

if TYPE_CHECKING:
    from gpusched.scheduler.runs import ActiveRun


class UserLimitRules:
    """The limits of users during one cycle; jobs that it starts count at once."""

    def __init__(
        self,
        limits: Sequence[LimitInForce],
        runs: Callable[[], Collection[ActiveRun]],
        settings: Settings,
        now: float,
    ) -> None:
        """Args: runs: all running jobs, those of this cycle included."""
        self._limits: dict[str, list[LimitInForce]] = {}
        for one in limits:
            self._limits.setdefault(one.limit.user, []).append(one)
        self._runs = runs
        self._settings = settings
        self._now = now

    def move_to(self, now: float) -> None:
        self._now = now

    def why_not(self, key: ClassKey, gpus: float) -> Reason | None:
        """The limit that a job of this class would exceed; None if there is none."""
        limits = self._limits.get(key.user)
        if limits is None:
            return None
        for one in limits:
            limit = one.limit
            if (limit.until_at is not None and limit.until_at <= self._now) or not self._covers(limit, key.account):
                continue
            held = [run for run in self._runs() if run.user == key.user and self._covers(limit, _account(run))]
            held_gpus = sum(run.amount.gpus for run in held)
            if limit.max_jobs is not None and len(held) >= limit.max_jobs:
                most = f"at most {plural(limit.max_jobs, 'running job')}" if limit.max_jobs else "no running jobs"
                return _reason(one, most, f"{len(held)} running" if limit.max_jobs else "")
            if limit.max_gpus is not None and gpus and held_gpus + gpus > limit.max_gpus + 1e-6:
                most = f"at most {format_amount(limit.max_gpus)} {'GPU' if limit.max_gpus == 1 else 'GPUs'}"
                return _reason(one, most, f"{format_amount(held_gpus)} held, this asks {format_amount(gpus)}")
        return None

    def _covers(self, limit: UserLimit, account: str) -> bool:
        if not limit.account or limit.account == account:
            return True
        return any(one.name == limit.account for one in chain_of(account, self._settings.account))


def _account(run: ActiveRun) -> str:
    return run.job_class.key.account if run.job_class is not None else run.first.account


def _reason(one: LimitInForce, most: str, now: str) -> Reason:
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
    return Reason(ReasonCode.USER_LIMIT, text, facts)
