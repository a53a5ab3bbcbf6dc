"""What can never fit: decided once, at submission, with the largest request that would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Request
from gpusched.model.settings import Settings
from gpusched.model.units import format_size_mib
from gpusched.policy.draft import Card, Draft, Layout
from gpusched.policy.placement import Need, fits, pool
from gpusched.policy.shortage import describe, plural

_FAKE = "to try it without one, restart the daemon with GPUSCHED_FAKE_GPUS=4x24GiB"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never be granted, and what could be asked for in its place."""

    text: str
    hint: str


def refusal(request: Request, nodes: Iterable[NodeView], settings: Settings) -> Refusal | None:
    """Refuse what no node could hold even when all of it is free and in order; None when one could.

    Bookings, drains and foreign use do not count: they pass. A card that is lost does not count as
    there. While a node's driver is broken nobody knows its GPUs, so requests for GPUs are let in to wait.
    """
    built = [_as_built(node) for node in nodes]
    layout = Layout(built, settings)
    if request.gpus and any(node.gpu_error is not None for node in built):
        request = Request(cpus=request.cpus, mem_mib=request.mem_mib)
    need = Need.of(request, uid=0)
    if fits(Draft(layout), need):
        return _over_ceiling(request, layout, settings)
    refused = _refuse_gpus(need, layout) if request.gpus else None
    return refused or _refuse_rest(request, layout)


def _as_built(node: NodeView) -> NodeView:
    gpus = tuple(_gpu_as_built(gpu) for gpu in node.gpus if gpu.is_present)
    return replace(node, why_not=None, gpus=gpus)


def _gpu_as_built(gpu: GpuView) -> GpuView:
    return replace(gpu, foreign_mib=0, why_not=None, why_not_whole=None)


def _over_ceiling(request: Request, layout: Layout, settings: Settings) -> Refusal | None:
    """A job whose memory alone is above the ceiling of measured memory would wait for ever."""
    ceiling = settings.ceiling.mem_fraction
    totals_mib = [node.load.mem_total_mib for node in layout.nodes if node.load is not None]
    if ceiling is None or not totals_mib or request.mem_mib <= ceiling * max(totals_mib):
        return None
    most = format_size_floor(int(ceiling * max(totals_mib)))
    return Refusal(
        f"asked for {format_size_mib(request.mem_mib)} of memory; jobs start only while at most "
        f"{ceiling:.0%} of memory is in use, which is {most}",
        f"ask for less: -m {most}, or raise [ceiling] mem_fraction in the config file",
    )


def _refuse_gpus(need: Need, layout: Layout) -> Refusal | None:
    """The first thing about the GPUs alone that no node can give; None when it is not the GPUs."""
    request = need.request
    asked = f"asked for {describe(request)}"
    if not layout.cards:
        return Refusal(f"{asked}; this scheduler has no GPU", f"see what there is with: ginfo; {_FAKE}")
    of_type = _cards(Need.of(replace(request, min_vram_mib=None, vram_mib=None, gpu_fraction=None), 0), layout)
    if not of_type:
        types = ", ".join(sorted({card.view.name for card in layout.cards}))
        return Refusal(
            f"asked for a GPU of type {request.gpu_type!r}; the types here are {types}",
            "a part of the name is enough, in any case: see ginfo",
        )
    if request.min_vram_mib is not None and not _cards(
        Need.of(replace(request, vram_mib=None, gpu_fraction=None), 0), layout
    ):
        return _refuse_size(f"asked for GPUs with {format_size_mib(request.min_vram_mib)} or more", of_type)
    fitting = _cards(need, layout)
    if request.shares_cards:
        if not fitting:
            return Refusal(
                f"{asked}; none of the GPUs can be shared (unknown size, MIG, or for one process only)",
                f"ask for whole GPUs: -g {request.gpus}",
            )
        largest_mib = max(card.slice_total_mib or 0 for card in fitting)
        if request.vram_mib is not None and request.vram_mib > largest_mib:
            most = format_size_floor(largest_mib)
            return Refusal(
                f"{asked}; the largest slice of a card is {most}",
                f"ask for less: --vram {most}, or a whole card: -g 1",
            )
        fitting = [card for card in fitting if (card.slice_total_mib or 0) >= (request.vram_mib or 0)]
    return _refuse_count(need, layout, fitting, asked)


def _cards(need: Need, layout: Layout) -> list[Card]:
    return [card for cards in pool(layout, need).cards_of for card in cards]


def _refuse_size(asked: str, cards: Sequence[Card]) -> Refusal:
    sizes = [card.view.vram_total_mib for card in cards if card.view.vram_total_mib is not None]
    if not sizes:
        return Refusal(f"{asked}; the size of the GPUs here cannot be read", "leave --min-vram out")
    most = format_size_floor(max(sizes))
    return Refusal(f"{asked}; the largest has {most}", f"ask for less: --min-vram {most}")


def _refuse_count(need: Need, layout: Layout, fitting: Sequence[Card], asked: str) -> Refusal | None:
    numbers = {card.number for card in fitting}
    most = max(sum(card.number in numbers for card in cards) for cards in layout.cards_of)
    if need.request.gpus <= most:
        return None
    kind = f"{need.request.gpu_type}:" if need.request.gpu_type else ""
    where = " on one node" if len(layout.nodes) > 1 else ""
    extra = ""
    if need.request.vram_mib is not None:
        extra += f" --vram {format_size_mib(need.request.vram_mib)}"
    if need.request.min_vram_mib is not None:
        extra += f" --min-vram {format_size_mib(need.request.min_vram_mib)}"
    return Refusal(
        f"{asked}; the largest this scheduler can give{where} is -g {kind}{most}{extra}",
        f"ask for at most that many: -g {kind}{most}{extra}",
    )


def _refuse_rest(request: Request, layout: Layout) -> Refusal:
    """Too many cores or too much memory, alone or together with the rest."""
    cpus = max((node.cpus for node in layout.nodes), default=0.0)
    mem_mib = max((node.mem_mib for node in layout.nodes), default=0)
    where = "any node" if len(layout.nodes) > 1 else "this scheduler"
    if request.cpus > cpus:
        return Refusal(
            f"asked for {plural(request.cpus, 'CPU')}; the most {where} can give is {cpus:g}",
            f"ask for less: -c {cpus:g}",
        )
    if request.mem_mib > mem_mib:
        most = format_size_floor(mem_mib)
        return Refusal(
            f"asked for {format_size_mib(request.mem_mib)} of memory; the most {where} can give is {most}",
            f"ask for less: -m {most}",
        )
    return Refusal(
        f"asked for {describe(request, full=True)}; no single node has all of that",
        "ask for less of one of them; see what each node has with: ginfo",
    )


def format_size_floor(mib: int) -> str:
    """A size that can be asked for again: never rounded up."""
    text = format_size_mib(mib)
    return text if mib < 1024 or mib % 1024 == 0 else f"{mib}M"
