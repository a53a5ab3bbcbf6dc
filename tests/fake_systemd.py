"""A stand-in for PID 1 on a bus of its own: it makes units by starting their program, and can be told to misbehave.

Of a unit it does what the launcher relies on: the program with its environment and three descriptors, the answer,
and JobRemoved. It knows nothing of cgroups, and kills nobody.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

from jeepney import HeaderFields, Message, Parser, new_error, new_method_return, new_signal
from jeepney.fds import FileDescriptor
from jeepney.wrappers import DBusAddress

MANAGER = DBusAddress("/org/freedesktop/systemd1", interface="org.freedesktop.systemd1.Manager")


class FakeSystemd:
    """Answers on `path` until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[str] = []
        """Units it was asked for, in order."""
        self.properties: dict[str, dict[str, Any]] = {}
        self.refuses: str | None = None
        """The error that every call is answered with."""
        self.result = "done"
        """Of every start; with another one nothing is started."""
        self.is_silent = False
        """It takes calls and does nothing about them."""
        self.starts_nothing = False
        """It says that a program was started which was not."""
        self.version = "252.39-1~deb12u2"
        self.most_open = 0
        """How many calls at once it has had to answer."""
        self._held: list[tuple[_Peer, Message]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._stop, self._stopped = os.pipe()
        self._peers: list[_Peer] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Answer the calls that it was silent about."""
        self.is_silent = False
        os.write(self._stopped, b"r")

    def hang_up(self) -> None:
        """End all connections, as a bus that is restarted does; new ones are taken."""
        os.write(self._stopped, b"h")

    def close(self) -> None:
        """No more."""
        os.write(self._stopped, b"x")
        self._thread.join()
        self._listener.close()
        for _, message in self._held:
            for _, (signature, value) in message.body[2]:
                if signature == "h":
                    value.close()
        for child in self._children:
            child.wait()
        os.close(self._stop)
        os.close(self._stopped)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stop, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        peer = _Peer(self._listener.accept()[0])
                        self._peers.append(peer)
                        selector.register(peer.socket, selectors.EVENT_READ, peer)
                    elif key.data is not None:
                        # One that was hung up on in this very round is not listened to.
                        if key.data in self._peers and not self._hear(key.data):
                            self._drop(selector, key.data)
                    else:
                        word = os.read(self._stop, 1)
                        if word == b"r":
                            held, self._held = self._held, []
                            for peer, message in held:
                                self._answer(peer, message)
                            continue
                        for peer in list(self._peers):
                            self._drop(selector, peer)
                        if word == b"x":
                            return

    def _drop(self, selector: selectors.BaseSelector, peer: _Peer) -> None:
        selector.unregister(peer.socket)
        self._peers.remove(peer)
        peer.socket.close()

    def _hear(self, peer: _Peer) -> bool:
        messages = peer.read()
        if messages is None:
            return False
        for message in messages:
            if message.header.fields[HeaderFields.member] == "StartTransientUnit" and self.is_silent:
                self._held.append((peer, message))
                self.most_open = max(self.most_open, len(self._held))
            else:
                self._answer(peer, message)
        return True

    def _answer(self, peer: _Peer, message: Message) -> None:
        member = message.header.fields[HeaderFields.member]
        if member == "Get":
            peer.send(new_method_return(message, "v", (("s", self.version),)))
            return
        if member != "StartTransientUnit":
            peer.send(new_method_return(message, "s", (":1.7",)) if member == "Hello" else new_method_return(message))
            return
        name, mode, told, _ = message.body
        assert mode == "fail"
        self.started.append(name)
        facts = {key: value for key, (_, value) in told}
        fds = [facts[f"Standard{which}FileDescriptor"] for which in ("Input", "Output", "Error")]
        self.properties[name] = facts
        if self.refuses is not None:
            peer.send(new_error(message, "org.freedesktop.DBus.Error.Failed", "s", (self.refuses,)))
        else:
            peer.send(new_method_return(message, "o", ("/org/freedesktop/systemd1/job/1",)))
            if self.result == "done" and not self.starts_nothing:
                self._start(facts, [fd.fileno() for fd in fds])
            peer.send(new_signal(MANAGER, "JobRemoved", "uoss", (1, "/job/1", name, self.result)))
        for fd in fds:
            fd.close()

    def _start(self, facts: dict[str, Any], fds: list[int]) -> None:
        ((path, words, _),) = facts["ExecStart"]
        # As systemd does: a single dollar would begin a variable.
        argv = [word.replace("$$", "\0") for word in words]
        assert not any("$" in word for word in argv)
        argv = [word.replace("\0", "$") for word in argv]
        child = subprocess.Popen(
            argv,
            executable=path,
            env=dict(entry.split("=", 1) for entry in facts["Environment"]),
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            cwd="/",
            umask=facts["UMask"],
            start_new_session=True,
        )
        self._children.append(child)


class _Peer:
    """A client that has connected."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._greets = True
        self._line = b""
        self._parser = Parser()
        self._serial = 0

    def read(self) -> list[Message] | None:
        """What it says now; None when it has hung up, or has sent descriptors with its greeting."""
        try:
            return self._read()
        except (OSError, ValueError):
            return None

    def _read(self) -> list[Message] | None:
        if self._greets:
            # As dbus-daemon does: descriptors that come now are lost.
            data = self.socket.recv(4096)
        else:
            space = socket.CMSG_SPACE(16 * array.array("i").itemsize)
            data, ancillary, _, _ = self.socket.recvmsg(self._parser.bytes_desired(), space)
            self._parser.add_data(data, fds=FileDescriptor.from_ancdata(ancillary))
        if not data:
            return None
        if self._greets:
            self._line += data
            while self._greets and b"\r\n" in self._line:
                line, _, self._line = self._line.partition(b"\r\n")
                self._greet(line)
            if self._greets:
                return []
            self._parser.add_data(self._line)
        return list(iter(self._parser.get_next_message, None))

    def send(self, message: Message) -> None:
        """One message; a client that has gone does not matter."""
        self._serial += 1
        try:
            self.socket.sendall(message.serialise(serial=self._serial))
        except OSError:
            pass

    def _greet(self, line: bytes) -> None:
        if line == b"BEGIN":
            self._greets = False
        elif line.startswith(b"NEGOTIATE"):
            self.socket.sendall(b"AGREE_UNIX_FD\r\n")
        else:
            assert line.startswith(b"\0AUTH EXTERNAL"), line
            self.socket.sendall(b"OK 0123456789abcdef0123456789abcdef\r\n")
