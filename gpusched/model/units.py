"""Sizes, times, ids and names: parsed and printed the same way everywhere.

No imports: command-line clients use this module. Every function raises ValueError with a sentence
that quotes the offending text; the caller adds the option.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


MAX_SECONDS = 10 * 365 * 86400
MAX_MIB = 1 << 40

_SIZE_FACTORS_MIB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_TIME_FACTORS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size_mib(text: str) -> int:
    """Parse a memory size in binary units; a bare number is MiB. Rounds up to a whole MiB.

    Accepts `8192`, `8G`, `8GB`, `8GiB`, `0.5T`, `1P`, in either case.
    """
    word = text.strip()
    upper = word.upper()
    for suffix in ("IB", "B"):
        if upper.endswith(suffix) and len(upper) > len(suffix) and upper[-len(suffix) - 1] in "KMGTP":
            upper = upper[: -len(suffix)]
            break
    unit = upper[-1:] if upper[-1:] in "KMGTP" else ""
    digits = upper[: len(upper) - len(unit)].strip()
    value = _number(digits)
    if value is None:
        raise ValueError(f"{text!r} is not a size; write it as 8G, 8GiB or 8192 (MiB)")
    mib = value * _SIZE_FACTORS_MIB[unit]
    if not 0 < mib <= MAX_MIB:
        raise ValueError(f"the size {text!r} is out of range; it must be above 0 and at most 1024P")
    return -int(-mib // 1)


def format_size_mib(mib: float | None) -> str:
    """Format MiB compactly: `512M`, `24G`, `1.5G`; `-` when unknown."""
    if mib is None:
        return "-"
    if mib < 1024:
        return f"{mib:.0f}M"
    for unit, factor in (("G", 1024.0), ("T", 1024.0**2), ("P", 1024.0**3)):
        value = mib / factor
        if value < 1024 or unit == "P":
            return f"{value:.1f}".removesuffix(".0") + unit
    raise AssertionError("unreachable")


def parse_duration_s(text: str, also: str = "") -> int:
    """Parse a duration in seconds; `also` names further accepted input for the error.

    Slurm's forms `MM`, `MM:SS`, `HH:MM:SS`, `D-HH[:MM[:SS]]`, and `90s`, `30m`, `4h`, `2d`, `1h30m`.
    A bare number is minutes, as in Slurm.
    """
    word = text.strip().lower()
    seconds = slurm_duration_s(word) if word and word[-1:] not in _TIME_FACTORS_S else _unit_duration(word)
    if seconds is None:
        raise ValueError(f"{text!r} is not a time; write it as 90s, 30m, 4h, 2d, HH:MM:SS or D-HH:MM{also}")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"the time {text!r} is out of range; it must be above 0 and at most 3650d")
    return seconds


def slurm_duration_s(word: str) -> int | None:
    """A duration as Slurm writes it, `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`; None for anything else."""
    days_text, dash, clock = word.rpartition("-")
    parts = clock.split(":")
    if not all(is_digits(part) for part in parts) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        if not is_digits(days_text):
            return None
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return int(days_text) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(numbers) == 1:
        return numbers[0] * 60
    if len(numbers) == 2:
        return numbers[0] * 60 + numbers[1]
    return numbers[0] * 3600 + numbers[1] * 60 + numbers[2]


def _unit_duration(word: str) -> int | None:
    total = 0.0
    digits = ""
    for char in word:
        if char in _TIME_FACTORS_S:
            value = _number(digits)
            if value is None:
                return None
            total += value * _TIME_FACTORS_S[char]
            digits = ""
        else:
            digits += char
    if digits or not word:
        return None
    return -int(-total // 1)


def format_duration(seconds: float | None) -> str:
    """Format a duration as Slurm does: `M:SS`, `H:MM:SS`, `D-HH:MM:SS`; `UNLIMITED` for None."""
    if seconds is None:
        return "UNLIMITED"
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02d}:{minutes:02d}:{secs:02d}"
    if hours:
        return f"{hours}:{minutes:02d}:{secs:02d}"
    return f"{minutes}:{secs:02d}"


def span(seconds: float) -> str:
    """A duration in at most six characters: `4:31`, `3h12`, `2d03h`, `120d`."""
    minutes, secs = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days >= 100:
        return f"{days}d"
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}" if hours else f"{minutes}:{secs:02d}"


def format_amount(amount: float) -> str:
    """Format a number compactly: `2`, `0.5`, `0.335`; rounded if it has many digits, `1.17`."""
    if type(amount) is int:
        return str(amount)
    text = f"{amount:.3f}"
    if abs(amount - float(text)) > 1e-9:
        text = f"{amount:.2f}"
        if text.endswith("00") and abs(amount - float(text)) > 1e-6:
            text = f"{amount:.4f}"  # it would look like a whole number
    return text.rstrip("0").rstrip(".")


def format_amount_floor(amount: float) -> str:
    """As `format_amount`, but rounded down: for amounts that a hint suggests requesting."""
    return format_amount(int(amount * 100) / 100)


def format_hours(hours: float, *, down: bool = False) -> str:
    """Format GPU-hours: `1960.25`, below 0.1 to four decimals, `0.005`. Args: down: round down, for what is left."""
    places = 2 if hours >= 0.1 else 4
    text = f"{int(hours * 10**places + 1e-6) / 10**places if down else hours:.{places}f}"
    return text[:-2] + text[-2:].rstrip("0") if places == 4 else text


def id_ranges(ids: Iterable[tuple[int, ...]]) -> str:
    """Job ids in one word, `412-9999,10003,42_7`.

    Args: ids: the number of a job, or those of the array and the task.
    """
    ranges: list[list[tuple[int, ...]]] = []
    for one in sorted(ids):
        if ranges and len(one) == len(last := ranges[-1][-1]) == 1 and one[0] == last[0] + 1:
            ranges[-1][1:] = [one]
        else:
            ranges.append([one])
    return ",".join(["-".join(["_".join(map(str, one)) for one in ends]) for ends in ranges])


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `11th`, `1,203rd`."""
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{last}"


def plural(amount: float, noun: str) -> str:
    """Format an amount with its noun: `1 GPU`, `1.5 GPUs`, `0 CPUs`."""
    text = format_amount(amount)
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def plural_of(amount: float, noun: str) -> str:
    """The noun in the grammatical number for this amount."""
    return noun if format_amount(amount) == "1" else noun + "s"


_MIG_FROM, _MIG_SLOTS = 1000, 10


def mig_index(parent: int, slot: int) -> int:
    """Index of a MIG instance, distinct from card indices: 1021 is instance 1 of GPU 2."""
    return _MIG_FROM + _MIG_SLOTS * parent + slot


def gpu_label(index: int) -> str:
    """Display form of a GPU index: `2`, and `2:1` for its instance 1."""
    if index < _MIG_FROM:
        return str(index)
    parent, slot = divmod(index - _MIG_FROM, _MIG_SLOTS)
    return f"{parent}:{slot}"


def gpu_list(indices: Iterable[int]) -> str:
    """Format a list of GPUs, with ranges from three on: `0`, `0,1`, `0-7`, `0-2,5`, `2:0,2:1`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1 and index < _MIG_FROM:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = []
    for run in runs:
        labels = [gpu_label(index) for index in run]
        words.extend([f"{labels[0]}-{labels[-1]}"] if len(run) > 2 else labels)
    return ",".join(words)


def card_index(index: int) -> int:
    """Index of the card; for a MIG instance, that of its parent."""
    return index if index < _MIG_FROM else (index - _MIG_FROM) // _MIG_SLOTS


def parse_job_id(text: str) -> int:
    """Parse a job id, an integer from 1."""
    if not is_digits(text) or len(text) > 18 or int(text) < 1:
        raise ValueError(f"{text!r} is not a job id; ids are whole numbers, as `gq` prints them")
    return int(text)


def split_ids(text: str) -> list[str]:
    """Split `41,42_[1-3,7],43` at the commas outside brackets."""
    words, word, depth = [], "", 0
    for char in text:
        if char == "," and depth <= 0:
            words.append(word)
            word = ""
            continue
        depth += {"[": 1, "]": -1}.get(char, 0)
        word += char
    return [one for one in (*words, word) if one]


def parse_pipeline_id(text: str) -> int | None:
    """Parse a pipeline id, `p42`, to its number; None for any other text."""
    digits = text[1:]
    is_id = text[:1] == "p" and is_digits(digits) and len(digits) <= 18 and digits[0] != "0"
    return int(digits) if is_id else None


def is_variable(name: str) -> bool:
    """Whether shells can read a variable of this name: letters, digits and _, the first of them no digit."""
    return name.isascii() and name.isidentifier()


def printable(text: str, width: int | None = None) -> str:
    """Make user-supplied text safe for a terminal by escaping control and undecodable characters.

    With `width`, longer text is cut and ends in `+`, as in Slurm.
    """
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _escape(char) for char in text)
    if width is not None and len(text) > width:
        text = text[: width - 1] + "+"
    return text


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def is_digits(text: str) -> bool:
    """Whether `text` consists of the digits 0 to 9 alone; `isdigit` also takes those of other scripts."""
    return text.isascii() and text.isdigit()


def _number(digits: str) -> float | None:
    whole, _, fraction = digits.partition(".")
    if not is_digits(whole or "0") or not is_digits(fraction or "0") or not (whole or fraction):
        return None
    if len(digits) > 18:
        return float("inf")
    return float(digits)


# --- sentences ----------------------------------------------------------------------------------


NAMED = 3
"""Maximum jobs, cards or nodes listed by name in a sentence before "and N more"."""
MOST_CHOICES = 8
"""Maximum names in a hint."""


def name_some(noun: str, names: Sequence[str], named: int = NAMED) -> str:
    """`job 7`, `jobs 7 and 8`, `jobs 7, 8, 9 and 4 more`; empty for no names."""
    if not names:
        return ""
    shown = list(names[:named])
    if len(names) > named:
        shown.append(f"{len(names) - named} more")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{plural_of(len(names), noun)} {text}" if noun else text


def choose(names: Iterable[str], option: str) -> str:
    """`name it: -q nlp`, `name one of them: -q nlp, -q vision`, and `account=nlp` for the option `account=`."""
    ordered = sorted(names)
    shown = ", ".join(with_value(option, name) for name in ordered[:MOST_CHOICES])
    more = f" and {len(ordered) - MOST_CHOICES} more" if len(ordered) > MOST_CHOICES else ""
    return f"name {'it' if len(ordered) == 1 else 'one of them'}: {shown}{more}"


def with_value(option: str, value: str) -> str:
    """An option as typed: `-q nlp`, `queue=nlp`."""
    return f"{option}{value}" if option.endswith("=") else f"{option} {value}"


def about(seconds: float) -> str:
    """A duration in words: `about 12 min`, `about 3 h`, `less than a minute`."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"about {seconds / 3600:.0f} h"
    return f"about {seconds / 86400:.0f} days"


def put_aside(path: str, number: int) -> str:
    """Path of an output file after `number` rotations; 0 is the current file."""
    return f"{path}.old{number}" if number else path


_CUTOFF = 0.75
"""Below it, similarity is due to chance: `input` and `output`, `gpu` and `cpu`."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` misspells; None when none is close or the closest has another meaning.

    `--gpus-per-task` is not taken for `--cpus-per-task`: the differing part is a word used in other names.
    """
    from difflib import get_close_matches  # imported only after an error

    names = list(known)
    own = _words(word)
    vocabulary = {part for name in names for part in _words(name)} if len(own) > 1 else set()
    near = get_close_matches(word, names, n=3, cutoff=_CUTOFF)
    return next((name for name in near if not (own - _words(name)) & vocabulary), None)


def _words(name: str) -> set[str]:
    """Parts of a compound name, each without a plural s."""
    parts = "".join(char if char.isalnum() else " " for char in name.lower()).split()
    return {part.rstrip("s") or part for part in parts}


def ranges(numbers: Iterable[int]) -> str:
    """`0-1,3`; empty for none."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def folded_counts(counts: Iterable[int]) -> str:
    """Numbers of tasks, or of cores, on each node, as Slurm writes them: `4(x2),3`."""
    found: list[list[int]] = []
    for count in counts:
        if found and found[-1][0] == count:
            found[-1][1] += 1
        else:
            found.append([count, 1])
    return ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in found)
