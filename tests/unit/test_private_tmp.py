"""The folders that a run has in the place of /tmp: what it left there goes with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.engine.linux import mounts


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(mounts, "PLACES", (str(tmp_path),))
    made = mounts.make("7.1")
    yield made
    # pytest's own clean-up descends, too.
    subprocess.run(["rm", "-rf", "--", *made], check=True)


def nest(folder: str, depth: int) -> None:
    """Folders within folders, deeper than a path can say."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=at)
        with open(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=at), "w"):
            pass
        at, before = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at), at
        os.close(before)
    os.close(at)


def test_deeply_nested_folders_are_removed(folders: list[str]) -> None:
    """One that failed here would end no run: its supervisor ended instead."""
    nest(f"{folders[0]}/tmp", 3000)
    mounts.remove(folders)
    assert not os.path.exists(folders[0])


def test_removal_does_not_follow_links(folders: list[str], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis").touch()
    inside = Path(folders[0]) / "tmp"
    (inside / "link").symlink_to(kept)
    (inside / "folder").mkdir()
    (inside / "folder" / "link").symlink_to(kept)
    os.mkfifo(inside / "pipe")
    mounts.remove(folders)
    assert not os.path.exists(folders[0])
    assert (kept / "thesis").exists()


def test_slow_removal_is_left_to_the_machine(folders: list[str]) -> None:
    (Path(folders[0]) / "tmp" / "file").touch()
    mounts.remove(folders, patience_s=-1.0)
    assert os.path.exists(folders[0])
