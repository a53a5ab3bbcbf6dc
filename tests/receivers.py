"""Somebody to be told: a web server and a mail server on this machine, which do what a test wants of them."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast


class WebReceiver:
    """Takes JSON messages; answers with the codes it was given, then with 200."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """Those that were accepted."""
        self.refused = 0
        self.codes: list[int] = []
        self.hold = threading.Event()
        """While it is cleared, nobody gets an answer."""
        self.hold.set()
        self.waiting = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.waiting += 1
                receiver.hold.wait()
                receiver.waiting -= 1
                code = receiver.codes.pop(0) if receiver.codes else 200
                if code == 200:
                    receiver.messages.append(body)
                else:
                    receiver.refused += 1
                try:
                    self.send_response(code)
                    self.end_headers()
                except OSError:
                    pass  # it was given up meanwhile

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, secret: str = "token-5ecret") -> str:
        """Its address, with something in it that nobody should see."""
        return f"json://127.0.0.1:{self.port}/{secret}"

    @property
    def titles(self) -> list[str]:
        """Titles of what was accepted, in order."""
        return [message["title"] for message in self.messages]

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()


class MailReceiver:
    """As much of SMTP as it takes to be handed a mail."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], EmailMessage]] = []
        """Addressees of the envelope, and the message."""
        receiver = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                to: list[str] = []
                self.say(b"220 test")
                for line in self.rfile:
                    word = line[:4].upper()
                    if word in (b"EHLO", b"HELO", b"MAIL", b"RSET"):
                        self.say(b"250 ok")
                    elif word == b"RCPT":
                        to.append(line.split(b"<")[1].split(b">")[0].decode())
                        self.say(b"250 ok")
                    elif word == b"DATA":
                        self.say(b"354 go on")
                        data = b"".join(iter(self.rfile.readline, b".\r\n"))
                        message = cast("EmailMessage", message_from_bytes(data, policy=policy.default))
                        receiver.mails.append((to, message))
                        self.say(b"250 taken")
                    elif word == b"QUIT":
                        self.say(b"221 bye")
                        return
                    else:
                        self.say(b"502 what?")

            def say(self, line: bytes) -> None:
                self.wfile.write(line + b"\r\n")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def silence() -> Iterator[int]:
    """A port on which connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
