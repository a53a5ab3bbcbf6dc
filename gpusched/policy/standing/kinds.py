"""Jobs that are alike, and what is worked out once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from gpusched.model.cluster import Allocation
from gpusched.model.snapshot import ClassKey, PendingJob, Placement
from gpusched.model.value import replace
from gpusched.policy.draft import Booking
from gpusched.policy.need import Need
from gpusched.policy.ordering import Rank
from gpusched.policy.profile import Ending
from gpusched.policy.standing.shares import Amounts, Sharer
from gpusched.policy.wanted import insistence, micros_asked


class Kind:
    """A class of jobs that waits here, with what is worked out once for all of them."""

    __slots__ = (
        *("insists", "is_limited", "is_of_cores", "is_plain", "key", "limit_s", "micros", "planned_s"),
        *("backfill_by", "relied_s"),
        *("points", "rate", "row", "shape", "sharer", "waiting"),
    )

    def __init__(
        self, key: ClassKey, row: Row, sharer: Sharer, points: float, *, backfill_by: str, is_of_cores: bool
    ) -> None:
        request = key.request
        self.key = key
        self.row = row
        self.shape = row.shape
        self.sharer = sharer
        self.insists, self.micros = insistence(request), micros_asked(request)
        """What it counts for in what is `wanted`."""
        self.points = points
        """Of the weighted sum, all but those for age and fair share."""
        self.rate: Amounts | None = None
        """What one of these is charged for, a second, where that is the same wherever it runs."""
        self.waiting = 0
        """How many of these wait."""
        self.backfill_by = backfill_by
        self._tell_lengths()
        self.limit_s: float = inf if key.time_limit_s is None else key.time_limit_s
        self.is_limited = key.time_limit_s is not None
        """Whether it is ended at some time, as planned or later."""
        self.is_of_cores = is_of_cores and self.is_limited
        """Whether free cores of the only node are all that it takes, and until when is known."""
        self.is_plain = not (
            request.licenses
            or request.resources
            or request.is_exclusive
            or key.reservation
            or key.throttle
            or key.qos
            or key.inherited
            or key.is_front
            or key.deadline_at is not None
        )

    def foresee(self, predicted_s: int | None, plan_s: int | None) -> None:
        """Take these for how long it is expected and planned to run."""
        self.key = replace(self.key, predicted_s=predicted_s, plan_s=plan_s)
        self._tell_lengths()
        self.row.shortest_s = min(self.row.shortest_s, self.relied_s)

    def _tell_lengths(self) -> None:
        planned_s, relied_s = self.key.planned_s, self.key.relied_s(self.backfill_by)
        self.planned_s: float = inf if planned_s is None else planned_s
        self.relied_s: float = inf if relied_s is None else relied_s
        """As what is kept for others relies on it."""


class Row:
    """Waiting jobs of one shape that keep their places among each other, first in line first.

    By weight those of one user that have as many points beside age: whoever came first stays first, whatever time and
    use do to all of them. In other orders all of the shape.
    """

    __slots__ = ("by_length", "is_of_one_kind", "line", "rank", "shape", "sharer", "shortest_s")

    def __init__(self, shape: Shape, sharer: Sharer, *, is_of_one_kind: bool, is_by_length: bool) -> None:
        self.shape = shape
        self.sharer = sharer
        self.is_of_one_kind = is_of_one_kind
        self.line: list[Waiting] = []
        self.by_length: list[Waiting] = [] if is_by_length else self.line
        """The same jobs in the order in which they may fill gaps."""
        self.rank: Rank = ()
        """Of the first."""
        self.shortest_s = inf
        """None of them is relied upon to be over sooner."""


class Shape:
    """All jobs that fit in exactly the same places."""

    __slots__ = (
        *("booking", "can_fit", "cards", "epoch", "millicpus", "need"),
        *("only", "passes", "passes_of", "placement", "rows"),
    )

    def __init__(self, need: Need) -> None:
        request = need.request
        self.need = need
        self.rows: dict[Row, None] = {}
        """Those in which somebody waits."""
        self.millicpus = need.millicpus
        self.cards = 0 if need.is_slice else request.gpus
        self.booking: Booking | None = None
        """The best place now."""
        self.epoch = -1
        """Of which `booking` is; it holds until somebody starts or ends."""
        self.only: Booking | None = None
        """Where there can be no more than one place, that one, once it was found."""
        self.placement: Placement | None = None
        """As the rest of the program knows it."""
        self.can_fit: bool | None = None
        """Whether it fits when nobody else is there; None before that was asked."""
        self.passes = False
        """Whether one of these may run past the only reservation."""
        self.passes_of = -1
        """The epoch of which that is."""

    def on_the_only_node(self) -> Booking:
        """The only place that cores of one node can be taken from."""
        return self.only or Booking(0, self.need.uid, self.millicpus, 0, ())


Waiting = tuple[Rank, PendingJob, Kind]
"""Ranks end in the job's id, so that no comparison goes beyond them. In a row by arrival they are of that alone."""

Place = tuple[Rank, int, Row]
"""Where a job stands in its row, with its rank."""


class Running:
    """A job that runs."""

    __slots__ = ("ending", "is_guessed", "kind", "placement", "rate")

    def __init__(self, kind: Kind, ending: Ending, placement: Placement) -> None:
        self.is_guessed = not kind.is_limited or kind.key.plan_s is not None
        """Whether it was not planned by its limit, whatever is thought of its kind by now."""
        self.rate: Amounts = 0.0, 0.0, 0.0, 0.0
        """What its user is charged for, a second."""
        self.kind = kind
        self.ending = ending
        self.placement = placement

    def allocations(self) -> Iterator[Allocation]:
        """What it holds on each of its nodes."""
        key, ending = self.kind.key, self.ending
        end_at = None if ending.end_at == inf else ending.end_at
        for place in (self.placement, *self.placement.others):
            yield Allocation(
                ending.job_id,
                key.uid,
                place.node,
                place.gpus,
                place.cpus,
                place.mem_mib,
                ending.start_at,
                None if key.time_limit_s is None else ending.start_at + key.time_limit_s,
                user=key.user,
                account=key.account,
                queue=key.queue,
                qos=key.qos,
                resources=place.resources,
                licenses=place.licenses,
                is_exclusive=place.is_exclusive,
                request=key.request,
                predicted_end_at=end_at if ending.end_at < ending.start_at + self.kind.limit_s else None,
            )
