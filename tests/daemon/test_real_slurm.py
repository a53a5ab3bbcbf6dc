"""Jobs handed over to a real Slurm: slurmctld and slurmd on loopback, with a real daemon. Skipped where they are not.

Debian's slurm-wlm will do, installed, or unpacked below the folder that GPUSCHED_SLURM_ROOT names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import FINAL, Daemon
from support import wait_until

_ROOT = os.environ.get("GPUSCHED_SLURM_ROOT", "")
_FOLDERS = [f"{_ROOT}/usr/sbin", f"{_ROOT}/usr/bin", f"{_ROOT}/sbin", f"{_ROOT}/bin"]
_LIBRARIES = [f"{_ROOT}/usr/lib/x86_64-linux-gnu", f"{_ROOT}/lib/x86_64-linux-gnu"]
_PLUGINS = f"{_LIBRARIES[0]}/slurm-wlm"
_COMMANDS = ("sbatch", "squeue", "scancel", "sacct", "scontrol", "srun")


def _program(name: str) -> str:
    """Path of a program of Slurm, which Debian names with an ending; empty if it is not there."""
    found = (shutil.which(one, path=":".join(_FOLDERS)) for one in (name, f"{name}-wlm"))
    return next(filter(None, found), "")


def _why_not() -> str | None:
    missing = [name for name in ("slurmctld", "slurmd", "slurmstepd", *_COMMANDS) if not _program(name)]
    if missing:
        return f"Slurm's {', '.join(missing)} are not installed: apt-get install slurm-wlm"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return None if os.path.exists(f"{_PLUGINS}/auth_none.so") else f"there is no auth_none.so in {_PLUGINS}"


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))

CONF = """ClusterName=site
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={first}
SlurmdPort={second}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
MpiDefault=none
KillWait=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CONFIG = """
[daemon]
poll_s = 0.1
[handover]
commands = "{root}/bin"
folder = "{root}/records"
poll_interval_s = 0.5
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class RealSite:
    """A Slurm of one node, and a daemon beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("state", "spool", "bin"):
            (root / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        conf = root / "slurm.conf"
        ports = {"first": _free_port(), "second": _free_port()}
        conf.write_text(CONF.format(root=root, host=host, plugins=_PLUGINS, **ports))
        self.env = {**os.environ, "SLURM_CONF": str(conf)}
        lines = [f"export SLURM_CONF={shlex.quote(str(conf))}"]
        if _ROOT:
            self.env["LD_LIBRARY_PATH"] = ":".join([*_LIBRARIES, _PLUGINS])
            lines.append(f"export LD_LIBRARY_PATH={shlex.quote(self.env['LD_LIBRARY_PATH'])}")
        for name in _COMMANDS:
            path = root / "bin" / name
            path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {shlex.quote(_program(name))} "$@"', ""]))
            path.chmod(0o755)
        # In the foreground, so that both end with this test.
        self.daemons = [
            self._start(_program("slurmctld"), "-D", "-i", "-c"),
            self._start(_program("slurmd"), "-D", "-d", _program("slurmstepd")),
        ]
        wait_until(lambda: "idle" in self.sinfo(), what="Slurm's node")
        self.daemon = Daemon(root / "home", config=CONFIG.format(root=root))
        self.daemon.start()

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        with open(self.root / f"{os.path.basename(argv[0])}.log", "ab") as log:
            return subprocess.Popen(argv, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def sinfo(self) -> str:
        done = subprocess.run(
            [self.root / "bin" / "scontrol", "show", "node"], capture_output=True, text=True, check=False
        )
        return done.stdout.lower()

    def submit(self, text: str, **spec: Any) -> str:
        return self.daemon.submit("sh", "-c", text, engine="slurm", cpus=1, **spec)

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def await_state(self, job_id: str, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] in states, what=f"{states} of job {job_id}", timeout_s=120)
        return self.job(job_id)

    def close(self) -> None:
        self.daemon.close()
        for one in self.daemons:
            one.terminate()
        for one in self.daemons:
            one.wait(timeout=30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSite]:
    made = RealSite(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


def test_an_exit_code_and_the_output_come_back(site: RealSite) -> None:
    job_id = site.submit("echo $GPUSCHED_JOB_ID $SLURM_JOB_PARTITION; exit 7", env={"TEXT": "x"})
    job = site.await_state(job_id, *FINAL)
    assert (job["state"], job["exit_code"]) == ("FAILED", 7), job["events"]
    assert Path(job["stdout_path"]).read_text() == f"{job_id} main\n"


def test_a_signal_ends_a_job_as_here(site: RealSite) -> None:
    job = site.await_state(site.submit("kill -SEGV $$"), *FINAL)
    assert (job["state"], job["signal"]) == ("FAILED", 11), job["events"]


def test_a_running_job_is_cancelled(site: RealSite) -> None:
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    assert site.await_state(job_id, *FINAL)["state"] == "CANCELLED"


def test_a_job_that_has_to_wait_there_is_pending_and_says_why(site: RealSite) -> None:
    first = site.submit("sleep 600", exclusive=True)
    site.await_state(first, "RUNNING")
    second = site.submit("true")
    wait_until(lambda: "PENDING (Resources)" in (site.job(second)["reason_text"] or ""), what="why")
    assert site.job(second)["state"] == "PENDING"
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [first]})
    assert site.await_state(second, *FINAL)["state"] == "COMPLETED"


def test_an_unknown_partition_is_slurms_own_sentence(site: RealSite) -> None:
    job = site.await_state(site.submit("true", constraint="nosuch"), *FINAL)
    assert job["reason"] == "JobLaunchFailure"
    assert "feature" in job["reason_text"].lower(), job["reason_text"]


def test_a_cancel_by_slurms_own_command_is_told(site: RealSite) -> None:
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    (native,) = [text for text in (event["text"] for event in site.job(job_id)["events"]) if "in Slurm as job" in text]
    subprocess.run([site.root / "bin" / "scancel", native.rpartition(" ")[2]], check=True)
    job = site.await_state(job_id, *FINAL)
    assert (job["state"], "in Slurm" in job["reason_text"]) == ("CANCELLED", True)


def test_a_killed_daemon_finds_its_jobs_again(site: RealSite) -> None:
    job_id = site.submit(f"until [ -e {site.root}/go ]; do sleep 0.1; done; exit 5")
    waits = [site.submit("exit 3") for _ in range(3)]
    site.daemon.kill()
    site.daemon.start()
    (site.root / "go").touch()
    assert site.await_state(job_id, *FINAL)["exit_code"] == 5
    assert [site.await_state(one, *FINAL)["exit_code"] for one in waits] == [3, 3, 3]


def test_tasks_run_as_ranks_under_srun(site: RealSite) -> None:
    path = f"{site.root}/bin:{os.environ['PATH']}"
    job_id = site.submit("echo $RANK of $WORLD_SIZE at $MASTER_ADDR", ntasks=2, env={"PATH": path})
    job = site.await_state(job_id, *FINAL)
    assert job["state"] == "COMPLETED", (job["events"], Path(job["stdout_path"]).read_text())
    host = socket.gethostname().partition(".")[0]
    lines = sorted(Path(job["stdout_path"]).read_text().splitlines())
    assert lines == [f"0 of 2 at {host}", f"1 of 2 at {host}"]
