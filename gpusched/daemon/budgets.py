"""What the runs of the present period cost each budget: derived from the run table, so that it cannot differ from it.

The sums of ended runs are read from the table once a period, and after each load of the memory; runs that end later are
added to them. No second record exists that a crash could leave behind or ahead of the runs.
"""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import Watch
from gpusched.model.alerts import Alert
from gpusched.model.history import models_in, seconds_in
from gpusched.model.job import Job, Run
from gpusched.model.queue_settings import EVERYBODY, AccountSettings, chain_of
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget
from gpusched.model.table_settings import BudgetTold, credit_in
from gpusched.model.value import replace
from gpusched.periods import Period, period_at
from gpusched.ports import Store
from gpusched.ports.tables import TABLE_SETTINGS
from gpusched.scheduler.budget import booked_ahead_s, hours_of, spent_of
from gpusched.scheduler.cluster_state import GpuSpeeds
from gpusched.scheduler.request_units import squeeze

Cards = Mapping[str, tuple[str, int | None]]
"""Model and VRAM in MiB of each card, by UUID."""
_HOUR_S = 3600.0


def has_budgets(settings: Settings) -> bool:
    return any(_is_budget(account) for account in settings.account.values())


def _is_budget(account: AccountSettings) -> bool:
    return account.gpu_hours is not None or account.gpu_hours_per_user is not None


class BudgetAlerts(Watch):
    """Tells people when a budget has reached a mark, each mark once in a period."""

    name = "budgets"

    def __init__(self, budgets: Callable[[float], Sequence[Budget]]) -> None:
        """Args: budgets: those of an instant."""
        self._budgets = budgets
        self._looked_at = -inf

    def next_due(self, state: DaemonState, settings: Settings) -> float | None:
        if not (settings.budget.alert_at and state.open_runs and has_budgets(settings)):
            return None
        return self._looked_at + LOOK_S

    def carry_out(self, tx: TickTransaction) -> None:
        """Raise the alerts that are due, and record the marks that they are about."""
        marks, now = sorted(tx.settings.budget.alert_at), tx.now
        if not marks or 0 <= now - self._looked_at < LOOK_S or not has_budgets(tx.settings):
            return
        tx.restore_if_dropped(self, "_looked_at")
        self._looked_at = now
        for budget in self._budgets(now):
            grants = [("", budget.gpu_s)] + [(user, budget.user_gpu_s) for user, _, _ in budget.spent]
            for user, granted_s in grants:
                if not granted_s:
                    continue
                used_s, _ = spent_of(budget, user or None)
                reached = max((mark for mark in marks if used_s * 100 >= granted_s * mark), default=0)
                told = BudgetTold(budget.account, user, budget.since, granted_s, reached)
                before = tx.state.rows[TABLE_SETTINGS].get(told.key)
                is_same = isinstance(before, BudgetTold) and (before.since, before.granted_s) == (told.since, granted_s)
                if reached <= (before.percent if is_same and isinstance(before, BudgetTold) else 0):
                    continue
                tx.set_in_table(told.key, told)
                tx.messages += _alerts(budget, user, granted_s, used_s, reached, tx)


LOOK_S = 60.0
"""Time between looks at what is used up."""


def _alerts(
    budget: Budget, user: str, granted_s: float, used_s: float, percent: int, tx: TickTransaction
) -> Iterator[Alert]:
    account = tx.settings.account[budget.account]
    who = f"user {user} of {account.name}" if user else account.name
    text = f"{who} used {hours_of(used_s)} of {hours_of(granted_s)} GPU-hours{budget.period}, {percent} % of it"
    left_s = max(0.0, granted_s - used_s)
    spent = "jobs with GPUs wait" if budget.when_spent == "wait" else "jobs with GPUs run as fillers"
    text += f"; {hours_of(left_s, down=True)} left" if left_s else f"; {spent}"
    if budget.again:
        text += f", again {budget.again}"
    for name in (user,) if user else _people_of(account, budget):
        try:
            uid = pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
        facts = (("event", "budget"), ("message", text), ("at", tx.now), ("user", name), ("account", account.name))
        key = f"budget {account.name} {user} {budget.since:.0f} {granted_s:.0f} {percent} {uid}"
        yield Alert(key, "budget", ("budget",), uid, tx.now, facts)


def _people_of(account: AccountSettings, budget: Budget) -> list[str]:
    """Its coordinators; else its members by name; of one that is open to groups or to all, those who have used it."""
    named = account.coordinators or [name for name in account.users if name != EVERYBODY]
    return sorted(named or {user for user, _, _ in budget.spent})


class BudgetLedger:
    """The budgets of one daemon, at any instant."""

    def __init__(self, cards: Callable[[], Cards]) -> None:
        """Args: cards: model and VRAM of each card in MiB, by UUID."""
        self._cards = cards
        self._sums: dict[float, dict[tuple[str, str, str], float]] = {}
        """GPU-seconds of ended runs by account, user and model, for each begin of a period."""
        self._state: DaemonState | None = None
        self.edge_at: float | None = None
        """When the next period begins."""

    def at(self, now: float, settings: Settings, state: DaemonState, store: Store) -> tuple[Budget, ...]:
        """Every budget with what was used and is booked, by account."""
        if not has_budgets(settings):
            self.edge_at = None
            state.take_ended()
            return ()
        if state is not self._state:
            self._sums, self._state = {}, state
        accounts = {name: one for name, one in sorted(settings.account.items()) if _is_budget(one)}
        periods = {name: period_at(now, one.budget_period) for name, one in accounts.items()}
        self.edge_at = min((one.until_at for one in periods.values() if one.until_at is not None), default=None)
        cards = self._cards()
        self._bring_up_to_date({one.since for one in periods.values()}, now, state, store, cards)
        below = {name: {one for one in settings.account if _is_below(one, name, settings)} for name in accounts}
        counted = _Counted(now, state, cards, GpuSpeeds(settings.budget.weights) if settings.budget.weights else None)
        return tuple(
            self._budget(one, periods[name], tuple(sorted(below[name])), counted) for name, one in accounts.items()
        )

    def _bring_up_to_date(self, begins: set[float], now: float, state: DaemonState, store: Store, cards: Cards) -> None:
        ended = state.take_ended()
        for since in list(self._sums):
            if since not in begins:
                del self._sums[since]
            else:
                _add(self._sums[since], ended, since, now, cards)
        missing = begins - self._sums.keys()
        if not missing:
            return
        # Ends of this tick are not in the table yet; those of earlier ones are in both.
        recorded = {run.id for run in store.runs({run.job_id for _, run in ended}) if run.end_at is not None}
        fresh = [(job, run) for job, run in ended if run.id not in recorded]
        for since in missing:
            self._sums[since] = store.budget_sums(since, now)
            _add(self._sums[since], fresh, since, now, cards)

    def _budget(self, account: AccountSettings, period: Period, below: tuple[str, ...], counted: _Counted) -> Budget:
        credit_s = credit_in(account.name, period.since, period.until_at, counted.state.rows[TABLE_SETTINGS]) * _HOUR_S
        budget = Budget(
            account=account.name,
            accounts=below,
            gpu_s=None if account.gpu_hours is None else max(0.0, account.gpu_hours * _HOUR_S + credit_s),
            user_gpu_s=None if account.gpu_hours_per_user is None else account.gpu_hours_per_user * _HOUR_S,
            until_at=period.until_at,
            period=period.name,
            again=period.again,
            weights=counted.weights,
            credit_s=credit_s,
            since=period.since,
            when_spent=account.when_spent,
        )
        spent: dict[str, tuple[float, float]] = {}
        for (name, user, model), amount in self._sums[period.since].items():
            if name in below:
                used, booked = spent.get(user, (0.0, 0.0))
                spent[user] = used + amount * counted.weight(model), booked
        for one in counted.running:
            if one.account not in below:
                continue
            used, booked = spent.get(one.user, (0.0, 0.0))
            used += seconds_in(one.run, period.since, counted.now, one.suspended_at) * one.cards
            spent[one.user] = used, booked + booked_ahead_s(one.left_s, budget, counted.now) * one.cards
        return replace(budget, spent=tuple((user, *spent[user]) for user in sorted(spent)))


@dataclass(frozen=True, slots=True)
class _Running:
    """A run that books the rest of its time."""

    run: Run
    account: str
    user: str
    suspended_at: float | None
    left_s: float | None
    cards: float
    """Weighted."""


class _Counted:
    """What all budgets of one instant have in common: the running jobs, looked at once."""

    def __init__(self, now: float, state: DaemonState, cards: Cards, weights: GpuSpeeds | None) -> None:
        self.now = now
        self.state = state
        self._weights = weights
        models = {squeeze(model) for model, _ in cards.values()}
        self.weights = () if weights is None else tuple((model, weights.of(model)) for model in sorted(models))
        self.running: list[_Running] = []
        for run in state.open_runs.values():
            job = state.jobs.get(run.job_id)
            if job is None or run.native is not None or run.is_filler or not run.gpus:
                continue
            ran_s = seconds_in(run, 0.0, now, job.suspended_at)
            limit_s = job.spec.time_limit_s
            left_s = None if limit_s is None else max(0.0, limit_s - ran_s)
            held = sum(amount * self.weight(model) for model, amount in models_in(run.gpus, cards).items())
            self.running.append(_Running(run, job.spec.account, job.user, job.suspended_at, left_s, held))

    def weight(self, model: str) -> float:
        return 1.0 if self._weights is None else self._weights.of(squeeze(model))


def _add(
    sums: dict[tuple[str, str, str], float],
    ended: Iterable[tuple[Job, Run]],
    since: float,
    now: float,
    cards: Cards,
) -> None:
    for job, run in ended:
        if not run.is_free:
            for model, amount in models_in(run.gpus, cards).items():
                mark = job.spec.account, job.user, model
                sums[mark] = sums.get(mark, 0.0) + seconds_in(run, since, now) * amount


def _is_below(name: str, above: str, settings: Settings) -> bool:
    return any(one.name == above for one in chain_of(name, settings.account))
