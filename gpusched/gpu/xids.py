"""Faults that the driver reports as events (XID), received by a thread of their own.

Waiting is the only way to learn of them from NVML, and it must not hold up readings. Where events are not supported
(some cards, WSL) nothing is received, and nothing is concluded from that. What happened before the daemon started is in
the kernel's log only: see `kernel_log`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from ctypes import c_void_p, cast
from typing import Any

from gpusched.gpu.device import SLOW_S, Nvml, Present
from gpusched.model.cluster import Xid

XID_EVENT = 8
"""nvmlEventTypeXidCriticalError."""
_UNKNOWN_XID = 999
TIMEOUT = 10
"""NVML_ERROR_TIMEOUT: nothing has happened."""
_WAIT_MS = 250
"""A run that failed waits for the end of one wait before its fault is judged."""
_JOIN_S = 2.0
_MOST = 1000


class XidEar:
    """Listens to the cards that are there: again when the set changes, or when a lost card has ended the listening."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.time) -> None:
        self._nvml = nvml
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: list[tuple[str, Xid]] = []
        self._watch: XidWatch | None = None
        self._cards: frozenset[str] = frozenset()
        self._not_before = float("-inf")
        self.drained_at: float | None = None
        """Events from before this instant were among those last taken, or earlier ones; None when nobody listened."""

    def take(self, now: float, present: Sequence[Present]) -> dict[str, tuple[Xid, ...]]:
        """Faults by UUID since the last call, in order. Args: now: monotonic seconds."""
        # Before the events: one that comes in between is not claimed to have been taken.
        self.drained_at = None if self._watch is None else self._watch.drained_at
        cards = frozenset(card.uuid for card in present)
        is_deaf = self._watch is None or self._watch.has_failed
        # What fails now will mostly fail again; but a card that has gone may be why it did.
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
        """Stop listening."""
        if self._watch is not None:
            self._watch.close()

    def _receive(self, uuid: str, xid: Xid) -> None:
        with self._lock:
            if len(self._heard) < _MOST:
                self._heard.append((uuid, xid))


class XidWatch:
    """Listens to all devices that support it, until closed or until the driver ends the waiting.

    Args: receive: called by the listening thread with the UUID of the card and its fault.
    """

    def __init__(
        self,
        nvml: Nvml,
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
        # Kept from now: a card that is lost does not tell its UUID any more, and that is the fault to hear of.
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
        """Whether it listened once and does not any more."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def drained_at(self) -> float | None:
        """Events from before this instant have been received; None when nobody listens."""
        return self._drained_at if self._thread is not None and self._thread.is_alive() else None

    def leave(self) -> None:
        """Stop listening when the current wait is over, without waiting for that."""
        self._closing.set()

    def close(self) -> None:
        """Stop listening; waits for the current wait to be over, but not for a driver that hangs."""
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
                # A lost device or driver ends the waiting for all; the ear begins again with those that are left.
                break
            uuid = self._uuids.get(handle_key(data.device))
            if uuid is None or int(data.eventType) != XID_EVENT or int(data.eventData) == _UNKNOWN_XID:
                continue
            self._receive(uuid, Xid(int(data.eventData), self._clock()))
        self._nvml.ask("nvmlEventSetFree", self._events)


def handle_key(handle: Any) -> Hashable:
    """What two handles of one device have in common: pynvml's are pointers, and those compare by identity."""
    return cast(handle, c_void_p).value
