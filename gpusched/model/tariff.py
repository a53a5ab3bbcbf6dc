"""Prices and emissions of electricity over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from gpusched.model.value import Value

JOULES_PER_KWH = 3_600_000.0


class TariffRow(Value):
    """From this instant until the next row. None: the fixed value of the settings."""

    start_at: float
    price_per_kwh: float | None = None
    g_per_kwh: float | None = None


class Tariff(Value):
    """What a kilowatt-hour costs and emits: fixed values, and rows that rise in time and go before them."""

    price_per_kwh: float | None = None
    g_per_kwh: float | None = None
    currency: str = ""
    pue: float = 1.0
    """Energy of the building per energy of the machines."""
    rows: tuple[TariffRow, ...] = ()
    end_at: float | None = None
    """End of the last row; None: it has none."""

    @property
    def has_price(self) -> bool:
        return self.price_per_kwh is not None or any(row.price_per_kwh is not None for row in self.rows)

    @property
    def has_grams(self) -> bool:
        return self.g_per_kwh is not None or any(row.g_per_kwh is not None for row in self.rows)

    def at(self, instant: float) -> TariffRow:
        """What holds at an instant, the fixed values filled in."""
        place = bisect_right(self.rows, instant, key=lambda row: row.start_at) - 1
        if place < 0 or (self.end_at is not None and instant >= self.end_at):
            return TariffRow(instant, self.price_per_kwh, self.g_per_kwh)
        row = self.rows[place]
        return TariffRow(
            row.start_at,
            self.price_per_kwh if row.price_per_kwh is None else row.price_per_kwh,
            self.g_per_kwh if row.g_per_kwh is None else row.g_per_kwh,
        )

    def pieces(self, start_at: float, end_at: float) -> Iterator[tuple[float, float, TariffRow]]:
        """What holds over a time, piece by piece: start, end, values. A time of no length is one piece."""
        if end_at <= start_at:
            yield start_at, start_at, self.at(start_at)
            return
        at = start_at
        while at < end_at:
            until = min(self.next_change(at), end_at)
            yield at, until, self.at(at)
            at = until

    def next_change(self, instant: float) -> float:
        """The first instant after this one at which another row begins; infinity if none does."""
        place = bisect_right(self.rows, instant, key=lambda row: row.start_at)
        if place < len(self.rows):
            return self.rows[place].start_at
        return self.end_at if self.end_at is not None and self.end_at > instant else float("inf")

    def charge(self, start_at: float, end_at: float, joules: float) -> tuple[float | None, float | None]:
        """Money and grams for energy that was used evenly over a time, the building's part included; None without a
        price, or without a figure for emissions, for any of it."""
        money: float | None = 0.0
        grams: float | None = 0.0
        kwh = joules / JOULES_PER_KWH * self.pue
        for start, end, row in self.pieces(start_at, end_at):
            part = kwh if end_at <= start_at else kwh * (end - start) / (end_at - start_at)
            money = None if money is None or row.price_per_kwh is None else money + part * row.price_per_kwh
            grams = None if grams is None or row.g_per_kwh is None else grams + part * row.g_per_kwh
        return money, grams
