"""Tickets down, events up.

A ticket is one marshalled dict with its length in front: both ends are the same interpreter, marshal keeps
bytes and lone surrogates, and it is built in. An event is one line of JSON on a pipe that all supervisors
share; a line up to PIPE_BUF is written whole or not at all. The last event is also the result file.
"""

from __future__ import annotations

import marshal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PIPE_BUF = 4096
"""POSIX's atomic size on Linux."""
QUEUE_BYTES = 1 << 16
"""Largest ticket for an idle supervisor; one with a larger script costs a fork."""
QUEUE_TIMEOUT_S = 2
"""How long a supervisor stays idle."""
TEXT_LIMIT = 300
"""Characters of a sentence or list in an event: at 12 bytes each they fit the atomic size."""


def pack_ticket(ticket: dict[str, Any]) -> bytes:
    """One ticket as it goes through the socket."""
    body = marshal.dumps(ticket)
    return len(body).to_bytes(4, "little") + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Take the first whole ticket, still packed, off the buffer; None while it is incomplete."""
    if len(buffer) < 4:
        return None
    end = 4 + int.from_bytes(buffer[:4], "little")
    if len(buffer) < end:
        return None
    body = bytes(buffer[4:end])
    del buffer[:end]
    return body


def unpack_ticket(body: bytes) -> dict[str, Any]:
    """A ticket as a dict."""
    ticket: dict[str, Any] = marshal.loads(body)
    return ticket


def encode_event(**facts: str | float | bool | None) -> bytes:
    """One line of JSON (ASCII). Written by hand: importing json costs every supervisor 0.7 MB."""
    words = []
    for name, value in facts.items():
        if value is None:
            text = "null"
        elif value is True:
            text = "true"
        elif value is False:
            text = "false"
        elif isinstance(value, str):
            text = _quote(value)
        else:
            text = repr(value)
        words.append(f'"{name}":{text}')
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
