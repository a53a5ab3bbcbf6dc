"""A full disk: refused with a sentence, nothing half-recorded, and ends of runs kept until there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

from gpusched.errors import GpuschedError, StoreFull


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(where)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with open(ballast, "wb") as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    os.write(file.fileno(), b"x" * size)
            except OSError:
                continue
    return ballast


def test_a_full_disk_refuses_and_recovers(small_disk: Path, tmp_path: Path) -> None:
    daemon = Daemon(small_disk / "home")
    gate = tmp_path / "gate"
    daemon.start()
    try:
        waiting = f"while [ ! -e {gate} ]; do sleep 0.02; done; exit 4"
        running = daemon.submit("/bin/sh", "-c", waiting, stdout="/dev/null", work_dir="/")
        pid = daemon.pid_of(running)
        ballast = fill(small_disk)
        with pytest.raises(StoreFull) as caught:
            # A few may still fit into pages that the table owns already.
            for number in range(1000):
                daemon.submit("/bin/true", hold=True, work_dir="/", env={"FILL": f"{number}" * 3000})
        assert caught.value.hint
        accepted = len(daemon.call("GET", "/v1/jobs")["jobs"])
        gate.touch()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the job to end")
        ballast.unlink()
        (job,) = daemon.wait(running)
        assert (job["state"], job["exit_code"], job["run"]) == ("FAILED", 4, 1)
        assert len(daemon.call("GET", "/v1/jobs")["jobs"]) == accepted - 1
        assert daemon.wait(daemon.submit("/bin/true", work_dir="/", stdout="/dev/null"))[0]["state"] == "COMPLETED"
    finally:
        daemon.close()


def test_a_daemon_on_a_full_disk_reports_it_and_starts_once_there_is_room(small_disk: Path) -> None:
    daemon = Daemon(small_disk / "home")
    ballast = fill(small_disk)
    line = daemon.try_start()
    if line == "ready":
        with pytest.raises(GpuschedError):
            daemon.submit("/bin/true", env={"FILL": "x" * 100_000})
        daemon.stop()
    else:
        assert line.startswith("error "), line
        daemon.reap()
    ballast.unlink()
    daemon.start()
    try:
        assert daemon.wait(daemon.submit("/bin/true", work_dir="/", stdout="/dev/null"))[0]["state"] == "COMPLETED"
    finally:
        daemon.close()


def test_a_daemon_with_pending_ends_does_not_spin_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    daemon = Daemon(small_disk / "home", config="[daemon]\npoll_s = 0.05\n")
    gate = tmp_path / "gate"
    daemon.start()
    try:
        waiting = f"while [ ! -e {gate} ]; do sleep 0.02; done"
        running = daemon.submit("/bin/sh", "-c", waiting, stdout="/dev/null", work_dir="/")
        pid = daemon.pid_of(running)
        # Keep the table from growing at all: the end must come to a commit that fails.
        fill(small_disk)
        with pytest.raises(StoreFull):
            for number in range(1000):
                daemon.submit("/bin/true", hold=True, work_dir="/", env={"FILL": f"{number}" * 3000})
        gate.touch()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the job to end")
        count, at = ticks(daemon)
        wait_until(lambda: ticks(daemon)[0] >= count + 150, timeout_s=60, what="150 ticks")
        # 20 polls and 2 retries a second. A slow machine only makes this longer.
        assert ticks(daemon)[1] - at > 2.5
    finally:
        (small_disk / "ballast").unlink()
        daemon.close()


def ticks(daemon: Daemon) -> tuple[int, float]:
    """How often the daemon has turned, and its clock."""
    facts = daemon.call("GET", "/v1/status")["daemon"]
    return int(facts["tick"]["count"]), float(facts["now"])
