"""One batch of a user's alerts: each goes to each of its targets, the oldest first, until the target fails.

A target that fails rests as a whole, longer from failure to failure: one try stands for all that waits for it. How
long targets rest, and how often an alert was tried, is what the daemon is told and tells the next batch. Pure: what
is sent, and the clock, are the sender's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpusched.lifecycle.alerting import BACKOFF_FACTOR
from gpusched.lifecycle.retry import backoff_s
from gpusched.model.job import RetryRule
from gpusched.notify.sending import Result
from gpusched.notify.targets import Target, Targets, TargetsError
from gpusched.notify.terminals import BUILT_IN
from gpusched.notify.words import fill

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
