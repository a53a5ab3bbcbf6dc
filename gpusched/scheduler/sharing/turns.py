"""Whose turn it is below a limit that several jobs share, and who may pass meanwhile.

Without turns a wide job could wait for ever below the maximum of its queue: whenever one of the others ends, a small
one takes its place. So the first job below a limit that waits, for the limit or for a place, is promised what the
limit leaves once enough of what counts against it has ended. A later job that counts as well may start if it has ended
by then, or if the limit has room for both: EASY backfill (see `profile`) of a number in place of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gpusched.model.resources import Resources
from gpusched.model.snapshot import ClassKey
from gpusched.scheduler.sharing.limits import JOBS, Limit
from gpusched.scheduler.sharing.queues import amount_of
from gpusched.scheduler.sharing.quota import Quotas


@dataclass(frozen=True, slots=True)
class Runner:
    """A running job as limits see it. `end_at` is infinite without a time limit."""

    queue: str
    user: str
    qos: str
    amount: Resources
    start_at: float
    end_at: float


@dataclass(slots=True)
class Turn:
    """The job that is next below a limit."""

    job_id: int
    limit: Limit
    pass_until: float
    """Who has ended by then is not in its way."""
    spare: int
    """What the limit has left then, beside what this job needs."""
    is_open: bool = False
    """Whether that instant moves with the time: nobody knows when a job without a time limit ends."""


class Turns:
    """Those of one cycle: at most one below each limit, the first in line."""

    def __init__(self, quotas: Quotas, now: float, running: Callable[[], Iterable[Runner]]) -> None:
        self._quotas = quotas
        self._now = now
        self._running = running
        self._started: list[Runner] = []
        self._by_user: dict[str | None, list[Runner]] = {}
        """Those that run or were started in this cycle, under None all of them; empty until a job waits."""
        self._turns: dict[Limit, Turn] = {}

    def wait(self, job_id: int, limit: Limit, amount: Resources, start_at: float = inf) -> None:
        """This job counts against the limit and waits; it is next below it unless another was before.

        Args: start_at: when a place is kept for it; infinite when the limit alone keeps it waiting.
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
        self._turns[limit] = Turn(job_id, limit, until, limit.most - held - needed, is_open)

    def hold_at(self, now: float) -> bool:
        """Whether all of them are at a later instant what they were."""
        return all(not turn.is_open and turn.pass_until > now for turn in self._turns.values())

    def move_to(self, now: float) -> None:
        """Time has passed."""
        self._now = now

    def _counted(self, limit: Limit) -> list[Runner]:
        if not self._by_user:
            for one in (*self._running(), *self._started):
                self._add(one)
        quotas, of_user = self._quotas, self._by_user.get(limit.user, ())
        return [one for one in of_user if quotas.is_under(limit, one.queue, one.user, one.qos)]

    def _add(self, one: Runner) -> None:
        for user in (None, one.user):
            self._by_user.setdefault(user, []).append(one)

    def _pass_until(self, ended: Sequence[Runner]) -> float:
        """As for reservations: nobody knows when a job without a limit ends, so who passes is short beside it."""
        last = max((one.end_at for one in ended), default=self._now)
        if last < inf:
            return max(last, self._now)
        youngest = max(one.start_at for one in ended if one.end_at == inf)
        return self._now + max(0.0, self._now - youngest)

    def in_the_way(self, key: ClassKey, amount: Resources, end_at: float) -> Turn | None:
        """Whose turn a job of this class would delay that starts now and runs until then; None when nobody's."""
        for turn in self._met_by(key, end_at):
            if _share(turn.limit, amount) > turn.spare:
                return turn
        return None

    def started(self, key: ClassKey, amount: Resources, end_at: float) -> None:
        """A job of this class has started."""
        for turn in self._met_by(key, end_at):
            turn.spare -= _share(turn.limit, amount)
        one = Runner(key.queue, key.user, key.qos, amount, self._now, end_at)
        self._started.append(one)
        if self._by_user:
            self._add(one)

    def _met_by(self, key: ClassKey, end_at: float) -> list[Turn]:
        if not self._turns:
            return []
        quotas = self._quotas
        return [
            turn
            for turn in self._turns.values()
            if end_at > turn.pass_until and quotas.is_under(turn.limit, key.queue, key.user, key.qos)
        ]


def _share(limit: Limit, amount: Resources) -> int:
    """What a job with this amount takes of the limit."""
    return 1 if limit.kind == JOBS else amount_of(amount)[limit.kind]
