"""Power caps of cards, as long as a run asks for one.

The driver keeps a limit after the process that set it, so the limit from before is on disk until the card has it back.
`WithPowerCaps` brings the cards in line with what is wanted at each reading, in this order:

    record     the limit from before and the cap, durably
    set        the cap, and read it back
    restore    once no run wants it: set the limit from before, read it back, drop the record

A crash between any two leaves a record, from which the next reader continues. A limit changed from outside since is
not restored. A card that already has a lower limit keeps it: a cap never raises one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusched.gpu.mig_layout import make_layouts
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.mig import MigOrder
from gpusched.model.units import plural_of
from gpusched.model.value import replace
from gpusched.paths import replace_file

if TYPE_CHECKING:
    from gpusched.ports import GpuSource, PowerLimits

_ROUNDING_W = 1.0
"""Drivers round limits."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A card whose limit was changed here."""

    before_w: float
    cap_w: float


class WithPowerCaps:
    """A source that also keeps the cards at the limits that are wanted.

    Args: limits: how limits are set; None where the source cannot. path: file with what was changed.
    """

    def __init__(self, source: GpuSource, limits: PowerLimits | None, path: str) -> None:
        self._source = source
        self._limits = limits
        self._path = path
        self._wanted: dict[str, float] | None = None
        """None until it is known: what was changed may be wanted still."""
        self._changes, self._trouble = _load(path)
        self._refused: dict[str, str] = {}
        """Why the last cap of a card, or the way back from it, failed; by UUID."""

    def want(self, caps: Mapping[str, float]) -> None:
        """Replace the caps that are wanted, in watts by UUID; the next reading applies them."""
        self._wanted = dict(caps)

    def read(self) -> GpuReading:
        """Read the source once, then bring the cards in line; samples of capped cards tell the outcome."""
        reading = self._source.read()
        wanted = self._wanted
        if reading.error is None and wanted is not None and (wanted or self._changes):
            reading = replace(reading, gpus=tuple(self._aligned(gpu, wanted.get(gpu.uuid)) for gpu in reading.gpus))
        troubles = self._troubles(reading.gpus)
        return replace(reading, power_troubles=troubles) if troubles else reading

    def carry_out(self, orders: Sequence[MigOrder], is_wanted: Callable[[], bool]) -> None:
        make_layouts(self._source, orders, is_wanted)

    def close(self) -> None:
        self._source.close()

    def _aligned(self, gpu: GpuSample, cap_w: float | None) -> GpuSample:
        change = self._changes.get(gpu.uuid)
        if gpu.is_lost or gpu.error or (cap_w is None and change is None):
            return gpu
        why_not = None
        if change is not None and (cap_w is None or not _is_close(change.cap_w, cap_w)):
            why_not = self._restore(gpu.uuid, change)
        found = self._cap(gpu.uuid, cap_w) if cap_w is not None and why_not is None else why_not
        if isinstance(found, str):
            self._refused[gpu.uuid] = found
            return gpu if cap_w is None else replace(gpu, power_cap_refused=found)
        self._refused.pop(gpu.uuid, None)
        return gpu if found is None else replace(gpu, power_cap_w=found, power_limit_w=found)

    def _cap(self, uuid: str, cap_w: float) -> float | str:
        """Hold a card to a cap. Returns the limit in force, or why the cap is not, as a clause."""
        if self._limits is None:
            return "this source of GPUs cannot set power limits"
        found = self._limits.power_limit(uuid)
        if isinstance(found, str):
            return found
        change = self._changes.get(uuid)
        if change is not None and _is_close(found.limit_w, change.cap_w):
            return found.limit_w
        if change is None or not _is_close(found.limit_w, change.before_w):
            if found.limit_w <= cap_w:
                return found.limit_w
            if cap_w < found.low_w:
                return f"{cap_w:g} W is below the {found.low_w:g} W that it accepts"
            change = _Change(found.limit_w, cap_w)
            if (why_not := self._record({**self._changes, uuid: change})) is not None:
                return why_not
        why_not = self._limits.set_power_limit(uuid, cap_w)
        after = self._limits.power_limit(uuid)
        if isinstance(after, str):
            return after
        if _is_close(after.limit_w, cap_w):
            return after.limit_w
        if _is_close(after.limit_w, change.before_w):
            self._forget(uuid)
        return why_not or f"the driver took {cap_w:g} W, but reports {after.limit_w:g} W"

    def _restore(self, uuid: str, change: _Change) -> str | None:
        """Give a card back the limit from before. Returns why that failed, as a clause."""
        if self._limits is None:
            return "this source of GPUs cannot set power limits"
        found = self._limits.power_limit(uuid)
        if isinstance(found, str):
            return found
        if _is_close(found.limit_w, change.cap_w):
            why_not = self._limits.set_power_limit(uuid, change.before_w)
            after = self._limits.power_limit(uuid)
            if isinstance(after, str) or not _is_close(after.limit_w, change.before_w):
                why = why_not or (after if isinstance(after, str) else f"it still has {after.limit_w:g} W")
                return f"its limit from before, {change.before_w:g} W, was not restored: {why}"
        return self._forget(uuid)

    def _forget(self, uuid: str) -> str | None:
        return self._record({known: one for known, one in self._changes.items() if known != uuid})

    def _record(self, changes: dict[str, _Change]) -> str | None:
        """Note on disk what is about to be changed, and what was restored. Returns why that failed, as a clause."""
        document = {uuid: {"before_w": one.before_w, "cap_w": one.cap_w} for uuid, one in changes.items()}
        try:
            _save(self._path, json.dumps(document))
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}"
        self._changes = changes
        return None

    def _troubles(self, gpus: tuple[GpuSample, ...]) -> tuple[str, ...]:
        """A sentence for each reason why cards do not have the limit that they should have."""
        by_reason: dict[str, list[int]] = {}
        for gpu in gpus:
            if gpu.uuid in self._refused:
                by_reason.setdefault(self._refused[gpu.uuid], []).append(gpu.index)
        found = [
            f"power cap of {plural_of(len(indices), 'GPU')} {', '.join(map(str, indices))}: {why}"
            for why, indices in by_reason.items()
        ]
        return (self._trouble, *found) if self._trouble else tuple(found)


def _is_close(one_w: float, other_w: float) -> bool:
    return abs(one_w - other_w) <= _ROUNDING_W


def _load(path: str) -> tuple[dict[str, _Change], str | None]:
    """What an earlier reader changed, and why that is unknown."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        return {uuid: _Change(float(one["before_w"]), float(one["cap_w"])) for uuid, one in document.items()}, None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        return {}, f"power caps of an earlier daemon are unknown: {path}: {why}; see: nvidia-smi -q -d POWER"


def _save(path: str, text: str) -> None:
    """Replace the file durably."""
    replace_file(path, text.encode())
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
