"""Runs that make room or stand still, with real processes and daemons that die at the worst moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

from gpusched.engine.linux.proctree import read_process

LOOP = "while :; do sleep 0.02; done"
SAVES = f"trap 'echo saved $GPUSCHED_RUN >> $HOME_DIR/saved; exit 7' TERM; echo ready; {LOOP}"
SAVES_WITH_0 = f"trap 'echo saved $GPUSCHED_RUN >> $HOME_DIR/saved; exit 0' TERM; echo ready; {LOOP}"
DONE = 'echo done > "$GPUSCHED_CHECKPOINT_FILE"'
STUBBORN = f"trap '' TERM; echo ready; {LOOP}"
COUNTS = "echo ready; while :; do echo x >> $HOME_DIR/ticks; sleep 0.02; done"


def submit(daemon: Daemon, text: str, **spec: Any) -> str:
    """A shell command that knows the home; waits until it has said that it is ready."""
    env = {"HOME_DIR": str(daemon.home), **spec.pop("env", {})}
    job_id = daemon.submit("/bin/bash", "-c", text, env=env, **spec)
    wait_until(lambda: "ready" in daemon.output(job_id), what="a word from the job")
    return job_id


def ask(daemon: Daemon, action: str, *ids: str) -> dict[str, Any]:
    return daemon.call("POST", f"/v1/jobs/{action}", {"ids": list(ids)})


def wait_run(daemon: Daemon, job_id: str, number: int) -> dict[str, Any]:
    """Wait until a job is in its run of this number."""

    def there() -> bool:
        job = daemon.job(job_id)
        return job["state"] == "RUNNING" and len(started_runs(job)) == number

    wait_until(there, what=f"run {number} of job {job_id}")
    return daemon.job(job_id)


def started_runs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs without those that were revoked before they began, as when a launcher does not answer in time."""
    return [run for run in job["runs"] if not (run["reason_text"] or "").startswith("was not started: ")]


def outcomes(daemon: Daemon, job_id: str) -> list[str | None]:
    return [run["outcome"] for run in started_runs(daemon.job(job_id))]


def order_file(daemon: Daemon, job_id: str) -> Path:
    """Where the orders to a job's first run are written."""
    (record,) = daemon.home.rglob(f"{job_id}.1.record")
    return record.with_suffix(".order")


def is_still(daemon: Daemon, job_id: str) -> bool:
    process = read_process(daemon.pid_of(job_id))
    return process is not None and process.state == "T"


def suspend_within(daemon: Daemon, job_id: str, limit_s: int) -> None:
    """Suspend it, and only then give it a time limit, so that it cannot be over before."""
    ask(daemon, "suspend", job_id)
    wait_until(lambda: is_still(daemon, job_id), what="the job to stand still")
    daemon.call("POST", "/v1/jobs/update", {"ids": [job_id], "changes": {"time_limit_s": limit_s}})


# --- making room ---------------------------------------------------------------------------------------


def test_a_preempted_job_may_save_its_work_within_its_grace(daemon: Daemon) -> None:
    job_id = submit(daemon, SAVES, grace_s=30, retries=1)
    assert ask(daemon, "requeue", job_id)["changed"] == [job_id]
    job = wait_run(daemon, job_id, 2)
    assert (daemon.home / "saved").read_text() == f"saved {job_id}.1\n"
    assert (job["failures"], job["restarts"]) == (0, 1)
    assert outcomes(daemon, job_id) == ["PREEMPTED", None]
    assert job["runs"][0]["exit_code"] == 7


def test_a_job_that_ignores_its_signal_is_killed_after_its_grace_and_not_before(daemon: Daemon) -> None:
    job_id = submit(daemon, STUBBORN, grace_s=1.5)
    began = time.time()
    ask(daemon, "requeue", job_id)
    job = wait_run(daemon, job_id, 2)
    first = job["runs"][0]
    assert first["signal"] == 9
    assert first["end_at"] - began >= 1.5


def test_a_job_that_saves_its_work_and_exits_with_0_runs_again(daemon: Daemon) -> None:
    job_id = submit(daemon, SAVES_WITH_0, grace_s=30, retries=1)
    after = daemon.submit("/bin/true", dependency=f"afterok:{job_id}")
    for run in (2, 3):
        ask(daemon, "requeue", job_id)
        job = wait_run(daemon, job_id, run)
        wait_until(lambda: daemon.output(job_id).count("ready") == 1, what="its trap")
    assert (daemon.home / "saved").read_text() == f"saved {job_id}.1\nsaved {job_id}.2\n"
    assert (outcomes(daemon, job_id), job["failures"]) == (["PREEMPTED", "PREEMPTED", None], 0)
    assert [run["exit_code"] for run in job["runs"]] == [0, 0, None]
    told = "run 1 ended with exit code 0 after it was told to stop for a requeue, which does not complete its job"
    assert any(event["text"].startswith(told) for event in job["events"])
    assert daemon.state(after) == "PENDING"


@pytest.mark.parametrize(
    "text",
    [
        f"trap '{DONE}; exit 0' TERM; echo ready; {LOOP}",
        f"trap 'told=1' TERM; echo ready; until [ $told ]; do sleep 0.02; done; {DONE}",
    ],
    ids=["in its handler", "at its end"],
)
def test_a_job_that_says_within_its_grace_that_it_is_done_is_completed(daemon: Daemon, text: str) -> None:
    job_id = submit(daemon, text, grace_s=30)
    after = daemon.submit("/bin/true", dependency=f"afterok:{job_id}")
    ask(daemon, "requeue", job_id)
    job, _ = daemon.wait(job_id, after)
    assert (job["state"], outcomes(daemon, job_id), daemon.state(after)) == ("COMPLETED", ["COMPLETED"], "COMPLETED")
    assert any("and had said that it was done" in event["text"] for event in job["events"])


def test_a_job_that_requeues_itself_and_exits_with_0_runs_again(daemon: Daemon) -> None:
    gctl = Path(sys.executable).with_name("gctl")
    text = (
        f"echo ready; [ $GPUSCHED_RESTART_COUNT -gt 0 ] && exit 0; {gctl} requeue $GPUSCHED_JOB_ID & "
        "wait $!; echo asked > $HOME_DIR/asked; sleep 600"
    )
    job_id = submit(daemon, f"trap 'exit 0' TERM; {text}", grace_s=30)
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
    assert outcomes(daemon, job_id) == ["PREEMPTED", "COMPLETED"]


def test_a_cancel_within_the_grace_cancels(daemon: Daemon) -> None:
    job_id = submit(daemon, STUBBORN, grace_s=1)
    ask(daemon, "requeue", job_id)
    daemon.wait_state(job_id, "COMPLETING")
    ask(daemon, "cancel", job_id)
    assert daemon.wait(job_id)[0]["state"] == "CANCELLED"
    assert len(daemon.job(job_id)["runs"]) == 1


def test_daemonized_processes_end_before_the_job_runs_again(daemon: Daemon) -> None:
    forked = f"(setsid bash -c 'trap \"\" TERM; echo $$ > $HOME_DIR/forked; {LOOP}' &) ; echo ready; {LOOP}"
    job_id = submit(daemon, forked, grace_s=1)
    wait_until(lambda: (daemon.home / "forked").exists() and (daemon.home / "forked").read_text(), what="the fork")
    pid = int((daemon.home / "forked").read_text())
    ask(daemon, "requeue", job_id)
    wait_run(daemon, job_id, 2)
    process = read_process(pid)
    assert process is None or not process.is_alive


def test_a_requeued_job_starts_before_its_peers(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config="[node]\ncpus = 1\n")
    text = f"echo ready; echo $GPUSCHED_RUN >> $HOME_DIR/order; [ $GPUSCHED_RESTART_COUNT -gt 0 ] && exit 0; {LOOP}"
    first = submit(daemon, text, cpus=1)
    env = {"HOME_DIR": str(daemon.home)}
    says = ("/bin/bash", "-c", "echo $GPUSCHED_RUN >> $HOME_DIR/order")
    others = [daemon.submit(*says, cpus=1, env=env) for _ in range(2)]
    ask(daemon, "requeue", first)
    daemon.wait(first, *others)
    runs = (daemon.home / "order").read_text().split()
    assert runs == [f"{first}.1", f"{first}.2", *(f"{job_id}.1" for job_id in others)]


def test_a_program_under_a_shell_killed_by_the_signal_keeps_its_grace(daemon: Daemon) -> None:
    saves = f"trap 'sleep 1; echo saved > $HOME_DIR/saved; exit 75' TERM; echo ready; {LOOP}"
    job_id = submit(daemon, 'bash -c "$SAVES"; echo not reached', grace_s=30, env={"SAVES": saves})
    ask(daemon, "requeue", job_id)
    wait_run(daemon, job_id, 2)
    assert (daemon.home / "saved").read_text() == "saved\n"
    assert daemon.job(job_id)["runs"][0]["signal"] == 15


# --- standing still ------------------------------------------------------------------------------------


def test_a_suspended_job_does_not_run_and_its_time_limit_pauses(daemon: Daemon) -> None:
    job_id = submit(daemon, COUNTS, time_limit_s=600)
    suspend_within(daemon, job_id, limit_s=3)
    ticks = daemon.home / "ticks"
    time.sleep(0.1)
    before = ticks.stat().st_size
    time.sleep(3.5)
    assert daemon.state(job_id) == "SUSPENDED"
    assert ticks.stat().st_size == before
    ask(daemon, "resume", job_id)
    wait_until(lambda: ticks.stat().st_size > before, what="the job to go on")
    job = daemon.wait(job_id)[0]
    (run,) = job["runs"]
    assert job["state"] == "TIMEOUT"
    assert run["suspended_s"] >= 3.5
    assert run["end_at"] - run["start_at"] >= 3 + run["suspended_s"] - 0.05


def test_a_suspended_job_can_be_cancelled_and_may_clean_up(daemon: Daemon) -> None:
    job_id = submit(daemon, SAVES, grace_s=30)
    ask(daemon, "suspend", job_id)
    wait_until(lambda: is_still(daemon, job_id), what="the job to stand still")
    ask(daemon, "cancel", job_id)
    assert daemon.wait(job_id)[0]["state"] == "CANCELLED"
    assert (daemon.home / "saved").read_text() == f"saved {job_id}.1\n"


# --- decided by the policy -----------------------------------------------------------------------------

QOS = """
[node]
cpus = 2
[qos.low]
[qos.high]
tier = 1
preempts = ["low"]
[preempt]
min_run_s = 0
mode = "{mode}"
"""


@pytest.mark.parametrize("text", [SAVES, SAVES_WITH_0], ids=["exit code 7", "exit code 0"])
def test_a_higher_qos_preempts_and_the_victim_saves_its_work_and_restarts_first(
    make_daemon: Callable[..., Daemon], text: str
) -> None:
    daemon = make_daemon(fake_gpus="2x24GiB", config=QOS.format(mode="requeue"))
    victim = submit(daemon, text, gpus=2, qos="low", grace_s=30)
    waiting = daemon.submit("/bin/true", gpus=2, qos="low")
    high = daemon.submit("/bin/sleep", "1", gpus=2, qos="high")
    (ended,) = daemon.wait(high)
    assert ended["state"] == "COMPLETED"
    job = wait_run(daemon, victim, 2)
    assert (daemon.home / "saved").read_text() == f"saved {victim}.1\n"
    first = job["runs"][0]
    assert (first["outcome"], first["reason"], high in first["reason_text"]) == ("PREEMPTED", "Preempted", True)
    assert daemon.state(waiting) == "PENDING"
    # The run is there with its intent, a moment before its start is known.
    wait_until(lambda: daemon.job(victim)["runs"][1]["start_at"] is not None, what="the second start")
    assert daemon.job(victim)["runs"][1]["start_at"] >= ended["end_at"]


def test_a_job_without_gpus_is_suspended_for_a_higher_one_and_resumes_by_itself(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(config=QOS.format(mode="suspend"))
    victim = submit(daemon, COUNTS, cpus=2, qos="low")
    gate = daemon.home / "gate"
    high = daemon.submit("/bin/sh", "-c", f"while ! test -e {gate}; do sleep 0.02; done", cpus=2, qos="high")
    daemon.wait_state(high, "RUNNING")
    job = daemon.wait_state(victim, "SUSPENDED")
    assert f"job {high}" in job["reason_text"]
    wait_until(lambda: is_still(daemon, victim), what="the job to stand still")
    before = (daemon.home / "ticks").stat().st_size
    daemon.kill()
    daemon.start()
    assert (daemon.home / "ticks").stat().st_size == before
    gate.touch()
    daemon.wait(high)
    daemon.wait_state(victim, "RUNNING")
    wait_until(lambda: (daemon.home / "ticks").stat().st_size > before, what="the job to go on")
    (run,) = daemon.job(victim)["runs"]
    assert run["suspended_s"] > 0


# --- a daemon that dies ----------------------------------------------------------------------------------


def kill_before_the_order(daemon: Daemon, job_id: str, action: str) -> None:
    """Ask for it, and `kill -9` the daemon when it is recorded and before anybody is told."""
    orders = order_file(daemon, job_id)
    kept = orders.with_suffix(".kept")
    if orders.exists():
        orders.rename(kept)
    # An order file that cannot be made.
    orders.symlink_to("/no/such/folder/order")
    ask(daemon, action, job_id)
    daemon.kill()
    orders.unlink()
    if kept.exists():
        kept.rename(orders)


def test_a_daemon_killed_between_decision_and_order_stops_and_requeues_once(daemon: Daemon) -> None:
    job_id = submit(daemon, SAVES, grace_s=30)
    pid = daemon.pid_of(job_id)
    kill_before_the_order(daemon, job_id, "requeue")
    assert os.path.exists(f"/proc/{pid}")
    daemon.start()
    job = wait_run(daemon, job_id, 2)
    assert (daemon.home / "saved").read_text() == f"saved {job_id}.1\n"
    assert (outcomes(daemon, job_id), job["failures"]) == (["PREEMPTED", None], 0)
    assert [event["kind"] for event in job["events"]].count("requeued") == 1


def test_a_daemon_killed_within_the_grace_does_not_notify_the_job_again(daemon: Daemon) -> None:
    text = (
        "trap 'echo told >> $HOME_DIR/told' TERM; echo ready; "
        "until [ -e $HOME_DIR/saved.$GPUSCHED_RUN ]; do sleep 0.02; done; exit 7"
    )
    job_id = submit(daemon, text, grace_s=120)
    ask(daemon, "requeue", job_id)
    told = daemon.home / "told"
    wait_until(told.exists, what="the signal to arrive")
    daemon.kill()
    daemon.start()
    daemon.wait_state(job_id, "COMPLETING")
    (daemon.home / f"saved.{job_id}.1").touch()
    wait_run(daemon, job_id, 2)
    assert told.read_text() == "told\n"
    assert outcomes(daemon, job_id) == ["PREEMPTED", None]
    (daemon.home / f"saved.{job_id}.2").touch()


@pytest.mark.parametrize("text", [SAVES, SAVES_WITH_0], ids=["exit code 7", "exit code 0"])
@pytest.mark.parametrize("ends_while_down", [True, False])
def test_a_preempted_run_that_ends_without_a_daemon_is_requeued(
    daemon: Daemon, ends_while_down: bool, text: str
) -> None:
    job_id = submit(daemon, text, grace_s=30)
    pid = daemon.pid_of(job_id)
    ask(daemon, "requeue", job_id)
    daemon.kill()
    if ends_while_down:
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the run to end")
    daemon.start()
    wait_run(daemon, job_id, 2)
    assert outcomes(daemon, job_id) == ["PREEMPTED", None]


def test_a_run_that_said_that_it_is_done_and_ends_without_a_daemon_is_completed(daemon: Daemon) -> None:
    job_id = submit(daemon, f"trap '{DONE}; exit 0' TERM; echo ready; {LOOP}", grace_s=30)
    pid = daemon.pid_of(job_id)
    ask(daemon, "requeue", job_id)
    daemon.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the run to end")
    daemon.start()
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
    assert outcomes(daemon, job_id) == ["COMPLETED"]


def test_a_run_that_ends_with_0_between_a_decision_and_its_order_is_completed(daemon: Daemon) -> None:
    job_id = submit(daemon, f"trap 'exit 0' USR1; echo ready; {LOOP}", grace_s=30)
    pid = daemon.pid_of(job_id)
    kill_before_the_order(daemon, job_id, "requeue")
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what="the run to end")
    daemon.start()
    job = daemon.wait(job_id)[0]
    assert (job["state"], outcomes(daemon, job_id)) == ("COMPLETED", ["COMPLETED"])
    assert "run 1 had ended by itself before it was told to stop" in [event["text"] for event in job["events"]]


def test_a_suspension_recorded_and_not_ordered_is_carried_out_by_the_next_daemon(daemon: Daemon) -> None:
    job_id = submit(daemon, COUNTS)
    kill_before_the_order(daemon, job_id, "suspend")
    assert not has_stopped_counting(daemon)
    daemon.start()
    assert daemon.state(job_id) == "SUSPENDED"
    wait_until(lambda: is_still(daemon, job_id), what="the job to stand still")


def test_a_resume_recorded_and_not_ordered_is_carried_out_by_the_next_daemon(daemon: Daemon) -> None:
    job_id = submit(daemon, COUNTS)
    ask(daemon, "suspend", job_id)
    wait_until(lambda: is_still(daemon, job_id), what="the job to stand still")
    kill_before_the_order(daemon, job_id, "resume")
    before = (daemon.home / "ticks").stat().st_size
    daemon.start()
    assert daemon.state(job_id) == "RUNNING"
    wait_until(lambda: (daemon.home / "ticks").stat().st_size > before, what="the job to go on")


def test_a_suspended_job_stays_suspended_while_the_daemon_is_replaced(daemon: Daemon) -> None:
    job_id = submit(daemon, COUNTS, time_limit_s=600)
    suspend_within(daemon, job_id, limit_s=4)
    daemon.kill()
    time.sleep(3)
    daemon.start()
    time.sleep(1.5)
    assert daemon.state(job_id) == "SUSPENDED"
    assert is_still(daemon, job_id)
    ask(daemon, "resume", job_id)
    job = daemon.wait(job_id)[0]
    assert job["state"] == "TIMEOUT"
    assert job["runs"][0]["suspended_s"] >= 4.5


def has_stopped_counting(daemon: Daemon) -> bool:
    """Whether what counts in this home has stopped to."""
    ticks = daemon.home / "ticks"
    before = ticks.stat().st_size
    time.sleep(0.3)
    return ticks.stat().st_size == before
