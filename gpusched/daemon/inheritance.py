"""What waiting jobs pass on to those that they wait for, so that no urgent job is held up by a lazy one.

A job inherits, part by part, the lowest nice value and the QOS of the highest tier among itself and the
jobs that wait for it to end, and passes the result on in turn. Kept up to date edge by edge: a change
walks up the ancestors only as far as it changes anything.

Source: priority inheritance, Sha, Rajkumar, Lehoczky, IEEE Trans. Computers 39 (1990).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpusched.model.snapshot import Urgency

Targets = tuple[int, ...]
"""Jobs that are waited for."""


class Inheritance:
    """Who inherits what. Only jobs that wait for others, and those others, cost anything.

    `own` gives a job's own urgency, None when it is not active; `tiers` the tier of each QOS, 0 when it
    is not named.
    """

    def __init__(self, own: Callable[[int], Urgency | None], tiers: Mapping[str, int]) -> None:
        self._own = own
        self._tiers = tiers
        self._passed: dict[int, tuple[Urgency, Targets]] = {}
        """What each waiting job passes on, and to whom."""
        self._received: dict[int, dict[Urgency, int]] = {}
        """What each job is passed, and by how many jobs; ten thousand equal ones cost as much as one."""

    def inherited(self, job_id: int) -> Urgency | None:
        """What makes a job more urgent than it is by itself; None when nothing does."""
        own = self._own(job_id) if job_id in self._received else None
        if own is None:
            return None
        joined = self._joined(job_id, own)
        return None if joined == own else joined

    def settle(self, job_id: int, targets: Targets) -> set[int]:
        """The job waits for these now, or its own urgency changed; returns the jobs that inherit something else."""
        changed: set[int] = set()
        work = [(job_id, targets)]
        while work:
            giver, wanted = work.pop()
            own = self._own(giver) if wanted else None
            before = self._passed.get(giver)
            after = None if own is None else (self._joined(giver, own), wanted)
            if before == after:
                continue
            touched = dict.fromkeys((*(before[1] if before else ()), *(after[1] if after else ())))
            inherited = {taker: self.inherited(taker) for taker in touched}
            self._replace(giver, before, after)
            for taker, was in inherited.items():
                if self.inherited(taker) != was:
                    changed.add(taker)
                    if taker in self._passed:
                        work.append((taker, self._passed[taker][1]))
        return changed

    def _replace(
        self, giver: int, before: tuple[Urgency, Targets] | None, after: tuple[Urgency, Targets] | None
    ) -> None:
        if before is not None:
            urgency, targets = before
            del self._passed[giver]
            for taker in targets:
                received = self._received[taker]
                received[urgency] -= 1
                if not received[urgency]:
                    del received[urgency]
                if not received:
                    del self._received[taker]
        if after is not None:
            urgency, targets = after
            self._passed[giver] = after
            for taker in targets:
                received = self._received.setdefault(taker, {})
                received[urgency] = received.get(urgency, 0) + 1

    def _joined(self, job_id: int, own: Urgency) -> Urgency:
        """The most urgent parts of a job's own and of what it is passed; its own QOS among equal tiers."""
        received = self._received.get(job_id)
        if not received:
            return own
        nice = min(own.nice, *(urgency.nice for urgency in received))
        # By tier, then by name, so that the order of arrival decides nothing.
        tier, qos = min((-self._tiers.get(urgency.qos, 0), urgency.qos) for urgency in received)
        return Urgency(nice, qos if -tier > self._tiers.get(own.qos, 0) else own.qos)
