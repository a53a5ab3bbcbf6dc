"""Arrays and sweeps as users type them, on a real daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest
from shell import Shell
from support import wait_until


def listed(sh: Shell, *words: str) -> dict[str, dict[str, Any]]:
    return {job["id"]: job for job in json.loads(sh.ok("gq", "--json", *words))["jobs"]}


def test_tasks_know_their_index_and_write_separate_files(sh: Shell) -> None:
    line = "echo $GPUSCHED_ARRAY_JOB_ID $GPUSCHED_ARRAY_TASK_ID $SLURM_ARRAY_TASK_COUNT $SLURM_ARRAY_TASK_MAX"
    array = sh.submit("-c", "0", "-a", "3-7:2", "--wrap", line)
    sh.ok("gwait", array)
    for task in (3, 5, 7):
        assert (sh.work / f"gpusched-{array}_{task}.out").read_text() == f"{array} {task} 3 7\n"
    tasks = listed(sh, "-a", "-j", array)
    assert {name: job["state"] for name, job in tasks.items() if "_" in name} == {
        f"{array}_{task}": "COMPLETED" for task in (3, 5, 7)
    }


def test_a_sweep_runs_every_combination(sh: Shell) -> None:
    words = ("--sweep", "lr=1e-3,1e-4", "--sweep", "seed=0..1", "-J", "s", "-o", "s-{lr}-{seed}.out")
    array = sh.submit("-c", "0", *words, "--", "sh", "-c", "echo {lr} $seed")
    sh.ok("gwait", array)
    for lr in ("1e-3", "1e-4"):
        for seed in ("0", "1"):
            assert (sh.work / f"s-{lr}-{seed}.out").read_text() == f"{lr} {seed}\n"
    (task,) = json.loads(sh.ok("gshow", "--json", f"{array}_3"))["jobs"]
    assert (task["name"], task["sweep"]) == ("s lr=1e-4 seed=1", {"lr": "1e-4", "seed": "1"})
    assert "Values:     lr=1e-4, seed=1\n" in sh.ok("gshow", f"{array}_3")


def test_the_last_job_and_its_tasks_have_a_name_wherever_ids_are_taken(sh: Shell) -> None:
    array = sh.submit("-c", "0", "--hold", "-a", "0-4", "--wrap", "echo $GPUSCHED_ARRAY_TASK_ID")
    (task,) = json.loads(sh.ok("gshow", "--json", "@_1"))["jobs"]
    assert task["id"] == f"{array}_1"
    assert json.loads(sh.ok("gcancel", "--json", "@_0,@_[3-4]"))["cancelled"] == [f"{array}_{one}" for one in (0, 3, 4)]
    assert listed(sh, "-j", "@_2").keys() == {f"{array}_2"}
    sh.ok("gctl", "release", "@")
    sh.ok("gwait", "@_1", "@_2")
    assert sh.ok("glogs", "@_[1,2]").splitlines()[-2:] == [f"[{array}_1 wrap] 1", f"[{array}_2 wrap] 2"]
    after = sh.submit("-c", "0", "--hold", "-d", "afterany:@_1,after:@", "--", "true")
    assert sh.ok("gq", "--noheader", "-o", "%E", after).strip() == f"afterany:{array}_1,after:{array}"
    assert f"job {after} is not an array and has no tasks" in sh.type("gcancel", "@_0").err
    sh.ok("gctl", "update", after, f"dependency=afterany:{array}")
    (sh.work / "at.toml").write_text('[step.a]\nrun = "true"\nhold = true\ndependency = "afterany:@"\n')
    pipeline = sh.submit("--dag", "at.toml")
    assert f"afterany:{after}" in sh.ok("gshow", pipeline)
    sh.ok("gcancel", pipeline, after)


def test_what_is_no_range_is_a_value(sh: Shell) -> None:
    values = ["../data", "./a..b", "main..dev", "0-9", "2024-12", "v1..v2", "...", "-"]
    array = sh.submit("-c", "0", "--hold", "--sweep", f"x={','.join(values)}", "--", "true")
    (shown,) = json.loads(sh.ok("gshow", "--json", array))["jobs"]
    assert shown["tasks"] == {"PENDING": len(values)}
    for number, value in enumerate(values):
        (task,) = json.loads(sh.ok("gshow", "--json", f"{array}_{number}"))["jobs"]
        assert task["sweep"] == {"x": value}
    assert sh.submit("-c", "0", "--hold", "--sweep", "month=2024-12", "--", "true")


def test_a_sweep_is_found_by_its_name_while_its_tasks_run_and_afterwards(sh: Shell) -> None:
    array = sh.submit("-c", "0", "--sweep", "x=1,2,3", "-a", "%2", "-J", "sw", "--wrap", "sleep 1000")
    tasks = {f"{array}_0", f"{array}_1"}
    wait_until(lambda: listed(sh, "-n", "sw").keys() == {array, *tasks}, what="two tasks to run")
    assert listed(sh, "-n", "sw x=2").keys() == {f"{array}_1"}
    held = json.loads(sh.ok("gctl", "--json", "hold", "-n", "sw", "-t", "RUNNING"))
    assert {*held["changed"], *held["running"]} == tasks
    assert set(json.loads(sh.ok("gcancel", "--json", "-n", "sw", "--state", "RUNNING"))["cancelled"]) == tasks
    sh.ok("gcancel", array)
    sh.type("gwait", array)
    for command in ("gq", "ghist"):
        found = json.loads(sh.ok(command, "--json", *(["-a"] if command == "gq" else []), "-n", "sw"))["jobs"]
        assert {job["id"] for job in found} >= tasks


def test_a_shell_line_accepts_placeholders(sh: Shell) -> None:
    array = sh.submit("-c", "0", "--sweep", "x=a,b", "--wrap", "echo {x}-$x-{y}")
    sh.ok("gwait", array)
    assert [(sh.work / f"gpusched-{array}_{task}.out").read_text() for task in (0, 1)] == ["a-a-{y}\n", "b-b-{y}\n"]


def test_pending_tasks_share_one_line(sh: Shell) -> None:
    array = sh.submit("-c", "0", "-a", "0-9999%2", "--wrap", "sleep 1000")
    wait_until(lambda: len(listed(sh, "-j", array)) == 3, what="two tasks to run")
    lines = sh.ok("gq", "--long", "-j", array).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"{array}_0", f"{array}_1", f"{array}_[2-9999%2]"]
    assert f"(JobArrayTaskLimit) array {array} may run 2 tasks at once" in lines[3]
    waiting = listed(sh, "-j", array)[array]
    assert (waiting["tasks_left"], waiting["throttle"], waiting["array_id"]) == ("2-9999", 2, array)
    assert "Tasks:      9998 PENDING, 2 RUNNING (not started: 2-9999), at most 2 at once\n" in sh.ok("gshow", array)
    (task,) = json.loads(sh.ok("gshow", "--json", f"{array}_77"))["jobs"]
    assert (task["id"], task["state"], task["task"]) == (f"{array}_77", "PENDING", 77)
    assert json.loads(sh.ok("gctl", "--json", "update", array, "throttle=3"))["changed"] == [array]
    wait_until(lambda: len(listed(sh, "-j", array)) == 4, what="a third task to run")
    assert json.loads(sh.ok("gcancel", "--json", f"{array}_[1,5-7]"))["cancelled"] == [
        f"{array}_{task}" for task in (1, 5, 6, 7)
    ]
    assert sh.type("gcancel", f"{array}_7").err == f"gcancel: job {array}_7 had already ended\n"
    sh.ok("gcancel", array)
    done = sh.type("gwait", array)
    assert done.code == 1
    assert f"job {array} is CANCELLED: cancelled by " in done.err
    assert listed(sh, "-j", array, "-s", "RUNNING") == {}


def test_wait_returns_the_largest_exit_code(sh: Shell) -> None:
    done = sh.type("gsub", "-c", "0", "-W", "-a", "0-3", "--wrap", "exit $GPUSCHED_ARRAY_TASK_ID")
    assert done.code == 3
    assert "FAILED: 1 COMPLETED, 3 FAILED" in done.err


def test_a_broken_sweep_stops_early(sh: Shell) -> None:
    done = sh.type("gsub", "-c", "0", "-W", "-a", "0-999%1", "--max-fails", "2", "--wrap", "exit 9")
    assert done.code == 9
    assert "3 of its tasks failed, and --max-fails is 2 (3 FAILED, 997 never started)" in done.err


def test_a_single_task_can_be_waited_for(sh: Shell) -> None:
    array = sh.submit("-c", "0", "-a", "0-1%1", "--wrap", "true")
    after = sh.submit("-c", "0", "-d", f"afterok:{array}_1", "--", "true")
    sh.ok("gwait", after, f"{array}_[0-1]")
    (shown,) = json.loads(sh.ok("gshow", "--json", after))["jobs"]
    (task,) = json.loads(sh.ok("gshow", "--json", f"{array}_1"))["jobs"]
    assert shown["start_at"] >= task["end_at"]


def test_a_waited_task_is_shown_by_its_number(sh: Shell) -> None:
    array = sh.submit("--hold", "-c", "0", "-a", "3-5", "--", "true")
    after = sh.submit("-c", "0", "-d", f"afterok:{array}_4,afterany:{array}_5", "--", "true")
    again = sh.submit("--resubmit", after, "-d", f"after:{array}_5")
    assert sh.ok("gq", "--noheader", "-o", "%E", "-j", f"{after},{again}").split() == [
        f"afterok:{array}_4,afterany:{array}_5",
        f"after:{array}_5",
    ]
    assert f"waits for job {array}_4 to complete and job {array}_5 to end" in sh.ok("gshow", after)
    (job,) = json.loads(sh.ok("gshow", "--json", after))["jobs"]
    assert (job["depends_on"], job["spec"]["dependency"]) == ([f"{array}_4", f"{array}_5"], job["dependency"])
    (sh.work / "p.toml").write_text(f'[step.a]\nrun = "true"\ndependency = "afterok:{array}_3"\n')
    pipeline = sh.submit("--dag", "p.toml")
    assert f"afterok:{array}_3" in sh.ok("gshow", pipeline)
    (sh.work / "p.toml").write_text(f'[step.a]\nrun = "true"\ndependency = "afterok:{array}_9"\n')
    assert sh.type("gsub", "--dag", "p.toml").err.startswith(
        f"gsub: error: p.toml, line 1: step a: array {array} has no"
    )
    sh.ok("gctl", "update", again, f"dependency=afterok:{array}_3")
    assert f"dependency=afterok:{array}_3 by" in sh.ok("gshow", again)
    assert "is not a dependency" in sh.type("gctl", "update", again, f"dependency=afterok:{array}_3=1").err


def test_slurm_directives_make_arrays(sh: Shell) -> None:
    script = sh.work / "a.sh"
    script.write_text(
        "#!/bin/sh\n#SBATCH --array=1,4%1\n#SBATCH -o out-%A-%a\n#SBATCH -c 0\necho $SLURM_ARRAY_TASK_ID\n"
    )
    array = sh.submit(str(script))
    sh.ok("gwait", array)
    assert (sh.work / f"out-{array}-4").read_text() == "4\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-a", "5-2"], "'5-2' ends before it begins"),
        (["-a", "0-9%0"], "'0' is not a number of concurrent tasks"),
        (["-a", "x"], "'x' is not a list of tasks"),
        (["--max-fails", "3"], "max_fails applies to arrays, and this job is not one"),
        (["--sweep", "3=2"], "'3=2' is not NAME=VALUES"),
        (["--sweep", "lr="], "the sweep lr has no values"),
        (["--sweep", "a=1", "--sweep", "a=2"], "the sweep names a twice"),
        (["--sweep", "a=1,2", "-a", "0-5"], "task 5 is requested, but the sweep has 2 combinations"),
        (["-a", "0-9999999"], "is above 4000000"),
        (["--sweep", "lr=1,2", "-o", "{lrr}.out"], "{lrr} does not name a swept value; the names are lr"),
        (["--sweep", "CUDA_VISIBLE_DEVICES=0,1"], "CUDA_VISIBLE_DEVICES cannot be swept"),
        (["--sweep", "SLURM_JOB_ID=0,1"], "SLURM_JOB_ID cannot be swept"),
        (["--sweep", "HIP_VISIBLE_DEVICES=0,1"], "HIP_VISIBLE_DEVICES cannot be swept: the scheduler sets it"),
        *(
            (["--sweep", f"{name}=/a,/b"], f"{name} cannot be swept: the job's programs need the variable as it is")
            for name in ("PATH", "HOME", "USER", "SHELL", "LD_LIBRARY_PATH", "PYTHONPATH")
        ),
        *(
            (["--sweep", f"lr={text}"], f"the sweep lr has {word!r}, which is not a range: whole numbers")
            for text, word in (
                ("0..1e2", "0..1e2"),
                ("0.1..0.5", "0.1..0.5"),
                ("1,2..n", "2..n"),
                ("0...5", "0...5"),
                ("..9", "..9"),
                ("1..", "1.."),
                ("{1..4}", "{1..4}"),
                ("0..10..0.5", "0..10..0.5"),
                ("0..4..0", "0..4..0"),
                (" 0..4", " 0..4"),
                ("0..9999999999", "0..9999999999"),
                ("a..e", "a..e"),
                ("0-9", "0-9"),
            )
        ),
    ],
)
def test_mistakes_in_array_options_are_named(sh: Shell, words: list[str], says: str) -> None:
    done = sh.type("gsub", *words, "--", "true")
    assert done.code == 2
    assert says in done.err


def test_a_misspelt_placeholder_is_refused_at_submission(sh: Shell) -> None:
    done = sh.type("gsub", "--sweep", "lr=1,2", "--wrap", "python train.py --lr {LR}")
    assert (done.code, done.out) == (2, "")
    assert "write {lr}" in done.err


def test_other_braces_are_left_unchanged(sh: Shell) -> None:
    array = sh.submit(
        "--sweep", "lr=1,2", "-o", "{lr}.out", "--wrap", "echo a b | awk '{print}'; echo ${lr:-no} ${lr}{x}"
    )
    sh.ok("gwait", array)
    assert (sh.work / "2.out").read_text() == "a b\n2 2{x}\n"


def test_unknown_ids_are_named(sh: Shell) -> None:
    array = sh.submit("-c", "0", "-a", "0-1", "--", "true")
    plain = sh.submit("-c", "0", "--", "true")
    assert f"array {array} has no task 2; it has 0-1" in sh.type("gcancel", f"{array}_2").err
    assert f"job {plain} is not an array and has no tasks" in sh.type("gshow", f"{plain}_0").err
    assert "names more than one job" in sh.type("gq", "--why", f"{array}_[0-1]").err
    sh.type("gwait", array, plain)
