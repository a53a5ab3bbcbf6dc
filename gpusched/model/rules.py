"""Validation rules for settings, beyond their types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf

from gpusched.model.static_gpus import parse_static
from gpusched.model.units import MAX_MIB, MAX_SECONDS
from gpusched.model.value import Value


class Range(Value):
    """A number from `low` to `high`."""

    low: float
    high: float
    above: bool = False
    """Exclude the low end."""

    def __str__(self) -> str:
        least = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        return f"{least} and at most {self.high:.15g}"

    def admits(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high


class OneOf(Value):
    """One of several words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)

    def admits(self, value: str) -> bool:
        return value in self.words


class Text(Value):
    """A non-empty text."""

    is_word: bool = False
    may_be_empty: bool = False

    def __str__(self) -> str:
        if self.may_be_empty:
            return "one word without spaces, or empty"
        return "one word without spaces" if self.is_word else "a string on one line, not empty"

    def admits(self, value: str) -> bool:
        """Whether it is a single line, or a single word."""
        if self.may_be_empty and not value:
            return True
        if self.is_word:
            return bool(value) and value.isprintable() and " " not in value
        return bool(value) and not any(char in value for char in "\0\r\n")


class StaticDevices(Value):
    """Declared devices."""

    def __str__(self) -> str:
        return "devices such as 2xnpu:16GiB, joined by +"

    def admits(self, value: str) -> bool:
        """Whether it can be read."""
        try:
            parse_static(value)
        except ValueError:
            return False
        return True


class Folder(Value):
    """An absolute path."""

    def __str__(self) -> str:
        return "an absolute path"

    def admits(self, value: str) -> bool:
        """Whether it is absolute and on one line."""
        return value.startswith("/") and Text().admits(value)


class MailServer(Value):
    """The mail server of all users."""

    def __str__(self) -> str:
        return "sendmail:, or an address without a password such as smtp://smtp.lab.org?from=gpu@lab.org"

    def admits(self, value: str) -> bool:
        """Whether it is one of these; a password here could be read by every user."""
        scheme, mark, rest = value.partition("://")
        is_server = scheme in ("smtp", "smtps", "mailto", "mailtos") and bool(mark)
        server = rest.partition("?")[0].partition("/")[0]
        is_open = bool(server) and "@" not in server and Text(is_word=True).admits(rest)
        return value == "sendmail:" or (is_server and is_open)


class Texts(Value):
    """A list of non-empty words."""

    what: str

    def __str__(self) -> str:
        return f"a list of {self.what}, each one word without spaces"

    def admits(self, value: tuple[str, ...]) -> bool:
        return all(word and word.isprintable() and " " not in word for word in value)


class SomeOf(Value):
    """A list with elements from these words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "a list of some of " + ", ".join(self.words)

    def admits(self, value: tuple[str, ...]) -> bool:
        return all(word in self.words for word in value)


class Ports(Value):
    """A range of port numbers, as `LOW-HIGH`."""

    low: int
    least: int
    """How many there are at the least."""

    def __str__(self) -> str:
        return f"a range such as '20000-31999' of {self.least} or more ports from {self.low} to 65535"

    def admits(self, value: str) -> bool:
        """Whether both ends are numbers of ports, far enough apart."""
        if re.fullmatch(r"[1-9]\d{0,4}-[1-9]\d{0,4}", value) is None:
            return False
        low, high = map(int, value.split("-"))
        return self.low <= low and high <= 65535 and high - low + 1 >= self.least


class Cells(Value):
    """A list of cells, as `SIZE` or `NODE:SIZE`."""

    def __str__(self) -> str:
        return "a list of strings such as '4' (four linked GPUs) or 'n1:4' (those on node n1)"

    def admits(self, value: tuple[str, ...]) -> bool:
        """Whether each is a number of cards, optionally with a node."""
        return all(re.fullmatch(r"(?:[^\s:]+:)?[1-9]\d{0,3}", word) for word in value)


class Amounts(Value):
    """A table of names and numbers."""

    low: float
    above: bool = False
    high: float = inf

    def __str__(self) -> str:
        if self.high < inf:
            return f"a table of names and numbers, each from {self.low:g} to {self.high:g}"
        return f"a table of names and numbers, each {'above' if self.above else 'at least'} {self.low:g}"

    def admits(self, value: Mapping[str, float]) -> bool:
        """Whether every name is a word and every number at least the minimum."""
        named = Text(is_word=True)
        return all(
            named.admits(name) and (count > self.low if self.above else count >= self.low) and count <= self.high
            for name, count in value.items()
        )


class MemberShares(Value):
    """User names with their shares; `*` means all users."""

    def __str__(self) -> str:
        return 'a list of names, a table of names and shares above 0, or "*"'

    def admits(self, value: Mapping[str, float]) -> bool:
        """Whether every name is a word and every share above 0."""
        return Amounts(0, above=True).admits(value)


class Numbers(Value):
    """A list of integers from `low` to `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"a list of whole numbers from {self.low} to {self.high}"

    def admits(self, value: tuple[int, ...]) -> bool:
        return all(self.low <= number <= self.high for number in value)


class Modules(Value):
    """A list of full Python module names."""

    def __str__(self) -> str:
        return "a list of names of Python modules"

    def admits(self, value: tuple[str, ...]) -> bool:
        """Whether each is a valid module name."""
        return all(part.isidentifier() for name in value for part in name.split("."))


AT_START = "at start"
"""Marks a setting that takes effect only at the daemon's start; a reload does not apply it."""

Rule = (
    Modules
    | MailServer
    | SomeOf
    | Numbers
    | Folder
    | Range
    | OneOf
    | Text
    | Texts
    | Ports
    | Cells
    | Amounts
    | MemberShares
)

WEIGHT = Range(0, 1e12)
FRACTION = Range(0, 1, above=True)
PART = Range(0, 1)
RATE = Range(0, MAX_MIB, above=True)
MIB = Range(0, MAX_MIB)
SOME_MIB = Range(1, MAX_MIB)
WAIT = Range(0, MAX_SECONDS)
SOME_TIME = Range(0, MAX_SECONDS, above=True)
LIMIT = Range(1, MAX_SECONDS)
PACE = Range(0.001, 3600)
CORES = Range(0, 1 << 20, above=True)
COUNT = Range(1, 10**9)
TIMES = Range(1, 100)
GPUS = Range(0, 1 << 20)
WATTS = Range(25, 5000)
GPU_HOURS = Range(0, 1e9)
SHARES = Range(0, 1e9, above=True)
NAMES = Texts("names")
WORD = Text(is_word=True)
