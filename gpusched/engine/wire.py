"""Tickets down, events up.

A ticket is one marshalled dict, preceded by its length: both ends are the same interpreter, marshal keeps
bytes and lone surrogates, and it is built in. An event is one line of JSON on a pipe shared by all supervisors;
a line up to PIPE_BUF is written whole or not at all. The last event is also the result file.

After a run, supervisors briefly wait for another one: forking Python, copying the pages that the fork then touches,
and ending it cost more CPU time than everything else done for a short job. Each idle supervisor puts a token, its
pid, into a pipe. The daemon takes one out and then puts a ticket into the queue that all of them read; so does the
fork server, for tickets sent while none was idle. A supervisor whose wait times out takes its own token out, so that
it is sent no more tickets.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


PIPE_BUF = 4096
"""POSIX's atomic size on Linux."""
QUEUE_BYTES = 1 << 16
"""Largest ticket for an idle supervisor; a larger one, with its script, costs a fork."""
QUEUE_TIMEOUT_S = 2
"""How long a supervisor stays idle."""
LENGTH_BYTES = 4
TEXT_LIMIT = 300
"""Characters of a sentence or list in an event: at 12 bytes each they fit the atomic size."""


def pack_ticket(ticket: dict[str, Any]) -> bytes:
    body = marshal.dumps(ticket)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Take the first complete ticket, still packed, off the buffer; None while it is incomplete."""
    if len(buffer) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "little")
    if len(buffer) < end:
        return None
    body = bytes(buffer[LENGTH_BYTES:end])
    del buffer[:end]
    return body


def unpack_ticket(body: bytes) -> dict[str, Any]:
    ticket: dict[str, Any] = marshal.loads(body)
    return ticket


def encode_event(**facts: str | float | bool | None) -> bytes:
    """Encode one line of JSON (ASCII). Written by hand: importing json costs every supervisor 0.7 MB."""
    words = [f'"{name}":{_TEXT[value.__class__](value)}' for name, value in facts.items()]
    return ("{" + ",".join(words) + "}\n").encode("ascii")


def shortened(text: str) -> str:
    """Truncate the text so that its event fits into one atomic write."""
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."


def joined(names: list[str], beside: str | None = None) -> str:
    """Join as many names as fit beside another text, one per line, and the number of omitted ones."""
    room = TEXT_LIMIT - len(beside or "")
    kept: list[str] = []
    for name in names:
        if sum(map(len, kept)) + len(kept) + len(name) > room - 20:
            kept.append(f"and {len(names) - len(kept)} more")
            break
        kept.append(name)
    return "\n".join(kept)


def _quote(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    out = []
    for char in text:
        code = ord(char)
        if 32 <= code < 127 and char not in '"\\':
            out.append(char)
        elif code > 0xFFFF:
            code -= 0x10000
            out.append(f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}")
        else:
            out.append(f"\\u{code:04x}")
    return '"' + "".join(out) + '"'


_TEXT: dict[type, Callable[[Any], str]] = {
    str: _quote,
    float: float.__repr__,
    int: int.__repr__,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}


TOKEN_BYTES = 4


class IdlePool:
    """The ends of the token pipe and of the ticket queue; no call blocks."""

    def __init__(self, tokens_out: int, tokens_in: int, queue_in: int) -> None:
        """Args: descriptors, all non-blocking."""
        self.tokens_out = tokens_out
        self.tokens_in = tokens_in
        self.queue_in = queue_in

    def hand_over(self, ticket: bytes | memoryview) -> bool:
        """Give the packed ticket to an idle supervisor; False without one."""
        if len(ticket) > QUEUE_BYTES:
            return False
        while pid := self.take():
            try:
                os.kill(pid, 0)
                os.write(self.queue_in, ticket)
            except (ProcessLookupError, PermissionError):
                # Killed while it waited; its pid may be another user's process by now.
                continue
            except OSError:
                # The queue is full.
                self.put(pid)
                return False
            return True
        return False

    def put(self, pid: int) -> None:
        """Mark this supervisor as idle."""
        os.write(self.tokens_in, pid.to_bytes(TOKEN_BYTES, "little"))

    def take(self) -> int:
        """Take the pid of the first idle supervisor; 0 without one."""
        try:
            return int.from_bytes(os.read(self.tokens_out, TOKEN_BYTES), "little")
        except BlockingIOError:
            return 0

    def withdraw(self, own: int) -> bool:
        """Take one's own pid out; False when it was taken already: a ticket is coming."""
        # Others take and return theirs meanwhile, so the first one that is seen may never come again.
        seen: set[int] = set()
        while (pid := self.take()) and pid != own:
            self.put(pid)
            if pid in seen:
                return False
            seen.add(pid)
        return pid == own

    def close(self) -> None:
        for fd in (self.tokens_out, self.tokens_in, self.queue_in):
            if fd >= 0:
                os.close(fd)
        self.tokens_out = self.tokens_in = self.queue_in = -1
