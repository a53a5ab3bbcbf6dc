"""Daemons forked from a process that has imported theirs: nine tenths of a daemon's start is its imports.

Such a daemon is a process like any other, with a session, an environment, a folder and descriptors of its own, and is
killed like any other. Only its command line is that of the process it was forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PROGRAM = "import sys; sys.path[:1] = sys.argv[2:]; import warm; sys.exit(warm.serve(int(sys.argv[1])))"
_LONGEST = 1 << 20
"""Bytes of a request: most of it is an environment."""
_IMPORTED_AT_START = (
    *("importlib.metadata", "gpusched.addons.notify.courier", "gpusched.addons.notify.targets"),
    "gpusched.addons.simulate.auto_preset",
)
"""By a daemon, when it has read its settings."""


class Forked:
    """A daemon that was forked; what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        """Args: ended: descriptor from which its wait status can be read at its end."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._ended)

    def poll(self) -> int | None:
        """Its exit code, minus the signal that killed it; None as long as it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises: subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("the daemon", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has, and is about to be told of
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout_s)[0]:
            status = os.read(self._ended, 16)
            assert status, "the process that forks daemons has died"
            self.returncode = os.waitstatus_to_exitcode(int(status))
            os.close(self._ended)
        return self.returncode


class Nest:
    """A process that has imported the daemon, and forks one for each request."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        self.settings = interpreter_settings(dict(os.environ))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), os.getcwd(), str(Path(__file__).parent)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, arguments: list[str], env: dict[str, str], out: int, ready: int) -> Forked:
        """Start a daemon.

        Args: out: descriptor of its standard output and error; ready: of what it reports to.
        """
        ended, theirs = os.pipe()
        request = json.dumps({"arguments": arguments, "env": env, "folder": os.getcwd()}).encode()
        try:
            socket.send_fds(self._socket, [request], [out, ready, theirs])
        finally:
            os.close(theirs)
        return Forked(int(self._socket.recv(16)), ended)


@functools.cache
def nest() -> Nest:
    """The one of this process."""
    return Nest()


def interpreter_settings(env: dict[str, str]) -> dict[str, str]:
    """What an interpreter or its loader would read from an environment when it starts, which a fork does not."""
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_", "MALLOC_"))}


def serve(descriptor: int) -> int:
    """Fork daemons on request; returns in each of them with its exit code, and in the first process at the end."""
    from gpusched.daemon.main import main

    _make_ready()
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=descriptor)
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        for readable, _ in poll.poll():
            if readable != descriptor:
                pid, ended = running.pop(readable)
                poll.unregister(readable)
                os.close(readable)
                _tell(ended, os.waitpid(pid, 0)[1])
                continue
            message, (*given,), _, _ = socket.recv_fds(requests, _LONGEST, 3)
            if not message:
                return 0
            pid = os.fork()
            if not pid:
                requests.detach()
                return main(_become_daemon(json.loads(message), *given[:2]))
            os.close(given[0])
            os.close(given[1])
            running[watched := os.pidfd_open(pid)] = pid, given[2]
            poll.register(watched, select.POLLIN)
            requests.send(str(pid).encode())


def _make_ready() -> None:
    """What each daemon would do at its start, to the same effect."""
    sys.path.append(str(Path(__file__).parent.parent))
    from ready_table import ready_table, use_ready_tables

    use_ready_tables()
    ready_table()
    for name in _IMPORTED_AT_START:
        importlib.import_module(name)


def _tell(ended: int, status: int) -> None:
    try:
        os.write(ended, str(status).encode())
    except BrokenPipeError:
        pass  # nobody asks any more
    os.close(ended)


def _become_daemon(wanted: dict[str, Any], out: int, ready: int) -> list[str]:
    """Be as a process that was started so; returns its arguments."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(ready, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(wanted["env"])
    time.tzset()
    os.chdir(wanted["folder"])
    sys.path[:2] = [wanted["folder"]]
    arguments = [*wanted["arguments"], "--ready-fd", "3"]
    sys.argv[:] = ["gpusched.daemon", *arguments]
    return arguments
