"""What the daemon reads for others is read with the rights of the job's owner, and refused with a sentence."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.daemon.owner_reader import OwnerReader
from gpusched.errors import NotFound, Refused
from gpusched.model.job import Job
from gpusched.testing import job, launch

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to read as another user")
OWNERS = [pytest.param("nobody", marks=NEEDS_ROOT), pwd.getpwuid(os.geteuid()).pw_name]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where others may pass, though not look; pytest's own folders are private."""
    made = Path(tempfile.mkdtemp(prefix="gpusched-owner-reader-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def job_of(name: str, folder: Path | None = None) -> Job:
    parts = {"snapshot": folder.name, "launch": launch(work_dir=f"{folder}/tree/sub")} if folder else {}
    return job(7, user=name, uid=pwd.getpwnam(name).pw_uid, **parts)


def private(path: Path, text: str, name: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    if os.geteuid() == 0:
        shutil.chown(path, name)
    return path


@pytest.mark.parametrize("name", OWNERS)
def test_pieces_of_a_private_file(name: str, folder: Path) -> None:
    path = private(folder / "out", "begin" + "x" * 100_000 + "end", name)
    read, size = OwnerReader().output, path.stat().st_size
    assert asyncio.run(read(job_of(name), str(path), -5, 5)) == (size, b"xxend")
    assert asyncio.run(read(job_of(name), str(path), -(1 << 20), 1 << 20)) == (size, path.read_bytes())
    assert asyncio.run(read(job_of(name), str(path), 3, 4)) == (size, b"inxx")
    assert asyncio.run(read(job_of(name), str(path), size + 9, 4)) == (size, b"")
    assert asyncio.run(read(job_of(name), str(folder / "none"), -5, 5)) is None


@NEEDS_ROOT
def test_no_file_of_another_user_is_read(folder: Path) -> None:
    path = private(folder / "out", "secret", "root")
    with pytest.raises(Refused, match="cannot be read: Permission denied") as caught:
        asyncio.run(OwnerReader().output(job_of("nobody"), str(path), -5, 5))
    assert "secret" not in str(caught.value)
    snapshot = folder / "copy"
    (snapshot / "tree").mkdir(parents=True)
    private(snapshot / "about.json", "{}", "root")
    private(snapshot / "tree" / "key", "secret", "root")
    with pytest.raises(Refused, match="cannot be read: Permission denied"):
        asyncio.run(OwnerReader().snapshot_piece(job_of("nobody", snapshot), 0))


def test_a_pipe_is_refused_and_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "pipe").chmod(0o666)
    with pytest.raises(Refused, match="it is not a regular file"):
        asyncio.run(OwnerReader().output(job_of(OWNERS[1]), str(folder / "pipe"), -5, 5))


@pytest.mark.parametrize("name", OWNERS)
def test_a_piece_of_a_snapshot(name: str, folder: Path) -> None:
    snapshot = folder / "copy"
    (snapshot / "tree").mkdir(parents=True)
    for path, text in (("about.json", '{"root": "/code", "files": 1, "bytes": 1}'), ("tree/train.py", "print(1)")):
        private(snapshot / path, text, name)
    read = OwnerReader().snapshot_piece
    assert b"print(1)" in asyncio.run(read(job_of(name, snapshot), 0))
    with pytest.raises(Refused, match="cannot be read: it is gone"):
        asyncio.run(read(job_of(name, folder / "none"), 0))
    with pytest.raises(NotFound, match="has no snapshot"):
        asyncio.run(read(job_of(name), 0))


@NEEDS_ROOT
def test_nothing_is_read_for_an_account_that_is_somebody_else_here() -> None:
    one = job(7, user="carl", uid=pwd.getpwnam("nobody").pw_uid)
    with pytest.raises(Refused, match="belongs to account nobody here, not to carl"):
        asyncio.run(OwnerReader().output(one, "/etc/shadow", -5, 5))
