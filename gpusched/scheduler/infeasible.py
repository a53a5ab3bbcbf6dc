"""Requests that can never fit: refused once, at submission, with the largest request that would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_

from gpusched.model.bundles import on_each_node, part_of, totals
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Request
from gpusched.model.mig import MigLayout, layout_of, layout_with
from gpusched.model.settings import Settings
from gpusched.model.units import (
    format_amount,
    format_amount_floor,
    format_size_mib,
    gpu_label,
    mig_index,
    name_some,
    plural,
)
from gpusched.model.value import replace
from gpusched.scheduler.bundles import fewest_nodes, most_bundles
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState, LayoutGpu, differs_in_load_alone
from gpusched.scheduler.filters import largest_slice_mib, node_mem_mib, parse_constraint, pool, reject_name
from gpusched.scheduler.load_limits import ceilings_of
from gpusched.scheduler.placement import bundle_rooms, fits, hosts
from gpusched.scheduler.request_units import RequestUnits, squeeze
from gpusched.scheduler.topology import largest_group


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never be granted, and what to request instead."""

    text: str
    hint: str
    about: str = ""
    """What it is about, as in `errors.ABOUT`."""


def on(about: str, found: Refusal | None) -> Refusal | None:
    """A refusal that says what it is about, unless it does already."""
    return found if found is None or found.about else Refusal(found.text, found.hint, about)


def describe(request: Request, *, full: bool = False) -> str:
    """A request in a few words; GPUs alone unless `full`."""
    part = describe_part(request, full=full)
    if request.bundles is not None:
        text = _describe_bundles(request, full=full)
    elif request.nodes > 1:
        alone = "exclusive nodes" if request.is_exclusive else "nodes"
        text = f"{request.nodes} {alone} with {part} each"
    else:
        text = f"an exclusive node with {part}" if request.is_exclusive else part
    if full and request.licenses:
        text = name_some("", [text, *(license_text(name, count) for name, count in request.licenses)], named=99)
    return text


def _describe_bundles(request: Request, *, full: bool) -> str:
    """All of a job in bundles, and the nodes that it may take."""
    bundles, (cpus, mem_mib) = request.bundles, totals(request)
    assert bundles is not None
    whole = replace(request, bundles=None, gpus=request.total_gpus, cpus=cpus, mem_mib=int(mem_mib))
    number = f"{request.nodes}" if bundles.nodes_max == request.nodes else f"{request.nodes} to {bundles.nodes_max}"
    alone = "exclusive nodes" if request.is_exclusive else "nodes"
    return f"{describe_part(whole, full=full)} on {number} {alone}"


def describe_part(request: Request, *, full: bool = False) -> str:
    """As `describe`, for one of the nodes."""
    words = []
    linked = "linked " if request.is_linked and request.gpus > 1 else ""
    if request.sm_percent is not None:
        beside = "" if request.vram_mib is None else f" with {format_size_mib(request.vram_mib)} of VRAM"
        words.append(f"{request.sm_percent} % of the SMs of {_a(request.gpu_type)}{beside}")
    elif request.gpu_fraction is not None:
        words.append(f"{format_amount(request.gpu_fraction)} of {_a(request.gpu_type)}")
    elif request.vram_mib is not None:
        where = f" on each of {request.gpus} {linked}GPUs" if request.gpus > 1 else ""
        words.append(f"{format_size_mib(request.vram_mib)} of VRAM{where}")
    elif request.gpus:
        words.append(plural(request.gpus, linked + (f"{request.gpu_type} GPU" if request.gpu_type else "GPU")))
    if full or not words:
        if request.cpus:
            words.append(plural(request.cpus, "CPU"))
        if request.mem_mib:
            words.append(f"{format_size_mib(request.mem_mib)} of memory")
        words.extend(f"{count} of {name}" for name, count in request.resources)
    return name_some("", words, named=len(words)) or "next to nothing"


def describe_where(request: Request) -> str:
    """The nodes that a request is limited to, phrased to follow the resources; empty if there is no limit."""
    texts = []
    if request.nodelist:
        texts.append(f"on {name_some('node', list(request.nodelist))}")
    if request.constraint is not None:
        texts.append(f"with {request.constraint}" if texts else f"on nodes with {request.constraint}")
    if request.runtime is not None:
        texts.append(f"with {request.runtime}" if texts else f"on nodes with {request.runtime}")
    if request.image_nodes:
        texts.append(f"its image is on {name_some('node', list(request.image_nodes))}")
    if request.exclude:
        texts.append(f"not on {name_some('node', list(request.exclude))}")
    return ", ".join(texts)


def license_text(name: str, count: int) -> str:
    """`1 license matlab`, `2 licenses matlab`."""
    return f"{plural(count, 'license')} {name}"


def _a(gpu_type: str | None) -> str:
    return "a GPU" if gpu_type is None else f"one {gpu_type} GPU"


_FAKE = "to try it without one, restart the daemon with GPUSCHED_FAKE_GPUS=4x24GiB"


def refusal(request: Request, nodes: Iterable[NodeView], settings: Settings) -> Refusal | None:
    """Refuse what no node could hold even if idle and healthy; None if some node could.

    Bookings, drains and foreign use do not count, being temporary. A lost card counts as absent. A node whose GPUs
    are unknown, since its driver is broken or was not asked yet, may have any; one that was never reached may have
    anything.
    """
    nodes = tuple(nodes)
    layout = _MACHINES.layout(nodes, settings)
    refused = refuse_conditions(request, layout)
    if refused is not None:
        return refused
    if request.bundles is not None:
        return _refuse_bundles(request, layout, nodes, settings)
    need = RequestUnits.of(request, uid=0)
    draft = ClusterState(layout)
    unknown = sum(_may_do(node, need) for node in layout.nodes)
    if unknown < request.nodes and fits(draft, need):
        return on("memory", _over_ceiling(request, layout, settings))
    able = sum(1 for _ in hosts(draft, need)) + unknown
    blind = [number for number in pool(layout, need).asked if layout.nodes[number].gpu_error is not None]
    if request.gpus and blind:
        bare = replace(
            request, gpus=0, gpu_fraction=None, gpu_type=None, vram_mib=None, min_vram_mib=None, is_linked=False
        )
        able += len({*hosts(draft, RequestUnits.of(bare, uid=0))}.intersection(blind))
        if not able:
            request, need = bare, RequestUnits.of(bare, uid=0)
    if able >= request.nodes and (unknown or blind):
        return None if unknown else on("memory", _over_ceiling(request, layout, settings))
    if able:
        return on("nodes", _refuse_nodes(request, able))
    # One node's part is too large for any node: the refusal is about the part.
    gpus = _refuse_undivided(need, layout, nodes) or _refuse_gpus(need, layout) if request.gpus else None
    refused = on("gpus", gpus)
    return refused or on("size", _refuse_rest(need, layout))


def _refuse_bundles(
    request: Request, layout: ClusterLayout, nodes: Sequence[NodeView], settings: Settings
) -> Refusal | None:
    """Refuse a job in bundles that fits on no number of nodes it may take, with the largest that does."""
    bundles, draft, need = request.bundles, ClusterState(layout), RequestUnits.of(request, uid=0)
    assert bundles is not None
    rooms = bundle_rooms(draft, need)
    if request.gpus:
        bare = RequestUnits.of(_without_gpus(request), uid=0)
        blind = {number for number in pool(layout, need).asked if layout.nodes[number].gpu_error is not None}
        rooms.update((node, room) for node, room in bundle_rooms(draft, bare).items() if node in blind)
    known = [*rooms.values()]
    # What was never reached may have room for any number.
    sizes = [*known, *(bundles.most for node in layout.nodes if _may_do(node, need))]
    if fewest_nodes(sizes, request) is not None:
        return on("memory", _over_ceiling(part_of(request, 1), layout, settings))
    if not known:
        return refusal(part_of(request, 1), nodes, settings)
    asked = f"asked for {describe(request, full=not request.gpus)}{_after(describe_where(request))}"
    count, able = most_bundles(known, request)
    largest = _bundles_option(request, able, min(count, bundles.count))
    if able < request.nodes:
        have = "1 node has" if able == 1 else f"{able} nodes have"
        least = describe_part(part_of(request, 1), full=True)
        return Refusal(f"{asked}; only {have} {least}, the least for each", f"ask for fewer nodes: {largest}", "nodes")
    hint = f"ask for at most that: {largest}"
    wider = replace(request, bundles=replace(bundles, nodes_max=min(len(known), bundles.count)))
    more = fewest_nodes(known, wider)
    if more is not None:
        hint += f", or for more nodes: {_bundles_option(request, more, bundles.count)}"
    return Refusal(f"{asked}; the largest that fits is {largest}", hint, "gpus" if request.gpus else "size")


def _bundles_option(request: Request, nodes: int, count: int) -> str:
    """Options that ask for so many bundles on so many nodes."""
    bundles, words = request.bundles, [f"-N {nodes}"]
    assert bundles is not None
    if bundles.tasks:
        words.append(f"-n {count * bundles.tasks}")
    if bundles.gpus:
        words.append(f"-g {_gpus(request, count * bundles.gpus)}")
    return " ".join(words)


def _without_gpus(request: Request) -> Request:
    return replace(
        on_each_node(request, gpus=0),
        gpu_fraction=None,
        gpu_type=None,
        vram_mib=None,
        sm_percent=None,
        min_vram_mib=None,
        is_linked=False,
    )


def _may_do(node: NodeView, need: RequestUnits) -> bool:
    """Whether nothing is known that speaks against a node, except that it was not reached yet."""
    return node.is_unknown and reject_name(node, need.where) is None


def whole_memory_mib(request: Request, nodes: Iterable[NodeView], settings: Settings) -> int:
    """The most memory that each of the requested number of nodes has, among those that can hold the rest."""
    layout = _MACHINES.layout(tuple(nodes), settings)
    able = hosts(ClusterState(layout), RequestUnits.of(on_each_node(request, mem_mib=0), uid=0))
    sizes_mib = sorted((layout.nodes[node].mem_mib for node in able), reverse=True)
    found = sizes_mib[request.nodes - 1 :] or [max((node.mem_mib for node in layout.nodes), default=0)]
    ceiling = ceilings_of(settings).mem_fraction
    totals_mib = [node.load.mem_total_mib for node in layout.nodes if node.load is not None]
    return found[0] if ceiling is None or not totals_mib else min(found[0], int(ceiling * max(totals_mib)))


def _refuse_nodes(request: Request, able: int) -> Refusal:
    """Refuse a gang of more nodes than can hold its part."""
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


def _gpus(request: Request, count: int) -> str:
    kind = f"{request.gpu_type}:" if request.gpu_type else ""
    return f"{kind}{count if request.gpu_fraction is None else request.gpu_fraction}"


def _count_option(request: Request, count: int) -> str:
    """Option that requests this number of GPUs on one node, or on each."""
    option = "-g" if request.nodes == 1 else f"-N {request.nodes} --gpus-per-node"
    linked = " --gpus-linked" if request.is_linked else ""
    return f"{option} {_gpus(request, count)}{linked}"


def _as_built(node: NodeView) -> NodeView:
    wanted = {gpu.uuid: gpu.mig_wanted for gpu in node.gpus if gpu.mig_wanted is not None}
    gpus = tuple(
        _gpu_as_built(gpu) for gpu in node.gpus if gpu.is_present and (gpu.mig_parent or gpu.uuid) not in wanted
    )
    divided = (one for gpu in node.gpus if gpu.uuid in wanted for one in _gpu_as_wanted(gpu, wanted[gpu.uuid]))
    return replace(node, why_not=None, gpus=(*gpus, *divided))


def _gpu_as_wanted(gpu: GpuView, layout: MigLayout) -> Iterable[GpuView]:
    """What a card will be once its MIG layout has changed."""
    if not layout.is_on:
        yield replace(_gpu_as_built(gpu), is_present=True, is_divided=False, can_share=True)
    known = {one.name: one for one in gpu.mig_profiles}
    for slot, name in enumerate(layout.profiles):
        yield GpuView(
            uuid=f"{gpu.uuid}/{slot}",
            index=mig_index(gpu.index, slot),
            name=f"{gpu.name} MIG {name}",
            vram_total_mib=known[name].memory_mib if name in known else None,
            can_share=False,
            mig_profile=name,
            mig_parent=gpu.uuid,
        )


def _gpu_as_built(gpu: GpuView) -> GpuView:
    return replace(gpu, foreign_mib=0, over_mib=0, why_not=None, why_not_whole=None)


_MOST_POOLS = 1000


class _Machines:
    """The layout of the nodes as they would be if idle and healthy, kept until one of them is another machine.

    Each submission needs it, and of hundreds of nodes few change in between. As with any memoized function, answers
    depend on the arguments alone.
    """

    def __init__(self) -> None:
        self._last: tuple[Settings, tuple[NodeView, ...], tuple[NodeView, ...], ClusterLayout] | None = None
        """Settings, nodes, these as built, their layout. Exchanged as a whole, as other threads may ask, too."""

    def layout(self, nodes: tuple[NodeView, ...], settings: Settings) -> ClusterLayout:
        last = self._last
        if last is None or last[0] is not settings or len(last[1]) != len(nodes):
            built = tuple([_as_built(node) for node in nodes])
        else:
            of_last = zip(last[1], last[2], strict=True)
            built = tuple([_as_built_again(node, *known) for node, known in zip(nodes, of_last, strict=True)])
            if all(map(is_, built, last[2])) and len(last[3].pools) < _MOST_POOLS:
                self._last = settings, nodes, built, last[3]
                return last[3]
        layout = ClusterLayout(built, settings)
        self._last = settings, nodes, built, layout
        return layout


_MACHINES = _Machines()


def _as_built_again(node: NodeView, before: NodeView, built: NodeView) -> NodeView:
    """The node as built: as it was for an earlier view of it, unless it is another machine now."""
    if node is before:
        return built
    made = _as_built(node)
    return built if made == built or differs_in_load_alone(built, made) else made


def _over_ceiling(request: Request, layout: ClusterLayout, settings: Settings) -> Refusal | None:
    """Refuse a job whose memory alone exceeds the ceiling of measured memory: it would wait forever."""
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


def _refuse_gpus(need: RequestUnits, layout: ClusterLayout) -> Refusal | None:
    """Refuse GPUs that no node can provide; None if the cause is not the GPUs."""
    request = need.request
    limited = describe_where(request)
    asked = f"asked for {describe(request)}{_after(limited)}"
    if not layout.cards:
        return Refusal(f"{asked}; this scheduler has no GPU", f"see what there is with: ginfo; {_FAKE}")
    if request.gpus > 1:
        single = RequestUnits.of(replace(request, gpus=1, is_linked=False), 0)
        if not _cards(need, layout) and any(card.view.mig_profile is not None for card in _cards(single, layout)):
            return Refusal(
                f"{asked}; only MIG instances would do, and a job can use only one",
                f"ask for one: {_count_option(request, 1).removesuffix(' --gpus-linked')}; see them with: ginfo",
            )
    whole = replace(request, vram_mib=None, gpu_fraction=None, sm_percent=None)
    of_type = _cards(RequestUnits.of(replace(whole, min_vram_mib=None), 0), layout)
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
    if request.min_vram_mib is not None and not _cards(RequestUnits.of(whole, 0), layout):
        return _refuse_size(f"asked for GPUs with {format_size_mib(request.min_vram_mib)} or more", of_type)
    fitting = _cards(need, layout)
    if request.shares_cards:
        if request.sm_percent is not None and not fitting and (others := _cards(_without_mps(need), layout)):
            whys = list(dict.fromkeys(card.view.why_not_mps for card in others if card.view.why_not_mps))
            return Refusal(
                f"{asked}; none of these GPUs can be used through MPS: {'; '.join(whys)}",
                "leave --sm out and share a GPU by memory: --vram 8G",
            )
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


def layout_for(profile: str, card: GpuView, gpus: Iterable[GpuView]) -> MigLayout | None:
    """A layout of a card with this MIG profile that keeps as much of the present one as possible; None if it has none.

    Args: gpus: those of its node.
    """
    names = {squeeze(one.name): one.name for one in card.mig_profiles}
    name = names.get(squeeze(profile))
    if name is None:
        return None
    present = layout_of(one.mig_profile or "" for one in gpus if one.mig_parent == card.uuid)
    return layout_with(name, present, card.mig_profiles)


def _refuse_undivided(need: RequestUnits, layout: ClusterLayout, nodes: Iterable[NodeView]) -> Refusal | None:
    """Refuse a MIG profile that no card is divided into, with a division that has it. Args: nodes: with all cards."""
    request = need.request
    if request.gpu_type is None or request.gpus != 1 or _cards(need, layout):
        return None
    asked = {layout.nodes[number].name for number in pool(layout, need).asked}
    for node in nodes:
        there = node.gpus if node.name in asked else ()
        for card in sorted(there, key=lambda one: one.mig_wanted is not None):
            division = layout_for(request.gpu_type, card, node.gpus)
            if division is not None:
                label = f"{node.name}:{gpu_label(card.index)}"
                return Refusal(
                    f"asked for a MIG instance {request.gpu_type}; no GPU is divided so now, but GPU {label} could be",
                    f"an admin can do that: gctl mig set {label} {division}; see what there is with: gctl mig",
                )
    return None


def _without_mps(need: RequestUnits) -> RequestUnits:
    """The need as a slice by memory or time that MPS does not limit."""
    request = need.request
    return RequestUnits.of(replace(request, sm_percent=None, vram_mib=request.vram_mib or 1), need.uid)


def _cards(need: RequestUnits, layout: ClusterLayout) -> list[LayoutGpu]:
    return [card for cards in pool(layout, need).cards_of for card in cards]


def _refuse_size(asked: str, cards: Sequence[LayoutGpu]) -> Refusal:
    sizes = [card.view.vram_total_mib for card in cards if card.view.vram_total_mib is not None]
    if not sizes:
        return Refusal(f"{asked}; the size of the GPUs here cannot be read", "leave --min-vram out")
    most = format_size_floor(max(sizes))
    return Refusal(f"{asked}; the largest has {most}", f"ask for less: --min-vram {most}")


def _refuse_count(
    need: RequestUnits, layout: ClusterLayout, fitting: Sequence[LayoutGpu], asked: str
) -> Refusal | None:
    """Refuse too many cards for one node, or for one group of linked cards."""
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


def _refuse_rest(need: RequestUnits, layout: ClusterLayout) -> Refusal:
    """Refuse too many cores, too much memory or of a custom resource, alone or in combination."""
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
            "cpus",
        )
    if request.mem_mib > mem_mib:
        most = format_size_floor(mem_mib)
        return Refusal(
            f"asked for {format_size_mib(request.mem_mib)} of memory{_after(limited)}; the most {where} can give is "
            f"{most}",
            f"ask for less: -m {most}",
            "memory",
        )
    if request.gpus and layout.has_host_memory:
        needed_mib = min((node_mem_mib(need, card) for card in _cards(need, layout)), default=0)
        if needed_mib > mem_mib:
            most, of_memory = format_size_floor(mem_mib), replace(request, cpus=0.0, resources=(), licenses=())
            return Refusal(
                f"asked for {describe(of_memory, full=True)}{_after(limited)}; GPUs here use the host's memory, of "
                f"which {where} can give {most} in all",
                f"ask for less with --vram or -m, together at most {most}",
                "memory",
            )
    there: Counter[str] = Counter()
    for node in nodes:
        there |= Counter(dict(node.resources))
    for name, count in request.resources:
        if count > there[name]:
            return Refusal(
                f"asked for {count} of {name}{_after(limited)}; the most {where} can give is {there[name]}",
                f"ask for less: --res {name}={there[name]}" if there[name] else f"leave --res {name} out",
                "resource",
            )
    return Refusal(
        f"asked for {describe(replace(request, licenses=()), full=True)}{_after(limited)}; no single node has all of "
        "that",
        "ask for less of one of them; see what each node has with: ginfo",
    )


def format_size_floor(mib: int) -> str:
    """A size that can be requested again: never rounded up."""
    text = format_size_mib(mib)
    return text if mib < 1024 or mib % 1024 == 0 else f"{mib}M"


_LISTED = 12
"""Maximum number of names in a sentence before it counts the rest."""


def refuse_conditions(request: Request, layout: ClusterLayout) -> Refusal | None:
    """Refuse the first condition, amounts aside, that no node meets; None if all can be met."""
    return (
        on("license", _refuse_licenses(request, layout))
        or on("node", _refuse_names(request, layout.nodes))
        or on("constraint", _refuse_labels(request, layout.nodes))
        or on("resource", _refuse_resources(request, layout.nodes))
        or on("nodes", _refuse_number(request, layout.nodes))
    )


def _listed(names: Iterable[str]) -> str:
    return name_some("", sorted(set(names)), named=_LISTED)


def _refuse_licenses(request: Request, layout: ClusterLayout) -> Refusal | None:
    for name, count in request.licenses:
        there = layout.licenses.get(name)
        if there is None:
            known = _listed(layout.licenses)
            return Refusal(
                f"asked for license {name}; " + (f"the licenses here are {known}" if known else "there are none here"),
                f"leave -L {name} out; licenses are listed under [license] of the config file",
            )
        if count > there:
            verb = "is" if there == 1 else "are"
            return Refusal(
                f"asked for {license_text(name, count)}; there {verb} {there or 'none'} in all",
                f"ask for less: -L {name}:{there}" if there else f"leave -L {name} out",
            )
    return None


def refuse_excluded(request: Request, nodes: Iterable[NodeView], kept: Iterable[str] = ()) -> Refusal | None:
    """Refuse to leave out a node that does not exist, which is probably misspelt; None if all of them do.

    For what a user types only: a job that leaves out a node keeps doing so once the node has left the cluster.

    Args: kept: names that were accepted before.
    """
    there = {node.name for node in nodes}
    unknown = [name for name in request.exclude if name not in there and name not in kept]
    if not unknown:
        return None
    return Refusal(
        f"asked to leave out {name_some('node', unknown)}; the nodes here are {_listed(there)}",
        "see the nodes with: ginfo",
        "node",
    )


def _refuse_names(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    there = {node.name for node in nodes}
    unknown = [name for name in request.nodelist if name not in there]
    if unknown:
        return Refusal(
            f"asked for {name_some('node', unknown)}; the nodes here are {_listed(there)}",
            "see the nodes with: ginfo",
        )
    if nodes and not there - set(request.exclude):
        return Refusal(
            f"asked for a node that is not {_listed(there)}; there are no others",
            "leave out one of those named with -x",
        )
    return None


def _refuse_labels(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    try:
        if request.prefer is not None:
            parse_constraint(request.prefer)
        constraint = None if request.constraint is None else parse_constraint(request.constraint)
    except ValueError as error:
        return Refusal(f"asked for labels that cannot be read: {error}", "for example: -C 'a100&nvlink|h100'")
    if constraint is None or any(node.is_unknown or constraint.admits(node.labels) for node in nodes):
        return None
    there = {label for node in nodes for label in node.labels}
    unknown = [label for label in constraint.labels if label not in there]
    known = _listed(there)
    if unknown and known:
        text = f"no node has the {name_some('label', unknown)}; the labels here are {known}"
    elif unknown:
        text = f"no node has the {name_some('label', unknown)}, nor any other label"
    else:
        text = f"no node has such labels together; the labels here are {known}"
    return Refusal(
        f"asked for nodes with {request.constraint}; {text}",
        "see the labels of each node with: ginfo; they are set by [node] labels in its config file",
    )


def _refuse_resources(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    there = {name for node in nodes for name, _ in node.resources}
    for name, _ in request.resources:
        if name not in there and not any(node.is_unknown for node in nodes):
            known = _listed(there)
            return Refusal(
                f"asked for resource {name}; " + (f"those here are {known}" if known else "there are none here"),
                f"leave --res {name} out; nodes have what [node] resources in their config file says",
            )
    return None


def _refuse_number(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    """Refuse more nodes than there are, or than the other conditions leave."""
    if request.nodes > max(1, len(nodes)):
        return Refusal(
            f"asked for {request.nodes} nodes; this scheduler has {len(nodes)}",
            f"ask for at most that many: -N {len(nodes)}" if nodes else "see the nodes with: ginfo",
        )
    where = RequestUnits.of(request, 0).where
    left = sum(1 for node in nodes if reject_name(node, where) is None)
    if request.nodes <= left or not nodes:
        return None
    limits = describe_where(request)
    if not left:
        return Refusal(f"asked for a node {limits}; there is none", "see the nodes and their labels with: ginfo")
    return Refusal(
        f"asked for {request.nodes} nodes {limits}; there {'is' if left == 1 else 'are'} {left}",
        f"ask for at most that many: -N {left}",
    )
