"""Runs in the foreground, on the engine alone: who may attach, what is left behind, and what outlives an engine."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from engine_bench import LocalBench, open_run
from support import wait_until

from gpusched.engine.attach_protocol import (
    ACK,
    BYE,
    COUNT,
    EOF,
    EXIT,
    HELLO,
    HOLD,
    IN,
    NOTE,
    OUT,
    PING,
    QUERY,
    REFUSED,
    RESUME,
    RESUMED,
    STATUS,
    WELCOME,
    frame,
    take_frames,
)
from gpusched.engine.supervisor.attach import listen
from gpusched.model.execution import NoteOrder, ResumeOrder, RunLost, RunStarted, RunSuspended, StopOrder, SuspendOrder
from gpusched.model.job import Interactive

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start runs of another user")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()
    while Talker.made:
        Talker.made.pop().socket.close()


class Talker:
    """A client that says exactly what it is told."""

    made: ClassVar[list[Talker]] = []

    def __init__(self, bench: LocalBench, run: str, hello: bytes = b"1 24 80", first: int = HELLO) -> None:
        path = str(bench.spool / f"{run}.attach")
        self.socket = socket.socket(socket.AF_UNIX)
        self.made.append(self)
        wait_until(lambda: self.socket.connect_ex(path) == 0, what="the socket")
        self.socket.settimeout(20)
        self.buffer = bytearray()
        self.heard: list[tuple[int, bytes]] = []
        self.say(first, hello)

    def say(self, kind: int, content: bytes = b"") -> None:
        self.socket.sendall(frame(kind, content))

    def receive(self, kind: int, content: bytes = b"") -> bytes:
        """Wait for a frame of this kind that holds this; returns it whole."""
        while True:
            for at, (found, words) in enumerate(self.heard):
                if found == kind and content in words:
                    del self.heard[: at + 1]
                    return words
            data = self.socket.recv(65536)
            assert data, f"closed; heard {self.heard}"
            self.buffer += data
            self.heard += take_frames(self.buffer)

    def is_dropped(self) -> bool:
        """Whether nothing but the end is heard."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def cat(bench: LocalBench, run: str, **terms: bool | int) -> None:
    bench.start(run, argv=("cat",), interactive=Interactive(**terms))  # type: ignore[arg-type]


def test_nothing_starts_before_a_client_attaches(bench: LocalBench) -> None:
    cat(bench, "1.1")
    bench.let_pass(0.3)
    assert bench.of("1.1") == []
    talker = Talker(bench, "1.1")
    assert talker.receive(WELCOME).split()[:2] == [b"1.1", b"pipes"]
    bench.until("1.1", RunStarted)
    talker.say(IN, b"hello")
    assert talker.receive(OUT) == b"hello"
    talker.say(BYE)
    assert bench.end_of("1.1").stopped_by == "client_lost"


def test_only_the_owner_can_open_the_socket_and_it_is_removed_with_the_run(bench: LocalBench) -> None:
    cat(bench, "1.1")
    Talker(bench, "1.1").receive(WELCOME)
    path = bench.spool / "1.1.attach"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    wait_until(lambda: not path.exists(), what="the socket to be gone")


@AS_ROOT
def test_a_socket_appears_only_when_its_owner_may_connect() -> None:
    nobody = pwd.getpwnam("nobody")
    # Not below the folder of pytest, which its other processes close to everybody but root as they start.
    folder = tempfile.mkdtemp(prefix="gpusched-attach-")
    os.chmod(folder, 0o711)
    asked, ask = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            while number := os.read(asked, 4):
                answer = _first_answer(f"{folder}/{int(number)}.attach")
                os.write(tell, errno.errorcode.get(answer, "connected").ljust(16).encode())
        finally:
            os._exit(0)
    answers = set()
    try:
        # The window is between two calls of the kernel: a client that looks as fast as it can meets it now and then.
        for number in range(300):
            os.write(ask, b"%4d" % number)
            path = f"{folder}/{number}.attach"
            listener = listen(path, f"{path}-new", nobody.pw_uid)
            answers.add(os.read(told, 16).decode().strip())
            listener.close()
            os.unlink(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for fd in (asked, ask, told, tell):
            os.close(fd)
    os.rmdir(folder)
    assert answers == {"connected"}


def _first_answer(path: str) -> int:
    """How the kernel answers when there is something at this path."""
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            if (answer := sock.connect_ex(path)) != errno.ENOENT:
                return answer


@AS_ROOT
def test_another_user_is_rejected_even_on_an_open_socket(bench: LocalBench) -> None:
    cat(bench, "1.1")
    first = Talker(bench, "1.1")
    first.receive(WELCOME)
    for folder in (bench.folder, *bench.folder.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o711)
    (bench.spool / "1.1.attach").chmod(0o666)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(pwd.getpwnam("nobody").pw_uid)
            os._exit(7 if Talker(bench, "1.1").is_dropped() else 1)
        except BrokenPipeError:
            os._exit(7)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    first.say(IN, b"still here")
    assert first.receive(OUT) == b"still here"


@AS_ROOT
def test_a_run_of_another_user_gets_that_users_terminal(bench: LocalBench) -> None:
    nobody = pwd.getpwnam("nobody")
    for folder in (bench.folder, *bench.folder.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o711)
    bench.folder.chmod(0o777)
    script = "id -un; tty; echo to-tty > /dev/tty; exit 4"
    bench.start("1.1", argv=("sh", "-c", script), uid=nobody.pw_uid, user="nobody", interactive=Interactive(pty=True))
    child = os.fork()
    if child == 0:
        try:
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            talker = Talker(bench, "1.1")
            for words in (b"nobody", b"/dev/pts/", b"to-tty"):
                talker.heard.insert(0, (OUT, talker.receive(OUT, words)))
            talker.receive(EXIT, b"4 - - .")
            os._exit(7)
        except BaseException:
            os._exit(2)
    assert bench.end_of("1.1").exit_code == 4
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("hello", [b"2 24 80", b"", b"words", b"1 x y"])
def test_a_client_with_an_unknown_protocol_is_dropped_and_the_next_is_served(bench: LocalBench, hello: bytes) -> None:
    cat(bench, "1.1")
    assert Talker(bench, "1.1", hello).is_dropped()
    Talker(bench, "1.1").receive(WELCOME)


def test_a_client_that_exceeds_the_window_is_dropped(bench: LocalBench) -> None:
    bench.start("1.1", argv=("sleep", "600"), interactive=Interactive())
    talker = Talker(bench, "1.1")
    talker.receive(WELCOME)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(100):
            talker.say(IN, b"x" * 65536)
    assert bench.end_of("1.1").stopped_by == "client_lost"


def broken(bench: LocalBench, **terms: bool) -> tuple[bytes, int]:
    """A run of cat whose client has said HOLD, and whose connection broke: the client's token, what it has received."""
    cat(bench, "1.1", **terms)
    talker = Talker(bench, "1.1")
    token = talker.receive(WELCOME).split()[2]
    talker.say(HOLD)
    talker.say(IN, b"first.")
    talker.receive(OUT, b"first.")
    talker.say(PING)
    received = int(talker.receive(COUNT))
    talker.say(IN, b"second.")
    # Cut in the middle of a frame, which is sent again.
    talker.socket.sendall(frame(IN, b"third.")[:7])
    wait_until(lambda: (bench.folder / "1.1.out").read_bytes() == b"first.second.", what="the input")
    talker.socket.close()
    return token, received


def test_a_client_whose_connection_broke_goes_on_where_each_side_was(bench: LocalBench) -> None:
    token, received = broken(bench)
    talker = Talker(bench, "1.1", b"%s %d" % (token, 0), first=RESUME)
    taken = int(talker.receive(RESUMED))
    assert taken == received + len(frame(IN, b"second.")) + 7
    # Nothing was counted yet, so all is said again.
    assert talker.receive(WELCOME)
    assert talker.receive(OUT) == b"first."
    assert talker.receive(OUT) == b"second."
    talker.socket.sendall(frame(IN, b"third.")[7:])
    assert talker.receive(OUT) == b"third."
    talker.say(EOF)
    assert talker.receive(EXIT) == b"0 - - .\n"
    assert bench.end_of("1.1").exit_code == 0


def test_the_place_of_a_lost_client_may_be_taken_and_is_then_gone(bench: LocalBench) -> None:
    token, _ = broken(bench)
    other = Talker(bench, "1.1")
    other.receive(WELCOME)
    late = Talker(bench, "1.1", b"%s 0" % token, first=RESUME)
    assert late.receive(REFUSED) == b"another client is attached"
    other.say(EOF)
    other.receive(EXIT, b"0 - - .")


def test_a_return_with_the_wrong_words_changes_nothing(bench: LocalBench) -> None:
    token, _ = broken(bench)
    for words in (b"", token, token + b" -5", token + b" 99999", token + b" x", b"\xff 0"):
        assert Talker(bench, "1.1", words, first=RESUME).is_dropped()
    Talker(bench, "1.1", b"other 0", first=RESUME).receive(REFUSED)
    back = Talker(bench, "1.1", b"%s 0" % token, first=RESUME)
    back.receive(RESUMED)
    back.socket.sendall(frame(IN, b"third.")[7:])
    back.say(BYE)
    assert bench.end_of("1.1").stopped_by == "client_lost"


def test_a_holding_client_that_ends_its_side_has_left(bench: LocalBench) -> None:
    cat(bench, "1.1")
    talker = Talker(bench, "1.1")
    talker.receive(WELCOME)
    talker.say(HOLD)
    talker.say(PING)
    talker.receive(COUNT)
    # As a relay passes on the end of a client that was killed.
    talker.socket.shutdown(socket.SHUT_WR)
    assert bench.end_of("1.1").stopped_by == "client_lost"


def test_a_note_reaches_the_terminal_and_the_log(bench: LocalBench) -> None:
    cat(bench, "1.1")
    talker = Talker(bench, "1.1")
    bench.until("1.1", RunStarted)
    bench.engine.order("1.1", NoteOrder("job 1: a word"))
    assert talker.receive(NOTE) == b"job 1: a word"
    talker.say(EOF)
    bench.end_of("1.1")
    assert "\ngpusched: job 1: a word\n" in (bench.folder / "1.1.out").read_text()


def test_a_query_reports_the_client_without_taking_its_place(bench: LocalBench) -> None:
    cat(bench, "1.1", lease_s=600)
    asker = Talker(bench, "1.1", first=QUERY)
    assert asker.receive(STATUS) == b"- - - ."
    assert asker.is_dropped()
    client = Talker(bench, "1.1")
    bench.until("1.1", RunStarted)
    pid, since_at, ends_at, _ = Talker(bench, "1.1", first=QUERY).receive(STATUS).split()
    assert int(pid) == os.getpid()
    assert 590 < float(ends_at) - float(since_at) < 660
    client.say(IN, b"still here")
    assert client.receive(OUT) == b"still here"


def test_a_second_client_is_refused_with_a_message(bench: LocalBench) -> None:
    cat(bench, "1.1")
    Talker(bench, "1.1").receive(WELCOME)
    assert Talker(bench, "1.1").receive(REFUSED) == b"another client is attached: process %d" % os.getpid()


def test_a_session_survives_an_engine_restart(bench: LocalBench) -> None:
    cat(bench, "1.1", pty=True, keep=True)
    talker = Talker(bench, "1.1")
    started = bench.until("1.1", RunStarted)
    bench.restart()
    talker.say(IN, b"one\r")
    talker.receive(OUT, b"one")
    bench.engine.adopt([open_run("1.1", started)])
    talker.say(IN, b"\x04")
    talker.receive(EXIT, b"0 - - .")
    assert bench.end_of("1.1").exit_code == 0


def test_a_killed_supervisor_hangs_up_and_removes_its_socket(bench: LocalBench) -> None:
    cat(bench, "1.1", pty=True, keep=True)
    talker = Talker(bench, "1.1")
    started = bench.until("1.1", RunStarted)
    os.kill(started.supervisor_pid, signal.SIGKILL)
    bench.until("1.1", RunLost)
    talker.receive(WELCOME)
    assert talker.is_dropped()
    wait_until(lambda: not bench.processes(), what="all to be gone")
    bench.engine.reconcile((), ["1.1"])
    wait_until(lambda: not (bench.spool / "1.1.attach").exists(), what="the socket to be gone")


def test_the_lease_pauses_during_suspension(bench: LocalBench) -> None:
    cat(bench, "1.1", lease_s=4)
    talker = Talker(bench, "1.1")
    bench.until("1.1", RunStarted)
    bench.engine.order("1.1", SuspendOrder())
    bench.until("1.1", RunSuspended)
    bench.let_pass(4.5)
    bench.engine.order("1.1", ResumeOrder())
    talker.say(IN, b"awake")
    talker.receive(ACK)
    assert talker.receive(OUT) == b"awake"
    talker.receive(NOTE, b"unless you type something")
    assert bench.end_of("1.1").stopped_by == "lease"
