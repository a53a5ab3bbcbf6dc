"""The options of the commands, as data: help, completion, documentation and parsing all read these."""

from __future__ import annotations

from gpusched.cli.common import STATES, common_options, pager_option, selection_options
from gpusched.cli.parse import Option, Table, decimal, text, whole, words_of
from gpusched.cli.readers import (
    choice,
    every,
    ids_of,
    instant,
    seconds,
    signal_option,
    since,
    size,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def gq_table() -> Table:
    """gq"""
    show = "What to show"
    return Table(
        "gq",
        [
            Option(
                "-a", "--all", sets={"states": ["all"]}, section="Which jobs", help="in every state, ended ones too"
            ),
            *selection_options(),
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
                help="by these keys of the JSON: submit_at, -priority; default: running first, then the next to start; "
                "with --json, --quiet and -o by id",
            ),
            Option(
                "-r",
                "--all-rows",
                sets={"all_rows": True},
                section=show,
                help="one row a job; default: pending jobs of one user that look the same share a row, as in "
                "412-9999 (9,588 jobs). --json, --quiet and -o have one a job anyway",
            ),
            Option(
                "-l",
                "--long",
                sets={"long": True},
                section=show,
                help="why each job waits, in words; for the facts see --why",
            ),
            Option("--noheader", sets={"noheader": True}, section=show, help="no line of titles"),
            pager_option(),
            Option(
                "-w",
                "--watch",
                sets={"watch": True},
                section=show,
                help="keep showing, once a second, a very long queue less often; with --json one document a line",
            ),
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
            *common_options(),
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
            *selection_options(),
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
            *common_options(),
        ],
    )


def gwait_table() -> Table:
    """gwait"""
    return Table(
        "gwait",
        [
            Option("--timeout", metavar="TIME", read=seconds("timeout_s"), help="give up after this long, with code 1"),
            *common_options(),
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
            *common_options("--json", "--quiet"),
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
            *common_options("--quiet"),
        ],
    )


def ginfo_table() -> Table:
    """ginfo"""
    return Table(
        "ginfo",
        [
            Option(
                "--foreign",
                sets={"foreign": True},
                section="What to show",
                help="processes on GPUs that are no jobs: whose, since when, and how many jobs wait for them",
            ),
            *common_options(),
        ],
    )


def ghist_table() -> Table:
    """ghist"""
    show = "What to show"
    return Table(
        "ghist",
        [
            *selection_options(),
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
            pager_option(),
            Option("--csv", sets={"csv": True}, section="Output", help="comma-separated values"),
            *common_options(),
        ],
    )


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
        Option(
            "--maint",
            sets={"is_maintenance": True},
            section=what,
            help="the whole node for maintenance: no job runs into it; -m says why",
        ),
        Option("--users", metavar="NAMES", read=words_of("users"), section=who, help="users who may use it"),
        Option("--accounts", metavar="NAMES", read=words_of("accounts"), section=who, help="accounts that may use it"),
        Option(
            "--ignore-jobs",
            sets={"ignore_jobs": True},
            section=when,
            help="also when running jobs may reach into it; they are left alone",
        ),
    ]


def _hold_options() -> list[Option]:
    which = "With hold or release: which jobs"
    return [
        Option("-u", "--user", metavar="NAMES", read=words_of("of_users"), section=which, help="of these users"),
        Option("-n", "--name", metavar="NAMES", read=words_of("names"), section=which, help="with these names"),
        Option("-q", "--queue", metavar="NAMES", read=words_of("queues"), section=which, help="in these queues"),
        Option(
            "-t",
            "--state",
            metavar="STATES",
            read=words_of("states"),
            section=which,
            completes=STATES,
            help="in these states; default: hold pending jobs, release held ones",
        ),
        Option("--me", sets={"me": True}, section=which, help="mine; account --me: those that I may submit to"),
        Option("--all", sets={"all": True}, section=which, help="all of mine"),
        Option("-y", "--yes", sets={"yes": True}, section=which, help="do not ask before more than one job"),
    ]


def gctl_table() -> Table:
    """gctl"""
    return Table(
        "gctl",
        [
            *_hold_options(),
            Option(
                "--hold",
                sets={"hold": True},
                section="With requeue",
                help="let the jobs wait until they are released",
            ),
            Option(
                "--judge",
                sets={"judge": True},
                section="With preset",
                help="replay the last weeks under every preset now; for admins",
            ),
            Option(
                "-m",
                "--message",
                metavar="TEXT",
                read=text("message"),
                help="with drain or reserve: why, for all to see",
            ),
            *_reserve_options(),
            *common_options(),
        ],
    )


def _gsub_table() -> Table:
    """gsub"""
    from gpusched.cli.gsub_options import gsub_table  # many, and for gsub alone

    return gsub_table()


def _grun_table() -> Table:
    """grun"""
    from gpusched.cli.foreground import grun_table  # it takes most of gsub's

    return grun_table()


TABLES: dict[str, Callable[[], Table]] = {
    "gsub": _gsub_table,
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
