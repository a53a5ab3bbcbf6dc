"""A way to type commands, and to compare what they print with what they always printed."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support import wait_until
from warm import commands, interpreter_settings, nest

from gpusched.client import DaemonConnection
from gpusched.errors import DaemonUnreachable

GOLDEN = Path(__file__).parent / "golden"
_PIPE_BYTES = 1 << 16
"""What is written to a pipe before anybody reads it."""


@dataclass
class Result:
    """What a command left: exit code and texts."""

    code: int
    out: str
    err: str


class Shell:
    """A home, an environment, and a way to type."""

    def __init__(self, home: Path, work: Path, **env: str) -> None:
        self.home = home
        self.work = work
        kept = ("GPUSCHED_", "GSUB_", "SLURM_", "CUDA_")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(kept)}
        self.env.update(GPUSCHED_HOME=str(home), COLUMNS="120", **env)
        self.is_warm = True
        """Whether commands are forked from a process that has imported theirs, see `warm`."""
        self.is_to_start = False
        """Whether the first `gsub` finds a daemon that was forked, see `warm`; otherwise it starts one as for users."""

    def argv(self, command: str, *words: str) -> list[str]:
        module = "admin" if command == "gpusched" else command
        code = f"import sys; sys.argv[0] = {command!r}; from gpusched.cli.{module} import main; sys.exit(main())"
        return [sys.executable, "-c", code, *words]

    def type(self, command: str, *words: str, stdin: bytes = b"", cwd: Path | None = None, **env: str) -> Result:
        if self.is_to_start and command == "gsub":
            self.is_to_start = False
            self._start({**self.env, **env})
        env, folder = {**self.env, **env}, cwd or self.work
        nest_of_commands = commands(env) if self.is_warm and len(stdin) <= _PIPE_BYTES else None
        if nest_of_commands is not None:
            code, out, err = nest_of_commands.run(command, words, env, folder, stdin, timeout_s=120)
        else:
            argv = self.argv(command, *words)
            done = subprocess.run(argv, env=env, cwd=folder, input=stdin, capture_output=True, timeout=120)
            code, out, err = done.returncode, done.stdout, done.stderr
        return Result(code, out.decode(), err.decode())

    def _start(self, env: dict[str, str]) -> None:
        """Start the daemon unless there is one; where it refuses to start, the command will say so."""
        if (self.home / "run").exists() or nest().settings != interpreter_settings(env):
            return
        self.home.chmod(0o700)
        (self.home / "log").mkdir(mode=0o700, exist_ok=True)
        reader, writer = os.pipe()
        with open(self.home / "log" / "gpuschedd.out", "ab") as out:
            forked = nest().start([], env, out.fileno(), writer)
        os.close(writer)
        with open(reader, encoding="utf-8") as lines:
            if lines.readline() != "ready\n":
                forked.wait(30)

    def ok(self, command: str, *words: str, **options: str) -> str:
        """Type and expect success; returns what was printed."""
        done = self.type(command, *words, **options)  # type: ignore[arg-type]
        assert done.code == 0, (words, done)
        return done.out

    def submit(self, *words: str) -> str:
        """The id of a new job."""
        return self.ok("gsub", "--parsable", *words).strip()


def stopped(shell: Shell) -> None:
    """End all jobs and the daemon."""
    client = DaemonConnection(str(shell.home / "run" / "api.sock"))
    try:
        users = {job["user"] for job in client.call("GET", "/v1/jobs")["jobs"]}
        if users:
            client.call("POST", "/v1/jobs/cancel", {"users": sorted(users)})
            wait_until(lambda: not client.call("GET", "/v1/jobs")["jobs"], what="jobs to end")
        client.call("POST", "/v1/shutdown", {})
    except DaemonUnreachable:
        pass
    finally:
        client.close()


def compare(name: str, text: str, folder: Path = GOLDEN) -> None:
    """Compare with a stored text; GPUSCHED_UPDATE_GOLDEN=1 stores it anew."""
    path = folder / name
    if os.environ.get("GPUSCHED_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"no golden {name}; write it with GPUSCHED_UPDATE_GOLDEN=1"
    lines = difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), lineterm="", n=0)
    changes = "\n".join(lines)
    assert text == path.read_text(), f"{name} differs; if it should, run with GPUSCHED_UPDATE_GOLDEN=1\n{changes}"
