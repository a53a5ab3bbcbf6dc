"""The configuration file of srun --multi-prog: which tasks run which program.

Source: srun(1), "MULTIPLE PROGRAM CONFIGURATION".
"""

from __future__ import annotations

from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.addons.slurm.command import Command

_LONGEST_FILE = 1 << 22


class Programs:
    """The lines of a file; raises CommandError for one that says nothing.

    Each line has task numbers (`0`, `1-3,5`, `*` for all that no earlier line has) and a program with its arguments,
    in which %t is the task's number and %o its place in the line.
    """

    def __init__(self, command: Command, path: str) -> None:
        self._command = command
        self._path = path
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read(_LONGEST_FILE)
        except OSError as error:
            raise command.error(f"Unable to open configuration file {printable(path)}: {error.strerror}") from None
        self._lines = [self._parsed(number, line) for number, line in _logical_lines(text)]

    def of(self, count: int) -> list[list[str]]:
        """The command of each task. Raises: CommandError."""
        found: list[list[str] | None] = [None] * count
        for tasks, words in self._lines:
            numbers = [task for task in range(count) if found[task] is None] if tasks is None else tasks
            for offset, task in enumerate(numbers):
                if task < count and found[task] is None:
                    found[task] = [word.replace("%t", str(task)).replace("%o", str(offset)) for word in words]
        programs = [words for words in found if words is not None]
        if len(programs) < count:
            missing = found.index(None)
            raise self._command.error(
                f"Configuration file {printable(self._path)} invalid, no record for task id {missing}"
            )
        return programs

    def _parsed(self, number: int, line: str) -> tuple[list[int] | None, list[str]]:
        ranks, *words = _words(line) or [""]
        try:
            tasks = None if ranks == "*" else _numbers(ranks)
        except ValueError:
            words = []
            tasks = None
        if not words:
            raise self._command.error(
                f"Line {number} of configuration file {printable(self._path)} invalid: {printable(line)}"
            )
        return tasks, words


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines with their numbers, without comments and empty ones; a backslash at the end continues one."""
    found: list[tuple[int, str]] = []
    begun = ""
    for number, line in enumerate(text.splitlines(), start=1):
        whole = begun + line
        if whole.endswith("\\"):
            begun = whole[:-1]
            continue
        begun = ""
        if whole.strip() and not whole.lstrip().startswith("#"):
            found.append((number, whole.strip()))
    if begun.strip():
        found.append((text.count("\n") + 1, begun.strip()))
    return found


def _words(line: str) -> list[str]:
    """Words of a line; quotes keep blanks."""
    import shlex  # few steps have such a file

    try:
        return shlex.split(line)
    except ValueError:
        return []


def _numbers(text: str) -> list[int]:
    """`1-3,5`. Raises: ValueError."""
    found: list[int] = []
    for word in text.split(","):
        low, dash, high = word.partition("-")
        if not all(is_digits(part) and len(part) < 6 for part in ([low, high] if dash else [low])):
            raise ValueError(word)
        found += range(int(low), int(high or low) + 1)
    return found
