"""Commands that root types in a folder, or with a file, that somebody else may change."""

from __future__ import annotations

import os
import pwd
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from people import BOB, NEEDS_ROOT
from support import wait_until

from gpusched import client
from gpusched.cli.admin import doctor
from gpusched.errors import Refused
from gpusched.ports import Changes
from gpusched.store.backup import backup, restore
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job

pytestmark = NEEDS_ROOT


@pytest.mark.parametrize("look", [doctor._nvml_module, doctor.nvml])
def test_the_doctor_imports_no_module_from_the_working_folder(
    look: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "was run"
    (tmp_path / "pynvml.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "nvidia_signs", lambda: True)
    assert callable(look)
    look()
    assert not proof.exists()


def test_a_daemon_is_not_started_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, home = tmp_path / "was run", tmp_path / "home"
    there = tmp_path / "there"
    there.mkdir()
    for name in ("asyncio", "gpusched", "runpy"):
        (there / f"{name}.py").write_text(f"open({str(proof)!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(there)
    monkeypatch.setenv("GPUSCHED_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(os.path.abspath(client.__file__))))
    monkeypatch.setenv("GPUSCHED_FAKE_GPUS", "1x8GiB")
    client.start_daemon()
    with client.connect() as found:
        found.call("POST", "/v1/shutdown", {})
    wait_until(lambda: not (home / "run" / "api.sock").exists(), 30, "the daemon to end")
    assert not proof.exists()


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "state" / "gpusched.db"
    store = SqliteStore.open(path)
    store.commit(Changes(jobs={1: job(1), 2: job(2)}))
    store.close()
    return str(path)


@pytest.fixture
def bobs(tmp_path: Path) -> Path:
    """A folder of somebody else's, reached through root's own."""
    folder = tmp_path / "bobs"
    folder.mkdir()
    os.chown(folder, pwd.getpwnam(BOB).pw_uid, -1)
    return folder


def test_a_backup_does_not_write_into_a_planted_file(table: str, bobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns the folder swaps the half-made file for a link as soon as it is there."""
    victim = bobs.parent / "victim"
    victim.touch()
    real = sqlite3.connect

    def connect(path: str, *words: Any, **named: Any) -> Any:
        for half in list(bobs.glob("*.part-*")):
            half.unlink()
            half.symlink_to(victim)
        return real(path, *words, **named)

    monkeypatch.setattr("gpusched.store.backup.sqlite3.connect", connect)
    made = backup(table, str(bobs / "copy.db"))
    assert victim.read_bytes() == b""
    assert (made.jobs, os.stat(made.path).st_mode & 0o777, os.stat(made.path).st_uid) == (2, 0o600, 0)
    assert os.listdir(bobs) == ["copy.db"]
    assert [name for name in os.listdir(os.path.dirname(table)) if "part" in name] == []
    # It is replaced by the next one, and nothing else is.
    assert backup(table, str(bobs / "copy.db")).jobs == 2
    (bobs / "pipe").symlink_to(bobs / "fifo")
    os.mkfifo(bobs / "fifo")
    with pytest.raises(Refused, match="not a gpusched backup"):
        backup(table, str(bobs / "pipe"))


def test_a_backup_is_restored_as_it_was_verified(table: str, bobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns the folder puts their own table there right after root's was found to be root's."""
    made, forged = backup(table, str(bobs / "copy.db")).path, bobs / "forged.db"
    store = SqliteStore.open(forged)
    store.commit(Changes(jobs={number: job(number) for number in range(1, 7)}))
    store.close()
    real = sqlite3.connect

    def connect(path: str, *words: Any, **named: Any) -> Any:
        if forged.exists():
            os.replace(forged, made)
        return real(path, *words, **named)

    monkeypatch.setattr("gpusched.store.backup.sqlite3.connect", connect)
    assert restore(made, table, hold=True).jobs == 2
    assert not forged.exists()
    assert [name for name in os.listdir(os.path.dirname(table)) if name.endswith(("taken", "restoring"))] == []
