"""A real process on a real GPU becomes a job and is ended as one. Skipped, with the reason, where there are none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_real_nvml import HOLD

from gpusched.client import DaemonConnection
from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.source import nvidia_signs

sys.path.append(str(Path(__file__).resolve().parents[1] / "daemon"))
from harness import Daemon
from support import wait_until

pytestmark = pytest.mark.hardware

HELD_MIB = 2048


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds memory of the first GPU; the driver must list it by the pid that it has here."""
    source = NvmlSource({})
    first = source.read()
    cards = [gpu for gpu in first.gpus if gpu.mig_parent is None and not gpu.mig_enabled]
    if not cards:
        source.close()
        pytest.skip(f"no GPU to test with: {first.error or 'none'} (traces: {', '.join(nvidia_signs()) or 'none'})")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, cards[0].uuid, str(HELD_MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    listed = [one.pid for gpu in source.read().gpus for one in gpu.processes or ()]
    source.close()
    try:
        if said != b"holds":
            pytest.skip(f"CUDA gives no memory here: {said!r}")
        if process.pid not in listed:
            pytest.skip(f"the driver lists {listed}, not pid {process.pid}: another namespace")
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_real_foreign_process_is_adopted_and_cancelled(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "home", config="[daemon]\npoll_s = 0.5\nidle_poll_s = 0.5\n")
    (daemon.home / "config.toml").write_text("[daemon]\npoll_s = 0.5\nidle_poll_s = 0.5\n")
    daemon.start()
    try:
        client: DaemonConnection = daemon.client

        def strangers() -> set[int]:
            return {row["pid"] for row in client.call("GET", "/v1/foreign")["foreign"]}

        wait_until(lambda: holder.pid in strangers(), what="the stranger to be seen")
        job = client.call("POST", "/v1/adopt", {"pid": holder.pid})["adopted"]["id"]
        wait_until(lambda: holder.pid not in strangers(), what="it to be a job's")
        wait_until(lambda: daemon.job(job)["runs"][-1]["pid"] == holder.pid, what="it to be watched")
        client.call("POST", "/v1/jobs/cancel", {"ids": [job]})
        assert holder.wait(60) == -15
        (ended,) = daemon.wait(job)
        assert ended["state"] == "CANCELLED"
        assert ended["runs"][-1]["peak_vram_mib"] >= HELD_MIB
    finally:
        daemon.close()
