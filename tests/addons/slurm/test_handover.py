"""Jobs handed over to Slurm by a real daemon: programs that stand for Slurm's, kills, commands that fail or hang."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from harness import Daemon
from people import ANN, NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.errors import GpuschedError

CONFIG = """
[daemon]
poll_s = 0.1
[handover]
commands = "{bin}"
folder = "{root}/records"
poll_interval_s = 0.3
lost_after_s = 1
[queue.here]
[queue.big]
engine = "slurm"
slurm_partition = "gpu"
[default]
queue = "here"
"""


class Site:
    """A daemon, and the Slurm that it hands jobs over to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slurm = FakeSlurm(root / "slurm")
        self.daemon = Daemon(root / "home", config=CONFIG.format(bin=self.slurm.bin, root=root))

    def submit(self, text: str, **spec: Any) -> str:
        return self.daemon.submit("sh", "-c", text, engine="slurm", **spec)

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def story(self, job_id: str) -> list[str]:
        return [event["text"] for event in self.job(job_id)["events"]]

    def native(self, *, jobs: int = 1) -> list[dict[str, Any]]:
        """The jobs in Slurm, once there are as many."""
        wait_until(lambda: len(self.slurm.jobs()) >= jobs, what="jobs in Slurm")
        return list(self.slurm.jobs().values())

    def await_state(self, job_id: str, state: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] == state, what=f"{state} of job {job_id}")
        return self.job(job_id)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.daemon.start()
    yield made
    made.slurm.behave(sbatch=None, squeue=None, scancel=None, sacct=None, scontrol=None, start=None)
    made.daemon.close()
    made.slurm.close()


def test_a_job_runs_in_slurm_and_its_exit_code_comes_back(site: Site) -> None:
    job_id = site.submit("echo $GPUSCHED_JOB_ID; exit 7", name="seven")
    job = site.await_state(job_id, "FAILED")
    assert job["exit_code"] == 7
    (native,) = site.native()
    assert native["options"]["job-name"] == "seven"
    assert native["options"]["comment"].startswith(f"gpusched:{job_id}.1.")
    assert Path(job["stdout_path"]).read_text() == f"{job_id}\n"
    assert f"is in Slurm as job {native['id']}" in site.story(job_id)


def test_a_job_is_pending_while_it_is_pending_in_slurm(site: Site) -> None:
    site.slurm.behave(start="never")
    job_id = site.submit("true")
    (native,) = site.native()
    wait_until(lambda: "PENDING" in (site.job(job_id)["reason_text"] or ""), what="Slurm's state")
    job = site.job(job_id)
    assert (job["state"], job["reason"]) == ("PENDING", "HandedOver")
    assert job["reason_text"] == f"is in Slurm as job {native['id']}: PENDING"
    site.slurm.behave(start=None)
    assert site.await_state(job_id, "COMPLETED")["exit_code"] == 0


def test_a_queue_hands_its_jobs_over_to_its_partition(site: Site) -> None:
    job_id = site.daemon.submit("true", queue="big")
    site.await_state(job_id, "COMPLETED")
    assert site.native()[0]["options"]["partition"] == "gpu"
    stays = site.daemon.submit("true", queue="big", engine="local")
    site.await_state(stays, "COMPLETED")
    assert len(site.slurm.jobs()) == 1


def test_vram_is_refused_with_both_ways_out(site: Site) -> None:
    with pytest.raises(GpuschedError) as found:
        site.submit("true", gpus=1, vram_mib=4096)
    assert "--vram is lost in Slurm" in found.value.message
    assert "use -g 1" in found.value.message
    assert "--engine local" in found.value.hint


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_cancel_reaches_slurm(site: Site, state: str) -> None:
    site.slurm.behave(start="never" if state == "PENDING" else None)
    job_id = site.submit("sleep 600")
    site.native()
    wait_until(lambda: "is in Slurm" in " ".join(site.story(job_id)), what="the hand-over")
    site.await_state(job_id, state)
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    job = site.await_state(job_id, "CANCELLED")
    assert job["reason_text"].startswith("cancelled by ")
    assert site.native()[0]["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("state", "becomes", "reason"),
    [
        ("TIMEOUT", "TIMEOUT", "TimeLimit"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", "MemoryLimit"),
        ("CANCELLED", "CANCELLED", "CancelledByUser"),
        ("NODE_FAIL", "NODE_FAIL", "NodeDown"),
        ("PREEMPTED", "PREEMPTED", "Preempted"),
    ],
)
def test_ends_that_slurm_decides(site: Site, state: str, becomes: str, reason: str) -> None:
    job_id = site.submit("sleep 600", mem_mib=100, requeue=False)
    site.await_state(job_id, "RUNNING")
    (native,) = site.native()
    site.slurm.end(native["id"], state)
    job = site.await_state(job_id, becomes)
    assert job["reason"] == reason


def test_a_killed_wrapper_leaves_the_signal_that_slurm_knows(site: Site) -> None:
    # squeue says FAILED alone, and the record is not waited for.
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    site.slurm.end(site.native()[0]["id"], "FAILED", code=-9)
    assert site.await_state(job_id, "FAILED")["signal"] == 9


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_what_slurm_takes_away_is_handed_over_again(site: Site, state: str) -> None:
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    site.slurm.end(site.native()[0]["id"], state)
    site.native(jobs=2)
    site.await_state(job_id, "RUNNING")
    assert site.job(job_id)["run"] == 2


def test_retries_are_ours(site: Site) -> None:
    job_id = site.submit("exit 3", retries=1, backoff_s=0.01)
    job = site.await_state(job_id, "FAILED")
    assert (job["run"], len(site.slurm.jobs())) == (2, 2)
    assert all("no-requeue" in native["options"] for native in site.slurm.jobs().values())


def test_each_task_of_an_array_is_a_job_there(site: Site) -> None:
    job_id = site.submit("echo $SLURM_ARRAY_TASK_ID $GPUSCHED_ARRAY_TASK_ID", array="0-2%2")
    site.await_state(job_id, "COMPLETED")
    assert len(site.slurm.jobs()) == 3
    outputs = {Path(native["options"]["output"]).read_text() for native in site.slurm.jobs().values()}
    assert outputs == {"0 0\n", "1 1\n", "2 2\n"}


def test_no_more_tasks_are_in_slurm_than_may_run_at_once(site: Site) -> None:
    site.slurm.behave(start="never")
    job_id = site.submit("true", array="0-3%2")
    site.native(jobs=2)
    calls = len(site.slurm.calls())
    wait_until(lambda: len(site.slurm.calls()) > calls + 3, what="more questions")
    assert len(site.slurm.jobs()) == 2
    site.slurm.behave(start=None)
    site.await_state(job_id, "COMPLETED")
    assert len(site.slurm.jobs()) == 4


def test_jobs_depend_on_each_other_across_both(site: Site) -> None:
    site.slurm.behave(start="never")
    first = site.submit("true")
    second = site.daemon.submit("true", dependency=f"afterok:{first}")
    third = site.submit("true", dependency=f"afterok:{second}")
    site.native()
    assert site.job(second)["reason"] == site.job(third)["reason"] == "Dependency"
    site.slurm.behave(start=None)
    site.await_state(third, "COMPLETED")
    assert len(site.slurm.jobs()) == 2


def test_the_environment_and_the_script_arrive_as_they_are(site: Site) -> None:
    text = '#!/bin/sh\n#SBATCH --job-name=not-this\nprintf \'%s|\' "$TEXT" "$@"\nGPUSCHED_SCRIPT=1\n'
    spec = site.daemon.spec(engine="slurm", env={"TEXT": "a 'b' $HOME\nc", "BAD-NAME": "x"})
    spec |= {"script": text, "script_name": "x.sh", "argv": ["one two", "$x"]}
    job = site.daemon.call("POST", "/v1/jobs", {"spec": spec})["job"]
    job = site.await_state(job["id"], "COMPLETED")
    assert Path(job["stdout_path"]).read_text() == "a 'b' $HOME\nc|one two|$x|"


def test_a_notice_reaches_the_command(site: Site) -> None:
    seen = site.root / "seen"
    notice = {"signal": 10, "before_s": 60, "main_only": True}
    job_id = site.submit(
        f"trap 'echo yes > {seen}; exit' USR1; echo on > {seen}; while :; do sleep 0.05; done", notice=notice
    )
    site.await_state(job_id, "RUNNING")
    wait_until(seen.exists, what="the command")
    (native,) = site.native()
    assert native["options"]["signal"] == "B:USR1@60"
    os.kill(native["pid"], 10)
    wait_until(lambda: seen.read_text() == "yes\n", what="the notice")


@pytest.mark.parametrize(
    ("says", "state"), [(":", "PENDING"), ('echo done > "$GPUSCHED_CHECKPOINT_FILE"', "COMPLETED")]
)
def test_a_handler_that_ends_with_0_completes_a_requeued_job_only_if_it_says_so(
    site: Site, says: str, state: str
) -> None:
    notice = {"signal": 10, "before_s": 60, "main_only": True}
    text = f"trap '{says}; exit 0' USR1; echo on > {site.root}/seen; while :; do sleep 0.05; done"
    job_id = site.submit(text, notice=notice, grace_s=60)
    site.await_state(job_id, "RUNNING")
    wait_until((site.root / "seen").exists, what="the command")
    site.daemon.call("POST", "/v1/jobs/requeue", {"ids": [job_id], "hold": True})
    job = site.await_state(job_id, state)
    (run,) = job["runs"]
    assert (run["outcome"], run["exit_code"]) == ("PREEMPTED" if state == "PENDING" else "COMPLETED", 0)
    assert any("ended with exit code 0 after it was told to stop" in text for text in site.story(job_id))


def test_the_memory_equals_the_table_all_along(site: Site) -> None:
    site.daemon.stop()
    site.daemon.start(GPUSCHED_CHECK_EVERY="1")
    site.slurm.behave(start="never")
    tasks = site.submit("exit 1", array="0-3%2", retries=1, backoff_s=0.01)
    last = site.daemon.submit("true", dependency=f"afterany:{tasks}")
    back = site.submit("sleep 600")
    site.native(jobs=3)
    wait_until(lambda: "is in Slurm" in " ".join(site.story(back)), what="the hand-over")
    site.daemon.call("POST", "/v1/jobs/requeue", {"ids": [back], "hold": True})
    wait_until(lambda: site.job(back)["reason"] == "JobHeldUser", what="the hold")
    site.slurm.behave(start=None)
    site.await_state(last, "COMPLETED")
    assert len(site.slurm.jobs()) == 9
    assert "differed" not in (site.daemon.home / "log" / "gpuschedd.log").read_text()


# --- what goes wrong ---------------------------------------------------------------------------------------


def test_a_refusal_of_sbatch_ends_the_job_with_its_words(site: Site) -> None:
    site.slurm.behave(sbatch="fail:Batch job submission failed: Invalid partition name specified")
    job = site.await_state(site.submit("true"), "FAILED")
    assert job["reason"] == "JobLaunchFailure"
    assert job["reason_text"] == "Slurm refused it: Invalid partition name specified"


def test_an_unreachable_controller_is_waited_for(site: Site) -> None:
    site.slurm.behave(sbatch="fail:Batch job submission failed: Unable to contact slurm controller (connect failure)")
    job_id = site.submit("true")
    wait_until(lambda: "Unable to contact" in (site.job(job_id)["reason_text"] or ""), what="why it waits")
    assert site.job(job_id)["state"] == "PENDING"
    site.daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    site.await_state(job_id, "CANCELLED")
    assert not site.slurm.jobs()


def test_a_failing_squeue_ends_no_job(site: Site) -> None:
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    site.slurm.behave(squeue="fail:Unable to contact slurm controller (connect failure)")
    calls = len(site.slurm.calls())
    wait_until(lambda: len(site.slurm.calls()) > calls + 8, what="more questions")
    assert site.job(job_id)["state"] == "RUNNING"
    site.slurm.end(site.native()[0]["id"], "TIMEOUT")
    site.slurm.behave(squeue=None)
    site.await_state(job_id, "TIMEOUT")


def test_a_hanging_squeue_does_not_hold_up_the_daemon(site: Site) -> None:
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    site.slurm.behave(squeue="hang")
    calls = len(site.slurm.calls())
    wait_until(lambda: len(site.slurm.calls()) > calls, what="the question")
    local = site.daemon.submit("true")
    site.await_state(local, "COMPLETED")
    site.slurm.behave(squeue=None)


@pytest.mark.parametrize("knows", ["sacct", "scontrol", "the record"])
def test_a_job_that_squeue_has_forgotten_is_asked_for_elsewhere(site: Site, knows: str) -> None:
    job_id = site.submit("until [ -e go ]; do sleep 0.02; done; exit 5")
    site.await_state(job_id, "RUNNING")
    site.slurm.behave(squeue="fail:down")
    if knows != "sacct":
        site.slurm.behave(sacct="fail:Slurm accounting storage is disabled")
    (site.daemon.home / "go").touch()
    wait_until(lambda: site.native()[0]["state"] == "FAILED", what="the end in Slurm")
    site.slurm.forget(site.native()[0]["id"], entirely=knows == "the record")
    site.slurm.behave(squeue=None)
    assert site.await_state(job_id, "FAILED")["exit_code"] == 5


def test_a_job_of_which_nothing_is_known_any_more_is_lost(site: Site) -> None:
    job_id = site.submit("sleep 600", requeue=False)
    site.await_state(job_id, "RUNNING")
    number = site.native()[0]["id"]
    site.slurm.forget(number, entirely=True)
    job = site.await_state(job_id, "NODE_FAIL")
    assert "no record has its exit code" in job["reason_text"]


# --- kills -------------------------------------------------------------------------------------------------


def test_a_daemon_killed_while_sbatch_runs_does_not_submit_twice(site: Site) -> None:
    site.slurm.behave(sbatch="slow")
    job_id = site.submit("until [ -e go ]; do sleep 0.02; done; exit 4")
    site.native()
    site.daemon.kill()
    site.daemon.start()
    calls = len(site.slurm.calls())
    assert site.job(job_id)["state"] in ("PENDING", "RUNNING")
    site.slurm.behave(sbatch=None)
    wait_until(lambda: len(site.slurm.calls()) > calls, what="a question")
    site.await_state(job_id, "RUNNING")
    (site.daemon.home / "go").touch()
    job = site.await_state(job_id, "FAILED")
    assert (job["exit_code"], job["run"], len(site.slurm.jobs())) == (4, 1, 1)


def test_an_answer_that_was_lost_is_looked_for_before_it_is_asked_again(site: Site) -> None:
    site.slurm.behave(sbatch="silent")
    job_id = site.submit("exit 6")
    site.native()
    site.slurm.behave(sbatch=None)
    job = site.await_state(job_id, "FAILED")
    assert (job["exit_code"], len(site.slurm.jobs())) == (6, 1)


@pytest.mark.parametrize(
    "moment", ["commit:1,reconcile", "commit:2", "commit:2,reconcile", "commit:3", "commit:3,reply"]
)
def test_a_daemon_killed_at_a_step_of_the_hand_over_loses_and_repeats_nothing(site: Site, moment: str) -> None:
    site.daemon.stop()
    site.daemon.start(GPUSCHED_CRASH_AT=moment)
    # The answer may be lost with the daemon; a submission with this key is made once.
    with contextlib.suppress(GpuschedError, ConnectionError):
        site.submit(f"echo ran >> {site.root}/ran; exit 3", key="once")
    site.daemon.reap()
    site.daemon.start()
    (job,) = site.daemon.call("GET", "/v1/jobs?states=all")["jobs"]
    job = site.await_state(job["id"], "FAILED")
    assert (job["exit_code"], len(site.slurm.jobs())) == (3, 1)
    assert (site.root / "ran").read_text() == "ran\n"


def test_a_job_ends_while_the_daemon_is_down(site: Site) -> None:
    job_id = site.submit("until [ -e go ]; do sleep 0.02; done; exit 9")
    site.await_state(job_id, "RUNNING")
    site.daemon.kill()
    (site.daemon.home / "go").touch()
    wait_until(lambda: site.native()[0]["state"] == "FAILED", what="the end in Slurm")
    site.slurm.forget(site.native()[0]["id"], entirely=True)
    site.daemon.start()
    assert site.await_state(job_id, "FAILED")["exit_code"] == 9


def test_of_two_jobs_for_a_run_one_runs(site: Site) -> None:
    site.slurm.behave(start="never")
    job_id = site.submit(f"echo ran >> {site.root}/ran; exit 2")
    (native,) = site.native()
    # The same script once more, as if an answer had been lost in a way that nobody thought of.
    other = site.slurm.submit(native["script"])
    site.slurm.behave(start=None)
    assert site.await_state(job_id, "FAILED")["exit_code"] == 2
    wait_until(lambda: site.slurm.jobs()[other]["state"] in ("COMPLETED", "FAILED"), what="the other")
    assert (site.root / "ran").read_text() == "ran\n"


# --- what is refused ---------------------------------------------------------------------------------------


def test_our_own_sbatch_is_not_slurms(tmp_path: Path) -> None:
    from gpusched.addons.slurm.engine.commands import why_not
    from gpusched.slurm_commands import executable_text

    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_bytes(executable_text(name))
        (tmp_path / name).chmod(0o755)
    assert "is gpusched's own command of that name" in (why_not(str(tmp_path)) or "")
    (tmp_path / "sbatch").unlink()
    assert "Slurm's sbatch is not in" in (why_not(str(tmp_path)) or "")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/jobs/suspend", {}, "is in Slurm, where it cannot be suspended"),
        ("/v1/jobs/update", {"changes": {"time_limit_s": 60}}, "is in Slurm and cannot change"),
    ],
)
def test_what_cannot_be_done_to_a_job_in_slurm_is_refused(
    site: Site, path: str, body: dict[str, Any], said: str
) -> None:
    job_id = site.submit("sleep 600")
    site.await_state(job_id, "RUNNING")
    with pytest.raises(GpuschedError) as found:
        site.daemon.call("POST", path, {"ids": [job_id], **body})
    assert said in found.value.message


def test_a_job_is_taken_back_and_held(site: Site) -> None:
    site.slurm.behave(start="never")
    job_id = site.submit("true")
    site.native()
    wait_until(lambda: "is in Slurm" in " ".join(site.story(job_id)), what="the hand-over")
    with pytest.raises(GpuschedError) as found:
        site.daemon.call("POST", "/v1/jobs/hold", {"ids": [job_id]})
    assert "gctl requeue --hold" in found.value.hint
    site.daemon.call("POST", "/v1/jobs/requeue", {"ids": [job_id], "hold": True})
    wait_until(lambda: site.job(job_id)["reason"] == "JobHeldUser", what="the hold")
    assert site.native()[0]["state"] == "CANCELLED"
    site.slurm.behave(start=None)
    site.daemon.call("POST", "/v1/jobs/release", {"ids": [job_id]})
    site.await_state(job_id, "COMPLETED")
    assert len(site.slurm.jobs()) == 2


# --- for several users ---------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[SystemDaemon, FakeSlurm]]:
    """The system's daemon, run by root, and a Slurm that all users may use."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if python is None or not os.stat(os.path.realpath(python)).st_mode & 0o001 or "/root/" in os.path.realpath(python):
        pytest.skip("there is no Python here that all users may run")
    daemon = SystemDaemon()
    slurm = FakeSlurm(daemon.home / "slurm", python)
    for folder in (slurm.root, slurm.jobs_folder, daemon.home / "records"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    for name in ("lock", "calls"):
        (slurm.root / name).touch()
        (slurm.root / name).chmod(0o666)
    daemon.configure(f'[handover]\ncommands = "{slurm.bin}"\nfolder = "{daemon.home}/records"\npoll_interval_s = 0.3\n')
    daemon.start()
    yield daemon, slurm
    daemon.close()
    slurm.close()


@NEEDS_ROOT
def test_a_users_job_is_submitted_cancelled_and_recorded_as_that_user(shared: tuple[SystemDaemon, FakeSlurm]) -> None:
    daemon, slurm = shared
    ann = daemon.person(ANN)
    spec = {"argv": ["sh", "-c", "id -un; exit 4"], "env": {"PATH": os.environ["PATH"]}, "engine": "slurm", "cpus": 0}
    out = daemon.home / "out"
    out.mkdir()
    shutil.chown(out, ANN)
    spec["work_dir"] = str(out)
    job_id = ann.call("POST", "/v1/jobs", {"spec": spec})["job"]["id"]
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{job_id}")["job"]["state"] == "FAILED", what="its end")
    job = ann.call("GET", f"/v1/jobs/{job_id}")["job"]
    assert job["exit_code"] == 4, job["events"]
    assert Path(job["stdout_path"]).read_text() == f"{ANN}\n"
    (native,) = slurm.jobs().values()
    assert native["uid"] == pwd.getpwnam(ANN).pw_uid
    wait_until(lambda: not list((daemon.home / "records").iterdir()), what="the removal of its record")
    spec["argv"] = ["sleep", "600"]
    job_id = ann.call("POST", "/v1/jobs", {"spec": spec})["job"]["id"]
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{job_id}")["job"]["state"] == "RUNNING", what="its start")
    assert ann.call("GET", f"/v1/jobs/{job_id}")["job"]["node"] == "fake1"
    ann.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{job_id}")["job"]["state"] == "CANCELLED", what="its end")
    assert {native.get("by", native["uid"]) for native in slurm.jobs().values()} == {pwd.getpwnam(ANN).pw_uid}
