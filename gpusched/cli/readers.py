"""What the text after an option means: one reader for each kind of value."""

from __future__ import annotations

from gpusched.cli.parse import decimal, whole
from gpusched.model.units import parse_duration_s, parse_size_mib, printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Reader, Values


def size(key: str) -> Reader:
    """A memory size in MiB."""
    return lambda value: {key: parse_size_mib(value)}


def seconds(key: str) -> Reader:
    """A length of time in seconds."""
    return lambda value: {key: parse_duration_s(value)}


def seconds_from_zero(key: str) -> Reader:
    """A length of time that may be nothing."""
    return lambda value: {key: 0 if value.strip() in ("0", "0s") else parse_duration_s(value)}


def time_limit(value: str) -> Values:
    """Slurm's words for no limit, `auto`, or a length of time."""
    word = value.strip().lower()
    if word in ("0", "unlimited", "infinite", "none"):
        return {"time_limit_s": "unlimited"}
    if word == "auto":
        return {"time_limit_s": "auto"}
    return {"time_limit_s": parse_duration_s(value, ", or as auto")}


def gpus(value: str) -> Values:
    """`2`, `a100:2`, `a100`, `0.5`, `a100:0.5`, `1g.10gb`. Sets all of it, so that nothing of an earlier -g stays."""
    kind, colon, count = value.rpartition(":")
    is_profile = "g." in count  # of a MIG instance, 1g.10gb
    if not colon and (is_profile or (not count[:1].isdigit() and count[:1] not in (".", "-", "+"))):
        kind, count = count, "1"
    found: Values = {"gpus": None, "gpu_fraction": None, "gpu_type": kind or None}
    if "." in count:
        fraction = decimal("gpu_fraction", 0.0, 1024.0)(count)
        if not 0 < fraction["gpu_fraction"] <= 1:
            shown = printable(value, 40)
            raise ValueError(f"{shown!r} is neither a number of GPUs nor a share of one; write -g 2, -g 0.5 or -g 0")
        return {**found, **fraction}
    return {**found, **whole("gpus", 0, 1024)(count)}


def memory(value: str) -> Values:
    """Host memory of the job; takes the place of an earlier amount for each core."""
    return {"mem_mib": parse_size_mib(value), "mem_per_cpu_mib": None}


def memory_per_core(value: str) -> Values:
    """Host memory for each core; takes the place of an earlier amount for the job."""
    return {"mem_mib": None, "mem_per_cpu_mib": parse_size_mib(value)}


def one(what: str) -> Reader:
    """Slurm's count of tasks: one on each node is what a job here has."""

    def read(value: str) -> Values:
        if value not in ("1", "1-1"):
            raise ValueError(f"{printable(value, 40)!r} {what} are asked for; a job has one on each node")
        return {}

    return read


def environment(value: str) -> Values:
    """`KEY=VALUE` for the job's environment."""
    key, equals, content = value.partition("=")
    if not key or not equals:
        raise ValueError(f"{printable(value, 40)!r} is not KEY=VALUE")
    return {"extra_env": {key: content}}


def notice(value: str) -> Values:
    """`[B:]SIG[@seconds]`, 60 seconds when they are not given, as in Slurm."""
    rest = value
    main_only = rest[:2].upper() == "B:"
    if main_only:
        rest = rest[2:]
    name, at, before = rest.partition("@")
    before_s = whole("n", 0, 65535)(before)["n"] if at else 60
    return {"notice": {"signal": signal_number(name), "before_s": before_s, "main_only": main_only}}


def signal_number(name: str) -> int:
    """Number of a signal by name, with or without SIG, or by number. Raises: ValueError."""
    import signal  # most command lines name none

    word = name.upper()
    if word.isascii() and word.isdigit() and 1 <= int(word[:4]) <= 64:
        return int(word)
    found = getattr(signal, word if word.startswith("SIG") else "SIG" + word, None)
    if not isinstance(found, signal.Signals):
        raise ValueError(f"{printable(name, 40)!r} is not a signal; write TERM, SIGUSR1 or 10")
    return int(found)


def signal_option(key: str) -> Reader:
    """A signal by name or number."""
    return lambda value: {key: signal_number(value)}


def begin(value: str) -> Values:
    """An instant, see gpusched.instants."""
    from gpusched.instants import parse_instant  # needs the clock and the calendar

    return {"begin_at": parse_instant(value)}


def since(value: str) -> Values:
    """A length of time back from now, or an instant."""
    from gpusched.instants import parse_since

    return {"since": parse_since(value)}


def ids_of(key: str) -> Reader:
    """Ids of jobs and tasks separated by commas: `41,42_[1-3,7]`; several uses add up."""
    return lambda value: {key: split_ids(value)}


def choice(key: str, *words: str) -> Reader:
    """One of a few words."""

    def read(value: str) -> Values:
        if value not in words:
            raise ValueError(f"{printable(value, 40)!r} is none of {', '.join(words)}")
        return {key: value}

    return read


def retry_on(value: str) -> Values:
    """Classes of failure; the daemon checks them."""
    return {"retry_on": [word for word in value.split(",") if word]}


def every(value: str) -> Values:
    """`hour`, `day`, `week`, or a length of time."""
    word = value.strip().lower()
    return {"every_s": {"hour": 3600, "day": 86400, "week": 604800}.get(word) or parse_duration_s(value)}


def instant(key: str) -> Reader:
    """An instant, see gpusched.instants."""

    def read(value: str) -> Values:
        from gpusched.instants import parse_instant

        return {key: parse_instant(value)}

    return read


_ALL_OF_SLURM = "begin,end,fail,requeue"


def sweep(value: str) -> Values:
    """`lr=1e-3,1e-4`; several uses make every combination."""
    return {"sweep": [value]}


def events(value: str) -> Values:
    """What to be told of, as the daemon reads it too: here a mistake is told with its place."""
    from gpusched.model.alerts import parse_events  # few submissions ask for it

    return {"notify": list(parse_events(value))}


def mail_type(value: str) -> Values:
    """Slurm's words; its ALL is less than ours."""
    words = value.split(",")
    return events(",".join(_ALL_OF_SLURM if word.strip().upper() == "ALL" else word for word in words))


def log_max(value: str) -> Values:
    """`100M` or `100M:5`: a size, and how many files put aside are kept."""
    text, colon, keep = value.partition(":")
    found: Values = {"log_max_mib": parse_size_mib(text)}
    # Set in either case, so that nothing of an earlier --log-max stays.
    found["log_keep"] = whole("log_keep", 0, 100)(keep)["log_keep"] if colon else None
    return found


def kill_on_invalid_dep(value: str) -> Values:
    """Slurm's `yes` and `no`."""
    word = value.strip().lower()
    if word not in ("yes", "no"):
        raise ValueError(f"{printable(value, 40)!r} is neither yes nor no")
    return {"never_satisfied": "cancel" if word == "yes" else "wait"}


def variable(value: str) -> Values:
    """`NAME=VALUE` for a pipeline."""
    name, equals, content = value.partition("=")
    if not name or not equals:
        raise ValueError(f"{printable(value, 40)!r} is not NAME=VALUE")
    return {"vars": {name: content}}
