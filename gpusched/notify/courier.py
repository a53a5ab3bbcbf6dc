"""The daemon's end of the process that sends one user's alerts: hand over, collect, and never wait.

    hand()     gives alerts to send; the process is started when there is something to do
    poll()     what became of them since the last call
    fileno()   becomes readable when `poll` has something to do; the same for the courier's whole life

Each message that was accepted leaves a line in a file of receipts, written by the process that sent it. After a
`kill -9` of daemon or worker the receipts say what needs no second message. Whoever may still be sending holds a
lock on that file, so that no new worker begins before the old one has come to its end.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import getLogger
from typing import Any

import gpusched
from gpusched.model.alerts import Alert
from gpusched.model.settings import AlertSettings
from gpusched.notify.deliveries import Report
from gpusched.notify.hearing import Hearing

log = getLogger("gpusched.notify")

IDLE_S = 60.0
"""After so long without anything to send the process ends; it comes back when it is needed."""
_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 60.0
_MOST_RECEIPTS = 1 << 20
"""Bytes of them that are looked at, the last ones: the daemon waits meanwhile."""
_MOST_TOLD = 1000
"""Receipts that are believed at once; there are as many as an alert has targets, times alerts under way."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gpusched.notify.worker import main; main(sys.argv[2])"
)


class Courier:
    """Sends one user's alerts through a child process that runs as that user.

    Args:
        uid: whose targets are told.
        receipts: path of the file of receipts; it is the daemon's own.
        file: the user's `notify.toml`; None is where that user has it by default.
    """

    def __init__(
        self,
        uid: int,
        settings: AlertSettings,
        receipts: str,
        file: str | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uid = uid
        self._settings = settings
        self._receipts = receipts
        self._file = file
        self._monotonic = monotonic
        self._child: subprocess.Popen[bytes] | None = None
        self._hearing = Hearing()
        self._out = bytearray()
        self._failures = 0
        self._not_before = float("-inf")
        self._idle_since: float | None = None
        self._ears = select.epoll()
        self._answers: tuple[int, int] | None = None
        """Both ends of the pipe that the worker answers into; none while nobody is to be heard."""
        self.trouble: str | None = None
        """Why no worker runs, for the doctor; None when all is well."""

    @property
    def is_idle(self) -> bool:
        """Whether no process is there."""
        return self._child is None

    @property
    def pid(self) -> int | None:
        """The process that sends now."""
        return None if self._child is None else self._child.pid

    def fileno(self) -> int:
        """Descriptor to watch for reading."""
        return self._ears.fileno()

    def adopt(self, settings: AlertSettings) -> None:
        """Other settings; they count from the next start of the process."""
        if settings != self._settings:
            self._settings = settings
            self._dismiss()

    def hand(self, alerts: Mapping[str, Alert]) -> list[Report]:
        """Have these sent, all that wait for this user, the oldest first; what the worker has already is skipped.

        Returns: reports of those of which the receipts of an earlier worker say that they were sent.
        """
        now = self._monotonic()
        reports: list[Report] = []
        if alerts:
            self._idle_since = None
            if self._child is None and now >= self._not_before:
                reports = self._start(alerts, now)
        if self._child is None or reports:
            # What the receipts say is recorded first; then the rest is handed over.
            return reports
        for key, alert in alerts.items():
            # All of them: those for a target that fails must not keep back what others are to be told.
            if self._hearing.expect(key):
                self._out += order_of(alert)
        self._push()
        return []

    def poll(self) -> list[Report]:
        """What has become of alerts. Starts nothing."""
        has_ended = self._child is not None and self._child.poll() is not None
        reports = self._collect()
        if self._hearing.is_nonsense:
            self._fail("the process that sends alerts says what makes no sense", self._monotonic(), kill=True)
        elif has_ended:
            self._bury()
        elif self._child is not None:
            self._push()
            self._retire()
        return reports

    def close(self) -> None:
        """Let go of the process; what is under way is given a moment by the worker itself."""
        self._dismiss()
        self._ears.close()

    # --- the process ----------------------------------------------------------------------------

    def _start(self, waiting: Mapping[str, Alert], now: float) -> list[Report]:
        try:
            fd = os.open(self._receipts, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._fail(f"{self._receipts} cannot be opened: {error.strerror}", now)
            return []
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The last try of an earlier worker is not over; it is ended at its deadline.
                return []
            if self._uid != os.geteuid():
                # Its user can write into it as long as they like: at the cost of their own quota.
                os.fchown(fd, self._uid, -1)
            told = list(dict.fromkeys((key, target) for key, target in _read(fd) if key in waiting))
            told = [(key, target) for key, target in told if target not in waiting[key].settled][-_MOST_TOLD:]
            if told:
                return [{"key": key, "target": target, "outcome": "told", "tries": 1} for key, target in told]
            os.ftruncate(fd, 0)
            self._spawn(fd)
        except (OSError, subprocess.SubprocessError, KeyError) as error:
            self._fail(f"the process that sends alerts cannot be started: {error}", now)
        finally:
            os.close(fd)
        return []

    def _spawn(self, fd: int) -> None:
        settings = self._settings
        names = ("timeout_s", "backoff_s", "backoff_max_s", "give_up_s")
        limits = {name: getattr(settings, name) for name in names}
        options = json.dumps({"limits": limits, "file": self._file, "receipts": fd})
        root = os.path.dirname(os.path.dirname(os.path.abspath(gpusched.__file__)))
        path = [entry for entry in sys.path if entry]
        if root not in path:
            path.append(root)
        self._stop_listening()
        self._answers = os.pipe()
        os.set_blocking(self._answers[0], False)
        self._ears.register(self._answers[0], select.EPOLLIN)
        self._child = subprocess.Popen(
            # -S: the path is handed over complete, so the search for site packages can be saved.
            [sys.executable, "-S", "-c", _BOOT, json.dumps(path), options],
            stdin=subprocess.PIPE,
            stdout=self._answers[1],
            # The daemon's own goes into its log or on root's terminal, which is no place for a user's words.
            stderr=None if self._uid == os.geteuid() else subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            pass_fds=[fd],
            start_new_session=True,
            **identity(self._uid),
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        log.debug("the worker for alerts of uid %d has started, pid %d", self._uid, self._child.pid)

    def _push(self) -> None:
        """Write as much as the pipe takes; the rest goes with the next call."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            while self._out:
                del self._out[: os.write(self._child.stdin.fileno(), self._out[: 1 << 16])]
        except BlockingIOError:
            pass  # it is busy
        except BrokenPipeError:
            pass  # it has died; the next poll says so

    def _stop_listening(self) -> None:
        """Hear no more of a worker that is let go: its user may have kept its end, and write without end."""
        if self._answers is not None:
            self._ears.unregister(self._answers[0])
            for fd in self._answers:
                os.close(fd)
            self._answers = None

    def _collect(self) -> list[Report]:
        if self._answers is None:
            return []
        try:
            # Once: who writes faster than this reads must not keep the daemon here.
            data = os.read(self._answers[0], 1 << 16)
        except BlockingIOError:
            return []
        reports = self._hearing.take(data)
        if reports:
            self._failures, self.trouble = 0, None
        return reports

    def _bury(self) -> None:
        assert self._child is not None
        code = self._child.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._fail(f"the process that sends alerts has ended ({how})", self._monotonic())

    def _fail(self, why: str, now: float, *, kill: bool = False) -> None:
        self._dismiss(kill=kill)
        self._failures += 1
        wait_s = min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(self._failures - 1, 16))
        self._not_before = now + wait_s
        self.trouble = why
        log.warning("%s; the next one starts in %.0f s", why, wait_s)

    def _retire(self) -> None:
        if self._hearing.expects_more or self._out:
            self._idle_since = None
            return
        now = self._monotonic()
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= IDLE_S:
            self._dismiss()

    def _dismiss(self, *, kill: bool = False) -> None:
        child, self._child = self._child, None
        self._hearing, self._out, self._idle_since = Hearing(), bytearray(), None
        self._stop_listening()
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        if kill:
            try:
                # With the tries it had under way.
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # all of them are gone
        _Children.leave(child)


class _Children:
    """Workers that were told to end and have not yet: they are reaped on occasion, not waited for."""

    ending: list[subprocess.Popen[bytes]] = []  # noqa: RUF012  one list for the process

    @classmethod
    def leave(cls, child: subprocess.Popen[bytes]) -> None:
        cls.ending = [one for one in (*cls.ending, child) if one.poll() is None]


def order_of(alert: Alert) -> bytes:
    """An alert as the worker reads it."""
    order = {
        "key": alert.key,
        "event": alert.event,
        "counts_as": alert.counts_as,
        "at": alert.at,
        "facts": dict(alert.facts),
        "targets": alert.targets,
        "settled": alert.settled,
    }
    return json.dumps(order).encode() + b"\n"


def _read(fd: int) -> Iterable[tuple[str, str]]:
    """Alerts and targets of the last receipts; a line that was cut off by a full disk is left out.

    Their user may have written anything there, and as much as their quota lets them.
    """
    start = max(0, os.fstat(fd).st_size - _MOST_RECEIPTS)
    _, *lines = (b"\n" * (not start) + os.pread(fd, _MOST_RECEIPTS, start)).split(b"\n")
    for line in lines:
        try:
            key, target = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        yield str(key), str(target)


def identity(uid: int) -> dict[str, Any]:
    """What makes a child run as this user, with that user's home; nothing for ourselves. Raises: KeyError."""
    if uid == os.geteuid():
        return {}
    user = pwd.getpwuid(uid)
    environment = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "PATH": os.defpath}
    kept: Collection[str] = ("LANG", "LC_ALL", "TZ", "http_proxy", "https_proxy", "no_proxy")
    environment.update({name: os.environ[name] for name in kept if name in os.environ})
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    return {"user": uid, "group": user.pw_gid, "extra_groups": groups, "env": environment}
