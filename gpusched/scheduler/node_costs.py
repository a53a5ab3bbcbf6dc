"""What makes one node better than another for a job, apart from room: data sets, earlier runs, the speed of GPUs.

Costs are points as in `model.leaning`: four are a factor of two in the expected time to a result. They rank placements
behind preferred labels and before the strategy of [placement], and never reject one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.leaning import NEAR_POINTS, POINTS_OF_TWO, LeaningReason, points_of
from gpusched.scheduler.cluster_state import CardShare, ClusterLayout
from gpusched.scheduler.filters import reject_name
from gpusched.scheduler.request_units import RequestUnits

OF_SCARCE = POINTS_OF_TWO
"""Cost of taking a card that others insist on and of which few are left: worth a job that takes twice as long."""


def node_costs(layout: ClusterLayout, need: RequestUnits) -> Sequence[int] | None:
    """Cost of each node for such a job, without its cards; None if all cost the same."""
    near, leaning = need.request.near, need.leaning
    if not (near or leaning) or not layout.has_leanings:
        return None
    mark = "costs", near, leaning
    if mark in layout.pools:
        known = layout.pools[mark]
        return known if isinstance(known, list) else None
    costs = [0] * len(layout.nodes)
    if leaning is not None:
        for name, points in leaning.points:
            number = layout.node_number(name)
            if number is not None:
                costs[number] -= points
    if near:
        for number in range(len(costs)):
            costs[number] -= _near_points(len(data_on(layout, number, need)), len(near))
    found = costs if any(costs) else None
    layout.pools[mark] = found
    return found


def data_on(layout: ClusterLayout, number: int, need: RequestUnits) -> list[str]:
    """Data sets of --near that a node declares or the user's jobs have read there."""
    node = layout.nodes[number]
    read = () if need.leaning is None else need.leaning.read
    return [name for name in need.request.near if name in node.data or (node.name, name) in read]


def _near_points(found: int, asked: int) -> int:
    """Points for some of the data sets; any are better than none."""
    return max(1, NEAR_POINTS * found // asked) if found else 0


def card_cost(layout: ClusterLayout, parts: Iterable[CardShare]) -> int:
    return max((layout.cards[part.card].speed_cost for part in parts), default=0)


def reasons_of(layout: ClusterLayout, need: RequestUnits) -> list[LeaningReason]:
    """What usable nodes declare that speaks for or against them, by node: data sets, and GPUs of other speeds."""
    found = []
    for number, node in enumerate(layout.nodes):
        if reject_name(node, need.where) is not None:
            continue
        declared = [name for name in need.request.near if name in node.data]
        if declared:
            points = _near_points(len(declared), len(need.request.near))
            found.append(LeaningReason(node.name, points, f"has data {', '.join(declared)}"))
        speeds = {card.speed for card in layout.cards_of[number] if card.is_of_type(need.kind[1])}
        if need.request.gpus and speeds and speeds != {1.0}:
            text = " or ".join(f"{speed:g}" for speed in sorted(speeds))
            found.append(LeaningReason(node.name, -points_of(1 / max(speeds)), f"its GPUs have speed {text}"))
    return found
