"""The first GPU job after an idle time, in a real daemon: it starts by a reading taken for it, not by an old one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

CONFIG = """
[daemon]
poll_s = 0.05
idle_poll_s = 3600
[gpu]
free_polls = 1
deadline_s = 5
"""
FREE = {"vram": "24GiB"}
TAKEN = {"vram": "24GiB", "processes": [{"pid": 4711, "vram": "15GiB", "user": "eva", "name": "python"}]}


class Machine:
    """An idle daemon, and its GPUs in a file."""

    def __init__(self, make_daemon: Callable[..., Daemon], path: Path) -> None:
        self._path = path
        self.write(gpus=[FREE, FREE])
        self.daemon = make_daemon(fake_gpus=str(path), config=CONFIG)
        wait_until(lambda: self.states() == ["idle", "idle"], what="the GPUs to be read")

    def change(self, **state: Any) -> None:
        """Change the GPUs while no job runs or waits, and let the last reading of them grow old."""
        self.write(**state)
        before = self._ticks()
        wait_until(lambda: self._ticks() >= before + 4, what="some polls")
        assert self.states() == ["idle", "idle"]

    def states(self) -> list[str]:
        return [gpu["state"] for gpu in self.daemon.call("GET", "/v1/cluster")["gpus"]]

    def _ticks(self) -> int:
        return int(self.daemon.call("GET", "/v1/status")["daemon"]["tick"]["count"])

    def write(self, **state: Any) -> None:
        """Describe the GPUs from now on."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(state))
        part.rename(self._path)


@pytest.fixture
def machine(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Machine:
    return Machine(make_daemon, tmp_path / "gpus.json")


def test_the_first_job_avoids_a_gpu_taken_since_the_last_reading(machine: Machine) -> None:
    machine.change(gpus=[TAKEN, FREE])
    job_id = machine.daemon.submit("/bin/sleep", "1000", gpus=1)
    job = machine.daemon.wait_state(job_id, "RUNNING")
    assert [gpu["index"] for gpu in job["gpus"]] == [1]


def test_a_hanging_driver_delays_only_gpu_jobs(machine: Machine) -> None:
    machine.change(gpus=[FREE, FREE], hang=True)
    waiting = machine.daemon.submit("/bin/true", gpus=1)
    (other,) = machine.daemon.wait(machine.daemon.submit("/bin/true"))
    assert other["state"] == "COMPLETED"
    wait_until(
        lambda: "no answer from the driver" in (machine.daemon.job(waiting)["reason_text"] or ""),
        what="the deadline of the reading",
    )
    machine.write(gpus=[FREE, FREE])
    (job,) = machine.daemon.wait(waiting)
    assert job["state"] == "COMPLETED"
