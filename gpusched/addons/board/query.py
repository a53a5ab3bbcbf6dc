"""The board as its viewers ask for it and hold it: filters as people type them, orders, and versions put together."""

from __future__ import annotations

import re
from typing import Any

from gpusched.model.states import JobState
from gpusched.model.units import printable
from gpusched.model.value import Value

VIEWS = ("active", "ended", "people", "queues")
"""What the rows are: jobs that have not ended, jobs that ended within a day, users with jobs, queues."""
SORTS = ("queue", "id", "name", "user", "state", "gpus", "time", "expected")
"""Orders of jobs. `queue`: running jobs, then pending ones with the next to start first; `time`: since the end, last
start or submission."""
KEYS = ("account", "id", "name", "node", "qos", "queue", "reason", "state", "user")
"""What a filter can be about."""
SHORT = {"a": "account", "n": "node", "q": "queue", "st": "state", "u": "user"}
EXAMPLE = "for example: user:bob st:PD queue:vision node:lab2 train"
MOST_CHARS = 500
MOST_TERMS = 20

_WORD = re.compile(r'(-?)(?:([A-Za-z]+):)?(?:"([^"]*)"|([^\s"]+))(?=\s|$)')
_PLAIN = re.compile(r'[^\s":-][^\s":]*')
_STATES = {word: state for state in JobState for word in (state.value, state.compact)}


class FilterTerm(Value):
    """One condition of a filter: the value of `key` matches one of the patterns, or none of them."""

    key: str | None
    """One of KEYS; None for a word on its own, looked for in names and ids."""
    patterns: tuple[str, ...]
    """Lower case, except states, which are spelt out; `*` and `?` as in file names."""
    is_negated: bool = False

    def __str__(self) -> str:
        text = ",".join(self.patterns)
        quoted = text if _PLAIN.fullmatch(text) else f'"{text}"'
        return ("-" if self.is_negated else "") + (f"{self.key}:" if self.key else "") + quoted


class BoardFilter(Value):
    """A filter of jobs, all of whose terms hold."""

    terms: tuple[FilterTerm, ...] = ()

    def __str__(self) -> str:
        """In words that `parse_filter` reads as the same filter."""
        return " ".join(map(str, self.terms))


def parse_filter(text: str) -> BoardFilter:
    """Read `user:bob st:PD,R -queue:x train*`. Raises: ValueError with a sentence."""
    if len(text) > MOST_CHARS:
        raise ValueError(f"the filter has {len(text)} characters; the maximum is {MOST_CHARS}")
    terms = []
    at = 0
    while rest := text[at:].lstrip():
        at = len(text) - len(rest)
        found = _WORD.match(rest)
        if found is None:
            raise ValueError(f"{printable(rest, 40)!r} is not closed by a quotation mark")
        at += found.end()
        terms.append(_term(*found.groups()))
    if len(terms) > MOST_TERMS:
        raise ValueError(f"the filter has {len(terms)} words; the maximum is {MOST_TERMS}")
    return BoardFilter(tuple(terms))


def _term(minus: str, key: str | None, quoted: str | None, plain: str | None) -> FilterTerm:
    value = (quoted if quoted is not None else plain or "").lower()
    patterns = tuple(filter(None, (word.strip() for word in value.split(","))))
    if not patterns:
        raise ValueError(f"no value after {printable(key or '-', 40)!r}")
    if key is None:
        return FilterTerm(None, patterns, bool(minus))
    name = SHORT.get(key.lower(), key.lower())
    if name not in KEYS:
        raise ValueError(f"{printable(key, 40)!r} is not a filter key; the keys are {', '.join(KEYS)}")
    if name == "state":
        for word in patterns:
            if word.upper() not in _STATES:
                raise ValueError(f"{printable(word, 40)!r} is not a job state")
        patterns = tuple(_STATES[word.upper()].value for word in patterns)
    return FilterTerm(name, patterns, bool(minus))


class BoardCopy:
    """A viewer's copy of the board, kept up to date by its answers."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.parts: dict[str, Any] = {}
        """Values by name, such as `totals`."""
        self.lists: dict[str, dict[str, dict[str, Any]]] = {}
        """Entries of `nodes`, `cards` and `rows` by id, in their order."""
        self.facts: dict[str, dict[str, Any]] = {}
        """Facts about a list as a whole, such as the total number of rows."""

    def apply(self, answer: dict[str, Any]) -> bool:
        """Take in an answer of GET /v1/board; returns whether anything has changed."""
        changed: bool = answer["version"] != self.version
        if answer["full"]:
            self.parts, self.lists, self.facts = {}, {}, {}
        self.version = answer["version"]
        self.parts.update(answer["parts"])
        for name, one in answer["lists"].items():
            known = self.lists.get(name, {}) | {entry["id"]: entry for entry in one["set"]}
            order = one["order"]
            self.lists[name] = known if order is None else {key: known[key] for key in order}
            self.facts[name] = one["facts"]
        return changed

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the window, in their order."""
        return list(self.lists.get("rows", {}).values())
