"""The terminal that a person sits at: raw while a job has it, as it was before on every way out."""

from __future__ import annotations

import os
import signal
import termios

RETURN = (b"\r"[0], b"\n"[0])
TILDE, DOT = b"~."


class Terminal:
    """Standard input, if it is a terminal. A context: on leaving it, whatever happened, the mode is as before."""

    def __init__(self, fd: int = 0) -> None:
        self.fd = fd
        self._before = termios.tcgetattr(fd) if os.isatty(fd) else None

    @property
    def is_there(self) -> bool:
        """Whether somebody sits there."""
        return self._before is not None

    def __enter__(self) -> Terminal:
        self.make_raw()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def make_raw(self) -> None:
        """Every key goes to the job, also those that would signal this process."""
        if self._before is None:
            return
        mode = termios.tcgetattr(self.fd)
        mode[0] &= ~(
            termios.IGNBRK
            | termios.BRKINT
            | termios.PARMRK
            | termios.ISTRIP
            | termios.INLCR
            | termios.IGNCR
            | termios.ICRNL
            | termios.IXON
        )
        mode[1] &= ~termios.OPOST
        mode[2] = mode[2] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        self._set(mode)

    def restore(self) -> None:
        """As it was."""
        if self._before is not None:
            self._set(self._before)

    def _set(self, mode: list[object]) -> None:
        # In the background a change of mode would stop this process.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            termios.tcsetattr(self.fd, termios.TCSADRAIN, mode)  # type: ignore[arg-type]
        except termios.error:
            # It has gone, and its mode with it.
            pass
        finally:
            signal.signal(signal.SIGTTOU, before)


def size() -> tuple[int, int]:
    """Rows and columns of the first standard stream that is a terminal; zeros when none is."""
    for fd in (0, 1, 2):
        try:
            found = os.get_terminal_size(fd)
        except OSError:
            continue
        return found.lines, found.columns
    return 0, 0


class Escape:
    """Finds `~.` at the begin of a line in what is typed, as ssh does; `~~` there stands for one tilde."""

    def __init__(self) -> None:
        self._is_new_line = True
        self._holds_tilde = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What of it goes to the job, and whether the person wants to leave."""
        if not self._holds_tilde and TILDE not in data:
            self._is_new_line = data[-1] in RETURN if data else self._is_new_line
            return data, False
        out = bytearray()
        for byte in data:
            if self._holds_tilde:
                self._holds_tilde = False
                if byte == DOT:
                    return bytes(out), True
                out.append(TILDE)
                if byte == TILDE:
                    self._is_new_line = False
                    continue
            elif byte == TILDE and self._is_new_line:
                self._holds_tilde = True
                continue
            out.append(byte)
            self._is_new_line = byte in RETURN
        return bytes(out), False
