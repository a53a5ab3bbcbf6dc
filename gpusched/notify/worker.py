"""The process that sends one user's alerts; it runs as that user and reads that user's file.

It reads alerts from stdin, a line of JSON each, and writes what became of them to stdout. Each try is a child of
its own, at most one for a target at a time. When stdin closes it gives the tries under way a moment and ends.
What `-c` runs is `main(json)`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any

from gpusched import paths
from gpusched.notify.deliveries import Deliveries, Delivery, Limits, Report
from gpusched.notify.sending import Attempt, Result
from gpusched.notify.targets import Targets, read_targets

STDIN, STDOUT = 0, 1
MOST_AT_ONCE = 8
"""Tries under way at the same time."""

_LAST_S = 2.0
"""For tries that are under way when the daemon ends."""
_LOOK_S = 0.25
_LONGEST_S = 60.0


def main(argument: str) -> None:
    """Serve until stdin closes."""
    # Ctrl-C in the terminal of a foreground daemon reaches its children too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker(json.loads(argument)).serve()


class Worker:
    """Reads, sends, reports."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._limits = Limits(**options["limits"])
        self._file: str = options["file"] or paths.notify_file()
        self._receipts: int = options["receipts"]
        self._deliveries = Deliveries(self._limits, self._targets)
        self._under_way: dict[str, tuple[Delivery, Attempt]] = {}
        """By target."""
        self._heard = b""
        self._is_over = False

    def _targets(self) -> Targets:
        return read_targets(self._file)

    def serve(self) -> None:
        """Until stdin closes and nothing is under way, or the last moment is over."""
        os.set_blocking(STDIN, False)
        # A killed one may have stopped within a line.
        _write(b"\n")
        while not self._is_over:
            self._wait()
            self._hear()
            self._collect()
            self._begin()
        end = time.monotonic() + _LAST_S
        while self._under_way and time.monotonic() < end:
            select.select([attempt for _, attempt in self._under_way.values()], [], [], _LOOK_S)
            self._collect()
        for _, attempt in self._under_way.values():
            attempt.end()

    def _wait(self) -> None:
        due_at = self._deliveries.next_due(self._under_way)
        wait_s = _LONGEST_S if due_at is None else min(_LONGEST_S, max(0.0, due_at - time.time()))
        if len(self._under_way) >= MOST_AT_ONCE:
            wait_s = _LONGEST_S
        now = time.monotonic()
        for _, attempt in self._under_way.values():
            wait_s = min(wait_s, max(0.0, attempt.deadline - now))
        sending = [attempt.fileno() for _, attempt in self._under_way.values()]
        select.select([STDIN, *sending], [], [], wait_s)

    def _hear(self) -> None:
        try:
            while True:
                data = os.read(STDIN, 1 << 16)
                if not data:
                    self._is_over = True
                    break
                self._heard += data
        except BlockingIOError:
            pass  # all of it for now
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._report(self._deliveries.take(json.loads(line), time.time()))

    def _collect(self) -> None:
        for target, (delivery, attempt) in list(self._under_way.items()):
            result = attempt.poll()
            if result is not None:
                del self._under_way[target]
                self._report(self._deliveries.settle(delivery, result, time.time()))

    def _begin(self) -> None:
        while not self._is_over and len(self._under_way) < MOST_AT_ONCE:
            now = time.time()
            delivery = self._deliveries.pick(now, self._under_way)
            if delivery is None:
                return
            letter, reports = self._deliveries.letter(delivery, now)
            self._report(reports)
            if letter is None:
                continue
            told = json.dumps([delivery.order["key"], delivery.target]).encode() + b"\n"
            try:
                attempt = Attempt(letter.url, letter.title, letter.body, self._limits.timeout_s, (self._receipts, told))
            except OSError as error:
                self._report(self._deliveries.settle(delivery, Result(False, f"no process: {error.strerror}"), now))
                continue
            self._under_way[delivery.target] = (delivery, attempt)

    def _report(self, reports: list[Report]) -> None:
        for report in reports:
            _write(json.dumps(report).encode() + b"\n")


def _write(data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(STDOUT, view) :]
    except BrokenPipeError:
        pass  # the daemon has gone; stdin says so too
