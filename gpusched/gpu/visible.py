"""CUDA_VISIBLE_DEVICES as a limit. NVML ignores it, so a scheduler has to honour it by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(value: str, uuids: Sequence[str | None]) -> frozenset[int]:
    """Indexes that the variable leaves, by CUDA's rules.

    Entries are indexes or beginnings of UUIDs. The first that names no device, or several, ends the
    list; a device named twice leaves none. Indexes count by PCI bus, as NVML's do.

    Args: uuids: by index; None for a device whose UUID is not known.
    """
    chosen: list[int] = []
    for entry in value.split(","):
        index = _resolve(entry.strip(), uuids)
        if index is None:
            break
        chosen.append(index)
    return frozenset(chosen) if len(set(chosen)) == len(chosen) else frozenset()


def _resolve(entry: str, uuids: Sequence[str | None]) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if len(entry) < 6 and int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
