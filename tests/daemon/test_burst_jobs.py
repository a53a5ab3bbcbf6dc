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
poll_interval_s = 0.3
[burst]
interval_s = 0.3
max_jobs = {most}
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

    def __init__(self, root: Path, most: int = 1) -> None:
        """Args: most: [burst] max_jobs."""
        self.root = root
        self.slurm = FakeSlurm(root / "slurm")
        config = CONFIG.format(bin=self.slurm.bin, root=root, most=most)
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


def running(made: Site) -> Iterator[Site]:
    made.daemon.start()
    yield made
    made.slurm.behave(sbatch=None, squeue=None, start=None)
    made.daemon.close()
    made.slurm.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from running(Site(tmp_path))


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Site]:
    """With room for three burst jobs in Slurm, and a GPU that is held."""
    made = Site(tmp_path, most=3)
    for started in running(made):
        started.hold_gpu()
        yield started


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


def live(site: Site) -> list[str]:
    """Jobs of Slurm that have not ended."""
    return [number for number, native in site.slurm.jobs().items() if native["state"] in ("PENDING", "RUNNING")]


def array_in_slurm(site: Site, tasks: str, **spec: Any) -> str:
    """An array of which the first three tasks wait in Slurm."""
    site.slurm.behave(start="never")
    array = site.submit(
        f"echo $SLURM_ARRAY_TASK_ID >> {site.root}/ran", **{"burst": True, "array": tasks, "retries": 0, **spec}
    )
    wait_until(lambda: len(live(site)) == 3, what="three tasks in Slurm")
    first = int(tasks.partition("-")[0])
    for task in range(first, first + 3):
        wait_until(
            lambda task=task: site.job(f"{array}_{task}")["reason"] == "HandedOver", what=f"task {task} in Slurm"
        )
    return array


def ran(site: Site) -> list[int]:
    return sorted(map(int, (site.root / "ran").read_text().split()))


def test_each_task_of_a_long_array_runs_once_however_often_the_daemon_is_killed(wide: Site) -> None:
    text = f"echo $SLURM_ARRAY_TASK_ID >> {wide.root}/ran"
    array = wide.submit(text, burst=True, array="0-19", retries=0)
    after = wide.submit("true", gpus=0, dependency=f"afterok:{array}")
    most = 0
    for number in range(1, 20, 6):
        wait_until(lambda number=number: len(wide.slurm.jobs()) >= number, what=f"{number} jobs of Slurm")
        most = max(most, len(live(wide)))
        wide.daemon.kill()
        wide.daemon.start()
    wide.await_state(array, "COMPLETED")
    assert (ran(wide), len(wide.slurm.jobs())) == (list(range(20)), 20)
    assert most <= 3
    assert wide.await_state(after, "COMPLETED")["node"] != "slurm"


@pytest.mark.parametrize("is_killed", [False, True], ids=["", "and the daemon killed"])
def test_a_cancelled_array_leaves_nothing_in_slurm(wide: Site, is_killed: bool) -> None:
    array = array_in_slurm(wide, "0-99")
    wide.daemon.call("POST", "/v1/jobs/cancel", {"ids": [array]})
    if is_killed:
        wide.daemon.kill()
        wide.daemon.start()
    wide.await_state(array, "CANCELLED")
    wait_until(lambda: not live(wide), what="none of it in Slurm")
    assert len(wide.slurm.jobs()) == 3
    assert {wide.job(f"{array}_{task}")["state"] for task in (0, 2, 3, 99)} == {"CANCELLED"}


def test_the_tasks_in_slurm_are_taken_back_with_their_array_and_others_follow(wide: Site) -> None:
    array = array_in_slurm(wide, "0-5")
    answer = wide.daemon.call("POST", "/v1/jobs/requeue", {"ids": [array]})
    assert answer["changed"] == [f"{array}_{task}" for task in range(3)]
    # They stay here from now on.
    wait_until(lambda: len(wide.slurm.jobs()) == 6, what="the others in Slurm")
    # Where their cancel has not come yet, they would start.
    wait_until(lambda: len(live(wide)) == 3, what="the first to be cancelled there")
    wide.slurm.behave(start=None)
    for task in (3, 4, 5):
        assert wide.await_state(f"{array}_{task}", "COMPLETED")["node"] == "fake1"
    assert [wide.job(f"{array}_{task}")["state"] for task in range(3)] == ["PENDING"] * 3
    assert ran(wide) == [3, 4, 5]


def test_an_array_is_held_but_for_its_tasks_in_slurm_and_says_so(wide: Site) -> None:
    array = array_in_slurm(wide, "0-5")
    answer = wide.daemon.call("POST", "/v1/jobs/hold", {"ids": [array]})
    assert answer["changed"] == [array]
    assert answer["notes"] == [
        f"tasks {array}_0, {array}_1 and {array}_2 are in Slurm and cannot be held there; take one back and hold it "
        f"with: gctl requeue --hold {array}_0"
    ]
    wide.slurm.behave(start=None)
    for task in range(3):
        wide.await_state(f"{array}_{task}", "COMPLETED")
    assert wide.job(f"{array}_4")["reason"] == "JobHeldUser"
    wide.daemon.call("POST", "/v1/jobs/release", {"ids": [array]})
    wide.await_state(array, "COMPLETED")
    assert ran(wide) == list(range(6))


def test_an_array_bursts_once_what_it_depends_on_has_ended_there(wide: Site) -> None:
    wide.slurm.behave(start="never")
    first = wide.submit("true", burst=True)
    array = wide.submit(
        "exit $((SLURM_ARRAY_TASK_ID == 3))", burst=True, array="1-4", retries=0, dependency=f"afterok:{first}"
    )
    each = wide.submit("true", gpus=0, array="1-4", dependency=f"aftercorr:{array}")
    wait_until(lambda: len(wide.slurm.jobs()) == 1, what="the first in Slurm")
    assert wide.job(array)["reason"] == "Dependency"
    wide.slurm.behave(start=None)
    wide.await_state(array, "FAILED")
    wait_until(lambda: wide.job(each)["state"] == "CANCELLED", what="the end of those that wait for it")
    states = [wide.job(f"{each}_{task}")["state"] for task in (1, 2, 3, 4)]
    assert states == ["COMPLETED", "COMPLETED", "CANCELLED", "COMPLETED"]
    assert len(wide.slurm.jobs()) == 5


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
