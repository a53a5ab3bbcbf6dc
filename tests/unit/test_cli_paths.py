"""Where a scheduler keeps what, by environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched import paths

VARIABLES = ("GPUSCHED_HOME", "GPUSCHED_CONFIG", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")


def places() -> list[str]:
    return [
        *(paths.state_dir(), paths.database(), paths.spool_dir(), paths.log_file(), paths.daemon_output()),
        *(paths.lock_file(), paths.start_lock(), paths.socket_path(), paths.config_file()),
        paths.notify_file(),
    ]


def test_a_home_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("GPUSCHED_HOME", "/lab")
    assert places() == [
        *("/lab", "/lab/gpusched.db", "/lab/spool", "/lab/log/gpuschedd.log", "/lab/log/gpuschedd.out"),
        *("/lab/daemon.lock", "/lab/start.lock", "/lab/run/api.sock", "/lab/config.toml"),
        "/lab/notify.toml",
    ]


def test_without_a_home_the_users_folders_are_used() -> None:
    state = "/home/ada/.local/state/gpusched"
    assert paths.database() == f"{state}/gpusched.db"
    assert paths.socket_path() == f"{state}/run/api.sock"
    assert paths.config_file() == "/home/ada/.config/gpusched/config.toml"


def test_absolute_xdg_folders_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    assert paths.database() == "/state/gpusched/gpusched.db"
    assert paths.socket_path() == "/run/user/7/gpusched/api.sock"
    assert paths.config_file() == "/config/gpusched/config.toml"
    for name in VARIABLES[2:]:
        monkeypatch.setenv(name, "not/absolute")
    assert paths.state_dir() == "/home/ada/.local/state/gpusched"
    assert paths.socket_path() == "/home/ada/.local/state/gpusched/run/api.sock"
    assert paths.config_file() == "/home/ada/.config/gpusched/config.toml"


def test_locks_lie_beside_the_database_they_protect(monkeypatch: pytest.MonkeyPatch) -> None:
    before = paths.lock_file(), paths.start_lock()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert (paths.lock_file(), paths.start_lock()) == before


def test_relative_homes_and_tildes_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUSCHED_HOME", "lab")
    assert paths.database() == str(tmp_path / "lab" / "gpusched.db")
    monkeypatch.setenv("GPUSCHED_HOME", "~/lab")
    assert paths.state_dir() == "/home/ada/lab"
    monkeypatch.setenv("GPUSCHED_CONFIG", "~/other.toml")
    assert paths.config_file() == "/home/ada/other.toml"


def test_an_empty_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", "")
    assert paths.home() is None
