"""The process that sends one batch of a user's alerts and ends; it runs as that user and reads that user's file.

It finds alerts in its stdin, a line of JSON each, and writes what became of them to stdout, last of all in how many
seconds the rest is due. Each try is a child of its own, at most one for a target at a time. When nobody reads stdout
any more it begins no further try. What `-c` runs is `main(json)`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from gpusched import paths
from gpusched.notify.batch import Batch, Delivery, Limits, Report, Rest
from gpusched.notify.sending import Attempt, Result
from gpusched.notify.targets import read_targets

STDOUT = 1
MOST_AT_ONCE = 8
"""Tries under way at the same time."""
BATCH_S = 30.0
"""No try is begun later than this: what came up meanwhile goes with the next batch."""


def main(argument: str) -> None:
    """Send what stdin holds."""
    # Ctrl-C in the terminal of a foreground daemon reaches its children too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Sender(json.loads(argument), sys.stdin.buffer.read()).serve()


class Sender:
    """Sends and reports.

    Args: options: `limits`; `file`, the user's or nothing; `receipts`, a descriptor; `rests`, by target its failures
        in a row and for how many seconds it is left alone.
    """

    def __init__(self, options: dict[str, Any], orders: bytes) -> None:
        now = time.time()
        self._limits = Limits(**options["limits"])
        self._receipts: int = options["receipts"]
        self._end = time.monotonic() + BATCH_S
        self._is_heard = True
        self._under_way: dict[str, tuple[Delivery, Attempt]] = {}
        """By target."""
        file: str = options["file"] or paths.notify_file()
        rests = {target: Rest(failures, now + rest_s) for target, (failures, rest_s) in options["rests"].items()}
        lines = [json.loads(line) for line in orders.splitlines()]
        self._batch = Batch(lines, rests, self._limits, lambda: read_targets(file), now)

    def serve(self) -> None:
        """Until nothing is under way and nothing can be begun."""
        self._report(self._batch.reports)
        while self._begin() or self._under_way:
            self._wait()
            self._collect()
        self._report([{"next_s": self._batch.next_s(time.time())}])

    def _begin(self) -> bool:
        """Begin as many tries as can be under way; whether there was any."""
        has_begun = False
        while self._is_heard and len(self._under_way) < MOST_AT_ONCE and time.monotonic() < self._end:
            delivery = self._batch.pick(time.time(), self._under_way)
            if delivery is None:
                break
            letter = self._batch.letter(delivery)
            told = json.dumps([delivery.order["key"], delivery.target]).encode() + b"\n"
            try:
                attempt = Attempt(letter.url, letter.title, letter.body, self._limits.timeout_s, (self._receipts, told))
            except OSError as error:
                result = Result(False, f"no process: {error.strerror}")
                self._report(self._batch.settle(delivery, result, time.time()))
                continue
            self._under_way[delivery.target] = (delivery, attempt)
            has_begun = True
        return has_begun

    def _wait(self) -> None:
        events = select.poll()
        if self._is_heard:
            # Of this one only that the daemon has let go of its end.
            events.register(STDOUT, 0)
        now = time.monotonic()
        wait_s = self._limits.timeout_s
        for _, attempt in self._under_way.values():
            events.register(attempt.fileno(), select.POLLIN)
            wait_s = min(wait_s, max(0.0, attempt.deadline - now))
        if any(fd == STDOUT for fd, _ in events.poll(wait_s * 1000)):
            self._is_heard = False

    def _collect(self) -> None:
        for target, (delivery, attempt) in list(self._under_way.items()):
            result = attempt.poll()
            if result is not None:
                del self._under_way[target]
                self._report(self._batch.settle(delivery, result, time.time()))

    def _report(self, reports: list[Report]) -> None:
        view = memoryview(b"".join(json.dumps(report).encode() + b"\n" for report in reports))
        try:
            while view:
                view = view[os.write(STDOUT, view) :]
        except BrokenPipeError:
            self._is_heard = False
