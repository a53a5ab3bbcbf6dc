"""Control daemons of MPS for runs: started as their users, found again, ended after the last run."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_mps
from support import wait_until

from gpusched.gpu.mps import WithMps, control_pid, why_not_mps
from gpusched.model.cluster import GpuReading, GpuSample

ME = os.getuid()


class Cards:
    """A source of cards as they are listed."""

    def __init__(self, *gpus: GpuSample) -> None:
        self.gpus = gpus

    def read(self) -> GpuReading:
        return GpuReading(0.0, "nvml", self.gpus)

    def close(self) -> None:
        """Holds nothing."""


def card(index: int = 0, **parts: Any) -> GpuSample:
    return GpuSample(f"GPU-{index}", index, "A100", **{"cuda_capability": 8.0, **parts})


class Bench:
    def __init__(self, folder: Path) -> None:
        self.program = folder / "bin"
        self.own = str(folder / "mps")
        self.now = 0.0
        self.cards = Cards(card())
        self.source = self.restart()

    def restart(self) -> WithMps:
        """A new reader over the same folders."""
        if hasattr(self, "source"):
            self.source.close()
        self.source = WithMps(self.cards, None, self.own, lambda: self.now)
        return self.source

    def read(self, uid: int | None) -> GpuSample:
        self.source.want({} if uid is None else {"GPU-0": uid})
        self.now += 1.0
        return self.source.read().gpus[0]

    def pid(self) -> int | None:
        return control_pid(f"{self.own}/{ME}/GPU-0", frozenset({ME}))

    def log(self) -> list[str]:
        return stand_in_mps.log_of(self.own, "GPU-0")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    stand_in_mps.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = Bench(tmp_path)
    yield found
    found.source.close()
    (tmp_path / "bin" / "deaf").unlink(missing_ok=True)
    if (pid := found.pid()) is not None:
        os.kill(pid, 9)


def test_one_is_started_for_a_card_and_user_and_quits_when_no_run_needs_it(bench: Bench) -> None:
    assert (bench.read(None).mps, bench.pid()) == (None, None)
    assert bench.read(ME).mps is True
    assert bench.read(ME).mps is True
    assert bench.log() == [f"start uid={ME} device=GPU-0"]
    bench.read(None)
    wait_until(lambda: bench.pid() is None, what="its end")
    assert bench.log()[1:] == ["quit -t 5"]
    assert bench.read(None).mps is None


def test_its_folder_is_private(bench: Bench) -> None:
    bench.read(ME)
    for folder in (f"{bench.own}/{ME}", f"{bench.own}/{ME}/GPU-0", f"{bench.own}/{ME}/GPU-0/log"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700, folder


def test_another_reader_finds_it_again(bench: Bench) -> None:
    bench.read(ME)
    pid = bench.pid()
    bench.restart()
    # Before it is known what runs want, nothing is ended.
    bench.source.read()
    assert bench.pid() == pid
    assert bench.read(ME).mps is True
    assert (bench.pid(), len(bench.log())) == (pid, 1)
    bench.restart()
    bench.read(None)
    wait_until(lambda: bench.pid() is None, what="its end")


def test_one_that_is_asked_to_quit_serves_no_further_run(bench: Bench) -> None:
    (bench.program / "deaf").touch()
    bench.read(ME)
    first = bench.pid()
    bench.read(None)
    assert bench.read(ME).mps is False
    bench.now += 20
    bench.read(ME)
    wait_until(lambda: bench.pid() != first, what="its end")
    assert bench.read(ME).mps is True
    assert bench.pid() not in (None, first)


def test_one_that_does_not_quit_is_killed(bench: Bench) -> None:
    (bench.program / "deaf").touch()
    bench.read(ME)
    bench.read(None)
    bench.read(None)
    assert bench.pid() is not None
    bench.now += 20
    bench.read(None)
    wait_until(lambda: bench.pid() is None, what="its end")


def test_why_one_cannot_be_started_is_told_and_tried_again_later(bench: Bench) -> None:
    (bench.program / "broken").touch()
    why = "nvidia-cuda-mps-control ended with code 1: Cannot find MPS control daemon process"
    assert bench.read(ME).mps_trouble == why
    (bench.program / "broken").unlink()
    assert bench.read(ME).mps_trouble == why
    bench.now += 10
    assert (bench.read(ME).mps, bench.read(ME).mps_trouble) == (True, None)


@pytest.mark.skipif(ME != 0, reason="needs root to act for other users")
def test_the_next_user_waits_for_the_last_one_and_gets_another_one(bench: Bench, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == ME and not stat.S_IMODE(folder.stat().st_mode) & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    nobody = 65534
    assert bench.read(ME).mps is True
    assert bench.read(nobody).mps is False
    wait_until(lambda: bench.pid() is None, what="the end of the first")
    assert bench.read(nobody).mps is True
    assert stand_in_mps.log_of(bench.own, "GPU-0", nobody) == [f"start uid={nobody} device=GPU-0"]
    bench.read(None)
    wait_until(lambda: bench.read(None).mps is None, what="the end of the second")


def test_a_pid_that_names_another_process_is_not_believed(bench: Bench) -> None:
    bench.read(ME)
    file = Path(bench.own, str(ME), "GPU-0", "nvidia-cuda-mps-control.pid")
    pid = int(file.read_text())
    file.write_text(str(os.getpid()))
    assert bench.pid() is None
    file.write_text(str(pid))


@pytest.mark.parametrize(
    ("gpu", "has_control", "why"),
    [
        (card(), True, None),
        (card(cuda_capability=7.0), True, None),
        (card(cuda_capability=6.1), True, "MPS limits clients only on GPUs since Volta"),
        (card(mig_enabled=True), True, "it is divided by MIG"),
        (card(mig_parent="GPU-1"), True, "it is divided by MIG"),
        (card(cuda_capability=None), True, "it is not known to be an NVIDIA GPU"),
        (card(), False, "nvidia-cuda-mps-control is not installed"),
    ],
)
def test_cards_that_mps_cannot_serve(gpu: GpuSample, has_control: bool, why: str | None) -> None:
    assert why_not_mps(gpu, has_control) == why


def test_a_machine_without_the_program_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    source = WithMps(Cards(card()), None, str(tmp_path / "mps"))
    assert source.read().gpus[0].why_not_mps == "nvidia-cuda-mps-control is not installed"
