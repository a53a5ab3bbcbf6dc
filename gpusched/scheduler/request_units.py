"""A request in booking units, and numeric checks of where it fits."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.bundles import part_of
from gpusched.model.job import Bundles, Request
from gpusched.model.leaning import NodeLeaning
from gpusched.model.value import replace

WHOLE_CARD = 1_000_000
"""A whole card in the unit of fractions."""


def millicpus_of(cpus: float) -> int:
    """Cores in booking units, thousandths."""
    return round(cpus * 1000)


def micros_of(fraction: float) -> int:
    """A fraction of a card in booking units, millionths."""
    return max(1, round(fraction * WHOLE_CARD))


def squeeze(model: str) -> str:
    """Normalise a model name for comparing types: lower case, without blanks, dashes and underscores."""
    return "".join(model.split()).replace("-", "").replace("_", "").lower()


CardKind = tuple[bool, str, int, bool, bool]
"""Slices or whole cards, type, minimum VRAM, whether it is a single card, whether through MPS."""

Where = tuple[bool, str | None, str | None, tuple[str, ...], tuple[str, ...], str | None, tuple[str, ...]]
"""Whether it needs GPUs, constraint, preference, node list, excluded nodes, container runtime, nodes with its image."""


@dataclass(frozen=True, slots=True)
class RequestUnits:
    """A request in booking units, with the user whose slices may share a card."""

    request: Request
    uid: int
    millicpus: int
    micros: int
    is_slice: bool
    kind: CardKind
    """Inputs of the fixed card filters."""
    where: Where
    """Inputs of the fixed node filters."""
    leaning: NodeLeaning | None = None

    @classmethod
    def of(
        cls, request: Request, uid: int, leaning: NodeLeaning | None = None, kind: CardKind | None = None
    ) -> RequestUnits:
        """The need of this user's request. A request for whole cards does not depend on the user.

        Args: kind: that of the job where the request is a part of it.
        """
        is_slice = request.shares_cards
        return cls(
            request=request,
            uid=uid,
            millicpus=millicpus_of(request.cpus),
            micros=0 if request.card_fraction is None else micros_of(request.card_fraction),
            is_slice=is_slice,
            kind=kind
            or (
                *(is_slice, squeeze(request.gpu_type or ""), request.min_vram_mib or 0),
                *(request.gpus == 1 and request.bundles is None, request.sm_percent is not None),
            ),
            where=(
                *(bool(request.gpus), request.constraint, request.prefer),
                *(request.nodelist, request.exclude, request.runtime, request.image_nodes),
            ),
            leaning=leaning,
        )

    def of_tail(self) -> RequestUnits:
        """Need of the last node of an uneven gang."""
        return RequestUnits.of(
            replace(self.request, gpus=self.request.tail_gpus, tail_gpus=0, nodes=1, licenses=()),
            self.uid,
            self.leaning,
        )

    @property
    def bundles(self) -> Bundles | None:
        """Set if the number of nodes, or what each of them books, is decided by the placement."""
        return self.request.bundles

    def of_bundles(self, count: int, nodes: int = 1) -> RequestUnits:
        """Need of each of so many nodes with `count` bundles: of one node, or of a gang in which all are equal."""
        # A MIG instance will do for a single GPU, but not for one of several.
        return RequestUnits.of(part_of(self.request, count, nodes), self.uid, self.leaning, self.kind)

    @property
    def signature(self) -> tuple[Request, int, NodeLeaning | None]:
        """Equal for needs that fit in exactly the same placements, and prefer the same."""
        return self.request, self.uid if self.is_slice else -1, self.leaning


class GpuDemand:
    """A sum over jobs, maintained incrementally."""

    __slots__ = ("insisted", "micros")

    def __init__(self) -> None:
        self.micros = 0
        """Millionths of cards that all of them ask for."""
        self.insisted: dict[Request, int] = {}
        """The part requested by jobs that insist, by constraint; see `constraint_strength`."""

    def copy(self) -> GpuDemand:
        twin = GpuDemand()
        twin.micros, twin.insisted = self.micros, self.insisted.copy()
        return twin

    def add(self, insists: Request | None, micros: int) -> None:
        """Add millionths, or subtract them: the sums do not depend on the order."""
        self.micros += micros
        if insists is None:
            return
        after = self.insisted.get(insists, 0) + micros
        if after:
            self.insisted[insists] = after
        else:
            self.insisted.pop(insists, None)


def micros_asked(request: Request, cards: int | None = None) -> int:
    """Millionths of cards that a request asks for, or `cards` cards of it; slices by VRAM count as whole cards."""
    if cards is None:
        cards = request.total_gpus
    return cards * (WHOLE_CARD if request.card_fraction is None else micros_of(request.card_fraction))


def constraint_strength(request: Request) -> Request | None:
    """Constraints of a request for GPUs, as a minimal request with the same ones; None if it has none."""
    if not request.gpus or not (
        request.constraint or request.gpu_type or request.min_vram_mib or request.nodelist or request.exclude
    ):
        return None
    is_slice = request.shares_cards
    return replace(
        insisting_on_nothing(request),
        gpu_type=request.gpu_type,
        min_vram_mib=request.min_vram_mib,
        constraint=request.constraint,
        nodelist=request.nodelist,
        exclude=request.exclude,
        vram_mib=1 if is_slice else None,
    )


def insisting_on_nothing(request: Request) -> Request:
    """The same form of cards with any model, label and node."""
    return Request(gpus=min(request.gpus, 2), cpus=0.0, vram_mib=1 if request.shares_cards else None)
