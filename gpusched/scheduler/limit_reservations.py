"""Reservations below limits: the first job that waits below the limit of a queue or QOS is not passed for ever.

Without them a wide job could wait forever below the maximum of its queue: whenever a job ends, a small one takes its
place. So the first job blocked below a limit, by the limit or for lack of room, is promised the rest of the limit once
enough jobs counting against it have ended. A later job that counts as well may start if it ends by then, or if the
limit has room for both: EASY backfill (see `timeline`) of a number instead of machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar

from gpusched.model.cluster import JobTerms
from gpusched.model.mentions import JOB, mention_job, mentioned_name
from gpusched.model.resources import Resources
from gpusched.model.states import ReasonCode
from gpusched.scheduler.gates import Gate
from gpusched.scheduler.limits import JOBS, Denial, Limit, amount_of

if TYPE_CHECKING:
    from gpusched.scheduler.queue import JobClass
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.state import PlannerState


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A running job as seen by limits. `end_at` is infinite without a time limit."""

    terms: JobTerms
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


class LimitReservations(Gate):
    """The reservations of one cycle: at most one below each limit, for the first job in line."""

    examines_all: ClassVar[bool] = False

    def __init__(self, cycle: Cycle) -> None:
        super().__init__(cycle)
        self._quotas = cycle.quotas
        self._started: list[CountedRun] = []
        self._by_user: dict[str | None, list[CountedRun]] = {}
        """Jobs running or started in this cycle, under None all of them; empty until a job waits."""
        self._made: dict[Limit, LimitReservation] = {}

    @staticmethod
    def is_in_force(planner: PlannerState) -> bool:
        return planner.counts_quotas

    def wait(self, job_id: int, limit: Limit, amount: Resources, start_at: float = inf) -> None:
        """Record a blocked job that counts against the limit; it is next below it unless another came first.

        Args: start_at: start of its reserved room; infinite if only the limit blocks it.
        """
        if limit in self._made:
            return
        counted, now = self._counted(limit), self._cycle.now
        counted.sort(key=lambda one: (max(one.end_at, now), one.start_at))
        needed = _share(limit, amount)
        held = sum(_share(limit, one.amount) for one in counted)
        ended = 0
        while ended < len(counted) and (held + needed > limit.most or counted[ended].end_at <= start_at < inf):
            held -= _share(limit, counted[ended].amount)
            ended += 1
        until = self._pass_until(counted[:ended])
        if start_at < inf:
            until = max(until, start_at)
        is_open = until <= now or any(one.end_at == inf for one in counted[:ended])
        self._made[limit] = LimitReservation(job_id, limit, until, limit.most - held - needed, is_open)

    def holds_until(self, now: float) -> bool:
        return all(not one.is_open and one.pass_until > now for one in self._made.values())

    def _counted(self, limit: Limit) -> list[CountedRun]:
        if not self._by_user:
            for _, run in self._cycle.planner.runs_before(self._cycle):
                running = run.running
                self._add(CountedRun(run.terms, run.amount, running.start_at, running.end_at))
            for one in self._started:
                self._add(one)
        quotas, of_user = self._quotas, self._by_user.get(limit.user, ())
        return [one for one in of_user if quotas.is_under(limit, one.terms)]

    def _add(self, one: CountedRun) -> None:
        for user in (None, one.terms.user):
            self._by_user.setdefault(user, []).append(one)

    def _pass_until(self, ended: Sequence[CountedRun]) -> float:
        """As for reservations: the end of a job without a limit is unknown, so only relatively short jobs may pass."""
        now = self._cycle.now
        last = max((one.end_at for one in ended), default=now)
        if last < inf:
            return max(last, now)
        youngest = max(one.start_at for one in ended if one.end_at == inf)
        return now + max(0.0, now - youngest)

    def why_not(self, job_class: JobClass) -> Denial | None:
        """Another job is next below a limit that this one would use up.

        A job need not leave its queue's guarantee to others.
        """
        if not self._made:
            return None
        terms, wanted, quotas = job_class.key.terms, job_class.wanted, self._quotas
        met = self._met_by(terms, self._cycle.relied_end_of(job_class))
        first = next((one for one in met if _share(one.limit, wanted) > one.spare), None)
        if first is None or (quotas.is_capacity and quotas.is_within_guarantee(terms.queue, wanted)):
            return None
        name, limit = self._cycle.name_of(first.job_id), first.limit
        what = f"{'QOS' if limit.where == 'qos' else 'queue'} {limit.name}"
        who = "" if limit.user is None else f"user {limit.user} in "
        text = f"would use up what {who}{what} may still hold, and {mention_job(name)} goes first"
        return Denial(ReasonCode.PRIORITY, text, {"behind": mentioned_name(JOB, name)})

    def started(self, job_class: JobClass, amount: Resources, end_at: float, *, is_filler: bool) -> None:
        terms = job_class.key.terms
        for one in self._met_by(terms, end_at):
            one.spare -= _share(one.limit, amount)
        run = CountedRun(terms, amount, self._cycle.now, end_at)
        self._started.append(run)
        if self._by_user:
            self._add(run)

    def _met_by(self, terms: JobTerms, end_at: float) -> list[LimitReservation]:
        """Those that a job on these terms would delay if it ran from now until then and took more than they spare."""
        quotas = self._quotas
        return [one for one in self._made.values() if end_at > one.pass_until and quotas.is_under(one.limit, terms)]


def _share(limit: Limit, amount: Resources) -> int:
    """Amount of this job that counts against the limit."""
    return 1 if limit.kind == JOBS else amount_of(amount)[limit.kind]
