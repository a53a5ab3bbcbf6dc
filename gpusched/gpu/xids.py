"""Faults that the driver tells of as events (XID), waited for in a thread of their own.

Waiting is the only way to learn of them from NVML, and it must not hold up readings. Where events are not supported
(some cards, WSL) nothing is heard, and nothing is concluded from that. What happened before the daemon started is in
the kernel's log only: see `kernel_log`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpusched.gpu.device import SLOW_S, Nvml, Present
from gpusched.model.cluster import Xid

XID_EVENT = 8
"""nvmlEventTypeXidCriticalError."""
_UNKNOWN_XID = 999
TIMEOUT = 10
"""NVML_ERROR_TIMEOUT: nothing has happened."""
_WAIT_MS = 1000
_MOST = 1000


class XidEar:
    """Listens to the cards that are there: anew when others are, and when a lost card has ended the listening."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.time) -> None:
        self._nvml = nvml
        self._clock = clock
        self._watch: XidWatch | None = None
        self._cards: frozenset[int] = frozenset()
        self._not_before = float("-inf")

    def take(self, now: float, present: Sequence[Present]) -> dict[str, tuple[Xid, ...]]:
        """Faults by UUID since the last call, in order. Args: now: monotonic seconds."""
        heard = {} if self._watch is None else self._watch.take()
        cards = frozenset(card.index for card in present)
        is_deaf = self._watch is None or self._watch.has_failed or cards != self._cards
        if is_deaf and now >= self._not_before:
            self._not_before = now + SLOW_S
            if self._watch is not None:
                self._watch.leave()
            self._watch, self._cards = (
                XidWatch(self._nvml, [card.handle for card in present], self._clock),
                cards,
            )
        return heard

    def close(self) -> None:
        """Stop listening."""
        if self._watch is not None:
            self._watch.close()


class XidWatch:
    """Listens to all devices that support it, until closed or until the driver ends the waiting."""

    def __init__(self, nvml: Nvml, handles: Sequence[Any], clock: Callable[[], float] = time.time) -> None:
        self._nvml = nvml
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: list[tuple[str, Xid]] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        events, code = nvml.ask("nvmlEventSetCreate")
        if code:
            return
        self._events = events
        registered = [nvml.ask("nvmlDeviceRegisterEvents", handle, XID_EVENT, events)[1] == 0 for handle in handles]
        if not any(registered):
            nvml.ask("nvmlEventSetFree", events)
            return
        self._thread = threading.Thread(target=self._listen, name="xid", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether it listened once and does not any more."""
        return self._thread is not None and not self._thread.is_alive()

    def take(self) -> dict[str, tuple[Xid, ...]]:
        """Faults by UUID since the last call, in order."""
        with self._lock:
            heard, self._heard = self._heard, []
        found: dict[str, tuple[Xid, ...]] = {}
        for uuid, xid in heard:
            found[uuid] = (*found.get(uuid, ()), xid)
        return found

    def leave(self) -> None:
        """Stop listening when the current wait is over; nobody waits for that."""
        self._closing.set()

    def close(self) -> None:
        """Stop listening; waits for the current wait to be over, but not for a driver that hangs."""
        self.leave()
        if self._thread is not None:
            self._thread.join(2 * _WAIT_MS / 1000)

    def _listen(self) -> None:
        while not self._closing.is_set():
            data, code = self._nvml.ask("nvmlEventSetWait_v2", self._events, _WAIT_MS)
            if code == TIMEOUT:
                continue
            if code:
                # A lost device or driver ends the waiting for all; the ear begins again with those that are left.
                break
            uuid, code = self._nvml.ask("nvmlDeviceGetUUID", data.device)
            if code or int(data.eventType) != XID_EVENT or int(data.eventData) == _UNKNOWN_XID:
                continue
            name = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
            with self._lock:
                if len(self._heard) < _MOST:
                    self._heard.append((name, Xid(int(data.eventData), self._clock())))
        self._nvml.ask("nvmlEventSetFree", self._events)
