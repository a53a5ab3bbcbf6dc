"""Samples of cards and queues over time: their fields, fixed-size records, and buckets that hold their means.

    card    use and bandwidth in percent, temperature, VRAM in units of 16 MiB, power in tenths of a watt, joules
    queue   jobs running, pending and held, GPUs held and idle, in hundredths: means of whole numbers are not whole

A record is 16 or 20 bytes; all bits set mean unknown, which is never zero. Instants are UTC epoch seconds, so that a
day has as many records whether or not the clocks change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

Values = Sequence[float | None]
"""One value per field of a kind; None is unknown."""


class Fold(Enum):
    """How the values of a field become that of a longer time."""

    MEAN = "mean"
    MAX = "max"
    SUM = "sum"


@dataclass(frozen=True)
class SampleField:
    name: str
    code: str
    """Of `struct`."""
    scale: float
    """The record holds the value times this, rounded."""
    fold: Fold = Fold.MEAN

    @cached_property
    def unknown(self) -> int:
        return (1 << 8 * struct.calcsize("<" + self.code)) - 1


@dataclass(frozen=True)
class SampleKind:
    """One sort of samples: its fields and their record."""

    name: str
    fields: tuple[SampleField, ...]

    @cached_property
    def record(self) -> struct.Struct:
        return struct.Struct("<" + "".join(field.code for field in self.fields))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @cached_property
    def are_max(self) -> tuple[bool, ...]:
        """Of each field, whether the largest value counts."""
        return tuple(field.fold is Fold.MAX for field in self.fields)

    @cached_property
    def _packing(self) -> tuple[tuple[float, int], ...]:
        return tuple((field.scale, field.unknown) for field in self.fields)

    def pack(self, values: Values) -> bytes:
        """Encode values, clipped to what the record can hold."""
        return self.record.pack(
            *(
                unknown if value is None else min(max(0, round(value * scale)), unknown - 1)
                for value, (scale, unknown) in zip(values, self._packing, strict=True)
            )
        )

    def unpack(self, record: bytes | bytearray) -> tuple[float | None, ...]:
        return tuple(
            None if number == unknown else number / scale
            for number, (scale, unknown) in zip(self.record.unpack(record), self._packing, strict=True)
        )

    @cached_property
    def nothing(self) -> bytes:
        """The record of a time about which nothing is known."""
        return b"\xff" * self.record.size


CARD = SampleKind(
    "card",
    (
        SampleField("use", "B", 100),
        SampleField("use_max", "B", 100, Fold.MAX),
        SampleField("bandwidth", "B", 100),
        SampleField("temperature_c", "B", 1),
        SampleField("vram_mib", "H", 1 / 16),
        SampleField("vram_max_mib", "H", 1 / 16, Fold.MAX),
        SampleField("power_w", "H", 10),
        SampleField("power_max_w", "H", 10, Fold.MAX),
        SampleField("energy_j", "I", 1, Fold.SUM),
    ),
)
QUEUE = SampleKind(
    "queue",
    tuple(SampleField(name, "I", 100) for name in ("running", "pending", "held", "gpus_held", "gpus_idle")),
)
KINDS = {kind.name: kind for kind in (CARD, QUEUE)}


def card_values(
    use: float | None,
    bandwidth: float | None,
    temperature_c: float | None,
    vram_mib: float | None,
    power_w: float | None,
    energy_j: float | None,
) -> Values:
    """Values of `CARD` at one instant."""
    return use, use, bandwidth, temperature_c, vram_mib, vram_mib, power_w, power_w, energy_j


class Bucket:
    """Values of one kind over some time, folded."""

    __slots__ = ("_amounts", "_counts", "_kind")

    def __init__(self, kind: SampleKind) -> None:
        self._kind = kind
        self._amounts = [0.0] * len(kind.fields)
        self._counts = [0] * len(kind.fields)

    @property
    def is_empty(self) -> bool:
        return not any(self._counts)

    def add(self, values: Values) -> None:
        amounts, counts = self._amounts, self._counts
        for at, (value, is_max) in enumerate(zip(values, self._kind.are_max, strict=True)):
            if value is None:
                continue
            if not is_max:
                amounts[at] += value
            elif value > amounts[at] or not counts[at]:
                amounts[at] = value
            counts[at] += 1

    def merge(self, other: Bucket) -> None:
        """Take in another bucket; each sample has the same weight."""
        for at, field in enumerate(self._kind.fields):
            if field.fold is Fold.MAX:
                if other._counts[at]:
                    known = [one._amounts[at] for one in (self, other) if one._counts[at]]
                    self._amounts[at] = max(known)
            else:
                self._amounts[at] += other._amounts[at]
            self._counts[at] += other._counts[at]

    def values(self) -> tuple[float | None, ...]:
        return tuple(
            None if not count else amount / count if field.fold is Fold.MEAN else amount
            for amount, count, field in zip(self._amounts, self._counts, self._kind.fields, strict=True)
        )


def fold(kind: SampleKind, rows: Iterable[Values]) -> tuple[float | None, ...]:
    """One row for several of equal length."""
    bucket = Bucket(kind)
    for values in rows:
        bucket.add(values)
    return bucket.values()


def fold_records(kind: SampleKind, data: bytes, size: int, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Columns of the named fields, one value for each `size` records; of a last part too. By column, since a year of
    one card has fifty thousand records."""
    columns = list(zip(*kind.record.iter_unpack(data), strict=True)) or [() for _ in kind.fields]
    return {
        field.name: [_fold_numbers(field, column[at : at + size]) for at in range(0, len(column), size)]
        for field, column in zip(kind.fields, columns, strict=True)
        if field.name in names
    }


def _fold_numbers(field: SampleField, numbers: Sequence[int]) -> float | None:
    unknown = field.unknown
    known = [number for number in numbers if number != unknown]
    if not known:
        return None
    if field.fold is Fold.MAX:
        return max(known) / field.scale
    return sum(known) / (field.scale * (len(known) if field.fold is Fold.MEAN else 1))


@dataclass(frozen=True, slots=True)
class SeriesPiece:
    """Part of a series: one value per step and field; None is unknown."""

    start_at: float
    step_s: int
    columns: dict[str, list[float | None]]


MOST_BUCKETS = 256


class FoldingSeries:
    """A series of at most 256 buckets from the first sample on; when it is full, pairs merge and each lasts twice as
    long. So a run of any length has a curve of bounded size.

    A sample from before the last bucket, as after the clock was set back, goes into the last one.
    """

    __slots__ = ("_buckets", "kind", "start_at", "step_s")

    def __init__(self, kind: SampleKind, start_at: float, step_s: int = 1) -> None:
        self.kind = kind
        self.start_at = start_at
        self.step_s = step_s
        self._buckets: list[Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def end_at(self) -> float:
        return self.start_at + len(self._buckets) * self.step_s

    def add(self, at: float, values: Values) -> None:
        place = max(int((at - self.start_at) // self.step_s), len(self._buckets) - 1, 0)
        while place >= MOST_BUCKETS:
            self._halve()
            place //= 2
        while len(self._buckets) <= place:
            self._buckets.append(Bucket(self.kind))
        self._buckets[place].add(values)

    def _halve(self) -> None:
        for first, second in zip(self._buckets[::2], self._buckets[1::2], strict=False):
            first.merge(second)
        self._buckets = self._buckets[::2]
        self.step_s *= 2

    def rows(self) -> list[tuple[float | None, ...]]:
        return [bucket.values() for bucket in self._buckets]

    def pack(self) -> bytes:
        return b"".join(self.kind.pack(bucket.values()) for bucket in self._buckets)

    @classmethod
    def unpack(cls, kind: SampleKind, start_at: float, step_s: int, data: bytes) -> FoldingSeries:
        """Raises: ValueError for data that no series can have."""
        size = kind.record.size
        if len(data) % size or len(data) > size * MOST_BUCKETS or step_s < 1:
            raise ValueError(f"{len(data)} bytes are not a series of {kind.name}")
        made = cls(kind, start_at, step_s)
        for at in range(0, len(data), size):
            bucket = Bucket(kind)
            bucket.add(kind.unpack(data[at : at + size]))
            made._buckets.append(bucket)
        return made
