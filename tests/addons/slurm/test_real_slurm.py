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
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=50
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
MpiDefault=none
KillWait=2
MessageTimeout=3
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={third} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=600 PriorityTier=5
PartitionName=low Nodes=ALL MaxTime=600 PriorityTier=1
"""
CONFIG = """
[daemon]
poll_s = 0.1
[handover]
commands = "{root}/bin"
folder = "{root}/records"
poll_interval_s = 0.5
[queue.default]
[queue.low]
slurm_partition = "low"
[queue.nowhere]
slurm_partition = "nosuch"
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class RealSite:
    """A Slurm of two nodes, and a daemon beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("state", "bin"):
            (root / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        conf = root / "slurm.conf"
        ports = {name: _free_port() for name in ("first", "second", "third")}
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
        self.controller = self._start(_program("slurmctld"), "-D", "-i", "-c")
        self.nodes = [
            self._start(_program("slurmd"), "-D", "-N", name, "-d", _program("slurmstepd")) for name in ("n1", "n2")
        ]
        self.await_nodes()
        self.daemon = Daemon(root / "home", config=CONFIG.format(root=root))
        self.daemon.start()

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        with open(self.root / f"{os.path.basename(argv[0])}.log", "ab") as log:
            return subprocess.Popen(argv, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def slurm(self, name: str, *words: str, given: str = "") -> str:
        """What one of Slurm's own commands prints."""
        argv = [self.root / "bin" / name, *words]
        done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout

    def await_nodes(self) -> None:
        wait_until(lambda: self.slurm("scontrol", "show", "node").count("State=IDLE ") == 2, what="Slurm's nodes")

    def stop_controller(self) -> None:
        self.controller.terminate()
        self.controller.wait(timeout=60)

    def start_controller(self) -> None:
        self.controller = self._start(_program("slurmctld"), "-D")

    def native_id(self, job_id: str) -> str:
        wait_until(lambda: self.job(job_id)["native_id"] is not None, what=f"the id of job {job_id} in Slurm")
        return str(self.job(job_id)["native_id"])

    def story(self, job_id: str) -> str:
        return "\n".join(event["text"] for event in self.job(job_id)["events"])

    def submit(self, text: str, **spec: Any) -> str:
        path = f"{self.root}/bin:{os.environ['PATH']}"
        return self.daemon.submit("sh", "-c", text, **{"engine": "slurm", "cpus": 1, "env": {"PATH": path}, **spec})

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def await_state(self, job_id: str, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] in states, what=f"{states} of job {job_id}", timeout_s=120)
        return self.job(job_id)

    def close(self) -> None:
        self.daemon.close()
        for one in (self.controller, *self.nodes):
            one.terminate()
        for one in (self.controller, *self.nodes):
            one.wait(timeout=60)


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
    first = site.submit("sleep 600", exclusive=True, nodes=2)
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
    site.slurm("scancel", site.native_id(job_id))
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
    job_id = site.submit("echo $RANK of $WORLD_SIZE at $MASTER_ADDR", ntasks=2)
    job = site.await_state(job_id, *FINAL)
    assert job["state"] == "COMPLETED", (job["events"], Path(job["stdout_path"]).read_text())
    lines = sorted(Path(job["stdout_path"]).read_text().splitlines())
    assert lines == [f"{rank} of 2 at {job['node']}" for rank in range(2)]


def test_a_job_of_two_nodes_runs_on_each_and_its_worst_code_is_its_own(site: RealSite) -> None:
    text = 'echo $NODE_RANK of $NNODES with $MASTER_ADDR; [ "$NODE_RANK" = 0 ] || exit 6; sleep 600'
    job_id = site.submit(text, nodes=2)
    job = site.await_state(job_id, *FINAL)
    assert (job["state"], job["exit_code"], job["node"]) == ("FAILED", 6, "n[1-2]"), site.story(job_id)
    lines = sorted(line for line in Path(job["stdout_path"]).read_text().splitlines() if " of " in line)
    assert lines == ["0 of 2 with n1", "1 of 2 with n1"]
    assert "rank 1 on n2 was the first to fail, with code 6" in Path(job["stdout_path"]).read_text()


def test_a_cancel_gives_the_command_time_to_clean_up(site: RealSite) -> None:
    done = site.root / "cleaned"
    job_id = site.submit(f"trap 'echo done > {done}; exit 0' TERM; echo up > {done}; while :; do sleep 0.1; done")
    wait_until(done.exists, what="the start")
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    job = site.await_state(job_id, *FINAL)
    assert (job["state"], done.read_text()) == ("CANCELLED", "done\n")


@pytest.mark.nightly
def test_a_notice_comes_before_the_time_limit_and_ends_as_a_timeout(site: RealSite) -> None:
    # Slurm's limits are whole minutes, and looked at twice a minute.
    done = site.root / "warned"
    text = f"trap 'echo usr1 > {done}' USR1; echo up > {done}; while :; do sleep 0.1; done"
    notice = {"signal": 10, "before_s": 60, "main_only": False}
    job = site.await_state(site.submit(text, notice=notice, time_limit_s=60, retries=0), *FINAL)
    assert (job["state"], done.read_text()) == ("TIMEOUT", "usr1\n"), site.story(job["id"])


@pytest.mark.nightly
def test_a_preempted_job_is_handed_over_again(site: RealSite) -> None:
    ran = site.root / "preempted"
    text = f"echo run >> {ran}; [ $(wc -l < {ran}) = 2 ] && exit 4; exec sleep 600"
    job_id = site.submit(text, queue="low", exclusive=True, requeue=True)
    site.await_state(job_id, "RUNNING")
    script = f"#!/bin/sh\nuntil [ -e {site.root}/let-go ]; do sleep 0.1; done\n"
    other = site.slurm("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", given=script).strip()
    wait_until(lambda: "PREEMPTED" in site.story(job_id), what="the preemption")
    wait_until(lambda: "RUNNING" in site.slurm("squeue", f"--jobs={other}", "--format=%T"), what="the other's start")
    (site.root / "let-go").touch()
    job = site.await_state(job_id, *FINAL)
    assert (job["exit_code"], job["run"], job["restarts"]) == (4, 2, 1), site.story(job_id)


def test_a_job_that_is_lost_with_its_node_is_handed_over_again(site: RealSite) -> None:
    ran = site.root / "lost"
    text = f"echo $SLURM_JOB_NODELIST >> {ran}; [ $(wc -l < {ran}) = 2 ] && exit 4; exec sleep 600"
    job_id = site.submit(text, requeue=True)
    node = site.await_state(job_id, "RUNNING")["node"]
    site.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    job = site.await_state(job_id, *FINAL)
    site.slurm("scontrol", "update", f"nodename={node}", "state=resume")
    assert (job["exit_code"], job["run"]) == (4, 2), site.story(job_id)
    assert "NODE_FAIL" in site.story(job_id)


@pytest.mark.nightly
def test_a_job_over_its_memory_is_killed_and_says_why(site: RealSite) -> None:
    text = "exec python3 -c 'import time; kept = bytes([1]) * (200 << 20); time.sleep(600)'"
    job = site.await_state(site.submit(text, mem_mib=60, retries=0), *FINAL)
    # Without cgroups Slurm's state is FAILED, too.
    assert (job["state"], job["signal"]) == ("FAILED", 9), site.story(job["id"])
    assert "memory" in Path(job["stdout_path"]).read_text()


def test_a_kill_is_told_as_a_signal(site: RealSite) -> None:
    job = site.await_state(site.submit("kill -KILL $$"), *FINAL)
    assert (job["state"], job["signal"]) == ("FAILED", 9)


def test_a_dead_wrapper_leaves_what_slurm_knows(site: RealSite) -> None:
    # The record says nothing of the end then.
    job = site.await_state(site.submit("kill -KILL $PPID", retries=0), *FINAL)
    assert (job["state"], job["signal"]) == ("FAILED", 9), site.story(job["id"])


@pytest.mark.nightly
def test_tasks_of_an_array_know_their_numbers(site: RealSite) -> None:
    job_id = site.submit("echo $SLURM_ARRAY_TASK_ID; exit $SLURM_ARRAY_TASK_ID", array="0,3-4")
    assert site.await_state(job_id, *FINAL)["state"] == "FAILED"
    tasks = [site.job(f"{job_id}_{task}") for task in (0, 3, 4)]
    assert [task["exit_code"] for task in tasks] == [0, 3, 4]
    assert [Path(task["stdout_path"]).read_text() for task in tasks] == ["0\n", "3\n", "4\n"]


@pytest.mark.nightly
def test_a_hold_in_slurm_is_shown_and_released_there(site: RealSite) -> None:
    first = site.submit("sleep 600", exclusive=True, nodes=2)
    site.await_state(first, "RUNNING")
    job_id = site.submit("true")
    site.slurm("scontrol", "hold", site.native_id(job_id))
    wait_until(lambda: "(JobHeldAdmin)" in (site.job(job_id)["reason_text"] or ""), what="the hold")
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [first]})
    site.await_state(first, *FINAL)
    assert site.job(job_id)["state"] == "PENDING"
    site.slurm("scontrol", "release", site.native_id(job_id))
    assert site.await_state(job_id, *FINAL)["state"] == "COMPLETED"


@pytest.mark.nightly
def test_a_pending_job_that_is_cancelled_in_slurm_is_told(site: RealSite) -> None:
    first = site.submit("sleep 600", exclusive=True, nodes=2)
    site.await_state(first, "RUNNING")
    job_id = site.submit("true")
    site.slurm("scancel", site.native_id(job_id))
    job = site.await_state(job_id, *FINAL)
    assert (job["state"], job["start_at"], "in Slurm" in job["reason_text"]) == ("CANCELLED", None, True)
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [first]})
    site.await_state(first, *FINAL)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"queue": "nowhere"}, "invalid partition"),
        ({"time_limit_s": 7 * 86400}, "time limit"),
        ({"nodes": 9}, "more processors requested than permitted"),
        ({"mem_mib": 900_000}, "memory"),
    ],
    ids=["partition", "time", "nodes", "memory"],
)
def test_what_slurm_refuses_is_its_own_sentence(site: RealSite, spec: dict[str, Any], words: str) -> None:
    job = site.await_state(site.submit("true", **spec), *FINAL)
    assert job["reason"] == "JobLaunchFailure"
    assert words in job["reason_text"].lower(), job["reason_text"]


@pytest.mark.nightly
def test_a_controller_that_is_down_costs_no_job(site: RealSite) -> None:
    go = site.root / "go-on"
    running = site.submit(f"until [ -e {go} ]; do sleep 0.1; done; exit 5")
    site.await_state(running, "RUNNING")
    site.stop_controller()
    late = site.submit("exit 3")
    wait_until(lambda: "ontact" in (site.job(late)["reason_text"] or ""), what="why it waits", timeout_s=90)
    assert (site.job(late)["state"], site.job(running)["state"]) == ("PENDING", "RUNNING")
    go.touch()
    site.start_controller()
    assert site.await_state(running, *FINAL)["exit_code"] == 5
    assert site.await_state(late, *FINAL)["exit_code"] == 3
    assert (site.job(running)["run"], site.job(late)["run"]) == (1, 1)
