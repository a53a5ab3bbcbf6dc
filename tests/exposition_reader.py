"""A strict reader of the two text formats that Prometheus takes, written from their specifications alone.

It refuses what a lenient one would let pass: families that are torn apart, series told twice, names that do not fit the
type, histograms that do not add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?([eE][+-]?\d+)?|Inf)|NaN")
_ESCAPES = {"\\": "\\", "n": "\n", '"': '"'}
_TYPES = {
    True: {"gauge", "counter", "histogram", "info"},
    False: {"gauge", "counter", "histogram"},
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Read:
    """One family with its samples by name and labels."""

    name: str
    kind: str = ""
    help: str = ""
    unit: str = ""
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def read_page(text: str, *, is_open: bool) -> dict[str, Read]:
    """All families by name. Raises: AssertionError with the line that is wrong."""
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    if is_open:
        assert lines.pop() == "# EOF"
    families: dict[str, Read] = {}
    now: Read | None = None
    for line in lines:
        assert "\r" not in line or "{" in line, line
        if line.startswith("#"):
            now = _metadata(line, families, now, is_open)
            continue
        assert now is not None, line
        assert now.kind, f"no TYPE before {line}"
        name, labels, value = _sample(line)
        assert name in _names(now, is_open), (name, now)
        assert (name, labels) not in now.samples, f"told twice: {line}"
        now.samples[name, labels] = value
    for family in families.values():
        _check(family, is_open)
    return families


def values(text: str, *, is_open: bool = False) -> dict[tuple[str, Labels], float]:
    """Every sample of a page."""
    return {
        mark: value for family in read_page(text, is_open=is_open).values() for mark, value in family.samples.items()
    }


def _metadata(line: str, families: dict[str, Read], now: Read | None, is_open: bool) -> Read:
    sign, word, name, rest = line.split(" ", 3)
    assert sign == "#"
    assert _NAME.fullmatch(name), line
    if now is None or now.name != name:
        assert name not in families, f"torn apart: {line}"
        assert word == "HELP", line
        now = families[name] = Read(name)
    assert not now.samples, f"metadata after samples: {line}"
    if word == "HELP":
        assert not now.help
        now.help = rest
    elif word == "TYPE":
        assert not now.kind
        assert rest in _TYPES[is_open], line
        now.kind = rest
    else:
        assert word == "UNIT", line
        assert is_open, line
        assert name.endswith("_" + rest), line
        now.unit = rest
    return now


def _names(family: Read, is_open: bool) -> set[str]:
    if family.kind == "histogram":
        return {family.name + end for end in ("_bucket", "_count", "_sum")}
    if is_open:
        return {family.name + {"counter": "_total", "info": "_info"}.get(family.kind, "")}
    return {family.name}


def _sample(line: str) -> tuple[str, Labels, float]:
    match = _NAME.match(line)
    assert match, line
    at, labels = match.end(), []
    if line[at] == "{":
        at += 1
        while True:
            label = _LABEL.match(line, at)
            assert label, line
            assert line[label.end() : label.end() + 2] == '="', line
            text, at = _quoted(line, label.end() + 2)
            labels.append((label[0], text))
            at += 1
            if line[at - 1] == "}":
                break
            assert line[at - 1] == ",", line
    assert line[at] == " ", line
    assert _NUMBER.fullmatch(line, at + 1), line
    assert len({name for name, _ in labels}) == len(labels), line
    return match[0], tuple(sorted(labels)), float(line[at + 1 :])


def _quoted(line: str, at: int) -> tuple[str, int]:
    """The text up to the closing quote, and where what follows begins."""
    found = ""
    while line[at] != '"':
        if line[at] == "\\":
            found += _ESCAPES[line[at + 1]]
            at += 2
        else:
            found += line[at]
            at += 1
    return found, at + 1


def _check(family: Read, is_open: bool) -> None:
    assert family.help, family.name
    assert family.samples, family.name
    if family.kind == "counter":
        assert is_open != family.name.endswith("_total"), family.name
        assert all(value >= 0 for value in family.samples.values()), family
    elif family.kind == "info":
        assert set(family.samples.values()) == {1.0}
        assert not family.unit
    elif family.kind == "histogram":
        for labels, buckets in _histograms(family):
            bounds, counts = list(buckets), list(buckets.values())
            assert bounds == sorted(bounds), family
            assert bounds[-1] == inf, family
            assert counts == sorted(counts), family
            assert family.samples[family.name + "_count", labels] == counts[-1], family
            assert family.samples[family.name + "_sum", labels] >= 0


def _histograms(family: Read) -> Iterator[tuple[Labels, dict[float, float]]]:
    found: dict[Labels, dict[float, float]] = {}
    for (name, labels), value in family.samples.items():
        if name.endswith("_bucket"):
            bound = dict(labels)["le"]
            rest = tuple((label, text) for label, text in labels if label != "le")
            found.setdefault(rest, {})[float(bound)] = value
            assert "." in bound or bound == "+Inf", bound
    assert {labels for name, labels in family.samples if name.endswith("_count")} == found.keys()
    return iter(found.items())
