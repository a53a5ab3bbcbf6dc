"""The archive of a snapshot on its way to another node: any piece of it, and whole or not at all."""

from __future__ import annotations

import fcntl
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched.errors import NotFound
from gpusched.snapshots import ship
from gpusched.snapshots.snapshot import SnapshotLimits

LIMITS = SnapshotLimits(mib=1, files=10, keep_days=30, total_mib=100)
ABOUT = '{"root": "/code", "files": 1, "bytes": 1}'


def snapshot(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in {"about.json": ABOUT.encode(), **{f"tree/{key}": one for key, one in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "tree").mkdir(exist_ok=True)
    return folder


def from_folder(folder: Path) -> Callable[[int], bytes]:
    return lambda at: ship.piece_of(str(folder), at)


@pytest.mark.parametrize("size", [100, 1000, 10240, 1 << 20])
def test_pieces_of_any_size_make_the_same_snapshot(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "PIECE_BYTES", size)
    name = os.fsdecode(b"\xff\n")
    here = snapshot(tmp_path / "here", {"a": b"x" * 5000, "b/c": b"", f"b/{name}": b"odd"})
    (here / "tree" / "link").symlink_to("b/../a")
    (here / "tree" / "empty").mkdir()
    (here / "tree" / "a").chmod(0o555)
    there = tmp_path / "deep" / "down" / "name"
    ship.fetch(str(there), from_folder(here), LIMITS)
    found = {path.relative_to(there): path for path in there.rglob("*")}
    assert found.keys() == {path.relative_to(here) for path in here.rglob("*")}
    assert (there / "tree" / "a").read_bytes() == b"x" * 5000
    assert (there / "tree" / "b" / name).read_bytes() == b"odd"
    assert os.readlink(there / "tree" / "link") == "b/../a"
    assert (there / "tree" / "a").stat().st_mode & 0o777 == 0o555
    assert (there / "tree" / "empty").stat().st_mode & 0o777 == 0o555


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    there = snapshot(tmp_path / "there", {"a": b"1"})

    def ask(at: int) -> bytes:
        raise AssertionError("asked")

    ship.fetch(str(there), ask, LIMITS)


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size, found.linkname = kind, size, target
    return found


def archive(*members: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for one in members:
            tar.addfile(one, io.BytesIO(b"x" * one.size))
    return file.getvalue()


TREE = member("tree", tarfile.DIRTYPE)
WHOLE = (member("about.json", size=2), TREE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(archive(*WHOLE, member("tree/../../x", size=1)), "it contains", id="out of the folder"),
        pytest.param(archive(*WHOLE, member("/etc/x", size=1)), "it contains", id="an absolute path"),
        pytest.param(archive(*WHOLE, member("other", size=1)), "it contains", id="something else"),
        pytest.param(archive(*WHOLE, member("tree/p", tarfile.FIFOTYPE)), "neither a file", id="a pipe"),
        pytest.param(archive(*WHOLE, member("tree/h", tarfile.LNKTYPE, 0, "/etc/passwd")), "neither", id="a hard link"),
        pytest.param(archive(*WHOLE, member("tree/a", size=3 << 20)), "snapshot_mib", id="too large"),
        pytest.param(archive(*WHOLE, *(member(f"tree/{n}") for n in range(20))), "snapshot_files", id="too many"),
        pytest.param(
            archive(*WHOLE, member("tree/l", tarfile.SYMTYPE, 0, "/tmp"), member("tree/l/x", size=1)),
            "behind a link",
            id="through a link",
        ),
        pytest.param(archive(TREE), "incomplete", id="no description"),
        pytest.param(archive(member("about.json", size=2)), "incomplete", id="no tree"),
        pytest.param(b"", None, id="nothing"),
        pytest.param(archive(*WHOLE, member("tree/a", size=50_000))[:20_000], None, id="cut short"),
        pytest.param(os.urandom(20_000), None, id="noise"),
    ],
)
def test_what_is_no_snapshot_leaves_nothing(content: bytes, words: str | None, tmp_path: Path) -> None:
    there = tmp_path / "home" / "name"
    with pytest.raises((ValueError, tarfile.TarError, OSError), match=words):
        ship.fetch(str(there), lambda at: content[at : at + ship.PIECE_BYTES], LIMITS)
    assert [path.name for path in there.parent.iterdir()] == ["fetching"]


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "PIECE_BYTES", 4096)
    here = snapshot(tmp_path / "here", {"a": b"x" * 50_000})

    def ask(at: int) -> bytes:
        if at:
            raise NotFound("gone", "")
        return ship.piece_of(str(here), at)

    with pytest.raises(NotFound):
        ship.fetch(str(tmp_path / "home" / "name"), ask, LIMITS)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["fetching"]


def test_old_ones_go_unless_a_run_holds_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("old", "held"):
        about = snapshot(home / name, {"a": b"1"}) / "about.json"
        os.utime(about, (0, 0))
    with open(home / "held" / "about.json") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        ship.fetch(str(home / "new"), from_folder(snapshot(tmp_path / "here", {"a": b"1"})), LIMITS)
    assert sorted(path.name for path in home.iterdir() if path.is_dir()) == ["held", "new"]
