"""gsub --log-max with real processes: nothing of the output is lost, and the job notices nothing."""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import LocalBench
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.engine.supervisor.rotation import SLACK_BYTES
from gpusched.model.execution import RunEnded, RunLost, RunStarted, StopOrder
from gpusched.model.units import put_aside

MIB = 1 << 20
SEQ = b"".join(b"%d\n" % number for number in range(1, 500_001))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def run(bench: LocalBench, line: str, handle: str = "1.1", **ticket: object) -> RunEnded:
    fields = {"argv": ("sh", "-c", line), "log_max_mib": 1, "log_keep": 20, **ticket}
    bench.start(handle, **fields)
    return bench.end_of(handle)


def kept(path: Path) -> list[bytes]:
    """Contents, oldest first."""
    paths = [Path(put_aside(str(path), number)) for number in range(30, -1, -1)]
    return [found.read_bytes() for found in paths if found.exists()]


def test_files_are_rotated_without_losing_a_byte(bench: LocalBench) -> None:
    assert run(bench, "seq 1 500000").exit_code == 0
    pieces = kept(bench.folder / "1.1.out")
    assert b"".join(pieces) == SEQ
    assert len(pieces) == 4
    assert all(len(piece) <= MIB + SLACK_BYTES and piece.endswith(b"\n") for piece in pieces)


def test_only_the_newest_files_are_kept(bench: LocalBench) -> None:
    assert run(bench, "seq 1 500000", log_keep=1).exit_code == 0
    pieces = kept(bench.folder / "1.1.out")
    assert len(pieces) == 2
    assert SEQ.endswith(b"".join(pieces))


def test_stderr_is_rotated_separately(bench: LocalBench) -> None:
    assert run(bench, "seq 1 500000 >&2; echo out", stderr_path="1.1.err").exit_code == 0
    assert b"".join(kept(bench.folder / "1.1.err")) == SEQ
    assert kept(bench.folder / "1.1.out") == [b"out\n"]


def test_devices_are_not_rotated(bench: LocalBench) -> None:
    assert run(bench, "[ -c /dev/stdout ] && seq 1 10 >&2", stdout_path="/dev/null", stderr_path="e").exit_code == 0
    assert kept(bench.folder / "e") == [b"".join(b"%d\n" % number for number in range(1, 11))]


def test_output_after_the_first_process_is_still_written(bench: LocalBench) -> None:
    line = "(trap '' TERM; until [ -e go ]; do sleep 0.01; done; echo late) & echo early; touch go"
    assert run(bench, line, leftover_grace_s=10.0).exit_code == 0
    assert kept(bench.folder / "1.1.out") == [b"early\nlate\n"]


def test_the_standard_streams_can_be_reopened(bench: LocalBench) -> None:
    assert run(bench, "echo one > /dev/stdout; echo two > /dev/stderr; echo three > /proc/self/fd/1").exit_code == 0
    assert kept(bench.folder / "1.1.out") == [b"one\ntwo\nthree\n"]


def test_a_flood_of_output_does_not_block_orders(bench: LocalBench) -> None:
    bench.start("1.1", argv=("sh", "-c", "exec yes"), log_max_mib=1, log_keep=1)
    bench.until("1.1", RunStarted)
    wait_until((bench.folder / "1.1.out.old1").exists, what="a file to be put aside")
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"
    assert run(bench, "exec yes", "2.1", log_keep=1, time_limit_s=0.3).stopped_by == "timeout"
    assert sum(map(len, kept(bench.folder / "2.1.out"))) <= 2 * (MIB + SLACK_BYTES) + 200


def test_a_missing_folder_does_not_harm_the_job(bench: LocalBench) -> None:
    folder = bench.folder / "logs"
    folder.mkdir()
    done = run(bench, "rm -r logs; seq 1 500000; echo done > mark", stdout_path="logs/out")
    assert (done.exit_code, (bench.folder / "mark").read_text()) == (0, "done\n")


def test_gpu_out_of_memory_is_found_across_a_rotation(bench: LocalBench) -> None:
    line = "head -c 1048570 /dev/zero | tr '\\0' 'x'; echo; echo CUDA out of memory; echo bye; exit 1"
    assert run(bench, line, has_gpus=True).gpu_oom
    assert len(kept(bench.folder / "1.1.out")) == 2


def test_a_killed_supervisor_does_not_break_the_pipe(bench: LocalBench) -> None:
    line = "echo one; until [ -e go ]; do sleep 0.01; done; echo two && echo alive > mark; exec sleep 1000"
    bench.start("1.1", argv=("sh", "-c", line), log_max_mib=1, log_keep=1)
    started = bench.until("1.1", RunStarted)
    wait_until(lambda: kept(bench.folder / "1.1.out") == [b"one\n"], what="the first line")
    os.kill(started.supervisor_pid, signal.SIGKILL)
    # Nobody asks the engine for news, so it does not end the orphan yet.
    (bench.folder / "go").touch()
    wait_until((bench.folder / "mark").exists, what="the job to write on")
    assert isinstance(bench.until("1.1", RunEnded, RunLost), RunLost)
    found = proctree.read_process(started.pid)
    assert found is None or not found.is_alive


def test_a_supervisor_continues_with_a_run_without_rotation(bench: LocalBench) -> None:
    for job in range(1, 5):
        assert run(bench, "seq 1 200000", f"{job}.1", log_max_mib=1 if job % 2 else None).exit_code == 0
    assert [len(kept(bench.folder / f"{job}.1.out")) for job in range(1, 5)] == [2, 1, 2, 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start jobs as others")
def test_files_of_another_user_belong_to_that_user(bench: LocalBench) -> None:
    nobody = pwd.getpwnam("nobody")
    folder = bench.folder / "theirs"
    folder.mkdir()
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    for parent in (folder, *folder.parents):
        if str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    line = "seq 1 300000; echo end > /dev/stdout"
    assert run(bench, line, uid=nobody.pw_uid, user="nobody", work_dir=str(folder)).exit_code == 0
    pieces = kept(folder / "1.1.out")
    assert b"".join(pieces) == SEQ[: SEQ.index(b"\n300001\n") + 1] + b"end\n"
    assert {path.stat().st_uid for path in folder.iterdir()} == {nobody.pw_uid}
