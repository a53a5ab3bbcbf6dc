"""`gsub --explain`: each option of a script's `#SBATCH` and `#GSUB` lines, and what becomes of it.

Nothing is submitted and no daemon is asked: what depends on its settings is stated as a condition.
"""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, submission
from gpusched.cli.parse import parse, split_words
from gpusched.cli.slurm_options import NOTES
from gpusched.errors import UsageError, WrongValue
from gpusched.model.option import CommandLine, MissingValue, OptionError
from gpusched.model.spec import FIELDS
from gpusched.model.units import format_duration, format_size_mib, plural, printable
from gpusched.paths import MAX_REQUEST, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values

TAKEN, NO_EFFECT, REFUSED = "taken", "no effect", "refused"
_WITHOUT_ANY = {
    "account": "a label while no accounts are configured",
    "qos": "a label while no QOS are configured",
    "queue": "just a name while no queues are configured",
    "dry_run": "nothing is submitted",
}
"""What becomes of a name for which there may be nothing of the kind here."""


_PARTS_OF_GPUS = {
    "gpu_fraction": "--gpus-per-node {:g}",
    "gpu_shards": "a part of a GPU: {} of its shards, [slurm] shards_per_gpu of the config",
}


class Explained:
    """One option: where it is written, as it is written, and what becomes of it."""

    __slots__ = ("fate", "is_renamed", "line", "text", "words")

    def __init__(self, line: int | None, words: Sequence[str]) -> None:
        """Args: line: None for the command line."""
        self.line = line
        self.words = list(words)
        self.fate, self.text = TAKEN, ""
        self.is_renamed = False
        """Whether the text begins with the option of gsub that it becomes: `as --queue gpu`."""

    @property
    def name(self) -> str:
        return self.words[0].partition("=")[0]

    def is_not(self, fate: str, why: str) -> None:
        """Set another fate than taken."""
        self.fate, self.text = fate, why

    @property
    def verdict(self) -> str:
        """`taken as --queue gpu`, `no effect: ...`."""
        if self.fate != TAKEN:
            return f"{self.fate}: {self.text}"
        mark = "" if self.is_renamed else ";"
        return f"{TAKEN}{mark} {self.text}" if self.text else TAKEN


def explain(table: OptionTable, given: Values, typed: list[str], operands: list[str]) -> int:
    """Print what becomes of the options of a script and of this command line; 1 if any is refused. Raises: Refused.

    Args: typed: the words before the operands.
    """
    path = operands[0] if operands else "-"
    if path == "-":
        content = read_at_most(sys.stdin.buffer, MAX_REQUEST, "standard input", submission.TOO_LARGE)
    else:
        content = submission.read_file(path)
    submission.check_script(content, "standard input" if path == "-" else path)
    found = _options(table, content, [word for word in typed if word not in ("--explain", "--json")])
    if given.get("json"):
        rows = [{"line": one.line, "option": one.words, "fate": one.fate, "text": one.text} for one in found]
        output.print_json({"options": rows})
    else:
        sys.stdout.write(_table(found))
    return int(any(one.fate == REFUSED for one in found))


def _table(found: Sequence[Explained]) -> str:
    if not found:
        return "no options\n"
    width = min(40, max(len(printable(" ".join(one.words))) for one in found))
    lines = [f"{'LINE':>4}  {'OPTION':{width}}  BECOMES"]
    for one in found:
        option = printable(" ".join(one.words))
        lines.append(f"{one.line or '-':>4}  {option:{width}}  {printable(one.verdict)}")
    counts = {fate: sum(one.fate == fate for one in found) for fate in (TAKEN, NO_EFFECT, REFUSED)}
    said = [
        f"{counts[fate]} {word}"
        for fate, word in ((TAKEN, "taken"), (NO_EFFECT, "without effect"), (REFUSED, "refused"))
        if counts[fate]
    ]
    return "\n".join([*lines, f"{plural(len(found), 'option')}: {', '.join(said)}", ""])


def _options(table: OptionTable, content: bytes, typed: list[str]) -> list[Explained]:
    """The options of all lines, then those of the command line, judged alone and then together."""
    found: list[Explained] = []
    values: Values = {}
    for number, _, text in submission.marked_lines(content):
        try:
            words = split_words(text)
        except ValueError as error:
            one = Explained(number, [text.strip()])
            one.is_not(REFUSED, str(error))
            found.append(one)
            continue
        found += [_judged(table, number, part, values) for part in _parts(table, words)]
    found += [_judged(table, None, part, values) for part in _parts(table, typed)]
    _judge_together(table, found, values)
    return found


def _judge_together(table: OptionTable, found: Sequence[Explained], values: Values) -> None:
    """Judge the options that need another one. Args: values: of all options together."""
    spec: dict[str, Any] = {}
    try:
        notes = list(submission.fold_slurm(spec, values))
    except WrongValue as error:
        for one in _named(table, found, error.option):
            one.is_not(REFUSED, error.why)
        return
    for note in notes:
        for one in _named(table, found, note.option):
            one.is_not(NO_EFFECT, note.why)
    if "gpus_per_node" in spec:
        for one in _named(table, found, "--gpus-per-socket"):
            one.is_renamed, one.text = True, f"as --gpus-per-node {spec['gpus_per_node']}"


def _named(table: OptionTable, found: Sequence[Explained], name: str) -> list[Explained]:
    """The options that are taken and have this name or another spelling of it."""
    return [one for one in found if one.fate == TAKEN and name in _spellings(table, one.name)]


def _spellings(table: OptionTable, name: str) -> tuple[str, ...]:
    try:
        return table.find(name if name[:2] == "--" else name[:2]).names
    except UsageError:
        return (name,)


def _parts(table: OptionTable, words: Sequence[str]) -> Iterator[list[str]]:
    """The words of each option; a word that begins no option and is not a value stands alone."""
    part: list[str] = []
    for word in words:
        if part and not _needs_value(table, part):
            yield part
            part = []
        part.append(word)
    if part:
        yield part


def _needs_value(table: OptionTable, part: list[str]) -> bool:
    try:
        for _ in CommandLine(table.by_name, part, permutes=True):
            pass
    except OptionError as error:
        return isinstance(error, MissingValue)
    return False


def _judged(table: OptionTable, line: int | None, words: list[str], values: Values) -> Explained:
    one = Explained(line, words)
    try:
        found, operands, _ = parse(table, words, operands_first=True)
    except UsageError as error:
        one.is_not(REFUSED, error.why if isinstance(error, WrongValue) else error.message)
        return one
    if operands:
        one.is_not(REFUSED, "it is not an option; quote a value that holds blanks")
        return one
    notes = found.pop(NOTES, [])
    values.update(found)
    if notes and not found:
        one.is_not(NO_EFFECT, notes[0].why)
        return one
    same = _as_ours(found)
    conditions = [_WITHOUT_ANY[key] for key in found if key in _WITHOUT_ANY]
    one.is_renamed = bool(same) and same.partition(" ")[0] not in _spellings(table, one.name)
    reasons = (note.why for note in notes)
    one.text = "; ".join(filter(None, [f"as {same}" if one.is_renamed else "", *conditions, *reasons]))
    return one


def _as_ours(found: Values) -> str:
    """The values in the options of gsub: `--gpus-per-node 2`."""
    words = []
    for key, value in found.items():
        field = FIELDS.get(key)
        if field is None or value is None or key == "gpu_type":
            continue
        option = next((one for one in field.options if one.sets == {key: value}), None)
        if option is not None:
            words.append(option.long)
        elif key in _PARTS_OF_GPUS:
            words = [word for word in words if not word.startswith("--gpus-per-node")]
            words.append(_PARTS_OF_GPUS[key].format(value))
        elif field.options:
            kind = f"{found['gpu_type']}:" if found.get("gpu_type") and key.startswith("gpus") else ""
            words.append(f"{field.options[0].long} {kind}{_shown(key, value)}")
    return " ".join(words)


def _shown(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={part}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, str):
        return value
    if key.endswith("_mib"):
        return format_size_mib(value)
    if key.endswith("_at"):
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(value))
    return format_duration(value) if key.endswith("_s") else f"{value:g}"
