"""Plays accidents of GPUs to a scheduler: the real `NvmlSource` over a fake library, behind a `Lab`.

    lab = accidents(gpus=4)                     a fixture of conftest.py; see `AccidentLab`
    first = lab.submit(request=request(gpus=4))
    lab.use(first, 0, 20_000, leaves=20_000)    its process holds 20 GB of GPU 0, which stay when the run is over
    lab.submit(request=request(gpus=4))         accidents are played with jobs waiting
    lab.turn(10)                                as in any Lab: time passes, a reading, a tick

Processes of runs go where a test puts them, whatever their run has booked.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from fake_nvml import FakeDevice, FakeNvml
from lab import Lab

from gpusched.daemon.core import Scheduler
from gpusched.gpu.device import Device
from gpusched.gpu.nvml import NvmlSource
from gpusched.model.cluster import GpuProcess, GpuReading
from gpusched.model.job import run_id

FOREIGN_PID = 1
"""Of the process of no job; it lives as long as the machine."""


@dataclass
class Use:
    """Memory of one GPU that a process of a run holds, and what stays of it when the run is over."""

    run: str
    gpu: int
    mib: int | None
    leaves_mib: int = 0


class AccidentLab(Lab):
    """A Lab whose readings the real source takes. Devices are `devices`; see `FakeDevice` for what they can do.

    Args: unified: the GPUs have no memory of their own, as a GB10 or a Jetson.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, gpus: int = 4, *, unified: bool = False, **sections: Any
    ) -> None:
        self.devices = [FakeDevice(f"GPU-{number}", minor=number, unified=unified) for number in range(gpus)]
        self.nvml = FakeNvml(self.devices, has_events=True)
        self.host_mib = 24_000
        """Memory of the host."""
        self.host_used_mib = 4_000
        """What processes hold of it that are on no GPU."""
        self.uses: list[Use] = []
        self.source: NvmlSource | None = None
        monkeypatch.setitem(sys.modules, "pynvml", self.nvml.module())
        monkeypatch.setattr("gpusched.gpu.nvml.Device", partial(Device, host_memory_mib=self._host_memory_mib))
        # None of these processes and devices is one of this machine.
        monkeypatch.setattr("gpusched.gpu.procinfo.is_alive", lambda pid: True)
        monkeypatch.setattr("gpusched.gpu.procinfo.describe", _describe)
        monkeypatch.setattr("gpusched.gpu.procinfo.openers", lambda paths: dict.fromkeys(paths, ()))
        monkeypatch.setattr("gpusched.gpu.topology.sysfs_numa", lambda bus_id: None)
        super().__init__(gpus, **sections)

    # --- accidents ------------------------------------------------------------------------------

    def use(self, job: int | str, gpu: int, mib: int | None, *, leaves: int = 0) -> None:
        """A process of the job's run holds so much of any GPU while the run lives; `leaves` (MiB) stays for good.

        Args: job: a job, for its latest run, or a run; mib: None where the driver does not tell.
        """
        run = job if isinstance(job, str) else run_id(job, self.job(job).run)
        self.uses.append(Use(run, gpu, mib, leaves))

    def clean(self, gpu: int) -> None:
        """What ended runs have left on a GPU is given back."""
        living = self._living()
        self.uses = [dataclasses.replace(use, leaves_mib=0) if use.gpu == gpu else use for use in self.uses]
        self.uses = [use for use in self.uses if use.run in living or use.leaves_mib]

    def lose(self, gpu: int) -> None:
        """The GPU falls off the bus, and nobody tells of a fault."""
        self.devices[gpu].lost = True

    def find(self, gpu: int) -> None:
        """The driver sees a lost GPU again."""
        self.devices[gpu].lost = False

    def raise_xid(self, gpu: int, xid: int, *, before_loss: bool = False) -> None:
        """Tell of a fault; the next reading brings it. Args: before_loss: as of `FakeNvml.raise_xid`."""
        self.nvml.raise_xid(self.devices[gpu], xid, before_loss=before_loss)

    # --- readings -------------------------------------------------------------------------------

    def restart(self) -> Scheduler:
        """As of a Lab; the process that reads the GPUs is a new one, too."""
        self.close()
        self.source = NvmlSource({}, clock=self.clock.now, monotonic=self.clock.now, kernel_log="")
        return super().restart()

    def close(self) -> None:
        """Let go of the library."""
        if self.source is not None:
            self.source.close()

    def take_reading(self) -> GpuReading:
        """What the driver says now."""
        living = self._living()
        for number, device in enumerate(self.devices):
            pids: dict[int, int | None] = {}
            left_mib = self.used.get(number, 0)
            if number in self.strangers:
                pids[FOREIGN_PID] = self.strangers[number]
            for use in self.uses:
                if use.gpu != number:
                    continue
                if use.run in living:
                    held = pids.get(living[use.run], 0)
                    pids[living[use.run]] = None if use.mib is None or held is None else held + use.mib
                else:
                    left_mib += use.leaves_mib
            device.used_mib = left_mib + sum(mib or 0 for mib in pids.values())
            device.compute = list(pids.items())
            device.gpu_percent = round(100 * (self.load.get(number) or 0.0))
            device.codes = {"nvmlDeviceGetComputeRunningProcesses_v3": 4} if number in self.unlisted else {}
        assert self.source is not None
        self.nvml.settle()
        return self.source.read()

    def read(self) -> None:
        """Take a reading to the scheduler."""
        self.scheduler.observe_gpus(self.take_reading())

    def _living(self) -> dict[str, int]:
        """Pid of each run's process, of those that have not ended."""
        pids = {run.pid: run.id for run in self.scheduler.state.open_runs.values() if run.pid is not None}
        return {pids[pid]: pid for pid in self.engine.owners(pids)}

    def _host_memory_mib(self) -> tuple[int, int]:
        used_mib = self.host_used_mib + sum(device.used_mib for device in self.devices if device.unified)
        return self.host_mib, self.host_mib - used_mib


def _describe(pid: int, mib: int | None) -> GpuProcess:
    return GpuProcess(pid, mib, "eva" if pid == FOREIGN_PID else "ann", float(pid), "python")
