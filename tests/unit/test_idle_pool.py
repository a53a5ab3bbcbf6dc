"""Tickets handed straight to idle supervisors: who is counted on, and who is not any more."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from gpusched.engine.wire import IdlePool


@pytest.fixture
def queue() -> Iterator[tuple[IdlePool, socket.socket]]:
    queue_in, queue_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    queue_in.setblocking(False)
    queue_out.setblocking(False)
    pool = IdlePool(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK), queue_in.detach())
    with queue_out:
        yield pool, queue_out
    pool.close()


@pytest.mark.parametrize("gone", [ProcessLookupError, PermissionError])
def test_a_pid_that_is_no_longer_a_supervisor_is_not_counted_on(
    queue: tuple[IdlePool, socket.socket], monkeypatch: pytest.MonkeyPatch, gone: type[OSError]
) -> None:
    pool, queue_out = queue

    def kill(pid: int, number: int) -> None:
        if pid == 11:
            raise gone

    monkeypatch.setattr(os, "kill", kill)
    pool.put(11)
    pool.put(12)
    assert pool.hand_over(b"ticket")
    assert queue_out.recv(100) == b"ticket"
    assert pool.take() == 0


def test_a_full_queue_keeps_the_supervisor_idle(queue: tuple[IdlePool, socket.socket]) -> None:
    pool, _ = queue
    handed = 0
    pool.put(os.getpid())
    while pool.hand_over(b"x" * 4096):
        handed += 1
        pool.put(os.getpid())
    assert handed
    assert pool.withdraw(os.getpid())


def test_only_untaken_tickets_can_be_withdrawn(queue: tuple[IdlePool, socket.socket]) -> None:
    pool, _ = queue
    for pid in (11, 12, 13):
        pool.put(pid)
    assert pool.withdraw(12)
    assert not pool.withdraw(12)
    assert sorted((pool.take(), pool.take())) == [11, 13]
    assert pool.take() == 0


def test_a_search_ends_though_the_first_one_seen_is_taken_meanwhile(
    queue: tuple[IdlePool, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _ = queue
    for pid in (11, 12, 13):
        pool.put(pid)
    put, looks = pool.put, []

    def put_unless_taken(pid: int) -> None:
        looks.append(pid)
        assert len(looks) < 10, "it searches forever"
        if pid != 11:  # which has a ticket by now
            put(pid)

    monkeypatch.setattr(pool, "put", put_unless_taken)
    assert not pool.withdraw(14)
    assert sorted((pool.take(), pool.take())) == [12, 13]
