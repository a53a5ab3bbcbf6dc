"""Labels that a node must have, as people write them: `a100&nvlink`, `imagenet|coco`, `!old`, `a&(b|c)`.

`&` binds tighter than `|`, `!` tighter than both. Labels are compared letter by letter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

_OPERATORS = "&|!()"
_RESERVED = "[]{}*,;'\"`$<>\\"
"""No part of a label, so that they may be given a meaning one day."""

MOST_CHARACTERS = 1000
_MOST_NESTED = 50

Tree = tuple[str, tuple[object, ...]]
"""An operator with its operands, which are trees; `label` has the label itself."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint that has been read."""

    text: str
    tree: Tree
    labels: tuple[str, ...]
    """All labels in it, those after `!` included, in the order in which they are written."""

    def admits(self, labels: Collection[str]) -> bool:
        """Whether a node with these labels will do."""
        return _holds(self.tree, labels)


@lru_cache(maxsize=1024)
def parse(text: str) -> Constraint:
    """The constraint that is written so. Raises: ValueError with a sentence."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a constraint has at most {MOST_CHARACTERS} characters; this one has {len(text)}")
    reader = _Reader(text)
    tree = reader.any_of(0)
    if reader.next:
        raise reader.error(f"{reader.next!r} is not expected after {reader.last!r}")
    return Constraint(text, tree, tuple(dict.fromkeys(reader.labels)))


class _Reader:
    """Reads from left to right, one word (a label or an operator) ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = _words(text)
        self._at = 0
        self.labels: list[str] = []

    @property
    def next(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    @property
    def last(self) -> str:
        return self._words[self._at - 1] if self._at else ""

    def any_of(self, depth: int) -> Tree:
        """Parts joined by `|`."""
        return self._joined("|", depth)

    def _joined(self, operator: str, depth: int) -> Tree:
        parts: list[object] = []
        while True:
            parts.append(self._joined("&", depth) if operator == "|" else self._one(depth))
            if self.next != operator:
                break
            self._at += 1
        return (operator, tuple(parts))

    def _one(self, depth: int) -> Tree:
        if depth > _MOST_NESTED:
            raise self.error(f"more than {_MOST_NESTED} brackets in each other are not read")
        word = self.next
        if not word or word in "&|)":
            after = f"after {self.last!r}" if self.last else "at its beginning"
            raise self.error(f"a label is missing {after}")
        self._at += 1
        if word == "!":
            return ("!", (self._one(depth + 1),))
        if word == "(":
            inner = self.any_of(depth + 1)
            if self.next != ")":
                raise self.error("a ')' is missing" if not self.next else f"{self.next!r} is not expected here")
            self._at += 1
            return inner
        self.labels.append(word)
        return ("label", (word,))

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self._text!r} is no constraint: {problem}")


def _words(text: str) -> list[str]:
    words: list[str] = []
    is_open = False
    for character in text:
        if character.isspace():
            is_open = False
        elif character in _RESERVED:
            raise ValueError(f"{text!r} is no constraint: {character!r} cannot be in a label")
        elif character in _OPERATORS:
            words.append(character)
            is_open = False
        elif is_open:
            words[-1] += character
        else:
            words.append(character)
            is_open = True
    return words


def _holds(tree: Tree, labels: Collection[str]) -> bool:
    operator, parts = tree
    if operator == "label":
        return parts[0] in labels
    found = (_holds(part, labels) for part in parts)  # type: ignore[arg-type]
    if operator == "!":
        return not next(found)
    return any(found) if operator == "|" else all(found)
