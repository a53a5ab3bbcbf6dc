"""Connections that one user holds open, speaks slowly on, or waits on: the others are served."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from attacks import as_user, become, connect, daemon_pid, resident_mib, wait_for
from people import ANN, BOB, EVE, NEEDS_ROOT, Person
from support import wait_until

pytestmark = NEEDS_ROOT

MANY = 500
SOON_S = 30.0


class Crowd:
    """A user who holds connections, until told to let go."""

    def __init__(self, path: Path, user: str, first: list[bytes], number: int = MANY) -> None:
        held, told = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                become(user)
                kept: list[socket.socket] = []
                for place in range(number):
                    sock = connect(path)
                    with suppress(OSError):
                        # Refused, which is told in words that nobody reads here.
                        sock.sendall(first[place % len(first)])
                    kept.append(sock)
                os.write(told, b"x")
                signal.pause()
            finally:
                os._exit(0)
        os.close(told)
        is_held = os.read(held, 1)
        os.close(held)
        assert is_held, f"{user} could not hold {number} connections"

    def leave(self) -> None:
        """Let go of all of them."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)


def works(person: Person) -> float:
    """How long submitting and looking takes somebody, in seconds."""
    began = time.monotonic()
    job = person.submit("/bin/true")
    assert person.call("GET", f"/v1/jobs?ids={job}")["jobs"]
    took_s = time.monotonic() - began
    assert wait_for(person, job, "COMPLETED")
    return took_s


HALF = [
    b"",
    b"G",
    b"GET /v1/status HTTP/1.1\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 90000000\r\n\r\n{",
    b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n",
]


def test_five_hundred_held_connections_lock_out_no_user(make: Any) -> None:
    daemon = make()
    ann = daemon.person(ANN)
    before = resident_mib(daemon_pid(daemon))
    crowds = [Crowd(daemon.socket, BOB, HALF), Crowd(daemon.socket, EVE, HALF)]
    try:
        for _ in range(5):
            assert works(ann) < SOON_S
        # A connection of somebody new, too.
        assert works(daemon.person("sys")) < SOON_S
        assert resident_mib(daemon_pid(daemon)) - before < 100
    finally:
        for crowd in crowds:
            crowd.leave()
    assert works(ann) < SOON_S


def test_five_hundred_waiting_clients_lock_out_no_user(make: Any) -> None:
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = bob.submit("/bin/sleep", "600")
    waits = [
        f"GET /v1/wait?ids={job}&timeout_s=300 HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        f"GET /v1/logs?ids={job}&timeout_s=300&since=x~y~1 HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"GET /v1/ended?after=0.0&timeout_s=300 HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    crowd = Crowd(daemon.socket, BOB, waits)
    try:
        for _ in range(5):
            assert works(ann) < SOON_S
    finally:
        crowd.leave()
    bob_again = daemon.person(BOB)
    assert works(bob_again) < SOON_S


def test_a_client_that_does_not_read_gets_no_more_answers(make: Any) -> None:
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    for _ in range(3):
        bob.submit("/bin/true", array="0-9", hold=True)
    before = resident_mib(daemon_pid(daemon))

    def pour() -> int:
        sent = 0
        with connect(daemon.socket) as sock:
            sock.settimeout(3)
            asked = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 50
            try:
                while sent < 64 << 20:
                    sock.sendall(asked)
                    sent += len(asked)
            except OSError:
                pass  # nobody reads it any more
        return sent

    assert as_user(BOB, pour) < 64 << 20
    assert resident_mib(daemon_pid(daemon)) - before < 60
    assert works(ann) < SOON_S


def test_a_large_array_delays_no_other_user(make: Any) -> None:
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    array = ann.submit("/bin/sleep", "0.05", array="0-99999", cpus=4)
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{array}")["job"]["tasks"].get("COMPLETED"), what="some tasks to end")
    assert works(bob) < SOON_S
    assert daemon.call("GET", "/v1/status")["daemon"]["tick"]["p95_ms"] < 10_000
    ann.call("POST", "/v1/jobs/cancel", {"ids": [array]})


def test_jobs_without_requests_are_limited(make: Any) -> None:
    """Each run has a supervisor of root's, which no limit on the user's processes counts."""
    daemon = make("[limit]\nrunning_per_user = 20\n")
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    array = bob.submit("/bin/sleep", "600", array="0-199", cpus=0)
    wait_until(lambda: tasks(bob, array).get("RUNNING", 0) == 20, what="as many tasks to run as may")
    why = bob.call("GET", f"/v1/jobs/{array}/why")["why"]
    assert why["text"] == f"user {BOB} in queue default may run 20 jobs at once and runs 20"
    assert works(ann) < SOON_S
    assert tasks(bob, array)["RUNNING"] == 20
    assert daemon.call("GET", "/v1/status")["daemon"]
    bob.call("POST", "/v1/jobs/cancel", {"ids": [array]})


def tasks(person: Person, array: str) -> dict[str, int]:
    """How many tasks are in each state."""
    return dict(person.call("GET", f"/v1/jobs/{array}")["job"]["tasks"])


def test_wait_requests_per_user_are_bounded(make: Any) -> None:
    daemon = make()
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    array = bob.submit("/bin/true", array="0-2499", hold=True)
    waits = f"GET /v1/wait?ids={array}_[0-2499]&timeout_s=300 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    crowd = Crowd(daemon.socket, BOB, [waits], 81)
    try:
        wait_until(
            lambda: any("watched jobs" in line.get("why", "") for line in daemon.records("refusals.jsonl")),
            90,
            "a refusal",
        )
        assert works(ann) < 30
    finally:
        crowd.leave()
    # The end of the jobs would have it look up all of them for each of these requests, which takes seconds.
    daemon.kill()
    daemon.start()
