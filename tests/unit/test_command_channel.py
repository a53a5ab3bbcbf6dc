"""The channel over a command's input and output: it starts the command again, and says why it must."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import wait_until

from gpusched.engine.remote import command_channel
from gpusched.engine.remote.command_channel import CommandChannel

ECHO = """
import os, sys
from gpusched.engine.remote.command_channel import standard_streams
print("words of the program", flush=True)
channel = standard_streams()
print("more of them", flush=True)
import select
while channel.trouble() is None:
    select.select([channel.fileno()], [], [])
    for frame in channel.receive():
        channel.send(frame[::-1] + str(os.getpid()).encode())
"""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_channel, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(command_channel, "LONGEST_WAIT_S", 0.05)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[CommandChannel]:
    program = tmp_path / "echo.py"
    program.write_text(ECHO.replace('print("words of the program", flush=True)\n', ""))
    channel = CommandChannel(f"{shlex.quote(sys.executable)} {program}", "n2")
    yield channel
    channel.close()


def answer(channel: CommandChannel, frame: bytes) -> bytes:
    """The first answer; sent again until there is one, as frames may be lost."""
    found: list[bytes] = []

    def has_answer() -> bool:
        channel.send(frame)
        found.extend(channel.receive())
        return bool(found)

    wait_until(has_answer, what="an answer")
    return found[0]


@pytest.mark.parametrize("size", [0, 1, 100_000, 5_000_000])
def test_frames_of_any_size_go_both_ways(echo: CommandChannel, size: int) -> None:
    body = os.urandom(size)
    found = answer(echo, body)
    assert found[:size] == body[::-1]


def test_a_command_that_ends_is_started_again(echo: CommandChannel) -> None:
    first = int(answer(echo, b""))
    os.kill(first, 9)
    wait_until(lambda: int(answer(echo, b"")) != first, what="another one")


def test_after_a_hang_up_the_command_is_started_again(echo: CommandChannel) -> None:
    first = int(answer(echo, b""))
    echo.hang_up("n2 runs another version")
    assert echo.trouble() == "n2 runs another version"
    assert int(answer(echo, b"")) != first


def until_trouble(channel: CommandChannel, words: str) -> None:
    def is_told() -> bool:
        channel.receive()
        return words in (channel.trouble() or "")

    wait_until(is_told, what=words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "sh -c 'echo first >&2; echo Permission denied, please try again. >&2; exit 255'",
            "ended with 255: Permission denied",
        ),
        ("no-such-command-at-all x", "no-such-command-at-all cannot be started to reach n2: No such file"),
        ("true", "true to n2 ended with 0"),
        ("echo hello", "to n2 ended with 0"),
        ("sh -c 'kill -9 $$'", "sh to n2 ended with -9"),
    ],
)
def test_a_command_that_cannot_reach_the_node_is_quoted(command: str, words: str) -> None:
    channel = CommandChannel(command, "n2")
    try:
        until_trouble(channel, words)
    finally:
        channel.close()


def test_a_connection_over_which_nothing_comes_is_given_up() -> None:
    channel = CommandChannel("sleep 600", "n2", silence_s=0.05)
    try:
        until_trouble(channel, "the connection to n2 was lost")
    finally:
        channel.close()


def echo_that(tmp_path: Path, *, begins: str = "", answers: str = "") -> CommandChannel:
    """The echo, with a line at its beginning, and one before each answer."""
    program = tmp_path / "echo.py"
    text = ECHO.replace('print("words of the program", flush=True)', begins).replace(
        'print("more of them", flush=True)', ""
    )
    program.write_text(text.replace("        channel.send", f"        {answers or 'pass'}\n        channel.send"))
    return CommandChannel(f"{shlex.quote(sys.executable)} {program}", "n2")


def until_logged(channel: CommandChannel, caplog: pytest.LogCaptureFixture, words: str) -> str:
    def lines() -> list[str]:
        channel.receive()
        return [record.getMessage() for record in caplog.records if words in record.getMessage()]

    wait_until(lines, what=words)
    return lines()[0]


def test_what_a_working_connection_wrote_long_ago_is_not_the_reason_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command_channel, "_SETTLED_S", 0.0)
    channel = echo_that(tmp_path, begins="print('an old warning', file=sys.stderr, flush=True)")
    try:
        for _ in range(3):
            pid = int(answer(channel, b""))
        os.kill(pid, 9)
        assert until_logged(channel, caplog, "to n2 ended with -9").endswith("-9")
    finally:
        channel.close()


WARNS = "print('Warning: Permanently added n2 to the list of known hosts.', file=sys.stderr, flush=True)"


def test_what_a_command_wrote_before_it_answered_is_not_the_reason_for_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel = echo_that(tmp_path, begins=WARNS, answers="if frame == b'die': os._exit(255)")
    try:
        answer(channel, b"")
        channel.send(b"die")
        assert until_logged(channel, caplog, "to n2 ended with 255").endswith("ended with 255")
    finally:
        channel.close()


def test_a_command_that_did_not_answer_is_quoted_after_another_one_that_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    refuses = f"if os.path.exists({str(gone)!r}): sys.exit('ssh: connect to host n2 port 22: No route to host')"
    channel = echo_that(tmp_path, begins=refuses)
    try:
        pid = int(answer(channel, b""))
        gone.touch()
        os.kill(pid, 9)
        said = until_logged(channel, caplog, "to n2 ended with 1")
        assert said.endswith("ended with 1: ssh: connect to host n2 port 22: No route to host")
        assert channel.trouble() == said
    finally:
        channel.close()


@pytest.mark.parametrize(("ends", "code"), [("kill -9 $$", -9), ("exit 255", 255)])
def test_what_was_killed_could_not_say_why(ends: str, code: int) -> None:
    channel = CommandChannel(f"sh -c 'echo a warning >&2; {ends}'", "n2")
    try:
        until_trouble(channel, "ended with")
        quoted = ": a warning" if code == 255 else ""
        assert channel.trouble() == f"sh to n2 ended with {code}{quoted}"
    finally:
        channel.close()


def test_the_last_words_before_the_end_are_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dies = "if frame == b'die': os.write(2, b'Connection reset by peer\\n'); os._exit(255)"
    channel = echo_that(tmp_path, begins="print('an old warning', file=sys.stderr, flush=True)", answers=dies)
    try:
        answer(channel, b"")
        channel.send(b"die")
        assert until_logged(channel, caplog, "to n2 ended with 255").endswith("255: Connection reset by peer")
    finally:
        channel.close()
