"""Faults reported by the driver (XID): as NVML events, and in the kernel's log.

Events: NVML can only be waited on for them, so a separate thread does that and readings are not held up. Where events
are unsupported (some cards, WSL) none come, and nothing is concluded from that.

The kernel's log (`NVRM: Xid (PCI:0000:3b:00): 79, pid=...`) also has faults from before the daemon started, and from
machines without events. Records since boot are read once, later ones with each reading, without blocking. Ordinary
users usually may not read it; that is reported once, and is not a fault.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import c_void_p, cast
from typing import Any

from gpusched.gpu.gateway import SLOW_S, TIMEOUT, Gateway, Present
from gpusched.model.cluster import Xid

XID_EVENT = 8
"""nvmlEventTypeXidCriticalError."""
_UNKNOWN_XID = 999
_WAIT_MS = 250
"""Before a failed run's fault is judged, one wait must end."""
_JOIN_S = 2.0
_MOST = 1000


class XidListener:
    """Listens to all available cards; restarts when the set changes, or when a lost card has ended the wait."""

    def __init__(self, nvml: Gateway, clock: Callable[[], float] = time.time) -> None:
        self._nvml = nvml
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: list[tuple[str, Xid]] = []
        self._watch: XidWatch | None = None
        self._cards: frozenset[str] = frozenset()
        self._not_before = float("-inf")
        self.drained_at: float | None = None
        """Events from before this instant were among those last taken, or earlier ones; None while not listening."""

    def take(self, now: float, present: Sequence[Present]) -> dict[str, tuple[Xid, ...]]:
        """Faults by UUID since the last call, in order. Args: now: monotonic seconds."""
        # Before the events: one that arrives in between does not count as received.
        self.drained_at = None if self._watch is None else self._watch.drained_at
        cards = frozenset(card.uuid for card in present)
        is_deaf = self._watch is None or self._watch.has_failed
        # It will usually fail again; but a lost card may be the reason.
        if cards != self._cards or (is_deaf and now >= self._not_before):
            self._not_before = now + SLOW_S
            if self._watch is not None:
                self._watch.leave()
            self._watch, self._cards = XidWatch(self._nvml, present, self._receive, self._clock), cards
        with self._lock:
            heard, self._heard = self._heard, []
        found: dict[str, tuple[Xid, ...]] = {}
        for uuid, xid in heard:
            found[uuid] = (*found.get(uuid, ()), xid)
        return found

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _receive(self, uuid: str, xid: Xid) -> None:
        with self._lock:
            if len(self._heard) < _MOST:
                self._heard.append((uuid, xid))


class XidWatch:
    """Listens to all devices that support it, until closed or until the driver ends the wait.

    Args: receive: called on the listening thread with the card's UUID and its fault.
    """

    def __init__(
        self,
        nvml: Gateway,
        cards: Sequence[Present],
        receive: Callable[[str, Xid], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._nvml = nvml
        self._receive = receive
        self._clock = clock
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._drained_at = 0.0
        events, code = nvml.ask("nvmlEventSetCreate")
        if code:
            return
        self._events = events
        # Read now: a lost card no longer reports its UUID, and its loss is the fault to catch.
        self._uuids = {
            handle_key(card.handle): card.uuid
            for card in cards
            if nvml.ask("nvmlDeviceRegisterEvents", card.handle, XID_EVENT, events)[1] == 0
        }
        if not self._uuids:
            nvml.ask("nvmlEventSetFree", events)
            return
        self._thread = threading.Thread(target=self._listen, name="xid", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether it has stopped listening after a failure."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def drained_at(self) -> float | None:
        """Instant before which all events have been received; None when not listening."""
        return self._drained_at if self._thread is not None and self._thread.is_alive() else None

    def leave(self) -> None:
        """Stop listening after the current wait, without blocking for that."""
        self._closing.set()

    def close(self) -> None:
        """Stop listening; blocks for the current wait to end, but not for a driver that hangs."""
        self.leave()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _listen(self) -> None:
        while not self._closing.is_set():
            began_at = self._clock()
            data, code = self._nvml.ask("nvmlEventSetWait_v2", self._events, _WAIT_MS)
            if code == TIMEOUT:
                self._drained_at = began_at
                continue
            if code:
                # A lost device or driver ends the wait for all; listening restarts with the remaining ones.
                break
            uuid = self._uuids.get(handle_key(data.device))
            if uuid is None or int(data.eventType) != XID_EVENT or int(data.eventData) == _UNKNOWN_XID:
                continue
            self._receive(uuid, Xid(int(data.eventData), self._clock()))
        self._nvml.ask("nvmlEventSetFree", self._events)


def handle_key(handle: Any) -> Hashable:
    """Key equal for all handles of one device: pynvml's are pointers, which compare by identity."""
    return cast(handle, c_void_p).value


PATH = "/dev/kmsg"

_FAULT = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:]+)(?:\.[0-9a-fA-F])?\): (\d+)\b")
_CARD = re.compile(rb"NVRM: GPU at (?:PCI:)?([0-9a-fA-F:]+)(?:\.[0-9a-fA-F])?: (GPU-[0-9a-fA-F-]+)")
_RECORD_MAX = 8192
"""The kernel never splits a record to fit a smaller buffer, and none is longer."""
_FIRST_READ_MAX, _READ_MAX = 200_000, 10_000
_KEPT_MAX = 1000

Address = tuple[int, ...]
"""Domain, bus, device."""


class KernelLog:
    """Follows the kernel's log from its oldest record."""

    def __init__(
        self,
        path: str = PATH,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._fd: int | None = None
        self._limit = _FIRST_READ_MAX
        self._uuids: dict[Address, str] = {}
        self._unplaced: deque[tuple[Address, Xid]] = deque(maxlen=_KEPT_MAX)
        """Faults at addresses of which no card is known yet."""
        self.trouble: str | None = None
        """Why the log is not read."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.trouble = _trouble(path, error)

    def take(self, cards: Mapping[str, str]) -> dict[str, tuple[Xid, ...]]:
        """Faults by UUID since the last call, in order. Faults of absent cards are kept until the cards appear.

        Args: cards: PCI bus id -> UUID.
        """
        self._uuids.update((found, uuid) for bus, uuid in cards.items() if (found := address(bus)) is not None)
        self._read()
        known = frozenset(cards.values())
        heard: dict[str, tuple[Xid, ...]] = {}
        waiting, self._unplaced = self._unplaced, deque(maxlen=_KEPT_MAX)
        for where, xid in waiting:
            uuid = self._uuids.get(where)
            if uuid is None or uuid not in known:
                self._unplaced.append((where, xid))
            else:
                heard[uuid] = (*heard.get(uuid, ()), xid)[-_KEPT_MAX:]
        return heard

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _read(self) -> None:
        if self._fd is None:
            return
        limit, self._limit = self._limit, _READ_MAX
        began_at = self._clock() - self._monotonic()
        for _ in range(limit):
            try:
                record = os.read(self._fd, _RECORD_MAX)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before we came to them: the next one is the oldest that is left
            except OSError as error:
                self.trouble = _trouble(PATH, error)
                self.close()
                return
            if not record:
                return
            self._parse(record, began_at)

    def _parse(self, record: bytes, began_at: float) -> None:
        head, _, text = record.partition(b";")
        if not text.startswith(b"NVRM: "):
            return
        try:
            level, sequence, stamp_us = (int(word) for word in head.split(b",")[:3])
        except ValueError:
            return
        if level >> 3:
            return  # written by a program, which may write what it likes
        if (found := _CARD.match(text)) and (where := address(found[1].decode())) is not None:
            self._uuids.setdefault(where, found[2].decode())
        elif (found := _FAULT.match(text)) and (where := address(found[1].decode())) is not None:
            self._unplaced.append((where, Xid(int(found[2]), began_at + stamp_us / 1e6, sequence)))


def address(bus_id: str) -> Address | None:
    """Parse `00000000:3B:00.0` or `0000:3b:00` as (0, 0x3b, 0); None when it is neither."""
    try:
        parts = tuple(int(part, 16) for part in bus_id.partition(".")[0].split(":"))
    except ValueError:
        return None
    return parts if len(parts) == 3 else None


def _trouble(path: str, error: OSError) -> str:
    return (
        f"the kernel's log ({path}) cannot be read ({error.strerror}): "
        "GPU faults are only known from the driver's events while the daemon runs"
    )
