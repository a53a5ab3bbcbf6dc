"""What speaks for and against nodes for a job, in words: for its story, `gq --why` and `gshow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpusched.daemon.watch.history import History
from gpusched.model.cluster import NodeView
from gpusched.model.job import Job, JobEvent
from gpusched.model.leaning import LeaningReason
from gpusched.model.snapshot import Placement
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.filters import reject_name
from gpusched.scheduler.node_costs import reasons_of
from gpusched.scheduler.request_units import RequestUnits

_MOST_AVOIDED = 3
"""Avoided nodes named in a story."""


def leanings(job: Job, layout: ClusterLayout, history: History) -> list[LeaningReason]:
    """What nodes declare and what earlier runs say about them, by node; empty on a single node."""
    if len(layout.nodes) == 1 or not layout.has_leanings:
        return []
    found = reasons_of(layout, RequestUnits.of(job.spec.request, job.uid)) + _learned(job, layout, history)
    return sorted(found, key=lambda one: (one.node, -one.points))


def _learned(job: Job, layout: ClusterLayout, history: History) -> list[LeaningReason]:
    """What earlier runs say about the nodes that the job may use."""
    if not layout.by_history:
        return []
    where = RequestUnits.of(job.spec.request, job.uid).where
    numbers = {one.node: layout.node_number(one.node) for one in history.leaning_reasons(job)}
    usable = {
        name
        for name, number in numbers.items()
        if number is not None and reject_name(layout.nodes[number], where) is None
    }
    return [one for one in history.leaning_reasons(job) if one.node in usable]


def with_leanings(
    story: Sequence[JobEvent], job: Job, placement: Placement, layout: ClusterLayout, history: History
) -> Iterable[JobEvent]:
    """Say in the story of a start what spoke for these nodes, and against the others."""
    has_history = layout.by_history and history.leaning(job) is not None
    if not (job.spec.request.near or has_history or layout.has_speeds):
        return story
    taken = {place.node for place in (placement, *placement.others)}
    found = leanings(job, layout, history)
    texts = [f"{one.node} {one.text}" for one in found if one.node in taken]
    learned = _learned(job, layout, history)
    avoided = [f"{one.node} {one.text}" for one in learned if one.node not in taken and one.points < 0]
    texts += avoided[:_MOST_AVOIDED]
    if not texts:
        return story
    return [replace(one, text=f"{one.text} ({'; '.join(texts)})") for one in story]


def data_notes(
    jobs: Iterable[tuple[str, Sequence[str]]], nodes: Iterable[NodeView], has_read: Callable[[str, str], bool]
) -> list[str]:
    """A note for each data set of --near that no node has and no job of the user has read: it may be misspelt.

    Args: jobs: user and data sets of each new job; has_read: whether a job of a user near a data set has completed.
    """
    declared = sorted({name for node in nodes for name in node.data})
    notes = []
    for user, name in sorted({(user, name) for user, names in jobs for name in names}):
        if name in declared or has_read(user, name):
            continue
        there = f"nodes have: {', '.join(declared)}" if declared else "no node names any in [node] data"
        text = f"no node has data {name}, and no job of yours near it has completed lately"
        notes.append(f"{text}; --near data={name} has no effect yet ({there})")
    return notes
