"""A person at a terminal: a command with a pseudo-terminal as its controlling one, keys, and what was shown."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from types import TracebackType

from shell import Shell

PATIENCE_S = 60.0


class Screen:
    """One command at one terminal. A context, so that nothing of it stays behind."""

    def __init__(self, sh: Shell, command: str, *words: str, size: tuple[int, int] = (24, 80), **env: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(*size, tell=False)
        self.shown = b""
        self.seen = 0
        self.process = subprocess.Popen(
            sh.argv(command, *words),
            env={**sh.env, "TERM": "dumb", **env},
            cwd=sh.work,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self.master, self.slave):
            if fd >= 0:
                os.close(fd)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def see(self, text: str) -> str:
        """Wait until this is shown after what was seen last; returns all that was shown up to it."""
        wanted = text.encode()
        deadline = time.monotonic() + PATIENCE_S
        while (place := self.shown.find(wanted, self.seen)) < 0:
            self._read(deadline, text)
        begin, self.seen = self.seen, place + len(wanted)
        return self.shown[begin : self.seen].decode("utf-8", "replace")

    def see_any(self, *texts: str) -> str:
        """Wait until one of these is shown after what was seen last; returns the first of them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            places = {text: place for text in texts if (place := self.shown.find(text.encode(), self.seen)) >= 0}
            if places:
                first = min(places, key=lambda text: places[text])
                self.seen = places[first] + len(first.encode())
                return first
            self._read(deadline, " or ".join(texts))

    def press_until(self, keys: str, text: str) -> None:
        """Type it again until this is shown, where nothing tells when the program inside begins to listen."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.press(keys)
            again_at = time.monotonic() + 0.3
            while time.monotonic() < again_at:
                if text.encode() in self.shown[self.seen :]:
                    self.see(text)
                    return
                self._read(deadline, text, 0.05)

    def end(self) -> int:
        """Wait until the command has ended; its code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self._read(deadline, "the end", 0.02)
        while select.select([self.master], [], [], 0)[0]:
            self.shown += os.read(self.master, 65536)
        return self.process.returncode

    def resize(self, rows: int, columns: int, tell: bool = True) -> None:
        """Drag the window; the kernel tells who is in its foreground."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def close_window(self) -> None:
        """As when a connection is lost: the terminal is gone."""
        os.close(self.slave)
        os.close(self.master)
        self.master = self.slave = -1

    @property
    def is_raw(self) -> bool:
        """Whether keys go to the command one by one and without an echo."""
        return not termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)

    def _read(self, deadline: float, what: str, wait_s: float = 0.2) -> None:
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"not shown: {what!r}; shown: {self.shown[self.seen :].decode('utf-8', 'replace')!r}"
        if select.select([self.master], [], [], min(wait_s, left_s))[0]:
            self.shown += os.read(self.master, 65536)
