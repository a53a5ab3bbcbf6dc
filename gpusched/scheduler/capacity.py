"""What can never fit: decided once, at submission, with the largest request that would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Request
from gpusched.model.settings import Settings
from gpusched.model.units import format_amount_floor, format_size_mib, plural
from gpusched.model.value import replace
from gpusched.scheduler.ceilings import ceilings_of
from gpusched.scheduler.conditions import refuse_conditions
from gpusched.scheduler.draft import Card, Draft, Layout
from gpusched.scheduler.filters import largest_slice_mib, node_mem_mib
from gpusched.scheduler.placement import Need, fits, hosts, pool
from gpusched.scheduler.refusal import Refusal
from gpusched.scheduler.topology import largest_group
from gpusched.scheduler.words import describe, describe_part, describe_where

__all__ = ["Refusal", "format_size_floor", "refusal"]

_FAKE = "to try it without one, restart the daemon with GPUSCHED_FAKE_GPUS=4x24GiB"


def refusal(request: Request, nodes: Iterable[NodeView], settings: Settings) -> Refusal | None:
    """Refuse what no node could hold even when all of it is free and in order; None when one could.

    Bookings, drains and foreign use do not count: they pass. A card that is lost does not count as
    there. While a node's driver is broken nobody knows its GPUs, so requests for GPUs are let in to wait.
    """
    built = [_as_built(node) for node in nodes]
    layout = Layout(built, settings)
    refused = refuse_conditions(request, layout)
    if refused is not None:
        return refused
    if request.gpus and any(node.gpu_error is not None for node in built):
        request = replace(
            request, gpus=0, gpu_fraction=None, gpu_type=None, vram_mib=None, min_vram_mib=None, is_linked=False
        )
    need = Need.of(request, uid=0)
    draft = Draft(layout)
    if fits(draft, need):
        return _over_ceiling(request, layout, settings)
    able = sum(1 for _ in hosts(draft, need))
    if able:
        return _refuse_nodes(request, able)
    # One node's part is too large for any: that is said of the part.
    refused = _refuse_gpus(need, layout) if request.gpus else None
    return refused or _refuse_rest(need, layout)


def _refuse_nodes(request: Request, able: int) -> Refusal:
    """A gang of more nodes than have its part."""
    what = describe_part(request, full=True)
    where = describe_where(request)
    have = "1 node has" if able == 1 else f"{able} nodes have"
    most = f"-N {able}" + (f" --gpus-per-node {_gpus(request, request.gpus)}" if request.gpus else "")
    return Refusal(
        f"asked for {request.nodes} nodes with {what} each{_after(where)}; only {have} that",
        f"ask for fewer: {most}; see what each node has with: ginfo",
    )


def _after(text: str) -> str:
    return f" {text}" if text else ""


def _gpus(request: Request, count: float) -> str:
    kind = f"{request.gpu_type}:" if request.gpu_type else ""
    return f"{kind}{count if request.gpu_fraction is None else request.gpu_fraction}"


def _count_option(request: Request, count: int) -> str:
    """How to ask for so many GPUs on one node, or on each."""
    option = "-g" if request.nodes == 1 else f"-N {request.nodes} --gpus-per-node"
    linked = " --gpus-linked" if request.is_linked else ""
    return f"{option} {_gpus(request, count)}{linked}"


def _as_built(node: NodeView) -> NodeView:
    gpus = tuple(_gpu_as_built(gpu) for gpu in node.gpus if gpu.is_present)
    return replace(node, why_not=None, gpus=gpus)


def _gpu_as_built(gpu: GpuView) -> GpuView:
    return replace(gpu, foreign_mib=0, over_mib=0, why_not=None, why_not_whole=None)


def _over_ceiling(request: Request, layout: Layout, settings: Settings) -> Refusal | None:
    """A job whose memory alone is above the ceiling of measured memory would wait for ever."""
    ceiling = ceilings_of(settings).mem_fraction
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
    limited = describe_where(request)
    asked = f"asked for {describe(request)}{_after(limited)}"
    if not layout.cards:
        return Refusal(f"{asked}; this scheduler has no GPU", f"see what there is with: ginfo; {_FAKE}")
    if request.gpus > 1:
        single = Need.of(replace(request, gpus=1, is_linked=False), 0)
        if not _cards(need, layout) and any(card.view.mig_profile is not None for card in _cards(single, layout)):
            return Refusal(
                f"{asked}; only MIG instances would do, and a job can have one of those",
                f"ask for one: {_count_option(request, 1).removesuffix(' --gpus-linked')}; see them with: ginfo",
            )
    of_type = _cards(Need.of(replace(request, min_vram_mib=None, vram_mib=None, gpu_fraction=None), 0), layout)
    if not of_type:
        types = ", ".join(
            sorted({card.view.name for node in pool(layout, need).asked for card in layout.cards_of[node]})
        )
        if not types:
            return Refusal(f"{asked}; there is no GPU", "see which GPUs each node has with: ginfo")
        there = "there" if limited else "here"
        return Refusal(
            f"asked for a GPU of type {request.gpu_type!r}{_after(limited)}; the types {there} are {types}",
            "a part of the name is enough, in any case: see ginfo",
        )
    if request.min_vram_mib is not None and not _cards(
        Need.of(replace(request, vram_mib=None, gpu_fraction=None), 0), layout
    ):
        return _refuse_size(f"asked for GPUs with {format_size_mib(request.min_vram_mib)} or more", of_type)
    fitting = _cards(need, layout)
    if request.shares_cards:
        if not fitting:
            which, kind = "none of the GPUs", ""
            if request.gpu_type is not None:
                which, kind = f"no GPU of type {request.gpu_type!r}", f"{request.gpu_type}:"
            return Refusal(
                f"{asked}; {which} can be shared (unknown size, MIG, or for one process only)",
                f"ask for whole GPUs: -g {kind}{request.gpus}",
            )
        largest_mib = max(map(largest_slice_mib, fitting))
        if request.vram_mib is not None and request.vram_mib > largest_mib:
            most = format_size_floor(largest_mib)
            return Refusal(
                f"{asked}; the largest slice of a card is {most}",
                f"ask for less: --vram {most}, or a whole card: -g 1",
            )
        fitting = [card for card in fitting if largest_slice_mib(card) >= (request.vram_mib or 0)]
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
    """Too many cards for one node, or for one group of linked cards."""
    request = need.request
    numbers = {card.number for card in fitting}
    there = [[card for card in cards if card.number in numbers] for cards in layout.cards_of]
    most = max(map(len, there))
    extra = ""
    if request.vram_mib is not None:
        extra += f" --vram {format_size_mib(request.vram_mib)}"
    if request.min_vram_mib is not None:
        extra += f" --min-vram {format_size_mib(request.min_vram_mib)}"
    if request.is_linked:
        most = max(largest_group(layout, node, cards) for node, cards in enumerate(there))
        if request.gpus <= most:
            return None
        hint = f"ask for at most that many: {_count_option(request, most)}{extra}"
        if request.gpus <= max(map(len, there)):
            hint += ", or leave --gpus-linked out"
        return Refusal(f"{asked}; the largest linked group has {most}", hint)
    if request.gpus <= most:
        return None
    where = " on one node" if len(layout.nodes) > 1 else ""
    option = f"{_count_option(request, most)}{extra}"
    return Refusal(
        f"{asked}; the largest this scheduler can give{where} is {option}", f"ask for at most that many: {option}"
    )


def _refuse_rest(need: Need, layout: Layout) -> Refusal:
    """Too many cores, too much memory or of a custom resource, alone or together with the rest."""
    request = need.request
    nodes = [layout.nodes[number] for number in pool(layout, need).asked]
    limited = describe_where(request)
    cpus = max((node.cpus for node in nodes), default=0.0)
    mem_mib = max((node.mem_mib for node in nodes), default=0)
    where = "any node" if len(layout.nodes) > 1 else "this scheduler"
    if request.cpus > cpus:
        most = format_amount_floor(cpus)
        return Refusal(
            f"asked for {plural(request.cpus, 'CPU')}{_after(limited)}; the most {where} can give is {most}",
            f"ask for less: -c {most}",
        )
    if request.mem_mib > mem_mib:
        most = format_size_floor(mem_mib)
        return Refusal(
            f"asked for {format_size_mib(request.mem_mib)} of memory{_after(limited)}; the most {where} can give is "
            f"{most}",
            f"ask for less: -m {most}",
        )
    if request.gpus and layout.has_host_memory:
        needed_mib = min((node_mem_mib(need, card) for card in _cards(need, layout)), default=0)
        if needed_mib > mem_mib:
            most, of_memory = format_size_floor(mem_mib), replace(request, cpus=0.0, resources=(), licenses=())
            return Refusal(
                f"asked for {describe(of_memory, full=True)}{_after(limited)}; GPUs here use the host's memory, of "
                f"which {where} can give {most} in all",
                f"ask for less with --vram or -m, together at most {most}",
            )
    there: Counter[str] = Counter()
    for node in nodes:
        there |= Counter(dict(node.resources))
    for name, count in request.resources:
        if count > there[name]:
            return Refusal(
                f"asked for {count} of {name}{_after(limited)}; the most {where} can give is {there[name]}",
                f"ask for less: --res {name}={there[name]}" if there[name] else f"leave --res {name} out",
            )
    return Refusal(
        f"asked for {describe(replace(request, licenses=()), full=True)}{_after(limited)}; no single node has all of "
        "that",
        "ask for less of one of them; see what each node has with: ginfo",
    )


def format_size_floor(mib: int) -> str:
    """A size that can be asked for again: never rounded up."""
    text = format_size_mib(mib)
    return text if mib < 1024 or mib % 1024 == 0 else f"{mib}M"
