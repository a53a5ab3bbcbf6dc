"""kill -9 while a batch is accepted and made: after the next start all of its jobs are there, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Daemon
from support import wait_until

from gpusched.daemon.verbs.batch import PIECE
from gpusched.errors import BrokenInvariant, GpuschedError

COUNT = 3 * PIECE + 50
LINES = [f"echo {number}" for number in range(COUNT)]


def hand_in(daemon: Daemon, **spec: object) -> list[int]:
    answer = daemon.call("POST", "/v1/jobs", {"spec": daemon.spec(hold=True, **spec), "batch": LINES})
    return [int(job_id) for job_id in answer["ids"]]


def commands(daemon: Daemon) -> list[tuple[int, str]]:
    rows = daemon.call("GET", "/v1/jobs?states=all&fields=id,command")["rows"]
    return sorted((int(job_id), command) for job_id, command in rows)


@pytest.mark.parametrize(
    ("crash", "is_accepted"),
    [
        ("commit:1", False),
        ("commit:1,reply", True),
        ("batch:1", True),
        ("batch:1,commit", True),
        ("batch:2", True),
        ("batch:2,reconcile", True),
        ("batch:3,commit", True),
        ("batch:3,reply", True),
    ],
)
def test_a_kill_at_each_piece_leaves_all_or_none(
    make_daemon: Callable[..., Daemon], crash: str, is_accepted: bool
) -> None:
    daemon = make_daemon(start=False)
    daemon.start(GPUSCHED_CRASH_AT=crash)
    with pytest.raises((GpuschedError, OSError)):
        hand_in(daemon)
    daemon.reap()
    daemon.start(GPUSCHED_CHECK_EVERY="1")
    if not is_accepted:
        assert commands(daemon) == []
        assert hand_in(daemon) == list(range(1, COUNT + 1))
    wait_until(lambda: len(commands(daemon)) == COUNT, what="all jobs of the batch")
    assert commands(daemon) == [(number + 1, line) for number, line in enumerate(LINES)]
    assert int(daemon.submit("true", hold=True)) == COUNT + 1
    sound = {check["check"]: check["ok"] for check in daemon.call("GET", "/v1/doctor")["checks"]}
    assert all(sound[name] for name in ("database", "bookings", "planner", "daemon steps"))


def test_kills_again_and_again_make_every_job_once(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    daemon.start(GPUSCHED_CRASH_AT="batch:1")
    with pytest.raises((GpuschedError, OSError)):
        hand_in(daemon, key="k")
    for crash in ("batch:1,commit", "batch:1,reply", "batch:1"):
        daemon.reap()
        daemon.try_start(GPUSCHED_CRASH_AT=crash)
        wait_until(lambda: daemon.process is None or daemon.process.poll() is not None, what="the crash")
    daemon.reap()
    daemon.start()
    assert hand_in(daemon, key="k") == list(range(1, COUNT + 1))
    assert commands(daemon) == [(number + 1, line) for number, line in enumerate(LINES)]


def test_an_error_in_a_piece_is_told_and_the_rest_made_after_a_restart(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    daemon.start(GPUSCHED_CRASH_AT="batch:2:raise")
    with pytest.raises(BrokenInvariant, match=f"{COUNT - 2 * PIECE} of jobs 1 to {COUNT}, a batch that was accepted"):
        hand_in(daemon)
    daemon.submit("true")
    checks = {check["check"]: check for check in daemon.call("GET", "/v1/doctor")["checks"]}
    assert "batch failed" in checks["daemon steps"]["text"]
    daemon.stop()
    daemon.start()
    wait_until(lambda: len(commands(daemon)) == COUNT + 1, what="all jobs of the batch")


def test_others_look_and_submit_while_a_batch_is_made(make_daemon: Callable[..., Daemon]) -> None:
    """Seen by states: each of their answers comes when part of the batch is there."""
    from concurrent.futures import ThreadPoolExecutor

    from gpusched.client import DaemonConnection

    daemon = make_daemon()
    many = [f"echo {number}" for number in range(50 * PIECE)]

    def submit() -> None:
        with DaemonConnection(str(daemon.socket)) as client:
            client.call("POST", "/v1/jobs", {"spec": daemon.spec(hold=True), "batch": many})

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(submit)
        seen: list[tuple[int, str]] = []
        while not done.done():
            ids = daemon.call("GET", "/v1/jobs?limit=1&fields=id")["rows"]
            if ids and int(ids[0][0]) < len(many):
                seen.append((int(ids[0][0]), daemon.submit("true", hold=True)))
        done.result()
    # A submission of theirs has an id beyond the batch, though the batch was not made yet.
    assert [own for _, own in seen] == [str(len(many) + number) for number in range(1, len(seen) + 1)]
    assert seen
