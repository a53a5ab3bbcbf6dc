"""Parse command lines against an option table, following getopt."""

from __future__ import annotations

from gpusched.errors import GpuschedError, UsageError
from gpusched.model.option import Option, Several, choice, words
from gpusched.model.units import closest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Values = dict[str, Any]


class OptionTable:
    def __init__(self, command: str, options: Sequence[Option], hidden: Sequence[Option] = ()) -> None:
        """Args: hidden: options that are parsed, but not in help, completion and hints."""
        self.command = command
        self.options = tuple(options)
        for option in (*options, *hidden):
            option.bind()
        self._by_name = {name: option for option in options for name in option.names}
        self._hidden = {name: option for option in hidden for name in option.names}

    def find(self, name: str) -> Option:
        """The option with this spelling; a long one may be abbreviated to a unique prefix. Raises: UsageError."""
        option = self._by_name.get(name) or self._hidden.get(name)
        if option is not None:
            return option
        hint = f"list them with: {self.command} --help"
        if name.startswith("--") and len(name) > 2:
            found, those = [], self._by_name
            for those in (self._by_name, self._hidden):
                if found := sorted(known for known in those if known.startswith(name)):
                    break
            if found and len({id(those[known]) for known in found}) == 1:
                return those[found[0]]
            if found:
                raise UsageError(f"{printable(name)!r} is short for {', '.join(found)}", hint)
            near = closest(name, [known for known in self._by_name if known.startswith("--")])
            if near:
                hint = f"did you mean {near}? {hint}"
        raise UsageError(f"unknown option {printable(name, 60)!r}", hint)


class UsageErrors:
    """Mistakes in several places, to be reported together."""

    def __init__(self) -> None:
        self._found: list[GpuschedError] = []

    def add(self, error: UsageError, where: str = "", hint: str = "") -> None:
        """Add an error, or each error it combines, prefixed with its place and with a more specific hint."""
        for one in error.mistakes or (error,):
            self._found.append(UsageError(f"{where}{one.message}", hint or one.hint))

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
    operands: list[str] = []
    mistakes = UsageErrors()
    try:
        is_command = _read(table, words, operands_first, values, operands, mistakes)
    except UsageError as error:
        mistakes.add(error)
        is_command = False
    mistakes.check()
    return values, operands, is_command


def _read(
    table: OptionTable,
    words: Sequence[str],
    operands_first: bool,
    values: Values,
    operands: list[str],
    mistakes: UsageErrors,
) -> bool:
    """Returns whether `--` preceded the operands. Raises: UsageError if parsing cannot continue."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            operands.extend(words[at:])
            return True
        if word[:1] != "-" or word == "-":
            operands.append(word)
            if operands_first:
                continue
            operands.extend(words[at:])
            return False
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            option = table.find(name)
            if not option.metavar:
                if equals and option.read is not None:
                    # A flag with an optional value, as in --snapshot=copy.
                    _apply(table, option, text, values, mistakes, name)
                elif equals:
                    mistakes.add(UsageError(f"{name} takes no value", f"see: {table.command} --help"))
                else:
                    _set(table, option, values, mistakes)
                continue
            if not equals:
                text, at = _next(table, name if name in option.names else option.long, words, at)
            _apply(table, option, text, values, mistakes, name)
            continue
        at = _short(table, word, words, at, values, mistakes)
    return False


def _short(table: OptionTable, word: str, words: Sequence[str], at: int, values: Values, mistakes: UsageErrors) -> int:
    """Parse bundled short options: flags, of which the last may take the rest of the word or the next word."""
    for place in range(1, len(word)):
        option = table.find("-" + word[place])
        if not option.metavar:
            _set(table, option, values, mistakes)
            continue
        rest = word[place + 1 :]
        if rest:
            _apply(table, option, rest.removeprefix("="), values, mistakes)
        else:
            text, at = _next(table, "-" + word[place], words, at)
            _apply(table, option, text, values, mistakes)
        break
    return at


def _set(table: OptionTable, option: Option, values: Values, mistakes: UsageErrors) -> None:
    """Apply a flag; one that sets nothing by itself is read like an option with a value."""
    if option.sets:
        values.update(option.sets)
    else:
        _apply(table, option, "", values, mistakes)


def _next(table: OptionTable, name: str, words: Sequence[str], at: int) -> tuple[str, int]:
    if at >= len(words):
        raise UsageError(f"{name} needs a value", f"see: {table.command} --help")
    return words[at], at + 1


def _apply(
    table: OptionTable, option: Option, text: str, values: Values, mistakes: UsageErrors, typed: str = ""
) -> None:
    try:
        apply(table, option, text, values, typed)
    except UsageError as error:
        mistakes.add(error)


def apply(table: OptionTable, option: Option, text: str, values: Values, typed: str = "") -> None:
    """Parse an option's text into the values. Repeated lists and maps are joined. Raises: UsageError.

    Args: typed: the spelling to name in errors, if it is a full one; by default the longest.
    """
    try:
        found = read(option, text)
    except ValueError as error:
        name = typed if typed in option.names else option.long
        raise UsageError(f"{name}: {error}", f"see: {table.command} --help") from None
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
        Option("-h --help  show this and exit", "Other"),
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
