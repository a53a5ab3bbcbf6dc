"""Amounts of bookings, and past use with exponential decay by half-life."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, inf, log

from gpusched.model.bundles import totals
from gpusched.model.job import Request
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot, Usage
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout
from gpusched.scheduler.request_units import WHOLE_CARD, squeeze

_LN2 = log(2.0)


def capacity_of(layout: ClusterLayout) -> Resources:
    """Total of the machines: cards present, cores and memory, without oversubscription.

    Drained machines and cards in foreign use count, so that shares do not jump with them.
    """
    known = layout.pools.get("capacity")
    if isinstance(known, Resources):
        return known
    made = NOTHING
    for node in range(len(layout.nodes)):
        made += _whole_node(layout, node)
    layout.pools["capacity"] = made
    return made


def _whole_node(layout: ClusterLayout, node: int) -> Resources:
    view = layout.nodes[node]
    cards = [card.view for card in layout.cards_of[node] if card.view.is_present]
    vram_mib = sum(card.vram_total_mib or 0 for card in cards)
    return Resources(float(len(cards)), float(vram_mib), view.cpus, float(view.mem_mib))


def footprint(layout: ClusterLayout, booking: AllocationUnits) -> Resources:
    """Resources that a booking takes from others. A gang takes the sum of its pieces.

    A whole card is one GPU with all of its VRAM, a slice the part that it books. An exclusive job
    takes everything on its nodes, as in Slurm.
    """
    total = NOTHING
    for piece in booking.pieces():
        if piece.is_exclusive:
            total += _whole_node(layout, piece.node)
            continue
        gpus = vram_mib = 0.0
        for part in piece.parts:
            gpus += _part_of_card(layout, part)
            vram_mib += _vram_mib(layout, part)
        total += Resources(gpus, vram_mib, piece.millicpus / 1000, float(piece.mem_mib))
    return total


def _vram_mib(layout: ClusterLayout, part: CardShare) -> float:
    return float(layout.cards[part.card].view.vram_total_mib or 0) if part.is_whole else float(part.vram_mib)


def _part_of_card(layout: ClusterLayout, part: CardShare) -> float:
    if part.is_whole:
        return 1.0
    if part.micros:
        return part.micros / WHOLE_CARD
    return _fraction(part.vram_mib, layout.cards[part.card].view.vram_total_mib)


def _fraction(vram_mib: int, total_mib: int | None) -> float:
    """A slice by memory as a fraction of its card; all of a card of unknown size."""
    return min(1.0, vram_mib / total_mib) if total_mib else 1.0


def demand(layout: ClusterLayout, request: Request) -> Resources:
    """Resources that a request would take, before placement: on the smallest suitable cards.

    So a slice by memory never counts as less of a card than it will be. An exclusive job
    counts as what it requests; only `footprint` knows the size of its nodes.
    """
    gpus = vram_mib = 0.0
    if request.gpus:
        card_mib = _smallest_card_mib(_card_sizes(layout, request), request.vram_mib or 0)
        if request.card_fraction is not None:
            gpus = request.card_fraction
            vram_mib = card_mib * gpus if request.vram_mib is None else float(request.vram_mib)
        elif request.vram_mib is not None:
            gpus, vram_mib = (
                request.gpus * _fraction(request.vram_mib, card_mib),
                float(request.gpus * request.vram_mib),
            )
        else:
            gpus, vram_mib = float(request.gpus), float(request.gpus * card_mib)
    each = Resources(gpus, vram_mib, request.cpus, float(request.mem_mib))
    if request.bundles is not None:
        part, (cpus, mem_mib) = request.total_gpus / (request.gpus or 1), totals(request)
        return Resources(gpus * part, vram_mib * part, cpus, mem_mib)
    if not request.tail_gpus:
        return each.times(request.nodes)
    part = request.tail_gpus / request.gpus
    return each.times(request.nodes) + Resources(gpus * part, vram_mib * part, each.cpus, each.mem_mib)


def _card_sizes(layout: ClusterLayout, request: Request) -> tuple[int, ...]:
    """VRAM of the present cards of this type and size, smallest first."""
    mark = ("card sizes", request.gpu_type, request.min_vram_mib)
    known = layout.pools.get(mark)
    if isinstance(known, tuple):
        return known
    model, least_mib = squeeze(request.gpu_type or ""), request.min_vram_mib or 0
    sizes = sorted(
        card.view.vram_total_mib
        for card in layout.cards
        if card.view.is_present
        and card.view.vram_total_mib is not None
        and card.is_of_type(model)
        and card.view.vram_total_mib >= least_mib
    )
    made = tuple(sizes)
    layout.pools[mark] = made
    return made


def _smallest_card_mib(sizes: Sequence[int], least_mib: int) -> int:
    return next((size for size in sizes if size >= least_mib), 0)


def decayed(used: Resources, elapsed_s: float, half_life_s: float) -> Resources:
    """Past use after some more time: used x 2^(-elapsed / half-life). A clock that was set back changes nothing.

    Source: Slurm, PriorityDecayHalfLife. A half-life of 0 remembers nothing.
    """
    weight = _weight(elapsed_s, half_life_s)
    return used if weight == 1.0 else used.times(weight)


def _weight(elapsed_s: float, half_life_s: float) -> float:
    """Weight, 0 to 1, of use that long ago."""
    if elapsed_s <= 0:
        return 1.0
    if half_life_s <= 0:
        return 0.0
    return float(2.0 ** (-elapsed_s / half_life_s))


def accrued(rate: Resources, start_at: float, until_at: float, now: float, half_life_s: float) -> Resources:
    """Present value of holding `rate` from start to `until_at`: every instant decayed by its own age, exactly.

    Amounts times seconds. Integral of 2^(-(now - t) / h) over t: h / ln 2 x (2^(-(now - until) / h) -
    2^(-(now - start) / h)). An end before the start counts nothing; an end after `now` (a clock that was
    set back) has no age.
    """
    seconds = until_at - start_at
    if seconds <= 0 or half_life_s <= 0:
        return NOTHING
    return rate.times(_counted_s(seconds, half_life_s) * _weight(now - until_at, half_life_s))


def _counted_s(seconds: float, half_life_s: float) -> float:
    """Present value of holding one unit for the last `seconds`."""
    if half_life_s == inf:
        return seconds
    # expm1 keeps the digits of a short run that a difference of two powers would lose.
    return -expm1(-seconds * _LN2 / half_life_s) * half_life_s / _LN2


def over(elapsed_s: float, half_life_s: float) -> tuple[float, float]:
    """Coefficients of `decayed` and `accrued` for an elapsed time above 0: the factor on past use, and the one on
    constant holdings."""
    if half_life_s <= 0:
        return 0.0, 0.0
    return _weight(elapsed_s, half_life_s), _counted_s(elapsed_s, half_life_s)


def charged(
    before: Usage | None,
    account: str,
    user: str,
    rate: Resources,
    start_at: float,
    end_at: float,
    now: float,
    half_life_s: float,
    factor: float = 1.0,
) -> Usage:
    """Usage of a user after one more run has ended, both as of `now`. `factor` is that of the QOS."""
    used = accrued(rate.times(max(0.0, factor)), start_at, end_at, now, half_life_s)
    if before is not None:
        used += decayed(before.used, now - before.at, half_life_s)
    return Usage(account, user, used, now)


def usage_now(
    snapshot: Snapshot, layout: ClusterLayout, settings: Settings, as_of: float | None = None
) -> dict[tuple[str, str], Resources]:
    """Decayed use per (account, user) in amounts times seconds, including open runs so far.

    A suspended run uses no cores. Use exempted by its QOS (usage_factor 0) and that of fillers is left
    out. With `as_of`, an instant before that of the snapshot, later use of open runs is left out too.
    """
    now, half_life_s = snapshot.now if as_of is None else as_of, settings.priority.half_life_s
    total: dict[tuple[str, str], Resources] = {}
    for usage in snapshot.usage:
        mark = (usage.account, usage.user)
        total[mark] = total.get(mark, NOTHING) + decayed(usage.used, now - usage.at, half_life_s)
    for held in snapshot.allocations:
        booking = layout.booking(held.terms.uid, held)
        qos = settings.qos.get(held.terms.qos)
        factor = 1.0 if qos is None else max(0.0, qos.usage_factor)
        if booking is None or not factor or held.is_filler:
            continue
        rate = footprint(layout, booking).times(factor)
        if held.is_suspended:
            rate = Resources(rate.gpus, rate.vram_mib, 0.0, rate.mem_mib)
        mark = (held.terms.account, held.terms.user)
        total[mark] = total.get(mark, NOTHING) + accrued(rate, held.start_at, now, now, half_life_s)
    return total
