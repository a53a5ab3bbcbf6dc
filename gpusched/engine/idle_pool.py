"""Idle supervisors, whose run is over and which wait a moment for another: how they are counted and get a ticket.

Forking Python, copying the pages that the fork then touches and ending it cost more processor time than everything
else done for a short job. Each idle supervisor puts a token, its pid, into a pipe. The daemon takes one out and then
puts a ticket into the queue that all of them read; so does the fork server, for tickets sent while none was idle. A
supervisor whose wait times out takes its own token out, so that nobody counts on it any more.
"""

from __future__ import annotations

import os

from gpusched.engine.wire import QUEUE_BYTES

TOKEN_BYTES = 4


class IdlePool:
    """The ends of the pipe of tokens and of the queue of tickets; none of these calls blocks."""

    __slots__ = ("queue_in", "tokens_in", "tokens_out")

    def __init__(self, tokens_out: int, tokens_in: int, queue_in: int) -> None:
        """Args: descriptors, all non-blocking."""
        self.tokens_out = tokens_out
        self.tokens_in = tokens_in
        self.queue_in = queue_in

    def hand_over(self, ticket: bytes | memoryview) -> bool:
        """Give the packed ticket to an idle supervisor, if there is one."""
        if len(ticket) > QUEUE_BYTES:
            return False
        while pid := self.take():
            try:
                os.kill(pid, 0)
                os.write(self.queue_in, ticket)
            except (ProcessLookupError, PermissionError):
                # Killed by somebody while it waited; its pid may be another user's process by now.
                continue
            except OSError:
                # The queue is full.
                self.put(pid)
                return False
            return True
        return False

    def put(self, pid: int) -> None:
        """Count on this supervisor."""
        os.write(self.tokens_in, pid.to_bytes(TOKEN_BYTES, "little"))

    def take(self) -> int:
        """The pid that is first in the pipe, 0 when it is empty."""
        try:
            return int.from_bytes(os.read(self.tokens_out, TOKEN_BYTES), "little")
        except BlockingIOError:
            return 0

    def withdraw(self, own: int) -> bool:
        """Take one's own pid out; False when it was taken already: a ticket is coming."""
        first = 0
        while pid := self.take():
            if pid == own:
                return True
            self.put(pid)
            if pid == first:
                break
            first = first or pid
        return False

    def close(self) -> None:
        """Close this process's ends."""
        for fd in (self.tokens_out, self.tokens_in, self.queue_in):
            if fd >= 0:
                os.close(fd)
        self.tokens_out = self.tokens_in = self.queue_in = -1
