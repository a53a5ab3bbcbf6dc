"""Standard streams of a run in the foreground: a terminal of its own, or three pipes."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from gpusched.engine.frames import ERR, OUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULT_SIZE = (24, 80)


class Pipes:
    """Three pipes. `input_fd` and `outputs` are the supervisor's ends, none of which blocks."""

    is_terminal = False

    def __init__(self) -> None:
        self._theirs: list[int] = []
        theirs_in, self.input_fd = os.pipe()
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._theirs = [theirs_in, theirs_out, theirs_err]
        self.outputs = ((OUT, out), (ERR, err))
        for fd in (self.input_fd, out, err):
            os.set_blocking(fd, False)

    def give_to(self, uid: int) -> None:
        """Pipes have no owner that matters."""

    def file_actions(self) -> list[Any]:
        """For posix_spawn."""
        return [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(self._theirs)]

    def enter(self) -> None:
        """In a forked child: make them its standard streams."""
        for number, fd in enumerate(self._theirs):
            os.dup2(fd, number)

    def release(self) -> None:
        """The job has its ends, or will never have them."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def resize(self, rows: int, columns: int) -> None:
        """A pipe has no size."""


class Terminal:
    """A pseudo-terminal, the controlling one of the job's own session."""

    is_terminal = True

    def __init__(self, rows: int, columns: int) -> None:
        self.input_fd, self._slave = os.openpty()
        self.outputs = ((OUT, self.input_fd),)
        os.set_blocking(self.input_fd, False)
        self.resize(*((rows, columns) if rows and columns else DEFAULT_SIZE))

    def give_to(self, uid: int) -> None:
        """Let another user open it by its name."""
        os.fchown(self._slave, uid, -1)
        os.fchmod(self._slave, 0o600)

    def file_actions(self) -> list[Any]:
        """For posix_spawn with a session of its own, whose terminal becomes the first that it opens."""
        name = os.ttyname(self._slave)
        return [
            (os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]

    def enter(self) -> None:
        """In a forked child that leads a session: make it its terminal and its standard streams."""
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(self._slave, number)

    def release(self) -> None:
        """The job has it open, or never will."""
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal, and by that its foreground processes, how large it is. What is not possible is left."""
        if 0 < rows < 65536 and 0 < columns < 65536:
            fcntl.ioctl(self.input_fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


Streams = Pipes | Terminal
