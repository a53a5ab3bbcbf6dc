"""Faults that the driver tells of as events (XID), waited for in a thread of their own.

Waiting is the only way to learn of them from NVML, and it must not hold up readings. Where events are not supported
(some cards, WSL) nothing is heard, and nothing is concluded from that. What happened before the daemon started is in
the kernel's log only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from gpusched.gpu.device import Nvml

XID_EVENT = 8
"""nvmlEventTypeXidCriticalError."""
_UNKNOWN_XID = 999
TIMEOUT = 10
"""NVML_ERROR_TIMEOUT: nothing has happened."""
_WAIT_MS = 1000
_MOST = 1000


class XidWatch:
    """Listens to all devices that support it, until closed."""

    def __init__(self, nvml: Nvml, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()
        self._heard: list[tuple[str, int]] = []
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
    def is_listening(self) -> bool:
        """Whether any device tells of faults."""
        return self._thread is not None and self._thread.is_alive()

    def take(self) -> dict[str, tuple[int, ...]]:
        """Numbers by UUID since the last call, in order."""
        with self._lock:
            heard, self._heard = self._heard, []
        found: dict[str, tuple[int, ...]] = {}
        for uuid, xid in heard:
            found[uuid] = (*found.get(uuid, ()), xid)
        return found

    def close(self) -> None:
        """Stop listening; waits for the current wait to be over, but not for a driver that hangs."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2 * _WAIT_MS / 1000)

    def _listen(self) -> None:
        while not self._closing.is_set():
            data, code = self._nvml.ask("nvmlEventSetWait_v2", self._events, _WAIT_MS)
            if code == TIMEOUT:
                continue
            if code:
                # A lost device or driver ends the waiting for all; readings say the rest.
                break
            uuid, code = self._nvml.ask("nvmlDeviceGetUUID", data.device)
            if code or int(data.eventType) != XID_EVENT or int(data.eventData) == _UNKNOWN_XID:
                continue
            name = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
            with self._lock:
                if len(self._heard) < _MOST:
                    self._heard.append((name, int(data.eventData)))
        self._nvml.ask("nvmlEventSetFree", self._events)
