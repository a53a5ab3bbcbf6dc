"""Settings that live in the job table rather than in the config file: those with an end, and credits.

They are the daemon's own, recorded in the same commit as all that depends on them; see decision 36.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpusched.model.settings import Settings
from gpusched.model.value import Value, replace

Key = tuple[str, str]
"""Kind, and name within the kind."""


class Credit(Value):
    """GPU-hours on top of an account's budget, for the period in which they were given."""

    number: int
    account: str
    gpu_hours: float
    at: float
    by: str
    message: str = ""

    @property
    def key(self) -> Key:
        return "credit", str(self.number)


class UserLimit(Value):
    """What the jobs of one user may hold, everywhere or in one account and those below it."""

    user: str
    account: str = ""
    """Empty: in all accounts."""
    max_gpus: float | None = None
    """GPUs of all running jobs together."""
    max_jobs: int | None = None
    """Running jobs."""
    message: str = ""
    by: str = ""
    """Who set it; empty for one of the config file."""
    is_of_coordinator: bool = False
    """Whether it was set by a coordinator of the account, who may also change it."""
    at: float = 0.0
    until_at: float | None = None
    """When it ends by itself; None: never."""

    @property
    def key(self) -> Key:
        return "limit", f"{self.user} {self.account}".rstrip()


class Membership(Value):
    """A member whom a coordinator has added to an account or removed from it."""

    account: str
    user: str
    is_member: bool = False
    at: float = 0.0
    by: str = ""

    @property
    def key(self) -> Key:
        return "member", f"{self.account} {self.user}"


class BudgetTold(Value):
    """How far an account's or user's budget was spent when people were last told."""

    account: str
    user: str
    """Empty for the whole account."""
    since: float
    """Begin of the period."""
    granted_s: float
    percent: int

    @property
    def key(self) -> Key:
        return "told", f"{self.account} {self.user}".rstrip()


class QueuePause(Value):
    """That nothing new starts from a queue and those below it."""

    queue: str
    by: str = ""
    at: float = 0.0
    message: str = ""

    @property
    def key(self) -> Key:
        return "pause", self.queue


TableSetting = Credit | UserLimit | Membership | BudgetTold | QueuePause

KINDS: Mapping[str, type[TableSetting]] = MappingProxyType(
    {"credit": Credit, "limit": UserLimit, "member": Membership, "told": BudgetTold, "pause": QueuePause}
)

SECTIONS: Mapping[str, str] = MappingProxyType(
    {"credit": "credit", "limit": "user_limit", "member": "member", "pause": "queue_pause"}
)
"""Sections of the record of settings, by kind; none of them is a section of the config file."""


def document_of_table(settings: Mapping[Key, TableSetting]) -> dict[str, dict[str, Any]]:
    """What the record of settings says of them, by section and name."""
    document: dict[str, dict[str, Any]] = {}
    for (kind, name), one in sorted(settings.items(), key=lambda item: item[0]):
        if kind in SECTIONS:
            values = {field: getattr(one, field) for field in one.__struct_fields__}
            # Unset fields are left out, so that a later field changes no old record; 0 is a value.
            unset = [field for field, value in values.items() if value is None or value is False or value == ""]
            content = {field: value for field, value in values.items() if field not in unset}
            document.setdefault(SECTIONS[kind], {})[name] = content
    return document


def with_members(settings: Settings, table: Mapping[Key, TableSetting]) -> Settings:
    """The settings of the config file with what coordinators have said about members."""
    accounts = dict(settings.account)
    for one in table.values():
        if isinstance(one, Membership) and one.account in accounts:
            users = dict(accounts[one.account].users)
            if one.is_member:
                users.setdefault(one.user, 1.0)
            else:
                users.pop(one.user, None)
            accounts[one.account] = replace(accounts[one.account], users=users)
    return settings if accounts == settings.account else replace(settings, account=accounts)


def credit_in(account: str, since: float, until_at: float | None, settings: Mapping[Key, TableSetting]) -> float:
    """GPU-hours that were given to an account in a period on top of its budget."""
    return sum(
        one.gpu_hours
        for one in settings.values()
        if isinstance(one, Credit)
        and one.account == account
        and since <= one.at
        and (until_at is None or one.at < until_at)
    )
