"""Ranks that gsub starts, on one machine: what each gets, where it writes, and what the first bad one does."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from shell import Shell
from support import claim_ports, is_alive, wait_until

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK NNODES SLURM_PROCID SLURM_LOCALID"
SHOW = "echo " + " ".join(f"${name}" for name in NAMES.split())


def output(own: Shell, job: int = 1) -> str:
    return (own.work / f"gpusched-{job}.out").read_text()


def shown(own: Shell, job: str = "1") -> dict[str, Any]:
    (found,) = json.loads(own.ok("gshow", "--json", job))["jobs"]
    return dict(found)


def test_each_task_is_a_rank_of_its_own(own: Shell) -> None:
    own.ok("gsub", "-W", "--tasks-per-node", "3", "--wrap", SHOW)
    assert sorted(output(own).splitlines()) == [f"{rank} {rank} 3 3 0 0 1 {rank} {rank}" for rank in range(3)]


@pytest.mark.parametrize("words", [["-n", "3"], ["--ntasks", "3"], ["--ntasks-per-node", "3"]])
def test_ranks_know_where_to_meet_and_their_step(own: Shell, words: list[str]) -> None:
    names = "MASTER_ADDR SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_STEP_ID SLURM_STEP_NUM_TASKS SLURM_GTIDS"
    own.ok("gsub", "-W", *words, "--wrap", "echo $MASTER_PORT " + " ".join(f"${name}" for name in names.split()))
    (line,) = set(output(own).splitlines())
    port, rest = line.split(" ", 1)
    assert rest == "127.0.0.1 3 3 0 3 0,1,2"
    assert 20_000 <= int(port) < 32_000


def test_a_rank_sees_all_gpus_of_the_job_unless_it_asked_for_its_own(own: Shell) -> None:
    show = "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES"
    own.ok("gsub", "-W", "-g", "2", "--tasks-per-node", "2", "--wrap", show)
    own.ok("gsub", "-W", "-n", "2", "--gpus-per-task", "1", "--wrap", show)
    assert sorted(output(own, 1).splitlines()) == ["0 0,1", "1 0,1"]
    assert sorted(output(own, 2).splitlines()) == ["0 0", "1 1"]


@pytest.mark.parametrize("words", [[], ["--no-ranks", "-n", "2"]])
def test_a_job_without_ranks_is_one_process_without_their_variables(own: Shell, words: list[str]) -> None:
    own.ok("gsub", "-W", *words, "--wrap", "env")
    names = [line.partition("=")[0] for line in output(own).splitlines()]
    assert names.count("SLURM_PROCID") == 1
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} & set(names)


def test_a_script_written_for_slurm_starts_its_tasks_itself(own: Shell) -> None:
    (own.work / "job.sh").write_text("#!/bin/sh\n#SBATCH -n 2\necho once $RANK\nsrun sh -c 'echo task $SLURM_PROCID'\n")
    own.ok("gsub", "-W", "job.sh")
    assert sorted(output(own).splitlines()) == ["once", "task 0", "task 1"]
    own.ok("gsub", "-W", "--ranks", "job.sh", "-o", "x")
    assert sorted(output(own, 2).splitlines())[:2] == ["once 0", "once 1"]


def test_a_job_submitted_by_a_rank_does_not_take_itself_for_one(own: Shell) -> None:
    show = "echo ${RANK-none} ${MASTER_PORT-none} ${GPUSCHED_TASK-none}"
    own.ok("gsub", "-W", "-n", "1", "--", *own.argv("gsub", "-W", "-o", "inner.out", "--wrap", show))
    assert (own.work / "inner.out").read_text() == "none none none\n"


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        ("exit 7", 7, "exit code 7 of rank 1 on lab1"),
        ("kill -SEGV $$", 128 + 11, "ended by signal 11 of rank 1 on lab1"),
    ],
)
def test_the_first_bad_rank_ends_the_others_and_is_the_job_s_end(own: Shell, bad: str, code: int, text: str) -> None:
    await_all = "while [ $(ls pid.* | wc -l) -lt 3 ]; do sleep 0.05; done"
    line = f"echo $$ > pid.$RANK; {await_all}; [ $RANK = 1 ] && {bad}; sleep 600"
    done = own.type("gsub", "-W", "-n", "3", "--wrap", line)
    assert done.code == code
    pids = [int((own.work / f"pid.{rank}").read_text()) for rank in range(3)]
    assert not any(map(is_alive, pids))
    job = shown(own)
    assert (job["state"], job["reason_text"]) == ("FAILED", text)
    assert "rank 1 ended with" in output(own)


def test_the_others_get_the_notice_and_the_grace_of_the_job(own: Shell) -> None:
    (own.work / "rank.py").write_text(
        "#!/usr/bin/env python3\n"
        "import os, pathlib, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "def save(number, frame):\n"
        "    time.sleep(0.5)\n"
        "    pathlib.Path('saved.' + rank).write_text(str(number))\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "pathlib.Path('up.' + rank).touch()\n"
        "while rank == '0' and len(list(pathlib.Path('.').glob('up.*'))) < 3:\n"
        "    time.sleep(0.05)\n"
        "if rank == '0':\n"
        "    sys.exit(4)\n"
        "time.sleep(600)\n"
    )
    done = own.type("gsub", "-W", "-n", "3", "--signal", "USR1", "--grace", "60", "rank.py")
    assert done.code == 4
    assert sorted(path.name for path in own.work.glob("saved.*")) == ["saved.1", "saved.2"]
    assert (own.work / "saved.1").read_text() == "10"


def test_a_rank_that_ends_well_leaves_the_others_alone(own: Shell) -> None:
    own.ok("gsub", "-W", "-n", "2", "--wrap", "[ $RANK = 0 ] || { sleep 1; echo late; }")
    assert output(own) == "late\n"


def test_each_rank_writes_a_file_of_its_own_and_reads_one(own: Shell) -> None:
    for rank in range(2):
        (own.work / f"in.{rank}").write_text(f"for {rank}\n")
    own.ok(
        "gsub", "-W", "-n", "2", "-o", "out/%t.txt", "-e", "err.txt", "-i", "in.%t", "--wrap", "cat; echo e$RANK >&2"
    )
    assert [(own.work / f"out/{rank}.txt").read_text() for rank in range(2)] == ["for 0\n", "for 1\n"]
    assert sorted((own.work / "err.txt").read_text().splitlines()) == ["e0", "e1"]


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(own: Shell) -> None:
    (own.work / "out.1").mkdir()
    assert own.type("gsub", "-W", "-n", "2", "-o", "out.%t", "--wrap", "echo $$ > pid; sleep 600").code != 0
    job = shown(own)
    assert job["reason"] == "JobLaunchFailure"
    assert "out.1: Is a directory" in job["reason_text"]


def test_a_cancel_ends_every_rank(own: Shell) -> None:
    job = own.submit("-n", "2", "--wrap", "touch up.$RANK; exec sleep 600")
    wait_until(lambda: len(list(own.work.glob("up.*"))) == 2, what="both ranks to run")
    own.ok("gcancel", job)
    own.type("gwait", job)
    assert shown(own)["state"] == "CANCELLED"


def test_a_port_that_another_program_has_costs_no_attempt(own: Shell) -> None:
    first = claim_ports(range(16))
    ports = f"[cluster]\nmaster_ports = '{first}-{first + 15}'\n"
    (own.home / "config.toml").write_text(f"[node]\nname = 'lab1'\ncpus = 8\n{ports}")
    taken = [socket.socket(family) for family in (socket.AF_INET, socket.AF_INET6)]
    try:
        # The first job begins to look at the second port.
        taken[0].bind(("0.0.0.0", first + 1))
        taken[0].listen()
        own.ok("gsub", "-W", "-n", "2", "-o", "meet.out", "--open-mode", "append", "--wrap", "echo $MASTER_PORT")
    finally:
        for one in taken:
            one.close()
    assert (own.work / "meet.out").read_text() == f"{first + 2}\n{first + 2}\n"
    job = shown(own)
    assert (job["state"], job["failures"]) == ("COMPLETED", 0)
    assert f"port {first + 1}, where its ranks were to meet, is in use by another program" in own.ok("gshow", "1")


def test_files_of_ranks_are_not_rotated(own: Shell) -> None:
    done = own.type("gsub", "-n", "2", "-o", "%t.out", "--log-max", "10M", "--", "true")
    assert done.code == 2
    assert "--log-max rotates the file of a node, and %t gives each rank its own" in done.err


def test_a_step_of_srun_is_not_taken_for_the_ranks(own: Shell) -> None:
    line = "[ $RANK = 0 ] || exit 0; srun --overlap -n 1 sh -c 'echo step $SLURM_STEP_ID'; echo rank in $SLURM_STEP_ID"
    own.ok("gsub", "-W", "-n", "2", "--wrap", line)
    assert output(own) == "step 1\nrank in 0\n"


def test_glogs_of_one_machine_labels_ranks_only_if_each_has_a_file(own: Shell) -> None:
    own.ok("gsub", "-W", "-n", "2", "--wrap", "echo same")
    own.ok("gsub", "-W", "-n", "2", "-o", "%j.%t", "--wrap", "echo mine $RANK")
    own.ok("gsub", "-W", "--", "echo", "plain")
    assert own.ok("glogs", "1") == "same\nsame\n"
    assert own.ok("glogs", "2") == "[0] mine 0\n[1] mine 1\n"
    assert own.ok("glogs", "-f", "2") == "[0] mine 0\n[1] mine 1\n"
    assert own.ok("glogs", "--rank", "1", "2") == "mine 1\n"
    assert own.ok("glogs", "--rank", "0", "3") == "plain\n"
    assert "job 3 has no rank 1" in own.type("glogs", "--rank", "1", "3").err
    assert own.ok("glogs", "2", "3").splitlines() == [
        *("[2 wrap] [0] mine 0", "[2 wrap] [1] mine 1"),
        "[3 echo] plain",
    ]
