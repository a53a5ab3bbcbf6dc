"""A client's connection to a run, which no terminal, signal or fixed descriptor is tied to: for loops that poll.

    connection = RunConnection(way_of(door, socket_path), wanted=wanted)
    while connection.is_open:
        poll connection.fileno() for connection.events, at most connection.pause_ms()
        for kind, content in connection.on_ready(events): ...

A connection through the daemon to another node may break: then it finds its way back by itself, over a new connection
on which each side goes on after what the other has, see `attach_protocol`. One to a run of this node ends with either
process, and neither outlives the other.
"""

from __future__ import annotations

import _socket
import select
import time

from gpusched import quickjson
from gpusched.client import error_from, reach
from gpusched.engine.attach_protocol import (
    ACK,
    BYE,
    CHUNK,
    COUNT,
    COUNT_BYTES,
    EOF,
    ERR,
    EXIT,
    GONE,
    HELLO,
    HOLD,
    IN,
    NO_TOKEN,
    OUT,
    PING,
    REFUSED,
    RESUME,
    RESUMED,
    RUN,
    SIGNAL,
    SIZE,
    VERSION,
    WELCOME,
    WINDOW,
    SentBytes,
    ack,
    frame,
    pack_wanted,
    read_ack,
    take_frames,
)
from gpusched.errors import GpuschedError, NotFound, NotReady, Refused, TooMany, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.engine.attach_protocol import Wanted

LOST, BACK, OVER = 256, 257, 258
"""Events besides frames: the connection broke, is there again, or ended for good without word of how the run did."""
SILENCE_S, ANSWER_S = 5.0, 10.0
"""After so long without a word from another node it is asked for one, and then has so long to answer."""
RETURN_S = 60.0
"""How long to look for another connection."""
DOOR_S = 10.0
"""How long to look for the first one."""
TRY_S = (0.002, 0.5)
"""First and longest pause between tries."""
STOOD_STILL_S = 5.0
"""A try that comes so late was not made in time because this process was stopped."""
_PIECE = 1 << 17
_LONGEST_HEAD = 1 << 16
_AWAY, _ASKING, _RETURNING, _THERE = range(4)
_FINAL = (NotFound, Refused, UsageError)
"""What the daemon says to a client that has nothing to come back to."""


class RunEnding:
    """How the run ended, as reported by its supervisor; `is_known` is False if the report is missing."""

    def __init__(self) -> None:
        self.is_known = False
        self.code: int | None = None
        self.signal: int | None = None
        self.stopped_by: str | None = None
        self.sentence = ""
        self.left_by: int | None = None
        """Set if the client left on its own: 0 after `~.`, else the signal."""
        self.gave_up = False
        """Whether the connection broke, and there was no other."""
        self.was_lost = False
        """Whether the run ended while there was none."""


class Way:
    """How to reach a part of a run: its socket on this node, or the daemon's with the target of a request to connect.

    Args: node: on which it is, where that is another one.
    """

    def __init__(self, path: str, target: str = "", node: str = "") -> None:
        self.path, self.target, self.node = path, target, node


def way_of(door: dict[str, Any], socket_path: str) -> Way:
    """The way to a door. Args: door: as the daemon answers. socket_path: by which this process reaches the daemon."""
    if door["path"] is not None:
        return Way(door["path"])
    target = f"/v1/jobs/{door['job']}/connect?run={door['run']}&node={door['node']}"
    return Way(socket_path, f"{target}&token={door['token']}" if door["token"] else target, door["node"])


class RunConnection:
    """One connection to one part of a run. Not one of its methods blocks.

    Args: wanted: what to run, at a door; None in the foreground of a run. size: rows and columns of the terminal.
    sock: a connection on a way that leads to this node; None to make it.
    """

    def __init__(
        self, way: Way, wanted: Wanted | None = None, size: tuple[int, int] = (0, 0), sock: _socket.socket | None = None
    ) -> None:
        self.way = way
        self.is_visit = wanted is not None
        self.is_open = True
        """Whether there is, or may be again, a connection."""
        self.end = RunEnding()
        self.error: GpuschedError | None = None
        """Why it ended, where the daemon or the run has said so."""
        self.credit = WINDOW
        """Bytes of input that may be sent now."""
        self._token: str | None = None
        self._stage = _AWAY if sock is None else _THERE
        self._socket = sock
        self._silent: list[_socket.socket] = []
        """Connections of which nothing was heard any more. Closed before there is another, each would say that this
        client has ended, as soon as it is heard again.
        """
        self._request = b""
        self._inbox = bytearray()
        self._handshake = bytearray()
        """The answer to a request, or to RESUME."""
        self._outbox = bytearray()
        self._sent = SentBytes()
        self._received = self._told = 0
        self.was_there = self._is_back = False
        """Whether anything was ever heard of the run; whether it was called before."""
        self._lost_at: float | None = None
        self._began_at = self._heard_at = self._try_at = time.monotonic()
        self._pause_s = TRY_S[0]
        self._pinged_at: float | None = None
        if wanted is not None:
            self._outbox += frame(RUN, pack_wanted(wanted)) + (frame(HOLD) if way.target else b"")
        self._outbox += frame(HELLO, b"%d %d %d" % (VERSION, *size))
        self._look_after([])

    # --- for a poll loop --------------------------------------------------------------------------------

    def fileno(self) -> int:
        """To poll; -1 while there is no connection. Another one after a break."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def is_there(self) -> bool:
        """Whether the run can be reached now, for all that is known."""
        return self._stage == _THERE

    @property
    def wants_write(self) -> bool:
        return bool(self._request or (self._outbox and self._stage == _THERE))

    @property
    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self.wants_write else 0)

    def pause_ms(self) -> float | None:
        """After how long `on_ready` is to be called whatever happens; None for never."""
        at = self._due_at()
        return None if at is None else max(0.0, at - time.monotonic()) * 1000

    def on_ready(self, events: int) -> list[tuple[int, bytes]]:
        """Receive and send what can be, and look after the connection. Args: events: polled; 0 when only time passed.

        Returns: frames of the run for its user: WELCOME with `pty` or `pipes`, OUT and ERR, to be acknowledged, NOTE,
        CLOSED, REFUSED and EXIT; and LOST, BACK and OVER with a sentence, which may be empty.
        """
        found: list[tuple[int, bytes]] = []
        if self._socket is not None and events & ~select.POLLOUT:
            self._receive(found)
        self._look_after(found)
        self._flush()
        return found

    def close(self) -> None:
        """Be gone: a visit ends with that."""
        self.is_open = False
        self._drop_socket()
        self._drop_silent()

    # --- to the run -------------------------------------------------------------------------------------

    def send_input(self, data: bytes) -> None:
        """Send input. Args: data: at most `credit` bytes."""
        self.credit -= len(data)
        for at in range(0, len(data), CHUNK):
            self._outbox += frame(IN, data[at : at + CHUNK])
        self._flush()

    def end_input(self) -> None:
        self._say(EOF)

    def signal(self, number: int) -> None:
        self._say(SIGNAL, b"%d" % number)

    def resize(self, rows: int, columns: int) -> None:
        self._say(SIZE, b"%d %d" % (rows, columns))

    def acknowledge(self, stream: int, count: int) -> None:
        """Say that so many bytes of OUT or ERR were passed on: no more than WINDOW come without."""
        if self.is_open:
            self._outbox += ack(stream, count)
            self._flush()

    def leave(self) -> None:
        """Leave on purpose."""
        self._say(BYE)
        self.is_open = False

    def _say(self, kind: int, content: bytes = b"") -> None:
        if self.is_open:
            self._outbox += frame(kind, content)
            self._flush()

    # --- frames -----------------------------------------------------------------------------------------

    def _receive(self, found: list[tuple[int, bytes]]) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(2 * _PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(found)
        elif self._stage == _THERE:
            self._hear(data, found)
        else:
            self._handshake += data
            self._take_handshake(found)

    def _hear(self, data: bytes | bytearray, found: list[tuple[int, bytes]]) -> None:
        """Handle bytes of the run."""
        self._received += len(data)
        self.was_there = True
        self._heard_at, self._pinged_at = time.monotonic(), None
        self._inbox += data
        try:
            for kind, content in take_frames(self._inbox):
                self._take(kind, content, found)
        except (ValueError, IndexError):
            self._finish(found, NotReady("this is not what a run sends", "see its log: glogs JOB"))
            return
        if self._keeps_place and self._received - self._told >= COUNT_BYTES:
            self._told = self._received
            self._outbox += frame(COUNT, b"%d" % self._received)

    def _take(self, kind: int, content: bytes, found: list[tuple[int, bytes]]) -> None:
        if kind in (OUT, ERR):
            found.append((kind, content))
        elif kind == ACK:
            self.credit += read_ack(content)[1]
        elif kind == WELCOME:
            words = content.split()
            found.append((kind, words[1]))
            if self.way.target and len(words) > 2:
                self._token = words[2].decode("ascii")
                self._outbox += b"" if self.is_visit else frame(HOLD)
        elif kind == COUNT:
            self._sent.confirm(int(content))
        elif kind == EXIT:
            self._take_exit(content)
            found.append((kind, content))
        elif kind == REFUSED:
            self.close()
            found.append((kind, content))
        elif kind == GONE:
            self._finish(found, None)
        else:
            found.append((kind, content))

    def _take_exit(self, content: bytes) -> None:
        first, _, sentence = content.decode("utf-8", "surrogateescape").partition("\n")
        code, number, why, _ = first.split(" ")
        end = self.end
        end.is_known = True
        end.code = None if code == "-" else int(code)
        end.signal = None if number == "-" else int(number)
        end.stopped_by = None if why == "-" else why
        end.sentence = sentence
        self.close()

    def _flush(self) -> None:
        """Send what the socket takes now."""
        sock = self._socket
        try:
            while sock is not None and self._request:
                self._request = self._request[sock.send(self._request) :]
            while sock is not None and self._outbox and self._stage == _THERE:
                piece = bytes(self._outbox[:_PIECE])
                count = sock.send(piece)
                if self.way.target:
                    self._sent.add(piece[:count])
                del self._outbox[:count]
        except BlockingIOError:
            pass
        except OSError:
            # What the run sent before it disconnected is still to be read.
            self._request = b""
            if not self.way.target:
                self._outbox.clear()

    # --- the way there, and back ------------------------------------------------------------------------

    @property
    def _keeps_place(self) -> bool:
        """Whether the run keeps a place for this client."""
        return bool(self.way.target) and (self.is_visit or self._token is not None)

    def _due_at(self) -> float | None:
        if not self.is_open:
            return None
        if self._stage == _AWAY:
            return self._try_at
        if self._stage != _THERE:
            return self._try_at + ANSWER_S
        if not self._keeps_place:
            return None
        return self._heard_at + SILENCE_S if self._pinged_at is None else self._pinged_at + ANSWER_S

    def _look_after(self, found: list[tuple[int, bytes]]) -> None:
        """Do what is due."""
        at, now = self._due_at(), time.monotonic()
        if at is None or now < at:
            return
        if self._stage == _THERE and self._pinged_at is None:
            self._pinged_at = now
            self._outbox += frame(PING)
        elif self._stage == _AWAY:
            self._try(now, found)
        else:
            self._lose(found, is_silent=True)

    def _try(self, now: float, found: list[tuple[int, bytes]]) -> None:
        """Try to connect."""
        if self._lost_at is not None and now > self._try_at + STOOD_STILL_S:
            # Suspended with its job: that is no time in which it looked.
            self._lost_at += now - self._try_at
        if self._lost_at is not None and now > self._lost_at + RETURN_S:
            self.end.gave_up = True
            self._finish(found, None)
            return
        if self._lost_at is None and now > self._began_at + DOOR_S:
            self._finish(found, self.error)
            return
        sock = _socket.socket(_socket.AF_UNIX)
        sock.setblocking(False)
        try:
            reach(sock, self.way.path)
        except OSError:
            # Nobody listens yet, or so many wait for the daemon that there is no room for one more.
            sock.close()
            self._pause(now)
            return
        self._socket, self._try_at = sock, now
        self._handshake.clear()
        if not self.way.target:
            self._arrive(found)
            return
        self._stage = _ASKING
        target = self.way.target + ("&return=1" if self.was_there else "")
        head = f"POST {target} HTTP/1.1\r\nHost: gpusched\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        self._request = f"{head}Content-Length: 0\r\n\r\n".encode()

    def _pause(self, now: float) -> None:
        self._stage = _AWAY
        self._try_at = now + self._pause_s
        self._pause_s = min(TRY_S[1], 2 * self._pause_s)

    def _take_handshake(self, found: list[tuple[int, bytes]]) -> None:
        """Handle an answer that may be incomplete."""
        if self._stage == _ASKING:
            self._take_answer(found)
        if self._stage == _RETURNING:
            self._take_return(found)

    def _take_answer(self, found: list[tuple[int, bytes]]) -> None:
        """Of the daemon, to the request to connect."""
        head, end, rest = self._handshake.partition(b"\r\n\r\n")
        if not end:
            if len(head) > _LONGEST_HEAD:
                self._lose(found)
            return
        if head.split(None, 2)[1] != b"101":
            if len(rest) >= _content_length(head):
                self._take_error(bytes(rest), found)
            return
        self._handshake = rest
        if not self._is_back:
            self._arrive(found)
            return
        self._stage = _RETURNING
        self._request = frame(RESUME, f"{self._token or NO_TOKEN} {self._received}".encode())
        self._flush()

    def _take_error(self, body: bytes, found: list[tuple[int, bytes]]) -> None:
        try:
            error = error_from(quickjson.loads(body).get("error", {}))
        except ValueError:
            error = NotReady("the daemon's answer is not a document", "try again")
        is_final = isinstance(error, _FINAL) if self.was_there else not isinstance(error, TooMany)
        if is_final:
            self.end.was_lost = self.was_there
            self._finish(found, error)
            return
        self.error = error
        self._drop_socket()
        self._pause(time.monotonic())

    def _take_return(self, found: list[tuple[int, bytes]]) -> None:
        """Of the run, to RESUME: no part of what is counted."""
        head = self._handshake
        if len(head) < 5 or len(head) < 5 + int.from_bytes(head[1:5], "little"):
            return
        end = 5 + int.from_bytes(head[1:5], "little")
        kind, content = head[0], bytes(head[5:end])
        if kind == RESUMED:
            try:
                self._outbox[:0] = self._sent.take_rest(int(content))
            except ValueError:
                kind, content = REFUSED, b"it has not kept what was said"
        if kind == RESUMED:
            self._handshake = head[end:]
            self._arrive(found)
            return
        self.end.was_lost = kind == GONE
        said = content.decode("utf-8", "replace")
        self._finish(found, Refused(f"cannot come back: {said}", "see: gq") if kind == REFUSED else None)

    def _arrive(self, found: list[tuple[int, bytes]]) -> None:
        """The connection is there."""
        self._stage, self._pause_s, self.error = _THERE, TRY_S[0], None
        self._drop_silent()
        self._heard_at, self._pinged_at = time.monotonic(), None
        if self._lost_at is not None:
            self._lost_at = None
            found.append((BACK, f"connected to {self.way.node} again".encode()))
        rest, self._handshake = self._handshake, bytearray()
        if rest:
            self._hear(rest, found)
        self._flush()

    def _lose(self, found: list[tuple[int, bytes]], *, is_silent: bool = False) -> None:
        """The connection has ended, or is as good as that: silent."""
        was_there = self._stage == _THERE
        if is_silent and self._stage != _ASKING and self._keeps_place and self._socket is not None:
            self._silent.append(self._socket)
            self._socket = None
        self._drop_socket()
        now = time.monotonic()
        if not was_there:
            self._pause(now)
        elif self._keeps_place:
            self._stage, self._try_at = _AWAY, now
            self._is_back = True
            self._lost_at = now
            found.append((LOST, f"lost the connection to {self.way.node}; trying again for {RETURN_S:.0f} s".encode()))
        else:
            self._finish(found, None)

    def _finish(self, found: list[tuple[int, bytes]], error: GpuschedError | None) -> None:
        self.error = error
        self.close()
        found.append((OVER, b"" if error is None else error.message.encode("utf-8", "replace")))

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._request = b""

    def _drop_silent(self) -> None:
        for sock in self._silent:
            sock.close()
        self._silent.clear()


def _content_length(head: bytes | bytearray) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
