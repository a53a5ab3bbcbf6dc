"""What a worker still has to send: each alert to each of its targets, with tries, waits and an end to them.

Nothing here sends or reads a clock; the worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from gpusched.model.job import RetryRule
from gpusched.notify.sending import Result
from gpusched.notify.targets import Target, Targets, TargetsError
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

    def take(self, order: Order, now: float) -> list[Report]:
        """Take in one alert; one that is open already is left as it is."""
        if order["key"] in self._open:
            return []
        self._open[order["key"]] = {}
        return self._spread(order, now, tries=0)

    def next_due(self, busy: Collection[str]) -> float | None:
        """When the next delivery to a target that is not busy is due."""
        return min((one.due_at for one in self._idle(busy)), default=None)

    def pick(self, now: float, busy: Collection[str]) -> Delivery | None:
        """The delivery that is due first, to a target that is not busy."""
        due = [one for one in self._idle(busy) if one.due_at <= now]
        return min(due, key=lambda one: (one.due_at, one.order["at"], one.order["key"]), default=None)

    def _idle(self, busy: Collection[str]) -> list[Delivery]:
        return [one for parts in self._open.values() for one in parts.values() if one.target not in busy]

    def letter(self, delivery: Delivery, now: float) -> tuple[Letter | None, list[Report]]:
        """What to send for this delivery; None with reports when there is nothing to send any more."""
        order = delivery.order
        if delivery.target == FILE:
            del self._open[order["key"]][FILE]
            return None, self._spread(order, now, delivery.tries)
        try:
            targets = self._read()
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
        order, limits = delivery.order, self._limits
        delivery.tries += 1
        report: Report = {"key": order["key"], "target": delivery.target, "tries": delivery.tries}
        if not result.is_told:
            report["error"] = result.error
            rule = RetryRule(
                backoff_s=limits.backoff_s, backoff_factor=BACKOFF_FACTOR, backoff_max_s=limits.backoff_max_s
            )
            wait_s = backoff_s(rule, delivery.tries, sum(order["key"].encode()))
            if not result.is_final and now + wait_s < order["at"] + limits.give_up_s:
                delivery.due_at = now + wait_s
                return [{**report, "outcome": "failed", "next_s": wait_s}]
        report["outcome"] = "told" if result.is_told else "gave_up"
        del self._open[order["key"]][delivery.target]
        return [report, *self._done(order)]

    def _spread(self, order: Order, now: float, tries: int) -> list[Report]:
        """Find out whom the alert is for."""
        key = order["key"]
        try:
            targets = self._read()
        except TargetsError as error:
            delivery = self._open[key][FILE] = Delivery(order, FILE, now, tries)
            return self.settle(delivery, Result(False, error.message), now)
        reports: list[Report] = []
        for name in self._names(order, targets, reports):
            if name not in order["settled"]:
                self._open[key][name] = Delivery(order, name, now)
        return [*reports, *self._done(order)]

    def _names(self, order: Order, targets: Targets, reports: list[Report]) -> list[str]:
        """Targets of the alert; why there is nobody is added to the reports."""
        asked: list[str] = order["targets"]
        found: list[Target] = []
        for name in asked:
            target = targets.named(name)
            if target is None:
                reports.append(_nobody(order["key"], name, _why_not(name, targets)))
            elif target.takes(order["counts_as"]):
                found.append(target)
        if not asked:
            found = [target for target in targets.targets.values() if target.takes(order["counts_as"])]
            if not targets.targets:
                reports.append(_nobody(order["key"], FILE, _why_not(FILE, targets)))
        return [target.name for target in found]

    def _done(self, order: Order) -> list[Report]:
        if self._open[order["key"]]:
            return []
        del self._open[order["key"]]
        return [{"key": order["key"], "done": True}]


def _nobody(key: str, name: str, why: str) -> Report:
    return {"key": key, "target": name, "tries": 0, "outcome": "gave_up", "error": why}


def _why_not(name: str, targets: Targets) -> str:
    if not targets.exists:
        return f"there is no {targets.file}"
    if name == FILE:
        return f"{targets.file} names no target"
    if "@" in name:
        return f"{targets.file} has no mail server, as in: mail = 'mailto://smtp.lab.org'"
    return f"{targets.file} has no target of this name"
