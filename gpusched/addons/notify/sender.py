"""The process that sends one batch of a user's alerts and ends; it runs as that user and reads that user's file.

It reads alerts from stdin, a line of JSON each, and writes outcomes to stdout, last of all the number of seconds until
the rest is due. Each attempt is its own child process, at most one for a target at a time. Once stdout has no reader,
it begins no further attempt. `-c` runs `main(json)`.
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

from gpusched import paths
from gpusched.addons.notify.attempt import SendAttempt, SendResult
from gpusched.addons.notify.targets import Target, Targets, TargetsError, fill, read_targets
from gpusched.addons.notify.terminals import BUILT_IN
from gpusched.lifecycle.alerts import BACKOFF_FACTOR
from gpusched.lifecycle.retry import backoff_s
from gpusched.model.alerts import FILE, Alert, Report
from gpusched.model.job import RetryRule
from gpusched.model.settings import AlertSettings
from gpusched.model.value import Value, decode, replace


class TargetBackoff(Value):
    """Consecutive failures of a target, and until when it rests."""

    failures: int = 0
    until: float = float("-inf")


class AlertOrder(Value):
    """An alert to send, with the failed attempts per target."""

    alert: Alert
    tries: Mapping[str, int] = {}


class SenderOptions(Value):
    """Arguments of a sender."""

    settings: AlertSettings
    file: str | None
    """The user's `notify.toml`; None for the default path."""
    receipts: int
    """A descriptor to append to."""
    rests: Mapping[str, TargetBackoff]
    """By target that failed last; `until` in seconds from now."""


@dataclass(slots=True)
class Delivery:
    """One alert for one target."""

    order: AlertOrder
    target: str
    tries: int


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """Text of one message."""

    url: str
    title: str
    body: str


class AlertBatch:
    """Pending alerts and their outcomes.

    Args:
        read: returns the user's targets. Raises: TargetsError.
        rests: of the targets that failed last.
        now: UTC epoch seconds, as every `now` here.
    """

    def __init__(
        self,
        orders: Iterable[AlertOrder],
        rests: Mapping[str, TargetBackoff],
        settings: AlertSettings,
        read: Callable[[], Targets],
        now: float,
    ) -> None:
        self._settings = settings
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
            # Untried alerts first: one that its target refuses must not block all others.
            line.sort(key=lambda one: (one.tries, one.order.alert.at, one.order.alert.key), reverse=True)
        self._try_file(now)

    def pick(self, now: float, busy: Collection[str]) -> Delivery | None:
        """Take out the next delivery to a target that is neither busy nor resting; the caller must settle it."""
        for target, line in self._waiting.items():
            if line and target != FILE and target not in busy and self._rest(target).until <= now:
                return line.pop()
        return None

    def next_s(self, now: float) -> float | None:
        """Seconds until the next attempt is due; None when nothing is left."""
        untils = [self._rest(target).until for target, line in self._waiting.items() if line]
        return max(0.0, min(untils) - now) if untils else None

    def letter(self, delivery: Delivery) -> AlertMessage:
        """What to send for this delivery."""
        targets, order = self._targets_of(delivery.order), delivery.order
        target = targets.named(delivery.target)
        assert target is not None
        title, body = targets.words_for(target, order.alert.event)
        facts = dict(order.alert.facts)
        return AlertMessage(target.url, " ".join(fill(title, facts).split()), fill(body, facts))

    def settle(self, delivery: Delivery, result: SendResult, now: float) -> list[Report]:
        """Handle the result of an attempt: done, retry later, or given up."""
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
        self._rests[target] = TargetBackoff(failures, now + next_s)
        if self._is_too_old(delivery.order, now + next_s):
            reports = self._close(delivery, gave_up)
        else:
            self._waiting.setdefault(target, []).insert(0, delivery)
            reports = [{**_report(delivery), "error": result.error, "outcome": "failed"}]
        # Alerts that would be too old at the next attempt are given up with the one that just failed.
        old = [one for one in self._waiting.get(target, ()) if self._is_too_old(one.order, now + next_s)]
        self._waiting[target] = [one for one in self._waiting.get(target, ()) if one not in old]
        for one in sorted(old, key=lambda one: (one.order.alert.at, one.order.alert.key)):
            reports += self._close(one, gave_up)
        reports[0].update(failures=failures, next_s=next_s)
        return reports

    def _try_file(self, now: float) -> None:
        """Read the file once on behalf of all alerts whose targets it should name."""
        if self._problem is not None and self._rest(FILE).until <= now:
            self.reports += self.settle(self._waiting[FILE].pop(), SendResult(False, self._problem.message), now)

    def _rest(self, target: str) -> TargetBackoff:
        return self._rests.get(target, TargetBackoff())

    def _wait_s(self, failures: int, order: AlertOrder) -> float:
        limits = self._settings
        rule = RetryRule(backoff_s=limits.backoff_s, backoff_factor=BACKOFF_FACTOR, backoff_max_s=limits.backoff_max_s)
        return backoff_s(rule, failures, sum(order.alert.key.encode()))

    def _is_too_old(self, order: AlertOrder, at: float) -> bool:
        return bool(at >= order.alert.at + self._settings.give_up_s)

    def _close(self, delivery: Delivery, outcome: Report) -> list[Report]:
        key = delivery.order.alert.key
        self._open[key] -= 1
        return [{**_report(delivery), **outcome}, *([] if self._open[key] else [{"key": key, "done": True}])]

    # --- whom an alert is for -----------------------------------------------------------------------

    def _spread(self, order: AlertOrder) -> None:
        """Determine the targets of the alert."""
        try:
            names = self._names(order)
        except TargetsError:
            names = [FILE]
        names = [name for name in names if name not in order.alert.settled]
        self._open[order.alert.key] = len(names)
        for name in names:
            delivery = Delivery(order, name, order.tries.get(name, 0))
            self._waiting.setdefault(name, []).append(delivery)
        if not names:
            self.reports.append({"key": order.alert.key, "done": True})

    def _targets_of(self, order: AlertOrder) -> Targets:
        """Targets in the file, which built-in ones do not need. Raises: TargetsError."""
        asked = order.alert.targets
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

    def _names(self, order: AlertOrder) -> list[str]:
        """Names of the alert's targets; reports why there is none. Raises: TargetsError."""
        targets = self._targets_of(order)
        asked = order.alert.targets
        found: list[Target] = []
        for name in asked:
            target = targets.named(name)
            if target is None:
                self.reports.append(_no_target(order.alert.key, name, targets.why_no_target(name)))
            elif target.takes(order.alert.counts_as):
                found.append(target)
        if not asked:
            found = [target for target in targets.targets.values() if target.takes(order.alert.counts_as)]
            if not targets.targets:
                self.reports.append(_no_target(order.alert.key, FILE, targets.why_no_target()))
        return [target.name for target in found]


def _report(delivery: Delivery) -> Report:
    return {"key": delivery.order.alert.key, "target": delivery.target, "tries": delivery.tries}


def _no_target(key: str, name: str, why: str) -> Report:
    return {"key": key, "target": name, "tries": 0, "outcome": "gave_up", "error": why}


STDOUT = 1
MOST_AT_ONCE = 8
"""Maximum attempts at the same time."""
BATCH_S = 30.0
"""No attempt begins later than this: alerts since then go with the next batch."""


def main(argument: str) -> None:
    """Send the alerts on stdin."""
    # Ctrl-C in the terminal of a foreground daemon reaches its children too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Sender(decode(argument, SenderOptions), sys.stdin.buffer.read()).serve()


class Sender:
    """Sends and reports.

    Args: orders: one AlertOrder a line.
    """

    def __init__(self, options: SenderOptions, orders: bytes) -> None:
        now = time.time()
        self._settings = options.settings
        self._receipts = options.receipts
        self._end = time.monotonic() + BATCH_S
        self._is_heard = True
        self._under_way: dict[str, tuple[Delivery, SendAttempt]] = {}
        """By target."""
        file = options.file or paths.notify_file()
        rests = {target: replace(rest, until=now + rest.until) for target, rest in options.rests.items()}
        lines = [decode(line, AlertOrder) for line in orders.splitlines()]
        self._batch = AlertBatch(lines, rests, self._settings, lambda: read_targets(file, self._settings.mail), now)

    def serve(self) -> None:
        """Run until nothing is under way and nothing can begin."""
        self._report(self._batch.reports)
        while self._begin() or self._under_way:
            self._wait()
            self._collect()
        self._report([{"next_s": self._batch.next_s(time.time())}])

    def _begin(self) -> bool:
        """Begin as many attempts as allowed; returns whether there was any."""
        has_begun = False
        while self._is_heard and len(self._under_way) < MOST_AT_ONCE and time.monotonic() < self._end:
            delivery = self._batch.pick(time.time(), self._under_way)
            if delivery is None:
                break
            letter = self._batch.letter(delivery)
            told = json.dumps([delivery.order.alert.key, delivery.target]).encode() + b"\n"
            try:
                attempt = SendAttempt(
                    letter.url, letter.title, letter.body, self._settings.timeout_s, (self._receipts, told)
                )
            except OSError as error:
                result = SendResult(False, f"cannot start a process: {error.strerror}")
                self._report(self._batch.settle(delivery, result, time.time()))
                continue
            self._under_way[delivery.target] = (delivery, attempt)
            has_begun = True
        return has_begun

    def _wait(self) -> None:
        events = select.poll()
        if self._is_heard:
            # Only to see that the daemon has closed its end.
            events.register(STDOUT, 0)
        now = time.monotonic()
        wait_s = self._settings.timeout_s
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
