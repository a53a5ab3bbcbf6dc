"""The daemon of the whole machine and what it keeps its runs to, under both launchers."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limited_runs import LET_THROUGH, PATIENCE_S, PYTHON, REFUSED, REPORTS_OPENING, made_cgroup
from people import SystemDaemon
from support import wait_until

from gpusched.engine.linux import cgroup

USER = "daemon"
FINAL = {"COMPLETED", "FAILED", "OUT_OF_MEMORY", "CANCELLED", "NODE_FAIL", "TIMEOUT"}
CONFIG = """
[gpu]
deadline_s = 60.0
free_polls = 1
[isolation]
pin_cpus = true
"""


class CagingDaemon(SystemDaemon):
    """One with simulated GPUs that all have a node, and somebody who submits."""

    is_warm = False

    def __init__(self, launcher: str, folder: str | None) -> None:
        super().__init__(CONFIG, fake_gpus="3x24GiB")
        text = self.settings.read_text().replace("[daemon]\n", f'[daemon]\nlauncher = "{launcher}"\n')
        self.settings.write_text(text)
        if folder is not None:
            # Nobody may go where leaves have controllers: a daemon that comes back goes beside those of its runs.
            leaf = f"{folder}/gpusched-daemon"
            enter = f"at={folder}; if [ -d {leaf} ]; then at={leaf}; fi; echo 0 >$at/cgroup.procs"
            self.prefix = ["sh", "-ec", f'{enter}; exec "$@"', "sh"]
        self.work = self.home / "work"
        self.work.mkdir()
        os.chown(self.work, pwd.getpwnam(USER).pw_uid, -1)

    def run(self, *argv: str, **spec: Any) -> str:
        """Submit as the user; its output is in the work dir."""
        spec = {"work_dir": str(self.work), "stdout": "%j.out", "cpus": 1, **spec}
        if not self.people:
            self.person(USER)
        return self.people[0].submit(*argv, **spec)

    def end(self, job_id: str, state: str) -> dict[str, Any]:
        """Wait for its end, which must be of this kind."""
        wait_until(lambda: self.job(job_id)["state"] in FINAL, PATIENCE_S, f"the end of job {job_id}")
        job = self.job(job_id)
        assert job["state"] == state, self.story(job_id)
        return job

    def output(self, job_id: str) -> str:
        path = Path(self.work) / f"{job_id}.out"
        return path.read_text() if path.exists() else ""

    def story(self, job_id: str) -> list[str]:
        return [event["text"] for event in self.job(job_id)["events"]]


@pytest.fixture(params=["systemd", "fork"], scope="module")
def daemon(request: pytest.FixtureRequest, gpu_nodes: list[str]) -> Iterator[CagingDaemon]:
    """One for all tests: it takes minutes to start where it is emulated."""
    if request.param == "systemd" and not os.path.isdir("/run/systemd/system"):
        pytest.skip("PID 1 is not systemd")
    with made_cgroup() as path:
        made = CagingDaemon(request.param, path if request.param == "fork" else None)
        made.start()
        yield made
        made.close()


def test_the_daemon_reports_what_it_enforces(daemon: CagingDaemon) -> None:
    (node,) = daemon.call("GET", "/v1/cluster")["nodes"]
    found = node["isolation"]
    assert found["launcher"] == ("fork" if daemon.prefix else "systemd")
    assert [found[key] for key in ("memory", "tasks", "cpus", "gpus", "why_not")] == [
        "cgroup",
        "cgroup",
        "own",
        "device rule",
        None,
    ]


def test_out_of_memory_is_recorded_and_retried_with_more(daemon: CagingDaemon) -> None:
    hog = "x = bytearray(200 << 20)"
    job_id = daemon.run(PYTHON, "-c", hog, mem_mib=100, retries=1, backoff_s=0)
    job = daemon.end(job_id, "COMPLETED")
    first, second = job["runs"]
    assert (first["outcome"], first["reason"]) == ("OUT_OF_MEMORY", "MemoryLimit")
    assert first["reason_text"] == "needed more than its 100M of host memory: the kernel killed it (signal 9)"
    assert 90 <= first["peak_mem_mib"] <= 100
    assert second["outcome"] == "COMPLETED"
    assert 200 < second["peak_mem_mib"] < 512
    story = daemon.story(job_id)
    assert "retry 1 of 1 in 0.0s, with 512M of host memory instead of 100M" in story
    assert any(text.startswith("kept to 512M of memory, 16384 tasks, ") for text in story)


def test_a_run_opens_only_its_own_gpus(daemon: CagingDaemon, gpu_nodes: list[str]) -> None:
    reports = (PYTHON, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])\n" + REPORTS_OPENING, *gpu_nodes)
    with_gpu, without = daemon.run(*reports, gpus=1), daemon.run(*reports)
    daemon.end(with_gpu, "COMPLETED")
    daemon.end(without, "COMPLETED")
    given, *lines = daemon.output(with_gpu).splitlines()
    expected = [LET_THROUGH if str(at) == given else REFUSED for at in range(3)]
    assert [line.partition(": ")[2] for line in lines] == [*expected, LET_THROUGH]
    assert daemon.output(without).splitlines()[1:] == [
        f"{name}: {REFUSED}" for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl")
    ]


def test_a_run_survives_the_daemon_with_its_cgroup_and_processors(daemon: CagingDaemon) -> None:
    code = "import os, time; print(sorted(os.sched_getaffinity(0)), flush=True); time.sleep(1000)"
    first = daemon.run(PYTHON, "-c", code, mem_mib=300)
    wait_until(lambda: "]" in daemon.output(first), PATIENCE_S, "its processors")
    pid = daemon.job(first)["runs"][0]["pid"]
    folder = cgroup.path_of(pid)
    assert folder is not None
    assert cgroup.number(folder, "memory.max") == 300 << 20
    daemon.kill()
    daemon.start()
    assert cgroup.path_of(pid) == folder
    others = [daemon.run(PYTHON, "-c", code) for _ in range(len(os.sched_getaffinity(0)))]
    for other in others:
        wait_until(lambda other=other: "]" in daemon.output(other), PATIENCE_S, "its processors")  # type: ignore[misc]
    own = [daemon.output(job_id).strip() for job_id in (first, *others)]
    # One each, the first one's is still its own, and the last one found none left: it may run on all.
    assert sorted(own[:-1]) == [str([one]) for one in sorted(os.sched_getaffinity(0))]
    assert own[-1] == str(sorted(os.sched_getaffinity(0)))
    daemon.call("POST", "/v1/jobs/cancel", {"users": [USER]})
    ended = daemon.end(first, "CANCELLED")
    assert ended["runs"][0]["peak_mem_mib"] > 1
    wait_until(lambda: not os.path.exists(folder), PATIENCE_S, "its control group to go")
