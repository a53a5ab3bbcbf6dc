"""What may turn a place down that has room: plug-ins."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.snapshot import ClassKey
from gpusched.policy.draft import Booking, Layout
from gpusched.policy.extension import Extensions
from gpusched.policy.placement import Guard


@dataclass(frozen=True, slots=True)
class _NodeFilter:
    """Plug-ins that look at the nodes of a place."""

    extensions: Extensions
    key: ClassKey
    layout: Layout

    def why_not(self, booking: Booking) -> str | None:
        for piece in booking.pieces():
            text = self.extensions.why_not_node(self.key, self.layout.nodes[piece.node])
            if text is not None:
                return text
        return None


class Guards:
    """Makes the guard of each class; None nearly always."""

    def __init__(self, layout: Layout, extensions: Extensions) -> None:
        self._layout = layout
        self._extensions = extensions

    def of(self, key: ClassKey) -> Guard | None:
        """The guard of this class, as of now."""
        return _NodeFilter(self._extensions, key, self._layout) if self._extensions.filters else None
