"""srun --jobid from outside of that job: its tasks run in the job, as from the job's own script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from slurm_lab import SlurmLab
from support import is_alive, wait_until
from test_salloc import GRANTED, shown_at_terminal, started

EXPIRED = "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job"


@pytest.fixture
def held(lab: SlurmLab) -> Iterator[str]:
    """A job of two tasks, four cores and two GPUs that `salloc --no-shell` holds."""
    done = lab.type("salloc --no-shell -n 2 -c 2 --gres=gpu:2 -J held")
    found = GRANTED.search(done.err)
    assert found, done
    yield found[1]
    lab.type(f"scancel {found[1]}")
    lab.wait(found[1])


def steps(lab: SlurmLab, job_id: str) -> dict[str, str]:
    lines = lab.ok(f"sacct -nP -j {job_id} -o JobID,State").split()
    return dict(line.split("|") for line in lines if "." in line and not line.startswith(f"{job_id}.batch"))


def test_tasks_run_in_the_job_with_its_resources(lab: SlurmLab, held: str) -> None:
    line = (
        "bash -c 'echo $SLURM_PROCID $SLURM_JOB_ID.$SLURM_STEP_ID $SLURM_JOB_GPUS $CUDA_VISIBLE_DEVICES $GPUSCHED_RUN'"
    )
    gpus = ",".join(str(gpu["index"]) for gpu in lab.job(held)["gpus"])
    done = lab.type(f"srun --jobid={held} {line}")
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == [f"{task} {held}.0 {gpus} {gpus} {held}.1" for task in range(2)]
    done = lab.type(f"srun --jobid={held} -n1 --gpus=1 {line}")
    assert re.fullmatch(rf"0 {held}.1 {gpus} \d {held}.1\n", done.out)
    assert set(steps(lab, held).values()) == {"COMPLETED"}
    assert lab.state(held) == "RUNNING"


def test_streams_folder_environment_and_exit_code_are_those_of_the_client(lab: SlurmLab, held: str) -> None:
    (lab.work / "sub").mkdir(exist_ok=True)
    line = f"cd sub && printf 'in\\n' | MINE=1 srun --jobid={held} -n1 sh -c 'cat; pwd; echo $MINE >&2; umask; exit 9'"
    done = lab.type(f"umask 027; {line}")
    assert (done.code, done.out) == (9, f"in\n{lab.work}/sub\n0027\n")
    assert done.err == "1\nsrun: error: node1: task 0: Exited with exit code 9\n"


def test_a_note_says_that_there_is_no_pmi_as_from_within_the_job(lab: SlurmLab, held: str) -> None:
    notes = {
        lab.type(line).err
        for line in (
            f"srun --jobid={held} --mpi=pmix -n1 true",
            f"SLURM_JOB_ID={held} SLURM_MPI_TYPE=pmix srun -n1 true",
        )
    }
    (note,) = notes
    assert note.startswith("srun: --mpi=pmix has no effect: there is no PMI here")
    assert lab.type(f"srun --jobid={held} --mpi=none -n1 true").err == ""


def test_much_output_and_input_arrive_whole(lab: SlurmLab, held: str) -> None:
    done = lab.type(f"head -c 3000000 /dev/zero | srun --jobid={held} -n1 cat | wc -c")
    assert done.out.strip() == "3000000"


def test_the_variable_does_as_the_option(lab: SlurmLab, held: str) -> None:
    done = lab.type(f"SLURM_JOB_ID={held} srun -n1 sh -c 'echo $GPUSCHED_JOB_ID'")
    assert (done.code, done.out, done.err) == (0, f"{held}\n", "")


def test_a_shell_gets_the_terminal(lab: SlurmLab, held: str) -> None:
    code, shown = shown_at_terminal(
        lab,
        f"env PS1= srun --jobid={held} --pty sh",
        b"test -t 0 && tty && echo at-$((1+1)) $SLURM_JOB_ID.$SLURM_STEP_ID\nexit 5\n",
    )
    assert code == 5, shown
    assert f"at-2 {held}.0\n" in shown
    assert "/dev/pts/" in shown
    assert lab.state(held) == "RUNNING"


def test_a_step_that_wants_gpus_in_use_waits_unless_it_overlaps(lab: SlurmLab, held: str) -> None:
    first = started(lab, f"srun --jobid={held} -n1 --gpus=2 sh -c 'echo up; read line'", stdin=-1)
    assert first.stdout is not None
    assert first.stdout.readline() == b"up\n"
    done = lab.type(f"srun --jobid={held} -n1 --gpus=2 -I true")
    assert (done.code, done.err) == (
        1,
        f"srun: error: Unable to create step for job {held}: Requested nodes are busy\n",
    )
    assert lab.type(f"srun --jobid={held} -n1 --gpus=2 --overlap echo shared").out == "shared\n"
    assert first.communicate(b"go\n", timeout=60)[1] == b""
    assert first.returncode == 0


def test_from_inside_another_job_the_step_belongs_to_the_named_one(lab: SlurmLab, held: str) -> None:
    line = f"srun --jobid={held} -n1 sh -c 'echo $SLURM_JOB_ID $SLURM_JOB_NAME $GPUSCHED_RUN [$SLURM_ARRAY_TASK_ID]'"
    job = lab.submit(f'-J outer --array=7 -o outer.txt --wrap "{line.replace("$", chr(92) + "$")}"')
    lab.wait(job)
    assert lab.text("outer.txt") == f"{held} held {held}.1 []\n"


def test_a_task_of_an_array_is_named_by_its_index(lab: SlurmLab) -> None:
    job = lab.submit("--array=3,5 --wrap 'sleep 600'")
    for task in (3, 5):
        lab.wait_state(f"{job}_{task}", "RUNNING")
        done = lab.type(f"srun --jobid={job}_{task} sh -c 'echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID'")
        assert (done.code, done.out, done.err) == (0, f"{job} {task}\n", "")
    lab.type(f"scancel {job}")


@pytest.mark.parametrize("job_id", ["0x1", "1_", "_1", "@", "p1", "1,2", "1.0", "-1", "1_[1-2]"])
def test_what_is_no_job_id_is_refused(lab: SlurmLab, job_id: str) -> None:
    done = lab.type(f"srun --jobid='{job_id}' true")
    assert (done.code, done.out, done.err) == (1, "", f'srun: error: Invalid numeric value "{job_id}" for --jobid.\n')


def test_jobs_that_do_not_run_are_refused_in_slurms_words(own_lab: SlurmLab) -> None:
    running = own_lab.submit("-c 8 --wrap 'sleep 600'")
    own_lab.wait_state(running, "RUNNING")
    waiting = own_lab.submit("-c 8 --wrap true")
    missing = str(int(waiting) + 1)
    own_lab.ok(f"scontrol suspend {running}")
    own_lab.wait_state(running, "SUSPENDED")
    told = {
        waiting: f"Unable to confirm allocation for job {waiting}: Job is pending execution\n"
        f"srun: job {waiting} is PENDING; ",
        missing: f"Unable to confirm allocation for job {missing}: Invalid job id specified\n{EXPIRED} {missing}\n",
        running: f"Unable to create step for job {running}: Requested operation is presently disabled\n"
        f"srun: job {running} is SUSPENDED; ",
    }
    for job_id, text in told.items():
        for line in (f"srun --jobid={job_id} true", f"SLURM_JOB_ID={job_id} srun true"):
            done = own_lab.type(line)
            assert (done.code, done.out) == (1, ""), done
            assert done.err.startswith(f"srun: error: {text}"), done.err
    own_lab.ok(f"scancel {running}")
    own_lab.wait(running)
    done = own_lab.type(f"srun --jobid={running} true")
    assert done.code == 1
    assert done.err.startswith(f"srun: error: SLURM job {running} has expired.\n{EXPIRED} {running}\n")


def waiting_step(lab: SlurmLab, held: str) -> tuple[subprocess.Popen[bytes], int]:
    """A client whose task ignores everything, and the task's pid."""
    client = started(lab, f"srun --jobid={held} -n1 bash -c \"trap '' HUP TERM INT; echo \\$\\$; exec sleep 600\"")
    assert client.stdout is not None
    return client, int(client.stdout.readline())


def test_the_end_of_the_job_ends_its_tasks_and_the_client(lab: SlurmLab) -> None:
    job = lab.submit("-J brief --wrap 'while [ ! -e brief-end ]; do sleep 0.05; done'")
    lab.wait_state(job, "RUNNING")
    client, task = waiting_step(lab, job)
    (lab.work / "brief-end").touch()
    assert client.wait(60) != 0
    lab.wait(job)
    found = lab.job(job)
    assert (found["state"], found["exit_code"], found["reason"]) == ("COMPLETED", 0, "None")
    assert not is_alive(task)
    client.communicate()


def test_a_killed_client_ends_its_tasks_and_nothing_else(lab: SlurmLab, held: str) -> None:
    client, task = waiting_step(lab, held)
    client.kill()
    client.communicate()
    wait_until(lambda: not is_alive(task), what="the task to be gone")
    wait_until(lambda: "RUNNING" not in steps(lab, held).values(), what="the step to have ended")
    assert lab.state(held) == "RUNNING"
    assert lab.type(f"srun --jobid={held} -n1 echo still").out == "still\n"


def test_a_killed_daemon_costs_neither_the_job_nor_the_session(own_lab: SlurmLab) -> None:
    found = GRANTED.search(own_lab.type("salloc --no-shell -c 2").err)
    assert found
    client = started(own_lab, f"srun --jobid={found[1]} -n1 sh -c 'echo up; read line; echo $line; exit 4'", stdin=-1)
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    status = own_lab.ok("gpusched daemon status --json")
    pid = int(re.findall(r'"pid": ?(\d+)', status)[0])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the daemon to be gone")
    client.stdin.write(b"through\n")
    client.stdin.flush()
    assert client.stdout.readline() == b"through\n"
    # The next command starts a daemon, which the step reports to.
    own_lab.ok("squeue")
    out, err = client.communicate(timeout=60)
    assert (client.returncode, out, err) == (4, b"", b"srun: error: node1: task 0: Exited with exit code 4\n")
    assert steps(own_lab, found[1]) == {f"{found[1]}.0": "FAILED"}
    assert own_lab.state(found[1]) == "RUNNING"


def test_signals_to_the_client_reach_the_tasks_once(lab: SlurmLab, held: str) -> None:
    told = "trap 'echo told' USR1; trap 'exit 7' INT; echo up; while :; do sleep 0.05; done"
    client = started(lab, f'srun --jobid={held} -n1 bash -c "{told}"')
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    client.send_signal(signal.SIGUSR1)
    assert client.stdout.readline() == b"told\n"
    client.send_signal(signal.SIGINT)
    assert client.communicate(timeout=60)[0] == b""
    assert client.returncode == 7


def test_a_job_of_gsub_takes_steps_as_well(lab: SlurmLab) -> None:
    job = lab.ok("gsub --parsable -g 1 -- sleep 600").strip()
    lab.wait_state(job, "RUNNING")
    done = lab.type(f"srun --jobid={job} sh -c 'echo $SLURM_JOB_ID.$SLURM_STEP_ID'")
    assert (done.code, done.out, done.err) == (0, f"{job}.0\n", "")
    lab.ok(f"scancel {job}")
