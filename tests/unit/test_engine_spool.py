"""Claims, revocations, results and orders: who wins, and what a torn or half-written file means."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusched.engine import spool as files

RUN = "7.1"


@pytest.fixture
def spool(tmp_path: Path) -> str:
    return str(tmp_path)


def claim(spool: str, pid: int = 11) -> int | None:
    return files.take_claim(spool, RUN, pid, 22, 1000, "boot-1")


def test_a_run_is_claimed_once(spool: str) -> None:
    fd = claim(spool)
    assert fd is not None
    assert claim(spool, pid=12) is None
    record = files.read_record(spool, RUN)
    assert record is not None
    assert (record.pid, record.start_ticks, record.uid, record.boot_id) == (11, 22, 1000, "boot-1")
    assert record.is_held
    os.close(fd)
    ended = files.read_record(spool, RUN)
    assert ended is not None
    assert not ended.is_held
    assert claim(spool, pid=13) is None


def test_a_run_is_either_claimed_or_revoked(spool: str) -> None:
    fd = claim(spool)
    assert fd is not None
    assert not files.revoke(spool, RUN)
    os.close(fd)
    assert not files.revoke(spool, RUN)
    assert files.revoke(spool, "8.1")
    assert files.revoke(spool, "8.1")
    assert files.take_claim(spool, "8.1", 11, 22, 1000, "boot-1") is None
    record = files.read_record(spool, "8.1")
    assert record is not None
    assert record.is_revoked
    assert record.pid is None


def test_a_revocation_takes_no_space(spool: str) -> None:
    files.revoke(spool, RUN)
    assert os.stat(files.record_path(spool, RUN)).st_blocks == 0


def test_a_claim_interrupted_before_its_first_line_can_be_revoked(spool: str) -> None:
    Path(files.record_path(spool, RUN)).touch()
    record = files.read_record(spool, RUN)
    assert record is not None
    assert record.pid is None
    assert not record.is_revoked
    assert files.revoke(spool, RUN)
    assert claim(spool) is None


def ended(spool: str, run: str) -> int:
    """Inode of the record of a run that has ended and whose supervisor has closed it."""
    fd = files.take_claim(spool, run, 4, 5, 1000, "boot-1")
    assert fd is not None
    files.note_start(fd, files.start_line(6, 1.5))
    files.write_result(fd, b'{"run":"%s","text":"%s"}\n' % (run.encode(), 200 * b"x"))
    number = os.fstat(fd).st_ino
    os.close(fd)
    return number


def test_a_claim_takes_over_the_record_of_an_ended_run(spool: str) -> None:
    before = ended(spool, "5.1")
    fd = files.take_claim(spool, RUN, 11, 22, 1000, "boot-1", "5.1")
    assert fd is not None
    assert os.listdir(spool) == ["7.1.record"]
    assert os.fstat(fd).st_ino == before
    record = files.read_record(spool, RUN)
    assert record is not None
    assert (record.pid, record.is_held, record.job_pid, record.result) == (11, True, None, None)
    files.note_start(fd, files.start_line(33, 2.5))
    files.write_result(fd, b'{"run":"7.1"}\n')
    record = files.read_record(spool, RUN)
    assert record is not None
    assert (record.job_pid, record.start_at, record.result) == (33, 2.5, b'{"run":"7.1"}')
    assert not files.revoke(spool, RUN)
    again = files.restore_record(spool, RUN, fd)
    assert again == fd
    os.unlink(files.record_path(spool, RUN))
    again = files.restore_record(spool, RUN, fd)
    files.write_result(again, b'{"run":"7.1","again":true}\n')
    record = files.read_record(spool, RUN)
    assert record is not None
    assert record.result == b'{"run":"7.1","again":true}'
    os.close(again)


def test_a_record_that_is_taken_over_gives_no_second_claim(spool: str) -> None:
    ended(spool, "5.1")
    files.revoke(spool, RUN)
    assert files.take_claim(spool, RUN, 11, 22, 1000, "boot-1", "5.1") is None
    record = files.read_record(spool, RUN)
    assert record is not None
    assert record.is_revoked


def test_a_takeover_interrupted_after_the_rename_has_no_result(spool: str) -> None:
    # After a power failure: the link is in the journal, while the claim was not yet on the disk.
    ended(spool, "5.1")
    os.rename(files.record_path(spool, "5.1"), files.record_path(spool, RUN))
    record = files.read_record(spool, RUN)
    assert record is not None
    assert record.result is None
    assert not files.revoke(spool, RUN)


@pytest.mark.parametrize("obstacle", ["gone", "a link", "held", "no links"])
def test_a_record_that_cannot_be_taken_over_is_created(
    spool: str, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    held = None
    if obstacle == "a link":
        (Path(spool) / "target").write_text("kept")
        os.symlink("target", files.record_path(spool, "5.1"))
    elif obstacle == "held":
        held = files.take_claim(spool, "5.1", 4, 5, 1000, "boot-1")
    elif obstacle == "no links":
        ended(spool, "5.1")
        monkeypatch.setattr(os, "link", full)
    fd = files.take_claim(spool, RUN, 11, 22, 1000, "boot-1", "5.1")
    assert fd is not None
    record = files.read_record(spool, RUN)
    assert record is not None
    assert (record.pid, record.is_held) == (11, True)
    if obstacle == "a link":
        assert (Path(spool) / "target").read_text() == "kept"
    os.close(fd)
    if held is not None:
        os.close(held)


def test_a_claim_that_finds_the_disk_full_leaves_the_run_to_others(spool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            claim(spool)
    fd = claim(spool)
    assert fd is not None
    os.close(fd)


def test_start_and_result_are_read_back(spool: str) -> None:
    fd = claim(spool)
    assert fd is not None
    files.note_start(fd, files.start_line(33, 1234.5678901))
    files.write_result(fd, b'{"run":"7.1"}\n')
    os.close(fd)
    record = files.read_record(spool, RUN)
    assert record is not None
    assert (record.job_pid, record.start_at, record.result) == (33, 1234.5678901, b'{"run":"7.1"}')


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_partial_result_is_ignored(spool: str, cut: int) -> None:
    fd = claim(spool)
    assert fd is not None
    files.write_result(fd, b'{"run":"7.1"}\n')
    os.ftruncate(fd, os.fstat(fd).st_size - cut)
    os.close(fd)
    record = files.read_record(spool, RUN)
    assert record is not None
    assert record.pid == 11
    assert record.result is None


def test_a_result_that_failed_midway_can_be_rewritten(spool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = claim(spool)
    assert fd is not None
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda to, data: write(to, data[:5]) if len(data) > 10 else full(to, data))
        with pytest.raises(OSError, match="full"):
            files.write_result(fd, b'{"run":"7.1"}\n')
    files.write_result(fd, b'{"run":"7.1"}\n')
    os.close(fd)
    record = files.read_record(spool, RUN)
    assert record is not None
    assert record.result == b'{"run":"7.1"}'


def test_a_foreign_file_is_not_a_record(spool: str) -> None:
    Path(files.record_path(spool, RUN)).write_text("hello\n")
    with pytest.raises(ValueError, match="hello"):
        files.read_record(spool, RUN)


def test_a_symlinked_record_is_not_followed(spool: str) -> None:
    Path(spool, "target").touch()
    os.symlink("target", files.record_path(spool, RUN))
    with pytest.raises(OSError, match="symbolic"):
        claim(spool)
    with pytest.raises(OSError, match="symbolic"):
        files.revoke(spool, RUN)


def test_orders_are_read_once_and_in_order(spool: str) -> None:
    assert files.read_orders(spool, RUN, 0) == ([], 0)
    files.append_order(spool, RUN, "limit 5 .")
    lines, offset = files.read_orders(spool, RUN, 0)
    assert lines == ["limit 5 ."]
    assert files.read_orders(spool, RUN, offset) == ([], offset)
    files.append_order(spool, RUN, "signal 10 main .")
    files.append_order(spool, RUN, "limit - .")
    assert files.read_orders(spool, RUN, offset)[0] == ["signal 10 main .", "limit - ."]


def test_a_torn_order_does_not_swallow_the_next(spool: str) -> None:
    Path(files.order_path(spool, RUN)).write_bytes(b"\nstop canc")
    assert files.read_orders(spool, RUN, 0)[0] == []
    files.append_order(spool, RUN, "stop cancel - - .")
    assert files.read_orders(spool, RUN, 0)[0] == ["stop canc", "stop cancel - - ."]


def test_a_hole_is_a_cancel(spool: str) -> None:
    files.append_order(spool, RUN, "limit 5 .")
    _, offset = files.read_orders(spool, RUN, 0)
    files.order_cancel(spool, RUN)
    lines, offset = files.read_orders(spool, RUN, offset)
    assert lines == ["stop cancel - - ."]
    files.append_order(spool, RUN, "limit 6 .")
    assert files.read_orders(spool, RUN, offset)[0] == ["limit 6 ."]


def test_the_lock_shows_whether_a_claim_is_still_possible(spool: str) -> None:
    assert files.is_server_gone(spool)
    fd = files.share_lock(spool)
    assert not files.is_server_gone(spool)
    os.close(fd)
    assert files.is_server_gone(spool)


def test_runs_are_recognized_by_their_names(spool: str) -> None:
    for name in ("7.1.record", "7.1.order", "12.30.script", "server.lock", "engine.log", "a.b.record", "7.record"):
        Path(spool, name).touch()
    assert files.runs_in(spool) == {"7.1", "12.30"}


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize(
    ("facts", "needed", "why"),
    [
        pytest.param({}, 0, None, id="room"),
        pytest.param({"f_bavail": 255, "f_bfree": 255}, 0, "only 1020 KiB are free in the spool {spool}", id="full"),
        pytest.param({}, 1 << 20, "only 1024 KiB are free in the spool {spool}", id="too full for this run"),
        pytest.param({"f_ffree": 10}, 0, "no more files can be made in the spool {spool}", id="no more names"),
        pytest.param({"f_ffree": 0, "f_files": 0}, 0, None, id="names that are not counted"),
        pytest.param({"f_flag": os.ST_RDONLY}, 0, "the spool {spool} is read-only", id="read-only"),
    ],
)
def test_a_spool_without_room_says_so(
    facts: dict[str, int], needed: int, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"f_frsize": 4096, "f_bavail": 256, "f_bfree": 256, "f_files": 1000, "f_ffree": 500, "f_flag": 0, **facts}
    monkeypatch.setattr(files.os, "statvfs", lambda path: SimpleNamespace(**found))
    assert files.why_full(str(tmp_path), needed) == (why and why.format(spool=tmp_path))


def test_a_spool_that_is_not_there_is_made_by_the_next_start(tmp_path: Path) -> None:
    assert files.why_full(str(tmp_path / "none")) is None
