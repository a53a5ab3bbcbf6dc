"""Writing to a user's terminals, on pseudo terminals."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import wait_until

from gpusched.addons.notify import terminals
from gpusched.addons.notify.attempt import send
from gpusched.addons.notify.targets import Targets
from gpusched.engine.linux.terminals import owners


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A pseudo terminal of this user's that takes messages: its other end, and its folder."""
    master, slave = os.openpty()
    path = os.ttyname(slave)
    os.chmod(path, 0o620)
    yield master, path
    os.close(master)
    os.close(slave)


def heard(master: int) -> str:
    ready, _, _ = select.select([master], [], [], 0.0)
    return os.read(master, 4096).decode() if ready else ""


def test_text_is_written_without_control_characters(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    master, path = terminal
    # Those of others on this machine are not to be told.
    assert path in terminals._terminals(os.path.dirname(path))
    monkeypatch.setattr(terminals, "_terminals", lambda folder: [path])
    assert terminals.write_to_terminals("two\x1b[2J\x07 lines\nof text\r") == 1
    assert heard(master).replace("\r", "") == "\ntwo\\x1b[2J\\x07 lines\nof text\n"


def test_mesg_n_is_respected(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    master, path = terminal
    os.chmod(path, 0o600)
    monkeypatch.setattr(terminals, "_terminals", lambda folder: [path])
    with pytest.raises(terminals.Unreached, match="mesg n") as caught:
        terminals.write_to_terminals("hello")
    assert caught.value.is_final
    assert heard(master) == ""


def test_a_full_terminal_does_not_block(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = terminal
    monkeypatch.setattr(terminals, "_terminals", lambda folder: [path])
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def takes() -> int:
        taken = 0
        with suppress(BlockingIOError):
            while True:
                taken += os.write(fd, b"x" * 4096)
        return taken

    def is_refused() -> bool:
        takes()
        try:
            terminals.write_to_terminals("hello")
        except terminals.Unreached:
            return True
        return False

    # The kernel moves what it took to the reader's side a little later, and then takes more.
    wait_until(is_refused, what="the terminal to be full")
    os.close(fd)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file")
    (tmp_path / "2").symlink_to("/dev/null")
    with pytest.raises(terminals.Unreached):
        terminals.write_to_terminals("hello", str(tmp_path))
    assert (tmp_path / "1").read_text() == "a file"
    with pytest.raises(terminals.Unreached, match="none is open"):
        terminals.write_to_terminals("hello", str(tmp_path / "gone"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a terminal away")
def test_a_foreign_terminal_is_not_written_to(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    master, path = terminal
    os.chown(path, 65534, -1)
    monkeypatch.setattr(terminals, "_terminals", lambda folder: [path])
    with pytest.raises(terminals.Unreached):
        terminals.write_to_terminals("hello")
    assert heard(master) == ""
    assert 65534 in owners()


def test_every_user_has_these_targets_without_a_file() -> None:
    none = Targets("nowhere", exists=False)
    found = none.named("@write")
    assert found is not None
    assert found.url == terminals.TERMINALS
    assert none.named("@nobody") is None


def test_an_attempt_says_why_the_user_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals, "_terminals", lambda folder: [])
    result = send(terminals.TERMINALS, "title", "body")
    assert (result.is_told, result.is_final) == (False, True)
    assert result.error == "no terminal to write to: none is open"
