"""A request in the units in which it is booked, and what can be said of where it fits before anything is booked."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.job import Request
from gpusched.model.value import replace
from gpusched.scheduler.amounts import micros_of, millicpus_of, squeeze

CardKind = tuple[bool, str, int, bool]
"""Slices or whole cards, type, least VRAM, whether it is one card alone."""

Where = tuple[bool, str | None, str | None, tuple[str, ...], tuple[str, ...]]
"""Whether GPUs are asked for, constraint, preference, node list, excluded nodes."""


@dataclass(frozen=True, slots=True)
class Need:
    """A request in the units of the draft, with the user whose slices may share a card."""

    request: Request
    uid: int
    millicpus: int
    micros: int
    is_slice: bool
    kind: CardKind
    """What the fixed filters of cards look at."""
    where: Where
    """What the fixed filters of nodes look at."""

    @classmethod
    def of(cls, request: Request, uid: int) -> Need:
        """The need of this user's request. A request for whole cards does not depend on the user."""
        is_slice = request.shares_cards
        return cls(
            request=request,
            uid=uid,
            millicpus=millicpus_of(request.cpus),
            micros=0 if request.gpu_fraction is None else micros_of(request.gpu_fraction),
            is_slice=is_slice,
            kind=(is_slice, squeeze(request.gpu_type or ""), request.min_vram_mib or 0, request.gpus == 1),
            where=(bool(request.gpus), request.constraint, request.prefer, request.nodelist, request.exclude),
        )

    def of_tail(self) -> Need:
        """What the last node of an uneven gang has to hold."""
        return Need.of(replace(self.request, gpus=self.request.tail_gpus, tail_gpus=0, nodes=1, licenses=()), self.uid)

    @property
    def signature(self) -> tuple[Request, int]:
        """Equal for needs that fit in exactly the same places."""
        return self.request, self.uid if self.is_slice else -1
