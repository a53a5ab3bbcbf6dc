"""sstat: what running steps use, against real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from slurm_lab import SlurmLab

from gpusched.addons.slurm.sstat import STEP_COLUMNS

HOLDS = (
    'python3 -c "import os, time; held = bytearray({mib} << 20); sum(range(10**6)); '
    "open('{name}-' + os.environ.get('SLURM_PROCID', 'x'), 'w').close(); time.sleep(100)\""
)


@pytest.fixture(scope="module")
def running(lab: SlurmLab) -> Iterator[str]:
    """A job that holds little in its script, and 80 MiB in each of two tasks of a step."""
    script = f"#!/bin/bash\nsrun -n 2 {HOLDS.format(mib=80, name='task')} &\n{HOLDS.format(mib=1, name='script')}\n"
    (lab.work / "holds.sh").write_text(script)
    marks = ("task-0", "task-1", "script-0")
    # The lab is shared by all modules: a worker that comes back to this one finds what it left, which says nothing.
    for name in marks:
        (lab.work / name).unlink(missing_ok=True)
    job = lab.submit("-n 2 --gres=gpu:1 holds.sh")
    for name in marks:
        lab.text(name)
    yield job
    lab.ok(f"gcancel {job}")
    lab.wait(job)


def mib(text: str) -> float:
    return float(text[:-1]) / {"K": 1024, "M": 1, "G": 1 / 1024}[text[-1]]


def test_shows_the_memory_of_the_step_and_of_the_script_apart(lab: SlurmLab, running: str) -> None:
    script, step = lab.ok(f"sstat -a -n -P -j {running} -o jobid,maxrss,ntasks,maxrssnode,maxrsstask").splitlines()
    assert step.split("|")[0] == f"{running}.0"
    assert step.split("|")[2:] in (["2", "node1", "0"], ["2", "node1", "1"])
    assert 80 < mib(step.split("|")[1]) < 200
    assert script.split("|")[0] == f"{running}.batch"
    assert mib(script.split("|")[1]) < 80


def test_shows_the_first_step_unless_another_is_named(lab: SlurmLab, running: str) -> None:
    for words, found in [
        (running, [f"{running}.0"]),
        (f"{running}.0", [f"{running}.0"]),
        (f"{running}.batch", [f"{running}.batch"]),
        (f"{running}.batch,{running}.0", [f"{running}.batch", f"{running}.0"]),
    ]:
        assert lab.ok(f"sstat -n -P -o jobid -j {words}").split() == found


def test_names_the_processes(lab: SlurmLab, running: str) -> None:
    step, node, pids = lab.ok(f"sstat -i -n -P -j {running}").strip().split("|")
    assert (step, node) == (f"{running}.0", "node1")
    for pid in pids.split(","):
        with open(f"/proc/{pid}/environ", "rb") as file:
            assert b"SLURM_STEP_ID=0" in file.read().split(b"\0")


def test_the_least_cpu_time_is_that_of_a_task(lab: SlurmLab, running: str) -> None:
    script, step = lab.ok(f"sstat -a -n -P -j {running} -o mincpu,mincpunode,mincputask").splitlines()
    assert script.split("|")[1:] == ["node1", "0"]
    assert step.split("|")[1:] in (["node1", "0"], ["node1", "1"])


def test_measures_cpu_time(lab: SlurmLab, running: str) -> None:
    hours, minutes, _ = lab.ok(f"sstat -n -P -j {running} -o avecpu").strip().split(":")
    assert (hours, minutes) == ("00", "00")


def test_every_name_of_helpformat_is_a_column(lab: SlurmLab, running: str) -> None:
    names = lab.ok("sstat --helpformat").split()
    assert names == list(STEP_COLUMNS)
    titles, row = lab.ok(f"sstat -P -j {running} -o {','.join(names)}").splitlines()
    assert titles.split("|") == names
    assert len(row.split("|")) == len(names)


def test_a_job_without_running_steps_is_an_error(lab: SlurmLab) -> None:
    waiting = lab.submit("-H --wrap true")
    for word in (waiting, "999999", "99999999999999999999"):
        done = lab.type(f"sstat -n -j {word}")
        assert (done.code, done.out) == (1, ""), word
        assert done.err.startswith("sstat: error: ")
    lab.ok(f"gcancel {waiting}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "sstat: error: You didn't give me any jobs to stat.\n"),
        ("-j abc", "sstat: error: Bad job/step specified: abc\n"),
        ("-j 1 -o jobid,nosuch", 'sstat: error: Invalid field requested: "nosuch"\n'),
        ("1", "sstat: error: Unknown arguments: 1\n"),
        ("--nosuch", "sstat: unrecognized option '--nosuch'\n"),
    ],
)
def test_bad_input_is_refused(lab: SlurmLab, words: str, message: str) -> None:
    done = lab.type(f"sstat {words}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(message)


def test_the_process_of_the_test_is_in_its_own_tree() -> None:
    from gpusched.addons.slurm import processes

    assert os.getpid() in processes.tree(os.getpid())
    assert processes.tree(2**22 + 1) == [2**22 + 1]


def test_processes_are_listed_parents_first_with_the_environment_that_they_began_with() -> None:
    from gpusched.addons.slurm import processes

    code = "import os, sys; os.environ['SLURM_STEP_ID'] = '9'; print(flush=True); sys.stdin.read()"
    given = {**os.environ, "SLURM_STEP_ID": "3", "EQUALS": "a=b=c", "EMPTY": ""}
    child = subprocess.Popen(
        ["sh", "-c", 'python3 -c "$0"; :', code], env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        family = processes.tree(child.pid)
        assert (family[0], len(family)) == (child.pid, 2)
        assert family[1] in processes.tree(os.getpid())
        found = processes.variables(family[1])
        assert (found["SLURM_STEP_ID"], found["EQUALS"], found["EMPTY"]) == ("3", "a=b=c", "")
    assert (processes.stat(child.pid), processes.variables(child.pid), processes.tree(child.pid)) == (
        [],
        {},
        [child.pid],
    )
