"""Protocol between a foreground run and its client, over the run's own socket.

A frame is one byte for its kind, four bytes for its length (little-endian), and the content:

    client to run   h HELLO "1 ROWS COLUMNS"     first; 0 0 without a terminal
                    0 IN    input                e EOF   end of input
                    w SIZE  "ROWS COLUMNS"       s SIGNAL "NUMBER", to all processes of the run
                    b BYE   leaves on purpose
                    q QUERY instead of HELLO: who is there? Answered by one STATUS, then closed
    run to client   H WELCOME "RUN pty|pipes"    r REFUSED a sentence
                    1 OUT, 2 ERR                 output, error output
                    c CLOSED the run takes no more input
                    m NOTE  a sentence for the person at the terminal
                    S STATUS "PID|- SINCE|- LEASE_ENDS|- ." of the client, instants in epoch seconds
                    x EXIT  "CODE|- SIGNAL|- STOPPED_BY|- ." and a sentence on the next line
    both            a ACK   stream (one byte) and how many of its bytes were passed on (four)

Neither side sends more than WINDOW unacknowledged bytes of a stream, and both always read incoming frames:
a stalled stream holds up nothing else.
"""

from __future__ import annotations

HELLO, WELCOME, REFUSED = b"h"[0], b"H"[0], b"r"[0]
IN, OUT, ERR = b"0"[0], b"1"[0], b"2"[0]
EOF, CLOSED, ACK, SIZE, SIGNAL = b"e"[0], b"c"[0], b"a"[0], b"w"[0], b"s"[0]
NOTE, EXIT, BYE = b"m"[0], b"x"[0], b"b"[0]
QUERY, STATUS = b"q"[0], b"S"[0]

VERSION = 1
HEAD = 5
CHUNK = 1 << 16
"""Maximum bytes of a stream in one frame."""
WINDOW = 1 << 18
"""Maximum unacknowledged bytes of a stream."""
LARGEST = 1 << 20
"""A longer frame is a protocol error."""


def frame(kind: int, content: bytes = b"") -> bytes:
    return bytes((kind,)) + len(content).to_bytes(4, "little") + content


def ack(stream: int, count: int) -> bytes:
    return frame(ACK, bytes((stream,)) + count.to_bytes(4, "little"))


def read_ack(content: bytes) -> tuple[int, int]:
    """Parse stream and count. Raises: IndexError for an empty ACK."""
    return content[0], int.from_bytes(content[1:5], "little")


def take_frames(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Take all complete frames off the buffer. Raises: ValueError for an invalid frame."""
    found = []
    at = 0
    while len(buffer) - at >= HEAD:
        length = int.from_bytes(buffer[at + 1 : at + HEAD], "little")
        if length > LARGEST:
            raise ValueError(f"a frame of {length} bytes")
        end = at + HEAD + length
        if len(buffer) < end:
            break
        found.append((buffer[at], bytes(buffer[at + HEAD : end])))
        at = end
    del buffer[:at]
    return found
