"""What a supervisor remembers of its own account between one run and the next."""

from __future__ import annotations

import pwd
import time

import pytest

from gpusched.engine.supervisor.launch import ACCOUNT_CHECK_S, OwnAccount


class Accounts:
    """A user database and a clock that tests move; counts what is looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.homes = {1000: "/home/ann", 1001: "/home/bob"}
        self.looked_up: list[int] = []
        self.now = 100.0
        monkeypatch.setattr(pwd, "getpwuid", self._find)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def _find(self, uid: int) -> pwd.struct_passwd:
        self.looked_up.append(uid)
        return pwd.struct_passwd(("user", "x", uid, uid, "", self.homes[uid], "/bin/sh"))


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    return Accounts(monkeypatch)


def home_of(own: OwnAccount, uid: int) -> str | None:
    found = own.look(uid)
    return None if found is None else found.pw_dir


def test_runs_in_quick_succession_share_one_lookup(accounts: Accounts) -> None:
    own = OwnAccount()
    assert [home_of(own, 1000) for _ in range(3)] == ["/home/ann"] * 3
    assert accounts.looked_up == [1000]


def test_a_changed_account_is_noticed_after_a_while(accounts: Accounts) -> None:
    own = OwnAccount()
    assert home_of(own, 1000) == "/home/ann"
    accounts.homes[1000] = "/data/ann"
    accounts.now += ACCOUNT_CHECK_S
    assert home_of(own, 1000) == "/data/ann"


def test_another_uid_is_looked_up(accounts: Accounts) -> None:
    own = OwnAccount()
    assert [home_of(own, 1000), home_of(own, 1001)] == ["/home/ann", "/home/bob"]


def test_an_account_that_is_missing_is_looked_up_each_time(accounts: Accounts) -> None:
    own = OwnAccount()
    assert home_of(own, 7) is None
    accounts.homes[7] = "/home/new"
    assert home_of(own, 7) == "/home/new"
