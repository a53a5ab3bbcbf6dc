"""What the runs of the present period cost each budget: derived from the run table, so that it cannot differ from it.

The sums of ended runs are read from the table once a period, and after each load of the memory; runs that end later are
added to them. No second record exists that a crash could leave behind or ahead of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from gpusched.model.history import cards_in, seconds_in
from gpusched.model.job import Job, Run
from gpusched.model.settings import AccountSettings, Settings, chain_of
from gpusched.model.snapshot import Budget
from gpusched.model.value import replace
from gpusched.periods import Period, period_at
from gpusched.ports import Store
from gpusched.scheduler.budget import booked_ahead_s

if TYPE_CHECKING:
    from gpusched.daemon.state import DaemonState


def has_budgets(settings: Settings) -> bool:
    return any(_is_budget(account) for account in settings.account.values())


def _is_budget(account: AccountSettings) -> bool:
    return account.gpu_hours is not None or account.gpu_hours_per_user is not None


class BudgetLedger:
    """The budgets of one daemon, at any instant."""

    def __init__(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        """Args: sizes: VRAM of each card in MiB, by UUID."""
        self._sizes = sizes
        self._sums: dict[float, dict[tuple[str, str], float]] = {}
        """GPU-seconds of ended runs by account and user, for each begin of a period."""
        self._world: DaemonState | None = None
        self._edge_at: float | None = None

    def at(self, now: float, settings: Settings, world: DaemonState, store: Store) -> tuple[Budget, ...]:
        """Every budget with what was used and is booked, by account."""
        if not has_budgets(settings):
            self._edge_at = None
            world.take_ended()
            return ()
        if world is not self._world:
            self._sums, self._world = {}, world
        accounts = {name: one for name, one in sorted(settings.account.items()) if _is_budget(one)}
        periods = {name: period_at(now, one.budget_period) for name, one in accounts.items()}
        self._edge_at = min((one.until_at for one in periods.values() if one.until_at is not None), default=None)
        self._bring_up_to_date({one.since for one in periods.values()}, now, world, store)
        below = {name: {one for one in settings.account if _is_below(one, name, settings)} for name in accounts}
        return tuple(
            self._budget(one, periods[name], tuple(sorted(below[name])), now, world) for name, one in accounts.items()
        )

    @property
    def edge_at(self) -> float | None:
        """When the next period begins."""
        return self._edge_at

    def _bring_up_to_date(self, begins: set[float], now: float, world: DaemonState, store: Store) -> None:
        ended = world.take_ended()
        for since in list(self._sums):
            if since not in begins:
                del self._sums[since]
            else:
                self._add(self._sums[since], ended, since, now)
        missing = begins - self._sums.keys()
        if not missing:
            return
        # Ends of this tick are not in the table yet; those of earlier ones are in both.
        recorded = {run.id for run in store.runs({run.job_id for _, run in ended}) if run.end_at is not None}
        fresh = [(job, run) for job, run in ended if run.id not in recorded]
        for since in missing:
            self._sums[since] = store.budget_sums(since, now)
            self._add(self._sums[since], fresh, since, now)

    def _add(
        self, sums: dict[tuple[str, str], float], ended: Iterable[tuple[Job, Run]], since: float, now: float
    ) -> None:
        for job, run in ended:
            if not run.is_free:
                mark = job.spec.account, job.user
                sums[mark] = sums.get(mark, 0.0) + seconds_in(run, since, now) * cards_in(run.gpus, self._sizes())

    def _budget(
        self, account: AccountSettings, period: Period, below: tuple[str, ...], now: float, world: DaemonState
    ) -> Budget:
        hour_s = 3600.0
        budget = Budget(
            account=account.name,
            accounts=below,
            gpu_s=None if account.gpu_hours is None else account.gpu_hours * hour_s,
            user_gpu_s=None if account.gpu_hours_per_user is None else account.gpu_hours_per_user * hour_s,
            until_at=period.until_at,
            period=period.name,
            again=period.again,
        )
        spent: dict[str, tuple[float, float]] = {}
        for (name, user), amount in self._sums[period.since].items():
            if name in below:
                used, booked = spent.get(user, (0.0, 0.0))
                spent[user] = used + amount, booked
        sizes = self._sizes()
        for run in world.open_runs.values():
            job = world.jobs.get(run.job_id)
            if job is None or run.native is not None or not run.gpus or job.spec.account not in below:
                continue
            cards = cards_in(run.gpus, sizes)
            ran_s = seconds_in(run, 0.0, now, job.suspended_at)
            limit_s = job.spec.time_limit_s
            left_s = None if limit_s is None else max(0.0, limit_s - ran_s)
            used, booked = spent.get(job.user, (0.0, 0.0))
            used += seconds_in(run, period.since, now, job.suspended_at) * cards
            spent[job.user] = used, booked + booked_ahead_s(left_s, budget, now) * cards
        return replace(budget, spent=tuple((user, *spent[user]) for user in sorted(spent)))


def _is_below(name: str, above: str, settings: Settings) -> bool:
    return any(one.name == above for one in chain_of(name, settings.account))
