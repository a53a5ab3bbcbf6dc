"""The options of the commands as data, from which help, completion, documentation and parser are derived."""

from __future__ import annotations

from gpusched.cli.parse import OptionTable, common_options, pager_option, selection_options
from gpusched.model.option import Option, choice, signal_number, whole, words
from gpusched.model.state_names import COMPACT
from gpusched.model.units import parse_duration_s, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def state_option(text: str) -> Option:
    """A filter of jobs by their states."""
    return Option(text, "Which jobs", words, key="states", completes=f"{' '.join(COMPACT)} all")


def gq_table() -> OptionTable:
    show, views = "What to show", "Saved views"
    return OptionTable(
        "gq",
        [
            Option("-a --all  in any state, including ended jobs", "Which jobs", sets={"states": ["all"]}),
            *selection_options(),
            Option("--me  my jobs", "Which jobs"),
            state_option(
                "-s --state --states -t STATES  in these states, long or short: RUNNING, PD; default: all unfinished"
            ),
            Option(
                "-j --job --jobs IDS  these; @ is your last one",
                "Which jobs",
                split_ids,
                key="ids",
                completes="job-id",
            ),
            Option("--limit N  only the newest N", "Which jobs", whole(1, 10_000_000)),
            Option(
                "-o --format FORMAT  Slurm's % fields: '%i %j %T'; %.8i is 8 wide, right-aligned; %8i left-aligned",
                show,
            ),
            Option(
                "-S --sort KEYS  by these JSON keys: submit_at, -priority; default: running jobs, then in the order "
                "of their start; with --json, --quiet and -o by id",
                show,
                words,
            ),
            Option(
                "-r --all-rows  one row per job; default: identical pending jobs of a user share a row, such as "
                "412-9999 (9,588 jobs). --json, --quiet and -o never group",
                show,
            ),
            Option(
                "-l --long  why each job is pending, as a sentence, at a terminal below the job; for details see --why",
                show,
            ),
            Option("--noheader  no header line", show),
            pager_option(),
            Option(
                "-w --watch  refresh every second, less often for a very long queue; with --json one document per line",
                show,
            ),
            Option(
                "--why ID  why one job is pending, when it starts, and what would make it start now",
                show,
                completes="job-id",
            ),
            Option("--tree  jobs below their dependencies, and steps below their pipeline", show),
            Option("--start  when pending jobs start, earliest and latest; N/A if unknown", show),
            Option("--priority  the parts of each pending job's priority, and the tier of its QOS", show),
            Option("--save NAME  save these options as a view, and show it", views),
            Option("--view NAME  a saved view; options beside it take precedence", views, completes="view"),
            Option("--views  list the saved views", views),
            Option("--remove-view NAME  remove a saved view", views, completes="view"),
            *common_options(),
        ],
    )


def gcancel_table() -> OptionTable:
    return OptionTable(
        "gcancel",
        [
            Option("-s --signal SIG  only send this signal, by name or number", read=signal_number),
            Option("-b --batch  send the signal only to the job's first process", key="main_only"),
            *selection_options(),
            state_option("-t --state STATES  in these states"),
            Option("--me  my jobs", "Which jobs"),
            Option("--all  all my jobs", "Which jobs"),
            Option("-y --yes  do not ask for confirmation when several jobs match"),
            *common_options(),
        ],
    )


def gwait_table() -> OptionTable:
    return OptionTable(
        "gwait",
        [
            Option("--timeout TIME  give up after this long, with code 1", read=parse_duration_s, key="timeout_s"),
            *common_options(),
        ],
    )


def glogs_table() -> OptionTable:
    which = "Which output"
    return OptionTable(
        "glogs",
        [
            Option("-f --follow  follow all runs from the first one until all jobs have ended"),
            Option(
                "-n --lines N  only the last N lines of each job; with -f, start with those of its current run",
                read=whole(0, 1_000_000_000),
            ),
            Option("--no-prefix  do not prefix lines with their job, node or rank"),
            Option("--quiet  only the output, no messages on stderr"),
            Option("--run N  only this attempt; default: the last one, with -f all", which, whole(1, 1_000_000)),
            Option("--since-run N  this attempt and all later ones; 1 for all", which, whole(1, 1_000_000)),
            Option(
                "--rank N  only this rank, of a job on several nodes or with several tasks", which, whole(0, 65_535)
            ),
            Option("--err  the error file instead of the output", which),
            *common_options("--json", "--quiet"),
        ],
    )


def gshow_table() -> OptionTable:
    return OptionTable(
        "gshow",
        [
            Option("--script  print the script as submitted"),
            Option(
                "--graph FORM  print the steps of a pipeline as a graph, for Mermaid or Graphviz (dot)",
                read=choice("mermaid", "dot"),
            ),
            *common_options("--quiet"),
        ],
    )


def ginfo_table() -> OptionTable:
    return OptionTable(
        "ginfo",
        [
            Option(
                "--foreign  processes on GPUs outside of jobs: owner, age, and how many jobs they delay",
                "What to show",
            ),
            Option(
                "--history  use of each GPU over the last hour, as on a wide terminal; with --json the numbers",
                "What to show",
            ),
            *common_options(),
        ],
    )


def gtop_table() -> OptionTable:
    return OptionTable(
        "gtop",
        [
            Option("--me  my jobs", "Which jobs"),
            Option(
                "-S --sort ORDER  queue (default), id, name, user, state, gpus, time or expected",
                "What to show",
                choice("queue", "id", "name", "user", "state", "gpus", "time", "expected"),
            ),
            Option("--ascii  no block characters", "What to show"),
            Option("--readonly  no keys that change jobs", "What to show"),
            *common_options("--json", "--quiet"),
        ],
    )


def ghist_table() -> OptionTable:
    show = "What to show"
    return OptionTable(
        "ghist",
        [
            *selection_options(),
            state_option("-s --state STATES  that ended in these states"),
            Option("-j --job IDS  these", "Which jobs", split_ids, key="ids"),
            Option(
                "--since WHEN  that ended since: 7d, 12h, or a date 2026-11-01; default 7d; --usage counts from then "
                "on",
                "Which jobs",
                since,
            ),
            Option("--limit N  only the newest N", "Which jobs", whole(1, 10_000_000)),
            Option("--efficiency  booked against used: cores, memory, GPUs", show),
            Option("--usage  totals since then: GPU, core and memory hours, jobs, runs, mean wait", show),
            Option(
                "--statement MONTH  a month's GPU-hours, energy and budgets by account and user: 2026-11, this, last",
                show,
            ),
            Option("--by KEY  sum by user (default), account or queue", show, choice("user", "account", "queue")),
            pager_option(),
            Option("--csv  comma-separated values", "Output"),
            Option("--html FILE  with --statement: a page to print or to send; - for standard output", "Output"),
            *common_options(),
        ],
    )


def since(text: str) -> float:
    """A duration back from now, or a point in time."""
    from gpusched.instants import parse_since

    return parse_since(text)


def _gsub_table() -> OptionTable:
    from gpusched.cli.job_options import gsub_table  # many; needed for jobs only

    return gsub_table()


def _grun_table() -> OptionTable:
    from gpusched.cli.job_options import grun_table  # includes most of gsub's

    return grun_table()


def _gctl_table() -> OptionTable:
    from gpusched.cli.actions import gctl_table  # many; needed by gctl only

    return gctl_table()


TABLES: dict[str, Callable[[], OptionTable]] = {
    "gsub": _gsub_table,
    "grun": _grun_table,
    "gq": gq_table,
    "gcancel": gcancel_table,
    "gwait": gwait_table,
    "glogs": glogs_table,
    "gshow": gshow_table,
    "ginfo": ginfo_table,
    "gtop": gtop_table,
    "ghist": ghist_table,
    "gctl": _gctl_table,
}
