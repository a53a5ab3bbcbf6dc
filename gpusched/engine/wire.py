"""Tickets down, events up.

A ticket is one marshalled dict with its length in front: both ends are the same interpreter, marshal keeps
bytes and lone surrogates, and it is built in. An event is one line of JSON on a pipe that all supervisors
share; a line up to PIPE_BUF is written whole or not at all. The last event is also the result file.
"""

from __future__ import annotations

import marshal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PIPE_BUF = 4096
"""POSIX's atomic size on Linux."""
QUEUE_BYTES = 1 << 16
"""Largest ticket for an idle supervisor; one with a larger script costs a fork."""
QUEUE_TIMEOUT_S = 2
"""How long a supervisor stays idle."""
LENGTH_BYTES = 4
TEXT_LIMIT = 300
"""Characters of a sentence or list in an event: at 12 bytes each they fit the atomic size."""


def pack_ticket(ticket: dict[str, Any]) -> bytes:
    """One ticket as it goes through the socket."""
    body = marshal.dumps(ticket)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Take the first whole ticket, still packed, off the buffer; None while it is incomplete."""
    if len(buffer) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "little")
    if len(buffer) < end:
        return None
    body = bytes(buffer[LENGTH_BYTES:end])
    del buffer[:end]
    return body


def unpack_ticket(body: bytes) -> dict[str, Any]:
    """A ticket as a dict."""
    ticket: dict[str, Any] = marshal.loads(body)
    return ticket


def encode_event(**facts: str | float | bool | None) -> bytes:
    """One line of JSON (ASCII). Written by hand: importing json costs every supervisor 0.7 MB."""
    words = [f'"{name}":{_TEXT[value.__class__](value)}' for name, value in facts.items()]
    return ("{" + ",".join(words) + "}\n").encode("ascii")


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
