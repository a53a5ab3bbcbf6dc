"""Protocol between a foreground run and its client, over the run's own socket.

A frame is one byte for its kind, four bytes for its length (little-endian), and the content:

    client to run   h HELLO "1 ROWS COLUMNS"     first; 0 0 without a terminal
                    R RUN   before HELLO, on the door of a visit: what to run, see `pack_wanted`
                    0 IN    input                e EOF   end of input
                    w SIZE  "ROWS COLUMNS"       s SIGNAL "NUMBER", to all processes of the run
                    b BYE   leaves on purpose
                    q QUERY instead of HELLO: who is there? Answered by one STATUS, then closed
                    k HOLD  keep my place if the connection breaks; of a visit also before HELLO
                    p PING  answered by COUNT
                    v RESUME "TOKEN BYTES" instead of HELLO: the client that was welcomed with this token, which has
                            received so many bytes, is back; "- BYTES" at the door of a visit: one that said HOLD,
                            and has not read a WELCOME
    run to client   H WELCOME "RUN pty|pipes TOKEN"    r REFUSED a sentence
                    V RESUMED "BYTES" received of the client; each side continues after what the other has
                    1 OUT, 2 ERR                 output, error output
                    c CLOSED the run takes no more input
                    m NOTE  a sentence for the person at the terminal
                    S STATUS "PID|- SINCE|- LEASE_ENDS|- ." of the client, instants in epoch seconds
                    x EXIT  "CODE|- SIGNAL|- STOPPED_BY|- ." and a sentence on the next line
    agent to client g GONE  nobody listens: what is called has ended, or never began to; nothing else comes
    both            a ACK   stream (one byte) and how many of its bytes were passed on (four)
                    n COUNT "BYTES" received in all, with a client that has said HOLD; those need not be kept any longer

Neither side sends more than WINDOW unacknowledged bytes of a stream, and both always read incoming frames:
a stalled stream holds up nothing else.

All bytes of a connection count, from its first frame on, but for RESUME and RESUMED: after a break, the same bytes go
on over another connection, wherever in a frame the first one broke.
"""

from __future__ import annotations

HELLO, WELCOME, REFUSED = b"h"[0], b"H"[0], b"r"[0]
IN, OUT, ERR = b"0"[0], b"1"[0], b"2"[0]
EOF, CLOSED, ACK, SIZE, SIGNAL = b"e"[0], b"c"[0], b"a"[0], b"w"[0], b"s"[0]
NOTE, EXIT, BYE, GONE = b"m"[0], b"x"[0], b"b"[0], b"g"[0]
QUERY, STATUS, RUN = b"q"[0], b"S"[0], b"R"[0]
HOLD, RESUME, RESUMED, COUNT, PING = b"k"[0], b"v"[0], b"V"[0], b"n"[0], b"p"[0]

VERSION = 1
NO_TOKEN = "-"
HEAD = 5
CHUNK = 1 << 16
"""Maximum bytes of a stream in one frame."""
WINDOW = 1 << 18
"""Maximum unacknowledged bytes of a stream."""
LARGEST = 1 << 20
"""A longer frame is a protocol error."""
COUNT_BYTES = 1 << 16
"""Received without a COUNT, at most."""


class SentBytes:
    """What was sent and may have to be sent again over another connection."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._begin = 0

    def __len__(self) -> int:
        return len(self._data)

    def add(self, piece: bytes | memoryview) -> None:
        self._data += piece

    def confirm(self, received: int) -> None:
        """Forget what the other side has. Raises: ValueError for what was never sent."""
        count = received - self._begin
        if count > len(self._data):
            raise ValueError(f"{received} bytes received of {self._begin + len(self._data)}")
        # One that was said before a break comes after it, and is old then.
        if count > 0:
            del self._data[:count]
            self._begin = received

    def take_rest(self, received: int) -> bytearray:
        """Take everything that the other side does not have. Raises: ValueError if that is forgotten."""
        self.confirm(received)
        if received < self._begin:
            raise ValueError(f"{received} bytes received; those up to {self._begin} are forgotten")
        rest, self._data = self._data, bytearray()
        return rest


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


class Wanted:
    """What a client wants to run in a job that runs already. A plain class: supervisors must not import dataclasses."""

    __slots__ = ("argv", "env", "is_module", "is_terminal", "signals_to", "umask", "work_dir")

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        *,
        is_terminal: bool,
        umask: int,
        work_dir: str,
        signals_to: str = "tree",
        is_module: bool = False,
    ) -> None:
        """Args: env: variables to add to those of the job. work_dir: empty for that of the job. signals_to: who gets
        the client's signals, `main` for a first process that passes them on; see `SignalOrder.to`. is_module: argv
        names a module of gpusched whose `main` is to run, of the installation on that node, and its arguments.
        """
        self.is_module = is_module
        self.argv = argv
        self.env = env
        self.is_terminal = is_terminal
        self.signals_to = signals_to
        self.umask = umask
        self.work_dir = work_dir


def pack_wanted(wanted: Wanted) -> bytes:
    """Content of a RUN: `pty|pipes|module tree|main UMASK WORDS`, folder, words of the command, variables.

    A NUL ends each.
    """
    kind = "module" if wanted.is_module else "pty" if wanted.is_terminal else "pipes"
    head = f"{kind} {wanted.signals_to} {wanted.umask:o} {len(wanted.argv)}"
    variables = (f"{name}={value}" for name, value in wanted.env.items())
    words = (head, wanted.work_dir, *wanted.argv, *variables)
    return b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)


def read_wanted(content: bytes) -> Wanted:
    """Reverse `pack_wanted`. Raises: ValueError."""
    head, *words = content.decode("utf-8", "surrogateescape").split("\0")
    kind, to, umask, count = head.split(" ")
    number, mask = int(count), int(umask, 8)
    if kind not in ("pty", "pipes", "module") or to not in ("tree", "main") or not 0 <= mask <= 0o777:
        raise ValueError("not a RUN")
    if not 0 < number < len(words) - 1 or words[-1]:
        raise ValueError("not a command")
    env = {}
    for word in words[1 + number : -1]:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError("not a variable")
        env[name] = value
    return Wanted(
        words[1 : 1 + number],
        env,
        is_terminal=kind == "pty",
        umask=mask,
        work_dir=words[0],
        signals_to=to,
        is_module=kind == "module",
    )
