"""gpusched doctor: what it finds in a machine, and what it says to do."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from shell import Shell
from support import is_alive, wait_until

from gpusched import __version__
from gpusched.cli import ginfo
from gpusched.cli.admin import doctor
from gpusched.daemon.checks import daemon_checks
from gpusched.model.cluster import GpuReading
from gpusched.store.read_only import store_status
from gpusched.store.sqlite import SqliteStore


def checks(sh: Shell) -> dict[str, dict[str, Any]]:
    done = sh.type("gpusched", "doctor", "--json")
    return {one["check"]: one for one in json.loads(done.out)["checks"]}


def test_everything_is_checked_with_and_without_a_daemon(own: Shell) -> None:
    names = {
        "versions",
        "config",
        "folders",
        "disk",
        "permissions",
        "control groups",
        "clock",
        "nvml",
        "daemon",
        "database",
    }
    assert names <= checks(own).keys()
    own.submit("--", "true")
    with_daemon = checks(own)
    assert names | {"bookings", "gpus", "pace"} <= with_daemon.keys()
    assert all(one["ok"] for one in with_daemon.values()), with_daemon
    assert all(one["hint"] for one in with_daemon.values() if one["level"] != "ok")


def test_the_table_is_checked_after_the_daemon_was_killed(own: Shell) -> None:
    own.submit("--", "true")
    status = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]
    os.kill(status["pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(status["pid"]), what="the daemon to be gone")
    found = checks(own)["database"]
    assert (found["ok"], "is sound" in found["text"]) == (True, True), found
    database = Path(status["database"])
    whole = database.read_bytes()
    for side in ("-wal", "-shm"):
        Path(f"{database}{side}").unlink(missing_ok=True)
    database.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    found = checks(own)["database"]
    assert found["ok"] is False
    assert "damaged" in found["text"]
    assert "gpusched restore FILE" in found["hint"]
    database.write_bytes(whole)


@pytest.mark.parametrize(
    ("mode", "level", "text"), [(0o666, "fail", "is writable by others"), (0o644, "warn", "is readable by others")]
)
def test_access_of_other_users_is_reported(own: Shell, mode: int, level: str, text: str) -> None:
    own.submit("--", "true")
    own.ok("gpusched", "daemon", "stop")
    (database,) = own.home.rglob("gpusched.db")
    database.chmod(mode)
    found = checks(own)["permissions"]
    assert (found["level"], text in found["text"]) == (level, True), found
    assert found["hint"] == f"chmod {'go-w' if level == 'fail' else 'go-rwx'} {database}"


@pytest.mark.parametrize(
    ("newest_at", "is_kept", "level", "text"),
    [
        (None, None, "ok", "plausible"),
        (900.0, True, "ok", "synchronised"),
        (1030.0, True, "ok", "synchronised"),
        (900.0, False, "warn", "unsynchronised"),
        (4600.0, True, "fail", "1:00:00 behind the last job"),
    ],
)
def test_doctor_checks_the_clock(newest_at: float | None, is_kept: bool | None, level: str, text: str) -> None:
    found, sentence, hint = doctor.judge_clock(1000.0, newest_at, is_kept)
    assert (found, text in sentence, bool(hint)) == (level, True, level != "ok"), sentence


@pytest.mark.parametrize(
    ("controllers", "level", "text"),
    [
        (None, "warn", "no cgroup v2"),
        ("cpuset cpu io memory hugetlb pids", "ok", "cgroup v2 with"),
        ("cpu pids", "warn", "without memory"),
    ],
)
def test_doctor_checks_control_groups(tmp_path: Path, controllers: str | None, level: str, text: str) -> None:
    if controllers is not None:
        (tmp_path / "cgroup.controllers").write_text(controllers + "\n")
    found, sentence, hint = doctor.control_groups(str(tmp_path))
    assert (found, text in sentence, bool(hint)) == (level, True, level != "ok"), sentence


@pytest.mark.parametrize(
    ("code", "ok", "text"),
    [
        ("print('550.54', 4)", True, "driver 550.54, 4 GPUs"),
        ("print('550.54', 0)", False, "0 GPUs"),
        ("raise RuntimeError('Driver/library version mismatch')", False, "Driver/library version mismatch"),
        ("import os; os.abort()", False, "no error message"),
    ],
)
def test_doctor_checks_the_driver(monkeypatch: pytest.MonkeyPatch, code: str, ok: bool, text: str) -> None:
    monkeypatch.setattr(doctor, "nvidia_signs", lambda: ("dev/nvidiactl",))
    monkeypatch.setattr(doctor, "_READ_NVML", code)
    level, sentence, hint = doctor.nvml()
    assert (level == "ok", text in sentence, not hint) == (ok, True, ok), sentence
    monkeypatch.setattr(doctor, "nvidia_signs", lambda: ())
    assert doctor.nvml()[1] == "no NVIDIA GPU here"


class Daemon:
    """Answers the doctor, and has simulated GPUs."""

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, method: str, path: str) -> dict[str, Any]:
        return {"daemon": {"version": __version__, "socket": "/sock", "gpu_source": "simulated"}, "checks": []}


@pytest.mark.parametrize("has_daemon", [False, True])
def test_the_driver_is_not_queried_with_simulated_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_daemon: bool
) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "nvidia_signs", lambda: ("dev/nvidiactl",))
    monkeypatch.setattr(doctor, "_READ_NVML", "raise RuntimeError('Driver Not Loaded')")
    if has_daemon:
        monkeypatch.delenv("GPUSCHED_FAKE_GPUS", raising=False)
        monkeypatch.setattr(doctor, "connect", lambda autostart: Daemon())
    else:
        monkeypatch.setenv("GPUSCHED_FAKE_GPUS", "4x24GiB")
    found = {one.check: one for one in doctor.examine()}
    assert found["nvml"].text == "not checked: the GPUs are simulated"
    assert "persistence mode" not in found


@pytest.mark.parametrize(
    ("source", "error", "notes", "expected"),
    [
        ("none", None, [], "no GPUs here; try simulated ones: GPUSCHED_FAKE_GPUS=4x24GiB gpuschedd"),
        ("none", None, ["the NVIDIA driver is not loaded"], "no GPUs here; see also: gpusched doctor"),
        ("nvml", None, [], "the driver lists no GPU; see what is wrong with: gpusched doctor"),
        ("nvml", "driver mismatch", [], "no GPU can be read: driver mismatch; see also: gpusched doctor"),
    ],
)
def test_ginfo_says_why_it_shows_no_gpu(source: str, error: str | None, notes: list[str], expected: str) -> None:
    node = {"gpu_source": source, "gpu_error": error, "notes": notes}
    assert ginfo.without_gpus([node]) == f"{expected}\n"


def test_ginfo_reports_a_driver_error_once_and_not_per_gpu() -> None:
    gpu = {"node": "n1", "state": "unknown", "why": "driver mismatch", "detail": "driver mismatch"}
    assert ginfo._why(gpu, {"n1"}) == ""
    assert ginfo._why(gpu, set()) == "driver mismatch"
    assert ginfo._why({"state": "suspect", "why": "suspect: hot", "detail": "hot"}, set()) == "hot"


@pytest.mark.parametrize(
    ("reading", "level", "text"),
    [
        (GpuReading(0.0, "none"), "ok", "no GPU on this machine"),
        (GpuReading(0.0, "none", notes=("the NVIDIA driver is not loaded",)), "warn", "is not loaded"),
        (GpuReading(0.0, "nvml"), "warn", "the driver lists no GPU"),
        (GpuReading(0.0, "nvml", error="driver mismatch"), "fail", "driver mismatch"),
    ],
)
def test_doctor_says_why_there_is_no_gpu(reading: GpuReading, level: str, text: str) -> None:
    lab = Lab(gpus=0)
    lab.scheduler.observe_gpus(reading)
    (found,) = [one for one in daemon_checks(lab.ticker) if one.check == "gpus"]
    assert (found.level, text in found.text) == (level, True), found


@pytest.mark.parametrize(
    ("code", "text", "hint"),
    [
        (errno.ENOSPC, "no space left on device", "df -h"),
        (errno.EDQUOT, "quota exceeded", "quota"),
        (errno.EMFILE, "too many open files", "ulimit -n"),
        (errno.EACCES, "permission denied", "ls -ld"),
    ],
)
def test_doctor_distinguishes_why_scripts_do_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, text: str, hint: str
) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))

    def refuse(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(doctor.os, "open", refuse)
    level, sentence, advice = doctor._spool_executes()
    monkeypatch.undo()
    assert level == "fail"
    assert text in sentence
    assert hint in advice
    assert "noexec" not in sentence + advice


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize(
    ("options", "text"), [("noexec", "mounted noexec"), ("size=4k", "no space left on device"), ("ro", "read-only")]
)
def test_doctor_checks_the_disk_of_the_spool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, text: str
) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    try:
        if options.startswith("size"):
            (tmp_path / "ballast").write_bytes(b"x" * 4096)
        monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
        assert text in doctor._spool_executes()[1]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_doctor_recognizes_foreign_older_and_newer_tables(tmp_path: Path) -> None:
    assert store_status(str(tmp_path / "nothing"), thoroughly=True) is None
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE songs (title TEXT)")
    found = store_status(str(other), thoroughly=True)
    assert found is not None
    assert "holds songs" in (found.problem or "")
    path = tmp_path / "x.db"
    SqliteStore.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    older = store_status(str(path), thoroughly=True)
    assert older is not None
    assert (older.problem, older.is_older, older.newest_at) == (None, True, None)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 999")
    newer = store_status(str(path), thoroughly=True)
    assert newer is not None
    assert "has schema version 999" in (newer.problem or "")
