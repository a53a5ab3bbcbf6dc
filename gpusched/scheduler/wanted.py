"""The GPUs that jobs ask for, and which of them are asked for by jobs that insist on some cards."""

from __future__ import annotations

from gpusched.model.job import Request
from gpusched.model.value import replace
from gpusched.scheduler.amounts import WHOLE_CARD, micros_of


class Wanted:
    """A sum over jobs, kept up to date job by job."""

    __slots__ = ("insisted", "micros")

    def __init__(self) -> None:
        self.micros = 0
        """Millionths of cards that all of them ask for."""
        self.insisted: dict[Request, int] = {}
        """Of those, what is asked for by jobs that insist, by what they insist on; see `insistence`."""

    def copy(self) -> Wanted:
        """An independent sum of the same."""
        twin = Wanted()
        twin.micros, twin.insisted = self.micros, self.insisted.copy()
        return twin

    def add(self, insists: Request | None, micros: int) -> None:
        """Count so many millionths more, or fewer: the sums do not hang on the order."""
        self.micros += micros
        if insists is None:
            return
        after = self.insisted.get(insists, 0) + micros
        if after:
            self.insisted[insists] = after
        else:
            self.insisted.pop(insists, None)


def micros_asked(request: Request, cards: int | None = None) -> int:
    """Millionths of cards that a request asks for, or so many cards of it; slices by VRAM count as whole cards."""
    if cards is None:
        cards = request.gpus * request.nodes + request.tail_gpus
    return cards * (WHOLE_CARD if request.gpu_fraction is None else micros_of(request.gpu_fraction))


def insistence(request: Request) -> Request | None:
    """What a request for GPUs insists on, in the form of a request for the like; None where it does not."""
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
    """A request for the same form of cards that any model, label and node will do for."""
    return Request(gpus=min(request.gpus, 2), cpus=0.0, vram_mib=1 if request.shares_cards else None)
