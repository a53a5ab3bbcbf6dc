"""How a supervisor makes the checkpoint folder of a job: anew, or of one that nobody needs any more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched.engine.supervisor.launch import CheckpointBase


def make(base: Path, spare: str | None) -> Path:
    folder = base / "54"
    env = {"GPUSCHED_CHECKPOINT_DIR": str(folder)}
    ticket = {"checkpoint_dir": str(folder), "spare_checkpoint_dir": spare, "env": env}
    assert CheckpointBase().make_folder(ticket, None) is None
    assert env
    assert folder.stat().st_mode & 0o7777 == 0o700
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir(mode=0o700)
    return made


def test_an_empty_folder_is_renamed(base: Path) -> None:
    (base / "45").mkdir(mode=0o700)
    number = (base / "45").stat().st_ino
    folder = make(base, str(base / "45"))
    assert folder.stat().st_ino == number
    assert os.listdir(base) == ["54"]


def _fill(spare: Path) -> None:
    spare.mkdir(mode=0o700)
    (spare / "x").touch()


def _open_it(spare: Path) -> None:
    spare.mkdir()
    spare.chmod(0o755)


def _link(spare: Path) -> None:
    (spare.parent.parent / "other").mkdir(mode=0o700)
    spare.symlink_to(spare.parent.parent / "other")


@pytest.mark.parametrize("prepare", [_fill, _open_it, _link, Path.touch], ids=["not empty", "open", "a link", "a file"])
def test_anything_but_an_empty_folder_of_the_user_alone_stays(base: Path, prepare: Callable[[Path], None]) -> None:
    prepare(base / "45")
    make(base, str(base / "45"))
    assert sorted(os.listdir(base)) == ["45", "54"]


@pytest.mark.parametrize("spare", ["45", "../elsewhere/45"], ids=["gone", "elsewhere"])
def test_without_one_beside_it_a_folder_is_made(base: Path, spare: str) -> None:
    elsewhere = base.parent / "elsewhere" / "45"
    elsewhere.mkdir(parents=True, mode=0o700)
    make(base, os.path.normpath(base / spare))
    assert elsewhere.exists()


def test_a_folder_with_checkpoints_of_an_earlier_run_is_kept(base: Path) -> None:
    (base / "45").mkdir(mode=0o700)
    _fill(base / "54")
    assert (make(base, str(base / "45")) / "x").exists()
    assert (base / "45").exists()
