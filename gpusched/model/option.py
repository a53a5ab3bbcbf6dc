"""Options and fields of jobs as data, shared by the command line, scripts, the API, Python and the docs.

`model.request`, `model.launch` and `model.spec` declare the fields. Command-line clients import this module: it must
not import msgspec, regular expressions or typing.
"""

from __future__ import annotations

from gpusched.model.units import is_digits, is_variable, parse_duration_s, parse_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    Values = dict[str, Any]
    Names = Mapping[str, "Option"]
    """Options by each of their spellings."""
    Reader = Callable[[str], Any]
    """Makes of a text a value, or `Several`. Raises: ValueError with a sentence."""

MAX_TEXT = 4096
"""Maximum characters of a text, and of all texts of a list or map together; the kernel's limit for paths."""
MAX_LIST = 1 << 16
MAX_OWN = 1 << 62
"""Bound for fields that have their own limit."""
MAX_UNITS = 1_000_000
"""Maximum units of one license or custom resource per job."""
REQUIRED = object()
"""Default of mandatory fields."""
PENDING, RUNNING = "pending", "running"
"""When `gctl update` can change a field: only while the job is pending, or also while it runs."""

WHAT, RES, WHEN, MANY, WHERE = "What to run", "Resources", "When", "Many tasks", "Where"
LAYOUT = "Parallel tasks"
BOX = "Container"
FAIL, FILES, SLURM = "Failure and end", "Files", "Slurm spellings"
"""Help sections."""


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

    @property
    def needs_value(self) -> bool:
        """Whether a value must follow; one all in brackets, as in `--nice [N]`, is optional and never the next word."""
        return bool(self.metavar) and not (self.metavar[0] == "[" and self.metavar.index("]") == len(self.metavar) - 1)

    def bind(self, key: str = "", read: Reader | None = None) -> None:
        """Complete the option from its name, or from the field that it sets."""
        self.key = self.key or key or self.long.lstrip("-").replace("-", "_")
        if self.metavar:
            self.read = self.read or read or str
            self.completes = self.completes or " ".join(getattr(self.read, "choices", ()))
        elif self.sets is None:
            self.sets = {self.key: True}


class OptionNote(str):
    """A sentence on an option, which knows its parts."""

    __slots__ = ("option", "why")

    option: str
    """Its name."""
    why: str

    @classmethod
    def of(cls, option: str, text: str, why: str) -> OptionNote:
        note = cls(text)
        note.option, note.why = option, why
        return note


def without_effect(option: str, why: str) -> OptionNote:
    """`--hint has no effect: ...`."""
    return OptionNote.of(option, f"{option} has no effect: {why}", why)


class OptionError(Exception):
    """A word of a command line that is not an option of it. Which sentence that is worth, its command knows."""

    def __init__(self, name: str, word: str = "", candidates: Sequence[str] = ()) -> None:
        """Args: name: as typed, `-t` or `--time`; word: all of it; candidates: what an abbreviation may stand for."""
        super().__init__(name)
        self.name = name
        self.word = word or name
        self.candidates = candidates


class UnknownOption(OptionError):
    """No option has this name."""


class AmbiguousOption(OptionError):
    """Several options begin with this name."""


class MissingValue(OptionError):
    """The last word is an option that needs a value."""


def find_option(name: str, tables: Sequence[Names], word: str = "") -> Option:
    """The option with this spelling; a long one may be abbreviated to a unique prefix.

    Args: tables: each is searched for a prefix only if those before it have none; word: for the error.
    Raises: UnknownOption, AmbiguousOption.
    """
    for known in tables:
        if name in known:
            return known[name]
    if name.startswith("--") and len(name) > 2:
        for known in tables:
            found = [one for one in known if one.startswith(name)]
            if found and len({id(known[one]) for one in found}) > 1:
                raise AmbiguousOption(name, word, found)
            if found:
                return known[found[0]]
    raise UnknownOption(name, word)


class CommandLine:
    """The words of a command line, read as getopt_long does: iterate over the options, then see the operands."""

    def __init__(
        self, tables: Sequence[Names], words: Sequence[str], *, permutes: bool = False, has_equals: bool = False
    ) -> None:
        """Args: permutes: options may follow operands; has_equals: so may `=` a short option, as in `-t=5`."""
        self._tables = tables
        self._words = words
        self._at = 0
        self._permutes = permutes
        self._has_equals = has_equals
        self.operands: list[str] = []
        self.is_ended = False
        """Whether `--` came before the operands, or before the last of them."""

    def __iter__(self) -> Iterator[tuple[Option, str, str | None]]:
        """Each option, its spelling as typed, and its value; a value after `=` also if the option takes none.

        Raises: UnknownOption, AmbiguousOption, MissingValue, at the word that cannot be read.
        """
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            if word[:1] != "-" or word == "-":
                self.operands.append(word)
                if self._permutes:
                    continue
                break
            if word == "--":
                self.is_ended = True
                break
            if word.startswith("--"):
                name, equals, text = word.partition("=")
                option = find_option(name, self._tables, word)
                yield option, name, text if equals else self._value(option, name)
            else:
                yield from self._bundle(word)
        self.operands.extend(self._words[self._at :])

    def _bundle(self, word: str) -> Iterator[tuple[Option, str, str | None]]:
        """Short options in one word: flags, of which the last may take the rest of the word or the next word."""
        for place, letter in enumerate(word[1:], 2):
            name, rest = f"-{letter}", word[place:]
            option = find_option(name, self._tables, word)
            if rest and option.metavar:
                yield option, name, rest.removeprefix("=") if self._has_equals else rest
                return
            yield option, name, self._value(option, name)

    def _value(self, option: Option, name: str) -> str | None:
        """The next word, if the option needs one."""
        if not option.needs_value:
            return None
        if self._at >= len(self._words):
            raise MissingValue(name if name in option.names else option.long)
        self._at += 1
        return self._words[self._at - 1]


class Field:
    """One field of a request: JSON type, range or choices, meaning; for jobs also its location and options.

    The suffix of the name gives the unit: `_mib` binary megabytes, `_s` seconds, `_at` an instant.
    """

    __slots__ = (
        *("kind", "doc", "low", "high", "choices", "nullable", "exclusive_low", "most", "words"),
        *("name", "attribute", "default", "options", "update", "owner_only", "word", "keyword", "python"),
        "background_only",
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
        background_only: str = "",
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
        """In Python; by default the name without its unit. None: not a keyword."""
        self.python = python
        """Its type in Python; by default that of its kind and unit."""
        self.background_only = background_only
        """What a job in the foreground cannot have by this field, as named in errors; empty: it can have it."""

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


def fields_of(kind: type) -> dict[str, Field]:
    """Request fields declared by a class, by JSON name."""
    return {one.name: one for one in vars(kind).values() if isinstance(one, Field)}


# --- readers: what the text behind an option means ------------------------------------------------------


def words(text: str) -> list[str]:
    """Words separated by commas; repeated options accumulate."""
    return [word for word in text.split(",") if word]


def whole(low: int, high: int) -> Reader:
    """A whole number within a range."""

    def read(text: str) -> int:
        digits = text.removeprefix("-").removeprefix("+")
        if not is_digits(digits):
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
        if not is_variable(name):
            raise ValueError(f"{printable(name, 40)!r} is not the name of a variable: letters, digits and _")
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


# --- readers of one option, many with a syntax of Slurm's: `a100:2`, `B:USR1@60`, `100M:5` -----------------


GPU_VARIANTS = "gpu_variants"
"""Key of the GPUs of the further variants that -g names, each with the GPU keys that it states; None for none."""


def gpus(text: str) -> Several:
    """`2`, `a100:2`, `a100`, `0.5`, `a100:0.5`, `1g.10gb`, or several of these, `a100:2|rtx3090:4`.

    Sets every GPU key, to reset any earlier -g.
    """
    first, *others = text.split("|")
    if not others:
        return _gpus(text)
    if not all(word.strip() for word in (first, *others)):
        shown = printable(text, 60)
        raise ValueError(f"{shown!r} has an empty variant; write GPUs on both sides of |, as in 'a100:2|rtx3090:4'")
    found = _gpus(first.strip())
    stated = [{key: value for key, value in _gpus(word.strip()).items() if value is not None} for word in others]
    return Several(found, **{GPU_VARIANTS: tuple(stated)})


def one_gpus(text: str) -> Several:
    """As `gpus`, without variants."""
    found = gpus(text)
    if found.pop(GPU_VARIANTS):
        raise ValueError(f"{printable(text, 60)!r} has variants, which only -g can name; use --or for other options")
    return found


def _gpus(text: str) -> Several:
    kind, colon, count = text.rpartition(":")
    is_profile = "g." in count  # of a MIG instance, 1g.10gb
    if not colon and (is_profile or (not count[:1].isdigit() and count[:1] not in (".", "-", "+"))):
        kind, count = count, "1"
    found = Several(gpus=None, gpu_fraction=None, gpu_type=kind or None, **{GPU_VARIANTS: None})
    if "." not in count:
        return Several(found, gpus=whole(0, 1024)(count))
    fraction = decimal(0.0, 1024.0)(count)
    if not 0 < fraction <= 1:
        shown = printable(text, 40)
        raise ValueError(f"{shown!r} is neither a number of GPUs nor a share of one; write -g 2, -g 0.5 or -g 0")
    return Several(found, gpu_fraction=fraction)


def gpus_of_node(text: str) -> Several:
    """As -g, but per node: `2`, `a100:2`, `0.5`."""
    found = one_gpus(text)
    count = 1 if found["gpu_fraction"] is not None else found["gpus"]
    kind = {"gpu_type": found["gpu_type"]} if found["gpu_type"] else {}
    return Several(gpus_per_node=count, gpu_fraction=found["gpu_fraction"], **kind)


def percent(text: str) -> int:
    """`30%` or `30`."""
    return int(whole(1, 100)(text.strip().removesuffix("%")))


def gpus_of_task(text: str) -> Several:
    """As -g, but for each task: `1`, `a100:1`."""
    found = one_gpus(text)
    if not found["gpus"]:
        raise ValueError(f"{printable(text, 40)!r} is not a number of GPUs for each task; write 1 or a100:1")
    kind = {"gpu_type": found["gpu_type"]} if found["gpu_type"] else {}
    return Several(gpus_per_task=found["gpus"], **kind)


def gres(text: str) -> Several:
    """Slurm's `gpu:2`, `gpu:a100:2`, `mps:50`, `shard:1` and `scratch:2`, per node, joined by commas."""
    found = Several()
    for word in text.split(","):
        if not all(word.split(":")):
            raise ValueError(f"{printable(word, 40)!r} lacks a part, as in gpu:2, gpu:a100:2, scratch:2")
        name, _, rest = word.removeprefix("gres:").removeprefix("gres/").partition(":")
        if name == "gpu":
            found.update(gpus_of_node(rest or "1"))
        elif name == "mps":
            share = whole(1, 100)(rest or "1")
            found.update(gpus_per_node=1, gpu_fraction=None if share == 100 else share / 100)
        elif name == "shard":
            found.update(gpus_per_node=1, gpu_fraction=None, gpu_shards=whole(1, MAX_UNITS)(rest or "1"))
        elif name != "none":
            found.setdefault("resources", {}).update(_amount_of(name, rest, word))
    return found


def tres_per_task(text: str) -> Several:
    """Slurm's `cpu:2,gres/gpu:a100:1` for each task; numbers may follow `=`."""
    found = Several()
    for word in filter(None, text.split(",")):
        name, _, rest = word.replace("=", ":").partition(":")
        if name in ("gres", "gres/gpu"):
            kind, _, rest = rest.partition(":") if name == "gres" else ("gpu", "", rest)
            if kind == "gpu":
                found.update(gpus_of_task(rest or "1"))
                continue
        elif name == "cpu":
            found.update(cpus=float(whole(1, MAX_UNITS)(rest)), cpus_per_gpu=None)
            continue
        raise ValueError(f"{printable(word, 40)!r} is not supported for each task, only cpu:N and gres/gpu:N are")
    return found


def _amount_of(name: str, rest: str, word: str) -> dict[str, int]:
    """A custom resource and its number."""
    if not name or ":" in rest:
        raise ValueError(
            f"{printable(word, 40)!r} is not a resource and its number, as in gpu:2, gpu:a100:2, scratch:2"
        )
    return {name: int(whole(1, 1_000_000)(rest or "1"))}


def memory(text: str) -> Several:
    """Host memory of the job, 0 for a node's; overrides an earlier amount per core or GPU."""
    is_all = text.strip().upper().rstrip("KMGTIB") == "0"
    return Several(mem_mib="all" if is_all else parse_size_mib(text), mem_per_cpu_mib=None, mem_per_gpu_mib=None)


def memory_per_core(text: str) -> Several:
    """Host memory per core; overrides an earlier amount for the job or per GPU."""
    return Several(mem_mib=None, mem_per_cpu_mib=parse_size_mib(text), mem_per_gpu_mib=None)


def memory_per_gpu(text: str) -> Several:
    """Host memory per GPU; overrides an earlier amount for the job or per core."""
    return Several(mem_mib=None, mem_per_cpu_mib=None, mem_per_gpu_mib=parse_size_mib(text))


def nodes(text: str) -> Several:
    """A number of nodes, or a range `1-2`."""
    low, dash, high = text.partition("-")
    if not (dash and low and high):
        return Several(nodes=whole(1, 4096)(text), nodes_max=None)
    least, most = whole(1, 4096)(low), whole(1, 4096)(high)
    if most < least:
        raise ValueError(f"{printable(text, 40)!r} is a range that ends before it begins")
    return Several(nodes=least, nodes_max=most if most > least else None)


def exclusive(text: str) -> Several:
    """Slurm's values of --exclusive; `user` and `mcs` mean the whole node as well."""
    word = text.strip().lower()
    if word not in ("user", "mcs"):
        raise ValueError(f"{printable(text, 40)!r} is neither user nor mcs")
    why = "no other job runs on the node, not even your own"
    return Several(exclusive=True, slurm_notes=[OptionNote.of("--exclusive", f"--exclusive={word}: {why}", why)])


def hosts(text: str) -> tuple[str, ...]:
    """Slurm's node list, `lab1,gpu[01-03]`. A tuple, so that the last of several options wins, as in Slurm."""
    from gpusched.model.hostlist import expand  # few submissions name nodes

    return tuple(expand(text))


def near(text: str) -> tuple[str, ...]:
    """What a job wants to be near to: `data=imagenet,coco`."""
    kind, equals, names = text.partition("=")
    if kind.strip() != "data" or not equals:
        raise ValueError(f"{printable(text, 60)!r} does not say near to what; write data=imagenet")
    found = sorted({name.strip() for name in names.split(",")} - {""})
    if not found:
        raise ValueError("no data set is named; write data=imagenet")
    return tuple(found)


def time_limit(text: str) -> int | str:
    """Slurm's words for no limit, `auto`, or a duration."""
    word = text.strip().lower()
    if word in ("0", "unlimited", "infinite", "none"):
        return "unlimited"
    return word if word == "auto" else parse_duration_s(text, ", or as auto")


def notice(text: str) -> Several:
    """`[B:]SIG[@seconds]`, by default 60 seconds, as in Slurm."""
    main_only = text[:2].upper() == "B:"
    name, at, before = (text[2:] if main_only else text).partition("@")
    before_s = whole(0, 65535)(before) if at else 60
    return Several(notice={"signal": signal_number(name), "before_s": before_s, "main_only": main_only})


def signal_number(name: str) -> int:
    """Number of a signal given by name, with or without SIG, or by number. Raises: ValueError."""
    import signal  # most command lines name none

    word = name.upper()
    if is_digits(word) and 1 <= int(word[:4]) <= 64:
        return int(word)
    found = getattr(signal, word if word.startswith("SIG") else "SIG" + word, None)
    if not isinstance(found, signal.Signals):
        raise ValueError(f"{printable(name, 40)!r} is not a signal; write TERM, SIGUSR1 or 10")
    return int(found)


def log_max(text: str) -> Several:
    """`100M` or `100M:5`: a size, and the number of rotated files to keep; None resets an earlier number."""
    size, colon, keep = text.partition(":")
    return Several(log_max_mib=parse_size_mib(size), log_keep=whole(0, 100)(keep) if colon else None)


def events(text: str) -> list[str]:
    """Events for alerts, parsed as in the daemon, but here an error can name its location."""
    from gpusched.model.alert_events import parse_events  # few submissions ask for it

    return list(parse_events(text))


def mail_type(text: str) -> list[str]:
    """Slurm's words; its ALL covers fewer events than ours."""
    words = text.split(",")
    return events(",".join("begin,end,fail,requeue" if word.strip().upper() == "ALL" else word for word in words))


def mail_user(text: str) -> Several:
    """Addresses or targets; unlike those of --notify-to they may be named without any event, as in Slurm."""
    return Several(notify_to=words(text), slurm_mail_user=True)


def kill_on_invalid_dep(text: str) -> str:
    """Slurm's `yes` and `no`."""
    word = text.strip().lower()
    if word not in ("yes", "no"):
        raise ValueError(f"{printable(text, 40)!r} is neither yes nor no")
    return "cancel" if word == "yes" else "wait"
