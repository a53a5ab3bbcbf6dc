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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpusched import paths
from gpusched.lifecycle.alerts import BACKOFF_FACTOR
from gpusched.lifecycle.retry import backoff_s
from gpusched.model.job import RetryRule
from gpusched.notify.attempt import Attempt, Result
from gpusched.notify.targets import Target, Targets, TargetsError, fill, read_targets
from gpusched.notify.terminals import BUILT_IN

Order = dict[str, Any]
"""An alert as the daemon hands it over: key, event, counts_as, at, facts, targets, settled, and by target its tries."""

Report = dict[str, Any]
"""What the daemon is told: key, and either `done`, or target, outcome (told, failed, gave_up), error, tries, failures,
next_s."""

FILE = ""
"""In place of a target: the file itself cannot be used now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard to try, in seconds, from `[alert]`."""

    timeout_s: float
    backoff_s: float
    backoff_max_s: float
    give_up_s: float


@dataclass(frozen=True, slots=True)
class Rest:
    """A target that failed so often in a row, and until when it is left alone."""

    failures: int = 0
    until: float = float("-inf")


@dataclass(slots=True)
class Delivery:
    """One alert for one target."""

    order: Order
    target: str
    tries: int


@dataclass(frozen=True, slots=True)
class Letter:
    """What is to be sent."""

    url: str
    title: str
    body: str


class Batch:
    """All that is to be sent, and what becomes of it.

    Args:
        read: the user's targets. Raises: TargetsError.
        rests: of the targets that failed last.
        now: UTC epoch seconds, as every `now` here.
    """

    def __init__(
        self,
        orders: Iterable[Order],
        rests: Mapping[str, Rest],
        limits: Limits,
        read: Callable[[], Targets],
        now: float,
    ) -> None:
        self._limits = limits
        self._rests = dict(rests)
        self._waiting: dict[str, list[Delivery]] = {}
        """By target, next last."""
        self._open: dict[str, int] = {}
        """How many deliveries of each alert are not over."""
        self._read = read
        self._targets: Targets | None = None
        self._problem: TargetsError | None = None
        self.reports: list[Report] = []
        """What became of the alerts that need no try."""
        for order in orders:
            self._spread(order)
        for line in self._waiting.values():
            # What was never tried goes first: an alert that its target refuses must not stand in front of all others.
            line.sort(key=lambda one: (one.tries, one.order["at"], one.order["key"]), reverse=True)
        self._try_file(now)

    def pick(self, now: float, busy: Collection[str]) -> Delivery | None:
        """Take out the next delivery to a target that is neither busy nor resting; it has to be settled."""
        for target, line in self._waiting.items():
            if line and target != FILE and target not in busy and self._rest(target).until <= now:
                return line.pop()
        return None

    def next_s(self, now: float) -> float | None:
        """In how many seconds a try is due of what is left; None when nothing is."""
        untils = [self._rest(target).until for target, line in self._waiting.items() if line]
        return max(0.0, min(untils) - now) if untils else None

    def letter(self, delivery: Delivery) -> Letter:
        """What to send for this delivery."""
        targets, order = self._targets_of(delivery.order), delivery.order
        target = targets.named(delivery.target)
        assert target is not None
        title, body = targets.words_for(target, order["event"])
        facts = order["facts"]
        return Letter(target.url, " ".join(fill(title, facts).split()), fill(body, facts))

    def settle(self, delivery: Delivery, result: Result, now: float) -> list[Report]:
        """Take in the result of a try: done, another try later, or given up."""
        delivery.tries += 1
        target = delivery.target
        if result.is_told:
            self._rests.pop(target, None)
            return self._close(delivery, {"outcome": "told"})
        gave_up = {"error": result.error, "outcome": "gave_up"}
        if result.is_final:
            return self._close(delivery, gave_up)
        failures = self._rest(target).failures + 1
        next_s = self._wait_s(failures, delivery.order)
        self._rests[target] = Rest(failures, now + next_s)
        if self._is_too_old(delivery.order, now + next_s):
            reports = self._close(delivery, gave_up)
        else:
            self._waiting.setdefault(target, []).insert(0, delivery)
            reports = [{**_report(delivery), "error": result.error, "outcome": "failed"}]
        # What would be too old at the next try shares the fate of what was just tried in vain.
        old = [one for one in self._waiting.get(target, ()) if self._is_too_old(one.order, now + next_s)]
        self._waiting[target] = [one for one in self._waiting.get(target, ()) if one not in old]
        for one in sorted(old, key=lambda one: (one.order["at"], one.order["key"])):
            reports += self._close(one, gave_up)
        reports[0].update(failures=failures, next_s=next_s)
        return reports

    def _try_file(self, now: float) -> None:
        """One try of reading it stands for all alerts whose targets it should name."""
        if self._problem is not None and self._rest(FILE).until <= now:
            self.reports += self.settle(self._waiting[FILE].pop(), Result(False, self._problem.message), now)

    def _rest(self, target: str) -> Rest:
        return self._rests.get(target, Rest())

    def _wait_s(self, failures: int, order: Order) -> float:
        limits = self._limits
        rule = RetryRule(backoff_s=limits.backoff_s, backoff_factor=BACKOFF_FACTOR, backoff_max_s=limits.backoff_max_s)
        return backoff_s(rule, failures, sum(order["key"].encode()))

    def _is_too_old(self, order: Order, at: float) -> bool:
        return bool(at >= order["at"] + self._limits.give_up_s)

    def _close(self, delivery: Delivery, outcome: Report) -> list[Report]:
        key = delivery.order["key"]
        self._open[key] -= 1
        return [{**_report(delivery), **outcome}, *([] if self._open[key] else [{"key": key, "done": True}])]

    # --- whom an alert is for -----------------------------------------------------------------------

    def _spread(self, order: Order) -> None:
        """Find out whom the alert is for."""
        try:
            names = self._names(order)
        except TargetsError:
            names = [FILE]
        names = [name for name in names if name not in order["settled"]]
        self._open[order["key"]] = len(names)
        for name in names:
            delivery = Delivery(order, name, order["tries"].get(name, 0))
            self._waiting.setdefault(name, []).append(delivery)
        if not names:
            self.reports.append({"key": order["key"], "done": True})

    def _targets_of(self, order: Order) -> Targets:
        """What the file says, which those that everybody has do not need. Raises: TargetsError."""
        asked: list[str] = order["targets"]
        if asked and all(name in BUILT_IN for name in asked):
            return Targets(FILE, exists=False)
        if self._problem is not None:
            raise self._problem
        if self._targets is None:
            try:
                self._targets = self._read()
            except TargetsError as error:
                self._problem = error
                raise
        return self._targets

    def _names(self, order: Order) -> list[str]:
        """Targets of the alert; why there is nobody is reported. Raises: TargetsError."""
        targets = self._targets_of(order)
        asked: list[str] = order["targets"]
        found: list[Target] = []
        for name in asked:
            target = targets.named(name)
            if target is None:
                self.reports.append(_nobody(order["key"], name, targets.why_nobody(name)))
            elif target.takes(order["counts_as"]):
                found.append(target)
        if not asked:
            found = [target for target in targets.targets.values() if target.takes(order["counts_as"])]
            if not targets.targets:
                self.reports.append(_nobody(order["key"], FILE, targets.why_nobody()))
        return [target.name for target in found]


def _report(delivery: Delivery) -> Report:
    return {"key": delivery.order["key"], "target": delivery.target, "tries": delivery.tries}


def _nobody(key: str, name: str, why: str) -> Report:
    return {"key": key, "target": name, "tries": 0, "outcome": "gave_up", "error": why}


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
