"""Numbers of array tasks: `0-9,20-30:2`, as in Slurm.

A set is a tuple of ascending, disjoint ranges. Costs depend on the number of ranges, not on the size of the array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gpusched.model.states import JobState
from gpusched.model.units import is_digits

MAX_TASK = 4_000_000
"""Maximum task number."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Task numbers in start order."""

    ranges: tuple[range, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> TaskSet:
        """Build a set of these numbers with few ranges (greedy)."""
        return cls(tuple(_runs(sorted(set(numbers)))))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, number: object) -> bool:
        return any(number in part for part in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges:
            yield from part

    def __str__(self) -> str:
        return ",".join(map(_written, self.ranges))

    def position(self, number: int) -> int:
        """Count the numbers of the set below this one. Raises: ValueError if it is not in the set."""
        before = 0
        for part in self.ranges:
            if number in part:
                return before + part.index(number)
            before += len(part)
        raise ValueError(f"task {number} is not one of {self}")

    def at(self, position: int) -> int:
        """The number at a position. Raises: IndexError."""
        left = position
        for part in self.ranges:
            if left < len(part):
                return part[left]
            left -= len(part)
        raise IndexError(position)

    def without(self, number: int) -> TaskSet:
        """The set without this number, which need not be in it."""
        kept: list[range] = []
        for part in self.ranges:
            if number not in part:
                kept.append(part)
                continue
            index = part.index(number)
            kept.extend(piece for piece in (part[:index], part[index + 1 :]) if piece)
        return TaskSet(tuple(kept))

    def minus(self, numbers: Iterable[int]) -> TaskSet:
        taken = sorted({number for number in numbers if number in self})
        if len(taken) <= _FEW:
            left = self
            for number in taken:
                left = left.without(number)
            return left
        gone = set(taken)
        return TaskSet.of(number for number in self if number not in gone)


_FEW = 16
"""Up to this many, remove numbers one by one, each at the cost of the ranges, instead of rebuilding the set."""


def parse_tasks(text: str, most: int = MAX_TASK) -> TaskSet:
    """Parse `0-9,20-30:2`. Raises: ValueError with a sentence.

    Numbers are sorted and duplicates dropped, as in Slurm.
    """
    parts = sorted((_range(word.strip(), text, most) for word in text.split(",")), key=_first)
    if all(before[-1] < after[0] for before, after in pairwise(parts)):
        return TaskSet(tuple(parts))
    if sum(map(len, parts)) > most + 1:
        # Otherwise parsing a short text could take hours.
        raise ValueError(f"the list repeats tasks and is longer than {most + 1}")
    return TaskSet.of(number for part in parts for number in part)


def count_written(text: str) -> int:
    """How many numbers a valid list names, each as often as it is named."""
    return sum(len(_range(word.strip(), text, MAX_TASK)) for word in text.split(","))


def _range(word: str, text: str, most: int) -> range:
    span, colon, step = word.partition(":")
    first, dash, last = span.partition("-")
    numbers = [first, *([last] if dash else []), *([step] if colon else [])]
    if not all(is_digits(number) and len(number) <= 9 for number in numbers) or (colon and not dash):
        raise ValueError(f"{text!r} is not a list of tasks; write 0-9, 1,3,5 or 0-30:2")
    low, high, by = int(first), int(last or first), int(step or 1)
    if high < low:
        raise ValueError(f"{word!r} ends before it begins")
    if by < 1:
        raise ValueError(f"{word!r} has a step of 0; it must be at least 1")
    if high > most:
        raise ValueError(f"task {high} is above {most}, the highest number that a task may have")
    return range(low, low + (high - low) // by * by + 1, by)


@lru_cache(maxsize=4096)
def tasks_of(text: str) -> TaskSet:
    """Parse a text of the job table."""
    return parse_tasks(text) if text else TaskSet()


def _first(part: range) -> int:
    return part[0]


def _runs(numbers: list[int]) -> Iterator[range]:
    """Split ascending numbers into ranges; uses a step other than 1 only for three or more."""
    index = 0
    while index < len(numbers):
        step = numbers[index + 1] - numbers[index] if index + 1 < len(numbers) else 1
        end = index + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if step > 1 and end - index < 3:
            end, step = index + 1, 1
        yield range(numbers[index], numbers[end - 1] + 1, step)
        index = end


def _written(part: range) -> str:
    if len(part) == 1:
        return str(part[0])
    return f"{part[0]}-{part[-1]}" + (f":{part.step}" if part.step > 1 else "")


_LIVELIEST = [state.value for state in (JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.PENDING)]


def state_of_all(tasks: Mapping[str, int]) -> str | None:
    """State in which lists show an array: that of its liveliest task, or of most tasks once all have ended.

    Args: tasks: how many of them there are by state.
    """
    found = {state: number for state, number in tasks.items() if number}
    return next((state for state in _LIVELIEST if state in found), max(found, key=found.__getitem__, default=None))
