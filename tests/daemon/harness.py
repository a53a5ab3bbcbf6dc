"""A real daemon in a folder of its own, driven through its socket, killed and started again at will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from support import wait_until
from warm import Forked, interpreter_settings, nest

from gpusched.client import DaemonConnection

FINAL = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "PREEMPTED",
    "DEADLINE",
}


class Daemon:
    """One scheduler home. `start` and `kill` may alternate; the home stays."""

    is_warm = True
    """Whether it may be forked from a process that has imported it, see `warm`."""

    def __init__(self, home: Path, *, fake_gpus: str | None = None, config: str = "") -> None:
        self.home = home
        self.arguments: list[str] = []
        self.prefix: list[str] = []
        """What starts the daemon's command."""
        self.socket = home / "run" / "api.sock"
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.source = "" if fake_gpus else '[gpu]\nsource = "none"\n'
        (home / "config.toml").write_text(self.source + config)
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("GPUSCHED_", "SLURM_", "CUDA_", "GSUB_"))
        }
        self.env["GPUSCHED_HOME"] = str(home)
        if fake_gpus:
            self.env["GPUSCHED_FAKE_GPUS"] = fake_gpus
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self._client: DaemonConnection | None = None

    # --- life -----------------------------------------------------------------------------------

    def start(self, **env: str) -> None:
        """Start the daemon and wait until its socket answers."""
        lines: list[str] = []

        def has_answered() -> bool:
            lines.append(self.try_start(**env))
            if "another daemon is already running" not in lines[-1]:
                return True
            # A process that a killed one was just starting has its lock until it becomes another program.
            self.reap()
            return False

        wait_until(has_answered, what="the lock of the daemon before")
        assert lines[-1] == "ready", lines[-1]

    def try_start(self, **env: str) -> str:
        """Start the daemon; returns the line it reports, empty when it died without one."""
        env = {**self.env, **env}
        read_fd, write_fd = os.pipe()
        try:
            with open(self.home / "daemon.out", "ab") as out:
                if self.is_warm and not self.prefix and nest().settings == interpreter_settings(env):
                    self.process = nest().start(self.arguments, env, out.fileno(), write_fd)
                else:
                    self.process = self._start_cold(env, out, write_fd)
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd, encoding="utf-8") as reader:
            return reader.readline().strip()

    def _start_cold(self, env: dict[str, str], out: BinaryIO, ready_fd: int) -> subprocess.Popen[bytes]:
        command = [*self.prefix, sys.executable, "-m", "gpusched.daemon", *self.arguments, "--ready-fd", str(ready_fd)]
        return subprocess.Popen(
            command,
            env=env,
            pass_fds=[ready_fd],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

    def kill(self) -> None:
        """`kill -9`, and wait until the process is gone."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """Wait for a daemon that is dying by itself."""
        assert self.process is not None
        self.process.wait(timeout=60)
        self.process = None
        self.disconnect()

    def stop(self) -> None:
        """A clean stop."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        self.reap()

    def disconnect(self) -> None:
        """Drop the client's connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def close(self) -> None:
        """End every job and the daemon; nothing of the test stays behind."""
        if self.process is None or self.process.poll() is not None:
            if self.process is not None:
                self.reap()
            self.start()
        users = sorted({job["user"] for job in self.call("GET", "/v1/jobs")["jobs"]})
        if users:
            self.call("POST", "/v1/jobs/cancel", {"users": users})
        wait_until(lambda: not self.call("GET", "/v1/jobs")["jobs"], what="jobs to end")
        self.stop()

    @property
    def client(self) -> DaemonConnection:
        """A connection to the running daemon."""
        if self._client is None:
            self._client = DaemonConnection(str(self.socket))
        return self._client

    # --- talk -----------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request."""
        return self.client.call(method, path, body)

    def submit(self, *argv: str, **spec: Any) -> str:
        """Submit a command; returns its id."""
        job = self.call("POST", "/v1/jobs", {"spec": self.spec(*argv, **spec)})["job"]
        return str(job["id"])

    def spec(self, *argv: str, **spec: Any) -> dict[str, Any]:
        """A submission that runs in the home with a small environment."""
        env = {"PATH": os.environ["PATH"], **spec.pop("env", {})}
        found = {"env": env, "work_dir": str(self.home), "cpus": 0, **spec}
        if argv:
            found["argv"] = list(argv)
        return found

    def job(self, job_id: str) -> dict[str, Any]:
        """Everything about one job."""
        return dict(self.call("GET", f"/v1/jobs/{job_id}")["job"])

    def state(self, job_id: str) -> str:
        """State of one job."""
        return str(self.job(job_id)["state"])

    def wait(self, *ids: str, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait until all of these have ended; returns them whole."""
        deadline = time.monotonic() + timeout_s
        path = f"/v1/wait?ids={','.join(ids)}&timeout_s=10"
        while not self.call("GET", path)["done"]:
            assert time.monotonic() < deadline, [(i, self.state(i), self.job(i)["reason_text"]) for i in ids]
        return [self.job(job_id) for job_id in ids]

    def wait_state(self, job_id: str, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of these states."""
        wait_until(lambda: self.state(job_id) in states, what=f"job {job_id} to be {' or '.join(states)}")
        return self.job(job_id)

    def pid_of(self, job_id: str) -> int:
        """Process id of a job's first process, once it has one."""
        wait_until(lambda: bool((runs := self.job(job_id)["runs"]) and runs[-1]["pid"]), what=f"job {job_id} to start")
        return int(self.job(job_id)["runs"][-1]["pid"])

    def output(self, job_id: str) -> str:
        """What a job has written so far."""
        path = Path(self.job(job_id)["stdout_path"])
        return path.read_text() if path.exists() else ""
