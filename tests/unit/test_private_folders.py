"""The home of a personal scheduler: for its owner alone, whatever the umask and whatever was there before."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.errors import NotReady
from gpusched.paths import make_private

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to somebody else")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=lambda mask: f"umask {mask:03o}")
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_a_new_folder_and_its_parents_are_private_to_the_owner(tmp_path: Path) -> None:
    home = tmp_path / "state" / "gpusched"
    make_private(str(home))
    assert (mode(home), mode(home.parent)) == (0o700, 0o700)


@pytest.mark.parametrize("names", [(), ("config.toml",), ("gpusched.db", "spool", "results.csv")], ids=str)
def test_a_folder_of_the_scheduler_is_tightened(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    tmp_path.chmod(0o777)
    make_private(str(tmp_path))
    assert mode(tmp_path) == 0o700


def test_a_folder_with_other_contents_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    tmp_path.chmod(0o755)
    with pytest.raises(NotReady, match=r"other users can look into .*mode 755.*holds other files") as refused:
        make_private(str(tmp_path))
    assert refused.value.hint == f"chmod 700 {tmp_path}, or set GPUSCHED_HOME to a separate folder"
    assert mode(tmp_path) == 0o755
    tmp_path.chmod(0o700)
    make_private(str(tmp_path))


@NEEDS_ROOT
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(NotReady, match="belongs to uid 65534"):
        make_private(str(tmp_path))


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_private(str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError):
        make_private(str(tmp_path / "file" / "below"))
