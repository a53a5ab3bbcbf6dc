"""The daemon's end of the worker, with a real worker: starts, deaths, receipts, other users."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from receivers import WebReceiver
from support import wait_until

from gpusched.model.alerts import Alert
from gpusched.model.settings import AlertSettings
from gpusched.notify.courier import IDLE_S, Courier
from gpusched.notify.deliveries import Report

SETTINGS = AlertSettings(timeout_s=60, backoff_s=0.05, backoff_max_s=0.1)


@pytest.fixture
def web() -> Iterator[WebReceiver]:
    receiver = WebReceiver()
    yield receiver
    receiver.close()


class Desk:
    """A courier and what it has reported."""

    def __init__(self, folder: Path, web: WebReceiver) -> None:
        self.folder = folder
        self.now = 1000.0
        (folder / "notify.toml").write_text(f'[target.hook]\nurl = "{web.url()}"\n')
        self.reports: list[Report] = []
        self.courier = self.make()

    def make(self, settings: AlertSettings = SETTINGS) -> Courier:
        return Courier(
            os.geteuid(),
            settings,
            str(self.folder / "told"),
            str(self.folder / "notify.toml"),
            monotonic=lambda: self.now,
        )

    def send(self, *keys: str) -> None:
        self.reports += self.courier.hand({key: alert(key) for key in keys})

    def poll(self) -> None:
        self.reports += self.courier.poll()

    def wait_done(self, *keys: str) -> None:
        def is_done() -> bool:
            self.poll()
            return {report["key"] for report in self.reports if report.get("done")} >= set(keys)

        wait_until(is_done, what=f"{keys} to be done")


@pytest.fixture
def desk(tmp_path: Path, web: WebReceiver) -> Iterator[Desk]:
    made = Desk(tmp_path, web)
    yield made
    made.courier.close()


def alert(key: str) -> Alert:
    return Alert(key, "end", ("end",), os.geteuid(), time.time(), (("job", key), ("name", "x"), ("state", "FAILED")))


def test_no_process_is_there_before_there_is_something_to_send_nor_long_after(desk: Desk, web: WebReceiver) -> None:
    assert desk.courier.is_idle
    desk.send("1")
    assert not desk.courier.is_idle
    desk.wait_done("1")
    assert web.titles == ["gpusched: job 1 (x): FAILED"]
    desk.poll()
    desk.now += IDLE_S + 1
    desk.poll()
    assert desk.courier.is_idle
    wait_until(lambda: is_free(desk.folder / "told"), what="the worker to end")
    desk.send("2")
    desk.wait_done("2")
    assert len(web.messages) == 2


def is_free(receipts: Path) -> bool:
    """Whether nobody is left who may be sending."""
    with open(receipts, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_what_is_handed_over_twice_is_sent_once(desk: Desk, web: WebReceiver) -> None:
    desk.send("1", "2")
    desk.send("1", "2")
    desk.wait_done("1", "2")
    assert len(web.messages) == 2


def test_a_worker_that_dies_is_replaced_after_a_pause_that_grows(desk: Desk, web: WebReceiver) -> None:
    desk.send("1")
    desk.wait_done("1")
    for pause_s in (1.0, 2.0):
        pid = desk.courier.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: (desk.poll(), desk.courier.is_idle)[1], what="the death to be noticed")
        assert desk.courier.trouble == "the process that sends alerts has ended (signal 9)"
        desk.now += pause_s - 0.1
        desk.send("2")
        assert desk.courier.is_idle
        desk.now += 0.2
        wait_until(lambda: (desk.send("2"), not desk.courier.is_idle)[1], what="a new worker")
        # A worker that has said nothing yet has not shown that it is any better.
    desk.wait_done("2")
    assert desk.courier.trouble is None


def test_a_receipt_stands_for_a_message_whose_worker_died_before_it_could_say_so(desk: Desk, web: WebReceiver) -> None:
    (desk.folder / "told").write_text('["1", "hook"]\n["gone", "hook"]\n["1", "ho')
    desk.send("1")
    assert desk.reports == [{"key": "1", "target": "hook", "outcome": "told", "tries": 1}]
    assert desk.courier.is_idle
    # Now that it is recorded:
    told = replace(alert("1"), settled=("hook",))
    assert desk.courier.hand({"1": told}) == []
    desk.wait_done("1")
    assert web.messages == []
    assert (desk.folder / "told").read_text() == ""


def test_what_a_killed_worker_was_sending_comes_to_its_end_and_is_sent_once(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the worker to send")
    pid = desk.courier.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (desk.poll(), desk.courier.is_idle)[1], what="the death to be noticed")
    desk.now += 2
    desk.send("1")
    assert desk.courier.is_idle  # what was under way may still succeed
    web.hold.set()
    wait_until(lambda: (desk.send("1"), desk.reports)[1], what="the receipt")
    assert [report["outcome"] for report in desk.reports] == ["told"]
    assert web.titles == ["gpusched: job 1 (x): FAILED"]


def test_what_a_killed_worker_was_sending_to_a_target_that_hangs_ends_by_itself(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.courier.close()
    desk.courier = desk.make(replace(SETTINGS, timeout_s=3))
    desk.send("1")
    wait_until(lambda: web.waiting >= 1, what="the worker to send")
    pid = desk.courier.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_free(desk.folder / "told"), what="the try to end")
    web.hold.set()


def test_a_target_that_fails_keeps_nothing_back_from_the_others(desk: Desk, web: WebReceiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with open(desk.folder / "notify.toml", "a") as file:
        file.write(f'[target.dead]\nurl = "json://127.0.0.1:{port}/x"\n')
    keys = [str(number) for number in range(300)]
    only_dead = {key: replace(alert(key), targets=("dead",)) for key in keys}
    desk.reports += desk.courier.hand(only_dead)
    last = replace(alert("last"), targets=("hook",))
    desk.reports += desk.courier.hand({**only_dead, "last": last})
    desk.wait_done("last")
    assert len(web.messages) == 1
    assert not any(report.get("done") for report in desk.reports if report["key"] != "last")


def test_a_worker_that_says_what_makes_no_sense_is_replaced(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the worker to send")
    pid = desk.courier.pid
    # Whoever runs as the same user can write in its place.
    with open(f"/proc/{pid}/fd/1", "wb", buffering=0) as out:
        out.write(b'{"key": "2", "done": true}\n{"key": "1", "outcome": "told"}\n[1]\n')
        desk.poll()
        assert desk.reports == []
        for _ in range(3):
            out.write(b"x" * 30_000)
            desk.poll()
    assert desk.courier.is_idle
    assert desk.courier.trouble == "the process that sends alerts says what makes no sense"
    web.hold.set()


def test_no_second_worker_begins_while_the_first_may_still_send(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the worker to send")
    other = Desk(desk.folder, web)
    other.send("1")
    assert other.courier.is_idle
    web.hold.set()
    desk.wait_done("1")
    desk.courier.close()
    wait_until(lambda: is_free(desk.folder / "told"), what="the worker to end")
    other.send("1")
    assert [report["outcome"] for report in other.reports] == ["told"]
    other.courier.close()
    desk.courier = desk.make()
    assert len(web.messages) == 1


def test_more_than_the_pipe_holds_waits_on_this_side_and_blocks_nobody(desk: Desk, web: WebReceiver) -> None:
    desk.send("0")
    desk.wait_done("0")
    pid = desk.courier.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        big = {str(n): replace(alert(str(n)), facts=(("name", "y" * 8000),)) for n in range(1, 26)}
        began = time.monotonic()
        desk.reports += desk.courier.hand(big)
        desk.poll()
        assert time.monotonic() - began < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    desk.wait_done(*big)
    assert len(web.messages) == 26


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_for_another_user_the_worker_is_that_user_and_reads_that_users_file(
    tmp_path: Path, web: WebReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = pwd.getpwnam("nobody")
    home = Path("/tmp") / f"gpusched-nobody-{os.getpid()}"
    folder = home / ".config" / "gpusched"
    folder.mkdir(parents=True)
    try:
        (folder / "notify.toml").write_text(f'[target.hook]\nurl = "{web.url()}"\n')
        (folder / "notify.toml").chmod(0o600)
        for path in (home, folder.parent, folder, folder / "notify.toml"):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        fields = list(nobody)
        fields[5] = str(home)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(fields))
        courier = Courier(nobody.pw_uid, SETTINGS, str(tmp_path / "told"), None)
        courier.hand({"1": alert("1")})
        if courier.pid is None or not can_import(nobody.pw_uid):
            pytest.skip("another user cannot read this installation")
        assert os.stat(f"/proc/{courier.pid}").st_uid == nobody.pw_uid
        wait_until(lambda: bool(courier.poll()) or bool(web.messages), what="a message")
        wait_until(lambda: bool(web.messages), what="a message")
        assert json.loads((tmp_path / "told").read_text()) == ["1", "hook"]
        courier.close()
    finally:
        shutil.rmtree(home)


def can_import(uid: int) -> bool:
    """Whether another user may read the interpreter and this package."""
    import subprocess
    import sys

    code = "import sys; sys.path[:] = " + repr(sys.path) + "; import gpusched.notify.worker, apprise"
    done = subprocess.run([sys.executable, "-S", "-c", code], user=uid, cwd="/", capture_output=True)
    return done.returncode == 0
