"""Which process the daemon of all users takes for the web page's: the one of the configured account."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched.addons.web import door
from gpusched.addons.web.settings import WebSettings
from gpusched.model.commands import Caller
from gpusched.model.settings import Settings


def service(user: str, *, serves_all: bool = True) -> Any:
    settings = Settings(of_add_ons={"web": WebSettings(user=user)})
    return SimpleNamespace(daemon=SimpleNamespace(serves_all=serves_all), settings=settings)


@pytest.fixture(autouse=True)
def dynamic_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd records a service with DynamicUser=yes."""
    os.symlink("65502", tmp_path / "direct:gpusched-web")
    os.symlink("gpusched-web", tmp_path / "direct:65502")
    monkeypatch.setattr(door, "DYNAMIC_USERS", str(tmp_path))


@pytest.mark.parametrize(
    ("user", "uid", "is_it"),
    [
        pytest.param("root", 0, True, id="an account"),
        pytest.param("root", 65502, False, id="another one"),
        pytest.param("gpusched-web", 65502, True, id="a dynamic user that the name service does not know"),
        pytest.param("gpusched-web", 65503, False, id="another dynamic user"),
        pytest.param("65502", 65502, False, id="a uid is no name"),
        pytest.param("no-such-account", 65502, False, id="nobody"),
    ],
)
def test_the_account_decides(user: str, uid: int, is_it: bool) -> None:
    assert door.is_web_process(service(user), Caller(uid, "x")) is is_it


def test_the_owner_of_a_personal_daemon_serves_its_page() -> None:
    assert door.is_web_process(service("no-such-account", serves_all=False), Caller(1000, "x"))
