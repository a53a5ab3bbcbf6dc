"""Slurm's node lists, `lab1,gpu[01-03,7]`: many names in one text, and back.

No imports, like `model.units`: command-line clients use this module. Source: slurm.conf(5), "nodelist".
"""

from __future__ import annotations

from gpusched.model.units import is_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NODES = 4096
_DIGITS = 9
"""Maximum digits of a number in brackets."""


def expand(text: str) -> list[str]:
    """Expand a node list, without duplicates, in the given order. Raises: ValueError with a sentence."""
    return list(dict.fromkeys(expand_all(text)))


def expand_all(text: str) -> list[str]:
    """As `expand`, with duplicates."""
    found: list[str] = []
    for word in _split(text):
        found += _expand_one(word, text)
        # Duplicates count as well, as expanding them takes time.
        if len(found) > MAX_NODES:
            raise ValueError(f"{_shown(text)} names more than {MAX_NODES} nodes")
    if not found:
        raise ValueError("no node is named; write lab1,gpu[01-03]")
    return found


def fold(names: Iterable[str]) -> str:
    """The node list for names in this order: neighbours of one beginning share brackets, `gpu[01-02,04],lab1`."""
    words: list[str] = []
    numbers: list[list[str]] = []
    """Ranges of the last word, as first and last number."""
    prefix: str | None = None
    for name in names:
        begin, digits = _parted(name)
        if digits and begin == prefix:
            first, last = numbers[-1]
            width = len(first) if first.startswith("0") else 0
            if digits == str(int(last) + 1).zfill(width) and int(digits) - int(first) < MAX_NODES:
                numbers[-1][1] = digits
            else:
                numbers.append([digits, digits])
            words[-1] = begin + _in_brackets(numbers)
            continue
        words.append(name)
        prefix, numbers = (begin, [[digits, digits]]) if digits else (None, [])
    return ",".join(words)


def _parted(name: str) -> tuple[str, str]:
    """A name without the number at its end, and that number."""
    begin = name[: max(len(name.rstrip("0123456789")), len(name) - _DIGITS)]
    return begin, name[len(begin) :]


def _in_brackets(numbers: list[list[str]]) -> str:
    if len(numbers) == 1 and numbers[0][0] == numbers[0][1]:
        return numbers[0][0]
    return "[" + ",".join(first if first == last else f"{first}-{last}" for first, last in numbers) + "]"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "+")


def _split(text: str) -> list[str]:
    """Split at commas outside brackets. Raises: ValueError for unbalanced brackets."""
    words = [""]
    is_inside = False
    for char in text.strip():
        if char == "[" and not is_inside:
            is_inside = True
        elif char == "]" and is_inside:
            is_inside = False
        elif char in "[]":
            raise ValueError(f"the brackets in {_shown(text)} do not pair; write gpu[01-03]")
        if char == "," and not is_inside:
            words.append("")
        else:
            words[-1] += char
    if is_inside:
        raise ValueError(f"the brackets in {_shown(text)} do not pair; write gpu[01-03]")
    return [word for word in words if word]


def _expand_one(word: str, text: str) -> list[str]:
    """Expand all brackets of one word; the last bracket varies fastest."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        if not word.isprintable() or " " in word:
            raise ValueError(f"{_shown(word)} is not the name of a node")
        return [word]
    ranges, _, after = rest.partition("]")
    tails = _expand_one(after, text) if after else [""]
    numbers: list[str] = []
    for part in ranges.split(","):
        numbers += _numbers(part, text)
        if len(numbers) > MAX_NODES:
            break
    if len(numbers) * len(tails) > MAX_NODES:
        raise ValueError(f"{_shown(text)} names more than {MAX_NODES} nodes")
    if before and (not before.isprintable() or " " in before):
        raise ValueError(f"{_shown(word)} is not the name of a node")
    return [before + number + tail for number in numbers for tail in tails]


def _numbers(part: str, text: str) -> list[str]:
    """Expand `7` or `01-03`, keeping leading zeros."""
    first, dash, last = part.partition("-")
    if not dash:
        last = first
    for digits in (first, last):
        if not (is_digits(digits) and len(digits) <= _DIGITS):
            raise ValueError(f"{_shown(part)} in {_shown(text)} is neither a number nor a range; write gpu[01-03,7]")
    low, high = int(first), int(last)
    if high < low:
        raise ValueError(f"the range {part} in {_shown(text)} goes down; write {last}-{first}")
    if high - low >= MAX_NODES:
        raise ValueError(f"{_shown(text)} names more than {MAX_NODES} nodes")
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(low, high + 1)]
