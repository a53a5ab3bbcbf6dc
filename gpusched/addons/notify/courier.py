"""The daemon's end of the processes that send one user's alerts: hand over, collect, and never wait.

    submit()   given all pending alerts: starts a process that sends them, once the last one has ended and some are due
    poll()     outcomes of alerts since the last call
    fileno()   becomes readable when `poll` has something to do; the same for the courier's whole life

Each process sends one batch and ends. The courier keeps no alerts, only how long failed targets rest, which a restart
may forget.

The sending process adds a line to a file of receipts for each message accepted. After a `kill -9` of daemon or sender
the receipts show which messages must not be repeated. Any process that may still be sending holds a lock on that
file, so that no new sender begins before the old one has ended.
"""

from __future__ import annotations

import fcntl
import json
import math
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
from gpusched import paths
from gpusched.addons.notify.sender import BATCH_S, AlertOrder, SenderOptions, TargetBackoff
from gpusched.model.alerts import FILE, Alert, Report
from gpusched.model.settings import AlertSettings
from gpusched.model.units import printable
from gpusched.model.value import encode, replace

_LONGEST_LINE = 1 << 16
_MOST_TEXT = 600
_MOST_REPORTS = 1000
"""Per alert: the maximum number of a user's targets."""
_MOST_OTHERS = 1000
"""Lines of one sender that are not reports; a few are normal."""
_LONGEST_S = 86400.0
_OUTCOMES = ("told", "failed", "gave_up")


class SenderOutput:
    """Assembles the output of one sender, and separates reports from other lines.

    Reports are read field by field, not decoded into structs: a sender is a process of its user, who may make it say
    anything. A number or a text out of bounds is cut to what the daemon can store, one field that is wrong costs no
    other report, and what no sender would say is counted, until nothing more of it is heard.

    Args: keys: of its alerts.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.is_invalid = False
        """Whether it says what no sender would ever say."""
        self.has_ended = False
        """Whether it said that it is over."""
        self.next_s: float | None = None
        """In how many seconds what it left is due; None when it left nothing."""
        self._heard = b""
        self._others = 0
        """Lines that were no reports."""
        self._open = dict.fromkeys(keys, 0)
        """Alerts that it is not done with, and how many reports there were of each."""

    def take(self, data: bytes) -> list[Report]:
        """Parse the reports in new output, in order."""
        *lines, self._heard = (self._heard + data).split(b"\n")
        self.is_invalid |= len(self._heard) > _LONGEST_LINE
        reports = []
        for line in lines:
            report = self._report_in(line)
            if report is not None:
                reports.append(report)
                continue
            self._others += 1
            if self._others > _MOST_OTHERS:
                self.is_invalid = True
            if self.is_invalid:
                break
        return reports

    def _report_in(self, line: bytes) -> Report | None:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return None  # a killed one may stop within a line
        if not isinstance(said, dict):
            return None
        key = said.get("key")
        if key is None and "next_s" in said:
            self.has_ended, self.next_s = True, None if said["next_s"] is None else _seconds(said["next_s"])
            return None
        if not isinstance(key, str) or key not in self._open:
            return None
        self._open[key] += 1
        if self._open[key] > _MOST_REPORTS:
            self.is_invalid = True
            return None
        if said.get("done") is True:
            del self._open[key]
            return {"key": key, "done": True}
        return _outcome_in(said, key)


def _outcome_in(said: dict[str, Any], key: str) -> Report | None:
    outcome, target, tries = said.get("outcome"), said.get("target"), said.get("tries")
    if outcome not in _OUTCOMES or not isinstance(target, str) or not isinstance(tries, int):
        return None
    report: Report = {"key": key, "target": printable(target, _MOST_TEXT), "tries": max(0, min(tries, 1 << 31))}
    report["outcome"] = outcome
    if outcome == "told":
        return report
    error = said.get("error")
    report["error"] = printable(error, _MOST_TEXT) if isinstance(error, str) else "unknown reason"
    if "failures" in said or outcome == "failed":
        failures = said.get("failures")
        report["failures"] = max(1, min(failures, 1 << 16)) if isinstance(failures, int) else 1
        report["next_s"] = _seconds(said.get("next_s"))
    return report


def _seconds(said: object) -> float:
    if not isinstance(said, int) and not (isinstance(said, float) and math.isfinite(said)):
        return 0.0
    # Cut before it becomes a float: JSON has whole numbers that are too large for one.
    return float(max(0, min(said, _LONGEST_S)))


log = getLogger("gpusched.notify")

_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 60.0
_LOCKED_S = 0.25
"""Interval between checks for the end of an earlier sender's last attempt."""
_LEFT_S = 30.0
"""Delay after which alerts still pending are handed over again, though the sender reported none left."""
_LATE_S = 30.0
"""Grace for a sender to end, beyond its time and its last attempt."""
_SILENT_S = 1.0
"""Minimum time until the next sender after one that did nothing."""
_MOST_READS = 64
_ENDING_S = 0.05
"""Time for a process that has closed its end to exit."""
_MOST_BYTES = 1 << 20
"""Maximum size of one batch."""
_LONGEST_RECEIPT = 1 << 12
_MOST_RECEIPTS = 1 << 20
"""Last bytes of the receipts that are read: the daemon waits meanwhile."""
_MOST_TOLD = 1000
"""Maximum receipts accepted at once: targets per alert, times alerts under way."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gpusched.addons.notify.sender import main; main(sys.argv[2])"
)


class Courier:
    """Sends one user's alerts through child processes that run as that user.

    Args:
        uid: user whose targets are notified.
        receipts: path of the file of receipts, which belongs to the daemon.
        file: the user's `notify.toml`; None for the default path.
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
        self._deadline = 0.0
        self._batch: Collection[str] = ()
        """Alerts of the sender that runs or ran last."""
        self._output = SenderOutput()
        self._has_reports = False
        self._rests: dict[str, TargetBackoff] = {}
        """Of targets that failed last."""
        self._tries: dict[str, dict[str, int]] = {}
        """By alert and target, how often it was tried in vain."""
        self._failures = 0
        """Senders in a row that ended badly."""
        self._not_before = float("-inf")
        self._again_at = float("-inf")
        """When what was in the last batch is due once more."""
        self._due_at: float | None = None
        self._epoll = select.epoll()
        self._output_fd: int | None = None
        """The sender's output; None while no sender is read."""
        self.trouble: str | None = None
        """Why nothing is sent, for the doctor; None when all is well."""

    @property
    def is_idle(self) -> bool:
        return self._child is None

    @property
    def pid(self) -> int | None:
        """Pid of the current sender."""
        return None if self._child is None else self._child.pid

    def fileno(self) -> int:
        """Descriptor to watch for reading."""
        return self._epoll.fileno()

    def due_s(self) -> float | None:
        """Seconds until `submit` has something to do without news; None when nothing is pending or a sender runs."""
        return None if self._due_at is None else max(0.0, self._due_at - self._monotonic())

    def reconfigure(self, settings: AlertSettings) -> None:
        """Use these settings from the next batch on."""
        self._settings = settings

    def submit(self, alerts: Mapping[str, Alert]) -> list[Report]:
        """Send these, all unsent alerts of this user, the oldest first. Idempotent.

        Returns: reports of alerts that an earlier sender's receipts show as sent.
        """
        now = self._monotonic()
        self._due_at = None
        self._tries = {key: tries for key, tries in self._tries.items() if key in alerts}
        if self._child is not None or not alerts:
            return []
        has_new = any(key not in self._batch for key in alerts)
        self._due_at = max(self._not_before, now if has_new else self._again_at)
        if now < self._due_at:
            return []
        self._due_at = now + _SILENT_S
        reports = self._start(alerts, now)
        self._due_at = None if self._child is not None or reports else max(now, self._not_before)
        return reports

    def poll(self) -> list[Report]:
        """Return outcomes of alerts. Starts nothing."""
        child = self._child
        if child is None:
            return []
        has_ended = child.poll() is not None
        # A process that writes faster than this reads must not hold up the daemon.
        reports, is_closed = self._collect(_MOST_READS if has_ended else 1)
        if is_closed and not has_ended:
            try:
                child.wait(_ENDING_S)
                has_ended = True
            except subprocess.TimeoutExpired:
                self._close_output()
        if self._output.is_invalid:
            self._fail("the alert sender wrote invalid output", kill=True)
        elif has_ended:
            self._finish(child.returncode)
        elif self._monotonic() > self._deadline:
            self._fail("the alert sender does not end", kill=True)
        return reports

    def close(self) -> None:
        """Let the process finish: it begins no further attempt."""
        self._release()
        self._epoll.close()

    # --- the process --------------------------------------------------------------------------------

    def _start(self, waiting: Mapping[str, Alert], now: float) -> list[Report]:
        """Start the process, unless an earlier one may still be sending or has sent unrecorded alerts."""
        try:
            fd = os.open(self._receipts, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._fail(f"cannot write alert receipts to {self._receipts}: {error.strerror}")
            return []
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The last try of an earlier sender is not over; it is ended at its deadline.
                self._not_before = now + _LOCKED_S
                return []
            if self._uid != os.geteuid():
                # Its user can write into it as long as they like: at the cost of their own quota.
                os.fchown(fd, self._uid, -1)
            told = list(dict.fromkeys((key, target) for key, target in _read(fd) if key in waiting))
            told = [(key, target) for key, target in told if waiting[key].may_settle(target)][-_MOST_TOLD:]
            if told:
                return [{"key": key, "target": target, "outcome": "told", "tries": 1} for key, target in told]
            os.ftruncate(fd, 0)
            self._spawn(fd, waiting, now)
        except (OSError, subprocess.SubprocessError, KeyError) as error:
            self._fail(f"cannot start the alert sender: {error}")
        finally:
            os.close(fd)
        return []

    def _spawn(self, receipts: int, waiting: Mapping[str, Alert], now: float) -> None:
        settings = self._settings
        rests = {target: replace(rest, until=rest.until - now) for target, rest in self._rests.items()}
        options = encode(SenderOptions(settings, self._file, receipts, rests)).decode()
        root = os.path.dirname(os.path.dirname(os.path.abspath(gpusched.__file__)))
        path = [entry for entry in sys.path if entry]
        if root not in path:
            path.append(root)
        orders = self._orders(waiting)
        taken = _file_of(b"".join(orders.values()))
        heard, said = os.pipe()
        try:
            self._child = subprocess.Popen(
                # -S: the path is handed over complete, so the search for site packages can be saved.
                [sys.executable, "-S", "-c", _BOOT, json.dumps(path), options],
                stdin=taken,
                stdout=said,
                # The daemon's own goes to its log or root's terminal, where a user's text has no place.
                stderr=None if self._uid == os.geteuid() else subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                pass_fds=[receipts],
                start_new_session=True,
                **identity(self._uid),
            )
        except BaseException:
            os.close(heard)
            raise
        finally:
            # From here on the process alone has these: when it ends, nothing more can come.
            os.close(taken)
            os.close(said)
        os.set_blocking(heard, False)
        self._output_fd = heard
        self._epoll.register(heard, select.EPOLLIN)
        self._batch, self._output, self._has_reports = orders.keys(), SenderOutput(orders), False
        self._deadline = now + BATCH_S + settings.timeout_s + _LATE_S
        log.debug("a sender of alerts of uid %d has started, pid %d", self._uid, self._child.pid)

    def _orders(self, waiting: Mapping[str, Alert]) -> dict[str, bytes]:
        """Input of the next process, as much as fits, beginning with what the last one left out."""
        found: dict[str, bytes] = {}
        left = _MOST_BYTES
        for key in sorted(waiting, key=lambda key: key in self._batch):
            order = encode(AlertOrder(waiting[key], self._tries.get(key, {}))) + b"\n"
            left -= len(order)
            if found and left < 0:
                break
            found[key] = order
        return found

    def _collect(self, most: int) -> tuple[list[Report], bool]:
        """Read output in at most this many reads; returns whether it has ended."""
        reports: list[Report] = []
        is_closed = False
        while self._output_fd is not None and most and not is_closed:
            most -= 1
            try:
                data = os.read(self._output_fd, 1 << 16)
            except BlockingIOError:
                break
            reports += self._output.take(data)
            is_closed = not data
        for report in reports:
            self._remember(report)
        self._has_reports |= bool(reports)
        return reports, is_closed

    def _remember(self, report: Report) -> None:
        """Remember how long its target rests, and its number of attempts."""
        target, outcome = report.get("target"), report.get("outcome")
        if target is None:
            return
        if outcome == "told":
            self._rests.pop(target, None)
            self._rests.pop(FILE, None)
        elif "failures" in report:
            self._rests[target] = TargetBackoff(report["failures"], self._monotonic() + report["next_s"])
        if outcome == "failed":
            self._tries.setdefault(report["key"], {})[target] = report["tries"]

    def _finish(self, code: int) -> None:
        if code or not self._output.has_ended:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._fail(f"the alert sender ended ({how})")
            return
        next_s = self._output.next_s
        self._again_at = self._monotonic() + (_LEFT_S if next_s is None else next_s)
        self._not_before = self._monotonic() + (0.0 if self._has_reports else _SILENT_S)
        self._failures, self.trouble = 0, None
        self._release()

    def _fail(self, why: str, *, kill: bool = False) -> None:
        self._release(kill=kill)
        self._failures += 1
        wait_s = min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(self._failures - 1, 16))
        self._not_before = self._again_at = self._monotonic() + wait_s
        self.trouble = why
        log.warning("%s; the next one starts in %.0f s", why, wait_s)

    def _close_output(self) -> None:
        """Stop reading a released process: its user may have kept the pipe open and write forever."""
        if self._output_fd is not None:
            self._epoll.unregister(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = None

    def _release(self, *, kill: bool = False) -> None:
        child, self._child = self._child, None
        self._close_output()
        if child is None:
            return
        if kill:
            try:
                # Together with its pending attempts.
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # all of them are gone
        _Children.leave(child)


class _Children:
    """Senders that got a signal to end and have not yet: they are reaped occasionally, not waited for."""

    ending: list[subprocess.Popen[bytes]] = []  # noqa: RUF012  one list for the process

    @classmethod
    def leave(cls, child: subprocess.Popen[bytes]) -> None:
        cls.ending = [one for one in (*cls.ending, child) if one.poll() is None]


def _file_of(data: bytes) -> int:
    """Create a memory file, positioned at its beginning. Not a pipe: a user's pipe quota may be used up."""
    fd = os.memfd_create("alerts")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(fd: int) -> Iterable[tuple[str, str]]:
    """Alerts and targets of the last receipts; a line truncated by a full disk is skipped.

    Their user may have written anything there, as much as their quota allows.
    """
    start = max(0, os.fstat(fd).st_size - _MOST_RECEIPTS)
    _, *lines = (b"\n" * (not start) + os.pread(fd, _MOST_RECEIPTS, start)).split(b"\n")
    for line in lines:
        if len(line) > _LONGEST_RECEIPT:
            continue
        try:
            key, target = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        yield str(key), str(target)


def identity(uid: int) -> dict[str, Any]:
    """Arguments that make a child run as this user, with that user's home; empty for ourselves. Raises: KeyError."""
    if uid == os.geteuid():
        return {}
    user = pwd.getpwuid(uid)
    environment = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "PATH": os.defpath}
    kept: Collection[str] = ("LANG", "LC_ALL", "TZ", "http_proxy", "https_proxy", "no_proxy")
    environment.update({name: os.environ[name] for name in kept if name in os.environ})
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    return {"user": uid, "group": user.pw_gid, "extra_groups": groups, "env": environment}


def courier_of(uid: int, settings: AlertSettings) -> Courier:
    """A user's courier; other users' files are in their own folders."""
    own = uid == os.geteuid()
    receipts = os.path.join(paths.state_dir(), "alerts.told" if own else f"alerts.told.{uid}")
    return Courier(uid, settings, receipts, paths.notify_file() if own else None)
