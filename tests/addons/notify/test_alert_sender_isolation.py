"""The process that sends a user's alerts is the user's: what it is given by the daemon is not worth having."""

from __future__ import annotations

import json
import os
import pwd
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attacks import NEEDS_PYTHON, PYTHON
from people import BOB, NEEDS_ROOT
from support import wait_until

from gpusched.addons.notify import courier as courier_module
from gpusched.addons.notify.courier import Courier
from gpusched.model.alerts import Alert
from gpusched.model.settings import AlertSettings

pytestmark = NEEDS_ROOT

UID = pwd.getpwnam(BOB).pw_uid


def an_alert() -> Alert:
    return Alert(key="7.end", uid=UID, event="end", counts_as=("end",), at=1.0, job_id=7, run=1)


def a_courier(folder: Path) -> Courier:
    return Courier(UID, AlertSettings(), str(folder / "told"), None)


def files_of(pid: int) -> set[str]:
    """Paths that a process has open, beside its three streams and devices."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if int(fd) > 2 and path.startswith("/") and "/dev/" not in path:
            found.add(path)
    return found


@NEEDS_PYTHON
def test_the_worker_inherits_nothing_from_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hush-hush")
    # This installation may be where other users may not look; how the process is started is the same.
    monkeypatch.setattr(sys, "executable", PYTHON)
    monkeypatch.setattr(courier_module, "_BOOT", "import time; time.sleep(60)")
    courier = a_courier(tmp_path)
    try:
        courier.submit({"7.end": an_alert()})
        pid = courier.pid
        assert pid is not None
        assert Path(f"/proc/{pid}").stat().st_uid in (UID, 0)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        uids = next(line.split()[1:] for line in lines if line.startswith("Uid:"))
        assert set(uids) == {str(UID)}
        assert b"hush-hush" not in Path(f"/proc/{pid}/environ").read_bytes()
        # Root's log or terminal is no place for a user's words.
        assert os.readlink(f"/proc/{pid}/fd/2") == "/dev/null"
        # While it starts, the interpreter opens libraries of its own.
        wait_until(lambda: files_of(pid) <= {str(tmp_path / "told")}, what="no file but the user's to be open")
        # What is written there counts as the user's.
        assert (tmp_path / "told").stat().st_uid == UID
    finally:
        courier.close()


def test_endless_receipts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "_MOST_RECEIPTS", 1000)
    told = tmp_path / "told"
    told.write_text(json.dumps(["7.end", "phone"]) + "\n" + "x" * 1000)
    courier = a_courier(tmp_path)
    try:
        assert courier.submit({"7.end": an_alert()}) == []
        assert told.stat().st_size == 0
    finally:
        courier.close()


def test_deeply_nested_receipts_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "told").write_text("[" * 100_000 + "\n" + json.dumps(["7.end", "phone"]) + "\n")
    courier = a_courier(tmp_path)
    try:
        assert [report["target"] for report in courier.submit({"7.end": an_alert()})] == ["phone"]
        wait_until(lambda: courier.is_idle, what="no worker")
    finally:
        courier.close()


def test_countless_receipts_take_no_time(tmp_path: Path) -> None:
    """The daemon waits while they are read, and the last ones are those that count."""
    made_up = "\n".join(json.dumps(["7.end", str(number)]) for number in range(100_000))
    (tmp_path / "told").write_text("\n" * (32 << 20) + made_up + "\n" + json.dumps(["7.end", "phone"]) + "\n")
    courier = a_courier(tmp_path)
    try:
        began = time.process_time()
        reports = courier.submit({"7.end": an_alert()})
        assert time.process_time() - began < 2.0
        assert reports[-1]["target"] == "phone"
        assert len(reports) == 1000
    finally:
        courier.close()


def test_a_process_that_keeps_the_worker_pipe_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write woke the daemon and kept it for a fifth of a second, as long as somebody wrote."""
    kept: list[int] = []
    real = subprocess.Popen

    def start(*words: Any, **named: Any) -> Any:
        kept.append(os.dup(named["stdout"]))
        return real(*words, **named)

    monkeypatch.setattr(courier_module, "_BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr(courier_module.subprocess, "Popen", start)
    courier = Courier(os.geteuid(), AlertSettings(), str(tmp_path / "told"), None)
    try:
        courier.submit({"7.end": an_alert()})
        assert not select.select([courier], [], [], 0)[0]
        os.write(kept[0], b"\n" * (1 << 16))
        assert select.select([courier], [], [], 10)[0]
        began = time.process_time()
        assert courier.poll() == []
        assert time.process_time() - began < 0.1
        assert courier.is_idle
        assert courier.trouble is not None
        with pytest.raises(BrokenPipeError):
            os.write(kept[0], b"\n")
        assert not select.select([courier], [], [], 0)[0]
    finally:
        courier.close()
        for fd in kept:
            os.close(fd)
