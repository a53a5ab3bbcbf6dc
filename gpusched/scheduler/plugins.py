"""Extension points for a site's own code in a cycle: plain functions, passed in with the snapshot.

The functions must be as pure as the scheduler: equal inputs, equal answers. The loader also catches their
exceptions; here they are only called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from gpusched.model.cluster import NodeView
from gpusched.model.snapshot import ClassKey, PendingJob, Placement

Sort = Callable[[ClassKey], float]
"""Points added to the priority of a class's jobs."""
Filter = Callable[[ClassKey, NodeView], "str | None"]
"""Why jobs of this class may not run on this node; None if they may."""
Score = Callable[[ClassKey, NodeView], float]
"""Suitability of the node for the class; the highest sum wins, the strategy breaks ties."""
Permit = Callable[[ClassKey, PendingJob, Placement], "str | None"]
"""Why a job with a placement may not start yet; None if it may."""


@dataclass(frozen=True, slots=True)
class Extensions:
    """Functions by name of their plug-in, in order of loading."""

    sorts: tuple[tuple[str, Sort], ...] = ()
    filters: tuple[tuple[str, Filter], ...] = ()
    scores: tuple[tuple[str, Score], ...] = ()
    permits: tuple[tuple[str, Permit], ...] = ()

    def queue_sort(self, key: ClassKey) -> tuple[tuple[str, float], ...]:
        """Name and points of each plug-in for this class."""
        return tuple((name, sort(key)) for name, sort in self.sorts)

    def why_not_node(self, key: ClassKey, node: NodeView) -> str | None:
        """The first plug-in's objection to this node."""
        for name, check in self.filters:
            text = check(key, node)
            if text is not None:
                return f"{name}: {text}"
        return None

    def score(self, key: ClassKey, node: NodeView) -> float:
        """Sum of the scores of all plug-ins for this node."""
        return sum(score(key, node) for _, score in self.scores)

    def why_not_now(self, key: ClassKey, job: PendingJob, place: Placement) -> str | None:
        """The first plug-in's objection to starting this job now."""
        for name, permit in self.permits:
            text = permit(key, job, place)
            if text is not None:
                return f"{name}: {text}"
        return None

    def asked_once(self) -> Extensions:
        """The same functions, memoized, as they are pure; permits are called each time."""
        if not (self.sorts or self.filters or self.scores):
            return self
        return Extensions(
            tuple((name, cache(sort)) for name, sort in self.sorts),
            tuple((name, cache(check)) for name, check in self.filters),
            tuple((name, cache(score)) for name, score in self.scores),
            self.permits,
        )


NO_EXTENSIONS = Extensions()
