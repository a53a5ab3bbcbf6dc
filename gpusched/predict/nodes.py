"""What ended runs say about nodes: where jobs like this one fail, where they take longer, where their data was read.

Only runs of the same user count, so users cannot steer the jobs of others. Runs of the family count first; on nodes
where it has none, failures of the user's other jobs count half. A run counts half after `HALF_LIFE_S`, and not at all
after `KEPT_S`.

Failures speak against a node only if they are the node's: a cause (exit code, signal) that the family has also shown
on another node is the job's own, and such runs say nothing. With the smoothed frequencies of failure `p` here and `q`
on all other nodes, a result takes (1 - q) / (1 - p) times as long here, as failed runs are repeated.

Run times speak against a node if three of four runs here take longer than three of four elsewhere: lengths of one
program differ by chance, and means would follow its arguments. They are compared at the speed of the reference GPU.

Sources: the smoothing is that of Jeffreys' prior, Beta(1/2, 1/2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import TypeVar

from gpusched.model.leaning import NEAR_POINTS, LeaningReason, NodeLeaning, points_of
from gpusched.model.units import format_duration, plural
from gpusched.model.value import Value
from gpusched.predict.family import Family

HALF_LIFE_S = 2 * 86400.0
KEPT_S = 14 * 86400.0
RUNS_KEPT = 20
"""Newest runs that count, per family and node."""
USER_RUNS_KEPT = 50
"""The same of all jobs of a user."""
MOST_FAMILIES = 5000
"""Beyond this, the families (users, data sets) least recently active are dropped."""
LEAST_RUNS = 4
"""With fewer completed runs here or elsewhere, run times are not compared."""
SLOWER = 1.2
"""A smaller ratio of run times says nothing."""
MOST_AGAINST, MOST_AGAINST_SLOW = 8, 4
"""Bounds on the points against a node, in all and for its run times."""


class NodeRun(Value):
    """One ended run on one node."""

    node: str
    ended_at: float
    run_s: float = 0.0
    """Of a completed run, at the speed of the reference GPU."""
    cause: Hashable = None
    """What the failure is recognised by; None for a completed run."""
    data: tuple[str, ...] = ()
    """Data sets of --near."""


_Mark = TypeVar("_Mark", bound=Hashable)
_Runs = dict[str, deque[NodeRun]]
"""Newest runs by node, oldest first."""


class NodeHistory:
    """The newest ended runs of each family and user, by node."""

    def __init__(self) -> None:
        self._families: dict[Family, _Runs] = {}
        self._users: dict[str, _Runs] = {}
        self._read: dict[tuple[str, str], dict[str, float]] = {}
        """Last completed run by user and data set, by node."""
        self._known: dict[str, dict[object, NodeLeaning]] = {}
        """Cache by user."""
        self._as_of = 0.0

    def learn(self, kind: Family, run: NodeRun) -> bool:
        """Take in an ended run; return whether it says something about jobs of other families of the user."""
        self._known.pop(kind.user, None)
        _put(self._families, kind, run, RUNS_KEPT)
        # A family is compared with itself only: another program has other causes.
        own = NodeRun(run.node, run.ended_at, cause=None if run.cause is None else (kind, run.cause))
        _put(self._users, kind.user, own, USER_RUNS_KEPT)
        if run.cause is not None:
            return True
        for name in run.data:
            nodes = self._read.pop((kind.user, name), {})
            nodes[run.node] = max(run.ended_at, nodes.get(run.node, 0.0))
            self._read[kind.user, name] = nodes
            if len(self._read) > MOST_FAMILIES:
                del self._read[next(iter(self._read))]
        return bool(run.data)

    def learn_older(self, runs: Iterable[tuple[Family, NodeRun]]) -> None:
        """Add runs that ended before every known one, oldest first."""
        older = NodeHistory()
        for kind, run in runs:
            older.learn(kind, run)
        self._known.clear()
        _prepend(self._families, older._families, RUNS_KEPT)
        _prepend(self._users, older._users, USER_RUNS_KEPT)
        for mark, nodes in older._read.items():
            self._read[mark] = {**nodes, **self._read.get(mark, {})}

    def leaning(self, kind: Family, data: Sequence[str], at: float) -> NodeLeaning | None:
        """What speaks for and against nodes for a job of this family with this --near; None: nothing.

        Args: at: instant from which the age of runs counts; equal for many calls, as results are kept for it.
        """
        if at != self._as_of:
            self._known.clear()
            self._as_of = at
        mark = kind, tuple(data)
        known = self._known.setdefault(kind.user, {})
        found = known.get(mark)
        if found is None:
            points: dict[str, int] = {}
            for one in self._against(kind, at):
                points[one.node] = max(-MOST_AGAINST, points.get(one.node, 0) + one.points)
            read = sorted((node, name) for name in data for node in self._reads(kind.user, name, at))
            found = known[mark] = NodeLeaning(tuple(sorted(points.items())), tuple(read))
        return found if found.points or found.read else None

    def reasons(self, kind: Family, data: Sequence[str], at: float) -> list[LeaningReason]:
        """The same as sentences, by node."""
        found = self._against(kind, at)
        for name in data:
            for node, read_at in self._reads(kind.user, name, at).items():
                text = f"your job read {name} there {format_duration(max(0.0, at - read_at))} ago"
                found.append(LeaningReason(node, NEAR_POINTS, text))
        return sorted(found, key=lambda one: (one.node, one.points))

    def is_known_data(self, user: str, name: str, at: float) -> bool:
        """Whether a job of this user with this data set has completed lately."""
        return bool(self._reads(user, name, at))

    def families(self) -> list[Family]:
        """Families with runs, whose age changes what they say."""
        return list(self._families)

    def _reads(self, user: str, name: str, at: float) -> dict[str, float]:
        nodes = self._read.get((user, name), {})
        return {node: read_at for node, read_at in nodes.items() if at - read_at < KEPT_S}

    def _against(self, kind: Family, at: float) -> list[LeaningReason]:
        own = _recent(self._families.get(kind, {}), at)
        all_of_user = _recent(self._users.get(kind.user, {}), at)
        found: list[LeaningReason] = []
        for node in sorted({*own, *all_of_user}):
            if node in own:
                found += filter(None, (_failures(own, node, at, "runs like it"), _slowness(own, node)))
                continue
            of_user = _failures(all_of_user, node, at, "of your runs")
            if of_user is not None and of_user.points <= -2:
                found.append(LeaningReason(node, of_user.points // 2, of_user.text))
        return found


def _put(known: dict[_Mark, _Runs], mark: _Mark, run: NodeRun, most: int) -> None:
    # Moved to the end: the least recently active is dropped first.
    known[mark] = nodes = known.pop(mark, None) or {}
    nodes.setdefault(run.node, deque(maxlen=most)).append(run)
    if len(known) > MOST_FAMILIES:
        del known[next(iter(known))]


def _prepend(known: dict[_Mark, _Runs], older: dict[_Mark, _Runs], most: int) -> None:
    for mark, nodes in older.items():
        newer = known.setdefault(mark, {})
        for node, runs in nodes.items():
            newer[node] = deque((*runs, *newer.get(node, ())), most)


def _recent(nodes: _Runs, at: float) -> dict[str, list[NodeRun]]:
    """Runs that are not too old, by node; nodes without any are left out."""
    found = {node: [run for run in runs if at - run.ended_at < KEPT_S] for node, runs in nodes.items()}
    return {node: runs for node, runs in found.items() if runs}


def _failures(nodes: dict[str, list[NodeRun]], node: str, at: float, noun: str) -> LeaningReason | None:
    """Failures that only this node has shown."""
    seen: dict[Hashable, set[str]] = {}
    for name, runs in nodes.items():
        for run in runs:
            if run.cause is not None:
                seen.setdefault(run.cause, set()).add(name)
    here, there = _Count(), _Count()
    for name, runs in nodes.items():
        for run in runs:
            if run.cause is None or len(seen[run.cause]) == 1:
                (here if name == node else there).add(run, at)
    if not here.failures or here.works >= there.works:
        return None
    points = min(MOST_AGAINST, points_of(there.works / here.works))
    if not points:
        return None
    elsewhere = f", {there.failures} of {there.runs} elsewhere" if there.runs else ""
    text = f"{here.failures} of {here.runs} {noun} failed there{elsewhere}"
    return LeaningReason(node, -points, text)


class _Count:
    """Runs and failures, in numbers and with less weight for older ones."""

    def __init__(self) -> None:
        self.runs = self.failures = 0
        self._runs = self._failures = 0.0

    def add(self, run: NodeRun, at: float) -> None:
        weight = 0.5 ** (max(0.0, at - run.ended_at) / HALF_LIFE_S)
        self.runs += 1
        self._runs += weight
        if run.cause is not None:
            self.failures += 1
            self._failures += weight

    @property
    def works(self) -> float:
        """Smoothed frequency of runs that do not fail."""
        return 1.0 - (self._failures + 0.5) / (self._runs + 1.0)


def _slowness(nodes: dict[str, list[NodeRun]], node: str) -> LeaningReason | None:
    """Whether completed runs take longer on this node."""
    here = sorted(run.run_s for run in nodes[node] if run.cause is None)
    there = sorted(run.run_s for name, runs in nodes.items() if name != node for run in runs if run.cause is None)
    if min(len(here), len(there)) < LEAST_RUNS:
        return None
    if here[len(here) // 4] <= there[-1 - len(there) // 4]:
        return None
    ratio = median(here) / max(1.0, median(there))
    points = min(MOST_AGAINST_SLOW, points_of(max(1.0, ratio)))
    if ratio < SLOWER or not points:
        return None
    text = f"{plural(len(here), 'run')} like it took {ratio:.1f} times as long there as elsewhere"
    return LeaningReason(node, -points, text)
