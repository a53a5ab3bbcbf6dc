"""gsub --venv, from the option to the process, its retry and its repetition."""

from __future__ import annotations

import json

import pytest
from shell import Shell


def test_a_job_its_retry_its_ranks_and_its_repetition_run_in_the_environment(own: Shell) -> None:
    folder = own.work / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text('#!/bin/sh\necho "$VIRTUAL_ENV ${CONDA_PREFIX-none}"; exit ${CODE-0}\n')
    (folder / "bin" / "python").chmod(0o755)
    (own.work / "job.sh").write_text("#!/bin/sh\n#GSUB --venv env\npython\n")
    outer = {"CONDA_PREFIX": "/c", "PATH": f"/c/bin:{own.env['PATH']}"}

    def submit(*words: str) -> str:
        return own.ok("gsub", "--parsable", *words, **outer).strip()

    failing = submit(
        "-E", "CODE=3", "--retries", "1", "--backoff", "1s", "-o", "retry", "--open-mode", "append", "job.sh"
    )
    ranks = submit("-n", "2", "-o", "rank-%t", "job.sh")
    tasks = submit("-a", "0-1", "-o", "task-%a", "job.sh")
    again = submit("--resubmit", ranks, "-o", "again-%t")
    own.type("gwait", "--timeout", "60s", failing, ranks, tasks, again)
    wanted = f"{folder} none\n"
    for name in ("rank-0", "rank-1", "task-0", "task-1", "again-0", "again-1"):
        assert (own.work / name).read_text() == wanted, name
    assert (own.work / "retry").read_text() == 2 * wanted
    assert json.loads(own.ok("gshow", "--json", again))["jobs"][0]["spec"]["launch"]["venv"] == str(folder)
    assert f"venv {folder}" in own.ok("gshow", again)


@pytest.mark.parametrize("command", ["gsub", "grun"])
def test_a_missing_environment_is_refused_before_anything_is_submitted(own: Shell, command: str) -> None:
    result = own.type(command, "--venv", "nowhere", "--", "true")
    assert "there is no virtual environment nowhere" in result.err
    assert "make it with: python3 -m venv nowhere" in result.err
    assert own.ok("gq", "-a", "--quiet") == ""


def test_conda_of_a_repeated_job_is_refused(own: Shell) -> None:
    result = own.type("gsub", "--resubmit", "1", "--conda", "train")
    assert "--resubmit and --conda were both given" in result.err
