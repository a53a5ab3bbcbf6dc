"""Processes that were a user's and have become more: they are nobody's to make a job of."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from collections.abc import Iterator

import pytest
from gpu_builders import reading, sample
from people import BOB, NEEDS_ROOT

from gpusched.daemon.verbs.adopt import check_rights, examine
from gpusched.errors import Refused
from gpusched.model.commands import Caller

pytestmark = NEEDS_ROOT

UID = pwd.getpwnam(BOB).pw_uid
CALLER = Caller(UID, BOB)


@pytest.fixture
def processes() -> Iterator[list[int]]:
    made: list[int] = []
    yield made
    for pid in made:
        os.kill(pid, signal.SIGKILL)
    for pid in made:
        with contextlib.suppress(ChildProcessError):
            # Who is not our own child is init's by now.
            os.waitpid(pid, 0)


def start(made: list[int], real: int, effective: int, child: tuple[int, int] | None = None) -> tuple[int, int]:
    """A process with these ids, as a set-user-ID program has them, and a child of its own with others."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        below = os.fork() if child is not None else 0
        if child is not None and below == 0:
            real, effective = child
        os.setresuid(real, effective, effective)
        os.write(writer, f"{below} ".encode())
        signal.pause()
    made.append(pid)
    said = b""
    while len(said.split()) < (1 if child is None else 2):
        said += os.read(reader, 100)
    os.close(reader)
    os.close(writer)
    below = max(map(int, said.split()))
    if below:
        made.append(below)
    return pid, below


def test_a_process_with_more_rights_than_its_owner_is_not_adopted(processes: list[int]) -> None:
    """Its folder, words and output are read by root, and shown."""
    plain, _ = start(processes, UID, UID)
    assert check_rights(plain, CALLER, False)[1:] == (UID, BOB)
    raised, _ = start(processes, UID, 0)
    for is_admin in (False, True):
        with pytest.raises(Refused, match=f"rights that are not {BOB}'s"):
            check_rights(raised, CALLER, is_admin)


def test_a_foreign_child_process_does_not_book_its_gpu(processes: list[int]) -> None:
    pid, below = start(processes, UID, UID, child=(0, 0))
    cards = reading(1.0, sample(processes=((below, 100),)))
    with pytest.raises(Refused, match="is on a GPU"):
        examine(pid, CALLER, False, cards, "boot")
    found = examine(pid, CALLER, False, reading(1.0, sample(processes=((pid, 100), (below, 100)))), "boot")
    assert (found.tree, found.cards[0].used_mib) == ({pid}, 100)
