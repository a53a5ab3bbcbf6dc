"""What supervisors say: events on a pipe, and the same facts in their records."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from gpusched.model import value
from gpusched.model.execution import RunEnded, SupervisorEvent
from gpusched.model.value import Value

PIPE_BYTES = 1 << 20
"""Room for about 5,000 events while the daemon is busy."""
READ_BYTES = 1 << 16
"""Bytes of events per read: a larger buffer would be mapped and unmapped for each read."""


class RunRefused(Value, tag_field="event", tag="refused"):
    """A supervisor, or the fork server, will not start a run, which may be started elsewhere or again."""

    run: str
    detail: str
    """A sentence."""


_SAID: Any = SupervisorEvent | RunRefused


class EventPipe:
    """The pipe that all supervisors of a machine write to."""

    def __init__(self) -> None:
        self._partial = b""
        self._fd, self.write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # The user's quota of pipe memory is exhausted; the default 64 KiB hold 300 events.
            pass

    def fileno(self) -> int:
        return self._fd

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def lines(self) -> Iterator[bytes]:
        """The whole lines that have arrived, each an event for `event_of`."""
        while True:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            yield from lines
            if len(data) < READ_BYTES:
                return

    def close(self) -> None:
        if not self.is_closed:
            os.close(self._fd)
            os.close(self.write_fd)
            self._fd = -1


def end_of(result: bytes) -> RunEnded:
    """The end of a run as its record has it. Raises: ValueError."""
    event = event_of(result)
    assert isinstance(event, RunEnded)
    return event


def event_of(line: bytes) -> SupervisorEvent | RunRefused:
    """Parse an event from the pipe or a result. Raises: ValueError for anything supervisors do not send."""
    event: SupervisorEvent | RunRefused
    if b'"leftovers":' not in line:
        event = value.decode(line, _SAID)
        return event
    facts = json.loads(line)
    if facts["leftovers"] is not None:
        # Supervisors write texts and numbers only.
        facts["leftovers"] = facts["leftovers"].split("\n") if facts["leftovers"] else ()
    event = value.convert(facts, _SAID)
    return event
