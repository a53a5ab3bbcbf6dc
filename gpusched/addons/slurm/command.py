"""What Slurm's commands share: options as getopt reads them, messages, exit codes, --help and --version."""

from __future__ import annotations

import os
import sys

from gpusched.cli import output
from gpusched.errors import GpuschedError, NotReady
from gpusched.model.option import AmbiguousOption, CommandLine, MissingValue, Option, OptionError
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpusched.client import DaemonConnection

VERSION = "slurm-wlm 22.05.8"
"""The release whose options and output these commands follow; tools split it into two words."""

_MOST_QUERY = 6000
"""Characters of ids in one request; the daemon takes a line of 8190."""
UNREACHABLE = "Unable to contact slurm controller (connect failure)"


class CommandError(Exception):
    """A command failed: the complete lines for stderr, and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


_COMMON = "-V --version  show the version\n-h --help  show this help\n--usage  show a short summary"
_COMMON_WITHOUT_H = _COMMON.replace("-h --help", "--help")


class Command:
    """A command's name, summary and options.

    Args:
        rows: one option a line, as in `-J --job-name NAME  name of the job`; `[N]` is an optional value.
        bad_option_code: exit code for options that getopt refuses: 255 for sbatch, srun and salloc.
        permutes: options may follow operands.
        has_h: -h is help, not one of the rows.
    """

    def __init__(
        self, name: str, usage: str, rows: str, *, bad_option_code: int = 1, permutes: bool = False, has_h: bool = False
    ) -> None:
        self.name = name
        self.usage = usage
        self.bad_option_code = bad_option_code
        self.permutes = permutes
        own = [Option(row.strip()) for row in rows.strip().splitlines() if row.strip()]
        known = {name for option in own for name in option.names}
        common = (_COMMON if has_h else _COMMON_WITHOUT_H).splitlines()
        more = [Option(row) for row in common]
        for option in more:
            option.names = tuple(name for name in option.names if name not in known)
        self.options = [*own, *(option for option in more if option.names)]
        self.by_name = {name: option for option in self.options for name in option.names}

    def refuse(self, text: str) -> CommandError:
        """The error for a command line that getopt refuses."""
        return CommandError(f'{self.name}: {text}\nTry "{self.name} --help" for more information', self.bad_option_code)

    def error(self, text: str, code: int = 1) -> CommandError:
        """The error `COMMAND: error: TEXT`; each line of the text has its own."""
        return CommandError("\n".join(f"{self.name}: error: {line}" for line in text.splitlines()), code)

    def naming_its_help(self, hint: str) -> str:
        """A hint of the daemon, which names the help of gsub, for who typed this command."""
        before, found, after = hint.partition("gsub --help")
        # Slurm's commands know no topics.
        return f"{before}{self.name} --help{'' if after.startswith(' ') else after}" if found else hint

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        sys.stderr.write(f"{self.name}: {text}\n")

    def unreadable(self, error: OptionError) -> CommandError:
        """The error for a word that getopt cannot read, in its words."""
        is_long = error.name.startswith("--")
        if isinstance(error, MissingValue):
            one = f"option '{error.name}' requires an argument"
            return self.refuse(one if is_long else f"option requires an argument -- '{error.name[1:]}'")
        if isinstance(error, AmbiguousOption):
            possible = " ".join(f"'{known}'" for known in error.candidates)
            return self.refuse(f"option '{error.word}' is ambiguous; possibilities: {possible}")
        return self.refuse(
            f"unrecognized option '{error.word}'" if is_long else f"invalid option -- '{error.name[1:]}'"
        )


class Parsed:
    """A parsed command line: options in their order, by long name, and operands."""

    def __init__(self, options: list[tuple[str, str | None]], operands: list[str]) -> None:
        self.options = options
        self.operands = operands
        self._last = dict(options)

    def has(self, long: str) -> bool:
        return long in self._last

    def get(self, long: str, default: str = "") -> str:
        """The last value; the default also for an option without its optional value."""
        value = self._last.get(long)
        return default if value is None else value

    def all(self, long: str) -> list[str]:
        """The values of a repeated option."""
        return [value for name, value in self.options if name == long and value is not None]


def parse(command: Command, words: Sequence[str]) -> Parsed:
    """Parse a command line as glibc's getopt_long does. Raises: CommandError."""
    options: list[tuple[str, str | None]] = []
    line = CommandLine([command.by_name], words, permutes=command.permutes)
    try:
        for option, _, text in line:
            if text is not None and not option.metavar:
                raise command.refuse(f"option '{option.names[-1]}' doesn't allow an argument")
            options.append((option.long.lstrip("-"), text))
    except OptionError as error:
        raise command.unreadable(error) from None
    return Parsed(options, line.operands)


def help_text(command: Command) -> str:
    """The text of --help: usage, then each option with its help."""
    from gpusched.cli.help import option_lines  # for --help alone

    lines = [f"Usage: {command.usage}", "", "Options:"]
    return "\n".join([*lines, *(line for option in command.options for line in option_lines(option)), ""])


def run(command: Command, body: Callable[[Parsed], int], words: Sequence[str] | None = None) -> int:
    """Parse the words, serve --help, --usage and --version, else run the body; returns the exit code."""

    def guarded(given: list[str]) -> int:
        try:
            parsed = parse(command, given)
            if parsed.has("version"):
                sys.stdout.write(f"{VERSION}\n")
            elif parsed.has("usage"):
                sys.stdout.write(f"Usage: {command.usage}\n")
            elif parsed.has("help"):
                sys.stdout.write(help_text(command))
            else:
                return body(parsed)
            return 0
        except CommandError as error:
            sys.stdout.flush()
            if error.text:
                sys.stderr.write(f"{error.text}\n")
            return _error_code(command, error.code)
        except NotReady as error:
            sys.stdout.flush()
            say_unreachable(command, error)
            return 1

    return output.run(command.name, guarded, None if words is None else list(words))


def _error_code(command: Command, code: int) -> int:
    """The exit code of an error; sbatch, srun and salloc let SLURM_EXIT_ERROR choose it."""
    chosen = os.environ.get("SLURM_EXIT_ERROR", "")
    if command.bad_option_code == 1 or not is_digits(chosen):
        return code
    return int(chosen[:9]) % 256


def say_unreachable(command: Command, error: GpuschedError) -> None:
    """Report a daemon that does not answer in Slurm's words, then in ours."""
    sys.stderr.write(f"{command.name}: error: {UNREACHABLE}\n{command.name}: {printable(error.message)}\n")
    if error.hint:
        sys.stderr.write(f"{command.name}: hint: {error.hint}\n")


def is_number(text: str) -> bool:
    """Whether it is a number that an id or a uid can be."""
    return is_digits(text) and len(text) <= 18


def user_named(word: str) -> str:
    """The name of a user, also for a number. Raises: KeyError."""
    import pwd  # only where users are named

    try:
        return pwd.getpwuid(int(word)).pw_name if is_number(word) else pwd.getpwnam(word).pw_name
    except (ValueError, OverflowError):
        raise KeyError(word) from None


def user_of(uid: int) -> str:
    """The name of a user; the number of one who is gone."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def comma_list(texts: Iterable[str]) -> list[str]:
    """The words of comma-separated values, without empty ones."""
    return [word for text in texts for word in text.split(",") if word]


def cluster_suffix(command: Command, client: DaemonConnection, clusters: str | None) -> str:
    """The cluster's name if --clusters was given, which is then part of the result; empty otherwise.

    Raises: CommandError for another cluster.
    """
    if clusters is None:
        return ""
    name = str(client.call("GET", "/v1/cluster")["cluster_name"])
    for word in filter(None, clusters.split(",")):
        if word not in (name, "all"):
            raise command.error(f"No cluster '{printable(word)}' known by database.")
    return name


def portions(ids: Iterable[str]) -> list[list[str]]:
    """Ids, each once, in portions that fit into a request each, whose line is limited."""
    found: list[list[str]] = []
    length = _MOST_QUERY + 1
    for one in dict.fromkeys(ids):
        if length > _MOST_QUERY:
            found.append([])
            length = 0
        found[-1].append(one)
        length += 3 * len(one) + 1  # quoted
    return found
