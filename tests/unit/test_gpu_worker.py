"""The process that reads the GPUs: deadline, death, restart, and machines without any."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import wait_until

from gpusched.errors import UsageError
from gpusched.gpu.source import Answer, ReadRequest, nvidia_signs
from gpusched.gpu.worker import GpuWorker
from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample
from gpusched.model.mig import MigLayout, MigOrder, layout_of
from gpusched.model.settings import GpuSettings
from gpusched.model.value import decode, encode

Make = Callable[..., GpuWorker]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make workers that are closed in the end; without a trace of hardware unless told otherwise."""
    workers = []

    def build(fake: str | Path | None = None, **options: Any) -> GpuWorker:
        fields = {name: options.pop(name) for name in ("source", "deadline_s") if name in options}
        settings = GpuSettings(fake=None if fake is None else str(fake), **fields)
        options.setdefault("signs", tuple)
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("GPUSCHED_", "CUDA_"))}
        workers.append(GpuWorker(settings, environ, **options))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


@pytest.fixture
def gpus(tmp_path: Path) -> Callable[..., Path]:
    """Write a description of one GPU with these keys beside it."""

    def write(**keys: Any) -> Path:
        draft = tmp_path / "draft"
        draft.write_text(json.dumps({"gpus": [{"name": "A100", "vram": "80GiB"}], **keys}))
        return draft.replace(tmp_path / "gpus.json")

    return write


def children() -> list[psutil.Process]:
    """Processes of this test that read GPUs."""
    found = []
    for child in psutil.Process().children():
        try:
            if "gpusched.gpu.source" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def is_dead(process: psutil.Process) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def next_reading(worker: GpuWorker) -> GpuReading:
    """Poll until something comes."""
    got: list[GpuReading] = []

    def has_come() -> bool:
        reading = worker.poll()
        if reading is not None:
            got.append(reading)
        return bool(got)

    wait_until(has_come, what="a reading")
    return got[0]


def test_a_reading_comes_from_a_separate_process(make: Make) -> None:
    worker = make("2xA100:80GiB+1xT4:16GiB")
    reading = worker.read_blocking(60.0)
    assert [gpu.name for gpu in reading.gpus] == ["A100", "A100", "T4"]
    assert reading.error is None
    (child,) = children()
    assert worker.read_blocking(60.0).at > reading.at
    assert children() == [child]


def test_no_reading_arrives_unrequested_and_polling_does_not_block(make: Make) -> None:
    worker = make("1x8G")
    began = time.perf_counter()
    for _ in range(100):
        assert worker.poll() is None
    assert time.perf_counter() - began < 10.0
    assert children() == []


def test_the_descriptor_wakes_and_is_stable_across_restarts(make: Make) -> None:
    worker = make("1x8G")
    fd = worker.fileno()
    for _ in range(2):
        worker.request()
        assert select.select([fd], [], [], 60.0)[0] == [fd]
        next_reading(worker)
        for child in children():
            child.kill()
        worker.request()
        assert "has ended (signal 9)" in (next_reading(worker).error or "")
        wait_until(lambda: worker.read_blocking(60.0).error is None, what="a new process")
    assert worker.fileno() == fd


def test_requests_during_a_reading_share_one_that_begins_later(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(read_delay_s=0.2))
    worker.request()
    asked_at = time.time()
    for _ in range(5):
        worker.request()
    first, second = next_reading(worker), next_reading(worker)
    assert second.at >= max(first.at, asked_at)
    assert select.select([worker.fileno()], [], [], 0.4)[0] == []


def test_a_hanging_driver_times_out_and_is_queried_again(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(), deadline_s=0.3)
    good = worker.read_blocking(60.0)
    (child,) = children()
    gpus(hang=True)
    worker.request()
    stale = next_reading(worker)
    assert stale.error == "no answer from the driver for 0.3 s"
    assert stale.gpus == good.gpus
    assert stale.at > good.at
    wait_until(lambda: worker.poll() is None and not child.is_running(), what="the stuck process to be gone")
    gpus()
    wait_until(lambda: worker.read_blocking(60.0).error is None, what="a new process")


def test_the_last_error_stands_between_two_processes(make: Make, gpus: Callable[..., Path]) -> None:
    now = [0.0]
    worker = make(gpus(), monotonic=lambda: now[0])
    worker.read_blocking(60.0)

    def is_seen() -> bool:
        reading = worker.poll()
        worker.request()
        # It may have answered before it was killed.
        return reading is not None and "has ended" in (reading.error or "")

    for pause_s in (1.0, 2.0):
        (child,) = children()
        os.kill(child.pid, signal.SIGKILL)
        wait_until(is_seen, what="the death to be seen")
        assert children() == []
        now[0] += pause_s - 0.1
        assert "has ended" in (worker.read_blocking(5.0).error or "")
        assert children() == []
        now[0] += 0.2
        worker.request()
        wait_until(lambda: len(children()) == 1, what="the next process to show its command")


def test_a_new_process_has_extra_time_for_its_first_answer(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(read_delay_s=1.0), deadline_s=0.2)
    worker.request()
    assert next_reading(worker).error == "no answer from the driver for 0.2 s"
    assert next_reading(worker).error is None
    assert len(children()) == 1


def test_the_extra_time_ends_too(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(hang=True), deadline_s=0.2, start_s=0.3)
    worker.request()
    for _ in range(2):
        assert next_reading(worker).error == "no answer from the driver for 0.2 s"
    wait_until(lambda: children() == [], what="the stuck process to be gone")


def test_leftovers_of_a_killed_process_in_the_pipe_are_not_an_answer(make: Make) -> None:
    worker = make("1x8G")
    late = encode(Answer(0, GpuReading(1.0, "simulated", error="late"))) + b"\n"
    os.write(worker._answers_in, late)
    assert worker.poll() is None
    # Before the next one is there, which begins with a line of its own.
    os.write(worker._answers_in, late + late[: len(late) // 2])
    worker.request()
    assert next_reading(worker).error is None


def test_a_blocking_read_times_out(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(hang=True))
    began = time.monotonic()
    assert worker.read_blocking(0.2).error == "no answer from the driver for 0.2 s"
    assert time.monotonic() - began < 20.0


def test_the_process_ends_when_the_daemon_is_killed() -> None:
    code = (
        "import os, sys, time\n"
        "from gpusched.gpu.worker import GpuWorker\n"
        "from gpusched.model.settings import GpuSettings\n"
        "worker = GpuWorker(GpuSettings(fake='1x8G'))\n"
        "worker.read_blocking(60.0)\n"
        "print(worker._child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as daemon:
        assert daemon.stdout is not None
        child = psutil.Process(int(daemon.stdout.readline()))
        daemon.kill()
    wait_until(lambda: is_dead(child), what="the child to end")


def test_the_process_ignores_ctrl_c_and_ends_with_the_worker(make: Make) -> None:
    worker = make("1x8G")
    worker.read_blocking(60.0)
    (child,) = children()
    child.send_signal(signal.SIGINT)
    assert worker.read_blocking(60.0).error is None
    worker.close()
    assert not child.is_running()


def test_closing_ends_a_process_that_hangs(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(hang=True))
    worker.request()
    # Right after its exec a process has no command line yet.
    wait_until(children, what="the process to show its command")
    (child,) = children()
    began = time.monotonic()
    worker.close()
    assert not child.is_running()
    assert time.monotonic() - began < 20.0


def test_bad_descriptions_are_refused_at_once(make: Make) -> None:
    with pytest.raises(UsageError, match="'many'"):
        make("many")
    with pytest.raises(UsageError, match="unknown"):
        make(source="magic")


# --- machines without GPUs, and real drivers ------------------------------------------------------


def test_without_a_trace_of_hardware_no_process_is_started(make: Make) -> None:
    for worker in (make(), make(source="none")):
        reading = worker.read_blocking(60.0)
        assert (reading.source, reading.gpus, reading.error) == ("none", (), None)
    assert children() == []


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a module `pynvml` on the path that children import; the text sets up the library `fake`."""

    def install(setup: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir(exist_ok=True)
        body = "import sys\nfrom fake_nvml import *\nfake = FakeNvml([FakeDevice('GPU-1')])\n"
        (folder / "pynvml.py").write_text(f"{body}{setup}\nglobals().update(vars(fake.module()))\n")

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return install


def test_a_driver_without_gpus_keeps_no_process(make: Make, library: Callable[[str], None]) -> None:
    library("fake.init_code = 9")
    now = [0.0]
    signs = [("/dev/nvidiactl",)]
    worker = make(signs=lambda: signs[0], monotonic=lambda: now[0])
    assert worker.read_blocking(60.0).source == "none"
    wait_until(lambda: worker.poll() is None and not children(), what="the process to end")
    library("")
    now[0] = 100.0
    without = worker.read_blocking(60.0)
    assert (without.source, len(without.notes)) == ("none", 1)
    assert "the NVIDIA driver is not loaded" in without.notes[0]
    signs[0] = ("/dev/nvidiactl", "/dev/nvidia0")
    now[0] = 200.0
    assert worker.read_blocking(60.0).gpus[0].uuid == "GPU-1"


def test_a_driver_without_gpus_is_asked_again_after_a_long_while(make: Make, library: Callable[[str], None]) -> None:
    library("fake.init_code = 12")
    now = [0.0]
    worker = make(source="nvml", monotonic=lambda: now[0])
    assert worker.read_blocking(60.0).source == "none"
    library("")
    now[0] = 299.0
    assert worker.read_blocking(60.0).source == "none"
    now[0] = 330.0
    assert worker.read_blocking(60.0).source == "nvml"


def test_a_broken_driver_is_queried_by_a_new_process_each_time(make: Make, library: Callable[[str], None]) -> None:
    library("fake.init_code = 18")
    now = [0.0]
    worker = make(source="nvml", monotonic=lambda: now[0])
    assert "reboot or reload" in (worker.read_blocking(60.0).error or "")
    wait_until(lambda: worker.poll() is None and not children(), what="the process to end")
    library("")
    now[0] = 5.0
    assert worker.read_blocking(60.0).error is None
    assert len(children()) == 1


def test_library_output_does_not_disturb(make: Make, library: Callable[[str], None]) -> None:
    library("print('hello'); sys.stdout.flush()")
    assert make(source="nvml").read_blocking(60.0).gpus[0].name == "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("files", "signs"),
    [
        ({}, ()),
        ({"dev/nvidiactl": ""}, ("/dev/nvidiactl",)),
        ({"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n"}, ()),
        (
            {
                "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
                "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
                "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
                "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
                "sys/bus/pci/devices/0000:02:00.0/vendor": "0x1002\n",
                "sys/bus/pci/devices/0000:02:00.0/class": "0x030000\n",
            },
            ("0000:01:00.0",),
        ),
    ],
)
def test_hardware_is_detected(tmp_path: Path, files: dict[str, str], signs: tuple[str, ...]) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert nvidia_signs(str(tmp_path)) == signs


# --- the line -------------------------------------------------------------------------------------


def test_a_reading_survives_the_pipe() -> None:
    process = GpuProcess(7, None, "\udcff", 1.5, "a\nb")
    full = GpuSample("GPU-1", 3, "A100", 1, 2, 3, 0.5, 40.0, 50.0, (process,), "bus", 1, True, 3, True, True, True, "e")
    reading = GpuReading(1.25, "nvml", (full, GpuSample("GPU-2", 4, "T4", processes=())), "broken", "580", ("note",))
    for answer in (Answer(5, reading), Answer(6, reading, is_last=True)):
        line = encode(answer)
        assert b"\n" not in line
        assert decode(line, Answer) == answer


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"3", b"null", b"[1,2,3,4,5,6,7,8]"])
def test_a_damaged_line_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line, Answer)


def order_for(card: GpuSample, number: int = 1) -> MigOrder:
    return MigOrder(number, card.uuid, layout_of(["3g.40gb", "3g.40gb"]), MigLayout(False))


def test_an_order_for_a_mig_layout_is_carried_out_before_the_reading(make: Make) -> None:
    worker = make("1xA100:80GiB")
    (card,) = worker.read_blocking(20).gpus
    worker.request([order_for(card)])
    wait_until(lambda: (found := worker.poll()) is not None and len(found.gpus) == 3, what="the card to be divided")


def test_a_change_of_layout_has_extra_time_and_is_told_meanwhile(make: Make, gpus: Callable[..., Path]) -> None:
    worker = make(gpus(), deadline_s=30.0)
    (card,) = worker.read_blocking(40).gpus
    worker.adopt(GpuSettings(deadline_s=0.3))
    gpus(read_delay_s=1.0)
    worker.request([order_for(card)])
    told: list[GpuReading] = []
    wait_until(lambda: (found := worker.poll()) is not None and told.append(found) is None, what="word of it")
    assert told[0].error == "the MIG layout of a GPU is being changed"
    wait_until(lambda: (found := worker.poll()) is not None and found.error is None, what="the reading after it")


def test_the_reader_ends_in_silence_when_whoever_asked_is_gone() -> None:
    boot = "import sys; from gpusched.gpu.source import main; main(sys.argv[1])"
    choice = json.dumps({"kind": "simulated", "fake": "1x24GiB"})
    child = subprocess.Popen(
        [sys.executable, "-c", boot, choice], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    # Its first line: it can read.
    assert child.stdout.read(1) == b"\n"
    child.stdout.close()
    child.stdin.write(encode(ReadRequest(1)) + b"\n")
    child.stdin.flush()
    assert child.wait(60) == 0
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stdin.close()
    child.stderr.close()
