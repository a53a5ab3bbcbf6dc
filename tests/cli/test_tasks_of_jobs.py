"""Tasks, input and comment of a job: gsub and scripts written for Slurm, with a real daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest
from shell import Shell

SCRIPT = """#!/bin/bash
#SBATCH --ntasks=2 --cpus-per-task=1 --mem-per-cpu=10M --hint=nomultithread
#SBATCH --comment='two words'   # a remark
#SBATCH -i in-%j.txt -o out.txt
#SBATCH --wckey=w --verbose --get-user-env
cat
echo $SLURM_NTASKS $SLURM_CPUS_PER_TASK $SLURM_CPUS_ON_NODE $SLURM_MEM_PER_CPU "$SLURM_MEM_PER_NODE"
"""


def shown(own: Shell, job_id: str) -> dict[str, Any]:
    (job,) = json.loads(own.ok("gshow", "--json", job_id))["jobs"]
    return dict(job)


def test_a_script_with_tasks_input_and_comment_runs_as_in_slurm(own: Shell) -> None:
    (own.work / "job.sh").write_text(SCRIPT)
    (own.work / "in-1.txt").write_text("given\n")
    done = own.type("gsub", "-W", "job.sh")
    assert (done.code, done.out) == (0, "Submitted job 1\n")
    assert done.err == "gsub: 2 options have no effect here: gsub --explain job.sh\n"
    assert (own.work / "out.txt").read_text() == "given\n2 1 2 10 \n"
    job = shown(own, "1")
    asked = ("ntasks", "num_tasks", "cpus_per_task", "cpus", "mem_per_cpu_mib", "mem_mib", "comment", "wckey")
    assert [job[name] for name in asked] == [2, 2, 1.0, 2.0, 10, 20, "two words", "w"]
    assert job["stdin_path"] == str(own.work / "in-1.txt")
    text = own.ok("gshow", "1")
    assert "Requested:  2 tasks, 2 CPUs, memory 20M" in text
    assert "Comment:    two words" in text
    assert f"Input:      {own.work}/in-1.txt" in text


def test_a_resubmitted_job_keeps_its_tasks_and_takes_changes_for_each(own: Shell) -> None:
    own.ok("gsub", "-W", "-n", "2", "--mem-per-cpu", "5M", "--", "true")
    own.ok("gsub", "-W", "--resubmit", "1")
    own.ok("gsub", "-W", "--resubmit", "1", "-n", "1", "--mem", "7M")
    jobs = [shown(own, job_id) for job_id in ("2", "3")]
    assert [(job["num_tasks"], job["cpus"], job["mem_mib"]) for job in jobs] == [(2, 2.0, 10), (1, 1.0, 7)]
    assert [job["mem_per_cpu_mib"] for job in jobs] == [5, None]


def test_a_missing_input_fails_the_job_and_says_so(own: Shell) -> None:
    assert own.type("gsub", "-W", "-i", "nowhere.txt", "--", "cat").code != 0
    assert f"cannot read the input from {own.work}/nowhere.txt: No such file or directory" in own.ok("gshow", "1")


@pytest.mark.parametrize("line", ["--quiet --hint=x", "--parsable --hint=x"])
def test_a_quiet_submission_prints_the_id_alone(own: Shell, line: str) -> None:
    done = own.type("gsub", *line.split(), "--", "true")
    assert (done.out, done.err) == ("1\n", "")


def test_a_comment_changes_by_an_update(own: Shell) -> None:
    own.submit("-H", "--", "true")
    own.ok("gctl", "update", "1", "comment=better")
    assert shown(own, "1")["comment"] == "better"
    own.ok("gctl", "update", "1", "comment=", "ntasks=2")
    job = shown(own, "1")
    assert (job["comment"], job["ntasks"], job["cpus"]) == (None, 2, 2.0)
