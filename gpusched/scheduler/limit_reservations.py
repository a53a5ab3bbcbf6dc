"""Reservations below limits: the first job that waits below the limit of a queue or QOS is not passed for ever.

Without them a wide job could wait forever below the maximum of its queue: whenever a job ends, a small one takes its
place. So the first job blocked below a limit, by the limit or for lack of room, is promised the rest of the limit once
enough jobs counting against it have ended. A later job that counts as well may start if it ends by then, or if the
limit has room for both: EASY backfill (see `timeline`) of a number instead of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gpusched.model.resources import Resources
from gpusched.model.snapshot import ClassKey
from gpusched.scheduler.limits import JOBS, Limit, amount_of
from gpusched.scheduler.quota import Quotas


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A running job as seen by limits. `end_at` is infinite without a time limit."""

    queue: str
    user: str
    qos: str
    amount: Resources
    start_at: float
    end_at: float


@dataclass(slots=True)
class LimitReservation:
    """The next job to start below a limit."""

    job_id: int
    limit: Limit
    pass_until: float
    """Jobs that end by then do not delay it."""
    spare: int
    """What the limit has left then, beyond this job's need."""
    is_open: bool = False
    """Whether that instant moves with time: the end of a job without a time limit is unknown."""


class LimitReservations:
    """The reservations of one cycle: at most one below each limit, for the first job in line."""

    def __init__(self, quotas: Quotas, now: float, running: Callable[[], Iterable[CountedRun]]) -> None:
        self._quotas = quotas
        self._now = now
        self._running = running
        self._started: list[CountedRun] = []
        self._by_user: dict[str | None, list[CountedRun]] = {}
        """Jobs running or started in this cycle, under None all of them; empty until a job waits."""
        self._turns: dict[Limit, LimitReservation] = {}

    def wait(self, job_id: int, limit: Limit, amount: Resources, start_at: float = inf) -> None:
        """Record a blocked job that counts against the limit; it is next below it unless another came first.

        Args: start_at: start of its reserved room; infinite if only the limit blocks it.
        """
        if limit in self._turns:
            return
        counted = self._counted(limit)
        counted.sort(key=lambda one: (max(one.end_at, self._now), one.start_at))
        needed = _share(limit, amount)
        held = sum(_share(limit, one.amount) for one in counted)
        ended = 0
        while ended < len(counted) and (held + needed > limit.most or counted[ended].end_at <= start_at < inf):
            held -= _share(limit, counted[ended].amount)
            ended += 1
        until = self._pass_until(counted[:ended])
        if start_at < inf:
            until = max(until, start_at)
        is_open = until <= self._now or any(one.end_at == inf for one in counted[:ended])
        self._turns[limit] = LimitReservation(job_id, limit, until, limit.most - held - needed, is_open)

    def hold_at(self, now: float) -> bool:
        """Whether all of them remain the same at a later instant."""
        return all(not turn.is_open and turn.pass_until > now for turn in self._turns.values())

    def move_to(self, now: float) -> None:
        self._now = now

    def _counted(self, limit: Limit) -> list[CountedRun]:
        if not self._by_user:
            for one in (*self._running(), *self._started):
                self._add(one)
        quotas, of_user = self._quotas, self._by_user.get(limit.user, ())
        return [one for one in of_user if quotas.is_under(limit, one.queue, one.user, one.qos)]

    def _add(self, one: CountedRun) -> None:
        for user in (None, one.user):
            self._by_user.setdefault(user, []).append(one)

    def _pass_until(self, ended: Sequence[CountedRun]) -> float:
        """As for reservations: the end of a job without a limit is unknown, so only relatively short jobs may pass."""
        last = max((one.end_at for one in ended), default=self._now)
        if last < inf:
            return max(last, self._now)
        youngest = max(one.start_at for one in ended if one.end_at == inf)
        return self._now + max(0.0, self._now - youngest)

    def in_the_way(self, key: ClassKey, amount: Resources, end_at: float) -> LimitReservation | None:
        """Limit reservation that a job of this class would delay by running from now until then; None for none."""
        for turn in self._met_by(key, end_at):
            if _share(turn.limit, amount) > turn.spare:
                return turn
        return None

    def started(self, key: ClassKey, amount: Resources, end_at: float) -> None:
        """Record that a job of this class has started."""
        for turn in self._met_by(key, end_at):
            turn.spare -= _share(turn.limit, amount)
        one = CountedRun(key.queue, key.user, key.qos, amount, self._now, end_at)
        self._started.append(one)
        if self._by_user:
            self._add(one)

    def _met_by(self, key: ClassKey, end_at: float) -> list[LimitReservation]:
        if not self._turns:
            return []
        quotas = self._quotas
        return [
            turn
            for turn in self._turns.values()
            if end_at > turn.pass_until and quotas.is_under(turn.limit, key.queue, key.user, key.qos)
        ]


def _share(limit: Limit, amount: Resources) -> int:
    """Amount of this job that counts against the limit."""
    return 1 if limit.kind == JOBS else amount_of(amount)[limit.kind]
