"""A job and its client against the root process that supervises it: it is neither ended, stopped nor left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from attacks import as_user, connect, state, wait_for
from people import BOB, NEEDS_ROOT
from support import wait_until

from gpusched.engine import attach_protocol, forkserver
from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.interactive import MOST_GUESTS
from gpusched.engine.supervisor.processes import end_all

pytestmark = NEEDS_ROOT


def a_foreground(bob: Any) -> tuple[str, str]:
    """A job of bob's in the foreground, and the socket of it."""
    job = bob.submit("/bin/sleep", "600", interactive="pipes", keep=True)

    def path() -> str | None:
        found = bob.call("GET", f"/v1/jobs/{job}/attach")["attach"]["path"]
        return str(found) if found and os.path.exists(found) else None

    wait_until(path, what="the socket of the job")
    return job, str(path())


NONSENSE = {
    "no signal": attach_protocol.frame(attach_protocol.SIGNAL, b"99"),
    "a negative signal": attach_protocol.frame(attach_protocol.SIGNAL, b"-1"),
    "signal 0": attach_protocol.frame(attach_protocol.SIGNAL, b"0"),
    "a huge signal": attach_protocol.frame(attach_protocol.SIGNAL, b"9" * 30),
    "more digits than Python reads": attach_protocol.frame(attach_protocol.SIGNAL, b"9" * 5000),
    "a huge size": attach_protocol.frame(attach_protocol.SIZE, b"99999999999999999999 3"),
    "a negative size": attach_protocol.frame(attach_protocol.SIZE, b"-1 -1"),
    "an empty acknowledgement": attach_protocol.frame(attach_protocol.ACK),
    "an acknowledgement of nothing": attach_protocol.frame(attach_protocol.ACK, b"\xff\xff\xff\xff\xff"),
    "an order among the words": attach_protocol.frame(attach_protocol.SIGNAL, b"9 tree .\nstop cancel - - ."),
    "an unknown frame": attach_protocol.frame(0, b"x"),
    "a frame too long": b"0" + (1 << 30).to_bytes(4, "little"),
    "bytes": bytes(range(256)) * 40,
}


def test_no_client_input_ends_the_supervisor(make: Any) -> None:
    daemon = make()
    bob = daemon.person(BOB)
    job, path = a_foreground(bob)

    def send(first: bytes, payload: bytes) -> None:
        with connect(path) as sock:
            sock.sendall(first)
            if first:
                sock.recv(1000)
            sock.sendall(payload)
            # Until it is dropped, or a moment later: either way it has been read.
            sock.settimeout(0.3)
            try:
                while sock.recv(1000):
                    continue
            except OSError:
                pass

    for payload in NONSENSE.values():
        as_user(BOB, lambda payload=payload: send(attach_protocol.frame(attach_protocol.HELLO, b"1 0 0"), payload))
        as_user(BOB, lambda payload=payload: send(b"", payload))
        assert state(bob, job) == "RUNNING"
    assert (daemon.state_dir / "spool" / "engine.log").read_bytes() == b""
    bob.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    wait_for(bob, job, "CANCELLED")


def test_many_silent_clients_block_no_client(make: Any) -> None:
    daemon = make()
    bob = daemon.person(BOB)
    job, path = a_foreground(bob)

    def crowd() -> bytes:
        waiting = [connect(path) for _ in range(3 * MOST_GUESTS)]
        with connect(path) as sock:
            sock.sendall(attach_protocol.frame(attach_protocol.HELLO, b"1 0 0"))
            said = sock.recv(1000)
        for one in waiting:
            one.close()
        return said

    assert as_user(BOB, crowd).startswith(b"H")
    bob.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    wait_for(bob, job, "CANCELLED")


def ticket(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "run": "1.1",
        "uid": 2,
        "user": BOB,
        "argv": ["/bin/true"],
        "script": None,
        "env": {},
        "work_dir": "/",
        "snapshot": None,
        "umask": 0o22,
        "stdout_path": "/dev/null",
        "stderr_path": None,
        "append": False,
        "checkpoint_dir": None,
        "log_max_mib": None,
        "log_keep": 0,
        "pam": False,
        **more,
    }


def test_a_process_stopped_before_exec_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BECOME_S", 0.3)
    # What the user would do from outside, at this moment: from here on the process is theirs.
    monkeypatch.setattr(launch, "_find", lambda name, env: os.kill(os.getpid(), signal.SIGSTOP) or name)
    where = os.getcwd()
    try:
        with pytest.raises(LaunchError, match=r"its first process did not start its program within 0\.3 s"):
            launch.start(ticket(tmp_path), str(tmp_path), launch.CheckpointBase())
    finally:
        os.chdir(where)


def test_a_failing_supervisor_ends_its_run() -> None:
    """Whoever left the session, the environment and its parent behind could not be found afterwards."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            forkserver.ctypes.CDLL(None).prctl(forkserver.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.write(write, str(os.getpid()).encode())
                    os.execve("/bin/sleep", ["sleep", "600"], {})
                os._exit(0)
            os.read(read, 1)
            end_all()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    # It held the other end for as long as it lived.
    with os.fdopen(read, "rb") as rest:
        rest.read()


def test_no_test_hook_ends_a_system_daemon(make: Any) -> None:
    daemon = make()
    daemon.stop()
    daemon.start(GPUSCHED_CRASH_AT="commit:1")
    bob = daemon.person(BOB)
    job = bob.submit("/bin/true")
    wait_for(bob, job, "COMPLETED")
    assert daemon.process.poll() is None
