"""Files and pipes that never end: each command reads up to a limit and says which, within little memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from shell import Shell

import gpusched
from gpusched.errors import Refused

_MEMORY_KIB = 1_000_000
"""Address space of the commands here; one that reads on needs more within seconds."""
_ZERO = "/dev/zero"


def limited(sh: Shell, line: str, command: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line, in which `"$@"` is the command, with a limit on memory."""
    return subprocess.run(
        ["bash", "-c", f"ulimit -v {_MEMORY_KIB}; {line}", "bash", *sh.argv(command, *words)],
        env={**sh.env, **env},
        cwd=sh.work,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode in (1, 2), done
    assert "bug in gpusched" not in done.stderr
    assert "memory that this command may use" not in done.stderr
    for text in says:
        assert text in done.stderr, done


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("gsub", [_ZERO], "the script /dev/zero is larger than 96 MiB, the most that is read"),
        ("gsub", ["--batch", _ZERO], "the file /dev/zero is larger than 96 MiB"),
        ("gsub", ["--dag", _ZERO], "the pipeline file /dev/zero is larger than 96 MiB"),
        ("slurm.sbatch", [_ZERO], "sbatch: error: the script /dev/zero is larger than 96 MiB"),
        ("slurm.sbatch", ["--export-file", _ZERO, "--wrap", "true"], "/dev/zero is larger than 96 MiB"),
        ("slurm.sbatch", ["-F", _ZERO, "--wrap", "true"], "/dev/zero is larger than 16 MiB"),
        ("slurm.sbatch", ["-w", _ZERO, "--wrap", "true"], "/dev/zero is larger than 16 MiB"),
        ("slurm.scontrol", ["show", "hostlist", _ZERO], "/dev/zero is larger than 16 MiB"),
        ("gctl", ["import", _ZERO], "/dev/zero is larger than 16 MiB"),
        ("gpusched", ["simulate", _ZERO], "/dev/zero line 1 is longer than 1024 KiB"),
        ("gpusched", ["replay", _ZERO], "/dev/zero is larger than 256 MiB"),
    ],
)
def test_a_file_that_never_ends_is_refused(sh: Shell, command: str, words: list[str], says: str) -> None:
    refused(limited(sh, '"$@"', command, *words), says)


@pytest.mark.parametrize(
    ("line", "command", "words", "says"),
    [
        ('yes | "$@"', "gsub", [], "standard input is larger than 96 MiB, the most that is read"),
        ('yes | "$@"', "gsub", ["--batch", "-"], "submit it in parts: split -l 100000 FILE PART"),
        ('head -c 90M < <(yes) | "$@"', "gsub", ["--batch", "-"], "a batch of more than 2000000 lines"),
        ('yes | "$@"', "slurm.sbatch", [], "the script standard input is larger than 96 MiB"),
        ('yes | "$@"', "gctl", ["import", "-"], "standard input is larger than 16 MiB"),
        ('yes | "$@"', "slurm.scontrol", ["show", "hostlist", "-"], "standard input is larger than 16 MiB"),
        ('"$@" < /dev/zero', "slurm.scontrol", [], "a command has more than 1048576 characters"),
        ('yes | "$@"', "gpusched", ["replay", "-"], "larger than 256 MiB"),
    ],
)
def test_a_pipe_that_never_ends_is_refused(sh: Shell, line: str, command: str, words: list[str], says: str) -> None:
    refused(limited(sh, line, command, *words), says)


def test_a_pipe_that_ends_is_read_whole(sh: Shell, tmp_path: Path) -> None:
    """Also one that the shell names /dev/fd/N, in pieces, later."""
    lines = 'sleep 0.1; echo "#!/bin/sh"; sleep 0.1; head -c 200000 /dev/zero | tr "\\0" "#"; echo; echo true'
    done = limited(sh, f'"$@" <({lines})', "gsub", "--parsable", "--hold")
    assert done.returncode == 0, done
    script = limited(sh, '"$@"', "gshow", "--script", done.stdout.strip()).stdout
    assert (len(script), script[-5:]) == (len("#!/bin/sh\n") + 200_000 + len("\ntrue\n"), "true\n")


def test_the_settings_of_a_user_are_read_up_to_a_limit(own: Shell, tmp_path: Path) -> None:
    own.submit("--hold", "--", "true")
    (own.home / "templates").mkdir()
    with open(own.home / "templates" / "endless", "wb") as file:
        file.truncate(1 << 40)
    for name in ("gq-views", "notify.toml"):
        (own.home / name).symlink_to(_ZERO)
    refused(limited(own, '"$@"', "gq", "--views"), "gq-views is larger than 16 MiB")
    refused(limited(own, '"$@"', "gsub", "--template", "endless", "--", "true"), "endless is larger than 64 KiB")
    done = limited(own, '"$@"', "gpusched", "config", "check")
    assert "notify.toml is larger than 16 MiB" in done.stdout + done.stderr
    refused(limited(own, '"$@"', "gpusched", "config", "check", GPUSCHED_CONFIG=_ZERO), "zero is larger than 16 MiB")
    (own.work / ".gpuschedignore").symlink_to(_ZERO)
    refused(limited(own, '"$@"', "gsub", "--snapshot", "--", "true"), ".gpuschedignore is larger than 16 MiB")
    (own.work / ".conda").mkdir()
    (own.work / ".conda" / "environments.txt").symlink_to(_ZERO)
    done = limited(own, '"$@"', "gsub", "--conda", "lab", "--", "true", HOME=str(own.work))
    refused(done, "environments.txt is larger than 16 MiB")


def test_the_daemon_reads_up_to_a_limit(tmp_path: Path) -> None:
    for name, value in (("GPUSCHED_CONFIG", _ZERO), ("GPUSCHED_FAKE_GPUS", str(tmp_path / "gpus.json"))):
        (tmp_path / name).mkdir()
        if value != _ZERO:
            Path(value).symlink_to(_ZERO)
        shell = Shell(tmp_path / name, tmp_path, **{"GPUSCHED_FAKE_GPUS": "1x24GiB", name: value})
        refused(limited(shell, '"$@"', "gpusched", "daemon", "start"), "is larger than 16 MiB")


def test_the_python_client_reads_up_to_a_limit(sh: Shell) -> None:
    socket = str(sh.home / "run" / "api.sock")
    with gpusched.Client(socket) as client, pytest.raises(Refused, match="the script /dev/zero is larger than 96 MiB"):
        client.submit(script=_ZERO)
