"""Accidents of GPUs while jobs wait for them: what is placed, and who is charged. See `accidents`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from accidents import AccidentLab

from gpusched.model.cluster import GpuState
from gpusched.model.settings import GpuSettings
from gpusched.testing import request

MakeLab = Callable[..., AccidentLab]
QUICK = GpuSettings(free_polls=1, release_wait_s=4)
LEFT_MIB = 20 * 1024


@pytest.fixture
def lab(accidents: MakeLab) -> AccidentLab:
    """Four GPUs that are free after one good reading; runs last 10 s."""
    return accidents(gpu=QUICK)


def state(lab: AccidentLab, gpu: int) -> str:
    return lab.scheduler.tracker.status(f"GPU-{gpu}", now=lab.clock.now()).state


def test_player_reports_processes_of_runs_on_gpus_they_did_not_book(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1))
    lab.turn()
    (booked,) = (share.index for share in lab.scheduler.world.open_runs[f"{first}.1"].gpus)
    lab.use(first, booked, 100)
    lab.use(first, 3, 1000)
    reading = lab.take_reading()
    pid = lab.scheduler.world.open_runs[f"{first}.1"].pid
    assert [(gpu.vram_used_mib, [(one.pid, one.vram_mib) for one in gpu.processes or ()]) for gpu in reading.gpus] == [
        (100, [(pid, 100)]),
        (0, []),
        (0, []),
        (1000, [(pid, 1000)]),
    ]


def test_player_keeps_memory_after_the_run_until_it_is_cleaned(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1))
    lab.turn()
    lab.use(first, 0, 30_000, leaves=LEFT_MIB)
    lab.clock.advance(11)
    lab.engine.events()
    left = lab.take_reading().gpus[0]
    assert (left.vram_used_mib, left.processes) == (LEFT_MIB, ())
    lab.clean(0)
    assert lab.take_reading().gpus[0].vram_used_mib == 0


def test_player_loses_and_finds_gpus_and_delivers_faults(lab: AccidentLab) -> None:
    lab.submit(request=request(gpus=4))
    lab.submit(request=request(gpus=4))
    lab.raise_xid(1, 31)
    assert [[xid.number for xid in gpu.xids] for gpu in lab.take_reading().gpus] == [[], [31], [], []]
    lab.lose(2)
    lab.turn()
    assert state(lab, 2) == GpuState.LOST
    lab.find(2)
    lab.turn(31)  # a lost device is looked at again after a while
    assert state(lab, 2) != GpuState.LOST


def test_player_serves_unified_memory(accidents: MakeLab) -> None:
    lab = accidents(1, unified=True)
    (gpu,) = lab.take_reading().gpus
    assert gpu.unified_memory
    assert (gpu.vram_total_mib, gpu.vram_used_mib) == (24_000, 4_000)
