"""The daemon's end of the processes that send, with real ones: starts, deaths, receipts, other users."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from receivers import WebReceiver
from support import is_alive, wait_until
from warm import Forked, nest

from gpusched.addons.notify import courier as courier_module
from gpusched.addons.notify.courier import Courier
from gpusched.addons.notify.sender import Report
from gpusched.model.alerts import Alert
from gpusched.model.settings import AlertSettings
from gpusched.model.value import replace

SETTINGS = AlertSettings(timeout_s=60, backoff_s=0.05, backoff_max_s=0.1)


@pytest.fixture(autouse=True)
def _forked_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders are forked from a process that has imported theirs, see `warm`; one for another user is started."""

    def start(command: list[str], **how: Any) -> Forked | subprocess.Popen[bytes]:
        if "user" in how:
            return subprocess.Popen(command, **how)
        return nest().program(courier_module.__name__, command, **how)

    monkeypatch.setattr(courier_module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))


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
        self.waiting: dict[str, Alert] = {}
        """The outbox."""
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
        self.waiting |= {key: alert(key) for key in keys if key not in self.waiting}
        self.submit()

    def submit(self) -> None:
        """All that is not done, as the daemon does."""
        done = {report["key"] for report in self.reports if report.get("done")}
        for report in self.reports:
            if report.get("outcome") in ("told", "gave_up") and report["key"] in self.waiting:
                one = self.waiting[report["key"]]
                self.waiting[one.key] = replace(one, settled=(*one.settled, report["target"]))
        self.waiting = {key: one for key, one in self.waiting.items() if key not in done}
        self.reports += self.courier.submit(self.waiting)

    def poll(self) -> None:
        self.reports += self.courier.poll()

    def wait_started(self) -> None:
        """Until nobody of before is left who may be sending, and the next one does, or has a receipt to tell of."""

        def has_started() -> bool:
            self.now += 0.3
            self.submit()
            return bool(self.reports) or not self.courier.is_idle

        wait_until(has_started, what="a new sender")

    def wait_idle(self) -> None:
        wait_until(lambda: (self.poll(), self.courier.is_idle)[1], what="the sender to end")  # type: ignore[func-returns-value]

    def wait_done(self, *keys: str) -> None:
        def is_done() -> bool:
            self.now += 0.05
            self.poll()
            self.submit()
            return {report["key"] for report in self.reports if report.get("done")} >= set(keys)

        wait_until(is_done, what=f"{keys} to be done")


@pytest.fixture
def desk(tmp_path: Path, web: WebReceiver) -> Iterator[Desk]:
    made = Desk(tmp_path, web)
    yield made
    made.courier.close()


def alert(key: str) -> Alert:
    return Alert(key, "end", ("end",), os.geteuid(), time.time(), (("job", key), ("name", "x"), ("state", "FAILED")))


def test_a_sender_that_an_interpreter_starts_sends(
    desk: Desk, web: WebReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_module, "subprocess", subprocess)
    desk.send("1")
    desk.wait_done("1")
    assert web.titles == ["gpusched: job 1 (x): FAILED"]


def test_a_sender_process_exists_only_while_sending(desk: Desk, web: WebReceiver) -> None:
    desk.submit()
    assert desk.courier.is_idle
    desk.send("1")
    assert not desk.courier.is_idle
    desk.wait_done("1")
    assert web.titles == ["gpusched: job 1 (x): FAILED"]
    desk.wait_idle()
    assert is_free(desk.folder / "told")
    assert desk.courier.due_s() is None
    assert desk.courier.trouble is None
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


def test_a_repeated_handover_is_sent_once(desk: Desk, web: WebReceiver) -> None:
    desk.send("1", "2")
    for _ in range(20):
        desk.submit()
    desk.wait_done("1", "2")
    assert len(web.messages) == 2


def test_an_alert_raised_during_a_batch_goes_with_the_next(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the sender to send")
    pid = desk.courier.pid
    desk.send("2")
    assert desk.courier.pid == pid
    web.hold.set()
    desk.wait_done("1", "2")
    assert len(web.messages) == 2


def test_a_dead_sender_is_replaced_after_a_growing_pause(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    for pause_s in (1.0, 2.0):
        pid = desk.courier.pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        desk.wait_idle()
        assert desk.courier.trouble == "the alert sender ended (signal 9)"
        desk.submit()
        assert desk.courier.due_s() == pytest.approx(pause_s)
        desk.now += pause_s - 0.1
        desk.submit()
        assert desk.courier.is_idle
        desk.now += 0.2
        desk.wait_started()
    web.hold.set()
    desk.wait_done("1")
    wait_until(lambda: (desk.poll(), desk.courier.trouble is None)[1], what="the trouble to be over")


def test_a_failing_target_is_retried_by_another_sender_when_due(desk: Desk, web: WebReceiver) -> None:
    web.codes = [500, 500]
    desk.courier.close()
    desk.courier = desk.make(replace(SETTINGS, backoff_s=20, backoff_max_s=20))
    desk.waiting["1"] = replace(alert("1"), targets=("hook",))
    desk.submit()
    desk.wait_idle()
    assert [(report["outcome"], report["tries"]) for report in desk.reports] == [("failed", 1)]
    desk.submit()
    assert desk.courier.is_idle
    due_s = desk.courier.due_s()
    assert due_s is not None
    assert 15 <= due_s <= 25
    # What is new goes to the others meanwhile.
    other = WebReceiver()
    with open(desk.folder / "notify.toml", "a") as file:
        file.write(f'[target.other]\nurl = "{other.url()}"\n')
    desk.waiting["2"] = replace(alert("2"), targets=("hook", "other"))
    desk.submit()
    desk.wait_idle()
    assert (len(web.messages), len(other.messages), web.refused) == (0, 1, 1)
    desk.submit()
    assert desk.courier.is_idle
    for _ in range(2):
        desk.now += 25
        desk.submit()
        desk.wait_idle()
    desk.wait_done("1", "2")
    assert web.refused == 2
    assert len(web.messages) == 2
    other.close()


def test_what_a_sender_reported_last_counts_when_it_is_read_after_its_end(desk: Desk, web: WebReceiver) -> None:
    """A busy daemon reads the report and the end of the output at once."""
    web.codes = [500]
    desk.courier.close()
    desk.courier = desk.make(replace(SETTINGS, backoff_s=20, backoff_max_s=20))
    desk.send("1")
    pid = desk.courier.pid
    assert pid is not None
    wait_until(lambda: not is_alive(pid), what="the sender to end")
    desk.wait_idle()
    assert [(report["outcome"], report["tries"]) for report in desk.reports] == [("failed", 1)]
    desk.now += 25
    desk.submit()
    desk.wait_done("1")
    assert [(report["outcome"], report["tries"]) for report in desk.reports if "outcome" in report] == [
        ("failed", 1),
        ("told", 2),
    ]


def test_undelivered_alerts_without_a_sender_are_handed_over_again(desk: Desk, web: WebReceiver) -> None:
    """A report that could not be taken in: the receipt says what needs no second message."""
    desk.send("1")
    desk.wait_done("1")
    desk.wait_idle()
    desk.reports, desk.waiting = [], {"1": alert("1")}
    desk.submit()
    assert desk.courier.is_idle
    due_s = desk.courier.due_s()
    assert due_s is not None
    desk.now += due_s
    desk.submit()
    assert desk.reports == [{"key": "1", "target": "hook", "outcome": "told", "tries": 1}]
    desk.wait_done("1")
    assert len(web.messages) == 1


def test_a_receipt_counts_when_its_sender_died_before_reporting(desk: Desk, web: WebReceiver) -> None:
    (desk.folder / "told").write_text('["1", "hook"]\n["gone", "hook"]\n["1", "ho')
    desk.send("1")
    assert desk.reports == [{"key": "1", "target": "hook", "outcome": "told", "tries": 1}]
    assert desk.courier.is_idle
    # Now that it is recorded:
    desk.wait_done("1")
    assert web.messages == []
    assert (desk.folder / "told").read_text() == ""


def test_receipts_without_a_sender_are_ignored(desk: Desk, web: WebReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.model.alerts.MOST_SETTLED", 2)
    lines = [["1", "x" * 10_000], ["2", "c"]]
    (desk.folder / "told").write_text("".join(json.dumps(line) + "\n" for line in lines))
    desk.waiting = {"1": alert("1"), "2": replace(alert("2"), settled=("a", "b"))}
    desk.submit()
    assert desk.reports == []
    desk.wait_done("1", "2")
    assert len(web.messages) == 2


def test_an_alert_of_a_killed_sender_finishes_and_is_sent_once(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the sender to send")
    pid = desk.courier.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    desk.wait_idle()
    desk.now += 2
    desk.send("1")
    assert desk.courier.is_idle  # what was under way may still succeed
    web.hold.set()
    desk.wait_started()
    assert [report["outcome"] for report in desk.reports] == ["told"]
    assert web.titles == ["gpusched: job 1 (x): FAILED"]


def test_an_alert_of_a_killed_sender_to_a_hanging_target_ends_by_itself(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.courier.close()
    desk.courier = desk.make(replace(SETTINGS, timeout_s=3))
    desk.send("1")
    wait_until(lambda: web.waiting >= 1, what="the sender to send")
    pid = desk.courier.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_free(desk.folder / "told"), what="the try to end")
    web.hold.set()


def test_a_failing_target_does_not_delay_the_others(desk: Desk, web: WebReceiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with open(desk.folder / "notify.toml", "a") as file:
        file.write(f'[target.dead]\nurl = "json://127.0.0.1:{port}/x"\n')
    keys = [str(number) for number in range(300)]
    desk.waiting = {key: replace(alert(key), targets=("dead",)) for key in keys}
    desk.submit()
    desk.waiting["last"] = replace(alert("last"), targets=("hook",))
    desk.wait_done("last")
    assert len(web.messages) == 1
    assert not any(report.get("done") for report in desk.reports if report["key"] != "last")


def test_a_sender_with_invalid_output_is_replaced(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the sender to send")
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
    assert desk.courier.trouble == "the alert sender wrote invalid output"
    web.hold.set()


def test_no_second_sender_starts_while_the_first_may_still_send(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the sender to send")
    other = Desk(desk.folder, web)
    other.send("1")
    assert other.courier.is_idle
    web.hold.set()
    desk.wait_done("1")
    desk.courier.close()
    wait_until(lambda: is_free(desk.folder / "told"), what="the sender to end")
    assert other.courier.due_s() is not None
    other.now += 1
    other.send("1")
    assert [report["outcome"] for report in other.reports] == ["told"]
    other.courier.close()
    desk.courier = desk.make()
    assert len(web.messages) == 1


def test_alerts_beyond_a_batch_go_with_the_next_and_block_no_one(
    desk: Desk, web: WebReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_module, "_MOST_BYTES", 100_000)
    desk.waiting = {str(n): replace(alert(str(n)), facts=(("name", "y" * 8000),)) for n in range(25)}
    big = tuple(desk.waiting)
    desk.submit()
    assert 1 < len(desk.courier._batch) < len(big)
    desk.wait_done(*big)
    assert len(web.messages) == len(big)


def test_a_batch_is_sent_when_the_users_pipe_memory_is_exhausted(
    desk: Desk, web: WebReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, what: int, *_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", full)
    desk.waiting = {str(n): replace(alert(str(n)), facts=(("name", "y" * 8000),)) for n in range(10)}
    desk.submit()
    assert desk.courier.trouble is None
    desk.wait_done(*desk.waiting)
    assert len(web.messages) == 10


def test_a_sender_that_does_not_end_is_killed(desk: Desk, web: WebReceiver) -> None:
    web.hold.clear()
    desk.send("1")
    wait_until(lambda: web.waiting == 1, what="the sender to send")
    pid = desk.courier.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    desk.now += 1000
    desk.poll()
    assert desk.courier.is_idle
    assert desk.courier.trouble == "the alert sender does not end"
    web.hold.set()
    wait_until(lambda: is_free(desk.folder / "told"), what="its tries to be ended with it")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_the_sender_for_another_user_runs_as_that_user_with_that_users_file(
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
        courier.submit({"1": alert("1")})
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
    import sys

    code = "import sys; sys.path[:] = " + repr(sys.path) + "; import gpusched.addons.notify.sender, apprise"
    done = subprocess.run([sys.executable, "-S", "-c", code], user=uid, cwd="/", capture_output=True)
    return done.returncode == 0
