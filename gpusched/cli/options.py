"""The options of every command, as data: help, completion, documentation and parsing all read these."""

from __future__ import annotations

from gpusched.cli.parse import Option, Table, decimal, text, whole, words_of
from gpusched.model.units import parse_duration_s, parse_size_mib, printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpusched.cli.parse import Reader, Values

STATES = (
    "PENDING RUNNING SUSPENDED COMPLETING COMPLETED FAILED CANCELLED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED "
    "DEADLINE all"
)
_YEARS_S = 3650 * 86400


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
    """Slurm's words for no limit, or a length of time."""
    if value.strip().upper() in ("0", "UNLIMITED", "INFINITE"):
        return {"time_limit_s": None}
    return {"time_limit_s": parse_duration_s(value)}


def gpus(value: str) -> Values:
    """`2`, `a100:2`, `a100`, `0.5`, `a100:0.5`. Sets all of it, so that nothing of an earlier -g stays."""
    kind, colon, count = value.rpartition(":")
    if not colon and not count[:1].isdigit() and count[:1] not in (".", "-", "+"):
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
    """An instant, see cli.instants."""
    from gpusched.cli.instants import parse_instant  # needs the clock and the calendar

    return {"begin_at": parse_instant(value)}


def since(value: str) -> Values:
    """A length of time back from now, or an instant."""
    from gpusched.cli.instants import parse_since

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


def _common(*skip: str) -> list[Option]:
    options = [
        Option("--json", sets={"json": True}, section="Output", help="one JSON document with schema_version"),
        Option("--quiet", sets={"quiet": True}, section="Output", help="bare values only"),
        Option("-h", "--help", sets={"help": True}, section="Other", help="show this and exit"),
        Option("--version", sets={"version": True}, section="Other", help="show the version and exit"),
        Option(
            "--completion",
            metavar="SHELL",
            read=choice("completion", "bash", "zsh", "fish"),
            section="Other",
            help="print a completion script for bash, zsh or fish; add it to your shell's start-up file",
            completes="bash zsh fish",
        ),
    ]
    return [option for option in options if option.long not in skip]


def _selection() -> list[Option]:
    return [
        Option("-u", "--user", metavar="NAMES", read=words_of("users"), section="Which jobs", help="of these users"),
        Option("-n", "--name", metavar="NAMES", read=words_of("names"), section="Which jobs", help="with these names"),
        Option("-q", "--queue", metavar="NAMES", read=words_of("queues"), section="Which jobs", help="in these queues"),
    ]


def gsub_table() -> Table:
    """gsub, and what a script's #GSUB and #SBATCH lines may say."""
    from gpusched.cli.arrays import array_options
    from gpusched.cli.failing import failing_options
    from gpusched.cli.log_options import log_options
    from gpusched.cli.notifying import notify_options
    from gpusched.cli.repeat import repeat_options
    from gpusched.cli.where import gres, where_options  # its readers are made of those above
    from gpusched.cli.workflow import dependency_options, pipeline_options

    what, res, when, fail, out, slurm = (
        "What to run",
        "Resources",
        "When",
        "Failure and end",
        "Files",
        "Slurm spellings",
    )
    return Table(
        "gsub",
        [
            Option("--wrap", metavar="LINE", read=text("wrap"), section=what, help="run this shell line"),
            Option(
                "--batch",
                metavar="FILE",
                read=text("batch"),
                section=what,
                completes="file",
                help="one shell line a job; - reads standard input; one transaction, ids printed in order",
            ),
            Option(
                "-J",
                "--name",
                "--job-name",
                metavar="NAME",
                read=text("name"),
                section=what,
                help="name of the job; default: the script's or the command's",
            ),
            Option(
                "-D",
                "--chdir",
                metavar="DIR",
                read=text("work_dir"),
                section=what,
                completes="dir",
                help="working directory; default: the current one",
            ),
            Option(
                "--export",
                metavar="LIST",
                read=text("export"),
                section=what,
                help="environment to hand over: ALL (default), NONE, or names and KEY=VALUE with commas",
            ),
            Option(
                "-E",
                "--env",
                metavar="KEY=VALUE",
                read=environment,
                section=what,
                help="one more variable; may be repeated",
            ),
            *pipeline_options(what),
            *repeat_options(what),
            Option(
                "-g",
                "-G",
                "--gpus",
                metavar="N",
                read=gpus,
                section=res,
                help="GPUs: 2, a100:2, or a share of one card, 0.5; default 0",
            ),
            Option(
                "--vram",
                metavar="SIZE",
                read=size("vram_mib"),
                section=res,
                help="book only this much VRAM on each card and share it with other jobs of yours",
            ),
            Option(
                "--min-vram",
                metavar="SIZE",
                read=size("min_vram_mib"),
                section=res,
                help="only cards with at least this much VRAM",
            ),
            Option(
                "--gpu-ids",
                metavar="FORM",
                read=choice("gpu_ids", "index", "uuid"),
                section=res,
                completes="index uuid",
                help="form of CUDA_VISIBLE_DEVICES: index (default) or uuid",
            ),
            Option(
                "-c",
                "--cpus",
                "--cpus-per-task",
                metavar="N",
                read=decimal("cpus", 0, 65536),
                section=res,
                help="cores; 0 books none, a fraction a part of one; default 1",
            ),
            Option(
                "-m",
                "--mem",
                metavar="SIZE",
                read=memory,
                section=res,
                help="host memory, as 8G, 8GiB or 8192 (MiB); default: none booked",
            ),
            Option(
                "-t",
                "--time",
                metavar="TIME",
                read=time_limit,
                section=when,
                help="time limit: 90s, 30m, 4h, 2d, HH:MM:SS, D-HH:MM; a bare number is minutes; default: none",
            ),
            Option("-q", "--queue", metavar="NAME", read=text("queue"), section=when, help="queue; default: default"),
            Option(
                "-A",
                "--account",
                metavar="NAME",
                read=text("account"),
                section=when,
                help="account the usage goes to; default: the one that names you, else your user name",
            ),
            Option(
                "--nice",
                metavar="N",
                read=whole("nice", -10000, 10000),
                section=when,
                help="go behind others by N points, or before them with N below 0; default 0",
            ),
            *dependency_options(when),
            Option(
                "--begin",
                metavar="WHEN",
                read=begin,
                section=when,
                help="not before: 2h from now as now+2h, 18:00, 2026-12-24T18:00",
            ),
            Option("-H", "--hold", sets={"hold": True}, section=when, help="wait for gctl release"),
            *array_options(),
            *where_options(res, when),
            Option(
                "--retries",
                metavar="N",
                read=whole("retries", 0, 1000),
                section=fail,
                help="attempts after the first that fails; default 0",
            ),
            Option(
                "--backoff",
                metavar="TIME",
                read=seconds_from_zero("backoff_s"),
                section=fail,
                help="wait before the first retry; default 10s",
            ),
            Option(
                "--backoff-factor",
                metavar="X",
                read=decimal("backoff_factor", 1, 1000),
                section=fail,
                help="each wait is this many times the one before; default 2",
            ),
            Option(
                "--backoff-max",
                metavar="TIME",
                read=seconds_from_zero("backoff_max_s"),
                section=fail,
                help="longest wait; default 10m",
            ),
            Option(
                "--retry-on",
                metavar="LIST",
                read=retry_on,
                section=fail,
                help="exit, signal, oom, timeout, node_fail, all, codes 3 or 10-20, SIGSEGV; "
                "default exit,signal,oom,node_fail",
            ),
            Option(
                "--requeue",
                sets={"requeue": True},
                section=fail,
                help="repeat for free a run lost to the machine (default)",
            ),
            Option("--no-requeue", sets={"requeue": False}, section=fail, help="do not"),
            *failing_options(fail),
            Option(
                "--signal",
                metavar="[B:]SIG[@S]",
                read=notice,
                section=fail,
                help="send a signal S seconds (default 60) before the time limit; B: to the first process only",
            ),
            Option(
                "--grace",
                metavar="TIME",
                read=seconds_from_zero("grace_s"),
                section=fail,
                help="between the first signal and KILL when the job is stopped; default 30s",
            ),
            *notify_options(fail, slurm),
            Option(
                "-o",
                "--output",
                metavar="FILE",
                read=text("stdout"),
                section=out,
                completes="file",
                help="output; %j id, %A_%a array and task, %x name, %u user, %N node, %5j padded; "
                "default gpusched-%j.out, of a task gpusched-%A_%a.out",
            ),
            Option(
                "-e",
                "--error",
                metavar="FILE",
                read=text("stderr"),
                section=out,
                completes="file",
                help="errors; default: into the output",
            ),
            Option(
                "--open-mode",
                metavar="MODE",
                read=choice("open_mode", "append", "truncate"),
                section=out,
                completes="append truncate",
                help="append or truncate for all runs; default: each retry gets a file of its own",
            ),
            *log_options(out),
            Option("-W", "--wait", sets={"wait": True}, section="Output", help="wait and exit with the job's code"),
            Option(
                "-f",
                "--follow",
                sets={"follow": True},
                section="Output",
                help="print the job's output as it comes, then exit with the job's code",
            ),
            Option("--parsable", sets={"quiet": True}, section="Output", help="print the id alone"),
            Option(
                "--dry-run",
                sets={"dry_run": True},
                section="Output",
                help="submit nothing; say whether it would start now, where, or why not",
            ),
            Option("-p", "--partition", metavar="NAME", read=text("queue"), section=slurm, help="as --queue"),
            Option("--gres", metavar="gpu[:TYPE]:N", read=gres, section=slurm, help="as --gpus-per-node"),
            Option(
                "--mem-per-cpu",
                metavar="SIZE",
                read=memory_per_core,
                section=slurm,
                help="host memory for each core",
            ),
            Option("-n", "--ntasks", metavar="1", read=one("tasks"), section=slurm, help="1 is accepted"),
            Option(
                "--ntasks-per-node",
                "--tasks-per-node",
                metavar="1",
                read=one("tasks"),
                section=slurm,
                help="1 is accepted",
            ),
            *_common(),
        ],
    )


ONLY_TYPED = frozenset(
    {
        "wrap",
        "batch",
        "dry_run",
        "follow",
        "json",
        "help",
        "version",
        "completion",
        "key_again",
        "resubmit",
        "dag",
        "resume",
        "vars",
    }
)
"""What gsub's options set that makes no sense in a #GSUB line or a GSUB_* variable."""


def gq_table() -> Table:
    """gq"""
    show = "What to show"
    return Table(
        "gq",
        [
            Option(
                "-a", "--all", sets={"states": ["all"]}, section="Which jobs", help="in every state, ended ones too"
            ),
            *_selection(),
            Option("--me", sets={"me": True}, section="Which jobs", help="mine"),
            Option(
                "-s",
                "--state",
                "--states",
                "-t",
                metavar="STATES",
                read=words_of("states"),
                section="Which jobs",
                completes=STATES,
                help="in these states, long or short: RUNNING, PD; default: all that have not ended",
            ),
            Option(
                "-j",
                "--job",
                "--jobs",
                metavar="IDS",
                read=ids_of("ids"),
                section="Which jobs",
                help="these; @ is your last one",
            ),
            Option(
                "--limit",
                metavar="N",
                read=whole("limit", 1, 10_000_000),
                section="Which jobs",
                help="only the newest N",
            ),
            Option(
                "-o",
                "--format",
                metavar="FORMAT",
                read=text("format"),
                section=show,
                help="Slurm's % fields, as '%i %j %T'; %.8i is 8 wide to the right, %8i to the left",
            ),
            Option(
                "-S",
                "--sort",
                metavar="KEYS",
                read=words_of("sort"),
                section=show,
                help="by these keys of the JSON: submit_at, -priority; default: running first, then by id",
            ),
            Option("--noheader", sets={"noheader": True}, section=show, help="no line of titles"),
            Option("-w", "--watch", sets={"watch": True}, section=show, help="keep showing, once a second"),
            Option(
                "--why",
                metavar="ID",
                read=text("why"),
                section=show,
                help="why one job waits, with the facts, when it starts, and what would make it start now",
            ),
            Option(
                "--tree",
                sets={"tree": True},
                section=show,
                help="each job below those that it waits for, and the steps of pipelines below their pipeline",
            ),
            Option(
                "--start",
                sets={"start": True},
                section=show,
                help="when waiting jobs start: from when, until when at the latest; N/A where nobody knows",
            ),
            Option(
                "--priority",
                sets={"priority": True},
                section=show,
                help="the parts of each waiting job's priority, and the tier of its QOS",
            ),
            *_common(),
        ],
    )


def gcancel_table() -> Table:
    """gcancel"""
    return Table(
        "gcancel",
        [
            Option(
                "-s",
                "--signal",
                metavar="SIG",
                read=signal_option("signal"),
                help="only send this signal, by name or number",
            ),
            Option("-b", "--batch", sets={"main_only": True}, help="the signal goes to the job's first process only"),
            *_selection(),
            Option(
                "-t",
                "--state",
                metavar="STATES",
                read=words_of("states"),
                section="Which jobs",
                completes=STATES,
                help="in these states",
            ),
            Option("--me", sets={"me": True}, section="Which jobs", help="mine"),
            Option("--all", sets={"all": True}, section="Which jobs", help="all of mine"),
            Option("-y", "--yes", sets={"yes": True}, help="do not ask before ending more than one job"),
            *_common(),
        ],
    )


def gwait_table() -> Table:
    """gwait"""
    return Table(
        "gwait",
        [
            Option("--timeout", metavar="TIME", read=seconds("timeout_s"), help="give up after this long, with code 1"),
            *_common(),
        ],
    )


def glogs_table() -> Table:
    """glogs"""
    which = "Which output"
    return Table(
        "glogs",
        [
            Option("-f", "--follow", sets={"follow": True}, help="all runs from the first on, until all have ended"),
            Option(
                "-n",
                "--lines",
                metavar="N",
                read=whole("lines", 0, 1_000_000_000),
                help="only the last N lines of each job; with -f those of its current run, and then more",
            ),
            Option("--no-prefix", sets={"no_prefix": True}, help="do not begin lines with the job they are of"),
            Option("--quiet", sets={"quiet": True}, help="the output and nothing else, no remarks on stderr"),
            Option(
                "--run",
                metavar="N",
                read=whole("run", 1, 1_000_000),
                section=which,
                help="of this attempt; default: the last, with -f all",
            ),
            Option(
                "--since-run",
                metavar="N",
                read=whole("since_run", 1, 1_000_000),
                section=which,
                help="of this attempt and all later ones; 1 is all",
            ),
            Option("--err", sets={"err": True}, section=which, help="the error file instead of the output"),
            *_common("--json", "--quiet"),
        ],
    )


def gshow_table() -> Table:
    """gshow"""
    return Table(
        "gshow",
        [
            Option("--script", sets={"script": True}, help="print the script as it was submitted"),
            Option(
                "--graph",
                metavar="FORM",
                read=choice("graph", "mermaid", "dot"),
                completes="mermaid dot",
                help="of a pipeline: its steps as a graph, for Mermaid or for Graphviz (dot)",
            ),
            *_common("--quiet"),
        ],
    )


def ginfo_table() -> Table:
    """ginfo"""
    return Table("ginfo", _common())


def ghist_table() -> Table:
    """ghist"""
    show = "What to show"
    return Table(
        "ghist",
        [
            *_selection(),
            Option(
                "-s",
                "--state",
                metavar="STATES",
                read=words_of("states"),
                section="Which jobs",
                completes=STATES,
                help="that ended in these states",
            ),
            Option("-j", "--job", metavar="IDS", read=ids_of("ids"), section="Which jobs", help="these"),
            Option(
                "--since",
                metavar="WHEN",
                read=since,
                section="Which jobs",
                help="that ended since: 7d, 12h, or a date 2026-11-01; default 7d; of --usage the time since then",
            ),
            Option(
                "--limit",
                metavar="N",
                read=whole("limit", 1, 10_000_000),
                section="Which jobs",
                help="only the newest N",
            ),
            Option(
                "--efficiency",
                sets={"efficiency": True},
                section=show,
                help="how much of what was booked was used: cores, memory, GPUs",
            ),
            Option(
                "--usage",
                sets={"usage": True},
                section=show,
                help="sums of all that ran since then: GPU, core and memory hours, jobs, runs, mean wait",
            ),
            Option(
                "--by",
                metavar="KEY",
                read=choice("by", "user", "account", "queue"),
                section=show,
                completes="user account queue",
                help="sum by user (default), account or queue",
            ),
            Option("--csv", sets={"csv": True}, section="Output", help="comma-separated values"),
            *_common(),
        ],
    )


def every(value: str) -> Values:
    """`hour`, `day`, `week`, or a length of time."""
    word = value.strip().lower()
    return {"every_s": {"hour": 3600, "day": 86400, "week": 604800}.get(word) or parse_duration_s(value)}


def instant(key: str) -> Reader:
    """An instant, see cli.instants."""

    def read(value: str) -> Values:
        from gpusched.cli.instants import parse_instant

        return {key: parse_instant(value)}

    return read


def _reserve_options() -> list[Option]:
    when, what, who = "With reserve: when", "With reserve: what", "With reserve: for whom"
    return [
        Option("--start", metavar="TIME", read=instant("start_at"), section=when, help="begin, as in gsub --begin"),
        Option("--duration", metavar="TIME", read=seconds("duration_s"), section=when, help="how long: 4h"),
        Option("--every", metavar="PERIOD", read=every, section=when, help="again every hour, day, week, or 2d"),
        Option("--until", metavar="TIME", read=instant("until_at"), section=when, help="none begins after this"),
        Option(
            "-g",
            "--gpus",
            metavar="N",
            read=whole("gpus", 1, 1024),
            section=what,
            help="so many GPUs; those are chosen that disturb least",
        ),
        Option("--gpu", metavar="LIST", read=words_of("cards"), section=what, help="these GPUs: 0,1 or UUIDs"),
        Option("--node", sets={"is_node": True}, section=what, help="the whole node"),
        Option(
            "-c",
            "--cpus",
            metavar="N",
            read=decimal("cpus", 0, 65536),
            section=what,
            help="cores; default: the same part of them as of the GPUs",
        ),
        Option("--mem", metavar="SIZE", read=size("mem_mib"), section=what, help="host memory; default: likewise"),
        Option("--users", metavar="NAMES", read=words_of("users"), section=who, help="users who may use it"),
        Option("--accounts", metavar="NAMES", read=words_of("accounts"), section=who, help="accounts that may use it"),
        Option(
            "--ignore-jobs",
            sets={"ignore_jobs": True},
            section=when,
            help="also when running jobs may reach into it; they are left alone",
        ),
    ]


def gctl_table() -> Table:
    """gctl"""
    return Table(
        "gctl",
        [
            Option("-m", "--message", metavar="TEXT", read=text("message"), help="with drain: why, for all to see"),
            *_reserve_options(),
            *_common(),
        ],
    )


def _grun_table() -> Table:
    """grun"""
    from gpusched.cli.foreground import grun_table  # it takes most of gsub's

    return grun_table()


TABLES: dict[str, Callable[[], Table]] = {
    "gsub": gsub_table,
    "grun": _grun_table,
    "gq": gq_table,
    "gcancel": gcancel_table,
    "gwait": gwait_table,
    "glogs": glogs_table,
    "gshow": gshow_table,
    "ginfo": ginfo_table,
    "ghist": ghist_table,
    "gctl": gctl_table,
}
