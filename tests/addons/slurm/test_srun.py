"""srun inside a job: real steps in a real daemon."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
from slurm_lab import SlurmLab
from support import is_alive, wait_until

from gpusched.client import DaemonConnection

HOST = "node1"
NO_STEP = "Unable to create step for job JOB"
NO_NODE = f"srun: error: {NO_STEP}: Requested node configuration is not available\n"
SEE_NODES = "srun: hint: see the nodes of the job with: scontrol show job JOB\n"


HEAD = """#!/bin/bash
export J=$SLURM_JOB_ID
await() { while [ ! -e $1 ]; do sleep 0.05; done; }
export -f await"""
"""Beginning of every script: its id, and a way to wait for a file."""


def started(lab: SlurmLab, text: str, words: str = "-c 4", script_name: str = "") -> str:
    """Submit a script; returns the job's id. Its output is ID.out."""
    name = script_name or f"script-{time.monotonic_ns()}.sh"
    (lab.work / name).write_text(f"{HEAD}\n{text}\n")
    return lab.submit(f"-t 5 -o %j.out {words} {name}")


def ran(lab: SlurmLab, text: str, words: str = "-c 4") -> str:
    """Run a script as a job; returns what it wrote."""
    job = started(lab, text, words)
    lab.wait(job)
    return lab.text(f"{job}.out")


def coded(lab: SlurmLab, line: str, words: str = "-c 4") -> tuple[int, str, str]:
    """Exit code, output and errors of one line in a job; ids of jobs are replaced by JOB."""
    job = started(lab, f"( {line} ) >out-$SLURM_JOB_ID 2>err-$SLURM_JOB_ID; echo $? >code-$SLURM_JOB_ID", words)
    lab.wait(job)
    out, err = (
        lab.text(f"{name}-{job}").replace(f"{job}.", "JOB.").replace(f"job {job}", "job JOB") for name in ("out", "err")
    )
    return int(lab.text(f"code-{job}")), out, re.sub(r"AT [0-9T:-]{19}", "AT TIME", err)


def steps(lab: SlurmLab, job: str, query: str = "") -> list[dict[str, Any]]:
    with DaemonConnection(str(lab.home / "run" / "api.sock")) as client:
        return list(client.call("GET", f"/v1/steps?ids={job}{query}")["steps"])


def states(lab: SlurmLab, job: str) -> list[str]:
    return [row["state"] for row in steps(lab, job)]


# --- what a script sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("srun echo hi", 0, "hi\n", ""),
        ("srun -n 2 -l bash -c 'echo rank $SLURM_PROCID of $SLURM_NTASKS' | sort", 0,
         "0: rank 0 of 2\n1: rank 1 of 2\n", ""),
        ("srun bash -c 'exit 3'", 3, "", f"srun: error: {HOST}: task 0: Exited with exit code 3\n"),
        (
            "srun nosuchcommand",
            2,
            "",
            "slurmstepd: error: execve(): nosuchcommand: No such file or directory\n"
            f"srun: error: {HOST}: task 0: Exited with exit code 2\n",
        ),
        ("srun /etc/passwd", 13, "", "slurmstepd: error: execve(): /etc/passwd: Permission denied\n"
         f"srun: error: {HOST}: task 0: Exited with exit code 13\n"),
        (
            "srun bash -c 'kill -9 $$'",
            137,
            "",
            f"srun: error: {HOST}: task 0: Killed\nsrun: Force Terminated StepId=JOB.0\n",
        ),
        ("srun bash -c 'kill -SEGV $$'", 139, "", f"srun: error: {HOST}: task 0: Segmentation fault\n"),
        ("srun", 1, "", "srun: fatal: No command given to execute.\n"),
        ("srun bash -c 'echo out; echo err >&2'", 0, "out\n", "err\n"),
        ("srun --nosuch hostname", 255, "",
         "srun: unrecognized option '--nosuch'\nTry \"srun --help\" for more information\n"),
        ("srun --mpi=list", 0, "MPI plugin types are...\n\tnone\n", ""),
        ("srun -n x true", 1, "", 'srun: error: Invalid numeric value "x" for --ntasks.\n'),
        ("srun -n 0 true", 1, "", 'srun: error: Invalid numeric value "0" for --ntasks.\n'),
        ("srun --gpu-bind=odd --gpus=1 true", 255, "", None),
        ("srun -N 2 true", 1, "",
         f"srun: error: Only allocated 1 nodes asked for 2\n"
         f"srun: the step requests 2 nodes, but job JOB has 1 for it\n{SEE_NODES}"),
        ("srun -w other true", 1, "", f"{NO_NODE}srun: node other does not belong to job JOB\n{SEE_NODES}"),
        (f"srun -N1 -w {HOST} -n1 --exclusive --mem=10M --cpu-bind=q --mpi=none -u -J name echo hi", 0, "hi\n", ""),
        ("srun true : false", 255, "", None),
        ("srun --jobid=999999 true", 1, "", None),
        ("srun --bb=x true", 255, "", None),
        ("srun --multi-prog x", 1, "",
         "srun: error: Unable to open configuration file x: No such file or directory\n"),
        ("printf '0 echo a %%t\\n1-2 echo \"b  %%t\" %%o\\n' >p; srun -n 3 -l --multi-prog p | sort", 0,
         "0: a 0\n1: b  1 0\n2: b  2 1\n", ""),
        ("srun --mpi=pmi2 echo hi", 0, "hi\n", None),
        ("srun --jobid=$SLURM_JOB_ID --hint=nomultithread -m block --x11 -s echo hi", 0, "hi\n", ""),
        ("srun --cpu-bind=odd true", 255, "", "srun: error: Invalid --cpu-bind argument: odd\n"),
        ("srun -c 9 true", 1, "", None),
        ("srun --pty -n1 tty </dev/null", 1, "not a tty\n",
         "srun: error: Not using a pseudo-terminal, disregarding --pty option\n"
         f"srun: error: {HOST}: task 0: Exited with exit code 1\n"),
        ("srun --pty -n2 cat </dev/null", 0, "",
         "srun: error: Not using a pseudo-terminal, disregarding --pty option\n"),
    ],
)  # fmt: skip
def test_speaks_and_exits_as_slurms_does(lab: SlurmLab, line: str, code: int, out: str, err: str | None) -> None:
    found = coded(lab, line, "-c 4 --gres=gpu:1")
    assert found[:2] == (code, out)
    if err is not None:
        assert found[2] == err
    elif code == 0:
        assert "srun: --mpi=pmi2 has no effect: there is no PMI here" in found[2]
    else:
        assert "srun: error: " in found[2]


def test_exits_with_the_highest_code_and_names_tasks_together(lab: SlurmLab) -> None:
    line = "srun -n 4 bash -c 'sleep 0.$((SLURM_PROCID / 3 * 5)); exit $((SLURM_PROCID == 3 ? 9 : 4))'"
    code, _, err = coded(lab, line)
    assert code == 9
    assert f"srun: error: {HOST}: task 3: Exited with exit code 9" in err
    assert sorted(re.findall(r"\d+", " ".join(re.findall(r"tasks? ([\d,-]+): Exited with exit code 4", err))))[0] == "0"


def test_ends_a_step_at_its_first_failure_if_asked(lab: SlurmLab) -> None:
    code, _, err = coded(lab, "srun -n2 -K bash -c '[ $SLURM_PROCID = 0 ] && exit 7; exec sleep 60'")
    assert (code, err) == (
        143,
        f"srun: error: {HOST}: task 0: Exited with exit code 7\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=JOB.0\n"
        f"slurmstepd: error: *** STEP JOB.0 ON {HOST} CANCELLED AT TIME ***\n"
        f"srun: error: {HOST}: task 1: Terminated\n"
        "srun: Force Terminated StepId=JOB.0\n",
    )


def test_ends_a_step_some_time_after_its_first_task(lab: SlurmLab) -> None:
    code, _, err = coded(lab, "srun -n2 --wait=1 bash -c '[ $SLURM_PROCID = 0 ] || exec sleep 60'")
    assert code == 143
    assert "srun: First task exited 1s ago\n" in err


def test_tasks_know_their_place(lab: SlurmLab) -> None:
    names = (
        "PROCID LOCALID NTASKS NPROCS STEP_ID STEPID STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE"
    )
    names += " GTIDS LAUNCH_NODE_IPADDR NODEID NTASKS_PER_NODE JOB_ID NODELIST"
    words = " ".join(f"$SLURM_{name}" for name in names.split())
    out = ran(
        lab, f"true; srun -n 2 bash -c 'echo {words} $GPUSCHED_TASK $GPUSCHED_NTASKS $((SLURM_TASK_PID == $$))' | sort"
    )
    job = out.split()[14]
    assert [line.split() for line in out.splitlines()] == [
        [*f"{task} {task} 2 2 0 0 {HOST} 1 2 2 0,1 127.0.0.1 0 2 {job} {HOST} {task} 2 1".split()] for task in (0, 1)
    ]


def test_is_found_by_the_jobs_id_alone(lab: SlurmLab) -> None:
    """As Snakemake calls it: with no variable of Slurm left but the id."""
    strip = (
        "for name in $(env | grep -oE '^(SLURM|SRUN|SBATCH)[A-Z_]*'); do [ $name = SLURM_JOB_ID ] || unset $name; done"
    )
    out = ran(
        lab,
        f"{strip}; echo 'echo $SLURM_PROCID $SLURM_NTASKS $SLURM_JOB_NODELIST' | "
        "srun -n1 --cpu-bind=q --cpus-per-task=2 --nodes=1 sh -s",
    )
    assert out == f"0 1 {HOST}\n"


def test_starts_as_many_tasks_as_the_job_asked_for(lab: SlurmLab) -> None:
    assert ran(lab, "srun echo x", "-n 3") == "x\n" * 3
    assert ran(lab, "env -u SLURM_NTASKS -u SLURM_NPROCS srun echo x", "-n 3") == "x\n" * 3
    assert ran(lab, "srun echo x", "--ntasks-per-node=2") == "x\n" * 2
    assert ran(lab, "srun -n 1 echo x", "-n 3") == "x\n"


def test_a_second_allocation_is_never_made(lab: SlurmLab) -> None:
    before = lab.ok("gq --quiet -a || true").split()
    job = started(lab, "srun true; srun true")
    lab.wait(job)
    assert len(steps(lab, job)) == 2
    assert [*before, job] == lab.ok("gq --quiet -a || true").split()


def test_a_process_of_no_job_gets_no_step(lab: SlurmLab) -> None:
    lab.ok("gq")
    done = lab.type("srun true", SLURM_JOB_ID="999999")
    assert done.code == 1
    assert done.err.startswith("srun: error: Unable to confirm allocation for job 999999: Invalid job id specified\n")


# --- GPUs and cores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("-n 2", ["A,B", "A,B"]),
        ("-n 2 --gpus-per-task=1", ["A", "B"]),
        ("-n 1 --gpus=1", ["A"]),
        ("-n 1 --gres=gpu:1", ["A"]),
        ("-n 2 --gpus=2", ["A,B", "A,B"]),
        ("-n 2 --gpus=2 --gpu-bind=single:1", ["A", "B"]),
        ("-n 2 --gpus=2 --gpu-bind=map_gpu:1,0", ["B", "A"]),
        ("-n 2 --gpus=2 --gpu-bind=mask_gpu:0x3,0x1", ["A,B", "A"]),
        ("-n 2 --gpus-per-task=1 --gpu-bind=none", ["A,B", "A,B"]),
        ("-n 1 --gpus=0", [""]),
        ("--ntasks-per-gpu=1 --gpus=2", ["A,B", "A,B"]),
    ],
)
def test_divides_the_gpus_of_the_job(lab: SlurmLab, words: str, seen: list[str]) -> None:
    line = "bash -c 'echo $SLURM_PROCID ${CUDA_VISIBLE_DEVICES-unset}'"
    out = ran(lab, f"echo $CUDA_VISIBLE_DEVICES; srun {words} {line} | sort", "-c 2 --gres=gpu:2")
    first, *lines = out.splitlines()
    known = dict(zip("AB", first.split(","), strict=True))
    wanted = [f"{task} {','.join(known[name] for name in names.split(',') if name)}" for task, names in enumerate(seen)]
    assert [line.strip() for line in lines] == [line.strip() for line in wanted]


def test_steps_with_gpus_of_their_own_take_turns(lab: SlurmLab) -> None:
    """Each writes when it has its GPU and when it gives it back: at most two at a time, and never one GPU twice."""
    text = """
both() { [ $(grep -c + turns-$J) -ge 2 ] && grep -q retrying $J.out; }
export -f both
for i in 1 2 3 4; do
  srun -n1 --gpus=1 bash -c 'G=$CUDA_VISIBLE_DEVICES; echo "+ $G" >> turns-$J
    until both; do sleep 0.05; done; echo "- $G" >> turns-$J' &
done
wait
"""
    job = started(lab, text, "-c 4 --gres=gpu:2")
    lab.wait(job)
    used: set[str] = set()
    most = 0
    for line in lab.text(f"turns-{job}").splitlines():
        sign, gpu = line.split()
        if sign == "+":
            assert gpu not in used
            used.add(gpu)
        else:
            used.remove(gpu)
        most = max(most, len(used))
    assert (most, used) == (2, set())
    assert "step creation temporarily disabled, retrying (Requested nodes are busy)" in lab.text(f"{job}.out")
    assert states(lab, job) == ["COMPLETED"] * 4


def test_exact_steps_wait_for_cores_and_others_do_not(lab: SlurmLab) -> None:
    text = """
srun --exact -n2 bash -c 'touch holds-$J; await free-$J' &
await holds-$J
srun -n2 echo shares
srun --exact -n1 -I true; echo $?
touch free-$J
wait
"""
    out = ran(lab, text, "-c 2")
    assert "shares\nshares\n" in out
    assert "Requested nodes are busy\n1\n" in out


def test_more_than_the_job_has_is_refused(lab: SlurmLab) -> None:
    code, _, err = coded(lab, "srun -n 5 true")
    assert (code, err.splitlines()[0]) == (
        1,
        f"srun: error: {NO_STEP}: More processors requested than permitted",
    )
    assert coded(lab, "srun -n 5 -O echo x")[:2] == (0, "x\n" * 5)
    code, _, err = coded(lab, "srun --gpus=1 true")
    assert (code, err.splitlines()[0]) == (
        1,
        f"srun: error: {NO_STEP}: Invalid generic resource (gres) specification",
    )


@pytest.mark.parametrize(
    "option",
    ["--gres=gpu:v100:1", "--gres=gpu:v100", "--gpus=v100:1", "--gpus-per-task=v100:1", "--gpus-per-node=v100:1"],
)
def test_a_type_of_gpu_that_the_job_does_not_have_is_refused(lab: SlurmLab, option: str) -> None:
    code, out, err = coded(lab, f"srun {option} -n 1 true", "--gres=gpu:1")
    assert (code, out) == (1, "")
    first, why, hint = err.splitlines()
    assert first == f"srun: error: {NO_STEP}: Invalid generic resource (gres) specification"
    assert why.startswith("srun: the step requests a GPU of type 'v100', but the GPUs of job ")
    assert hint.startswith("srun: hint: leave the type out")


def test_a_type_of_gpu_that_the_job_has_is_granted(lab: SlurmLab) -> None:
    line = "srun --gres=gpu:FAKE:1 -n 1 sh -c 'echo $SLURM_GPUS_ON_NODE'"
    assert coded(lab, line, "--gres=gpu:2")[:2] == (0, "1\n")
    code, _, err = coded(lab, "srun --gres=gpu:fake:1,gpu:v100:1 -n 1 true", "--gres=gpu:2")
    assert (code, err) == (
        255,
        "srun: error: GPUs of two types, fake and v100, are not supported in one step; run one step for each\n",
    )


# --- files and streams ------------------------------------------------------------------------------------


def test_each_task_writes_its_own_file(lab: SlurmLab) -> None:
    text = (
        "srun -n 2 -J work -o 'o-%j-%t-%s-%J-%N-%n-%x-%u-%A-%a-%3t-%%' bash -c 'echo out $SLURM_PROCID; echo err >&2'"
    )
    job = started(lab, text, "-c 2 -J 'a b'")
    lab.wait(job)
    user = lab.ok("id -un").strip()
    for task in (0, 1):
        name = f"o-{job}-{task}-0-{job}.0-{HOST}-0-a b-{user}-{job}-0-00{task}-%"
        assert lab.text(name) == f"out {task}\nerr\n"


def test_output_and_errors_may_go_apart_and_to_nowhere(lab: SlurmLab) -> None:
    job = started(
        lab,
        "srun -o out-%j.%t -e err-%j.%t bash -c 'echo out; echo err >&2'; srun -o none echo lost; "
        "srun -n 3 -o 1 bash -c 'echo $SLURM_PROCID'",
    )
    lab.wait(job)
    assert (lab.text(f"out-{job}.0"), lab.text(f"err-{job}.0"), lab.text(f"{job}.out")) == ("out\n", "err\n", "1\n")


@pytest.mark.parametrize(
    ("job_mode", "step_mode", "kept"),
    [
        ("truncate", "", False),
        ("append", "", True),
        ("append", "--open-mode=truncate", False),
        ("truncate", "--open-mode=a", True),
    ],
)
def test_appends_if_the_job_does(lab: SlurmLab, job_mode: str, step_mode: str, kept: bool) -> None:
    job = started(lab, f"echo before > f-$SLURM_JOB_ID; srun {step_mode} -o f-%j echo after", f"--open-mode={job_mode}")
    lab.wait(job)
    assert lab.text(f"f-{job}") == ("before\nafter\n" if kept else "after\n")


@pytest.mark.parametrize("mode", ["append", "truncate"])
def test_two_writers_of_one_file_lose_nothing(lab: SlurmLab, mode: str) -> None:
    """As submitit does: the output of the job is that of its task 0."""
    (lab.work / "two.sh").write_text(
        "#!/bin/bash\necho one\n"
        "srun --output=two-%j_%t_log.out --unbuffered bash -c 'echo two; echo three'\necho four\n"
    )
    job = lab.submit(f"-t 5 --open-mode={mode} -o two-%j_0_log.out two.sh")
    lab.wait(job)
    assert lab.text(f"two-{job}_0_log.out") == "one\ntwo\nthree\nfour\n"


def test_an_unwritable_file_is_named(lab: SlurmLab) -> None:
    code, _, err = coded(lab, "srun -o /proc/nosuch/x true")
    assert (code, err) == (1, "srun: error: Could not open stdout file /proc/nosuch/x: No such file or directory\n")


def test_a_missing_folder_is_created_for_the_job_and_not_for_a_step(lab: SlurmLab) -> None:
    (lab.work / "fresh.sh").write_text("#!/bin/sh\necho out\nsrun -o fresh/deep/step.txt true\necho code $?\n")
    job = lab.submit("-t 5 -o fresh/job.txt fresh.sh")
    lab.wait(job)
    assert lab.text("fresh/job.txt") == (
        "out\nsrun: error: Could not open stdout file fresh/deep/step.txt: No such file or directory\ncode 1\n"
    )
    assert not (lab.work / "fresh" / "deep").exists()


@pytest.mark.parametrize("count", [1, 3])
def test_all_tasks_read_the_whole_input(lab: SlurmLab, count: int) -> None:
    out = ran(
        lab,
        f"seq 20000 | srun -n {count} bash -c 'md5sum; true' | sort -u | wc -l; seq 20000 | md5sum | wc -l; "
        f"seq 3 | srun -n {count} cat | sort",
        "-c 3",
    )
    assert out == "1\n1\n" + "".join(f"{number}\n" * count for number in (1, 2, 3))


def test_a_task_that_reads_nothing_stops_no_other(lab: SlurmLab) -> None:
    out = ran(lab, "seq 300000 | srun -n 2 bash -c '[ $SLURM_PROCID = 1 ] || wc -l'")
    assert out == "300000\n"


def test_input_from_a_file_for_each_task_and_for_one(lab: SlurmLab) -> None:
    text = "echo a > in-0; echo b > in-1; srun -n 2 -i in-%t cat | sort; srun -n 2 -i in-0 cat; "
    text += "echo c | srun -n 2 -i 1 cat; srun -i none cat"
    assert ran(lab, text) == "a\nb\na\na\nc\n"


def test_a_missing_newline_and_binary_output_survive_labels(lab: SlurmLab) -> None:
    job = started(lab, "srun -n1 -l printf 'a\\n\\nb\\xff\\0c' > raw-$SLURM_JOB_ID")
    lab.wait(job)
    wait_until((lab.work / f"raw-{job}").exists)
    assert (lab.work / f"raw-{job}").read_bytes() == b"0: a\n0: \n0: b\xff\0c\n"


def test_the_environment_of_tasks_is_as_asked(lab: SlurmLab) -> None:
    show = "bash -c 'echo $A-$B-${SLURM_PROCID-unset}-$([ -n \"$PATH\" ] && echo path)'"
    words = ("", "--export=NONE", "--export=A", "--export=ALL,A=5", "--export=B=7,A=8")
    text = "export A=1 B=2; " + "; ".join(f"srun {word} {show}" for word in words)
    assert ran(lab, text) == "1-2-0-path\n--0-path\n1--0-path\n5-2-0-path\n8-7-0-path\n"


def test_runs_in_the_folder_of_chdir(lab: SlurmLab) -> None:
    (lab.work / "sub").mkdir(exist_ok=True)
    assert ran(lab, "srun -D sub pwd").strip().endswith("/sub")
    out = ran(lab, "srun -D /proc/nosuch pwd")
    assert out.endswith("/tmp\n")
    assert "couldn't chdir to `/proc/nosuch'" in out


# --- records ----------------------------------------------------------------------------------------------


def test_every_step_is_recorded_with_its_end(lab: SlurmLab) -> None:
    job = started(lab, "srun -n1 true; srun -n1 -J named bash -c 'exit 5'; srun -n2 bash -c 'kill -9 $$'; exit 0")
    lab.wait(job)
    rows = [
        (one["id"], one["name"], one["state"], one["exit_code"], one["signal"], one["tasks"]) for one in steps(lab, job)
    ]
    assert rows == [
        (f"{job}.0", "true", "COMPLETED", 0, None, 1),
        (f"{job}.1", "named", "FAILED", 5, None, 1),
        (f"{job}.2", "bash", "FAILED", None, 9, 2),
    ]
    assert lab.state(job) == "COMPLETED"


def test_steps_may_run_side_by_side(lab: SlurmLab) -> None:
    text = "srun bash -c 'touch a-$J; await b-$J' & srun bash -c 'touch b-$J; await a-$J'; wait"
    job = started(lab, text)
    lab.wait(job)
    assert states(lab, job) == ["COMPLETED", "COMPLETED"]


def test_a_killed_srun_takes_its_tasks_with_it_and_the_job_goes_on(lab: SlurmLab) -> None:
    text = """
srun bash -c 'echo $$ > task-$J.draft; mv task-$J.draft task-$J; exec sleep 600' & p=$!
await task-$J
kill -9 $p; wait $p
touch killed-$J
await go-$J
"""
    job = started(lab, text)
    wait_until((lab.work / f"killed-{job}").exists, what="srun to be killed")
    task = int(lab.text(f"task-{job}"))
    wait_until(lambda: states(lab, job) == ["CANCELLED"] and not is_alive(task), what="the step to end")
    assert lab.state(job) == "RUNNING"
    (row,) = steps(lab, job)
    assert (row["signal"], row["exit_code"]) == (9, None)
    (lab.work / f"go-{job}").touch()
    lab.wait(job)
    assert lab.state(job) == "COMPLETED"


def test_what_a_task_leaves_behind_ends_with_its_step(lab: SlurmLab) -> None:
    job = started(
        lab,
        "srun bash -c 'sleep 600 & echo $! > left-$J'; touch over-$J; await go-$J",
    )
    wait_until((lab.work / f"over-{job}").exists)
    left = int(lab.text(f"left-{job}"))
    wait_until(lambda: not is_alive(left), what="the leftover to end")
    (lab.work / f"go-{job}").touch()
    lab.wait(job)


def test_open_steps_are_cancelled_with_their_job(lab: SlurmLab) -> None:
    job = started(lab, "srun bash -c 'touch begun-$SLURM_JOB_ID; exec sleep 600'")
    wait_until((lab.work / f"begun-{job}").exists)
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    assert (lab.state(job), states(lab, job)) == ("CANCELLED", ["CANCELLED"])
    assert f"slurmstepd: error: *** JOB {job} ON {HOST} CANCELLED AT " in lab.text(f"{job}.out")


def test_forwards_signals_to_its_tasks(lab: SlurmLab) -> None:
    task = 'trap "echo got; touch got-$J-$SLURM_PROCID" USR1; touch ready-$J-$SLURM_PROCID; await end-$J'
    text = f"srun -n2 bash -c '{task}' & p=$!; await ready-$J-0; await ready-$J-1; "
    text += "kill -USR1 $p; await got-$J-0; await got-$J-1; touch end-$J; wait $p"
    assert ran(lab, text).splitlines().count("got") == 2


def test_a_step_may_have_a_time_limit(lab: SlurmLab) -> None:
    job = started(lab, "srun -t 1 true")
    lab.wait(job)
    # The shortest limit is a minute, as in Slurm.
    assert steps(lab, job)[0]["time_limit_s"] == 60


# --- kill -9 of the daemon --------------------------------------------------------------------------------


def test_steps_survive_the_daemon(own_lab: SlurmLab) -> None:
    lab = own_lab
    text = """
srun -n2 bash -c 'echo $$ > pid-$SLURM_PROCID; touch up-$SLURM_PROCID
  await go; exit $((SLURM_PROCID * 6))'; echo code $?
touch first-over
srun echo second
"""
    job = started(lab, text)
    wait_until(lambda: (lab.work / "up-0").exists() and (lab.work / "up-1").exists(), what="the tasks")
    tasks = [int(lab.text(f"pid-{number}")) for number in (0, 1)]
    lab.kill_daemon()
    # The step ends while there is no daemon, and the next one begins when there is one again.
    (lab.work / "go").touch()
    wait_until(lambda: not any(map(is_alive, tasks)), what="the tasks to end")
    lab.start()
    lab.wait(job)
    assert lab.text(f"{job}.out") == f"srun: error: {HOST}: task 1: Exited with exit code 6\ncode 6\nsecond\n"
    assert [(row["state"], row["exit_code"]) for row in steps(lab, job)] == [("FAILED", 6), ("COMPLETED", 0)]


def test_a_step_of_a_killed_srun_and_a_killed_daemon_ends_once(own_lab: SlurmLab) -> None:
    lab = own_lab
    text = "srun bash -c 'echo $PPID $$ > pids; exec sleep 600' & await go"
    job = started(lab, text)
    wait_until(lambda: (lab.work / "pids").exists() and (lab.work / "pids").read_text().endswith("\n"), what="the task")
    srun, task = map(int, lab.text("pids").split())
    lab.kill_daemon()
    os.kill(srun, signal.SIGKILL)
    lab.start()
    wait_until(lambda: states(lab, job) == ["CANCELLED"] and not is_alive(task), what="the step to end")
    assert lab.state(job) == "RUNNING"
    (lab.work / "go").touch()
    lab.wait(job)
    assert (lab.state(job), states(lab, job)) == ("COMPLETED", ["CANCELLED"])


@pytest.mark.parametrize(
    "step", ["commit", "reconcile", *(pytest.param(step, marks=pytest.mark.nightly) for step in ("apply", "reply"))]
)
def test_a_step_is_begun_once_whenever_the_daemon_dies(own_lab: SlurmLab, step: str) -> None:
    lab = own_lab
    job = started(lab, "await go; srun bash -c 'echo ran >> ran'")
    lab.wait_state(job, "RUNNING")
    lab.type("gpusched daemon stop")
    # Dies at the given step of one of the ticks that record the step.
    lab.start(GPUSCHED_CRASH_AT=f"{step}:3")
    (lab.work / "go").touch()
    lab.outlast(job, "COMPLETED")
    assert lab.text("ran") == "ran\n"
    assert [(row["state"], row["exit_code"]) for row in steps(lab, job)] == [("COMPLETED", 0)]


# --- against Slurm's own ----------------------------------------------------------------------------------


def test_the_steps_of_the_golden_job_are_recorded_like_slurms(lab: SlurmLab) -> None:
    """Golden cases 230 and 250: 62.0 COMPLETED 0:0, 62.1 FAILED 5:0, the job COMPLETED."""
    job = lab.submit("-t 5 --wrap 'srun -n1 true; srun -n1 bash -c \"exit 5\"; exit 0'")
    lab.wait(job)
    assert lab.state(job) == "COMPLETED"
    rows = [(one["name"], one["state"], one["exit_code"], one["signal"]) for one in steps(lab, job)]
    assert rows == [("true", "COMPLETED", 0, None), ("bash", "FAILED", 5, None)]
