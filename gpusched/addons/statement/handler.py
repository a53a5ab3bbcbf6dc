"""The monthly statement: what each account and user held, used and may still use, within one calendar month."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from aiohttp import web

from gpusched.access import is_private, own_accounts
from gpusched.api.asked import RequestQuery, about
from gpusched.api.handlers.queues import account_rows, budget_json
from gpusched.api.requests import respond
from gpusched.api.route import Route
from gpusched.api.visibility import Viewer
from gpusched.errors import Refused, UsageError
from gpusched.model.history import AccountUse
from gpusched.model.queue_settings import AccountSettings, chain_of, parent_in
from gpusched.model.settings import Settings
from gpusched.model.table_settings import credit_in
from gpusched.model.tariff import JOULES_PER_KWH
from gpusched.periods import Period, month_named, period_at, zone_at
from gpusched.ports.tables import TABLE_SETTINGS
from gpusched.scheduler.cluster_state import GpuSpeeds
from gpusched.scheduler.request_units import squeeze

_HOUR_S = 3600.0
_DAY_S = 86400.0
_ALL = ""
"""The whole machine; no account has an empty name."""


class StatementQuery(RequestQuery):
    month: Annotated[str, about("2026-11, this (default) or last")] = "this"


async def statement(viewer: Viewer, query: StatementQuery) -> web.Response:
    """What accounts and users held, used and may still use in a calendar month of the daemon's time zone; of callers
    from whom usage is hidden only their own."""
    scheduler, settings = viewer.service.scheduler, viewer.service.settings
    now = scheduler.now()
    try:
        month = month_named(query.month, now)
    except ValueError as error:
        raise UsageError(str(error), "for example: ghist --statement 2026-11") from None
    name = month.name.removeprefix(" of ")
    assert month.until_at is not None
    if month.since > now:
        raise Refused(f"{name} has not begun", "for example: ghist --statement this")
    found = _Statement(viewer, month, now)
    kept_s = settings.history.keep_days * _DAY_S
    return respond(
        month=name,
        since=month.since,
        until=month.until_at,
        now=now,
        time_zone=zone_at(month.since),
        cluster_name=settings.slurm.cluster_name,
        is_final=month.until_at <= now and not found.open_runs,
        is_complete=not kept_s or month.since >= now - kept_s,
        currency=settings.energy.currency,
        is_as_set_then=found.is_as_set_then,
        rows=found.rows(),
    )


class _Statement:
    """One month, as visible to one viewer."""

    def __init__(self, viewer: Viewer, month: Period, now: float) -> None:
        self._settings: Settings = viewer.service.settings
        self._scheduler = viewer.service.scheduler
        self._now = now
        self._month = month
        assert month.until_at is not None
        then = viewer.service.daemon.settings_before(month.until_at) if month.until_at <= now else None
        self.is_as_set_then = month.until_at > now or then is not None
        """Whether budgets and weights are those at the end of the month, or now; else they are today's."""
        self._budgets = self._settings.account if then is None else _budgets_in(then)
        self._weights = GpuSpeeds(self._settings.budget.weights if then is None else _weights_in(then))
        caller = viewer.caller
        self._is_own = viewer.is_restricted or any(
            is_private(what, caller, self._settings) for what in ("usage", "accounts")
        )
        self._user = caller.user if self._is_own else None
        self._own = set(own_accounts(caller, self._settings))
        # Of a restricted viewer, no sum over others is made.
        self._uses = self._scheduler.store.account_uses(month.since, month.until_at, now, self._user)
        self._totals = self._totals_of(self._uses)
        self._shares = self._fair_shares()
        self._charged: dict[float, list[AccountUse]] = {} if self._is_own else {month.since: self._uses}
        self._budgets_now = {one.account: one for one in self._scheduler.budgets(now)} if month.until_at > now else {}

    @property
    def open_runs(self) -> int:
        return self._totals[_ALL].open_runs

    def _totals_of(self, uses: Iterable[AccountUse]) -> dict[str, AccountUse]:
        totals = {_ALL: AccountUse(_ALL, "")}
        for one in uses:
            for name in (*self._chain(one.account), _ALL):
                totals.setdefault(name, AccountUse(name, "")).add(one)
        return totals

    def _fair_shares(self) -> dict[tuple[str, str | None], float]:
        """Of the whole machine, by account and user."""
        found: dict[tuple[str, str | None], float] = {}
        above: list[float] = []
        for row in account_rows(self._scheduler):
            del above[row["depth"] :]
            above.append(row["norm_shares"] * (above[-1] if above else 1.0))
            found[row["account"] or _ALL, row["user"]] = above[-1]
        return found

    def _chain(self, account: str) -> list[str]:
        return [one.name for one in chain_of(account, self._settings.account)] or [account]

    def rows(self) -> list[dict[str, Any]]:
        """The whole machine, then each account before its users and the accounts below it."""
        accounts = self._settings.account
        names = sorted({*accounts, *(one.account for one in self._uses)})
        shown = {name for name in names if self._shows_budget(self._budgets.get(name))}
        below: dict[str | None, list[str]] = {}
        for name in names:
            below.setdefault(parent_in(name, accounts), []).append(name)
        rows = [self._row(self._totals[_ALL], None, 0)]
        stack = [(name, 1) for name in reversed(below.get(None, []))]
        while stack:
            name, depth = stack.pop()
            stack.extend((child, depth + 1) for child in reversed(below.get(name, [])))
            if name in self._totals or name in shown:
                total = self._totals.get(name) or AccountUse(name, "")
                rows.append(self._row(total, None, depth))
                users = [one for one in self._uses if one.account == name]
                users.sort(key=lambda one: (-sum(one.gpu_s.values()), -one.cpu_s, one.user))
                rows += [self._row(one, one.user, depth + 1) for one in users]
        return rows

    def _shows_budget(self, account: AccountSettings | None) -> bool:
        if account is None or (account.gpu_hours is None and account.gpu_hours_per_user is None):
            return False
        return not self._is_own or any(account.name in self._chain(name) for name in self._own)

    def _row(self, use: AccountUse, user: str | None, depth: int) -> dict[str, Any]:
        everything = sum(self._totals[_ALL].gpu_s.values())
        gpu_s = sum(use.gpu_s.values())
        return {
            "account": use.account or None,
            "user": user,
            "depth": depth,
            "jobs": use.jobs,
            "runs": use.runs,
            "open_runs": use.open_runs,
            "gpu_hours": gpu_s / _HOUR_S,
            "gpu_hours_by_type": {model: use.gpu_s[model] / _HOUR_S for model in sorted(use.gpu_s)},
            "gpu_hours_used": _scaled(use.busy_gpu_s, _HOUR_S),
            "gpu_hours_charged": self._charged_hours(use),
            "gpu_hours_filler": use.filler_gpu_s / _HOUR_S,
            "cpu_hours": use.cpu_s / _HOUR_S,
            "cpu_hours_used": _scaled(use.busy_cpu_s, _HOUR_S),
            "energy_kwh": _scaled(use.energy_j, JOULES_PER_KWH),
            "grams": use.grams,
            "cost": use.cost,
            "fair_share": self._shares.get((use.account, user)),
            # Of a hidden sum, no part is shown.
            "share_used": None if self._is_own or not everything else gpu_s / everything,
            "budget": self._budget(use.account, user),
        }

    def _charged_hours(self, use: AccountUse) -> float:
        """As budgets count them."""
        return sum(amount * self._weights.of(squeeze(model)) for model, amount in use.charged_gpu_s.items()) / _HOUR_S

    def _budget(self, name: str, user: str | None) -> dict[str, Any] | None:
        """What is left of the budget at the end of the month, or now; its period may be longer than the month."""
        account = self._budgets.get(name)
        if account is None or not self._shows_budget(account):
            return None
        granted = account.gpu_hours if user is None else account.gpu_hours_per_user
        if granted is None:
            return None
        if (budget := self._budgets_now.get(name)) is not None:
            # While the month goes on, what jobs are held against.
            granted_s = budget.gpu_s if user is None else budget.user_gpu_s
            now = budget_json(budget, user, granted_s or 0.0)
            return {key: now[key] for key in _SHOWN}
        assert self._month.until_at is not None
        period = period_at(self._month.until_at - 1, account.budget_period)
        if period.since not in self._charged:
            self._charged[period.since] = self._scheduler.store.account_uses(
                period.since, self._month.until_at, self._now
            )
        if user is None:
            known = self._scheduler.state.rows[TABLE_SETTINGS]
            granted = max(0.0, granted + credit_in(name, period.since, period.until_at, known))
        used = sum(
            self._charged_hours(one)
            for one in self._charged[period.since]
            if name in self._chain(one.account) and user in (None, one.user)
        )
        return {
            "period": period.name.removeprefix(" of ") or "all time",
            "granted_gpu_hours": granted,
            "used_gpu_hours": used,
            "booked_gpu_hours": 0.0,
            "left_gpu_hours": max(0.0, granted - used),
        }


_SHOWN = ("period", "granted_gpu_hours", "used_gpu_hours", "booked_gpu_hours", "left_gpu_hours")
"""Keys of a budget in a statement."""


_OF_BUDGETS = ("gpu_hours", "gpu_hours_per_user", "budget_period")


def _budgets_in(document: Mapping[str, Any]) -> dict[str, AccountSettings]:
    """Accounts with their budgets alone. Args: document: of all settings, as the record of settings has it."""
    accounts = document.get("account", {})
    return {
        name: AccountSettings(name, **{key: known[key] for key in _OF_BUDGETS if key in known})
        for name, known in accounts.items()
    }


def _weights_in(document: Mapping[str, Any]) -> dict[str, float]:
    return dict(document.get("budget", {}).get("weights", {}))


def _scaled(amount: float | None, unit: float) -> float | None:
    return None if amount is None else amount / unit


ROUTES = (
    Route(
        "GET",
        "/v1/statement",
        statement,
        "month, since, until, now, time_zone, cluster_name, is_final, is_complete, currency, rows (the whole "
        "machine, then each account before its users and the accounts below it)",
    ),
)
