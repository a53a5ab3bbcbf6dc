"""The daemon's end of the process that reads the GPUs: ask, collect, and never wait.

    request()  asks for a reading that begins now or later, before which MIG layouts may be changed
    poll()     returns a finished one, or an error when the driver did not answer in time
    fileno()   becomes readable when `poll` has something to do; the same for the worker's whole life

A reading that exceeds the deadline is given up: its process is killed and the last known GPUs are
returned with an error, on which nothing is placed. The next request starts a new process, after a
growing pause. On a machine without traces of GPUs there is no process at all.

The pipe for answers belongs to the worker and outlives each process. Remains of a killed one are
recognised by the number of the request.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import gpusched
from gpusched.gpu.source import Answer, ReadRequest, build, choose
from gpusched.gpu.source import signs as signs_here
from gpusched.model.cluster import GpuReading, GpuTargets
from gpusched.model.mig import MigOrder
from gpusched.model.settings import GpuSettings
from gpusched.model.value import decode, encode, replace

START_S = 20.0
"""Extra time for a new process: without persistence mode, init brings up every card (up to 10 s seen)."""

CHANGE_S = 120.0
"""Extra time to change MIG layouts: a card may be reset, and the library initialised twice."""
_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 60.0
_LOOK_S = 30.0
"""Interval between checks for hardware that appears later."""
_ASK_AGAIN_S = 300.0
"""Interval between queries of a driver that reported no GPUs."""
_STUCK_MAX = 3
"""Maximum number of unkillable processes (uninterruptible in the driver) before no more are started."""
_CLOSE_S = 1.0

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from gpusched.gpu.source import main; main(sys.argv[2])"
)


class GpuWorker:
    """Reads the GPUs through a child process.

    Args: folder: where it records what it changed on cards for runs; None: `want` has no effect.
    Raises: UsageError for invalid settings.
    """

    def __init__(
        self,
        settings: GpuSettings,
        environ: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        signs: Callable[[], tuple[str, ...]] = signs_here,
        start_s: float = START_S,
        folder: str | None = None,
    ) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._choice = choose(settings, self._environ)
        self._folder = folder
        self._targets: GpuTargets | None = None
        if self._choice.kind == "simulated":
            build(self._choice, self._environ)[0].close()  # complain now, not in the child
        self._deadline_s = settings.deadline_s
        self._start_s = start_s
        self._clock = clock
        self._monotonic = monotonic
        self._look = signs
        self._signs: tuple[str, ...] = ()
        self._next_look = float("-inf")
        self._needs_signs = settings.source == "auto"
        self._has_gpus = self._choice.kind in ("simulated", "static") or settings.source in ("nvml", "amdsmi")
        """False while no process is worth starting; `_find_hardware` may change that."""
        self._child: subprocess.Popen[bytes] | None = None
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._has_answered = False
        self._asked: int | None = None
        self._asked_at = 0.0
        self.answered_in_s = 0.0
        """How long the last reading took."""
        self._is_overdue = False
        self._again = False
        self._orders: tuple[MigOrder, ...] = ()
        """Layouts to make before the next reading."""
        self._is_changing = False
        """The request that is under way has orders."""
        self._number = 0
        self._failures = 0
        self._not_before = float("-inf")
        self._ready: GpuReading | None = None
        self._last: GpuReading | None = None
        self._buffer = b""
        self._answers, self._answers_in = os.pipe()
        os.set_blocking(self._answers, False)
        self._is_closed = False

    def request(self, orders: Sequence[MigOrder] = ()) -> None:
        """Ask for a reading that begins after this call; several requests may share one.

        Args: orders: layouts to be made before it. They are given with every request until a reading has the outcome.
        """
        self._orders = tuple(orders)
        if self._asked is not None:
            self._again = True
            return
        now = self._monotonic()
        if self._child is None:
            if not self._has_gpus and not self._find_hardware(now):
                self._deliver(GpuReading(self._clock(), "none", notes=self._why_none()))
                return
            if now < self._not_before or len(self._stuck) >= _STUCK_MAX:
                return
            try:
                self._start()
            except OSError as error:
                self._fail(f"the process that reads the GPUs cannot be started: {error.strerror}")
                return
        self._ask(now)

    def poll(self) -> GpuReading | None:
        """Return a new reading since the last call, or None. Enforces the deadline."""
        self._reap()
        has_ended = self._child is not None and self._child.poll() is not None
        self._collect()
        if self._asked is not None:
            if has_ended:
                self._fail(self._obituary())
            else:
                self._check_deadline()
        ready, self._ready = self._ready, None
        return ready

    @property
    def is_asked(self) -> bool:
        """Whether a reading is under way."""
        return self._asked is not None

    def adopt(self, settings: GpuSettings) -> None:
        """Apply these settings' deadline from now on; the source stays."""
        self._deadline_s = settings.deadline_s

    def want(self, targets: GpuTargets) -> None:
        """Say what the cards are to be like. Readings tell the outcome; until the first call, all stay as they are."""
        before, self._targets = self._targets, targets
        if targets != (before or GpuTargets()):
            self.request(self._orders)

    def fileno(self) -> int:
        return self._answers

    def read_blocking(self, timeout_s: float) -> GpuReading:
        """Ask and wait; after the timeout return the last known state with an error. For start-up and tests."""
        end = self._monotonic() + timeout_s
        self.request()
        while True:
            reading = self.poll()
            if reading is not None:
                return reading
            left_s = end - self._monotonic()
            if self._asked is None:
                # Between two processes: the last error still applies.
                return self._last or self._stale("the GPUs have not been read yet")
            if left_s <= 0:
                return self._stale(f"no answer from the driver for {timeout_s:.1f} s")
            select.select([self._answers], [], [], min(left_s, 0.05))

    def close(self) -> None:
        """End the process and close the descriptors. A process stuck in the driver is left behind."""
        child, self._child = self._child, None
        if child is not None:
            self._dismiss(child, kill=self._asked is not None)
        for child in self._stuck:
            try:
                child.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                try:
                    child.wait(_CLOSE_S)
                except subprocess.TimeoutExpired:
                    pass  # in the driver; it dies when the driver lets go of it
        self._stuck = []
        for fd in (self._answers, self._answers_in):
            if not self._is_closed:
                os.close(fd)
        self._is_closed = True

    # --- the process ----------------------------------------------------------------------------

    def _start(self) -> None:
        root = os.path.dirname(os.path.dirname(os.path.abspath(gpusched.__file__)))
        path = [entry for entry in sys.path if entry]
        if root not in path:
            path.append(root)
        # -S: the path is handed over complete, so the search for site packages can be saved.
        command = [
            sys.executable,
            "-S",
            "-c",
            _BOOT,
            json.dumps(path),
            json.dumps(asdict(self._choice) | {"folder": self._folder}),
        ]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._answers_in,
            bufsize=0,
            cwd="/",
            env=self._environ,
            start_new_session=True,
        )
        self._has_answered = False

    def _ask(self, now: float) -> None:
        self._number += 1
        self._asked, self._asked_at, self._is_overdue, self._again = self._number, now, False, False
        assert self._child is not None
        assert self._child.stdin is not None
        self._is_changing = bool(self._orders)
        try:
            request = ReadRequest(self._number, self._targets, self._orders)
            self._child.stdin.write(encode(request) + b"\n")
        except BrokenPipeError:
            pass  # it has died; the next poll says so

    def _collect(self) -> None:
        while True:
            try:
                data = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                answer = decode(line, Answer)
            except ValueError:
                continue  # a new process starts with an empty line, a killed one may stop within one
            if answer.request != self._asked:
                continue
            self._asked = None
            self._has_answered = True
            self._accept(answer.reading, answer.is_last)

    def _accept(self, reading: GpuReading, is_last: bool) -> None:
        now = self._monotonic()
        self.answered_in_s = now - self._asked_at
        if self._choice.note is not None:
            reading = replace(reading, notes=(*reading.notes, self._choice.note))
        self._deliver(reading)
        if is_last and self._child is not None:
            child, self._child = self._child, None
            self._dismiss(child)
            if reading.error is None:
                self._has_gpus = False
                self._failures = 0
                self._signs, self._next_look = self._look(), now + _LOOK_S
                self._not_before = now + _ASK_AGAIN_S
            else:
                self._back_off(now)
            return
        self._failures = 0
        if self._again:
            self._ask(now)

    def _check_deadline(self) -> None:
        now = self._monotonic()
        waited_s = now - self._asked_at
        if waited_s <= self._deadline_s:
            return
        why = f"no answer from the driver for {self._deadline_s:.1f} s"
        if self._is_changing:
            is_over = waited_s > self._deadline_s + self._start_s + CHANGE_S
            why = "the MIG layout of a GPU is being changed"
        else:
            is_over = self._has_answered or waited_s > self._deadline_s + self._start_s
        if is_over:
            self._fail(why)
        elif not self._is_overdue:
            self._is_overdue = True
            self._deliver(self._stale(why))

    def _fail(self, why: str) -> None:
        self._asked = None
        self._again = False
        self._buffer = b""
        child, self._child = self._child, None
        if child is not None:
            self._dismiss(child, kill=True)
        self._deliver(self._stale(why))
        self._back_off(self._monotonic())

    def _obituary(self) -> str:
        code = self._child.returncode if self._child is not None else None
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the process that reads the GPUs has ended ({how})"

    def _back_off(self, now: float) -> None:
        self._failures += 1
        self._not_before = now + min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(self._failures - 1, 16))

    def _dismiss(self, child: subprocess.Popen[bytes], kill: bool = False) -> None:
        if child.stdin is not None:
            child.stdin.close()
        if kill:
            child.kill()
        self._stuck.append(child)
        self._reap()

    def _reap(self) -> None:
        self._stuck = [child for child in self._stuck if child.poll() is None]

    # --- readings -------------------------------------------------------------------------------

    def _deliver(self, reading: GpuReading) -> None:
        self._ready = self._last = reading

    def _why_none(self) -> tuple[str, ...]:
        """The driver's last answer, as long as there are signs of a driver."""
        is_told = self._last is not None and self._last.source == "none" and (self._signs or not self._needs_signs)
        return self._last.notes if self._last is not None and is_told else ()

    def _stale(self, why: str) -> GpuReading:
        last = self._last or GpuReading(self._clock(), self._choice.kind)
        return replace(last, at=self._clock(), error=why)

    def _find_hardware(self, now: float) -> bool:
        """Whether the driver is worth querying now: new signs of hardware, or enough time passed."""
        if self._choice.kind == "none" or now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        signs = self._look()
        is_new = signs != self._signs and signs
        if is_new or (now >= self._not_before and (signs or not self._needs_signs)):
            self._has_gpus = True
            self._not_before = now
        self._signs = signs
        return self._has_gpus
