"""Runs in units of a real systemd: what becomes of them when the daemon, the supervisor or systemd itself changes.

Needs root on a machine whose PID 1 is systemd, which is to be one for trying things out: see docs/contributing.md.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench import ENDS, FOREVER, Does, UnitBench, to_start
from support import wait_until

from gpusched.engine.launchers import names_of
from gpusched.engine.linux import pam, proctree
from gpusched.model.execution import RunEnded, RunLost, RunStarted, StopOrder

sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))
from people import ANN, SystemDaemon  # (the path first)

pytestmark = [
    pytest.mark.skipif(UnitBench.missing() is not None, reason=UnitBench.missing() or ""),
    pytest.mark.timeout(900),
]

PATIENCE_S = 120.0
"""An emulated machine is 15 to 70 times slower."""
SLEEPS = Does(lasts_s=FOREVER)
ESCAPES = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        for fd in range(3):
            os.close(fd)
        os.execve("/bin/sleep", ["sleep", "31415"], {})
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that all users may enter and write in, and whose name systemd would expand if it saw it.

    Not in /tmp or /var/tmp, which units may have of their own.
    """
    with tempfile.TemporaryDirectory(prefix="gpusched-%n-$HOME-", dir="/srv") as made:
        os.chmod(made, 0o777)
        yield Path(made)


@pytest.fixture
def bench(folder: Path) -> Iterator[UnitBench]:
    made = UnitBench(folder)
    yield made
    made.close()


@pytest.fixture
def daemon() -> Iterator[SystemDaemon]:
    made = SystemDaemon()
    made.is_warm = False
    made.start()
    yield made
    made.close()


def systemctl(*words: str) -> str:
    return subprocess.run(["systemctl", *words], check=True, capture_output=True, text=True).stdout


def unit_of(daemon: SystemDaemon, job: str) -> str:
    return names_of(str(daemon.home)).unit(f"{job}.1")


def job_of(daemon: SystemDaemon, job: str) -> dict[str, Any]:
    return dict(daemon.call("GET", f"/v1/jobs/{job}")["job"])


def until(daemon: SystemDaemon, job: str, *states: str) -> dict[str, Any]:
    wait_until(lambda: job_of(daemon, job)["state"] in states, PATIENCE_S, f"job {job} to be {states}")
    return job_of(daemon, job)


def user_of(name: str = ANN) -> dict[str, Any]:
    return {"uid": pwd.getpwnam(name).pw_uid, "user": name}


def sleepers() -> list[int]:
    found = []
    for pid in proctree.all_pids():
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x0031415\0":
                found.append(pid)
        except OSError:
            continue
    return found


# --- what a unit is -----------------------------------------------------------------------------------------


def test_the_launcher_is_systemd_and_is_reported(daemon: SystemDaemon) -> None:
    assert str(daemon.call("GET", "/v1/status")["daemon"]["launcher"]).startswith("systemd ")


def test_a_run_has_its_own_unit_as_its_user_without_user_text(bench: UnitBench) -> None:
    text = "id -un; id -Gn; cat /proc/self/cgroup; pwd; cat; readlink /proc/self/fd/0; echo ready; exec sleep 600"
    env = {"PATH": os.environ["PATH"], "SECRET": "hunter2"}
    bench.start("1.1", argv=("sh", "-c", text, "hunter2"), env=env, **user_of())
    bench.until("1.1", RunStarted, timeout_s=PATIENCE_S)
    bench.wait(lambda: "ready" in bench.output("1.1"), PATIENCE_S)
    unit = bench.names.unit("1.1")
    user, groups, cgroup, folder, stdin, _ = bench.output("1.1").splitlines()
    assert (user, groups) == (ANN, subprocess.run(["id", "-Gn", ANN], capture_output=True, text=True).stdout.strip())
    assert unit in cgroup
    assert folder == str(bench.folder)
    assert stdin == "/dev/null"
    shown = systemctl("show", unit) + systemctl("cat", unit)
    assert "hunter2" not in shown
    assert str(bench.folder) not in shown
    assert "run 1 of gpusched's job 1" in shown


def test_a_ticket_is_removed_from_memory_and_unreadable_to_others(bench: UnitBench) -> None:
    bench.start("1.1", argv=(), script=b"#!/bin/sh\necho ready\nexec sleep 600\n#" + b"x" * (4 << 20), **user_of())
    bench.until("1.1", RunStarted, timeout_s=PATIENCE_S)
    found = {}
    for fd in os.listdir("/proc/1/fd"):
        try:
            if "gpusched-ticket" in os.readlink(f"/proc/1/fd/{fd}"):
                found[fd] = os.stat(f"/proc/1/fd/{fd}").st_size
        except OSError:
            continue
    assert set(found.values()) <= {0}, "PID 1 holds it as long as the unit is there, but it is empty"


def test_many_units_start_at_once(bench: UnitBench) -> None:
    runs = [f"{job}.1" for job in range(1, 41)]
    bench.engine.reconcile(to_start([bench.ticket(run, Does(exit_code=int(run[:-2]))) for run in runs]))
    bench.wait(lambda: {e.run for e in bench.seen if isinstance(e, ENDS)} == set(runs), 4 * PATIENCE_S)
    assert {e.run: e.exit_code for e in bench.seen if isinstance(e, RunEnded)} == {run: int(run[:-2]) for run in runs}


def test_limits_conf_applies_to_jobs(bench: UnitBench) -> None:
    service, limits = Path(pam.FILE), Path("/etc/security/limits.d/gpusched-test.conf")
    if service.exists():
        pytest.skip(f"{service} is there already")
    service.write_text(Path(__file__).parents[2].joinpath("systemd", "pam.d-gpusched").read_text())
    limits.write_text(f"{ANN} - nofile 4321\n")
    try:
        bench.engine._pam = True
        bench.start("1.1", argv=("sh", "-c", "ulimit -n; cat /proc/self/cgroup"), **user_of())
        assert bench.until("1.1", RunEnded, timeout_s=PATIENCE_S).exit_code == 0
        number, cgroup = bench.output("1.1").split()
        assert number == "4321"
        assert bench.names.unit("1.1") in cgroup, "a session must not take the job out of its unit"
    finally:
        service.unlink()
        limits.unlink()


# --- what it outlives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_run_survives_its_daemon_and_is_adopted(daemon: SystemDaemon, how: str) -> None:
    ann = daemon.person(ANN)
    job = ann.submit("sh", "-c", "trap 'exit 7' USR1; while :; do sleep 1; done")
    until(daemon, job, "RUNNING")
    pid = int(systemctl("show", "-P", "MainPID", unit_of(daemon, job)))
    getattr(daemon, how)()
    daemon.start()
    assert until(daemon, job, "RUNNING")["run"] == 1
    assert int(systemctl("show", "-P", "MainPID", unit_of(daemon, job))) == pid
    subprocess.run(["pkill", "-USR1", "-P", str(pid)], check=True)
    assert until(daemon, job, "FAILED", "COMPLETED")["exit_code"] == 7


def test_systemd_may_be_reloaded_and_reexecuted(daemon: SystemDaemon) -> None:
    ann = daemon.person(ANN)
    first = ann.submit("sleep", "600")
    until(daemon, first, "RUNNING")
    systemctl("daemon-reload")
    systemctl("daemon-reexec")
    second = ann.submit("sh", "-c", "exit 3")
    assert until(daemon, second, "FAILED")["exit_code"] == 3
    assert until(daemon, first, "RUNNING")["run"] == 1
    journal = subprocess.run(["journalctl", "-b", "-o", "cat", "_PID=1"], capture_output=True, text=True, check=True)
    complaints = [line for line in journal.stdout.splitlines() if f"transient/{unit_of(daemon, first)}:" in line]
    assert not complaints, "systemd reads back all that it wrote down of the unit"
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [first]})
    until(daemon, first, "CANCELLED")
    for job in (first, second):
        unit = unit_of(daemon, job)
        wait_until(lambda unit=unit: "not-found" in systemctl("show", "-P", "LoadState", unit), PATIENCE_S, "no unit")


def test_jobs_submitted_during_a_systemd_reexec_run_once_each(daemon: SystemDaemon) -> None:
    ann = daemon.person(ANN)
    log = Path(tempfile.mkdtemp(dir="/srv")) / "log"
    log.parent.chmod(0o777)
    jobs = [ann.submit("sh", "-c", f"echo $GPUSCHED_JOB_ID >> {log}") for _ in range(10)]
    systemctl("daemon-reexec")
    jobs += [ann.submit("sh", "-c", f"echo $GPUSCHED_JOB_ID >> {log}") for _ in range(10)]
    systemctl("daemon-reexec")
    for job in jobs:
        until(daemon, job, "COMPLETED")
    assert sorted(log.read_text().split()) == sorted(jobs)


# --- how it ends ----------------------------------------------------------------------------------------------


def test_a_killed_supervisor_leaves_no_process_even_without_marks(bench: UnitBench) -> None:
    bench.start("1.1", argv=(sys.executable, "-c", ESCAPES), **user_of())
    started = bench.until("1.1", RunStarted, timeout_s=PATIENCE_S)
    bench.wait(lambda: "ready" in bench.output("1.1") and sleepers(), PATIENCE_S)
    os.kill(started.supervisor_pid, signal.SIGKILL)
    assert isinstance(bench.until("1.1", *ENDS, timeout_s=PATIENCE_S), RunLost)
    wait_until(lambda: not sleepers(), PATIENCE_S, "the runaway to be killed")


def test_a_unit_stopped_by_the_admin_ends_like_a_cancelled_job(bench: UnitBench) -> None:
    text = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.2; done"
    bench.start("1.1", argv=("sh", "-c", text), **user_of())
    bench.until("1.1", RunStarted, timeout_s=PATIENCE_S)
    bench.wait(lambda: "ready" in bench.output("1.1"), PATIENCE_S)
    stopped = subprocess.Popen(["systemctl", "stop", bench.names.unit("1.1")])
    end = bench.until("1.1", RunEnded, timeout_s=PATIENCE_S)
    assert stopped.wait(PATIENCE_S) == 0
    assert end.exit_code == 0
    assert "saved" in bench.output("1.1")


def test_a_unit_of_an_unknown_job_is_ended(bench: UnitBench) -> None:
    bench.start("1.1", SLEEPS, **user_of())
    started = bench.until("1.1", RunStarted, timeout_s=PATIENCE_S)
    bench.restart()
    bench.done.clear()
    bench.engine.adopt([])
    bench.wait(lambda: proctree.read_process(started.pid) is None, PATIENCE_S, "the stray to be ended")


def test_processes_of_a_unit_have_an_owner(bench: UnitBench) -> None:
    bench.start("1.1", argv=(sys.executable, "-c", ESCAPES), **user_of())
    bench.until("1.1", RunStarted, timeout_s=PATIENCE_S)
    bench.wait(lambda: "ready" in bench.output("1.1") and sleepers(), PATIENCE_S)
    (runaway,) = sleepers()
    assert bench.engine.owners([runaway, 1, os.getpid()]) == {runaway: "1.1"}
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    bench.until("1.1", *ENDS, timeout_s=PATIENCE_S)
    assert not sleepers()
