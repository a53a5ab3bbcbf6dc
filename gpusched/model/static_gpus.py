"""Devices that the settings declare because nothing can read them: `2xnpu:16GiB+1xfpga:8GiB`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpusched.model.units import parse_size_mib

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
MOST_STATIC = 1024

_COUNT = re.compile(r"(?:(?P<count>\d{1,4})x)?(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class StaticGroup:
    """Equal devices."""

    count: int
    name: str
    vram_mib: int


def parse_static(text: str) -> tuple[StaticGroup, ...]:
    """Read `2xnpu:16GiB`, also as `2x16GiB:npu`; groups are joined by `+`. Raises: ValueError with a sentence."""
    found = []
    for part in text.split("+"):
        match = _COUNT.fullmatch(part.strip())
        one, colon, other = match["rest"].partition(":") if match is not None else ("", "", "")
        one, other = one.strip(), other.strip()
        if match is None or not colon or not (one and other) or not int(match["count"] or 1):
            raise ValueError(f"{part.strip()!r} is not COUNTxNAME:SIZE, such as 2xnpu:16GiB")
        name, size = (other, one) if _is_size(one) else (one, other)
        if not name.isprintable() or ":" in name:
            raise ValueError(f"{name!r} is not a name of devices")
        found.append(StaticGroup(int(match["count"] or 1), name, parse_size_mib(size)))
    if sum(group.count for group in found) > MOST_STATIC:
        raise ValueError(f"more than {MOST_STATIC} devices are declared")
    return tuple(found)


def _is_size(text: str) -> bool:
    try:
        parse_size_mib(text)
    except ValueError:
        return False
    return True
