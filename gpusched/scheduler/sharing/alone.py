"""Slices by memory that a limit would keep waiting though nobody else held anything.

How much of a card a slice is depends on the cards that there are, so `admission`, which knows none, lets them pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.model.cluster import NodeView
from gpusched.model.job import JobSpec, Request
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.capacity import format_size_floor
from gpusched.scheduler.draft import Layout
from gpusched.scheduler.refusal import Refusal
from gpusched.scheduler.sharing.admission import qos_of
from gpusched.scheduler.sharing.limits import Denial
from gpusched.scheduler.sharing.quota import Quotas
from gpusched.scheduler.sharing.usage import demand
from gpusched.scheduler.words import describe


def slice_refusal(spec: JobSpec, user: str, nodes: Iterable[NodeView], settings: Settings) -> Refusal | None:
    """Refuse a slice that is more of a card than its queue or QOS lets one job or one user hold; None when it is not.

    While a node's driver is broken nobody knows its cards, so nothing is refused.
    """
    nodes = tuple(nodes)
    if spec.request.vram_mib is None or any(node.gpu_error is not None for node in nodes):
        return None
    layout = Layout(nodes, settings)
    # Nobody holds anything in these.
    quotas = Quotas(settings, layout)

    def denial(request: Request) -> Denial | None:
        found = quotas.denial(spec.queue, user, qos_of(spec, settings), demand(layout, request))
        return found if found is not None and found.facts.get("resource") == "gpus" else None

    refused = denial(spec.request)
    if refused is None:
        return None
    text = f"asked for {describe(spec.request)}; {refused.text}"
    limit = refused.facts["limit"]
    assert isinstance(limit, float)
    smaller_mib = (int(limit * size) // spec.request.gpus // spec.request.nodes for size in _sizes(layout))
    for vram_mib in sorted(smaller_mib, reverse=True):
        if 0 < vram_mib < spec.request.vram_mib and denial(replace(spec.request, vram_mib=vram_mib)) is None:
            return Refusal(text, f"ask for less: --vram {format_size_floor(vram_mib)}, or name another queue or QOS")
    return Refusal(text, "name another queue or QOS, or ask for no GPU")


def _sizes(layout: Layout) -> set[int]:
    return {card.view.vram_total_mib for card in layout.cards if card.view.vram_total_mib is not None}
