"""What a worker still has to send: each alert to each of its targets, with tries, waits and an end to them.

A target that fails rests as a whole, longer from failure to failure, and what waits for it costs nothing meanwhile,
however much that is. Nothing here sends or reads a clock; the worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from gpusched.model.job import RetryRule
from gpusched.notify.sending import Result
from gpusched.notify.targets import Target, Targets, TargetsError
from gpusched.notify.terminals import BUILT_IN
from gpusched.notify.words import fill
from gpusched.policy.life.alerting import BACKOFF_FACTOR
from gpusched.policy.life.retry import backoff_s

Order = dict[str, Any]
"""An alert as the daemon hands it over: key, event, counts_as, at, facts, targets, settled."""

Report = dict[str, Any]
"""What the daemon is told: key, and either `done`, or target, outcome (told, failed, gave_up), error, tries, next_s."""

FILE = ""
"""In place of a target: the file itself cannot be used now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard to try, in seconds, from `[alert]`."""

    timeout_s: float
    backoff_s: float
    backoff_max_s: float
    give_up_s: float


@dataclass(slots=True)
class Delivery:
    """One alert for one target."""

    order: Order
    target: str
    due_at: float
    tries: int = 0


@dataclass(slots=True)
class _Line:
    """What waits for one target."""

    target: str
    waiting: list[tuple[float, float, str]] = field(default_factory=list)
    """(when it is due, instant of the alert, its key), a heap."""
    failures: int = 0
    """In a row, whichever alerts they were about."""
    not_before: float = float("-inf")
    """Until then the target rests."""

    @property
    def due_at(self) -> float | None:
        return max(self.waiting[0][0], self.not_before) if self.waiting else None


@dataclass(frozen=True, slots=True)
class Letter:
    """What is to be sent."""

    url: str
    title: str
    body: str


class Deliveries:
    """All that is open, and what becomes of it.

    Args: read: the user's targets, anew for each look. Raises: TargetsError.
    """

    def __init__(self, limits: Limits, read: Callable[[], Targets]) -> None:
        self._limits = limits
        self._read = read
        self._open: dict[str, dict[str, Delivery]] = {}
        """By alert and target."""
        self._lines: dict[str, _Line] = {}
        """By target; a delivery that was picked is in none."""

    def take(self, order: Order, now: float) -> list[Report]:
        """Take in one alert; one that is open already is left as it is."""
        if order["key"] in self._open:
            return []
        self._open[order["key"]] = {}
        return self._spread(order, now, tries=0)

    def next_due(self, busy: Collection[str]) -> float | None:
        """When the next delivery to a target that is not busy is due."""
        return min((due_at for due_at, _ in self._idle(busy)), default=None)

    def pick(self, now: float, busy: Collection[str]) -> Delivery | None:
        """Take out the delivery that is due first, to a target that is not busy; it has to be settled."""
        due_at, target = min(self._idle(busy), default=(now, None))
        if target is None or due_at > now:
            return None
        _, _, key = heappop(self._lines[target].waiting)
        return self._open[key][target]

    def _idle(self, busy: Collection[str]) -> list[tuple[float, str]]:
        lines = ((line.due_at, line.target) for line in self._lines.values() if line.target not in busy)
        return [(due_at, target) for due_at, target in lines if due_at is not None]

    def _queue(self, delivery: Delivery) -> None:
        order = delivery.order
        self._open[order["key"]][delivery.target] = delivery
        heappush(self._line(delivery.target).waiting, (delivery.due_at, order["at"], order["key"]))

    def _line(self, target: str) -> _Line:
        return self._lines.setdefault(target, _Line(target))

    def letter(self, delivery: Delivery, now: float) -> tuple[Letter | None, list[Report]]:
        """What to send for this delivery; None with reports when there is nothing to send any more."""
        order = delivery.order
        if delivery.target == FILE:
            del self._open[order["key"]][FILE]
            return None, self._spread(order, now, delivery.tries)
        try:
            targets = self._targets_of(order)
        except TargetsError as error:
            return None, self.settle(delivery, Result(False, error.message), now)
        target = targets.named(delivery.target)
        if target is None:
            return None, self.settle(delivery, Result(False, "it is no longer in the file", is_final=True), now)
        title, body = targets.words_for(target, order["event"])
        facts = order["facts"]
        return Letter(target.url, " ".join(fill(title, facts).split()), fill(body, facts)), []

    def settle(self, delivery: Delivery, result: Result, now: float) -> list[Report]:
        """Take in the result of a try: done, another try later, or given up."""
        delivery.tries += 1
        line = self._line(delivery.target)
        if result.is_told:
            self._is_well(line)
            return self._close(delivery, {"outcome": "told"})
        gave_up = {"error": result.error, "outcome": "gave_up"}
        if result.is_final:
            return self._close(delivery, gave_up)
        if now >= line.not_before:
            line.failures += 1
            line.not_before = now + self._wait_s(line.failures, delivery.order)
        delivery.due_at = now + self._wait_s(delivery.tries, delivery.order)
        if self._is_too_old(delivery.order, delivery.due_at):
            reports = self._close(delivery, gave_up)
        else:
            self._queue(delivery)
            next_s = max(delivery.due_at, line.not_before) - now
            reports = [{**_report(delivery), "error": result.error, "outcome": "failed", "next_s": next_s}]
        return [*reports, *self._give_up_old(line, gave_up)]

    def _wait_s(self, tries: int, order: Order) -> float:
        limits = self._limits
        rule = RetryRule(backoff_s=limits.backoff_s, backoff_factor=BACKOFF_FACTOR, backoff_max_s=limits.backoff_max_s)
        return backoff_s(rule, tries, sum(order["key"].encode()))

    def _is_too_old(self, order: Order, at: float) -> bool:
        return bool(at >= order["at"] + self._limits.give_up_s)

    def _give_up_old(self, line: _Line, gave_up: Report) -> list[Report]:
        """What would be too old when its turn comes shares the fate of what was just tried in vain."""
        old: list[tuple[float, float, str]] = []
        kept: list[tuple[float, float, str]] = []
        for entry in line.waiting:
            delivery = self._open[entry[2]][line.target]
            is_too_old = self._is_too_old(delivery.order, max(entry[0], line.not_before))
            (old if is_too_old else kept).append(entry)
        if not old:
            return []
        line.waiting = kept
        heapify(line.waiting)
        return [report for _, _, key in sorted(old) for report in self._close(self._open[key][line.target], gave_up)]

    def _is_well(self, line: _Line) -> None:
        line.failures, line.not_before = 0, float("-inf")
        if not line.waiting:
            self._lines.pop(line.target, None)

    def _close(self, delivery: Delivery, outcome: Report) -> list[Report]:
        del self._open[delivery.order["key"]][delivery.target]
        return [{**_report(delivery), **outcome}, *self._done(delivery.order)]

    def _spread(self, order: Order, now: float, tries: int) -> list[Report]:
        """Find out whom the alert is for."""
        key = order["key"]
        try:
            targets = self._targets_of(order)
        except TargetsError as error:
            delivery = self._open[key][FILE] = Delivery(order, FILE, now, tries)
            return self.settle(delivery, Result(False, error.message), now)
        self._is_well(self._line(FILE))
        reports: list[Report] = []
        for name in self._names(order, targets, reports):
            if name not in order["settled"]:
                self._queue(Delivery(order, name, now))
        return [*reports, *self._done(order)]

    def _targets_of(self, order: Order) -> Targets:
        """What the file says, which those that everybody has do not need. Raises: TargetsError."""
        asked: list[str] = order["targets"]
        return Targets(FILE, exists=False) if asked and all(name in BUILT_IN for name in asked) else self._read()

    def _names(self, order: Order, targets: Targets, reports: list[Report]) -> list[str]:
        """Targets of the alert; why there is nobody is added to the reports."""
        asked: list[str] = order["targets"]
        found: list[Target] = []
        for name in asked:
            target = targets.named(name)
            if target is None:
                reports.append(_nobody(order["key"], name, targets.why_nobody(name)))
            elif target.takes(order["counts_as"]):
                found.append(target)
        if not asked:
            found = [target for target in targets.targets.values() if target.takes(order["counts_as"])]
            if not targets.targets:
                reports.append(_nobody(order["key"], FILE, targets.why_nobody()))
        return [target.name for target in found]

    def _done(self, order: Order) -> list[Report]:
        if self._open[order["key"]]:
            return []
        del self._open[order["key"]]
        return [{"key": order["key"], "done": True}]


def _report(delivery: Delivery) -> Report:
    return {"key": delivery.order["key"], "target": delivery.target, "tries": delivery.tries}


def _nobody(key: str, name: str, why: str) -> Report:
    return {"key": key, "target": name, "tries": 0, "outcome": "gave_up", "error": why}
