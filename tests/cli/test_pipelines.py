"""Pipelines as people use them: submit, look, wait, resume, cancel, draw; and the page that tells how."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from shell import Shell, compare
from support import wait_until

from gpusched.access import user_name

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto" / "pipelines.md"
DIAMOND = """
name = "diamond"
[defaults]
cpus = 0
[step.prep]
run = "echo prepared > data"
[step.left]
needs = ["prep"]
run = "test -e ok"
retries = 1
backoff = "0s"
[step.right]
needs = ["prep"]
run = "cat data"
[step.report]
needs = ["left", "right"]
run = "echo all"
[step.mend]
needs = ["afternotok:left"]
run = "echo mend"
"""


def write(sh: Shell, text: str = DIAMOND) -> str:
    (sh.work / "p.toml").write_text(text)
    return "p.toml"


def states(sh: Shell, pipeline: str) -> dict[str, str]:
    (found,) = json.loads(sh.ok("gshow", "--json", pipeline))["pipelines"]
    return {step["step"]: step["state"] for step in found["steps"]}


def stable(text: str) -> str:
    """The output with times, users and the width of columns taken out; blanks before a branch of the tree stay."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE", text)
    text = re.sub(r"\d+:\d\d", "TIME", text)
    text = re.sub(rf"\b{re.escape(user_name(os.getuid()))}\b", "USER", text)
    return re.sub(r"(?<=[\w:)]) +", " ", text)


def test_the_worked_example_runs(sh: Shell) -> None:
    (text,) = re.findall(r"```text\n(.*?)```", HOWTO.read_text(), re.S)
    (sh.work / "pipeline.toml").write_text(text)
    assert sh.ok("gsub", "--dry-run", "--dag", "pipeline.toml") == "nightly: 4 steps, no errors\n"
    said = sh.ok("gsub", "--dag", "pipeline.toml", "--var", "epochs=3")
    pipeline = re.fullmatch(r"Submitted pipeline (p\d+) \(4 jobs, \d+ to \d+\)\n", said)
    assert pipeline is not None
    assert sh.type("gwait", pipeline[1]).code == 0
    assert (sh.work / "results" / "report").read_text() == "3 epochs\n"
    assert states(sh, pipeline[1])["mend"] == "CANCELLED"
    assert "COMPLETED, 3 of 4 steps completed, 1 not needed" in sh.ok("gshow", pipeline[1])
    assert sh.ok("gshow", pipeline[1], "--script") == text


def test_resume_reruns_only_unfinished_steps(own: Shell) -> None:
    pipeline = own.submit("--dag", write(own))
    assert pipeline == "p1"
    done = own.type("gwait", pipeline)
    assert done.code == 1
    assert "gwait: job 2 is FAILED: exit code 1" in done.err
    expected = {"prep": "COMPLETED", "left": "FAILED", "right": "COMPLETED", "report": "CANCELLED", "mend": "COMPLETED"}
    assert states(own, pipeline) == expected
    compare("gshow-pipeline.txt", stable(own.ok("gshow", pipeline)))
    compare("gq-tree.txt", stable(own.ok("gq", "--tree", "-j", pipeline)))
    assert own.ok("gq", "--tree", "--quiet", "-j", pipeline).split() == ["1", "2", "5", "3", "4"]
    compare("graph.mmd", own.ok("gshow", pipeline, "--graph", "mermaid"))
    compare("graph.dot", own.ok("gshow", pipeline, "--graph", "dot"))
    (own.work / "ok").touch()
    assert own.ok("gsub", "--resume", pipeline, "--wait") == "Resumed pipeline p1 (2 jobs, 6 to 7)\n"
    assert set(states(own, pipeline).values()) == {"COMPLETED"}
    assert len(own.ok("gq", "-a", "--quiet").split()) == 7
    again = own.type("gsub", "--resume", pipeline)
    assert (again.code, "all of its steps have completed" in again.err) == (1, True)
    compare("gshow-pipeline-resumed.txt", stable(own.ok("gshow", pipeline)))
    document = json.loads(own.ok("gq", "--tree", "--json", "-j", pipeline))
    assert next((job["id"], job["parent"], job["depth"]) for job in document["jobs"]) == ("1", "p1", 1)
    assert document["pipelines"][0]["state"] == "COMPLETED"


def test_the_tree_shows_jobs_outside_pipelines(own: Shell) -> None:
    first = own.submit("--hold", "-J", "first", "--", "true")
    second = own.submit("-J", "second", "-d", f"afterok:{first}", "--", "true")
    own.submit("-J", "third", "-d", f"afterany:{first}:{second}", "--", "true")
    own.submit("-J", "first", "-d", "singleton", "--", "true")
    own.submit("--hold", "-J", "alone", "--", "true")
    compare("gq-tree-jobs.txt", stable(own.ok("gq", "--tree")))


def test_the_tree_accepts_no_other_columns(sh: Shell) -> None:
    for words in (("-o", "%i"), ("--sort", "id"), ("--start",), ("--priority",)):
        done = sh.type("gq", "--tree", *words)
        assert (done.code, "has no effect" in done.err) == (2, True)


def test_box_drawing_is_used_where_the_terminal_supports_it(own: Shell) -> None:
    first = own.submit("--hold", "--", "true")
    own.submit("-d", f"afterok:{first}", "--", "true")
    code = "import sys; from gpusched.cli.gq import main; sys.exit(main())"
    for encoding, sign in (("utf-8", "└─ 2"), ("ascii", "`- 2")):
        out = in_a_terminal(own, code, "--tree", PYTHONIOENCODING=encoding)
        assert sign in out, out


def in_a_terminal(sh: Shell, code: str, *words: str, **env: str) -> str:
    """What a command prints on a terminal."""
    import pty
    import subprocess
    import sys

    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env={**sh.env, **env},
            stdout=follower,
            stderr=follower,
            stdin=follower,
        )
        os.close(follower)
        out = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            out += piece
        assert process.wait(timeout=60) == 0
    finally:
        os.close(leader)
    return out.decode()


def test_a_step_may_be_an_array_or_a_sweep(sh: Shell) -> None:
    text = """
[defaults]
cpus = 0
[step.prep]
run = "mkdir marks"
[step.many]
needs = "prep"
array = "0-3%2"
command = ["sh", "-c", "touch marks/$GPUSCHED_ARRAY_TASK_ID"]
[step.grid]
needs = "prep"
sweep = { lr = [1, 2], seed = "5..6" }
command = ["touch", "marks/{lr}-{seed}"]
[step.merge]
needs = ["many", "grid"]
run = "ls marks"
"""
    pipeline = sh.submit("--dag", write(sh, text))
    assert sh.type("gwait", pipeline).code == 0
    last = json.loads(sh.ok("gshow", "--json", pipeline))["pipelines"][0]["steps"][-1]
    assert sh.ok("glogs", last["id"]).split() == ["0", "1", "1-5", "1-6", "2", "2-5", "2-6", "3"]


def test_steps_start_in_a_snapshot_of_their_folder(sh: Shell) -> None:
    text = """
[defaults]
cpus = 0
snapshot = true
hold = true
[step.a]
run = "cat code"
[step.b]
run = "cat code"
snapshot = "copy"
[step.c]
run = "cat code"
snapshot = "no"
"""
    (sh.work / "code").write_text("then\n")
    pipeline = sh.submit("--dag", write(sh, text))
    (sh.work / "code").write_text("now\n")
    sh.ok("gctl", "release", pipeline)
    sh.ok("gwait", pipeline)
    ids = json.loads(sh.ok("gshow", "--json", pipeline))["pipelines"][0]["steps"]
    assert [sh.ok("glogs", step["id"]) for step in ids] == ["then\n", "then\n", "now\n"]


def test_cancel_ends_the_whole_pipeline(sh: Shell) -> None:
    text = '[step.a]\nrun = "sleep 100"\ncpus = 0\n[step.b]\nneeds = "a"\nrun = "true"\n[step.c]\nrun = "sleep 100"\n'
    pipeline = sh.submit("--dag", write(sh, text))
    wait_until(lambda: states(sh, pipeline)["a"] == "RUNNING", what="the first step to run")
    assert sh.ok("gq", "--quiet", "-j", pipeline).count("\n") == 3
    sh.ok("gcancel", pipeline)
    assert sh.type("gwait", pipeline).code == 1
    assert set(states(sh, pipeline).values()) == {"CANCELLED"}
    assert "State:      CANCELLED" in sh.ok("gshow", pipeline)


FAILING = """
[defaults]
cpus = 0
[step.train]
run = "test -e ok"
fallback = "touch begun; while ! test -e go; do sleep 0.02; done"
[step.report]
needs = ["train"]
run = "true"
"""


def test_a_fallback_is_part_of_the_pipeline(own: Shell) -> None:
    pipeline = own.submit("--dag", write(own, FAILING))
    wait_until(lambda: (own.work / "begun").exists(), what="the fallback to run")
    assert "RUNNING, 0 of 2 steps completed; fallbacks: 1 RUNNING" in own.ok("gshow", pipeline)
    assert own.ok("gq", "--quiet", "-j", pipeline).split() == ["1", "2", "3"]
    compare("gq-tree-fallback.txt", stable(own.ok("gq", "--tree", "-a")))
    assert "Pipeline:   p1, fallback of step train" in own.ok("gshow", "3")
    again = own.type("gsub", "--resume", pipeline)
    assert (again.code, again.err.splitlines()[0]) == (
        1,
        "gsub: error: the fallback of step train, job 3, is still RUNNING",
    )
    waiting = own.type("gwait", "--timeout", "0.2s", pipeline)
    assert (waiting.code, "timed out; still unfinished: 3" in waiting.err) == (1, True)
    (own.work / "go").touch()
    assert own.type("gwait", pipeline).code == 1
    document = json.loads(own.ok("gshow", "--json", pipeline))["pipelines"][0]
    assert (document["state"], document["fallback_counts"]) == ("FAILED", {"COMPLETED": 1})
    assert [(job["id"], job["step"], job["fallback_of"]) for job in document["fallbacks"]] == [("3", "train", "1")]
    (own.work / "ok").touch()
    assert own.ok("gsub", "--resume", pipeline, "--wait") == "Resumed pipeline p1 (2 jobs, 4 to 5)\n"
    assert "State:      COMPLETED, 2 of 2 steps completed\n" in own.ok("gshow", pipeline)


def test_cancelling_a_pipeline_ends_its_fallbacks(sh: Shell) -> None:
    text = FAILING.replace('run = "test -e ok"', 'array = "0-1"\nrun = "false"')
    pipeline = sh.submit("--dag", write(sh, text))

    def shown() -> dict[str, Any]:
        return dict(json.loads(sh.ok("gshow", "--json", pipeline))["pipelines"][0])

    wait_until(lambda: shown()["fallback_counts"] == {"RUNNING": 2}, what="both fallbacks to run")
    sh.ok("gcancel", pipeline)
    assert sh.type("gwait", pipeline).code == 1
    assert shown()["fallback_counts"] == {"CANCELLED": 2}
    array = shown()["steps"][0]["id"]
    of = {job["id"]: job["fallback_of"] for job in shown()["fallbacks"]}
    assert sorted(of.values()) == [f"{array}_0", f"{array}_1"]
    tree = json.loads(sh.ok("gq", "--tree", "--json", "-a", "-j", pipeline))["jobs"]
    assert {job["id"]: job["parent"] for job in tree if job["id"] in of} == of
    assert f"failed:{array}_1" in sh.ok("gshow", pipeline)


def test_hold_and_release_affect_unfinished_jobs(sh: Shell) -> None:
    text = '[defaults]\nhold = true\n[step.a]\nrun = "true"\n[step.b]\nneeds = "a"\nrun = "true"\n'
    pipeline = sh.submit("--dag", write(sh, text))
    sh.ok("gctl", "release", pipeline)
    assert sh.type("gwait", pipeline).code == 0


REFUSED = {
    "a mistake of the file": ("retires = 1", "p.toml, line 4: step.b has no retires"),
    "what the daemon refuses": ("gpus = 99", "p.toml, line 2: step b: asked for 99 GPUs"),
    "a job that is not there": ('dependency = "afterok:99999"', "p.toml, line 2: step b: there is no job 99999"),
}


@pytest.mark.parametrize(("line", "said"), REFUSED.values(), ids=REFUSED)
def test_a_refused_pipeline_is_not_recorded(own: Shell, line: str, said: str) -> None:
    done = own.type("gsub", "--dag", write(own, f'step.a.run = "true"\n[step.b]\nrun = "true"\n{line}\n'))
    assert done.code in (1, 2)
    assert done.err.startswith(f"gsub: error: {said}"), done.err
    assert own.ok("gq", "-a", "--quiet") == ""
    assert own.type("gshow", "p1").code == 1


SEVERAL = """
[step.a]
run = "true"
gpus = 99
[step.b]
run = "true"
[step.c]
run = "true"
mem = "900T"
[step.d]
run = "true"
dependency = "afterok:99999"
"""


def test_all_errors_of_the_daemon_are_reported(own: Shell) -> None:
    path = write(own, SEVERAL)
    done = own.type("gsub", "--dag", path)
    told = [line for line in done.err.splitlines() if line.startswith("gsub: error: ")]
    assert (done.code, [line[13:39] for line in told]) == (
        1,
        ["p.toml, line 2: step a: as", "p.toml, line 7: step c: as", "p.toml, line 10: step d: t"],
    ), done.err
    error = json.loads(own.type("gsub", "--json", "--dag", path).err)["error"]
    assert (error["code"], len(error["mistakes"])) == ("refused", 3)
    assert error["message"] == "; ".join(one["message"] for one in error["mistakes"])
    assert own.ok("gq", "-a", "--quiet") == ""
    many = "".join(f'[step.s{number}]\nrun = "true"\ngpus = 99\n' for number in range(25))
    assert own.type("gsub", "--dag", write(own, many)).err.endswith("\ngsub: and 5 more errors\n")


def test_values_come_from_command_line_step_defaults_and_script_in_this_order(own: Shell) -> None:
    (own.work / "s.sh").write_text("#!/bin/sh\n#GSUB -t 1h --nice 7 -c 3\necho $A $B $1\n")
    text = '[defaults]\ntime = "2h"\nenv = { A = "1" }\n[step.a]\nscript = "s.sh"\nargs = ["x"]\nnice = 5\ncpus = 2\n'
    text += 'fallback = "echo no"\nretries = 2\nkill-on-invalid-dep = "no"\nnotify = ["fail", "end"]\n'
    pipeline = own.submit("--dag", write(own, text), "-c", "1", "-E", "B=2")
    own.ok("gwait", pipeline)
    job = json.loads(own.ok("gshow", "--json", "1"))["jobs"][0]
    assert (job["time_limit_s"], job["nice"], job["cpus"], job["name"]) == (7200, 5, 1.0, "a")
    assert (job["pipeline"], job["step"]) == ("p1", "a")
    spec = job["spec"]
    assert (spec["fallback"], spec["retry"]["retries"], spec["never_satisfied"]) == ("echo no", 2, "wait")
    assert spec["alerting"]["on"] == ["end", "fail"]
    assert own.ok("glogs", "1") == "1 2 x\n"


def test_invalid_pipelines_are_explained(sh: Shell) -> None:
    path = write(sh)
    for words, said in (
        (("--dag", path, "--", "true"), "--dag and true were both given"),
        (("--dag", path, "--wrap", "x"), "--dag and --wrap were both given"),
        (("--dag", path, "--resume", "p1"), "--dag and --resume were both given"),
        (("--resume", "42"), "'42' is not a pipeline id"),
        (("--resume", "p1", "-c", "2"), "--resume runs what was recorded, so --cpus has no effect"),
        (("--resume", "p999"), "there is no pipeline p999"),
        (("--var", "a=1", "--", "true"), "--var is for pipelines"),
    ):
        done = sh.type("gsub", *words)
        assert done.code in (1, 2)
        assert said in done.err, done.err
