"""Parse command lines against an option table, following getopt."""

from __future__ import annotations

from gpusched.errors import GpuschedError, UsageError, WrongValue
from gpusched.model.option import (
    AmbiguousOption,
    CommandLine,
    MissingValue,
    Option,
    OptionError,
    Several,
    choice,
    find_option,
    words,
)
from gpusched.model.units import closest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Values = dict[str, Any]


class OptionTable:
    def __init__(
        self,
        command: str,
        options: Sequence[Option],
        hidden: Sequence[Option] = (),
        elsewhere: Callable[[str], str] | None = None,
    ) -> None:
        """Args:
        hidden: options that are parsed, but not in help, completion and hints.
        elsewhere: what an unknown option belongs to, if anything.
        """
        self.command = command
        self._elsewhere = elsewhere
        self.options = tuple(options)
        for option in (*options, *hidden):
            option.bind()
        self.by_name = tuple({name: one for one in some for name in one.names} for some in (options, hidden))

    def find(self, name: str) -> Option:
        """The option with this spelling; a long one may be abbreviated to a unique prefix. Raises: UsageError."""
        try:
            return find_option(name, self.by_name)
        except OptionError as error:
            raise self.refusal(error) from None

    @property
    def has_topics(self) -> bool:
        """Whether the command's --help shows only what most people need."""
        return self.command in ("gsub", "grun", "gctl")

    def see(self, name: str) -> str:
        """The hint that leads to the text about an option."""
        return f"see: {self.command} --help" + (f" {name.lstrip('-')}" if self.has_topics else "")

    def refusal(self, error: OptionError) -> UsageError:
        """The sentence for a word that cannot be read."""
        if isinstance(error, MissingValue):
            return UsageError(f"{error.name} needs a value", self.see(error.name))
        hint = f"list them with: {self.command} --help{' all' if self.has_topics else ''}"
        if isinstance(error, AmbiguousOption):
            return UsageError(f"{printable(error.name)!r} is short for {', '.join(sorted(error.candidates))}", hint)
        if self._elsewhere is not None and (others := self._elsewhere(error.name)):
            return UsageError(
                f"unknown option {printable(error.name, 60)!r} for {self.command}; it belongs to: {others}",
                f"see: {self.command} --help",
            )
        known = [name for name in self.by_name[0] if name.startswith("--")]
        if len(error.name) > 2 and (near := closest(error.name, known)):
            hint = f"did you mean {near}? {hint}"
        return UsageError(f"unknown option {printable(error.name, 60)!r}", hint)


class UsageErrors:
    """Mistakes in several places, to be reported together."""

    def __init__(self) -> None:
        self._found: list[GpuschedError] = []

    def add(self, error: UsageError, where: str = "", hint: str = "") -> None:
        """Add an error, or each error it combines, prefixed with its place and with a more specific hint."""
        for one in error.mistakes or (error,):
            is_as_is = not (where or hint)
            self._found.append(one if is_as_is else UsageError(f"{where}{one.message}", hint or one.hint))

    def gather(self, read: Callable[[], Values]) -> Values:
        """The values read; empty after an error, which is recorded."""
        try:
            return read()
        except UsageError as error:
            self.add(error)
            return {}

    def check(self) -> None:
        """Raises: UsageError that combines all recorded errors, if any."""
        if self._found:
            raise UsageError.of(self._found)


def parse(table: OptionTable, words: Sequence[str], *, operands_first: bool = False) -> tuple[Values, list[str], bool]:
    """Parse a command line.

    Args: operands_first: options may follow operands; otherwise the first operand ends the options.
    Returns: the values, the operands, and whether `--` preceded them.
    Raises: UsageError naming each option with its unreadable text. Parsing stops at an unknown option: the next
    word may be its value.
    """
    values: Values = {}
    mistakes = UsageErrors()
    line = CommandLine(table.by_name, words, permutes=operands_first, has_equals=True)
    try:
        for option, name, text in line:
            try:
                take(table, option, text, values, name)
            except UsageError as error:
                mistakes.add(error)
    except OptionError as unreadable:
        mistakes.add(table.refusal(unreadable))
    mistakes.check()
    return values, line.operands, line.is_ended


def take(table: OptionTable, option: Option, text: str | None, values: Values, name: str = "") -> None:
    """Put one option of a command line into the values. Raises: UsageError."""
    if option.metavar or (option.read is not None and (text is not None or not option.sets)):
        # A flag with a reader may have a value, as in --snapshot=copy.
        apply(table, option, text or "", values, name)
    elif text is not None:
        raise UsageError(f"{name} takes no value", table.see(name))
    else:
        values.update(option.sets or {})


def apply(table: OptionTable, option: Option, text: str, values: Values, typed: str = "") -> None:
    """Parse an option's text into the values. Repeated lists and maps are joined. Raises: UsageError.

    Args: typed: the spelling to name in errors, if it is a long one in full; by default the option's.
    """
    try:
        found = read(option, text)
    except ValueError as error:
        name = typed if len(typed) > 2 and typed in option.names else option.long
        raise WrongValue(f"{name}: {error}", table.see(name), option=name, why=str(error)) from None
    for key, value in found.items():
        before = values.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            before.update(value)
        elif isinstance(value, list) and isinstance(before, list):
            before.extend(value)
        else:
            values[key] = value


def read(option: Option, text: str) -> Values:
    """The values that an option's text sets. Raises: ValueError."""
    if option.key.endswith("_at"):
        from gpusched.instants import parse_instant  # needs the clock and the calendar

        return {option.key: parse_instant(text)}
    assert option.read is not None
    value = option.read(text)
    return value if isinstance(value, Several) else {option.key: value}


def split_words(line: str) -> list[str]:
    """Split a directive line as a shell would: quotes, backslashes, and comments starting with ` #`.

    Raises: ValueError for an unclosed quote.
    """
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    at = 0
    while at < len(line):
        char = line[at]
        at += 1
        if quote:
            if char == quote:
                quote = ""
            elif char == "\\" and quote == '"' and line[at : at + 1] in ('"', "\\"):
                word = [*(word or []), line[at]]
                at += 1
            else:
                word = [*(word or []), char]
        elif char in " \t\r":
            if word is not None:
                words.append("".join(word))
                word = None
        elif char == "#" and word is None:
            break
        elif char in "'\"":
            quote = char
            word = word or []
        elif char == "\\" and at < len(line):
            word = [*(word or []), line[at]]
            at += 1
        else:
            word = [*(word or []), char]
    if quote:
        raise ValueError(f"the quote {quote} is not closed")
    if word is not None:
        words.append("".join(word))
    return words


def common_options(*skip: str) -> list[Option]:
    """Options of every command; the long spellings to skip are left out."""
    options = [
        Option("--json  one JSON document with schema_version", "Output"),
        Option("--quiet  bare values only", "Output"),
        Option("-h --help  show this and exit; of gsub, grun and gctl also: --help TOPIC, --help all", "Other"),
        Option("--version  show the version and exit", "Other"),
        Option(
            "--completion SHELL  print a completion script for bash, zsh or fish; add it to your shell's start-up file",
            "Other",
            choice("bash", "zsh", "fish"),
        ),
    ]
    return [option for option in options if option.long not in skip]


def selection_options() -> list[Option]:
    """Filters of commands that act on several jobs."""
    return [
        Option("-u --user NAMES  of these users", "Which jobs", words, key="users"),
        Option("-n --name NAMES  with these names", "Which jobs", words, key="names", completes="job-name"),
        Option("-q --queue NAMES  in these queues", "Which jobs", words, key="queues"),
    ]


def pager_option() -> Option:
    """Pager option of commands whose tables may exceed a screen."""
    return Option(
        "--no-pager  do not use GPUSCHED_PAGER, PAGER or less for tables longer than the terminal", "What to show"
    )
