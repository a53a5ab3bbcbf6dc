"""Slurm's node lists, `lab1,gpu[01-03,7]`: many names in one text.

No imports, like `model.units`: command-line clients use this module. Source: slurm.conf(5), "nodelist".
"""

from __future__ import annotations

MAX_NODES = 4096
_DIGITS = 9
"""Maximum digits of a number in brackets."""


def expand(text: str) -> list[str]:
    """Expand a node list, without duplicates, in the given order. Raises: ValueError with a sentence."""
    found: dict[str, None] = {}
    named = 0
    for word in _split(text):
        names = _expand_one(word, text)
        # Duplicates count as well, as expanding them takes time.
        named += len(names)
        if named > MAX_NODES:
            raise ValueError(f"{_shown(text)} names more than {MAX_NODES} nodes")
        found.update(dict.fromkeys(names))
    if not found:
        raise ValueError("no node is named; write lab1,gpu[01-03]")
    return list(found)


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
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS):
            raise ValueError(f"{_shown(part)} in {_shown(text)} is no number and no range; write gpu[01-03,7]")
    low, high = int(first), int(last)
    if high < low:
        raise ValueError(f"the range {part} in {_shown(text)} goes down; write {last}-{first}")
    if high - low >= MAX_NODES:
        raise ValueError(f"{_shown(text)} names more than {MAX_NODES} nodes")
    width = len(first) if first.startswith("0") else 0
    return [str(number).zfill(width) for number in range(low, high + 1)]
