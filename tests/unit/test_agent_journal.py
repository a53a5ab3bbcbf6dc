"""The journal of an agent outlives it, a power failure and a clock that goes backwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.engine.remote.journal import AgentJournal
from gpusched.errors import GpuschedError


def journal_at(folder: Path, milliseconds: int = 1) -> AgentJournal:
    return AgentJournal(str(folder / "spool.agent"), milliseconds)


def test_session_and_progress_are_kept(tmp_path: Path) -> None:
    first = journal_at(tmp_path)
    first.begin_session(3)
    first.note_applied(17)
    first.note_doubtful(18, "42.1", 96)
    first.close()
    again = journal_at(tmp_path)
    assert (again.session, again.applied) == (3, 17)
    assert (again.doubtful, again.doubtful_run, again.mark) == (18, "42.1", 96)
    again.note_applied(18)
    again.close()
    third = journal_at(tmp_path)
    assert (third.applied, third.doubtful, third.doubtful_run) == (18, 0, "")
    third.close()


def test_the_progress_of_an_earlier_session_is_none_of_this_one(tmp_path: Path) -> None:
    first = journal_at(tmp_path)
    first.begin_session(3)
    first.note_applied(17)
    first.begin_session(4)
    assert first.applied == 0
    first.close()
    again = journal_at(tmp_path)
    assert (again.session, again.applied) == (4, 0)
    again.close()


@pytest.mark.parametrize("milliseconds", [[5, 5, 5], [1000, 2, 1], [1, 2000, 1]])
def test_epochs_increase_also_when_the_clock_does_not(tmp_path: Path, milliseconds: list[int]) -> None:
    epochs = []
    for instant in milliseconds:
        journal = journal_at(tmp_path, instant)
        epochs.append(journal.epoch)
        journal.close()
    assert epochs == sorted(set(epochs))


def test_epochs_increase_by_the_clock_when_the_file_is_lost(tmp_path: Path) -> None:
    first = journal_at(tmp_path, 1000)
    first.close()
    (tmp_path / "spool.agent").unlink()
    again = journal_at(tmp_path, 2000)
    assert again.epoch > first.epoch
    again.close()


@pytest.mark.parametrize("place", [0, 256])
def test_a_torn_write_leaves_an_earlier_session_and_no_nonsense(tmp_path: Path, place: int) -> None:
    first = journal_at(tmp_path)
    first.begin_session(7)
    first.begin_session(8)
    first.close()
    path = tmp_path / "spool.agent"
    body = bytearray(path.read_bytes())
    body[place + 2 : place + 6] = b"\0\0\0\0"
    path.write_bytes(body)
    again = journal_at(tmp_path)
    assert again.session in (7, 8)
    again.close()


def test_a_file_of_garbage_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "spool.agent").write_bytes(bytes(range(256)) * 4)
    journal = journal_at(tmp_path)
    assert (journal.session, journal.applied, journal.doubtful) == (0, 0, 0)
    journal.close()


def test_one_agent_at_a_time_holds_a_journal(tmp_path: Path) -> None:
    first = journal_at(tmp_path)
    with pytest.raises(GpuschedError, match="another agent of this node is alive"):
        journal_at(tmp_path)
    first.close()
    journal_at(tmp_path).close()
