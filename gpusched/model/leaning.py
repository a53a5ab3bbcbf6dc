"""What speaks for and against nodes for jobs of one class, as an input of the scheduler.

Points compare nodes by the expected time to a result: four points are a factor of two. They choose among nodes with
room and never keep a job from starting.
"""

from __future__ import annotations

from math import log2

from gpusched.model.value import Value

POINTS_OF_TWO = 4
"""Points for a factor of two in expected time."""

NEAR_POINTS = 2
"""For a node that has all data sets named with --near."""


def points_of(factor: float) -> int:
    """Points of an expected time that is `factor` times as long: 2 costs four of them."""
    return round(POINTS_OF_TWO * log2(factor))


class NodeLeaning(Value):
    """What earlier runs say about nodes for jobs of one class."""

    points: tuple[tuple[str, int], ...] = ()
    """Node and points, negative, sorted by node; no entry is 0."""
    read: tuple[tuple[str, str], ...] = ()
    """Node and data set of --near that a job of this user has read there lately, sorted."""


class LeaningReason(Value):
    """Why a node is preferred (points above 0) or avoided."""

    node: str
    points: int
    text: str
    """`has data imagenet`"""
