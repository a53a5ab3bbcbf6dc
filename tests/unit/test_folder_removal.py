"""Taking folders away with no more rights than their owner has."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from gpusched.daemon.watch.checkpoints import remove

NOBODY = 65534


def is_there(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def test_an_own_folder_is_removed_with_its_contents_without_following_links(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    folder = tmp_path / "7"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "link").symlink_to(other)
    remove(str(folder), os.geteuid())
    assert not folder.exists()
    assert (other / "kept").exists()


def test_a_link_instead_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "7").symlink_to(other)
    remove(str(tmp_path / "7"), os.geteuid())
    assert other.is_dir()


@pytest.mark.skipif(os.geteuid() != 0 or not is_there(NOBODY), reason="needs root, and a user nobody")
def test_files_the_owner_could_not_remove_are_kept() -> None:
    # Not in the test's own folder, which is closed to others.
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o711)
        base = Path(top) / "base"
        base.mkdir()
        base.chmod(0o1777)
        for name in ("7", "8"):
            (base / name).mkdir()
            (base / name / "file").touch()
        os.chown(base / "7", NOBODY, -1)
        os.chown(base / "7" / "file", NOBODY, -1)
        remove(str(base / "7"), NOBODY)
        assert not (base / "7").exists()
        remove(str(base / "8"), NOBODY)
        assert (base / "8" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_folder_of_a_deleted_account_is_removed_too() -> None:
    uid = next(uid for uid in range(62_000, 63_000) if not is_there(uid))
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o711)
        base = Path(top) / "base"
        base.mkdir()
        base.chmod(0o1777)
        (base / "7").mkdir(mode=0o700)
        (base / "7" / "file").touch()
        for path in (base / "7", base / "7" / "file"):
            os.chown(path, uid, uid)
        remove(str(base / "7"), uid)
        assert not (base / "7").exists()
