"""sattach: what a running step writes, and how its tasks are laid out, against real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from slurm_lab import SlurmLab
from support import wait_until

TICKS = "until [ -e {go} ]; do echo tick $SLURM_PROCID; sleep 0.05; done; echo last $SLURM_PROCID; {end}"


@contextmanager
def step(lab: SlurmLab, name: str, srun: str, end: str = "exit 3") -> Iterator[str]:
    """A job whose step 0 writes until the file `NAME-go` is there."""
    text = TICKS.format(go=f"{name}-go", end=end)
    (lab.work / f"{name}.sh").write_text(f"#!/bin/bash\n{srun.replace('TASKS', f'sh -c {text!r}')}\n")
    job = lab.submit(f"-n 2 -o {name}.out {name}.sh")
    try:
        wait_until(lambda: f"{job}.0" in lab.ok(f"squeue -h -s -j {job} -o %i").split(), what="the step")
        yield f"{job}.0"
    finally:
        (lab.work / f"{name}-go").touch()
        lab.ok(f"scancel {job}")
        lab.wait(job)


def attached(lab: SlurmLab, words: str) -> subprocess.Popen[str]:
    argv = ["bash", "-c", f"exec sattach {words}"]
    return subprocess.Popen(argv, cwd=lab.work, env=lab.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("name", "srun"),
    [
        ("inherited", "srun TASKS"),
        ("one-file", "srun -o one-%j.txt TASKS"),
        ("per-task", "srun -o task-%t-%s.txt TASKS"),
        ("redirected", "srun TASKS > redirected.txt"),
    ],
)
def test_follows_what_the_step_writes_until_it_ends_with_its_exit_code(lab: SlurmLab, name: str, srun: str) -> None:
    with step(lab, name, srun) as running:
        process = attached(lab, running)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("tick ")
        (lab.work / f"{name}-go").touch()
        out, err = process.communicate(timeout=60)
        lines = out.splitlines()
        assert {"last 0", "last 1"} <= set(lines)
        assert process.returncode == 3
        assert err.splitlines()[-1] == f"sattach: step {running} is FAILED"
        ended = lab.type(f"sattach {running}")
        words = "sattach: error: Could not get job step info: Job/step already completing or completed\n"
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(words)


def test_a_signal_is_the_exit_code_that_srun_has(lab: SlurmLab) -> None:
    with step(lab, "killed", "srun TASKS", end="kill -9 $$") as running:
        process = attached(lab, f"-Q {running}")
        assert process.stdout is not None
        process.stdout.readline()
        (lab.work / "killed-go").touch()
        assert process.communicate(timeout=60)[1].count("sattach") == 0
        assert process.returncode == 137


@pytest.mark.parametrize(
    ("name", "srun", "where"),
    [
        ("piped", "srun TASKS 2>&1 | cat", "to the program behind srun on node1, through a pipe or socket"),
        ("dropped", "srun -o none TASKS", "nowhere: it is discarded"),
        ("terminal", "script -qc './terminal-inner.sh' /dev/null", "to the terminal /dev/pts/"),
    ],
)
def test_output_that_is_in_no_file_is_said_where_it_goes(lab: SlurmLab, name: str, srun: str, where: str) -> None:
    inner = lab.work / "terminal-inner.sh"
    inner.write_text(f"#!/bin/sh\nexec srun sh -c {TICKS.format(go='terminal-go', end='true')!r}\n")
    inner.chmod(0o755)
    with step(lab, name, srun) as running:
        done = lab.type(f"sattach {running}")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"sattach: error: the output of step {running} is not in a file; it goes {where}")


def test_the_layout_is_printed_as_slurm_does(lab: SlurmLab) -> None:
    with step(lab, "layout", "srun TASKS") as running:
        assert lab.ok(f"sattach --layout {running}") == (
            "Job step layout:\n  2 tasks, 1 nodes (node1)\n\n  Node 0 (node1), 2 task(s): 0 1 \n"
        )


@pytest.mark.parametrize(
    ("words", "err"),
    [
        ("42", "sattach: error: Did not find a period in the step ID string\n"),
        ("x.0", 'sattach: error: "x" does not look like a jobid\n'),
        ("42.x", 'sattach: error: "x" does not look like a stepid\n'),
        ("42.batch", "sattach: error: 42.batch is the script of the job; follow its output with: glogs -f 42\n"),
        ("", "sattach: error: give one step of a job, such as 42.0; squeue -s lists the steps\n"),
        ("1.0 2.0", "sattach: error: give one step of a job, such as 42.0; squeue -s lists the steps\n"),
        ("--nosuch 1.0", "sattach: unrecognized option '--nosuch'\nTry \"sattach --help\" for more information\n"),
        (
            "999999.0",
            "sattach: error: Could not get job step info: Invalid job id specified\n"
            "sattach: job 999999 has no step 0\nsattach: hint: squeue -s\n",
        ),
    ],
)
def test_mistakes_are_refused(lab: SlurmLab, words: str, err: str) -> None:
    done = lab.type(f"sattach {words}")
    assert (done.code, done.out, done.err) == (1, "", err)


@pytest.mark.parametrize("option", ["-l", "--pty", "--output-filter=0", "--error-filter=0", "--input-filter=0"])
def test_what_is_not_built_is_refused_in_a_sentence(lab: SlurmLab, option: str) -> None:
    done = lab.type(f"sattach {option} 1.0")
    assert done.code == 1
    assert " is not supported: " in done.err
