"""Faults of GPUs in the kernel's log (`NVRM: Xid (PCI:0000:3b:00): 79, pid=...`).

It knows what happened before anybody listened, and it speaks also where NVML has no events. Records since the start of
the machine are read once, those that follow with each reading, and never is anything waited for. Ordinary users may
mostly not read it; that is told once, and no fault.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping

from gpusched.model.cluster import Xid

PATH = "/dev/kmsg"

_FAULT = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:]+)(?:\.[0-9a-fA-F])?\): (\d+)\b")
_CARD = re.compile(rb"NVRM: GPU at (?:PCI:)?([0-9a-fA-F:]+)(?:\.[0-9a-fA-F])?: (GPU-[0-9a-fA-F-]+)")
_RECORD_MAX = 8192
"""The kernel cuts no record shorter than it is, and none is longer."""
_FIRST_READ_MAX, _READ_MAX = 200_000, 10_000
_KEPT_MAX = 1000

Address = tuple[int, ...]
"""Domain, bus, device."""


class KernelLog:
    """Follows the kernel's log from its oldest record on."""

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
        """Faults by UUID since the last call, in order. Those of other cards are kept until these are there.

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
        """Let go of the log."""
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
    """`00000000:3B:00.0`, `0000:3b:00` -> (0, 0x3b, 0); None when it is no such thing."""
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
