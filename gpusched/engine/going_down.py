"""Whether the machine is shutting down, according to its PID 1."""

from __future__ import annotations

import os
import select
import time

_SYSTEMCTL = ("/usr/bin/systemctl", "/bin/systemctl")
_RUNS_HERE = "/run/systemd/system"
"""Exists where systemd is PID 1."""
_LAST_STAGE = "systemd-shutdow"
"""Name of PID 1 after all services have ended; the kernel truncates names to 15 bytes."""
_PATIENCE_S = 20.0
"""Generous: a machine that is shutting down is busy."""


def machine_goes_down() -> bool:
    """Return whether a reboot or power-off is under way. False without systemd, or when it does not answer.

    For a process that gets TERM without an order from the daemon. May take some milliseconds. Safe in a process that
    reaps its children itself: it waits for the child made here by pid.
    """
    try:
        with open("/proc/1/comm", encoding="utf-8", errors="replace") as file:
            if file.read().startswith(_LAST_STAGE):
                return True
    except OSError:
        return False
    if not os.path.isdir(_RUNS_HERE):
        return False
    program = next((path for path in _SYSTEMCTL if os.access(path, os.X_OK)), None)
    return program is not None and _said((program, "is-system-running")) == "stopping"


def _said(argv: tuple[str, ...]) -> str:
    """Return the first word that a command prints; empty when it takes too long."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            argv[0],
            argv,
            {"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            # A supervisor blocks the signals it waits for; this child must end by any of them.
            setsigmask=[],
        )
    except OSError:
        os.close(reader)
        return ""
    finally:
        os.close(writer)
    try:
        return _read_word(reader)
    finally:
        os.close(reader)
        try:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            # A parent that ignores the ends of its children has none to wait for.
            pass


def _read_word(reader: int) -> str:
    until = time.monotonic() + _PATIENCE_S
    text = b""
    while b"\n" not in text:
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            return ""
        piece = os.read(reader, 256)
        if not piece:
            break
        text += piece
    return text.decode(errors="replace").strip()
