"""Jobs with variants, typed against a real daemon with two kinds of simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import Shell, stopped
from support import wait_until

BOTH = ("-g", "a100:1|rtx3090:2", "-c", "0")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Shell]:
    """One A100 and two RTX 3090s."""
    shell = Shell(tmp_path / "home", tmp_path, GPUSCHED_FAKE_GPUS="1xA100:80GiB+2xRTX3090:24GiB")
    yield shell
    stopped(shell)


def job_of(sh: Shell, job_id: str) -> dict[str, Any]:
    (found,) = json.loads(sh.ok("gq", "-a", "-j", job_id, "--json"))["jobs"]
    return dict(found)


def test_a_job_waits_with_all_of_its_variants_and_runs_with_one(lab: Shell) -> None:
    script = lab.work / "train.sh"
    script.write_text("#!/bin/sh\n#GSUB -g 'a100:1|rtx3090:2' -c 0 -t 1h\nsleep 600\n")
    first, second, third = (lab.submit(str(script)) for _ in range(3))
    wait_until(lambda: job_of(lab, second)["state"] == "RUNNING", what="the second job to run")
    rows = {line.split()[0]: line for line in lab.ok("gq").splitlines()[1:]}
    assert "a100:1 " in rows[first]
    assert "rtx3090:2 " in rows[second]
    assert "a100:1|rtx3090:2" in rows[third]
    assert [len(job_of(lab, one)["gpus"]) for one in (first, second, third)] == [1, 2, 0]
    assert [one["name"] for one in job_of(lab, third)["variants"]] == ["-g a100:1", "-g rtx3090:2"]
    shown = lab.ok("gshow", second)
    assert "Requested:  0 CPUs, GPUs rtx3090:2, time limit 1:00:00\n" in shown
    assert "Variants:   -g a100:1 | -g rtx3090:2\n" in shown
    assert "GPU 1,2, with -g rtx3090:2 (run 1)" in shown
    # Slurm's words have one request: of a waiting job the most preferred one.
    assert lab.ok("gq", "-j", third, "-o", "%b").splitlines()[-1].strip() == "gres:gpu:a100:1"
    why = lab.ok("gq", "--why", third)
    assert f"job {third} is PENDING" in why
    assert "; it starts with the first of its 2 variants that can start:\n  next, with -g a100:1: needs 1 a100" in why
    assert "\n  with -g rtx3090:2: needs 2 rtx3090, none of 2 free\n" in why
    assert "variants" not in why.partition("can start:")[2]
    facts = json.loads(lab.ok("gq", "--why", third, "--json"))["why"]["facts"]
    assert [one["request"] for one in facts["variants"]] == ["-g a100:1", "-g rtx3090:2"]
    lab.ok("gcancel", second)
    wait_until(lambda: job_of(lab, third)["state"] == "RUNNING", what="the third job to run")
    assert job_of(lab, third)["gpu_request"] == "rtx3090:2"


def test_what_can_never_run_is_left_out_or_refused(lab: Shell) -> None:
    found = lab.type("gsub", "-g", "h200|rtx3090:2", "-c", "0", "--wrap", "sleep 600")
    assert found.code == 0
    assert "the variant -g h200:1 is left out: asked for a GPU of type 'h200'" in found.err
    found = lab.type("gsub", "-g", "h200|a100:2", "-c", "0", "--wrap", "sleep 600")
    assert found.code == 1
    assert "none of its 2 variants can run; with -g h200:1: asked" in found.err
    said = lab.ok("gsub", *BOTH, "--dry-run", "--wrap", "true")
    assert "would start now on" in said
    assert "GPU 0, with -g a100:1" in said


def test_variants_are_changed_together_or_named_anew(lab: Shell) -> None:
    job_id = lab.submit(*BOTH, "--hold", "--wrap", "true")
    found = lab.type("gctl", "update", job_id, "gpus=a100:1")
    assert found.code == 1
    assert f"the variants -g a100:1 and -g rtx3090:2 of job {job_id} differ in gpus" in found.err
    assert "gctl update" in found.err.partition("hint:")[2]
    lab.ok("gctl", "update", job_id, "time=2h")
    assert [one["time_limit_s"] for one in job_of(lab, job_id)["variants"]] == [7200, 7200]
    lab.ok("gctl", "update", job_id, "gpus=a100:1|rtx3090:1|2")
    assert job_of(lab, job_id)["gpu_request"] == "a100:1|rtx3090:1|2"
    lab.ok("gctl", "update", job_id, "or=-g rtx3090:2 -t 1h")
    assert [one["name"] for one in job_of(lab, job_id)["variants"]] == [
        "-g a100:1 -t 2:00:00",
        "-g rtx3090:2 -t 1:00:00",
    ]
    lab.ok("gctl", "update", job_id, "or=")
    assert (job_of(lab, job_id)["variants"], job_of(lab, job_id)["gpu_request"]) == ([], "a100:1")


def test_a_repetition_has_the_variants_too(lab: Shell) -> None:
    job_id = lab.submit(*BOTH, "--wrap", "true")
    lab.ok("gwait", job_id)
    again = json.loads(lab.ok("gsub", "--resubmit", job_id, "--json"))["job"]["id"]
    assert [one["name"] for one in job_of(lab, again)["variants"]] == ["-g a100:1", "-g rtx3090:2"]
    found = lab.type("gsub", "--resubmit", job_id, "-g", "1")
    assert found.code == 1
    assert f"job {job_id} has 2 variants: which of them is to change is not clear" in found.err
    other = json.loads(lab.ok("gsub", "--resubmit", job_id, "--json", "-g", "a100|rtx3090"))["job"]["id"]
    assert [one["name"] for one in job_of(lab, other)["variants"]] == ["-g a100:1", "-g rtx3090:1"]


def test_steps_batches_and_the_foreground_have_them(lab: Shell) -> None:
    pipeline = lab.work / "p.toml"
    pipeline.write_text('[step.one]\ncommand = ["true"]\ngpus = "h200|rtx3090"\n[step.two]\ncommand = ["true"]\n'
                        'gpus = "a100"\nor = "-g rtx3090:2 -t 1h"\nneeds = ["one"]\n')  # fmt: skip
    found = lab.type("gsub", "--dag", str(pipeline))
    assert found.code == 0, found.err
    assert "the variant -g h200:1 is left out" in found.err
    lines = lab.work / "lines"
    lines.write_text("true a\ntrue b\n")
    lab.ok("gsub", "--batch", str(lines), *BOTH)
    assert lab.ok("grun", *BOTH, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").strip() in ("0", "1,2")
