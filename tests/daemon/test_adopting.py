"""A process on a GPU that is no job becomes one: real processes, a real daemon, simulated cards."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_processes import PARENT, STUBBORN, ForeignProcesses, foreign_processes_in
from harness import Daemon
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.errors import GpuschedError

CONFIG = "[daemon]\npoll_s = 0.2\nidle_poll_s = 0.2\n[gpu]\nrelease_wait_s = 2\n"


@pytest.fixture
def foreign_processes(tmp_path: Path) -> Iterator[ForeignProcesses]:
    with foreign_processes_in(tmp_path) as made:
        yield made


@pytest.fixture
def lab(make_daemon: Callable[..., Daemon], foreign_processes: ForeignProcesses) -> Daemon:
    return make_daemon(fake_gpus=str(foreign_processes.path), config=CONFIG)


def foreign(daemon: Daemon) -> set[int]:
    return {row["pid"] for row in daemon.call("GET", "/v1/foreign")["foreign"]}


def stand_on(daemon: Daemon, foreign_processes: ForeignProcesses, card: int, *pids: int, **facts: Any) -> None:
    """Have these on the card, and wait until the daemon knows."""
    foreign_processes.put(card, *pids, **facts)
    wait_until(lambda: set(pids) <= foreign(daemon), what="the foreign processes to be seen")


def adopt(daemon: Daemon, pid: int, **wishes: Any) -> str:
    return str(daemon.call("POST", "/v1/adopt", {"pid": pid, **wishes})["adopted"]["id"])


def refusal(daemon: Daemon, pid: Any, **wishes: Any) -> str:
    with pytest.raises(GpuschedError) as caught:
        daemon.call("POST", "/v1/adopt", {"pid": pid, **wishes})
    assert caught.value.hint
    return caught.value.message


def be_watched(daemon: Daemon, job: str, pid: int) -> None:
    wait_until(lambda: daemon.job(job)["runs"][-1]["pid"] == pid, what="it to be watched")


def end(process: subprocess.Popen[bytes], foreign_processes: ForeignProcesses, card: int = 0) -> None:
    process.kill()
    process.wait()
    foreign_processes.put(card)


def test_an_adopted_process_runs_on_as_a_job_of_its_owner(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = lab.wait_state(adopt(lab, process.pid, time_limit_s=3600, name="late"), "RUNNING")
    assert (job["name"], job["time_limit_s"], "time.sleep(1000)" in job["command"]) == ("late", 3600, True)
    assert [gpu["index"] for gpu in job["gpus"]] == [0]
    be_watched(lab, job["id"], process.pid)
    wait_until(lambda: process.pid not in foreign(lab), what="it to be no stranger any more")
    end(process, foreign_processes)
    (ended,) = lab.wait(job["id"])
    assert (ended["state"], ended["reason"], ended["exit_code"], ended["signal"]) == (
        "COMPLETED",
        "ExitUnknown",
        None,
        None,
    )
    assert lab.call("GET", "/v1/usage?by=user")["usage"][0]["gpu_hours"] > 0


def test_a_process_on_a_mig_instance_is_adopted_there(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    on_it = [{"pid": process.pid, "vram": "15GiB", "user": "eva", "name": "python"}]
    # Of the card the driver tells all that is on its instances.
    foreign_processes.cards[1].update(mig=[{"profile": "2g.20gb", "processes": on_it}], processes=on_it)
    foreign_processes.write()
    wait_until(lambda: process.pid in foreign(lab), what="the stranger to be seen")
    assert [row["gpu"] for row in lab.call("GET", "/v1/foreign")["foreign"]] == [1010]
    job = lab.wait_state(adopt(lab, process.pid), "RUNNING")
    assert [gpu["index"] for gpu in job["gpus"]] == [1010]
    assert [event["text"].rpartition(", ")[2] for event in job["events"] if event["kind"] == "started"] == ["GPU 1:0"]
    process.kill()
    process.wait()
    foreign_processes.cards[1].update(mig=[{"profile": "2g.20gb"}], processes=[])
    foreign_processes.write()
    lab.wait(job["id"])


def test_a_process_on_unified_memory_books_no_more_than_is_left(
    make_daemon: Callable[..., Daemon], foreign_processes: ForeignProcesses
) -> None:
    lab = make_daemon(fake_gpus=str(foreign_processes.path), config=CONFIG + f"[node]\nmem_mib = {24 * 1024}\n")
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid, vram="3GiB", unified_memory=True)
    lab.wait_state(lab.submit("sleep", "1000", mem_mib=20 * 1024), "RUNNING")
    assert "its GPU uses host memory, of which 4G is left to book, not 24G" in refusal(lab, process.pid)
    job = lab.wait_state(adopt(lab, process.pid, vram_mib=4 * 1024), "RUNNING")
    assert lab.call("GET", "/v1/cluster")["nodes"][0]["mem_booked_mib"] == 24 * 1024
    be_watched(lab, job["id"], process.pid)
    end(process, foreign_processes)


def test_the_gpu_is_booked_whole_and_given_to_no_other_job(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid, vram="300MiB")
    adopt(lab, process.pid)
    one = lab.submit("true", gpus=1)
    assert lab.wait(one)[0]["gpus"][0]["index"] == 1
    both = lab.submit("true", gpus=2)
    assert lab.state(both) == "PENDING"
    end(process, foreign_processes)
    assert lab.wait(both)[0]["state"] == "COMPLETED"


def test_a_cancel_ends_it_and_all_descendants(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start(PARENT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    # The GPU is used by what it has started.
    stand_on(lab, foreign_processes, 1, child)
    job = adopt(lab, process.pid)
    lab.wait_state(job, "RUNNING")
    wait_until(lambda: child not in foreign(lab), what="the child to be part of the job")
    lab.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert process.wait(60) == -signal.SIGTERM
    foreign_processes.put(1)
    (ended,) = lab.wait(job)
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "CancelledByUser")
    assert state_of(child) in (None, "Z")


def test_a_stubborn_process_is_killed_after_its_grace(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start(STUBBORN, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid, grace_s=0.3)
    lab.wait_state(job, "RUNNING")
    lab.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert process.wait(60) == -signal.SIGKILL
    foreign_processes.put(0)
    assert lab.wait(job)[0]["state"] == "CANCELLED"


def test_its_time_limit_ends_it_and_it_is_not_restarted(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid, time_limit_s=1)
    assert process.wait(60) == -signal.SIGTERM
    foreign_processes.put(0)
    (ended,) = lab.wait(job)
    assert (ended["state"], len(ended["runs"])) == ("TIMEOUT", 1)
    for path, body in (
        ("/v1/jobs", {"resubmit": [job], "spec": {}}),
        ("/v1/adopt", {"pid": process.pid}),
    ):
        with pytest.raises(GpuschedError):
            lab.call("POST", path, body)


def test_its_leftovers_are_ended_as_for_any_job(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start(PARENT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid)
    be_watched(lab, job, process.pid)
    end(process, foreign_processes)
    lab.wait(job)
    assert state_of(child) in (None, "Z")
    texts = [event["text"] for event in lab.job(job)["events"]]
    assert any("leftover processes" in text and str(child) in text for text in texts)


def test_it_is_suspended_and_resumed(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid)
    lab.wait_state(job, "RUNNING")
    lab.call("POST", "/v1/jobs/suspend", {"ids": [job]})
    wait_until(lambda: state_of(process.pid) == "T", what="it to stand still")
    lab.call("POST", "/v1/jobs/resume", {"ids": [job]})
    wait_until(lambda: state_of(process.pid) != "T", what="it to go on")


def state_of(pid: int) -> str | None:
    found = proctree.read_process(pid)
    return None if found is None else found.state


def test_a_slice_of_its_gpu_is_booked_on_request(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    first, second = foreign_processes.start(), foreign_processes.start()
    stand_on(lab, foreign_processes, 0, first.pid, second.pid, vram="4GiB")
    assert "holds 4G of GPU 0 already" in refusal(lab, first.pid, vram_mib=1024)
    one = adopt(lab, first.pid, vram_mib=8192)
    assert lab.job(one)["gpus"][0]["vram_mib"] == 8192
    assert "is booked by job" in refusal(lab, second.pid)
    assert "left to book" in refusal(lab, second.pid, vram_mib=20480)
    other = adopt(lab, second.pid, vram_mib=8192)
    assert lab.wait_state(other, "RUNNING")["gpus"][0]["index"] == 0


# --- refusals ---------------------------------------------------------------------------------------


def test_ineligible_processes_are_refused(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process, idle = foreign_processes.start(), foreign_processes.start()
    leader, child = with_a_child(foreign_processes, start_new_session=True)
    parent, other = with_a_child(foreign_processes)
    foreign_processes.cards.append({"vram": "24GiB", "lost": True})  # nobody can be on it
    stand_on(lab, foreign_processes, 0, process.pid)
    stand_on(lab, foreign_processes, 1, child, other)
    assert lab.process is not None
    gone = foreign_processes.start("pass")
    gone.wait()
    assert refusal(lab, gone.pid) == f"there is no process {gone.pid}"
    assert refusal(lab, idle.pid) == f"neither process {idle.pid} nor any of its descendants is on a GPU"
    assert f"gpusched adopt {child}" in hint_of(lab, leader)
    assert "is, or has started, the scheduler's daemon" in refusal(lab, lab.process.pid)
    assert "pid is 'x'" in refusal(lab, "x")
    assert "pid is 0" in refusal(lab, 0)
    assert "unknown field 'argv'" in refusal(lab, process.pid, argv=["x"])
    job = adopt(lab, process.pid)
    assert refusal(lab, process.pid) == f"process {process.pid} is part of job {job} already"
    adopt(lab, other, vram_mib=15360)
    assert f"process {other}, which process {parent} has started, is part of job" in refusal(lab, parent)


def with_a_child(foreign_processes: ForeignProcesses, **options: Any) -> tuple[int, int]:
    process = foreign_processes.start(PARENT, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    return process.pid, int(process.stdout.readline())


def hint_of(daemon: Daemon, pid: int) -> str:
    with pytest.raises(GpuschedError) as caught:
        daemon.call("POST", "/v1/adopt", {"pid": pid})
    return str(caught.value.hint)


def test_a_process_below_a_job_belongs_to_that_job(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    job = lab.submit("sleep", "1000", gpus=1)
    pid = lab.pid_of(job)
    foreign_processes.put(1, pid)
    assert refusal(lab, pid) == f"process {pid} is part of job {job} already"


def test_a_gpu_booked_by_another_job_stays_with_that_job(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    job = lab.submit("sleep", "1000", gpus=1)
    card = lab.wait_state(job, "RUNNING")["gpus"][0]["index"]
    stand_on(lab, foreign_processes, card, process.pid)
    assert refusal(lab, process.pid).startswith(f"GPU {card} is booked by job {job} of ")


def test_its_queue_request_is_validated(
    make_daemon: Callable[..., Daemon], foreign_processes: ForeignProcesses
) -> None:
    queue = '[default]\nqueue = "short"\n[queue.short]\nmax_time_s = 60\n'
    daemon = make_daemon(fake_gpus=str(foreign_processes.path), config=CONFIG + queue)
    process = foreign_processes.start()
    stand_on(daemon, foreign_processes, 0, process.pid)
    assert "nosuch" in refusal(daemon, process.pid, queue="nosuch")
    assert "short" in refusal(daemon, process.pid, time_limit_s=3600)
    assert process.poll() is None
    assert daemon.job(adopt(daemon, process.pid))["time_limit_s"] == 60


def test_its_account_must_be_one_of_its_owners(
    make_daemon: Callable[..., Daemon], foreign_processes: ForeignProcesses
) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    accounts = f'[account.lab]\nusers = ["{user}"]\n[account.theory]\nusers = ["nobody"]\n'
    daemon = make_daemon(fake_gpus=str(foreign_processes.path), config=CONFIG + accounts)
    process = foreign_processes.start()
    stand_on(daemon, foreign_processes, 0, process.pid)
    text = refusal(daemon, process.pid, account="theory")
    assert text == f"user {user} is not a member of account theory, only of lab"
    assert daemon.job(adopt(daemon, process.pid))["account"] == "lab"
    end(process, foreign_processes)


def test_adoption_cannot_exceed_a_limit(
    make_daemon: Callable[..., Daemon], foreign_processes: ForeignProcesses
) -> None:
    queue = '[default]\nqueue = "lab"\n[queue.lab]\nmax_gpus_per_user = 1\n[queue.other]\n'
    daemon = make_daemon(fake_gpus=str(foreign_processes.path), config=CONFIG + queue)
    first, second = foreign_processes.start(), foreign_processes.start()
    stand_on(daemon, foreign_processes, 0, first.pid, vram="300MiB")
    stand_on(daemon, foreign_processes, 1, second.pid, vram="300MiB")
    adopt(daemon, first.pid)
    assert "in queue lab may hold 1 GPU and holds 1; this job needs 1" in refusal(daemon, second.pid)
    adopt(daemon, second.pid, queue="other")


def test_an_adopted_job_runs_only_once(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid)
    lab.wait_state(job, "RUNNING")
    for path, body, words in (
        ("/v1/jobs/requeue", {"ids": [job]}, "was adopted while running"),
        ("/v1/jobs/update", {"ids": [job], "changes": {"retries": 2}}, "was adopted while running"),
        ("/v1/jobs/update", {"ids": [job], "changes": {"fallback": "true"}}, "was adopted while running"),
        ("/v1/jobs", {"resubmit": [job], "spec": {}}, "was adopted while running"),
    ):
        with pytest.raises(GpuschedError) as caught:
            lab.call("POST", path, body)
        assert words in caught.value.message
    lab.call("POST", "/v1/jobs/update", {"ids": [job], "changes": {"time_limit_s": 1}})
    assert process.wait(60) == -signal.SIGTERM
    foreign_processes.put(0)
    assert lab.wait(job)[0]["state"] == "TIMEOUT"


# --- crashes ----------------------------------------------------------------------------------------


def test_a_new_daemon_takes_it_over(lab: Daemon, foreign_processes: ForeignProcesses) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid)
    be_watched(lab, job, process.pid)
    lab.kill()
    lab.start()
    assert lab.wait_state(job, "RUNNING")["runs"][-1]["pid"] == process.pid
    assert process.pid not in foreign(lab)
    lab.kill()
    # It ends while no daemon is there.
    end(process, foreign_processes)
    lab.start()
    assert lab.wait(job)[0]["reason"] == "ExitUnknown"


@pytest.mark.parametrize("step", ["commit", "reply", "reconcile", "signal"])
def test_a_daemon_killed_during_adoption_leaves_no_partial_job(
    make_daemon: Callable[..., Daemon], foreign_processes: ForeignProcesses, step: str
) -> None:
    process = foreign_processes.start()
    foreign_processes.put(0, process.pid)
    daemon = make_daemon(fake_gpus=str(foreign_processes.path), config=CONFIG, start=False)
    daemon.start(GPUSCHED_CRASH_AT="commit:1" if step == "commit" else f"commit:1,{step}:1")
    wait_until(lambda: process.pid in foreign(daemon), what="the stranger to be seen")
    with pytest.raises((GpuschedError, OSError)):
        daemon.call("POST", "/v1/adopt", {"pid": process.pid})
    daemon.reap()
    daemon.start()
    jobs = daemon.call("GET", "/v1/jobs?states=all")["jobs"]
    assert process.poll() is None
    assert len(jobs) == (step != "commit")
    if step == "signal":
        # Its supervisor was asked for already.
        be_watched(daemon, "1", process.pid)
    elif jobs:
        daemon.wait_state("1", "FAILED")
        assert daemon.job("1")["reason"] == "JobLaunchFailure"
    job = "1" if step == "signal" else adopt_soon(daemon, process.pid)
    be_watched(daemon, job, process.pid)
    end(process, foreign_processes)
    assert daemon.wait(job)[0]["state"] == "COMPLETED"


def adopt_soon(daemon: Daemon, pid: int) -> str:
    wait_until(lambda: pid in foreign(daemon), what="it to be a stranger")
    return adopt(daemon, pid)


def test_without_its_supervisor_it_keeps_running_but_is_no_longer_a_job(
    lab: Daemon, foreign_processes: ForeignProcesses
) -> None:
    process = foreign_processes.start()
    stand_on(lab, foreign_processes, 0, process.pid)
    job = adopt(lab, process.pid)
    be_watched(lab, job, process.pid)
    supervisor = supervisor_of(lab, job)
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: process.pid in foreign(lab), what="it to be a stranger again")
    (ended,) = lab.wait(job)
    assert (ended["state"], ended["reason"], len(ended["runs"])) == ("NODE_FAIL", "SupervisorLost", 1)
    assert process.poll() is None


def supervisor_of(daemon: Daemon, job: str) -> int:
    (record,) = daemon.home.rglob(f"{job}.1.record")
    return int(record.read_text().split()[1])
