"""A channel to the agent that a command starts on a node, such as ssh, over the command's input and output."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time

from gpusched.engine.remote.channel import Backoff, StreamChannel, last_words

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Between the end of a command and its next start: the first time, and at most."""
SILENCE_S = 30.0
"""A connection over which nothing came for this long is given up: what hangs behind it never ends by itself."""
_STABLE_S = 5.0
"""A command that has lasted this long is started again soon; one that keeps failing at its start, ever later."""
_SETTLED_S = 5.0
"""What the command wrote this long before the last frame is not a reason for the connection's end."""
_COPY_BYTES = 1 << 16


class CommandChannel(StreamChannel):
    """Starts the command, and again when it has ended; the agent ends with it, and its runs continue.

    Args: command: as a shell would split it. node: names the other side in sentences.
    """

    def __init__(self, command: str, node: str, silence_s: float = SILENCE_S) -> None:
        super().__init__(None, node, silence_s)
        self._argv = shlex.split(command)
        self._node = node
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the channel
        self._settled_bytes, self._marked_bytes, self._marked_at = 0, 0, 0.0
        self._has_answered = False
        """Whether a frame has come since the command was started."""
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, _STABLE_S)

    def receive(self) -> list[bytes]:
        frames = super().receive()
        if self._trouble is not None:
            self._look_after()
        elif frames:
            self._settle_errors(time.monotonic())
        return frames

    def close(self) -> None:
        super().close()
        self._end()
        self._errors.close()

    def _look_after(self) -> None:
        """Start the command if it is time."""
        if self._process is not None:
            # Without a connection it is of no use.
            self._why = self._end()
            log.warning("%s", self._why)
            self._backoff.failed()
        if self._backoff.is_over:
            self._start(time.monotonic())

    def _settle_errors(self, now: float) -> None:
        """Forget what was written before the first frame, such as warnings of ssh, and later what is some time ago.

        The connection has worked since.
        """
        if self._has_answered and now - self._marked_at < _SETTLED_S:
            return
        size = os.fstat(self._errors.fileno()).st_size
        self._settled_bytes = self._marked_bytes if self._has_answered else size
        self._marked_bytes, self._marked_at, self._has_answered = size, now, True

    def _start(self, now: float) -> None:
        ours, theirs = socket.socketpair()
        self._errors.seek(0)
        self._errors.truncate()
        self._settled_bytes, self._marked_bytes, self._marked_at = 0, 0, now
        self._has_answered = False
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            ours.close()
            self._why = f"{self._argv[0]} cannot be started to reach {self._node}: {error.strerror}"
            self._backoff.at = now + LONGEST_WAIT_S
            return
        finally:
            theirs.close()
        self._backoff.begin()
        self.attach(ours)

    def _end(self) -> str:
        """End the command; returns a sentence about it."""
        process, self._process = self._process, None
        if process is None:
            return ""
        try:
            code = process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.terminate()
            threading.Thread(target=process.wait, daemon=True).start()
            return f"the connection to {self._node} was lost"
        # What was killed could not report it.
        words = "" if code == -signal.SIGKILL else last_words(self._errors, self._settled_bytes)
        return f"{self._argv[0]} to {self._node} ended with {code}{words}"


def standard_streams() -> StreamChannel:
    """The agent's side: frames over standard input and output; ends when the input does."""
    ours, relayed = socket.socketpair()
    source, sink = os.dup(0), os.dup(1)
    # Nothing else may write between frames.
    os.dup2(2, 1)
    threading.Thread(target=_copy_in, args=(source, relayed), daemon=True).start()
    threading.Thread(target=_copy_out, args=(relayed, sink), daemon=True).start()
    return StreamChannel(ours, "the head")


def _copy_in(source: int, to: socket.socket) -> None:
    try:
        while data := os.read(source, _COPY_BYTES):
            to.sendall(data)
    except OSError:
        pass
    # Both ways: the head is gone.
    to.shutdown(socket.SHUT_RDWR)


def _copy_out(source: socket.socket, sink: int) -> None:
    try:
        while data := source.recv(_COPY_BYTES):
            view = memoryview(data)
            while view:
                view = view[os.write(sink, view) :]
    except OSError:
        pass
