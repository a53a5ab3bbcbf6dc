"""Jobs under MPS in a real daemon, with a stand-in for NVIDIA's control daemon, over a kill of the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import stand_in_mps
from harness import Daemon
from support import wait_until

from gpusched.gpu.mps import control_pid
from gpusched.gpu.simulated import simulated_uuid

ME = os.getuid()


def test_jobs_share_a_card_under_one_control_daemon_that_outlives_the_daemon(
    tmp_path: Path, make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{stand_in_mps.install(tmp_path / 'bin')}:{os.environ['PATH']}")
    daemon = make_daemon(fake_gpus="1xA100:80GiB", config="[daemon]\npoll_s = 0.1\n")
    pipes = str(daemon.home / "mps" / str(ME) / simulated_uuid(0))
    script = "env | grep ^CUDA_; exec sleep 1000"
    first = daemon.submit("sh", "-c", script, sm_percent=30, cpus=0)
    second = daemon.submit("sleep", "1000", sm_percent=50, vram_mib=8192, cpus=0)
    wait_until(lambda: all(daemon.job(job)["runs"][0]["pid"] for job in (first, second)), what="both processes")
    wait_until(lambda: "CUDA_MPS_PIPE" in daemon.output(first), what="its environment")
    environment = dict(line.split("=", 1) for line in daemon.output(first).splitlines())
    assert environment == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": simulated_uuid(0),
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={daemon.job(first)['gpus'][0]['vram_mib']}M",
    }
    assert [daemon.job(job)["gpus"][0]["enforcement"] for job in (first, second)] == ["MPS", "MPS"]
    control = control_pid(pipes, frozenset({ME}))
    assert control is not None
    daemon.kill()
    daemon.start()
    third = daemon.submit("sleep", "1000", sm_percent=20, cpus=0)
    wait_until(lambda: daemon.job(third)["runs"][0]["pid"], what="its process")
    assert control_pid(pipes, frozenset({ME})) == control
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [first, second, third]})
    daemon.wait(first, second, third)
    wait_until(lambda: control_pid(pipes, frozenset({ME})) is None, what="its end")
    log = stand_in_mps.log_of(daemon.home / "mps", simulated_uuid(0))
    assert log == [f"start uid={ME} device={simulated_uuid(0)}", "quit -t 5"]
