"""Eligible nodes and cards for a request, and those with room: every filter by name.

Constraints on labels are written `a100&nvlink`, `imagenet|coco`, `!old`, `a&(b|c)`: `&` binds tighter than
`|`, `!` tighter than both. Labels are compared exactly, including case.

Filters that cannot change within a cycle (labels, type, size, health) run once per kind of request; the rest
depend on bookings. Rejections are counted per filter, so that "why not" is data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from gpusched.model.cluster import NodeView
from gpusched.model.value import Value
from gpusched.scheduler.cluster_state import CardShare, ClusterLayout, ClusterState, LayoutGpu, has_counts
from gpusched.scheduler.load_limits import LoadLimits
from gpusched.scheduler.request_units import WHOLE_CARD, CardKind, RequestUnits, Where

_OPERATORS = "&|!()"
_RESERVED = "[]{}*,;'\"`$<>\\"
"""Characters reserved for future syntax, not allowed in labels."""

MOST_CHARACTERS = 1000
_MOST_NESTED = 50

Tree = tuple[str, tuple[object, ...]]
"""An operator with its operands, which are trees; `label` has the label itself."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A parsed constraint."""

    text: str
    tree: Tree
    labels: tuple[str, ...]
    """All labels in it, including those after `!`, in order of appearance."""

    def admits(self, labels: Collection[str]) -> bool:
        """Whether a node with these labels satisfies the constraint."""
        return _holds(self.tree, labels)


@lru_cache(maxsize=1024)
def parse_constraint(text: str) -> Constraint:
    """Parse a constraint. Raises: ValueError with a sentence."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a constraint has at most {MOST_CHARACTERS} characters; this one has {len(text)}")
    reader = _Reader(text)
    tree = reader.any_of(0)
    if reader.next:
        raise reader.error(f"{reader.next!r} is not expected after {reader.last!r}")
    return Constraint(text, tree, tuple(dict.fromkeys(reader.labels)))


class _Reader:
    """Recursive-descent parser with one word (a label or an operator) of lookahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = _words(text)
        self._at = 0
        self.labels: list[str] = []

    @property
    def next(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    @property
    def last(self) -> str:
        return self._words[self._at - 1] if self._at else ""

    def any_of(self, depth: int) -> Tree:
        """Parse alternatives joined by `|`."""
        return self._joined("|", depth)

    def _joined(self, operator: str, depth: int) -> Tree:
        parts: list[object] = []
        while True:
            parts.append(self._joined("&", depth) if operator == "|" else self._one(depth))
            if self.next != operator:
                break
            self._at += 1
        return (operator, tuple(parts))

    def _one(self, depth: int) -> Tree:
        if depth > _MOST_NESTED:
            raise self.error(f"more than {_MOST_NESTED} nested brackets are not supported")
        word = self.next
        if not word or word in "&|)":
            after = f"after {self.last!r}" if self.last else "at its beginning"
            raise self.error(f"a label is missing {after}")
        self._at += 1
        if word == "!":
            return ("!", (self._one(depth + 1),))
        if word == "(":
            inner = self.any_of(depth + 1)
            if self.next != ")":
                raise self.error("a ')' is missing" if not self.next else f"{self.next!r} is not expected here")
            self._at += 1
            return inner
        self.labels.append(word)
        return ("label", (word,))

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self._text!r} is not a constraint: {problem}")


def _words(text: str) -> list[str]:
    words: list[str] = []
    is_open = False
    for character in text:
        if character.isspace():
            is_open = False
        elif character in _RESERVED:
            raise ValueError(f"{text!r} is not a constraint: {character!r} cannot be in a label")
        elif character in _OPERATORS:
            words.append(character)
            is_open = False
        elif is_open:
            words[-1] += character
        else:
            words.append(character)
            is_open = True
    return words


def _holds(tree: Tree, labels: Collection[str]) -> bool:
    operator, parts = tree
    if operator == "label":
        return parts[0] in labels
    found = (_holds(part, labels) for part in parts)  # type: ignore[arg-type]
    if operator == "!":
        return not next(found)
    return any(found) if operator == "|" else all(found)


class Rejection(str, Enum):
    """Why a filter rejected a node or a card."""

    NODE_NOT_ASKED_FOR = "node not in the node list"
    NODE_EXCLUDED = "node excluded"
    NODE_LABELS = "node without the labels"
    NODE_RUNTIME = "node without the container runtime"
    NODE_IMAGE = "node without the image"
    NODE_NOT_AVAILABLE = "node not available"
    GPU_DRIVER = "GPU driver broken"
    LOAD = "load ceiling"
    CPUS = "not enough CPUs"
    MEMORY = "not enough memory"
    RESOURCES = "not enough of a custom resource"
    LICENSES = "not enough licenses"
    EXCLUSIVE = "node held by an exclusive job"
    OCCUPIED = "node not empty"
    GPUS = "not enough GPUs"
    LINKED = "not enough linked GPUs"
    CARD_TYPE = "GPU of another type"
    CARD_SMALL = "GPU with less VRAM than requested"
    CARD_LOST = "GPU lost"
    CARD_DIVIDED = "GPU divided by MIG"
    CARD_INSTANCE = "MIG instance; a job can use only one"
    CARD_NOT_AVAILABLE = "GPU not available"
    CARD_FOREIGN = "GPU used without a booking"
    CARD_UNSHARABLE = "GPU cannot be shared"
    CARD_WITHOUT_MPS = "GPU without MPS"
    CARD_SIZE_UNKNOWN = "GPU of unknown VRAM"
    CARD_BOOKED = "GPU booked"
    CARD_FULL = "shared GPU without room"
    CARD_BUSY = "shared GPU too busy"
    GUARD = "kept for others"

    __str__ = str.__str__


Tally = Counter[Rejection]


# --- what does not change within a cycle ------------------------------------------------------------


class NodeCandidates(Value):
    """An eligible node with its candidate cards, best first; all cards, unfiltered, for a job without GPUs."""

    node: int
    cards: tuple[LayoutGpu, ...]
    is_second: bool
    """Whether it lacks the labels that the request prefers."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes and cards that pass the fixed filters, and the number of rejections."""

    places: tuple[NodeCandidates, ...]
    cards_of: tuple[tuple[LayoutGpu, ...], ...]
    """Per node of the layout, the cards that pass; empty for nodes that do not match."""
    asked: tuple[int, ...]
    """Nodes that pass all filters except health."""
    rejected: Tally


def pool(layout: ClusterLayout, need: RequestUnits) -> Pool:
    """Nodes and cards that could hold such a job, or a part of it, if nothing were booked."""
    mark = need.kind, need.where
    known = layout.pools.get(mark)
    if isinstance(known, Pool):
        return known
    made = layout.pools[mark] = _make_pool(layout, need)
    return made


def _make_pool(layout: ClusterLayout, need: RequestUnits) -> Pool:
    rejected: Tally = Counter()
    places: list[NodeCandidates] = []
    cards_of: list[tuple[LayoutGpu, ...]] = []
    asked: list[int] = []
    has_gpus, _, prefer, *_ = need.where
    for number, (node, cards) in enumerate(zip(layout.nodes, layout.cards_of, strict=True)):
        rejection = reject_name(node, need.where)
        if rejection is not None:
            rejected[rejection] += 1
            cards_of.append(())
            continue
        asked.append(number)
        passed = _sift(cards, need.kind, rejected) if has_gpus else cards
        cards_of.append(passed)
        rejection = reject_health(node, has_gpus)
        if rejection is None:
            is_second = prefer is not None and not _admits(prefer, node)
            places.append(NodeCandidates(number, passed, is_second))
        else:
            rejected[rejection] += 1
    return Pool(tuple(places), tuple(cards_of), tuple(asked), rejected)


def _sift(cards: tuple[LayoutGpu, ...], kind: CardKind, rejected: Tally) -> tuple[LayoutGpu, ...]:
    passed = []
    for card in cards:
        rejection = reject_card(card, kind)
        if rejection is None:
            passed.append(card)
        else:
            rejected[rejection] += 1
    return tuple(sorted(passed, key=_by_size))


def _by_size(card: LayoutGpu) -> tuple[int, bool, int, int]:
    """Fastest card first, then the smallest sufficient, so that large ones stay free; unknown sizes last."""
    total = card.view.vram_total_mib
    return card.speed_cost, total is None, total or 0, card.number


def reject_name(node: NodeView, where: Where) -> Rejection | None:
    """The first filter by name or label that rejects this node."""
    _, constraint, _, nodelist, exclude, runtime, image_nodes = where
    if nodelist and node.name not in nodelist:
        return Rejection.NODE_NOT_ASKED_FOR
    if node.name in exclude:
        return Rejection.NODE_EXCLUDED
    if constraint is not None and not node.is_unknown and not _admits(constraint, node):
        return Rejection.NODE_LABELS
    if runtime is not None and not node.is_unknown and runtime not in node.runtimes:
        return Rejection.NODE_RUNTIME
    if image_nodes and node.name not in image_nodes:
        return Rejection.NODE_IMAGE
    return None


def _admits(constraint: str, node: NodeView) -> bool:
    try:
        return parse_constraint(constraint).admits(node.labels)
    except ValueError:
        # Refused at submission; an invalid one recorded anyway must not stop the other jobs.
        return False


def reject_health(node: NodeView, has_gpus: bool) -> Rejection | None:
    """Reject a node that must not be used now."""
    if node.why_not is not None:
        return Rejection.NODE_NOT_AVAILABLE
    if has_gpus and node.gpu_error is not None:
        return Rejection.GPU_DRIVER
    return None


def reject_card(card: LayoutGpu, kind: CardKind) -> Rejection | None:
    """The first fixed filter that rejects this card, regardless of bookings."""
    is_slice, model, min_vram_mib, is_single, needs_mps = kind
    view = card.view
    if view.is_divided:
        return Rejection.CARD_DIVIDED
    if not view.is_present:
        return Rejection.CARD_LOST
    if not card.is_of_type(model):
        return Rejection.CARD_TYPE
    if view.mig_profile is not None and not is_single:
        return Rejection.CARD_INSTANCE
    if (min_vram_mib or is_slice) and view.vram_total_mib is None:
        return Rejection.CARD_SIZE_UNKNOWN
    if min_vram_mib and view.vram_total_mib is not None and view.vram_total_mib < min_vram_mib:
        return Rejection.CARD_SMALL
    if is_slice and not view.can_share:
        return Rejection.CARD_UNSHARABLE
    if needs_mps and view.why_not_mps is not None:
        return Rejection.CARD_WITHOUT_MPS
    if view.why_not is not None:
        return Rejection.CARD_NOT_AVAILABLE
    if not is_slice and view.why_not_whole is not None:
        return Rejection.CARD_FOREIGN
    return None


# --- what depends on the bookings -------------------------------------------------------------------


def reject_cluster(draft: ClusterState, need: RequestUnits) -> Rejection | None:
    """Reject for lack of a cluster-wide resource."""
    licenses = need.request.licenses
    return None if not licenses or has_counts(draft.free_licenses, licenses) else Rejection.LICENSES


def reject_node(draft: ClusterState, need: RequestUnits, node: int, ceilings: LoadLimits | None) -> Rejection | None:
    """Reject for the first resource other than GPUs that this node is short of now."""
    request = need.request
    if draft.exclusive[node]:
        return Rejection.EXCLUSIVE
    if need.millicpus and need.millicpus > draft.free_millicpus[node]:
        return Rejection.CPUS
    if request.mem_mib and request.mem_mib > draft.free_mem_mib[node]:
        return Rejection.MEMORY
    if draft.layout.is_oversubscribed:
        rejection = reject_size(draft.layout.nodes[node], need)
        if rejection is not None:
            return rejection
    if request.resources and not has_counts(draft.free_resources[node], request.resources):
        return Rejection.RESOURCES
    if request.is_exclusive and draft.jobs[node]:
        return Rejection.OCCUPIED
    if ceilings is not None and ceilings.why_not(node, request.mem_mib) is not None:
        return Rejection.LOAD
    return None


def reject_size(node: NodeView, need: RequestUnits) -> Rejection | None:
    """Reject one job that exceeds the node's size: oversubscription applies only to several jobs together."""
    if need.request.cpus > node.cpus:
        return Rejection.CPUS
    return Rejection.MEMORY if need.request.mem_mib > node.mem_mib else None


def slice_of(draft: ClusterState, need: RequestUnits, card: LayoutGpu) -> tuple[CardShare | None, int]:
    """The slice this need would take of a card and the VRAM left beside it in MiB; no slice if it does not fit.

    A fraction books the same fraction of the slice capacity, so that two halves fill a card.
    """
    number = card.number
    if draft.wholes[number] or (draft.slices[number] and draft.owner[number] != need.uid):
        return None, 0
    vram_mib = slice_mib(need, card)
    if need.request.vram_mib is not None and draft.layout.is_oversubscribed and vram_mib > largest_slice_mib(card):
        return None, 0
    left_mib = draft.layout.slice_limits[number] - draft.vram_mib[number] - vram_mib
    if card.host_mib:
        left_mib = min(left_mib, host_room_of(draft, card) - node_mem_mib(need, card))
    if left_mib < 0 or draft.micros[number] + need.micros > WHOLE_CARD:
        return None, left_mib
    return CardShare(number, False, vram_mib, need.micros), left_mib


def room_of(draft: ClusterState, need: RequestUnits, card: LayoutGpu) -> int:
    """VRAM that slices of this need may still book of a card, in MiB; negative if there is none."""
    room_mib = draft.layout.slice_limits[card.number] - draft.vram_mib[card.number]
    return min(room_mib, host_room_of(draft, card) - need.request.mem_mib) if card.host_mib else room_mib


def host_room_of(draft: ClusterState, card: LayoutGpu) -> int:
    """Node memory that slices of a card without its own memory may still book, excluding foreign use."""
    foreign_mib = (card.slice_total_mib or 0) - draft.layout.slice_limits[card.number]
    return draft.free_mem_mib[card.node] - foreign_mib


def has_host_room(draft: ClusterState, need: RequestUnits, card: LayoutGpu) -> bool:
    """Whether the node's memory suffices for the requested number of whole cards like this one."""
    return not card.host_mib or node_mem_mib(need, card) <= draft.free_mem_mib[card.node]


def node_mem_mib(need: RequestUnits, card: LayoutGpu) -> int:
    """Node memory that the need takes if it is given cards like this one."""
    request = need.request
    if not card.host_mib:
        return request.mem_mib
    if need.is_slice:
        return request.mem_mib + request.gpus * slice_mib(need, card)
    return max(request.mem_mib, request.gpus * card.host_mib)


def slice_mib(need: RequestUnits, card: LayoutGpu) -> int:
    """VRAM that the need's slice of this card books."""
    if need.request.vram_mib is not None:
        return need.request.vram_mib
    return (card.slice_total_mib or 0) * need.micros // WHOLE_CARD


def largest_slice_mib(card: LayoutGpu) -> int:
    """Largest slice that may be booked; of an oversubscribed card at most its physical size."""
    return min(card.slice_total_mib or 0, card.view.vram_total_mib or 0)
