"""Links between cards, and the NUMA node of each; read at start and rarely afterwards.

A card is linked with another when it has an active NVLink and the driver allows mutual access over
NVLink; that holds behind an NVSwitch too, where the far end of a link is the switch. If the driver is too old
for that query, it is asked for the card at the far end of each link. Cards linked through others count as
linked: the communication libraries build rings through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpusched.gpu.gateway import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, Gateway, Present

EVERY_S = 600.0
"""Interval between readings; added or removed cards trigger one at once."""

_P2P_NVLINK, _P2P_OK = 2, 0
_MOST_LINKS = 36
_SCOPE_NODE, _MASK_WORDS, _WORD_BITS = 0, 16, 64


@dataclass(frozen=True, slots=True)
class Spot:
    """Location of one card. None: unknown, or no links."""

    link_group: int | None = None
    """Lowest index among the linked cards, including itself."""
    numa: int | None = None


NOWHERE = Spot()


def sysfs_numa(pci_bus_id: str) -> int | None:
    """NUMA node of a PCI device according to the kernel; None where it reports none."""
    domain, _, rest = pci_bus_id.lower().partition(":")
    try:
        with open(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node", "rb") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


class Topology:
    """Remembers readings, so that a lost card keeps its location."""

    def __init__(self, nvml: Gateway) -> None:
        self._nvml = nvml
        self._spots: dict[int, Spot] = {}
        self._read_at = float("-inf")
        self._of: tuple[int, ...] = ()

    def spots(self, now: float, present: Sequence[Present]) -> Mapping[int, Spot]:
        """Spots by index, of present and former cards. Args: now: monotonic seconds."""
        indices = tuple(card.index for card in present)
        if now - self._read_at >= EVERY_S or indices != self._of:
            self._read_at, self._of = now, indices
            groups = self._groups(present)
            for card in present:
                self._spots[card.index] = Spot(groups.get(card.index), self._numa(card))
        return self._spots

    # --- links ----------------------------------------------------------------------------------

    def _groups(self, present: Sequence[Present]) -> dict[int, int]:
        active = {card.index: links for card in present if (links := self._active_links(card))}
        cards = [card for card in present if card.index in active]
        pairs = []
        for at, card in enumerate(cards):
            for other in cards[at + 1 :]:
                status, code = self._nvml.ask("nvmlDeviceGetP2PStatus", card.handle, other.handle, _P2P_NVLINK)
                if code == FUNCTION_NOT_FOUND:
                    return _joined(self._far_ends(cards, active))
                if code == 0 and status == _P2P_OK:
                    pairs.append((card.index, other.index))
        return _joined(pairs)

    def _active_links(self, card: Present) -> list[int]:
        links = []
        for link in range(_MOST_LINKS):
            state, code = self._nvml.ask("nvmlDeviceGetNvLinkState", card.handle, link)
            if code == INVALID_ARGUMENT or (code and not link):
                break  # no more links; or no NVLink, or a driver that does not know the question
            if state:
                links.append(link)
        return links

    def _far_ends(self, cards: Sequence[Present], active: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
        by_address = {_address(card.pci_bus_id): card.index for card in cards if card.pci_bus_id is not None}
        pairs = []
        for card in cards:
            for link in active[card.index]:
                pci, code = self._nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", card.handle, link)
                other = None if code else by_address.get(_address(pci.busId))
                if other is not None:
                    pairs.append((card.index, other))
        return pairs

    # --- memory ---------------------------------------------------------------------------------

    def _numa(self, card: Present) -> int | None:
        node = None if card.pci_bus_id is None else sysfs_numa(card.pci_bus_id)
        if node is not None:
            return node
        # Containers may hide the PCI devices; nvmlDeviceGetNumaNodeId is no help, it is about the card's own memory.
        mask, code = self._nvml.ask("nvmlDeviceGetMemoryAffinity", card.handle, _MASK_WORDS, _SCOPE_NODE)
        if code:
            return None
        nodes = [
            number * _WORD_BITS + bit
            for number, word in enumerate(mask)
            for bit in range(_WORD_BITS)
            if word >> bit & 1
        ]
        return nodes[0] if len(nodes) == 1 else None


def _address(bus_id: Any) -> str:
    """Normalise a bus id for comparison: old bindings return bytes, and the domain has four or eight digits."""
    text = bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)
    return text.strip("\0").lower()[-12:]


def _joined(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Lowest member by member, of each set connected by these pairs."""
    groups: dict[int, set[int]] = {}
    for one, other in pairs:
        both = groups.get(one, {one}) | groups.get(other, {other})
        groups.update(dict.fromkeys(both, both))
    return {index: min(members) for index, members in groups.items() if len(members) > 1}
