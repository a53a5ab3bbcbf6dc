"""The daemon's side of the bridge: which nodes Ray has, and a channel to the agent of each."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpusched.engine.remote.channel import Backoff, StreamChannel, last_words

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
"""Between the end of a bridge or a stream and the next: the first time, and at most."""
SILENCE_S = 30.0
"""A bridge that says nothing for this long is replaced; a stream is given up."""
FIRST_DOUBT_S, LONGEST_DOUBT_S = 20.0, 900.0
"""A bridge that does not reach a node for this long, which Ray has, is replaced; the first time, and at most. A Ray
driver may miss where a relay is since its restart, and never learn it."""
_STABLE_S = 60.0
_PACKET_BYTES = 1 << 17
_FRESH_S = 5.0
"""What the bridge wrote this long before its end is not why it ended."""


class RayNode(NamedTuple):
    """A node that Ray believes alive."""

    name: str
    address: str
    id: str
    """Another one after each restart of its raylet."""


class RayBridge:
    """Keeps a bridge running. Args: argv: its command; env: its environment, default: the daemon's."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, silence_s: float = SILENCE_S) -> None:
        self._argv, self._env, self._silence_s = list(argv), env, silence_s
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the bridge
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, _STABLE_S)
        self._heard_at = 0.0
        self._why: str | None = "the connection to Ray has not been made yet"
        self._trouble: str | None = None
        self._closed: dict[str, str] = {}
        self._opened: set[str] = set()
        self._unreached: dict[str, float] = {}
        """Since when no stream has reached the agent of a node."""
        self._doubt_s = FIRST_DOUBT_S
        self.nodes: dict[str, RayNode] = {}
        """By name; as last heard, also while there is no bridge."""

    @property
    def trouble(self) -> str | None:
        """Why Ray's membership is not known now; None if it is."""
        return self._why or self._trouble

    def poll(self) -> None:
        """Take in what the bridge says; start it if there is none."""
        self._hear()
        now = time.monotonic()
        if self._control is not None and now - self._heard_at > self._silence_s:
            self._lose(f"the bridge to Ray said nothing for {self._silence_s:g} s")
        self._doubt(now)
        if self._control is None and self._backoff.is_over:
            self._start()

    def connect(self, node: str) -> socket.socket | None:
        """A stream to the agent of a node; None while there is no way to it."""
        self.poll()
        if self._control is None or self._why is not None or node not in self.nodes:
            return None
        ours, theirs = socket.socketpair()
        self._closed.pop(node, None)
        self._opened.discard(node)
        try:
            socket.send_fds(self._control, [json.dumps({"open": node}).encode()], [theirs.fileno()])
        except OSError:
            ours.close()
            return None
        finally:
            theirs.close()
        return ours

    def why_closed(self, node: str) -> str | None:
        """Why the last stream to a node ended, if the bridge said."""
        self._hear()
        return self._closed.get(node)

    def close(self) -> None:
        """End the bridge; agents and runs continue."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._errors.close()

    @property
    def pid(self) -> int | None:
        """Of the bridge that runs now."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors.seek(0)
        self._errors.truncate()
        self._backoff.begin()
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=self._env,
                # `python -m` imports from where it is started.
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._lose(f"{self._argv[0]} cannot be started to reach Ray: {error.strerror}")
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control, self._heard_at = ours, time.monotonic()

    def _hear(self) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                data = b""
                log.debug("the bridge to Ray: %s", error)
            if not data:
                self._lose(None)
                return
            self._heard_at = time.monotonic()
            self._take(json.loads(data))

    def _doubt(self, now: float) -> None:
        """Replace a bridge that does not reach a node, ever more rarely: others lose their streams for a moment."""
        self._unreached = {name: since for name, since in self._unreached.items() if name in self.nodes}
        name = next((name for name, since in self._unreached.items() if now - since > self._doubt_s), None)
        if name is not None and self._control is not None:
            self._doubt_s = min(LONGEST_DOUBT_S, 2 * self._doubt_s)
            self._lose(f"the bridge to Ray has not reached {name} for a while; another one is started")

    def _take(self, message: dict[str, Any]) -> None:
        if "nodes" in message:
            self._why = None
            self.nodes = {name: RayNode(name, address, id_) for name, address, id_ in message["nodes"]}
        if "trouble" in message:
            if message["trouble"] and message["trouble"] != self._trouble:
                log.warning("%s", message["trouble"])
            self._trouble = message["trouble"]
        if "opened" in message:
            self._opened.add(message["opened"])
            if self._unreached.pop(message["opened"], None) is not None:
                self._doubt_s = FIRST_DOUBT_S
        if "closed" in message:
            self._closed[message["closed"]] = message["why"]
            if message["closed"] not in self._opened:
                self._unreached.setdefault(message["closed"], time.monotonic())
            self._opened.discard(message["closed"])

    def _lose(self, why: str | None) -> None:
        """Let go of the bridge. Args: why: a sentence; None for what its output says."""
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            if why is not None:
                process.kill()
            try:
                code = process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            why = why or f"the bridge to Ray ended with {code}{self._last_words(code)}"
        if why != self._why:
            log.warning("%s", why)
        self._why, self._trouble = why, None
        self._opened.clear()
        self._unreached.clear()
        self._backoff.failed()

    def _last_words(self, code: int) -> str:
        """The last line that may say why the bridge ended. What was killed could say nothing about it."""
        if code == -signal.SIGKILL or time.time() - os.fstat(self._errors.fileno()).st_mtime > _FRESH_S:
            return ""
        return last_words(self._errors)


class RayChannel(StreamChannel):
    """Frames to the agent of one node, through the bridge; a stream that ends is followed by another."""

    def __init__(self, bridge: RayBridge, node: str, silence_s: float = SILENCE_S) -> None:
        super().__init__(None, node, silence_s)
        self._bridge, self._node = bridge, node
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, _STABLE_S)
        self._has_stream = False

    def receive(self) -> list[bytes]:
        frames = super().receive()
        if self._trouble is not None:
            self._look_after()
        return frames

    def _look_after(self) -> None:
        if self._has_stream:
            self._has_stream = False
            self._why = self._bridge.why_closed(self._node)
            self._backoff.failed()
        if not self._backoff.is_over:
            return
        stream = self._bridge.connect(self._node)
        if stream is None:
            self._why = self._bridge.trouble or f"Ray has no node {self._node}; see there: gpusched cluster doctor"
            return
        self._backoff.begin()
        self._has_stream = True
        self.attach(stream)
