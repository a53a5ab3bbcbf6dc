"""One connection to the system's D-Bus that never blocks: calls are queued, answers are read when they are there.

`jeepney` knows the messages; the socket is our own, because its connections wait for every answer and the
daemon must not wait for PID 1. A connection that is lost stays lost: make another.

Source: the D-Bus specification, "Authentication Protocol" and "Message Protocol".
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from jeepney import HeaderFields, Message, Parser
from jeepney.auth import BEGIN, AuthenticationError, Authenticator, FDNegotiationError
from jeepney.bus_messages import message_bus

SYSTEM_BUS = "/run/dbus/system_bus_socket"
READ_BYTES = 1 << 16
HELLO_SERIAL = 1


class Bus:
    """One connection. Raises: OSError when nobody takes it."""

    def __init__(self, path: str = SYSTEM_BUS) -> None:
        self._auth = Authenticator(enable_fds=True)
        self._parser = Parser()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._serial = HELLO_SERIAL
        self._is_known = False
        """Whether the bus has answered the first call. It takes no descriptors with what it reads together with the
        end of the greeting, and hangs up."""
        self._lost = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise
        self._greeting = memoryview(self._auth.data_to_send() or b"")

    def fileno(self) -> int:
        """Readable when there are answers or the connection is lost, writable when `flush` may go on."""
        return self._socket.fileno()

    @property
    def lost(self) -> str:
        """Why the connection is of no more use; empty while it is."""
        return self._lost

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do, now or when the bus has greeted."""
        return bool(self._greeting or self._unsent)

    def call(self, message: Message, fds: Sequence[int] = ()) -> int:
        """Queue a message; returns its serial. Descriptors in its body are kept open here until they are sent.

        Args: fds: the descriptors in the body; they stay the caller's.
        """
        self._serial += 1
        found = array.array("i")
        data = message.serialise(serial=self._serial, fds=found)
        assert list(found) == list(fds)
        self._unsent.append((memoryview(data), tuple(os.dup(fd) for fd in fds)))
        return self._serial

    def flush(self) -> bool:
        """Send what the socket takes; False while it takes no more."""
        if self._lost:
            return True
        try:
            while self._greeting:
                self._greeting = self._greeting[self._socket.send(self._greeting) :]
            while self._is_known and self._unsent:
                data, fds = self._unsent[0]
                with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = self._socket.sendmsg([data], with_it)
                # The descriptors went with the first byte.
                _close_all(fds)
                self._unsent[0] = (data[sent:], ())
                if sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error.strerror)
        return True

    def receive(self) -> list[Message]:
        """All messages that have come; see `lost` afterwards."""
        messages: list[Message] = []
        while not self._lost:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error.strerror)
                break
            if not data:
                self._lose("it was closed by the other side")
                break
            try:
                if self._auth.authenticated:
                    messages += self._parser.feed(data)
                    self._is_known = self._is_known or any(self.answers(m) == HELLO_SERIAL for m in messages)
                else:
                    self._auth.feed(data)
                    self._greeting = memoryview(self._auth.data_to_send() or b"")
                    if self._auth.authenticated:
                        # Its last line is not handed out: the dialogue is over, and the messages begin.
                        hello: bytes = message_bus.Hello().serialise(serial=HELLO_SERIAL)
                        self._greeting = memoryview(BEGIN + hello)
            except (AuthenticationError, FDNegotiationError) as error:
                self._lose(f"it does not know this user: {error}")
            except Exception as error:
                # Not a message: whoever is there does not speak D-Bus.
                self._lose(f"it sent what cannot be read: {error}")
        return messages

    @staticmethod
    def answers(message: Message) -> int:
        """The serial of the call that this answers; 0 for a signal."""
        serial: int = message.header.fields.get(HeaderFields.reply_serial, 0)
        return serial

    def close(self) -> None:
        """Release it; what is unsent is dropped."""
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._socket.close()

    def _lose(self, why: str | None) -> None:
        self._lost = why or "it failed"


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
