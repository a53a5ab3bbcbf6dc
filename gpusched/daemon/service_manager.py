"""The daemon as a systemd service: notifications and the log. No library, one datagram per message.

    READY, RELOADING, STOPPING     what `systemctl` waits for
    STATUS                         one line for `systemctl status`
    WATCHDOG                       the loop is alive; sent only after completed ticks
    EXTEND_TIMEOUT_USEC            a long start or stop is under way and not stuck

Does nothing without NOTIFY_SOCKET in the environment.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import MutableMapping
from typing import Any

from gpusched.model.mentions import render
from gpusched.model.units import printable

_EXTEND_S = 60.0
_LONGEST_START_S = 3600.0
"""A start that takes longer counts as stuck."""
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))


class ServiceManager:
    """The service manager of this daemon; does nothing without systemd."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Removes its variables from the environment, so that children cannot notify in this process's name."""
        environ = os.environ if environ is None else environ
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us = environ.pop("WATCHDOG_USEC", "")
        watched_pid = environ.pop("WATCHDOG_PID", "")
        # The name of an abstract socket starts with @ for the byte 0.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_watched = bool(address) and watchdog_us.isdecimal() and watched_pid in ("", str(os.getpid()))
        self.watchdog_s: float | None = int(watchdog_us) / 1e6 if is_watched else None
        """Time after the last WATCHDOG message at which systemd restarts this process; None: never."""
        self.unit = _unit() if environ.get("INVOCATION_ID") else None
        """Name of the service, such as `gpusched.service`; None when systemd did not start this process."""
        self._alive_at = float("-inf")
        self._status = ""
        self._has_started = threading.Event()

    def notify(self, *fields: str) -> None:
        """Send `NAME=VALUE` fields as one message; a message that cannot be sent is dropped."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
                ours.sendto("\n".join(fields).encode(), self._address)
        except OSError:
            pass

    def starting(self) -> None:
        """Allow a long start until `ready`: the database may need an upgrade, many jobs may have to be read."""
        if self._address:
            threading.Thread(target=self._go_on_starting, name="starting", daemon=True).start()

    def _go_on_starting(self) -> None:
        until = time.monotonic() + _LONGEST_START_S
        while time.monotonic() < until:
            self.still_at_it("starting: the database is brought up to date, jobs are read")
            if self._has_started.wait(_EXTEND_S / 3):
                return

    def ready(self) -> None:
        """Report that the socket answers, at the start or after a reload."""
        self._has_started.set()
        self.notify("READY=1")

    def reloading(self) -> None:
        """Report that settings are being read; `ready` follows."""
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the daemon is shutting down."""
        self.notify("STOPPING=1", "STATUS=stopping")

    def still_at_it(self, status: str) -> None:
        """Extend the time limit of a start or stop that is still making progress."""
        self.notify(f"EXTEND_TIMEOUT_USEC={int(_EXTEND_S * 1e6)}", f"STATUS={status}")

    def status(self, text: str) -> None:
        """Set the line for `systemctl status`; sent when it changes."""
        if text != self._status:
            self._status = text
            self.notify(f"STATUS={text}")

    def alive(self) -> None:
        """Report a completed tick, at most four times per watchdog interval."""
        if self.watchdog_s is None:
            return
        now = time.monotonic()
        if now - self._alive_at >= self.watchdog_s / 4:
            self._alive_at = now
            self.notify("WATCHDOG=1")


def _unit() -> str | None:
    """Innermost service in this process's control group."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in lines:
        for part in reversed(line.partition("::")[2].split("/")):
            if part.endswith(".service"):
                return part
    return None


def is_locked_in() -> bool:
    """Whether this process is in a sandbox that its children could not leave either."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            return any(line.split() == ["NoNewPrivs:", "1"] for line in file)
    except OSError:
        return False


def writes_to_journal() -> bool:
    """Whether the stderr of this process goes to journald, according to its environment."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def journal_command(unit: str | None, *, is_system: bool) -> str:
    """The command that shows the log of this service."""
    return f"journalctl {'' if is_system else '--user '}-u {unit or 'gpusched.service'}"


class LineFormatter(logging.Formatter):
    """One line per record, with an indented trace below; escapes line breaks, since names and errors hold user text."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Format like `logging`, but escape line breaks and terminal control characters."""
        record.message = printable(render(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  logging's name
        """Format like `logging`, but so that no line looks like a line of the log."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line)}" for line in lines)


class JournalFormatter(LineFormatter):
    """Lines for journald, which adds time and process; each begins with its priority, as in `<3>`."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format like `logging`, with the priority before every line, since a trace has many."""
        number = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{number}>{line}" for line in super().format(record).splitlines() or [""])
