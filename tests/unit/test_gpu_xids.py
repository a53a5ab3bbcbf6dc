"""Faults as NVML tells of them, over a library that only says what a test lets it say."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import wait_until

from gpusched.errors import UsageError
from gpusched.gpu.device import Present
from gpusched.gpu.simulated import SimulatedSource
from gpusched.gpu.xids import XID_EVENT, XidEar, XidWatch


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
            self.registered.append(arguments[0])
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
            return SimpleNamespace(device=uuid, eventType=kind, eventData=xid), 0
        if name == "nvmlDeviceGetUUID":
            return arguments[0], 0
        if name == "nvmlEventSetFree":
            self.freed += 1
        return object(), 0


def heard(watch: XidWatch, count: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}

    def enough() -> bool:
        for uuid, xids in watch.take().items():
            found[uuid] = (*found.get(uuid, ()), *xids)
        return sum(map(len, found.values())) >= count

    wait_until(enough, what="the faults to be heard")
    return found


def test_faults_are_heard_once_in_their_order_and_others_are_not() -> None:
    library = Library()
    watch = XidWatch(library, ["a", "b"])
    for uuid, kind, xid in [("a", XID_EVENT, 31), ("b", XID_EVENT, 79), ("a", 2, 5), ("a", XID_EVENT, 999)]:
        library.events.put((uuid, kind, xid))
    library.events.put(("a", XID_EVENT, 48))
    assert heard(watch, 3) == {"a": (31, 48), "b": (79,)}
    assert watch.take() == {}
    watch.close()
    assert library.freed == 1


@pytest.mark.parametrize("missing", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_where_events_are_not_supported_nothing_is_heard(missing: str) -> None:
    library = Library({missing: 3})
    watch = XidWatch(library, ["a"])
    library.events.put(("a", XID_EVENT, 79))
    assert not watch.has_failed
    assert watch.take() == {}
    watch.close()
    assert library.events.qsize() == 1


def test_a_driver_that_fails_ends_the_listening_and_nothing_else() -> None:
    library = Library()
    watch = XidWatch(library, ["a"])
    library.events.put(("a", XID_EVENT, 79))
    library.events.put(15)
    wait_until(lambda: watch.has_failed, what="the listening to end")
    assert watch.take() == {"a": (79,)}
    watch.close()


def test_after_a_lost_card_the_others_are_listened_to_again() -> None:
    library = Library()
    ear = XidEar(library)
    cards = [Present(index, uuid, None) for index, uuid in enumerate("ab")]
    assert ear.take(0, cards) == {}
    library.events.put(("a", XID_EVENT, 79))
    library.events.put(15)
    wait_until(lambda: library.freed == 1, what="the listening to end")
    assert ear.take(1, cards[1:]) == {"a": (79,)}
    # Not at once: what fails now will mostly fail again.
    assert library.registered == ["a", "b"]
    assert ear.take(31, cards[1:]) == {}
    assert library.registered == ["a", "b", "b"]
    library.events.put(("b", XID_EVENT, 48))
    found: dict[str, tuple[int, ...]] = {}
    wait_until(lambda: bool(found.update(ear.take(32, cards[1:])) or found), what="the fault of the other card")
    assert found == {"b": (48,)}
    # The card that comes back is listened to as well.
    assert ear.take(62, cards) == {}
    assert library.registered == ["a", "b", "b", "a", "b"]
    ear.close()
    wait_until(lambda: library.freed == 3, what="everything to be given back")


def test_where_nothing_is_told_it_is_not_asked_again_and_again() -> None:
    library = Library({"nvmlDeviceRegisterEvents": 3})
    ear = XidEar(library)
    for now in range(0, 1000, 10):
        ear.take(now, [Present(0, "a", None)])
    assert library.created == 1


def write(path: Path, *xids: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpus": [{"vram": "24GiB", "xids": list(xids)}]}))
    part.rename(path)


def test_simulated_faults_are_told_of_once(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    write(path, 31)
    source = SimulatedSource(str(path))
    assert [source.read().gpus[0].xids for _ in range(2)] == [(31,), ()]
    write(path, 31, 79, 79)
    assert [source.read().gpus[0].xids for _ in range(2)] == [(79, 79), ()]
    with pytest.raises(UsageError, match="xids"):
        write(path, "79")
        SimulatedSource(str(path))
