"""Bursting in a real daemon: jobs that would wait too long here run in the programs that stand for Slurm's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from harness import Daemon
from support import wait_until

from gpusched.errors import GpuschedError

CONFIG = """
[daemon]
poll_s = 0.1
[handover]
commands = "{bin}"
folder = "{root}/records"
poll_interval_s = 0.2
[burst]
interval_s = 0.3
max_jobs = 1
[queue.asks]
burst_after_s = 3600
slurm_partition = "gpu"
[queue.allows]
parent = "top"
[queue.top]
burst_after_s = 3600
burst = "allow"
[queue.never]
[default]
queue = "asks"
"""
HOUR = 3600


class Site:
    """A daemon with one GPU that a job holds for five hours, and the Slurm that others burst to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slurm = FakeSlurm(root / "slurm")
        config = CONFIG.format(bin=self.slurm.bin, root=root)
        self.daemon = Daemon(root / "home", fake_gpus="1x24GiB", config=config)

    def hold_gpu(self, **spec: Any) -> str:
        held = self.submit("sleep 600", **{"time_limit_s": 5 * HOUR, "queue": "never", **spec})
        self.await_state(held, "RUNNING")
        return held

    def submit(self, text: str, **spec: Any) -> str:
        return self.daemon.submit("sh", "-c", text, **{"gpus": 1, "time_limit_s": HOUR, **spec})

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def story(self, job_id: str) -> str:
        return "\n".join(event["text"] for event in self.job(job_id)["events"])

    def why(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.call("GET", f"/v1/jobs/{job_id}/why")["why"]
        return found

    def await_state(self, job_id: str, state: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] == state, what=f"{state} of job {job_id}")
        return self.job(job_id)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.daemon.start()
    yield made
    made.slurm.behave(sbatch=None, squeue=None, start=None)
    made.daemon.close()
    made.slurm.close()


def test_a_job_that_would_wait_too_long_runs_in_slurm(site: Site) -> None:
    site.hold_gpu()
    patient = site.submit("true")
    job_id = site.submit("echo $GPUSCHED_JOB_ID; exit 7", burst=True)
    job = site.await_state(job_id, "FAILED")
    assert job["exit_code"] == 7
    assert Path(job["stdout_path"]).read_text() == f"{job_id}\n"
    assert "burst to Slurm: expected start in " in site.story(job_id)
    assert "limit 1:00:00" in site.story(job_id)
    (native,) = site.slurm.jobs().values()
    assert native["options"]["partition"] == "gpu"
    assert (site.job(patient)["state"], site.why(patient)["burst"]) == ("PENDING", None)


def test_a_retry_of_a_burst_job_stays_in_slurm(site: Site) -> None:
    site.hold_gpu()
    job_id = site.submit("exit 3", burst=True, retries=1, backoff_s=0)
    assert site.await_state(job_id, "FAILED")["run"] == 2
    assert len(site.slurm.jobs()) == 2
    assert site.story(job_id).count("burst to Slurm") == 1


def test_tasks_of_an_array_burst_one_by_one_and_the_others_run_here(site: Site) -> None:
    held = site.hold_gpu()
    site.slurm.behave(start="never")
    array = site.submit(f"echo $SLURM_ARRAY_TASK_ID >> {site.root}/ran", burst=True, array="3-4", retries=0)
    wait_until(lambda: len(site.slurm.jobs()) == 1, what="the burst of the first task")
    assert "burst to Slurm: expected start in " in site.story(f"{array}_3")
    site.daemon.kill()
    site.daemon.start()
    # [burst] max_jobs keeps the other; it starts when the GPU is free, while the first is still in Slurm.
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [held]})
    site.await_state(f"{array}_4", "COMPLETED")
    assert site.job(f"{array}_4")["node"] != "slurm"
    assert (site.job(f"{array}_3")["state"], len(site.slurm.jobs())) == ("PENDING", 1)
    site.slurm.behave(start=None)
    assert site.await_state(array, "COMPLETED")["state"] == "COMPLETED"
    assert site.job(f"{array}_3")["node"] == "fake1"
    assert (site.root / "ran").read_text() == "4\n3\n"


def test_no_more_jobs_burst_than_may_and_a_requeued_one_comes_back_for_good(site: Site) -> None:
    held = site.hold_gpu()
    site.slurm.behave(start="never")
    first, second = (site.submit("true", queue="allows") for _ in range(2))
    wait_until(lambda: "is in Slurm" in site.story(first), what="the burst")
    assert site.why(second)["burst"] == "is handed over to Slurm if its expected start stays more than 1:00:00 away"
    site.daemon.call("POST", "/v1/jobs/requeue", {"ids": [first]})
    # The place of the first is free again.
    wait_until(lambda: "is in Slurm" in site.story(second), what="the burst of the second")
    wait_until(lambda: site.job(first)["reason"] in ("Resources", "Priority"), what="the return of the first")
    assert (
        site.why(first)["burst"]
        == "is not handed over to Slurm: it was submitted with --no-burst, or requeued from there"
    )
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [held]})
    assert site.await_state(first, "COMPLETED")["node"] != "slurm"
    assert len(site.slurm.jobs()) == 2


def test_a_wait_of_unknown_length_is_no_reason(site: Site) -> None:
    held = site.hold_gpu(time_limit_s="unlimited")
    unknown = site.submit("true", burst=True)
    assert site.why(unknown)["start"] is None or site.why(unknown)["start"]["low_at"] is None
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [held]})
    site.await_state(unknown, "COMPLETED")
    # A later look, at a wait that is known, finds only the other.
    site.hold_gpu()
    other = site.submit("true", burst=True)
    site.await_state(other, "COMPLETED")
    assert len(site.slurm.jobs()) == 1
    assert "burst" not in site.story(unknown)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"burst": False, "queue": "allows"},
            "is not handed over to Slurm: it was submitted with --no-burst, or requeued from there",
        ),
        ({"gpus": None, "vram_mib": 4096}, "--vram is lost in Slurm"),
        ({"gpus": None, "gpu_fraction": 0.5}, "is not handed over to Slurm: it asks for a fraction of a GPU"),
        ({"array": "0-1%1"}, "is not handed over to Slurm: its array runs at most 1 task at once"),
    ],
    ids=["no-burst", "vram", "fraction", "throttle"],
)
def test_what_slurm_could_not_keep_waits_here_and_says_so(site: Site, spec: dict[str, Any], said: str) -> None:
    site.hold_gpu()
    wanted = {name: value for name, value in {"gpus": 1, "burst": True, **spec}.items() if value is not None}
    body = site.daemon.spec("true", time_limit_s=HOUR, **wanted)
    job_id = str(site.daemon.call("POST", "/v1/jobs", {"spec": body})["job"]["id"])
    assert said in site.why(job_id)["burst"]
    # One that came later and may burst has been looked at together with it.
    other = site.submit("true", burst=True)
    site.await_state(other, "COMPLETED")
    assert (site.job(job_id)["state"], len(site.slurm.jobs())) == ("PENDING", 1)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"queue": "never"}, "jobs of queue never do not burst"),
        ({"engine": "slurm"}, "the job is handed over to Slurm at once, and cannot burst"),
        ({"engine": "local"}, "engine local keeps it here"),
    ],
)
def test_burst_is_refused_where_it_has_no_effect(site: Site, spec: dict[str, Any], said: str) -> None:
    with pytest.raises(GpuschedError) as found:
        site.submit("true", burst=True, **spec)
    assert said in found.value.message
    assert found.value.hint


@pytest.mark.parametrize("moment", ["commit:1,reconcile", "commit:2", "commit:2,reconcile", "commit:3"])
def test_a_daemon_killed_around_the_burst_loses_and_repeats_nothing(site: Site, moment: str) -> None:
    site.hold_gpu()
    site.daemon.stop()
    site.daemon.start(GPUSCHED_CRASH_AT=moment)
    with contextlib.suppress(GpuschedError, ConnectionError):
        site.submit(f"echo ran >> {site.root}/ran; exit 3", burst=True, key="once")
    site.daemon.reap()
    site.daemon.start()
    (job_id,) = [
        str(job["id"]) for job in site.daemon.call("GET", "/v1/jobs?states=all")["jobs"] if job["queue"] == "asks"
    ]
    assert site.await_state(job_id, "FAILED")["exit_code"] == 3
    assert (site.root / "ran").read_text() == "ran\n"
    assert (len(site.slurm.jobs()), site.story(job_id).count("burst to Slurm")) == (1, 1)
