"""Connects streams to sockets and coroutines, on an event loop."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Literal

from gpusched.engine.remote.loopback import LocalStream
from gpusched.engine.remote.streams import NEVER, Stream, StreamMux

ByteStream = Stream | LocalStream

_PIECE = 64 << 10


class MuxTimer:
    """Repeats what a mux has to repeat. Must be made and closed on a running event loop."""

    def __init__(self, mux: StreamMux) -> None:
        self._mux = mux
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        mux.on_timer = self._rearm
        self._rearm()

    def close(self) -> None:
        self._mux.on_timer = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rearm(self) -> None:
        at = self._mux.next_at()
        if at == NEVER:
            return
        # The loop's clock need not have the same zero.
        delay_s = max(0.0, at - self._mux.now())
        if self._timer is None or self._timer.when() > self._loop.time() + delay_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._mux.tick()
        self._rearm()


class SocketRelay:
    """Copies both ways between a stream and a connected socket, which it closes in the end.

    A stream that ends and one that breaks are not the same to who reads it: the peer of the socket has left, or may
    still be there behind a connection that was lost. The socket shows the first as the end of what it brings, and the
    second by closing as a whole.

    Args: on_end: called once, when nothing more can be copied. peer: what a socket that closes as a whole means:
    `client`: its process has ended, which ends the stream, whatever was left unread; `relay`: a connection behind it
    was lost, which breaks the stream; `any`: it ends the stream, but for errors.
    """

    def __init__(
        self,
        stream: ByteStream,
        sock: socket.socket,
        on_end: Callable[[], None] | None = None,
        *,
        peer: Literal["client", "relay", "any"] = "any",
    ) -> None:
        self._stream = stream
        self._socket = sock
        self._on_end = on_end
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._is_reading = self._is_writing = False
        self._has_ended = self._has_shut = False
        """The socket's own end was read; the stream's was passed on."""
        self._is_closed = False
        sock.setblocking(False)
        stream.on_change = self._turn
        self._turn()

    def close(self) -> None:
        """Give up both."""
        if self._is_closed:
            return
        self._is_closed = True
        self._want(reading=False, writing=False)
        self._stream.on_change = None
        if not (self._has_ended and self._has_shut):
            self._stream.break_off()
        self._socket.close()
        if self._on_end is not None:
            self._on_end()

    def _want(self, *, reading: bool, writing: bool) -> None:
        fd = self._socket.fileno()
        if reading != self._is_reading:
            self._is_reading = reading
            if reading:
                self._loop.add_reader(fd, self._read)
            else:
                self._loop.remove_reader(fd)
        if writing != self._is_writing:
            self._is_writing = writing
            if writing:
                self._loop.add_writer(fd, self._turn)
            else:
                self._loop.remove_writer(fd)

    def _read(self) -> None:
        try:
            data = self._socket.recv(min(_PIECE, self._stream.room) or 1, 0 if self._stream.room else socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            self._fail()
            return
        if not data and self._peer == "relay" and self._is_hung_up():
            self.close()
            return
        if not data:
            self._has_ended = True
            self._stream.finish()
        elif self._stream.room:
            self._stream.write(data)
        self._turn()

    def _turn(self) -> None:
        """Pass on what can be passed on, and wait for the rest."""
        if self._is_closed:
            return
        stream = self._stream
        try:
            while stream.waiting:
                sent = self._socket.send(stream.peek(_PIECE))
                stream.drop(sent)
            if stream.is_at_end and not self._has_shut:
                self._has_shut = True
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._fail()
            return
        if stream.is_broken or (self._has_ended and self._has_shut):
            self.close()
            return
        self._want(reading=not self._has_ended and stream.room > 0, writing=stream.waiting > 0)

    def _is_hung_up(self) -> bool:
        """Whether the peer has closed the socket as a whole, rather than ended what it sends."""
        poll = select.poll()
        poll.register(self._socket.fileno(), 0)
        return bool(poll.poll(0))

    def _fail(self) -> None:
        """The socket is of no more use."""
        if self._peer != "client":
            self.close()
            return
        self._want(reading=False, writing=False)
        self._has_ended = True
        self._stream.finish()
        # Until the other side has ended, too, nobody is there to read what it sends.
        self._stream.on_change = self._discard
        self._discard()

    def _discard(self) -> None:
        if self._is_closed:
            return
        self._stream.drop(self._stream.waiting)
        self._has_shut = self._stream.is_at_end
        if self._has_shut or self._stream.is_broken:
            self.close()


async def read_whole(stream: Stream, most: int, timeout_s: float) -> bytes | None:
    """Everything that the other side sends; None if that takes longer, the stream breaks, or there is more."""
    loop = asyncio.get_running_loop()
    found = bytearray()
    done: asyncio.Future[bool] = loop.create_future()

    def on_change() -> None:
        if done.done():
            return
        found.extend(stream.read())
        if len(found) > most or stream.is_broken:
            done.set_result(False)
        elif stream.is_at_end:
            done.set_result(True)

    stream.on_change = on_change
    on_change()
    try:
        is_whole = await asyncio.wait_for(done, timeout_s)
    except asyncio.TimeoutError:
        is_whole = False
    finally:
        stream.on_change = None
        if stream.is_at_end:
            stream.finish()
        else:
            stream.break_off()
    return bytes(found) if is_whole else None
