"""Where output is cut into files, and what happens to it when files cannot be written or put aside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.supervisor.logs import LOG_FLAGS, Logs
from gpusched.engine.supervisor.rotation import RotatedFile, RotatedLogs, cut, signal_fd

MakeFlow = Callable[..., RotatedFile]


MIB = 1 << 20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeFlow]:
    made: list[RotatedFile] = []

    def flow(max_bytes: int = 10, keep: int = 3, append: bool = False) -> RotatedFile:
        path = str(tmp_path / "out")
        ticket = {"umask": 0o022, "log_max_mib": max_bytes / MIB, "log_keep": keep, "append": append}
        made.append(RotatedFile(os.open(path, LOG_FLAGS, 0o666), path, ticket, None))
        return made[-1]

    yield flow
    for one in made:
        one.close()
        os.close(one.fd)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("data", "room", "slack", "expected"),
    [
        (b"abc\n", 10, 4, 4),
        (b"abc\n", 4, 4, 4),
        (b"a\nb\nccc\n", 5, 0, 4),
        (b"abcdef\ng\n", 3, 4, 7),
        (b"abcdefghijkl", 3, 4, 7),
        (b"abcdef", 3, 4, 6),
        (b"c\nd\n", -2, 4, 2),
        (b"cdefgh", -2, 4, 2),
        (b"cdefgh", -4, 4, 0),
        (b"cdefgh", -99, 4, 0),
    ],
)
def test_a_file_ends_with_a_complete_line_where_possible(data: bytes, room: int, slack: int, expected: int) -> None:
    assert cut(data, room, slack) == expected


@given(st.binary(max_size=60), st.integers(-50, 50), st.integers(0, 20))
def test_no_file_grows_beyond_its_slack(data: bytes, room: int, slack: int) -> None:
    size = cut(data, room, slack)
    assert 0 <= size <= len(data)
    assert size <= max(0, room + slack)
    if size < len(data) and 0 < size < room + slack:
        assert data[size - 1 : size] == b"\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12))
def test_every_byte_is_in_one_file(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("flow")
    path = str(folder / "out")
    ticket = {"umask": 0o022, "log_max_mib": 10 / MIB, "log_keep": 100, "append": False}
    flow = RotatedFile(os.open(path, LOG_FLAGS, 0o666), path, ticket, None)
    for piece in pieces:
        flow.put(piece)
    flow.close()
    os.close(flow.fd)
    kept = files(folder)
    names = sorted(kept, key=lambda name: -int(name.partition(".old")[2] or 0))
    assert b"".join(kept[name] for name in names) == b"".join(pieces)


def test_the_newest_files_are_kept(make: MakeFlow, tmp_path: Path) -> None:
    flow = make(max_bytes=4, keep=2)
    for number in range(5):
        flow.put(b"%d..\n" % number)
    assert files(tmp_path) == {"out": b"4..\n", "out.old1": b"3..\n", "out.old2": b"2..\n"}


def test_with_zero_kept_files_the_file_is_truncated(make: MakeFlow, tmp_path: Path) -> None:
    flow = make(max_bytes=4, keep=0)
    for number in range(5):
        flow.put(b"%d..\n" % number)
    assert files(tmp_path) == {"out": b"4..\n"}


@pytest.mark.parametrize(("append", "left"), [(False, {"out", "out.old4"}), (True, {"out", "out.old1", "out.old4"})])
def test_rotated_files_of_an_earlier_job_are_removed_unless_appending(
    make: MakeFlow, tmp_path: Path, append: bool, left: set[str]
) -> None:
    for number in (1, 4):
        (tmp_path / f"out.old{number}").write_text("of another job")
    make(keep=3, append=append)
    assert set(files(tmp_path)) == left


def test_a_moved_file_is_not_rotated(make: MakeFlow, tmp_path: Path) -> None:
    flow = make(max_bytes=4)
    flow.put(b"one\n")
    (tmp_path / "out").rename(tmp_path / "mine")
    flow.put(b"two\n")
    flow.put(b"six\n")
    assert files(tmp_path) == {"mine": b"one\n", "out": b"six\n", "out.old1": b"two\n"}


def test_a_file_that_cannot_be_rotated_grows(make: MakeFlow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = make(max_bytes=4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
        for word in (b"one\n", b"two\n"):
            flow.put(word)
        assert files(tmp_path) == {"out": b"one\ntwo\n"}
    flow.put(b"six\n")
    assert files(tmp_path) == {"out": b"six\n", "out.old1": b"one\ntwo\n"}, "later it can"


def test_a_link_or_pipe_at_its_path_is_not_written_to(make: MakeFlow, tmp_path: Path) -> None:
    flow = make(max_bytes=4)
    flow.put(b"one\n")
    (tmp_path / "out").unlink()
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "out").symlink_to(tmp_path / "target")
    flow.put(b"two\n")
    (tmp_path / "out").unlink()
    assert files(tmp_path) == {"target": b""}
    os.mkfifo(tmp_path / "out")
    reader = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
    for _ in range(3):
        flow.put(b"six\n")
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_bytes_dropped_by_a_full_disk_are_counted(make: MakeFlow, tmp_path: Path) -> None:
    flow = make(max_bytes=1000)
    flow.put(b"within")
    good = flow.fd
    flow.fd = os.open("/dev/full", os.O_WRONLY)
    flow.put(b"dropped!")
    os.close(flow.fd)
    flow.fd = good
    flow.put(b"after\n")
    assert files(tmp_path)["out"] == b"within\ngpusched: 8 bytes of output are missing here\nafter\n"


def test_the_job_can_write_until_the_pipe_is_full_without_a_reader(make: MakeFlow) -> None:
    flow = make()
    os.close(flow.reader)
    # The reader is gone as if its process had been killed; without a second one this would be SIGPIPE.
    assert os.write(flow.job_end, b"still here\n") == 11
    flow.reader = os.open(os.devnull, os.O_RDONLY)


def test_a_pending_signal_makes_its_descriptor_readable() -> None:
    import select

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    fd = signal_fd({signal.SIGUSR1, signal.SIGCHLD})
    try:
        assert select.select([fd], [], [], 0)[0] == []
        signal.raise_signal(signal.SIGUSR1)
        assert select.select([fd], [], [], 5)[0] == [fd]
        assert signal.sigtimedwait({signal.SIGUSR1}, 0) is not None
        assert select.select([fd], [], [], 0)[0] == []
    finally:
        os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_timer_fires_while_a_pipe_is_never_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / "out", LOG_FLAGS, 0o666)
    ticket = {"umask": 0o022, "log_max_mib": 1000 / MIB, "log_keep": 1, "append": False}
    logs = RotatedLogs(Logs(fd, fd), {**ticket, "stdout_path": str(tmp_path / "out"), "stderr_path": None}, None)
    try:
        (flow,) = logs.flows()
        copies = []

        def refilled() -> bool:
            copies.append(os.read(flow.reader, 100))
            os.write(flow.job_end, b"more\n")
            return True

        monkeypatch.setattr(RotatedFile, "copy", lambda _: refilled())
        os.write(flow.job_end, b"first\n")
        logs.wait(frozenset({signal.SIGUSR2}), 0.05)
        assert len(copies) > 1
    finally:
        logs.close()
