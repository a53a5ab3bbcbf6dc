"""What an attacker does: things done as another user, in a process of its own."""

from __future__ import annotations

import os
import pickle
import pwd
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from people import Person, SystemDaemon
from support import wait_until

_Result = TypeVar("_Result")

PYTHON = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or ""
"""One that every user may run: that of the tests may be in root's home."""
NEEDS_PYTHON = pytest.mark.skipif(not PYTHON, reason="needs a python3 that all users may run, as /usr/bin/python3")


def become(user: str) -> None:
    """Make this process that user's, for good."""
    found = pwd.getpwnam(user)
    os.chdir("/")
    os.initgroups(user, found.pw_gid)
    os.setgid(found.pw_gid)
    os.setuid(found.pw_uid)


def as_user(user: str, deed: Callable[[], _Result]) -> _Result:
    """What a deed gives when this user does it, in a child that has become that user. Raises: AssertionError."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            become(user)
            answer: Any = (True, deed())
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(write, "wb") as out:
            pickle.dump(answer, out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        said = told.read()
    os.waitpid(child, 0)
    assert said, f"{user} was ended"
    is_well, result = pickle.loads(said)
    assert is_well, result
    return result  # type: ignore[no-any-return]


def connect(path: Path | str) -> socket.socket:
    """A connection by hand."""
    sock = socket.socket(socket.AF_UNIX)
    # Blocking: with a timeout, a full queue of connections is an error at once.
    sock.connect(str(path))
    sock.settimeout(10)
    return sock


def state(person: Person, job: str) -> str:
    """Of one of their jobs."""
    return str(person.call("GET", f"/v1/jobs/{job}")["job"]["state"])


def wait_for(person: Person, job: str, *states: str) -> dict[str, Any]:
    """Wait until a job is in one of these states; all about it then."""
    wait_until(lambda: state(person, job) in states, 40, f"job {job} to be {' or '.join(states)}")
    return dict(person.call("GET", f"/v1/jobs/{job}")["job"])


def open_folder(daemon: SystemDaemon, name: str = "open", mode: int = 0o777) -> Path:
    """A folder in which everybody may write."""
    folder = daemon.home / name
    folder.mkdir()
    folder.chmod(mode)
    return folder


def resident_mib(pid: int) -> float:
    """Memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def daemon_pid(daemon: SystemDaemon) -> int:
    """Of a daemon that runs."""
    assert daemon.process is not None
    assert daemon.process.poll() is None, "the daemon has ended"
    return daemon.process.pid
