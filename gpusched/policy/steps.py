"""What is free of one number over time, as steps, and where in it something fits for as long as it takes.

The profile of a machine on which there is one place or none: what a reservation needs is then a number and no search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Steps:
    """Free units from one instant to the next; the last step lasts for ever.

    Invariant: the instants are increasing, and no step is negative.
    """

    __slots__ = ("_at", "_free")

    def __init__(self, now: float, free: int, ends: Iterable[tuple[float, int]]) -> None:
        """Args: ends: instants after `now` in order, each with what becomes free then."""
        self._at, self._free = [now], [free]
        for at, amount in ends:
            free += amount
            if at == self._at[-1]:
                self._free[-1] = free
            else:
                self._at.append(at)
                self._free.append(free)

    def move_on(self, now: float) -> None:
        """Forget what is over by now."""
        gone = bisect_left(self._at, now)
        if gone == len(self._at) or self._at[gone] > now:
            gone -= 1
        del self._at[:gone], self._free[:gone]
        self._at[0] = now

    def take(self, amount: int, duration_s: float) -> float | None:
        """Take so many for so long from the first instant on at which they are free for all of it.

        Returns: that instant; None when there never are so many, and nothing was taken.
        """
        at, free = self._at, self._free
        first, count = 0, len(at)
        while first < count:
            if free[first] < amount:
                first += 1
                continue
            end = at[first] + duration_s
            last = first + 1
            while last < count and at[last] < end and free[last] >= amount:
                last += 1
            if last < count and at[last] < end:
                first = last + 1
                continue
            if last == count or at[last] > end:
                at.insert(last, end)
                free.insert(last, free[last - 1])
            for step in range(first, last):
                free[step] -= amount
            return at[first]
        return None
