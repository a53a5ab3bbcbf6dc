"""Clearing up waits for a quiet moment, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from support import wait_until

from gpusched.engine import janitor
from gpusched.engine.janitor import Janitor


@pytest.fixture
def cleared() -> list[int]:
    return []


@pytest.fixture
def make(cleared: list[int]) -> Iterator[Callable[..., Janitor[int]]]:
    made: list[Janitor[int]] = []

    def make(clear: Callable[[int], None] = cleared.append) -> Janitor[int]:
        made.append(Janitor(clear, "janitor"))
        return made[-1]

    yield make
    for one in made:
        one.close(finish=False)


def test_clearing_waits_for_a_pause_and_then_clears_everything(
    make: Callable[..., Janitor[int]], cleared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(janitor.time, "monotonic", lambda: now[0])
    one = make()
    for number in range(100):
        now[0] += 0.2
        one.add(number)
    assert cleared == []
    now[0] += 0.3
    wait_until(lambda: len(cleared) == 100)
    assert cleared == list(range(100))


def test_a_steady_stream_is_cleared_once_its_oldest_entry_has_waited_long(
    make: Callable[..., Janitor[int]], cleared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(janitor.time, "monotonic", lambda: now[0])
    one = make()
    one.add(0)
    now[0] += janitor._LONGEST_S
    one.add(1)
    wait_until(lambda: cleared == [0, 1])


def test_an_oversized_backlog_is_cleared_at_once(
    make: Callable[..., Janitor[int]], cleared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "_MOST", 3)
    monkeypatch.setattr(janitor, "_QUIET_S", 0.5)
    monkeypatch.setattr(janitor.time, "monotonic", lambda: 1000.0)
    one = make()
    one.add(0)
    one.add(1)
    assert cleared == []
    one.add(2)
    wait_until(lambda: cleared == [0, 1, 2])


def test_a_failing_entry_delays_no_other(make: Callable[..., Janitor[int]], cleared: list[int]) -> None:
    def clear(number: int) -> None:
        if number == 1:
            raise OSError("a disk that fails")
        cleared.append(number)

    one = make(clear)
    for number in range(3):
        one.add(number)
    wait_until(lambda: cleared == [0, 2])
    one.add(3)
    wait_until(lambda: cleared == [0, 2, 3])


def test_close_finishes_or_leaves_unstarted_entries(make: Callable[..., Janitor[int]], cleared: list[int]) -> None:
    finished, left = make(), make()
    finished.add(1)
    finished.close(finish=True)
    left.add(2)
    left.close(finish=False)
    assert cleared == [1]


def test_one_thread_does_all_the_clearing(make: Callable[..., Janitor[int]]) -> None:
    threads: set[int] = set()
    one = make(lambda _: threads.add(threading.get_ident()))
    before = threading.active_count()
    for number in range(1000):
        one.add(number)
        assert threading.active_count() <= before + 1
    one.close(finish=True)
    assert len(threads) == 1
