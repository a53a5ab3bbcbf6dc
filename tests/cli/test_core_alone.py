"""The package without any add-on: it imports, starts a daemon and runs jobs, and says what is absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, stopped
from support import copy_package

import gpusched

PACKAGE = Path(gpusched.__file__).parent
ABSENT = "which this copy of gpusched does not have"
HINT = "install gpusched with all of its add-ons: pip install --force-reinstall gpusched-lab"

EVERY_MODULE = """
import importlib, pkgutil, sys
import gpusched
assert gpusched.__file__.startswith(sys.argv[1]), gpusched.__file__
names = [found.name for found in pkgutil.walk_packages(gpusched.__path__, "gpusched.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
assert not [name for name in sys.modules if name.startswith("gpusched.addons")]
print(len(names))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, without its add-ons."""
    folder = tmp_path_factory.mktemp("core")
    copy_package(folder, "addons")
    assert not (folder / "gpusched" / "addons").exists()
    return folder


@pytest.fixture
def alone(core: Path, tmp_path: Path) -> Iterator[Shell]:
    """A shell whose commands and daemon are those of the copy."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    settings = '[node]\nname = "lab1"\ncpus = 8\nmem_mib = 65536\n'
    (tmp_path / "home" / "config.toml").write_text(settings)
    shell = Shell(tmp_path / "home", tmp_path / "work", GPUSCHED_FAKE_GPUS="2x24GiB", PYTHONPATH=str(core))
    shell.is_warm = False  # what is imported without the add-ons is what is tried
    try:
        yield shell
    finally:
        stopped(shell)


def test_every_module_of_the_core_is_imported_without_an_add_on(core: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_MODULE, str(core)],
        env={**os.environ, "PYTHONPATH": str(core)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


def test_a_job_runs_to_its_end(alone: Shell, core: Path) -> None:
    job = alone.submit("-g", "1", "--wrap", "echo hello")
    assert alone.ok("gwait", job) == ""
    assert alone.ok("glogs", job) == "hello\n"
    assert "COMPLETED" in alone.ok("gshow", job)
    assert alone.ok("gq").startswith("ID NAME USER")
    assert "lab1" in alone.ok("ginfo")
    pid = json.loads(alone.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
    assert str(core).encode() in Path(f"/proc/{pid}/environ").read_bytes(), "the daemon is not that of the copy"
    assert alone.ok("gctl", "preset") == "preset: fair\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("gtop",), "gtop needs the add-on top"),
        (("gsub", "--print", "sbatch", "--wrap", "true"), "gsub --print needs the add-on kubernetes"),
        (("gsub", "--explain", "job.sh"), "gsub --explain needs the add-on slurm"),
        (("gpusched", "debug", "snapshot"), "gpusched debug needs the add-on simulate"),
        (("gq", "-o", "%i"), "gq --format needs the add-on slurm"),
        (("gpusched", "simulate", "trace.swf", "--policy", "fcfs"), "gpusched simulate needs the add-on simulate"),
        (("gpusched", "web", "--help"), "gpusched web needs the add-on web"),
        (("gpusched", "cluster", "init"), "gpusched cluster needs the add-on ray"),
        (("gpusched", "notify", "test"), "gpusched notify needs the add-on notify"),
        (("gpusched", "metrics", "--listen", "127.0.0.1:0"), "gpusched metrics needs the add-on metrics"),
        (("gpusched", "system", "install"), "gpusched system needs the add-on system"),
        (("ghist", "--statement", "last"), "ghist --statement needs the add-on statement"),
        (("gctl", "preset", "--judge"), "comparing presets needs the add-on simulate"),
    ],
)
def test_a_command_says_what_is_absent(alone: Shell, words: tuple[str, ...], sentence: str) -> None:
    done = alone.type(*words)
    assert (done.code, done.out) == (1, "")
    assert f"{words[0]}: error: {sentence}, {ABSENT}\n{words[0]}: hint: {HINT}\n" in done.err


def test_a_manifest_says_what_is_absent(alone: Shell) -> None:
    (alone.work / "job.yaml").write_text("kind: Job\n")
    done = alone.type("gsub", "job.yaml")
    assert done.code == 1
    assert f"gsub: error: a Kubernetes Job needs the add-on kubernetes, {ABSENT}" in done.err


def test_a_program_is_told_what_is_absent(core: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(core)}
    done = subprocess.run(
        [sys.executable, "-c", "import gpusched; gpusched.Executor"], env=env, cwd=core, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"gpusched.Executor needs the add-on executor, {ABSENT}" in done.stderr


def test_alerts_stay_in_the_outbox_and_that_is_said(alone: Shell) -> None:
    done = alone.type("gsub", "--parsable", "--notify", "end", "--wrap", "true")
    assert done.code == 0
    assert f"no alerts will be sent: sending alerts needs the add-on notify, {ABSENT}" in done.err
    alone.ok("gwait", done.out.strip())
    alone.ok("gsub", "--wait", "--wrap", "true")
    assert f"sending alerts needs the add-on notify, {ABSENT}" in alone.type("gpusched", "doctor").out


def test_a_job_that_types_commands_of_slurm_is_told(alone: Shell) -> None:
    job = alone.submit("--wrap", "sbatch job.sh; squeue job.sh; srun job.sh")
    assert alone.type("gwait", job).code == 1
    said = alone.ok("glogs", job)
    for command in ("sbatch", "squeue", "srun"):
        assert f"{command}: error: {command} needs the add-on slurm, {ABSENT}" in said
        assert f"{command}: hint: use gsub, gq and gcancel" in said


@pytest.mark.parametrize(
    ("setting", "line", "sentence"),
    [
        ('[cluster]\nengine = "ray"\n', 6, 'engine = "ray" needs the add-on ray'),
        ('[priority]\npreset = "auto"\n', 6, 'preset = "auto" needs the add-on simulate'),
        ('[handover]\ncommands = "/usr/bin"\n', 5, "[handover] needs the add-on slurm"),
        ('[web]\nallow = ["control"]\n', 5, "[web] needs the add-on web"),
    ],
)
def test_a_setting_says_what_is_absent_and_where(alone: Shell, setting: str, line: int, sentence: str) -> None:
    file = alone.home / "config.toml"
    file.write_text(file.read_text() + setting)
    checked = alone.type("gpusched", "config", "check")
    assert checked.code == 2
    assert f"error: file {file}, line {line}: {sentence}, {ABSENT}\n" in checked.err
    assert f"hint: {HINT}" in checked.err
    if "cluster" in setting:
        # All of them are refused by what reads settings, for the daemon as well.
        started = alone.type("gsub", "--wrap", "true")
        assert started.code != 0
        assert f"line {line}: {sentence}, {ABSENT}" in started.err
