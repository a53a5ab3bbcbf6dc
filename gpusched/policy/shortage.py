"""What is missing for a request to start now: each resource with what is needed, free and there at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpusched.model.job import Request
from gpusched.model.units import format_size_mib
from gpusched.policy.draft import WHOLE_CARD, Draft
from gpusched.policy.placement import Need, pool, slice_of

NAMED = 3
"""Jobs, cards or nodes that a sentence names before it says how many more there are."""


@dataclass(frozen=True, slots=True)
class Lack:
    """One resource of which too little is free. With several nodes, `free` is the most on any one."""

    resource: str
    """`gpus`, `vram_mib`, `gpu_fraction`, `cpus`, `mem_mib`; `nodes` when only the combination lacks."""
    needed: float
    free: float
    total: float
    text: str
    """Follows the word "needs"."""


def lacks(draft: Draft, need: Need) -> list[Lack]:
    """What keeps a need that does not fit now from fitting, each resource by itself.

    Only nodes and cards that may be used count, and a job must fit on one node.
    """
    layout, request = draft.layout, need.request
    usable = [
        number
        for number, node in enumerate(layout.nodes)
        if node.why_not is None and not (request.gpus and node.gpu_error is not None)
    ]
    found: list[Lack] = []
    if request.gpus:
        of_gpus = _lack_of_slices if need.is_slice else _lack_of_wholes
        found.extend(of_gpus(draft, need, usable))
    free_cpus = [max(0, draft.free_millicpus[node]) / 1000 for node in usable]
    if need.millicpus / 1000 > max(free_cpus, default=0):
        total = sum(layout.nodes[node].cpus for node in usable)
        noun = plural(request.cpus, "CPU")
        found.append(_lack("cpus", noun, request.cpus, free_cpus, total, "{:g}".format))
    free_mib = [max(0, draft.free_mem_mib[node]) for node in usable]
    if request.mem_mib > max(free_mib, default=0):
        total_mib = sum(layout.nodes[node].mem_mib for node in usable)
        noun = f"{format_size_mib(request.mem_mib)} of memory"
        found.append(_lack("mem_mib", noun, request.mem_mib, free_mib, total_mib, format_size_mib))
    if not found:
        text = f"{describe(request, full=True)}, which is free, but not all of it on one node"
        found.append(Lack("nodes", 1, 0, len(usable), text))
    return found


def _lack(
    resource: str, noun: str, needed: float, free: Sequence[float], total: float, show: Callable[[float], str]
) -> Lack:
    """The figures of a resource that nodes have in amounts. `free` is per node."""
    most = max(free, default=0)
    there = show(most) if most else "none"
    if len(free) > 1:
        overall = f"{show(sum(free))} of {show(total)} in all"
        text = f"{noun} on one node, the most free on one is {there} ({overall})"
    else:
        verb = "is" if most <= 1 or resource == "mem_mib" else "are"
        text = f"{noun}, {there} of {show(total)} {verb} free"
    return Lack(resource, needed, most, total, text)


def _lack_of_wholes(draft: Draft, need: Need, usable: Sequence[int]) -> list[Lack]:
    request = need.request
    cards_of = pool(draft.layout, need).cards_of
    free = [sum(draft.is_unbooked(card.number) for card in cards_of[node]) for node in usable]
    if request.gpus <= max(free, default=0):
        return []
    noun = f"{request.gpus} free {request.gpu_type or plural_of(request.gpus, 'GPU')}"
    if request.min_vram_mib:
        noun += f" with {format_size_mib(request.min_vram_mib)} or more"
    total = sum(len(cards_of[node]) for node in usable)
    return [_lack("gpus", noun, request.gpus, free, total, "{:g}".format)]


def _lack_of_slices(draft: Draft, need: Need, usable: Sequence[int]) -> list[Lack]:
    """Of one slice, the most room on any card; of several, the number of cards with room."""
    request = need.request
    cards_of = pool(draft.layout, need).cards_of
    cards = [cards_of[node] for node in usable]
    fitting = [sum(slice_of(draft, need, card)[0] is not None for card in there) for there in cards]
    if request.gpus <= max(fitting, default=0):
        return []
    every = [card for there in cards for card in there]
    what = describe(request)
    if request.gpus > 1:
        total = len(every)
        text = f"{what}, {max(fitting, default=0)} of {total} cards {'have' if total > 1 else 'has'} room"
        return [Lack("gpus", request.gpus, max(fitting, default=0), total, text)]
    open_cards = [
        card.number
        for card in every
        if not draft.wholes[card.number] and (not draft.slices[card.number] or draft.owner[card.number] == need.uid)
    ]
    room_mib = max((draft.layout.slice_limits[card] - draft.vram_mib[card] for card in open_cards), default=0)
    total_mib = max((card.slice_total_mib or 0 for card in every), default=0)
    if request.vram_mib is not None:
        most = f"the most room on one is {format_size_mib(room_mib)}" if room_mib > 0 else "none has room"
        text = f"{what} on one card, {most}"
        return [Lack("vram_mib", request.vram_mib, max(0, room_mib), total_mib, text)]
    part = max(((WHOLE_CARD - draft.micros[card]) / WHOLE_CARD for card in open_cards), default=0.0)
    if room_mib < total_mib:
        part = min(part, max(0, room_mib) / max(1, total_mib))
    text = f"{what}, the most free on one is {part:.2g}"
    return [Lack("gpu_fraction", request.gpu_fraction or 0, part, 1, text)]


def describe(request: Request, *, full: bool = False) -> str:
    """What a request asks for, in a few words; GPUs alone unless `full`, else cores and memory too."""
    words = []
    if request.gpu_fraction is not None:
        words.append(f"{request.gpu_fraction:g} of {_a(request.gpu_type)}")
    elif request.vram_mib is not None:
        where = f" on each of {request.gpus} GPUs" if request.gpus > 1 else ""
        words.append(f"{format_size_mib(request.vram_mib)} of VRAM{where}")
    elif request.gpus:
        words.append(plural(request.gpus, f"{request.gpu_type} GPU" if request.gpu_type else "GPU"))
    if full or not words:
        if request.cpus:
            words.append(plural(request.cpus, "CPU"))
        if request.mem_mib:
            words.append(f"{format_size_mib(request.mem_mib)} of memory")
    return name_some("", words, named=len(words)) or "next to nothing"


def _a(gpu_type: str | None) -> str:
    return "a GPU" if gpu_type is None else f"one {gpu_type} GPU"


def plural(count: float, noun: str) -> str:
    """`1 GPU`, `2 GPUs`, `0.5 CPUs`."""
    return f"{count:g} {plural_of(count, noun)}"


def plural_of(count: float, noun: str) -> str:
    """The noun as it follows this count."""
    return noun if count == 1 else noun + "s"


def name_some(noun: str, names: Sequence[str], named: int = NAMED) -> str:
    """`job 7`, `jobs 7 and 8`, `jobs 7, 8, 9 and 4 more`; empty for no names."""
    if not names:
        return ""
    shown = list(names[:named])
    if len(names) > named:
        shown.append(f"{len(names) - named} more")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{plural_of(len(names), noun)} {text}" if noun else text


def about(seconds: float) -> str:
    """A length of time as people say it: `about 12 min`, `about 3 h`, `less than a minute`."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"about {seconds / 3600:.0f} h"
    return f"about {seconds / 86400:.0f} days"
