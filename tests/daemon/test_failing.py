"""Failures with real processes: fallbacks, what runs are told of their past, and kill -9 in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

from gpusched.daemon.failures import STEPS
from gpusched.errors import GpuschedError

SAY = "printf '%s %s %s\\n' $GPUSCHED_FAILED_JOB_ID $GPUSCHED_EXIT_CODE $GPUSCHED_REASON >> said"


def said(daemon: Daemon) -> list[str]:
    path = daemon.home / "said"
    return path.read_text().splitlines() if path.exists() else []


def test_a_fallback_follows_the_last_failure_and_both_record_it(daemon: Daemon) -> None:
    script = "echo ${GPUSCHED_PREVIOUS_EXIT_CODE:-none} >> past; exit 7"
    failing = daemon.submit("/bin/sh", "-c", script, retries=1, backoff_s=0, fallback=SAY, stdout="job.log")
    (failed,) = daemon.wait(failing)
    assert (failed["state"], failed["exit_code"], failed["run"]) == ("FAILED", 7, 2)
    (follower,) = daemon.wait(failed["fallback_id"])
    assert (follower["state"], follower["fallback_of"]) == ("COMPLETED", failing)
    assert said(daemon) == [f"{failing} 7 NonZeroExitCode"]
    assert (daemon.home / "past").read_text() == "none\n7\n"
    assert follower["stdout_path"] == str(daemon.home / "job.log.fallback")
    (related,) = daemon.job(failing)["related"]
    assert (related["relation"], related["id"], related["state"]) == ("fallback", follower["id"], "COMPLETED")
    (related,) = follower["related"]
    assert (related["relation"], related["id"], related["state"]) == ("fallback_of", failing, "FAILED")


def test_a_time_limit_has_a_fallback_and_a_cancel_has_none(daemon: Daemon) -> None:
    slow = daemon.submit("/bin/sleep", "100", time_limit_s=1, fallback=SAY)
    gone = daemon.submit("/bin/sleep", "100", fallback=SAY)
    daemon.wait_state(gone, "RUNNING")
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [gone]})
    assert daemon.wait(gone)[0]["fallback_id"] is None
    (late,) = daemon.wait(slow)
    assert late["state"] == "TIMEOUT"
    daemon.wait(late["fallback_id"])
    assert said(daemon) == [f"{slow} 143 TimeLimit"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("nth", [3, *(pytest.param(nth, marks=pytest.mark.nightly) for nth in (2, 4))])
def test_a_kill_between_failure_and_fallback_neither_loses_nor_doubles_it(
    make_daemon: Callable[..., Daemon], tmp_path: Path, step: str, nth: int
) -> None:
    daemon = make_daemon(start=False)
    daemon.try_start(GPUSCHED_CRASH_AT=f"{step}:{nth}")
    try:
        daemon.submit("/bin/sh", "-c", "echo run >> runs; exit 3", retries=1, backoff_s=0, fallback=SAY)
        # Some tick on the way to the end of both reaches the step.
        wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
    except (GpuschedError, OSError):
        wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
    daemon.reap()
    daemon.start()
    known = daemon.call("GET", "/v1/jobs?states=all")["jobs"]
    if not known:
        return  # it died before the submission was recorded
    (failed,) = daemon.wait("1")
    assert (failed["state"], failed["failures"]) == ("FAILED", 1)
    (follower,) = daemon.wait(failed["fallback_id"])
    assert follower["state"] == "COMPLETED"
    assert said(daemon) == ["1 3 NonZeroExitCode"]
    assert (daemon.home / "runs").read_text() == "run\nrun\n"
    assert len(daemon.call("GET", "/v1/jobs?states=all")["jobs"]) == 2


def test_a_job_that_runs_out_of_gpu_memory_is_retried_with_more(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="1xT4:16GiB+1xA100:80GiB")
    script = (
        'echo "$GPUSCHED_VRAM_MIB" >> asked; test "${GPUSCHED_VRAM_MIB:-80000}" -gt 14000 && exit 0; '
        "echo CUDA out of memory; exit 1"
    )
    job_id = daemon.submit("/bin/sh", "-c", script, retries=3, backoff_s=0, gpus=1, vram_mib=7000)
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["run"], job["failures"]) == ("COMPLETED", 3, 2)
    assert (daemon.home / "asked").read_text().split() == ["7000", "10752", "16128"]
    assert [run["outcome"] for run in job["runs"]] == ["OUT_OF_MEMORY", "OUT_OF_MEMORY", "COMPLETED"]
    largest = daemon.submit(
        "/bin/sh", "-c", "echo CUDA out of memory; exit 1", retries=3, backoff_s=0, gpus=1, fallback=SAY
    )
    (job,) = daemon.wait(largest)
    assert (job["state"], [run["gpus"][0]["index"] for run in job["runs"]]) == ("OUT_OF_MEMORY", [0, 1])
    assert "no more GPU memory" in job["reason_text"]
    daemon.wait(job["fallback_id"])
    assert said(daemon) == [f"{largest} 1 OutOfMemory"]


def test_a_hardware_fault_repeats_the_run_free_and_drains_the_gpu(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    gpus = tmp_path / "gpus.json"

    def write(*xids: int) -> None:
        part = tmp_path / "part"
        part.write_text(json.dumps({"gpus": [{"vram": "24GiB", "xids": list(xids)}, {"vram": "24GiB"}]}))
        part.rename(gpus)

    write()
    daemon = make_daemon(fake_gpus=str(gpus), config="[daemon]\npoll_s = 0.1\n")
    gate = tmp_path / "gate"
    script = f"test $CUDA_VISIBLE_DEVICES = 1 && exit 0; while [ ! -e {gate} ]; do sleep 0.02; done; exit 9"
    job_id = daemon.submit("/bin/sh", "-c", script, gpus=1)
    daemon.wait_state(job_id, "RUNNING")
    write(95)
    wait_until(
        lambda: daemon.call("GET", "/v1/cluster")["gpus"][0]["state"] == "suspect", what="the card to be taken out"
    )
    gate.touch()
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["run"], job["failures"]) == ("COMPLETED", 2, 0)
    first = job["runs"][0]
    assert (first["outcome"], first["reason"], first["exit_code"]) == ("NODE_FAIL", "GpuFailed", 9)
    assert "XID 95 (uncontained memory error)" in first["reason_text"]
    daemon.kill()
    daemon.start()
    assert daemon.call("GET", "/v1/cluster")["gpus"][0]["state"] in ("suspect", "unknown")
    daemon.call("POST", "/v1/undrain", {"targets": ["0"]})


def test_a_job_that_takes_out_two_gpus_is_held_until_released(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    gpus = tmp_path / "gpus.json"
    cards: list[dict[str, Any]] = [{"vram": "24GiB", "xids": []} for _ in range(3)]

    def raise_fault(card: int) -> None:
        cards[card]["xids"].append(119)
        (tmp_path / "part").write_text(json.dumps({"gpus": cards}))
        (tmp_path / "part").rename(gpus)

    gpus.write_text(json.dumps({"gpus": cards}))
    daemon = make_daemon(fake_gpus=str(gpus), config="[daemon]\npoll_s = 0.1\n")
    script = f"while [ ! -e {tmp_path}/run$SLURM_RESTART_COUNT ]; do sleep 0.02; done; exit 9"
    job_id = daemon.submit("/bin/sh", "-c", script, gpus=1)
    for run in range(2):
        wait_until(lambda: len(daemon.job(job_id)["runs"]) > run, what="the next run")  # noqa: B023
        daemon.wait_state(job_id, "RUNNING")
        card = daemon.job(job_id)["gpus"][0]["index"]
        raise_fault(card)
        wait_until(
            lambda: daemon.call("GET", "/v1/cluster")["gpus"][card]["state"] == "suspect",  # noqa: B023
            what="the card to be taken out",
        )
        (tmp_path / f"run{run or ''}").touch()
    wait_until(lambda: daemon.job(job_id)["reason"] == "JobHeldGpuFault", what="the job to be held")
    job = daemon.job(job_id)
    assert (job["state"], job["hold"], len(job["runs"])) == ("PENDING", "user", 2)
    text = job["reason_text"]
    assert text.startswith("XID 119 (GPU system processor timed out) on GPU 0 (job 1, run 1) and GPU 1 (job 1, run 2)")
    assert text.endswith("find the cause, then: gctl release 1")
    daemon.kill()
    daemon.start()
    assert daemon.job(job_id)["reason"] == "JobHeldGpuFault"
    (tmp_path / "run2").touch()
    daemon.call("POST", "/v1/jobs/release", {"ids": [job_id]})
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["run"], job["exit_code"]) == ("FAILED", 3, 9)


def test_a_gpu_that_is_not_clean_is_checked_again_before_the_next_poll(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    gpus, gate = tmp_path / "gpus.json", tmp_path / "gate"

    def write(used: str) -> None:
        part = tmp_path / "part"
        part.write_text(json.dumps({"gpus": [{"vram": "24GiB", "vram_used": used}]}))
        part.rename(gpus)

    write("1MiB")
    config = "[daemon]\npoll_s = 600\nidle_poll_s = 600\n[gpu]\nfree_polls = 1\nrelease_wait_s = 600\n"
    daemon = make_daemon(fake_gpus=str(gpus), config=config)
    job_id = daemon.submit("/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.02; done", gpus=1)
    daemon.wait_state(job_id, "RUNNING")
    write("20GiB")
    gate.touch()
    wait_until(
        lambda: daemon.call("GET", "/v1/cluster")["gpus"][0]["vram_used_mib"] == 20480, what="what is left to be read"
    )
    # The reading may be taken in before the end that it was made for.
    daemon.wait_state(job_id, "COMPLETING")
    write("1MiB")
    daemon.wait_state(job_id, "COMPLETED")


def test_gpu_health_is_shown_and_acted_on(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"

    def write(**card: object) -> None:
        part = tmp_path / "part"
        log = "the kernel's log (/dev/kmsg) cannot be read (Operation not permitted): GPU faults are ..."
        part.write_text(json.dumps({"gpus": [{"vram": "24GiB", **card}], "log_trouble": log}))
        part.rename(gpus)

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = daemon.call("GET", "/v1/cluster")["gpus"][0]
        return found

    write(xids=[{"xid": 31, "at": 1.7e9}, {"xid": 79, "at": 1.7e9}])
    daemon = make_daemon(fake_gpus=str(gpus), config="[daemon]\npoll_s = 0.1\n")
    wait_until(lambda: shown()["state"] == "suspect", what="the fault of the log to take the card out")
    assert [(fault["xid"], fault["is_hardware"]) for fault in shown()["faults"]] == [(31, False), (79, True)]
    (node,) = daemon.call("GET", "/v1/cluster")["nodes"]
    assert "cannot be read (Operation not permitted)" in node["notes"][-1]
    (check,) = [check for check in daemon.call("GET", "/v1/doctor")["checks"] if check["check"] == "gpu faults"]
    assert (check["level"], check["ok"]) == ("warn", True)
    daemon.call("POST", "/v1/undrain", {"targets": ["0"]})
    wait_until(lambda: shown()["state"] == "idle", what="the card to come back")
    daemon.kill()
    daemon.start()
    wait_until(lambda: shown()["state"] == "idle", what="the old fault to be passed over")
    write(ecc_errors=3)
    wait_until(lambda: shown()["state"] == "suspect", what="the errors to make it suspect")
    assert shown()["why"].startswith("suspect: 3 uncorrectable memory errors; reset it")
    job_id = daemon.submit("/bin/true", gpus=1)
    daemon.call("POST", "/v1/undrain", {"targets": ["0"]})
    (job,) = daemon.wait(job_id)
    assert job["state"] == "COMPLETED"
