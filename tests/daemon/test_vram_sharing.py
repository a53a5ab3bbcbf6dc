"""Shared cards with real processes: who holds too much is told and ended, who dies of it is run again."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from harness import Daemon
from support import wait_until

from gpusched.gpu.simulated import simulated_uuid

CONFIG = """
[gpu]
vram_over = "kill"
vram_over_polls = 2
vram_over_grace_s = 3.0
foreign_peak_s = 1.0
release_wait_s = 20
[daemon]
poll_s = 0.1
"""
WAIT = "while :; do sleep 0.05; done"


def write_gpus(path: Path, holders: dict[int, str | None]) -> None:
    """One card of 40 GiB with these processes: pid and size."""
    processes = [{"pid": pid, "vram": size} for pid, size in holders.items()]
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpus": [{"vram": "40GiB", "processes": processes}]}))
    part.rename(path)


def told(daemon: Daemon, job_id: str, kind: str) -> list[str]:
    return [event["text"] for event in daemon.job(job_id)["events"] if event["kind"] == kind]


def test_an_overuser_is_warned_then_ended_and_retried_with_more(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, {})
    daemon = make_daemon(fake_gpus=str(gpus), config=CONFIG)
    greedy = daemon.submit(
        "/bin/sh", "-c", f"trap 'echo told; exit 3' TERM; {WAIT}", vram_mib=4096, retries=1, backoff_s=0
    )
    modest = daemon.submit("/bin/sh", "-c", WAIT, vram_mib=8192)
    pids = [daemon.pid_of(greedy), daemon.pid_of(modest)]
    write_gpus(gpus, {pids[0]: "16GiB", pids[1]: "7GiB"})
    wait_until(lambda: bool(daemon.job(greedy)["runs"][0]["outcome"]), what="the end")
    write_gpus(gpus, {pids[1]: "7GiB"})
    wait_until(lambda: daemon.job(greedy)["run"] == 2, what="the greedy one to be run again")
    first = daemon.job(greedy)["runs"][0]
    assert (first["outcome"], first["reason"], first["peak_vram_mib"]) == ("OUT_OF_MEMORY", "GpuMemoryOver", 16384)
    log = Path(first["stdout_path"]).read_text()
    assert "DUE TO GPU MEMORY BEYOND ITS BOOKING" in log
    assert log.endswith("told\n")
    assert daemon.job(greedy)["gpu_request"] == "1(20480M)"
    assert len(told(daemon, greedy, "vram")) == 1
    # What it booked was there to be had.
    assert told(daemon, modest, "crowded") == []
    assert (daemon.state(modest), daemon.job(modest)["run"]) == ("RUNNING", 1)
    write_gpus(gpus, {})


def test_a_neighbour_killed_by_overuse_runs_again_free(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, {})
    daemon = make_daemon(fake_gpus=str(gpus), config=CONFIG.replace("kill", "warn"))
    greedy = daemon.submit("/bin/sh", "-c", WAIT, vram_mib=4096)
    dies = tmp_path / "dies"
    until = f"while [ ! -e {dies} ]; do sleep 0.05; done"
    fails = "[ $GPUSCHED_RUN = 2.1 ] || exit 0; echo 'CUDA out of memory' >&2; exit 1"
    victim = daemon.submit("/bin/sh", "-c", f"{until}; {fails}", vram_mib=8192)
    pids = [daemon.pid_of(greedy), daemon.pid_of(victim)]
    write_gpus(gpus, {pids[0]: "34GiB", pids[1]: "5GiB"})
    wait_until(lambda: bool(told(daemon, victim, "crowded")), what="the neighbour to be told")
    assert told(daemon, victim, "crowded") == [
        f"job {greedy} holds 34G of GPU 0, of which it booked 4G; 6G of the 8G that this job booked there can be had"
    ]
    shares = daemon.call("GET", "/v1/cluster")["gpus"][0]
    assert (shares["enforcement"], shares["vram_over_mib"]) == ("watched", 30720)
    assert [one["vram_used_mib"] for one in shares["booked_by"]] == [34816, 5120]
    (gpu,) = daemon.job(greedy)["gpus"]
    assert (gpu["vram_used_mib"], gpu["enforcement"]) == (34816, "watched")
    assert "it holds 34G of GPU 0, of which it booked 4G" in daemon.call("GET", f"/v1/jobs/{greedy}/why")["why"]["text"]
    dies.touch()
    wait_until(lambda: bool(daemon.job(victim)["runs"][0]["outcome"]), what="the neighbour to die")
    write_gpus(gpus, {pids[0]: "34GiB"})
    wait_until(lambda: daemon.state(victim) == "PENDING", what="the neighbour to wait again")
    first = daemon.job(victim)["runs"][0]
    assert (first["outcome"], first["reason"]) == ("NODE_FAIL", "GpuCrowded")
    assert (daemon.job(victim)["failures"], daemon.job(victim)["retries"]) == (0, 0)
    write_gpus(gpus, {pids[0]: "4GiB"})
    (job,) = daemon.wait(victim)
    assert (job["state"], job["run"]) == ("COMPLETED", 2)
    assert (daemon.state(greedy), len(told(daemon, greedy, "vram"))) == ("RUNNING", 1)
    write_gpus(gpus, {})


def test_unknown_usage_ends_no_job(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, {})
    daemon = make_daemon(fake_gpus=str(gpus), config=CONFIG)
    job_id = daemon.submit("/bin/sh", "-c", WAIT, vram_mib=4096)
    write_gpus(gpus, {daemon.pid_of(job_id): None})
    wait_until(lambda: daemon.job(job_id)["gpus"][0]["enforcement"] == "none", what="the reading")
    readings = daemon.call("GET", "/v1/status")["daemon"]["tick"]["count"]
    wait_until(
        lambda: daemon.call("GET", "/v1/status")["daemon"]["tick"]["count"] > readings + 65, what="two graces to pass"
    )
    assert (daemon.state(job_id), told(daemon, job_id, "vram")) == ("RUNNING", [])
    write_gpus(gpus, {})


def test_mps_is_reported_only_where_its_daemon_runs(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy("/bin/sleep", program)
    pipes = tmp_path / "mps" / simulated_uuid(0)
    pipes.mkdir(parents=True)
    control = subprocess.Popen([program, "1000"])
    try:
        (pipes / "nvidia-cuda-mps-control.pid").write_text(str(control.pid))
        config = f'[gpu]\nmps_dir = "{tmp_path / "mps"}"\n[daemon]\npoll_s = 0.1\n'
        daemon = make_daemon(fake_gpus="2x24GiB", config=config)
        show = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"; sleep 1000'
        under = daemon.submit("/bin/sh", "-c", show, vram_mib=4096, env={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mine"})
        wide = daemon.submit("/bin/sh", "-c", show, vram_mib=4096, gpus=2)
        for job_id in (under, wide):
            wait_until(lambda job_id=job_id: bool(daemon.output(job_id)), what="the job to say what it has")
        assert daemon.output(under) == f"{simulated_uuid(0)} {pipes} 0=4096M\n"
        assert daemon.output(wide) == "0,1  \n"
        assert [gpu["enforcement"] for gpu in daemon.job(under)["gpus"]] == ["MPS"]
        assert [gpu["enforcement"] for gpu in daemon.job(wide)["gpus"]] == ["watched", "watched"]
        assert [gpu["enforcement"] for gpu in daemon.call("GET", "/v1/cluster")["gpus"]] == ["MPS", "watched"]
    finally:
        control.kill()
        control.wait()
    wait_until(lambda: daemon.job(under)["gpus"][0]["enforcement"] == "watched", what="the loss of MPS to be seen")
    assert "its MPS control daemon is gone" in daemon.job(under)["gpus"][0]["enforcement_why"]


def test_usage_of_earlier_runs_is_reported_for_the_next(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, {})
    daemon = make_daemon(fake_gpus=str(gpus), config=CONFIG)
    ends = tmp_path / "ends"
    line = ["/bin/sh", "-c", f"while [ ! -e {ends} ]; do sleep 0.05; done"]
    jobs = [daemon.submit(*line, vram_mib=12288) for _ in range(3)]
    sizes = [2048, 3072, 2560]
    holders: dict[int, str | None] = {
        daemon.pid_of(job_id): f"{mib}MiB" for job_id, mib in zip(jobs, sizes, strict=True)
    }
    write_gpus(gpus, holders)
    wait_until(
        lambda: [daemon.job(job_id)["gpus"][0]["vram_used_mib"] for job_id in jobs] == sizes, what="them to be seen"
    )
    ends.touch()
    wait_until(lambda: all(daemon.job(job_id)["runs"][0]["outcome"] for job_id in jobs), what="them to end")
    write_gpus(gpus, {})
    assert [job["runs"][0]["peak_vram_mib"] for job in daemon.wait(*jobs)] == sizes
    daemon.stop()
    daemon.start()
    spec = daemon.spec(*line, vram_mib=12288)
    told = daemon.call("POST", "/v1/jobs", {"spec": spec, "dry_run": True})["dry_run"]["vram"]
    assert told == {
        "runs": 3,
        "peak_mib": 3072,
        "text": "its last 3 runs peaked at 3G of VRAM",
        "proposal": "--vram 4G would do",
    }
    assert daemon.call("POST", "/v1/jobs", {"spec": spec, "advise": True})["vram"] == told
    assert "vram" not in daemon.call("POST", "/v1/jobs", {"spec": spec})
