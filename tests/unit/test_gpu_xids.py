"""Faults as NVML tells of them, over a library that only says what a test lets it say."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from ctypes import POINTER, c_char, c_void_p, cast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import wait_until

from gpusched.errors import UsageError
from gpusched.gpu.faults import XID_EVENT, KernelLog, XidListener, XidWatch, handle_key
from gpusched.gpu.gateway import Present
from gpusched.gpu.simulated import SimulatedSource
from gpusched.lifecycle.failures import GpuFault, add_fault
from gpusched.model.cluster import Xid


def handle(uuid: str) -> Any:
    """A new handle of a device; as pynvml's, two of one device are not equal."""
    return cast(c_void_p(ord(uuid)), POINTER(c_char))


def cards(uuids: str) -> list[Present]:
    """A card for each letter."""
    return [Present(uuid, index, handle(uuid), None) for index, uuid in enumerate(uuids)]


class Library:
    """Answers like the gateway to NVML. `events` are put in by the test; a number is an error's code."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.events: queue.Queue[tuple[str, int, int] | int] = queue.Queue()
        self.freed = 0
        self.created = 0
        self.registered: list[str] = []

    def constant(self, name: str) -> int | None:
        return None

    def ask(self, name: str, *arguments: Any, **options: Any) -> tuple[Any, int]:
        if name == "nvmlEventSetCreate":
            self.created += 1
        elif name == "nvmlDeviceRegisterEvents":
            self.registered.append(chr(cast(arguments[0], c_void_p).value or 0))
        code = self.codes.get(name, 0)
        if code:
            return None, code
        if name == "nvmlEventSetWait_v2":
            try:
                found = self.events.get(timeout=0.01)
            except queue.Empty:
                return None, 10
            if isinstance(found, int):
                return None, found
            uuid, kind, xid = found
            return SimpleNamespace(device=handle(uuid), eventType=kind, eventData=xid), 0
        if name == "nvmlDeviceGetUUID":
            return None, 15
        if name == "nvmlEventSetFree":
            self.freed += 1
        return object(), 0


def numbers(found: dict[str, tuple[Xid, ...]]) -> dict[str, tuple[int, ...]]:
    return {uuid: tuple(xid.number for xid in xids) for uuid, xids in found.items()}


class Heard:
    """What a listener has received, by UUID."""

    def __init__(self) -> None:
        self.xids: dict[str, tuple[int, ...]] = {}

    def __call__(self, uuid: str, xid: Xid) -> None:
        self.xids[uuid] = (*self.xids.get(uuid, ()), xid.number)

    def wait(self, count: int) -> dict[str, tuple[int, ...]]:
        wait_until(lambda: sum(map(len, self.xids.values())) >= count, what="the faults to be heard")
        return self.xids


def test_faults_are_delivered_once_in_order_and_other_events_are_not() -> None:
    library, heard = Library(), Heard()
    watch = XidWatch(library, cards("ab"), heard)
    for uuid, kind, xid in [("a", XID_EVENT, 31), ("b", XID_EVENT, 79), ("a", 2, 5), ("a", XID_EVENT, 999)]:
        library.events.put((uuid, kind, xid))
    library.events.put(("c", XID_EVENT, 79))
    library.events.put(("a", XID_EVENT, 48))
    assert heard.wait(3) == {"a": (31, 48), "b": (79,)}
    watch.close()
    assert library.freed == 1


@pytest.mark.parametrize("missing", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_without_event_support_no_fault_is_delivered(missing: str) -> None:
    library, heard = Library({missing: 3}), Heard()
    watch = XidWatch(library, cards("a"), heard)
    library.events.put(("a", XID_EVENT, 79))
    assert not watch.has_failed
    assert watch.drained_at is None
    watch.close()
    assert (heard.xids, library.events.qsize()) == ({}, 1)


def test_a_failing_driver_only_ends_the_listening() -> None:
    library, heard = Library(), Heard()
    watch = XidWatch(library, cards("a"), heard)
    library.events.put(("a", XID_EVENT, 79))
    library.events.put(15)
    wait_until(lambda: watch.has_failed, what="the listening to end")
    assert heard.xids == {"a": (79,)}
    assert watch.drained_at is None
    watch.close()


def test_events_are_drained_until_a_wait_returns_none() -> None:
    library, heard, now = Library(), Heard(), 100.0
    watch = XidWatch(library, cards("a"), heard, lambda: now)
    wait_until(lambda: watch.drained_at == 100.0, what="a wait without news")
    now = 200.0
    wait_until(lambda: watch.drained_at == 200.0, what="another one")
    watch.close()


def test_an_event_counts_as_taken_only_once_taken() -> None:
    now = 100.0
    library = Library()
    ear = XidListener(library, lambda: now)
    ear.take(0, cards("a"))
    assert ear.drained_at is None

    def is_drained() -> bool:
        ear.take(1, cards("a"))
        return ear.drained_at == now

    wait_until(is_drained, what="the first wait to be over")
    library.events.put(("a", XID_EVENT, 79))
    now = 200.0
    found: list[int] = []

    def has_passed_it() -> bool:
        found.extend(xid.number for xid in ear.take(1, cards("a")).get("a", ()))
        return ear.drained_at == 200.0

    wait_until(has_passed_it, what="the event to be passed")
    assert found == [79]
    ear.close()


def test_the_other_gpus_are_listened_to_again_after_a_loss() -> None:
    library = Library()
    ear = XidListener(library)
    assert ear.take(0, cards("ab")) == {}
    library.events.put(("a", XID_EVENT, 79))
    library.events.put(15)
    wait_until(lambda: library.freed == 1, what="the listening to end")
    assert numbers(ear.take(1, cards("ab"))) == {"a": (79,)}
    # Not at once: what fails now will mostly fail again.
    assert library.registered == ["a", "b"]
    b = [cards("ab")[1]]
    # Unless the card that may be why is gone.
    assert ear.take(2, b) == {}
    assert library.registered == ["a", "b", "b"]
    library.events.put(("b", XID_EVENT, 48))
    found: dict[str, tuple[int, ...]] = {}
    wait_until(lambda: bool(found.update(numbers(ear.take(3, b))) or found), what="the fault of the other card")
    assert found == {"b": (48,)}
    library.events.put(999)
    wait_until(lambda: library.freed == 2, what="the listening to end")
    ear.take(31, b)
    assert library.registered == ["a", "b", "b"]
    ear.take(32, b)
    assert library.registered == ["a", "b", "b", "b"]
    # The card that comes back is listened to as well.
    assert ear.take(33, cards("ab")) == {}
    assert library.registered == ["a", "b", "b", "b", "a", "b"]
    ear.close()
    wait_until(lambda: library.freed == 4, what="everything to be given back")


def test_handles_of_one_device_compare_equal() -> None:
    device, other = (cast(c_void_p(at), pynvml.c_nvmlDevice_t) for at in (0x1000, 0x2000))
    event = pynvml.c_nvmlEventData_t()
    event.device = device
    assert event.device != device, "as pointers they are not equal"
    assert handle_key(event.device) == handle_key(device) != handle_key(other)


def test_an_unsupported_query_is_not_repeated() -> None:
    library = Library({"nvmlDeviceRegisterEvents": 3})
    ear = XidListener(library)
    for now in range(0, 1000, 10):
        ear.take(now, cards("a"))
    assert library.created == 1


def write(path: Path, *xids: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpus": [{"vram": "24GiB", "xids": list(xids)}]}))
    part.rename(path)


def test_simulated_faults_are_delivered_once(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    write(path, 31)
    now = 100.0
    source = SimulatedSource(str(path), clock=lambda: now)
    assert [source.read().gpus[0].xids for _ in range(2)] == [(Xid(31, 100.0),), ()]
    write(path, 31, 79, {"xid": 79, "at": 42})
    now = 200.0
    logged = Xid(79, 42, 3)
    assert [source.read().gpus[0].xids for _ in range(2)] == [(Xid(79, 200.0), logged), ()]
    assert logged in SimulatedSource(str(path)).read().gpus[0].xids
    for wrong in ("79", {"at": 42}, {"xid": 79, "why": 1}, 0):
        with pytest.raises(UsageError, match="xids|why"):
            write(path, wrong)
            SimulatedSource(str(path))


# --- the kernel's log -------------------------------------------------------------------------------


class Kernel:
    """Stands for /dev/kmsg: a pipe of packets, of which each read takes one record."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe2(os.O_DIRECT)
        self.path = f"/proc/self/fd/{self.out}"
        self.sequence = 0

    def say(self, text: str, at: float = 50.0, facility: int = 0) -> None:
        self.sequence += 1
        head = f"{facility * 8 + 4},{self.sequence},{int(at * 1e6)},-"
        os.write(self.into, f"{head};{text}\n DEVICE=+pci:0000:3b:00.0\n".encode())

    def log(self) -> KernelLog:
        return KernelLog(self.path, clock=lambda: 1000.0, monotonic=lambda: 100.0)

    def close(self) -> None:
        os.close(self.into)
        os.close(self.out)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.close()


CARDS = {"00000000:3B:00.0": "a", "00000000:AF:00.0": "b"}
FELL = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_earlier_log_records_are_read_once_and_later_ones_follow(kernel: Kernel) -> None:
    kernel.say("usb 1-1: new device")
    kernel.say(FELL, at=40)
    kernel.say("NVRM: Xid (PCI:0000:af:00): 31, pid=4711, name=python, Ch 00000008", at=60)
    log = kernel.log()
    assert log.take(CARDS) == {"a": (Xid(79, 940.0, 2),), "b": (Xid(31, 960.0, 3),)}
    assert log.take(CARDS) == {}
    kernel.say("NVRM: Xid (0000:3b:00.0): 48, pid=1", at=99)
    assert log.take(CARDS) == {"a": (Xid(48, 999.0, 4),)}
    assert log.trouble is None
    log.close()


def test_only_kernel_records_are_trusted(kernel: Kernel) -> None:
    kernel.say(FELL, facility=1)
    kernel.say(f"python[4711]: {FELL}")
    kernel.say("NVRM: Xid (PCI:0000:3b:00): many")
    kernel.say("NVRM: Xid (PCI:zz): 79")
    os.write(kernel.into, b"nonsense\n")
    os.write(kernel.into, b"a,b,c;NVRM: Xid (PCI:0000:3b:00): 79\n")
    log = kernel.log()
    assert log.take(CARDS) == {}
    log.close()


def test_a_fault_waits_until_its_gpu_is_known(kernel: Kernel) -> None:
    kernel.say(FELL)
    log = kernel.log()
    assert log.take({}) == {}
    assert numbers(log.take(CARDS)) == {"a": (79,)}
    log.close()


def test_the_kernel_maps_gpus_to_bus_addresses(kernel: Kernel) -> None:
    kernel.say("NVRM: GPU at PCI:0000:3b:00: GPU-0a1b-2c3d")
    kernel.say(FELL)
    log = kernel.log()
    # The driver has lost it, and nobody knows its address but the log.
    assert numbers(log.take({"unknown": "GPU-0a1b-2c3d"})) == {"GPU-0a1b-2c3d": (79,)}
    log.close()


def test_an_unreadable_log_is_reported_and_is_not_a_fault(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "kmsg"))
    assert log.take(CARDS) == {}
    assert log.trouble is not None
    assert "cannot be read (No such file or directory): GPU faults are only known" in log.trouble
    log.close()


def test_overwritten_records_are_skipped(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.say(FELL)
    log = kernel.log()
    read, failures = os.read, [BrokenPipeError()]

    def overwritten(fd: int, size: int) -> bytes:
        if failures:
            raise failures.pop()
        return read(fd, size)

    monkeypatch.setattr("gpusched.gpu.faults.os.read", overwritten)
    assert numbers(log.take(CARDS)) == {"a": (79,)}
    failures.append(OSError(1, "Operation not permitted"))  # type: ignore[arg-type]
    assert log.take(CARDS) == {}
    assert log.trouble is not None


# --- one fault, heard twice -------------------------------------------------------------------------


def event(at: float, xid: int = 79) -> GpuFault:
    return GpuFault("a", 0, xid, at)


def line(at: float, sequence: int, xid: int = 79) -> GpuFault:
    return GpuFault("a", 0, xid, at, sequence, is_event=False)


HEARD = {
    "an event and its line": ([event(10.2), line(10, 1)], 1),
    "a line and its event": ([line(10, 1), event(10.2)], 1),
    "two events": ([event(10), event(13)], 2),
    "two faults, told of twice each, soon after each other": ([event(10), event(13), line(10, 1), line(13, 2)], 2),
    "the same in turn": ([event(10), line(10, 1), event(13), line(13, 2)], 2),
    "many lines about one fault": ([line(10, 1), line(10.1, 2), event(10.2), line(10.3, 3)], 1),
    "the log, read again": ([line(10, 1), line(10.1, 2), line(90, 3), line(10.0001, 1), line(10.1, 2), line(90, 3)], 2),
    "the log, read again with what was heard": ([event(10), line(10, 1), line(10, 1)], 1),
    "different numbers at once": ([line(10, 1, 48), line(10, 2, 63), event(10, 48)], 2),
    "an event long after a line": ([line(10, 1), event(20)], 2),
}


@pytest.mark.parametrize("name", HEARD)
def test_a_fault_received_twice_counts_once(name: str) -> None:
    told, expected = HEARD[name]
    known: tuple[GpuFault, ...] = ()
    new = 0
    for fault in told:
        known, is_new = add_fault(known, fault)
        new += is_new
    assert (new, len(known)) == (expected, expected)


@given(st.lists(st.floats(0, 100), max_size=8), st.permutations(range(8)), st.integers(0, 8))
def test_reading_the_log_again_never_makes_a_new_fault(ats: list[float], order: list[int], events: int) -> None:
    told = [line(at, number) for number, at in enumerate(ats)] + [event(at) for at in ats[:events]]
    told = [told[place] for place in order if place < len(told)]
    known: tuple[GpuFault, ...] = ()
    for fault in told:
        known, _ = add_fault(known, fault)
    for fault in told:
        if fault.sequence is not None:
            known, is_new = add_fault(known, fault)
            assert not is_new
