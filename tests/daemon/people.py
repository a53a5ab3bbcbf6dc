"""A system's daemon under a root of its own, and people who ask it: processes that have become real users."""

from __future__ import annotations

import os
import pickle
import pwd
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon

from gpusched.client import DaemonConnection
from gpusched.errors import GpuschedError

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")

ANN, BOB, EVE = "daemon", "bin", "games"
"""Accounts that every Linux has, under which nobody logs in."""


class SystemDaemon(Daemon):
    """`gpuschedd --system`, with everything below one folder that all users may enter."""

    def __init__(self, config: str = "", fake_gpus: str = "2x24GiB") -> None:
        root = Path(tempfile.mkdtemp(prefix="gpusched-system-"))
        root.chmod(0o755)
        super().__init__(root, fake_gpus=fake_gpus)
        del self.env["GPUSCHED_HOME"]
        self.arguments = ["--system", "--root", str(root)]
        self.socket = root / "run" / "gpusched" / "api.sock"
        self.state_dir = root / "var" / "lib" / "gpusched"
        self.settings = root / "etc" / "gpusched" / "config.toml"
        self.settings.parent.mkdir(parents=True)
        self.configure(config)
        self.people: list[Person] = []

    def configure(self, config: str) -> None:
        """Write the config file."""
        self.settings.write_text("[daemon]\npoll_s = 0.2\n[node]\ncpus = 8\n" + config)

    def person(self, user: str) -> Person:
        """Somebody who talks to this daemon."""
        person = Person(user, str(self.socket))
        self.people.append(person)
        return person

    def records(self, name: str = "audit.jsonl") -> list[dict[str, Any]]:
        """The lines of an audit file."""
        import json

        path = self.state_dir / "log" / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        """End people, jobs and daemon."""
        for person in self.people:
            person.leave()
        super().close()
        shutil.rmtree(self.home)


class Person:
    """A process that has become a user and asks what it is told to."""

    def __init__(self, user: str, socket_path: str) -> None:
        self.user = user
        self.uid = pwd.getpwnam(user).pw_uid
        ask_read, ask_write = os.pipe()
        tell_read, tell_write = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                # Another thread may start a command at this instant, and would wait for the end of its pipe in here.
                low, high = sorted((ask_read, tell_write))
                os.closerange(3, low)
                os.closerange(low + 1, high)
                os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
                _become(user)
                _serve(DaemonConnection(socket_path), ask_read, tell_write)
            finally:
                os._exit(0)
        os.close(ask_read)
        os.close(tell_write)
        self._ask, self._tell = os.fdopen(ask_write, "wb"), os.fdopen(tell_read, "rb")

    @property
    def pid(self) -> int:
        """Of the process that asks."""
        return self._child

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request as this user. Raises: GpuschedError."""
        pickle.dump((method, path, body), self._ask)
        self._ask.flush()
        kind, *rest = pickle.load(self._tell)
        if kind == "answer":
            return dict(rest[0])
        error: GpuschedError = rest[0](*rest[1:])
        raise error

    def submit(self, *argv: str, **spec: Any) -> str:
        """Submit a command; returns its id."""
        found = {"env": {"PATH": "/usr/bin:/bin"}, "work_dir": "/tmp", "stdout": "/dev/null", "cpus": 0, **spec}
        if argv:
            found["argv"] = list(argv)
        return str(self.call("POST", "/v1/jobs", {"spec": found})["job"]["id"])

    def refusal(self, method: str, path: str, body: Any = None) -> GpuschedError:
        """The error that a request is answered with."""
        with pytest.raises(GpuschedError) as caught:
            self.call(method, path, body)
        return caught.value

    def leave(self) -> None:
        """End the process."""
        if not self._ask.closed:
            self._ask.close()
            self._tell.close()
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)


def _become(user: str) -> None:
    found = pwd.getpwnam(user)
    os.initgroups(user, found.pw_gid)
    os.setgid(found.pw_gid)
    os.setuid(found.pw_uid)


def _serve(client: DaemonConnection, asked: int, told: int) -> None:
    with os.fdopen(asked, "rb") as requests, os.fdopen(told, "wb") as answers:
        while True:
            try:
                method, path, body = pickle.load(requests)
            except EOFError:
                return
            try:
                is_text = path == "/v1/metrics" or path.endswith("/output")
                told_so = {"text": client.text(path)} if is_text else client.call(method, path, body)
                answer: tuple[Any, ...] = ("answer", told_so)
            except GpuschedError as error:
                answer = ("error", type(error), error.message, error.hint)
            except OSError as error:
                answer = ("error", GpuschedError, f"OSError: {error}", "")
            pickle.dump(answer, answers)
            answers.flush()
