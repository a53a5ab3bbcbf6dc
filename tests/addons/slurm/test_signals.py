"""Signals, notices and requeues as scripts written for Slurm count on: real jobs and steps."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_lab import SlurmLab
from support import wait_until

from gpusched.client import DaemonConnection

CHECKPOINTS = """
import os, signal, subprocess, sys, time
def save(number, frame):
    at = time.time()
    job = os.environ["SLURM_JOB_ID"]
    if os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = os.environ["SLURM_ARRAY_JOB_ID"] + "_" + os.environ["SLURM_ARRAY_TASK_ID"]
    print("saving", flush=True)
    open(f"noticed-{job}", "a").write(f"{at}\\n")
    done = subprocess.run(["scontrol", "requeue", job])
    print("requeue", done.returncode, flush=True)
    sys.exit(-1)
def stay(number, frame):
    print("bypassing", signal.Signals(number).name, flush=True)
signal.signal(signal.SIGUSR2, save)
signal.signal(signal.SIGTERM, stay)
signal.signal(signal.SIGCONT, stay)
run = os.environ.get("SLURM_RESTART_COUNT", "unset")
print("run", run, "of", os.environ["SLURM_JOB_ID"], flush=True)
open(f"up-{os.environ['SLURM_JOB_ID']}-{run}", "w")
if run != "unset":
    sys.exit(0)
while True:
    time.sleep(60)
"""
"""As submitit's executor: at USR2 it saves, requeues its own job and exits with 255; TERM and CONT are ignored."""
SCRIPT = "#!/bin/bash\nexport SUBMITIT_EXECUTOR=slurm\nsrun --unbuffered {python} checkpoints.py\n"


def prepared(lab: SlurmLab, name: str = "submit.sh") -> str:
    (lab.work / "checkpoints.py").write_text(CHECKPOINTS)
    (lab.work / name).write_text(SCRIPT.format(python=sys.executable))
    return name


def api(lab: SlurmLab, method: str, path: str, body: Any = None) -> dict[str, Any]:
    with DaemonConnection(str(lab.home / "run" / "api.sock")) as client:
        return dict(client.call(method, path, body))


def up(lab: SlurmLab, job: str, run: str = "unset") -> None:
    wait_until((lab.work / f"up-{job}-{run}").exists, what=f"run {run} of job {job}")


def steps(lab: SlurmLab, job: str) -> list[tuple[int, str]]:
    return [(row["run"], row["state"]) for row in api(lab, "GET", f"/v1/steps?ids={job}&all_runs=1")["steps"]]


def check_requeued(lab: SlurmLab, job: str) -> dict[str, Any]:
    """A job that ran twice, at once, under one id, and was never taken for failed."""
    lab.wait(job)
    found = lab.job(job)
    assert (found["state"], found["restarts"], found["failures"]) == ("COMPLETED", 1, 0)
    first, second = found["runs"]
    assert (first["outcome"], first["reason"], second["outcome"]) == ("PREEMPTED", "Requeued", "COMPLETED")
    # Not after two minutes, as in Slurm, and without a backoff.
    assert second["start_at"] - first["end_at"] < 60
    assert not [one for one in found["events"] if "FAILED" in one["text"]]
    assert [run for run, _ in steps(lab, job)] == [1, 2]
    return dict(found)


def test_a_step_that_requeues_its_own_job_runs_again_at_once(lab: SlurmLab) -> None:
    job = lab.submit(f"-t 5 --open-mode=append -o again-%j.out {prepared(lab)}")
    up(lab, job)
    api(lab, "POST", "/v1/jobs/cancel", {"ids": [job], "signal": int(signal.SIGUSR2), "to": "steps"})
    check_requeued(lab, job)
    text = lab.text(f"again-{job}.out")
    assert text.startswith(f"run unset of {job}\nsaving\n")
    assert text.endswith(f"run 1 of {job}\n")
    assert text.count(" DUE TO JOB REQUEUE ***") <= 1


def test_the_same_script_runs_again_whatever_became_of_the_file(lab: SlurmLab) -> None:
    job = lab.submit(f"-t 5 --open-mode=append -o same-%j.out {prepared(lab, 'gone.sh')}")
    up(lab, job)
    (lab.work / "gone.sh").unlink()
    api(lab, "POST", "/v1/jobs/cancel", {"ids": [job], "signal": int(signal.SIGUSR2), "to": "steps"})
    check_requeued(lab, job)


@pytest.mark.parametrize(("mode", "has_first"), [("append", True), ("truncate", False)])
def test_the_output_of_the_first_run_stays_only_if_appended_to(lab: SlurmLab, mode: str, has_first: bool) -> None:
    (lab.work / "rq.sh").write_text(
        "#!/bin/bash\necho restart=$SLURM_RESTART_COUNT\n"
        '[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID\nsleep 1\n'
    )
    job = lab.submit(f"-t 5 -o rq-{mode}-%j.txt --open-mode={mode} --requeue rq.sh")
    lab.wait(job)
    text = lab.text(f"rq-{mode}-{job}.txt")
    assert ("restart=\n" in text) is has_first
    assert text.endswith("restart=1\n")


@pytest.mark.parametrize("ending", ["exit 0", "exit 3", "kill -9 $$", "sleep 60"])
def test_a_script_that_requeues_its_job_may_end_as_it_likes(lab: SlurmLab, ending: str) -> None:
    name = f"ends-{ending.replace(' ', '').strip('$')}.sh"
    (lab.work / name).write_text(
        f'#!/bin/bash\n[ -n "$SLURM_RESTART_COUNT" ] && exit 0\nscontrol requeue $SLURM_JOB_ID\n{ending}\n'
    )
    job = lab.submit(f"-t 5 {name}")
    lab.wait(job)
    found = lab.job(job)
    assert (found["state"], found["restarts"], found["failures"]) == ("COMPLETED", 1, 0)
    assert found["runs"][0]["outcome"] == "PREEMPTED"


def test_a_task_of_an_array_is_requeued_alone(lab: SlurmLab) -> None:
    array = lab.submit(f"-t 5 --array=0-1 --open-mode=append -o arr-%A_%a.out {prepared(lab)}")
    tasks = [f"{array}_{task}" for task in (0, 1)]
    wait_until(lambda: all(lab.state(task) == "RUNNING" for task in tasks), what="both tasks")
    wait_until(lambda: len(api(lab, "GET", f"/v1/steps?ids={array}&open=1")["steps"]) == 2, what="both steps")
    numbers = [str(row["job_id"]) for row in api(lab, "GET", f"/v1/steps?ids={array}&open=1")["steps"]]
    for number in numbers:
        up(lab, number)
    api(lab, "POST", "/v1/jobs/cancel", {"ids": [tasks[1]], "signal": int(signal.SIGUSR2), "to": "steps"})
    check_requeued(lab, tasks[1])
    assert (lab.state(tasks[0]), lab.job(tasks[0])["restarts"]) == ("RUNNING", 0)
    lab.ok(f"gcancel {array}")
    lab.wait(array)


# --- the promised second ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_daemon_alive", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_the_notice_reaches_the_steps_at_the_promised_second(own_lab: SlurmLab, is_daemon_alive: bool) -> None:
    lab = own_lab
    (lab.work / "checkpoints.py").write_text(
        CHECKPOINTS.replace('done = subprocess.run(["scontrol", "requeue", job])', "sys.exit(7)")
    )
    (lab.work / "n.sh").write_text(f"#!/bin/bash\nsrun {sys.executable} checkpoints.py\necho step $?\nexit 0\n")
    # The limit is a minute: the notice is due after 12 s.
    job = lab.submit("-t 1 --signal=USR2@48 -o n-%j.out n.sh")
    up(lab, job)
    began = float(lab.job(job)["runs"][-1]["start_at"])
    if not is_daemon_alive:
        lab.kill_daemon()
    noticed = lab.work / f"noticed-{job}"
    wait_until(lambda: noticed.exists() and noticed.read_text().endswith("\n"), what="the notice")
    late_s = float(noticed.read_text()) - (began + 12)
    # Far from the minute within which Slurm sends it; a loaded machine is late.
    assert 0 <= late_s < 30, late_s
    if not is_daemon_alive:
        lab.start()
    lab.wait(job)
    assert (lab.state(job), steps(lab, job)) == ("COMPLETED", [(1, "FAILED")])
    assert lab.text(f"n-{job}.out").endswith("step 7\n")


def test_the_batch_shell_alone_gets_a_notice_with_b(lab: SlurmLab) -> None:
    text = "trap 'echo shell told; touch told-b' USR2; srun bash -c 'trap \"echo step told\" USR2; touch up-b; "
    text += "while [ ! -e told-b ]; do sleep 0.05; done' & while [ ! -e told-b ]; do sleep 0.05; done; wait"
    (lab.work / "b.sh").write_text(f"#!/bin/bash\n{text}\n")
    job = lab.submit("-t 1 --signal=B:USR2@57 -o b-%j.out b.sh")
    lab.wait(job)
    assert lab.text(f"b-{job}.out") == "shell told\n"


@pytest.mark.parametrize(
    ("to", "told"),
    [("steps", {"step"}), ("main", {"shell"}), ("full", {"shell", "step", "child"})],
)
def test_a_signal_goes_to_steps_shell_or_all(lab: SlurmLab, to: str, told: set[str]) -> None:
    text = f"""
listen() {{ trap "echo $1 >> told-{to}" USR1; touch up-{to}-$1; while [ ! -e go-{to} ]; do sleep 0.05; done; }}
export -f listen
srun bash -c 'listen step' &
bash -c 'listen child' &
listen shell
wait
wait
"""
    (lab.work / f"to-{to}.sh").write_text(f"#!/bin/bash\n{text}\n")
    job = lab.submit(f"-t 5 -o to-{to}.out to-{to}.sh")
    for name in ("step", "child", "shell"):
        wait_until((lab.work / f"up-{to}-{name}").exists, what=name)
    api(lab, "POST", "/v1/jobs/cancel", {"ids": [job], "signal": int(signal.SIGUSR1), "to": to})
    path = lab.work / f"told-{to}"
    wait_until(lambda: path.exists() and set(path.read_text().split()) == told, what=f"{told}")
    (lab.work / f"go-{to}").touch()
    lab.wait(job)
    assert set(path.read_text().split()) == told
    assert lab.state(job) == "COMPLETED"


def test_a_step_is_cancelled_and_its_job_goes_on(lab: SlurmLab) -> None:
    (lab.work / "c.sh").write_text("#!/bin/bash\nsrun bash -c 'touch up-c; exec sleep 600'; echo code $?\nsrun true\n")
    job = lab.submit("-t 5 -o c-%j.out c.sh")
    wait_until((lab.work / "up-c").exists, what="the step")
    assert api(lab, "POST", "/v1/steps/cancel", {"id": job, "step": 0})["cancelled"] == [f"{job}.0"]
    lab.wait(job)
    (first, second) = api(lab, "GET", f"/v1/steps?ids={job}")["steps"]
    assert (first["state"], first["signal"], first["cancel_uid"]) == ("CANCELLED", 15, os.getuid())
    assert (second["state"], lab.state(job)) == ("COMPLETED", "COMPLETED")
    assert "code 143\n" in lab.text(f"c-{job}.out")


def test_a_stubborn_step_is_killed_after_the_grace(lab: SlurmLab) -> None:
    (lab.work / "d.sh").write_text(
        "#!/bin/bash\nsrun bash -c 'trap \"\" TERM; touch up-d; while :; do sleep 0.1; done'; echo code $?\n"
    )
    job = lab.submit("-t 5 -o d-%j.out d.sh")
    wait_until((lab.work / "up-d").exists, what="the step")
    api(lab, "POST", "/v1/steps/cancel", {"id": job, "step": 0})
    lab.wait(job)
    assert "code 137\n" in lab.text(f"d-{job}.out")


# --- kill -9 in between -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nth", "step"),
    [
        (2, "commit"),
        (1, "reconcile"),
        *(pytest.param(nth, "commit", marks=pytest.mark.nightly) for nth in (1, 3)),
        *(pytest.param(nth, "reconcile", marks=pytest.mark.nightly) for nth in (2, 3)),
    ],
)
def test_a_requeue_from_inside_survives_the_daemon(own_lab: SlurmLab, step: str, nth: int) -> None:
    """The daemon dies around the tick that records the requeue; the job exits with 255 as soon as it is told of it."""
    lab = own_lab
    name = prepared(lab)
    path = lab.work / "checkpoints.py"
    once = 'done = subprocess.run(["scontrol", "requeue", job])'
    patient = f"{once}\n    while done.returncode:\n        time.sleep(0.1)\n        {once}"
    path.write_text(path.read_text().replace(once, patient))
    job = lab.submit(f"-t 5 --open-mode=append -o k-%j.out {name}")
    up(lab, job)
    (supervisor,) = parents_of(lab, job)
    lab.ok("gpusched daemon stop")
    lab.start(GPUSCHED_CRASH_AT=f"{step}:{nth}")
    for process in tasks_below(supervisor):
        os.kill(process, signal.SIGUSR2)
    lab.outlast(job, "COMPLETED", "FAILED")
    check_requeued(lab, job)


def parents_of(lab: SlurmLab, job: str) -> list[int]:
    return [int(row["pid"]) for row in lab.job(job)["runs"]]


def tasks_below(pid: int) -> list[int]:
    """Processes of steps below one."""
    found, level = [], [pid]
    while level:
        below = []
        for parent in level:
            try:
                below += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
            except OSError:
                continue
        found += below
        level = below
    return [one for one in found if b"SLURM_STEP_ID=" in Path(f"/proc/{one}/environ").read_bytes()]


@pytest.mark.parametrize("line", ["scontrol requeue $SLURM_JOB_ID", "gctl requeue $SLURM_JOB_ID"])
def test_a_requeue_from_inside_outlives_the_end_that_it_causes(lab: SlurmLab, line: str) -> None:
    name = line.split()[0]
    path = lab.bin / "gctl"
    path.write_text(f"#!{sys.executable}\nfrom gpusched.cli.gctl import main\nraise SystemExit(main())\n")
    path.chmod(0o755)
    # With a trap, not ignored: what the shell starts would inherit that.
    (lab.work / f"out-{name}.sh").write_text(
        f'#!/bin/bash\n[ -n "$SLURM_RESTART_COUNT" ] && exit 0\ntrap : TERM\n{line}\n'
        f"echo $? > code-{name}-$SLURM_JOB_ID\n"
    )
    job = lab.submit(f"-t 5 out-{name}.sh")
    lab.wait(job)
    assert lab.text(f"code-{name}-{job}") == "0\n"
    assert (lab.state(job), lab.job(job)["restarts"]) == ("COMPLETED", 1)
