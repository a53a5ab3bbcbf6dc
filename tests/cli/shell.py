"""A way to type commands, and to compare what they print with what they always printed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


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

    def argv(self, command: str, *words: str) -> list[str]:
        module = "admin" if command == "gpusched" else command
        code = f"import sys; sys.argv[0] = {command!r}; from gpusched.cli.{module} import main; sys.exit(main())"
        return [sys.executable, "-c", code, *words]

    def type(self, command: str, *words: str, stdin: bytes = b"", cwd: Path | None = None, **env: str) -> Result:
        done = subprocess.run(
            self.argv(command, *words),
            env={**self.env, **env},
            cwd=cwd or self.work,
            input=stdin,
            capture_output=True,
            timeout=60,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

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
    shell.type("gcancel", "--all", "-y")
    ids = shell.type("gq", "--quiet").out.split()
    if ids:
        shell.type("gwait", "--timeout", "60s", *ids)
    shell.type("gpusched", "daemon", "stop")


def compare(name: str, text: str) -> None:
    """Compare with a stored text; GPUSCHED_UPDATE_GOLDEN=1 stores it anew."""
    path = GOLDEN / name
    if os.environ.get("GPUSCHED_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"no golden {name}; write it with GPUSCHED_UPDATE_GOLDEN=1"
    assert text == path.read_text(), f"{name} differs; if it should, run with GPUSCHED_UPDATE_GOLDEN=1"
