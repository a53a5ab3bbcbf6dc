"""Options and fields of jobs as data, shared by the command line, scripts, the API, Python and the docs.

`model.spec` declares the fields. Command-line clients import this module: it must not import msgspec, regular
expressions or typing.
"""

from __future__ import annotations

from gpusched.model.units import parse_duration_s, parse_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Values = dict[str, Any]
    Reader = Callable[[str], Any]
    """Makes of a text a value, or `Several`. Raises: ValueError with a sentence."""

MAX_TEXT = 4096
"""Maximum characters of a text, and of all texts of a list or map together; the kernel's limit for paths."""
MAX_UNITS = 1_000_000
"""Maximum units of one license or custom resource per job."""
REQUIRED = object()
"""Default of mandatory fields."""
PENDING, RUNNING = "pending", "running"
"""When `gctl update` can change a field: only while the job is pending, or also while it runs."""


class Several(dict):  # type: ignore[type-arg]
    """Values of several keys set by one text; None resets a value from an earlier option."""


class Option:
    """One option: its spellings, its argument, the key that it sets.

    An option without metavar is a flag and sets its key to True unless `sets` overrides it. If the key ends in `_at`,
    the argument is an instant; other arguments are parsed by `read`, by default kept as they are.
    """

    __slots__ = ("completes", "help", "is_shared", "key", "metavar", "names", "read", "section", "sets")

    def __init__(
        self,
        text: str,
        section: str = "Options",
        read: Reader | None = None,
        *,
        key: str = "",
        sets: Values | None = None,
        completes: str = "",
        is_shared: bool = True,
    ) -> None:
        """Args: text: names, metavar and help, as in `-q --queue NAME  queue`; key: defaults to the long name."""
        spelling, _, self.help = text.partition("  ")
        words = spelling.split()
        self.metavar = "" if words[-1].startswith("-") else words.pop()
        self.names = tuple(words)
        self.section = section
        self.read = read
        self.key = key
        self.sets = sets
        self.completes = completes
        """What a shell may offer for the value: `file`, `dir`, `job-id`, `job-name`, `template`, `view`, or words
        separated by blanks."""
        self.is_shared = is_shared
        """Whether grun has it, too."""

    @property
    def long(self) -> str:
        """Long spelling, for messages."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    def bind(self, key: str = "", read: Reader | None = None) -> None:
        """Complete the option from its name, or from the field that it sets."""
        self.key = self.key or key or self.long.lstrip("-").replace("-", "_")
        if self.metavar:
            self.read = self.read or read or str
            self.completes = self.completes or " ".join(getattr(self.read, "choices", ()))
        elif self.sets is None:
            self.sets = {self.key: True}


class Field:
    """One field of a request: JSON type, range or choices, meaning; for jobs also its location and options.

    The suffix of the name gives the unit: `_mib` binary megabytes, `_s` seconds, `_at` an instant.
    """

    __slots__ = (
        *("kind", "doc", "low", "high", "choices", "nullable", "exclusive_low", "most", "words"),
        *("name", "attribute", "default", "options", "update", "owner_only", "word", "keyword", "python"),
    )

    def __init__(
        self,
        kind: str,
        doc: str,
        span: tuple[float, float] | None = None,
        option: str = "",
        *,
        choices: tuple[str, ...] = (),
        nullable: bool = True,
        exclusive_low: bool = False,
        most: int = MAX_TEXT,
        words: tuple[str, ...] = (),
        name: str = "",
        default: Any = REQUIRED,
        section: str = "",
        read: Reader | None = None,
        completes: str = "",
        also: tuple[Option, ...] = (),
        update: str = "",
        owner_only: bool = False,
        is_shared: bool = True,
        word: str = "",
        keyword: str | None = "",
        python: str = "",
    ) -> None:
        self.kind = kind
        """string, word, boolean, integer, number, strings, map, counts, notice."""
        self.doc = doc
        self.low: float | None = span[0] if span else None
        self.high: float | None = span[1] if span else None
        self.choices = choices
        self.nullable = nullable
        self.exclusive_low = exclusive_low
        self.most = most
        """Characters, of a list or map in all."""
        self.words = words
        """Words that a number may be given as."""
        self.name = name
        """In JSON; by default the attribute's."""
        self.attribute = ""
        self.default = default
        main = Option(option, section, read, completes=completes, is_shared=is_shared) if option else None
        self.options = (main, *also) if main else ()
        """At the prompt."""
        self.update = update
        """PENDING, RUNNING, or empty: fixed at submission."""
        self.owner_only = owner_only
        """Whether an update by an operator is refused: it says what runs as the owner, or who is notified."""
        self.word = word
        """Of `gctl update`; by default the long name of its first option. Several fields may share one."""
        self.keyword = keyword
        """In Python; by default the name without its unit. None: it is no keyword."""
        self.python = python
        """Its type in Python; by default that of its kind and unit."""

    def __set_name__(self, owner: object, attribute: str) -> None:
        self.attribute = attribute
        self.name = self.name or attribute
        long = self.options[0].long.lstrip("-") if self.options else without_unit(self.name)
        self.word = self.word or long.replace("_", "-")
        if self.keyword == "":
            self.keyword = without_unit(self.name)
        for option in self.options:
            option.bind(self.name, self._reader() if option.metavar else None)
            option.section = option.section or getattr(owner, "_section", "")

    def _reader(self) -> Reader | None:
        """Parser for the field's kind and unit."""
        low, high = self.low or 0, self.high or 0
        if self.name.endswith("_mib"):
            return parse_size_mib
        if self.name.endswith("_s"):
            return parse_duration_s if low else seconds_from_zero
        if self.choices:
            return choice(*self.choices)
        if self.kind == "integer":
            return whole(int(low), int(high))
        if self.kind == "number":
            return decimal(low, high)
        return words if self.kind == "strings" else None


def without_unit(name: str) -> str:
    """The name as typed by people: `mem` for `mem_mib`."""
    return name.removesuffix("_mib").removesuffix("_s").removesuffix("_at")


def field(*args: Any, **parts: Any) -> Any:
    """Declare a `Field`, in place of the attribute's default."""
    return Field(*args, **parts)


# --- readers: what the text behind an option means ------------------------------------------------------


def words(text: str) -> list[str]:
    """Words separated by commas; repeated options accumulate."""
    return [word for word in text.split(",") if word]


def whole(low: int, high: int) -> Reader:
    """A whole number within a range."""

    def read(text: str) -> int:
        digits = text.removeprefix("-").removeprefix("+")
        if not (digits.isascii() and digits.isdigit()):
            raise ValueError(f"{printable(text, 40)!r} is not a whole number")
        number = int(text) if len(text) < 19 else (high + 1 if text[0] != "-" else low - 1)
        if not low <= number <= high:
            raise ValueError(f"{printable(text, 40)} is out of range; it must be from {low} to {high}")
        return number

    return read


def decimal(low: float, high: float) -> Reader:
    """A number within a range."""

    def read(text: str) -> float:
        try:
            number = float(text) if text.isascii() and "_" not in text else float("nan")
        except ValueError:
            number = float("nan")
        if number != number:
            raise ValueError(f"{printable(text, 40)!r} is not a number")
        if not low <= number <= high:
            raise ValueError(f"{printable(text, 40)} is out of range; it must be from {low:g} to {high:g}")
        return number

    return read


def choice(*known: str) -> Reader:
    """One of several words."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"{printable(text, 40)!r} is not one of {', '.join(known)}")
        return text

    read.choices = known  # type: ignore[attr-defined]  # completion offers them
    return read


def yes_or_no(text: str) -> bool:
    """A boolean option that requires a value."""
    return bool(choice("yes", "no")(text.lower()) == "yes")


def seconds_from_zero(text: str) -> int:
    """A duration that may be 0."""
    return 0 if text.strip() in ("0", "0s") else parse_duration_s(text)


def pair(example: str, key: str) -> Reader:
    """`NAME=VALUE`, stored under this key; repeated options accumulate."""

    def read(text: str) -> Several:
        name, equals, content = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{printable(text, 40)!r} is not {example}")
        return Several({key: {name: content}})

    return read


def counts(example: str) -> Reader:
    """`name:2,other` or `name=2`; repeated options accumulate."""

    def read(text: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for word in text.split(","):
            name, mark, number = word.partition("=" if "=" in word else ":")
            if not name.strip() or (mark and not number):
                raise ValueError(f"{printable(text, 40)!r} is not NAME or NAME=N; write {example}")
            found[name.strip()] = whole(1, MAX_UNITS)(number) if mark else 1
        return found

    return read
