"""Commands whose standard streams somebody else has opened, as under runuser, su, sudo and cron."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attacks import NEEDS_PYTHON, PYTHON, become, open_folder
from people import BOB, NEEDS_ROOT

import gpusched

pytestmark = [NEEDS_ROOT, NEEDS_PYTHON]

ID = "2"
"""Of that account, everywhere."""


class Typing:
    """Types commands as a user who has nothing of root's but the streams."""

    def __init__(self, daemon: Any, code: Path) -> None:
        """Args: code: see `code`."""
        self.folder = open_folder(daemon, "work")
        self.env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder),
            "PYTHONPATH": str(code / "lib"),
            "PYTHONPYCACHEPREFIX": str(code / "cache"),
            "GPUSCHED_SOCKET": str(daemon.socket),
        }

    def run(self, command: str, *words: str, closed: Sequence[int] = (), **streams: Any) -> tuple[int, str]:
        """Exit code and output of a command of the given module."""
        code = f"import sys; sys.argv[0] = 'it'; from gpusched.cli.{command} import main; sys.exit(main())"

        def begin() -> None:
            become(BOB)
            os.chdir(self.folder)
            for fd in closed:
                os.close(fd)

        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **streams}
        done = subprocess.run(
            [PYTHON, "-c", code, *words], env=self.env, preexec_fn=begin, timeout=120, text=True, **streams
        )
        return done.returncode, done.stdout or ""


@pytest.fixture(scope="module")
def code() -> Iterator[Path]:
    """A folder that is not root's alone, with the package and what the first of these commands compiles of it."""
    with tempfile.TemporaryDirectory(prefix="gpusched-code-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        package = Path(gpusched.__file__).parent
        shutil.copytree(package, folder / "lib" / "gpusched", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "cache").mkdir()
        (folder / "cache").chmod(0o777)
        yield folder


@pytest.fixture
def bob(make: Any, code: Path) -> Typing:
    return Typing(make(), code)


def inputs(folder: Path) -> Iterator[tuple[str, int]]:
    """Empty inputs, open in this process and closed to others by name."""
    reader, writer = os.pipe()
    os.close(writer)
    yield "pipe", reader
    one, other = socket.socketpair()
    other.close()
    yield "socket", one.detach()
    keys, terminal = os.openpty()
    os.fchmod(terminal, 0o600)
    os.write(keys, b"\x04")
    yield "terminal", terminal
    os.close(keys)
    file = folder / "of-root"
    file.touch(mode=0o600)
    yield "file", os.open(file, os.O_RDONLY)
    yield "null", os.open(os.devnull, os.O_RDONLY)
    yield "for writing", os.open(os.devnull, os.O_WRONLY)


COMMANDS: dict[str, tuple[str, ...]] = {
    "grun": ("-g", "1", "id", "-u"),
    "slurm.srun": ("--gres=gpu:1", "id", "-u"),
    "slurm.salloc": ("--quiet", "--gres=gpu:1", "id", "-u"),
    "gsub": ("--follow", "-g", "1", "--wrap", "id -u"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_input_that_it_was_given(bob: Typing, command: str) -> None:
    told = {}
    for name, fd in inputs(bob.folder):
        code, text = bob.run(command, *COMMANDS[command], stdin=fd)
        told[name] = code, text.splitlines()[-1:]
        os.close(fd)
    assert len(told) == 6
    assert all(end == (0, [ID]) for end in told.values()), told


def test_what_a_file_of_root_holds_reaches_the_job_that_was_given_it(bob: Typing) -> None:
    file = bob.folder / "of-root"
    file.write_text("words\n")
    file.chmod(0o600)
    with file.open() as given:
        assert bob.run("grun", "-g", "1", "cat", stdin=given) == (0, "words\n")
    with file.open("w") as given:
        assert bob.run("grun", "-g", "1", "id", "-u", stdout=given, stderr=given) == (0, "")
    assert file.read_text() == f"{ID}\n"
    file.write_text("#!/bin/sh\nid -u\n")
    with file.open() as given:
        code, text = bob.run("gsub", "--follow", "-g", "1", "--name", "given", stdin=given)
    assert (code, text.splitlines()[-1]) == (0, ID), text


@pytest.mark.parametrize(
    "closed",
    [(1,), (0, 1, 2), *(pytest.param(one, marks=pytest.mark.nightly) for one in [(0,), (2,), (0, 2)])],
    ids=str,
)
def test_closed_streams_are_no_error(bob: Typing, closed: tuple[int, ...]) -> None:
    expected = "" if 1 in closed else f"{ID}\n"
    assert bob.run("grun", "-g", "1", "id", "-u", closed=closed) == (0, expected)


def test_output_is_followed_wherever_it_goes(bob: Typing) -> None:
    code, job = bob.run("gsub", "--parsable", "-g", "1", "--wrap", "seq 3")
    assert code == 0
    keys, terminal = os.openpty()
    os.fchmod(terminal, 0o600)
    assert bob.run("glogs", "-f", job.strip(), stdin=terminal) == (0, "1\n2\n3\n")
    for fd in (keys, terminal):
        os.close(fd)
