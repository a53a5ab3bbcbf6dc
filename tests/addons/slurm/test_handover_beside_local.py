"""Jobs of one queue here and one in Slurm that wait for one another, and that move between them: one daemon for all."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from harness import FINAL, Daemon
from support import wait_until

from gpusched.errors import GpuschedError

CONFIG = """
[daemon]
poll_s = 0.1
[handover]
commands = "{bin}"
folder = "{root}/records"
poll_interval_s = 0.3
[queue.here]
[queue.other]
[queue.slurm]
engine = "slurm"
[default]
queue = "here"
"""


class Site:
    """A daemon, and the Slurm that jobs of the queue `slurm` are handed over to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slurm = FakeSlurm(root / "slurm")
        config = CONFIG.format(bin=self.slurm.bin, root=root)
        self.daemon = Daemon(root / "home", fake_gpus="2x24GiB", config=config)
        self.daemon.start()

    def submit(self, text: str, **spec: Any) -> str:
        return self.daemon.submit("sh", "-c", text, **spec)

    def job(self, job_id: str) -> dict[str, Any]:
        return self.daemon.job(job_id)

    def await_state(self, job_id: str, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] in states, what=f"{states} of job {job_id}")
        return self.job(job_id)

    def await_reason(self, job_id: str, reason: str) -> None:
        wait_until(lambda: self.job(job_id)["reason"] == reason, what=f"{reason} of job {job_id}")

    def update(self, job_id: str, **changes: Any) -> None:
        self.daemon.call("POST", "/v1/jobs/update", {"ids": [job_id], "changes": changes})

    def was_in_slurm(self, job_id: str) -> bool:
        return self.job(job_id)["native_id"] is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("both"))
    yield made
    made.daemon.close()
    made.slurm.close()


DIRECTIONS = [("here", "slurm"), ("slurm", "here"), ("slurm", "slurm")]
CONDITIONS = {
    "afterok of a good one": ("afterok", 0, True),
    "afterok of a bad one": ("afterok", 3, False),
    "afternotok of a good one": ("afternotok", 0, False),
    "afternotok of a bad one": ("afternotok", 3, True),
    "afterany of a good one": ("afterany", 0, True),
    "afterany of a bad one": ("afterany", 3, True),
}


@pytest.mark.parametrize(("condition", "code", "runs"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_job_waits_for_one_on_the_other_side(site: Site, condition: str, code: int, runs: bool) -> None:
    pairs = []
    for of_parent, of_child in DIRECTIONS:
        log = site.root / f"{condition}-{code}-{of_parent}-{of_child}"
        parent = site.submit(f"echo parent >> {log}; exit {code}", queue=of_parent)
        child = site.submit(f"echo child >> {log}", queue=of_child, dependency=f"{condition}:{parent}")
        pairs.append((parent, child, of_child, log))
    for parent, child, of_child, log in pairs:
        assert site.await_state(parent, *FINAL)["exit_code"] == code
        if runs:
            assert site.await_state(child, *FINAL)["state"] == "COMPLETED"
            assert log.read_text() == "parent\nchild\n"
            assert site.was_in_slurm(child) is (of_child == "slurm")
        else:
            site.await_reason(child, "DependencyNeverSatisfied")
            assert not site.was_in_slurm(child)
            site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [child]})


@pytest.mark.parametrize(("of_parent", "of_child"), DIRECTIONS[:2])
def test_after_is_met_by_the_start_on_the_other_side(site: Site, of_parent: str, of_child: str) -> None:
    go = site.root / f"after-{of_parent}-{of_child}"
    site.slurm.behave(start="never" if of_parent == "slurm" else None)
    parent = site.submit(f"until [ -e {go} ]; do sleep 0.02; done", queue=of_parent)
    child = site.submit("true", queue=of_child, dependency=f"after:{parent}")
    if of_parent == "slurm":
        # In Slurm it has not begun yet.
        wait_until(lambda: site.was_in_slurm(parent), what="the hand-over")
        assert (site.job(parent)["state"], site.job(child)["reason"]) == ("PENDING", "Dependency")
        site.slurm.behave(start=None)
    assert site.await_state(child, *FINAL)["state"] == "COMPLETED"
    assert site.job(parent)["state"] == "RUNNING"
    go.touch()
    site.await_state(parent, "COMPLETED")


@pytest.mark.parametrize(("of_parent", "of_child"), DIRECTIONS)
def test_tasks_of_arrays_wait_for_their_counterparts(site: Site, of_parent: str, of_child: str) -> None:
    log = site.root / f"corr-{of_parent}-{of_child}"
    parent = site.submit("exit $((SLURM_ARRAY_TASK_ID - 1))", array="1-2", queue=of_parent)
    text = f"echo $SLURM_ARRAY_TASK_ID >> {log}"
    child = site.submit(text, array="1-2", queue=of_child, dependency=f"aftercorr:{parent}", never_satisfied="cancel")
    site.await_state(parent, *FINAL)
    site.await_state(child, *FINAL)
    assert [site.job(f"{child}_{task}")["state"] for task in (1, 2)] == ["COMPLETED", "CANCELLED"]
    assert log.read_text() == "1\n"
    assert not site.was_in_slurm(f"{child}_2")


@pytest.mark.parametrize(("of_parent", "of_child"), DIRECTIONS[:2])
def test_a_singleton_waits_for_its_namesake(site: Site, of_parent: str, of_child: str) -> None:
    go, name = site.root / f"single-{of_parent}-{of_child}", f"only-{of_parent}-{of_child}"
    first = site.submit(f"until [ -e {go} ]; do sleep 0.02; done", queue=of_parent, name=name)
    second = site.submit("true", queue=of_child, name=name, dependency="singleton")
    site.await_state(first, "RUNNING")
    assert (site.job(second)["reason"], site.was_in_slurm(second)) == ("Dependency", False)
    go.touch()
    assert site.await_state(second, *FINAL)["state"] == "COMPLETED"


def test_a_job_that_moves_takes_the_engine_of_its_queue(site: Site) -> None:
    job_id = site.submit("true", queue="slurm", hold=True)
    site.update(job_id, queue="here")
    site.daemon.call("POST", "/v1/jobs/release", {"ids": [job_id]})
    assert site.await_state(job_id, *FINAL)["state"] == "COMPLETED"
    assert not site.was_in_slurm(job_id)
    back = site.submit("true", queue="here", hold=True)
    site.update(back, queue="slurm")
    site.daemon.call("POST", "/v1/jobs/release", {"ids": [back]})
    assert site.await_state(back, *FINAL)["state"] == "COMPLETED"
    assert site.was_in_slurm(back)


@pytest.mark.parametrize(("engine", "queue", "to"), [("slurm", "here", "other"), ("local", "slurm", "here")])
def test_a_job_that_moves_keeps_an_engine_of_its_own(site: Site, engine: str, queue: str, to: str) -> None:
    job_id = site.submit("true", engine=engine, queue=queue, hold=True)
    site.update(job_id, queue=to)
    site.daemon.call("POST", "/v1/jobs/release", {"ids": [job_id]})
    site.await_state(job_id, *FINAL)
    assert site.was_in_slurm(job_id) is (engine == "slurm")


def test_a_job_that_comes_back_must_fit_here(site: Site) -> None:
    job_id = site.submit("true", queue="slurm", gpus=8, hold=True)
    with pytest.raises(GpuschedError) as found:
        site.update(job_id, queue="here")
    assert "8 GPUs" in found.value.message
    job = site.job(job_id)
    assert (job["queue"], job["state"]) == ("slurm", "PENDING")
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})


def test_what_slurm_cannot_keep_does_not_move_there(site: Site) -> None:
    job_id = site.submit("true", queue="here", gpus=1, vram_mib=1024, hold=True)
    with pytest.raises(GpuschedError) as found:
        site.update(job_id, queue="slurm")
    assert "--vram is lost in Slurm" in found.value.message
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})


def test_a_job_in_slurm_does_not_move(site: Site) -> None:
    site.slurm.behave(start="never")
    job_id = site.submit("true", queue="slurm")
    wait_until(lambda: site.was_in_slurm(job_id), what="the hand-over")
    with pytest.raises(GpuschedError) as found:
        site.update(job_id, queue="here")
    assert "is in Slurm and cannot change" in found.value.message
    site.slurm.behave(start=None)
    assert site.await_state(job_id, *FINAL)["state"] == "COMPLETED"


def test_slurms_commands_here_name_its_job_there(site: Site) -> None:
    env = {**os.environ, "GPUSCHED_SOCKET": str(site.daemon.home / "run" / "api.sock")}

    def says(*words: str) -> str:
        argv = [site.daemon.home / "slurm" / "bin" / words[0], *words[1:]]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60).stdout

    site.slurm.behave(start="never")
    job_id = site.submit("sleep 600", queue="slurm")
    wait_until(lambda: site.was_in_slurm(job_id), what="the hand-over")
    native = f"Slurm job {site.job(job_id)['native_id']}"
    shown = says("scontrol", "show", "job", job_id)
    assert f"   AdminComment={native}\n" in shown
    assert " Restarts=0 " in shown
    assert says("squeue", "-h", "-j", job_id, "-o", "%T %R", "--start").strip() == "PENDING (None)"
    assert says("squeue", "-h", "-j", job_id, "-O", "admin_comment:40,restartcnt:2").split() == [*native.split(), "0"]
    site.slurm.behave(start=None)
    site.await_state(job_id, "RUNNING")
    assert says("squeue", "-h", "-j", job_id, "-o", "%T %N").strip() == "RUNNING fake1"
    assert says("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "NodeList,AdminComment").strip() == f"fake1|{native}"
    says("scancel", job_id)
    assert site.await_state(job_id, *FINAL)["state"] == "CANCELLED"
