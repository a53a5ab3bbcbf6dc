"""The options of the commands as data, from which help, completion, documentation and parser are derived."""

from __future__ import annotations

from gpusched.cli.parse import OptionTable, common_options, pager_option, selection_options
from gpusched.model.option import Option, choice, decimal, hosts, signal_number, whole, words
from gpusched.model.state_names import COMPACT
from gpusched.model.units import parse_duration_s, parse_size_mib, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_STATES = f"{' '.join(COMPACT)} all"


def gq_table() -> OptionTable:
    show, views = "What to show", "Saved views"
    return OptionTable(
        "gq",
        [
            Option("-a --all  in any state, including ended jobs", "Which jobs", sets={"states": ["all"]}),
            *selection_options(),
            Option("--me  my jobs", "Which jobs"),
            Option(
                "-s --state --states -t STATES  in these states, long or short: RUNNING, PD; default: all unfinished",
                "Which jobs",
                words,
                key="states",
                completes=_STATES,
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
            Option("-l --long  why each job is pending, as a sentence; for details see --why", show),
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
            Option("-t --state STATES  in these states", "Which jobs", words, key="states", completes=_STATES),
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
            Option(
                "-s --state STATES  that ended in these states", "Which jobs", words, key="states", completes=_STATES
            ),
            Option("-j --job IDS  these", "Which jobs", split_ids, key="ids"),
            Option(
                "--since WHEN  that ended since: 7d, 12h, or a date 2026-11-01; default 7d; --usage counts from then "
                "on",
                "Which jobs",
                _since,
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


def _reserve_options() -> list[Option]:
    when, what, who = "With reserve: when", "With reserve: what", "With reserve: for whom"
    return [
        Option("--start TIME  start, as in gsub --begin", when, key="start_at"),
        Option("--duration TIME  how long: 4h", when, parse_duration_s, key="duration_s"),
        Option("--every PERIOD  repeat every hour, day, week, or 2d", when, _every, key="every_s"),
        Option(
            "--until TIME  no repetition starts after this; with limit: its end, 1w or a date",
            when,
            key="until_at",
        ),
        Option(
            "-g --gpus N  number of GPUs; the scheduler picks those with the fewest conflicts", what, whole(1, 1024)
        ),
        Option("--gpu LIST  these GPUs: 0,1 or UUIDs", what, words, key="cards"),
        Option("--node  the whole node", what, key="is_node"),
        Option("-w --nodelist NODES  on each of these nodes: lab2,gpu[01-03]; default: one that suits", what, hosts),
        Option("-c --cpus N  cores; default: the same fraction as of the GPUs", what, decimal(0, 65536)),
        Option(
            "--mem SIZE  host memory; default: the same fraction as of the GPUs", what, parse_size_mib, key="mem_mib"
        ),
        Option(
            "--maint  maintenance of the whole node: no job may overlap; -m gives the reason",
            what,
            key="is_maintenance",
        ),
        Option("--users NAMES  users who may use it", who, words),
        Option("--accounts NAMES  accounts that may use it", who, words),
        Option("--ignore-jobs  allow overlap with running jobs, which are left alone", when),
    ]


def _hold_options() -> list[Option]:
    which = "With hold or release: which jobs"
    return [
        Option("-u --user NAMES  of these users", which, words, key="of_users"),
        Option("-n --name NAMES  with these names", which, words, key="names"),
        Option("-q --queue NAMES  in these queues", which, words, key="queues"),
        Option(
            "-t --state STATES  in these states; default: hold pending jobs, release held ones",
            which,
            words,
            key="states",
            completes=_STATES,
        ),
        Option("--me  my jobs; account --me: accounts that I may submit to", which),
        Option("--all  all my jobs", which),
        Option("-y --yes  do not ask for confirmation", which),
    ]


_CHANGES = "With account, queue or qos add, modify, remove, members; with undo and import"
ACTIONS = {
    "hold": "keep jobs from starting, or starting again: gctl hold 41 42, gctl hold -n sweep",
    "release": "undo a hold: gctl release 41, gctl release --all",
    "suspend": "suspend running jobs; they keep their memory: gctl suspend 41",
    "resume": "resume suspended jobs: gctl resume 41",
    "requeue": "stop running jobs and queue them again, with --hold held: gctl requeue 41",
    "update": "change the requests of jobs: gctl update 41 time=2h nice=5 gpus=2",
    "drain": "keep new work off nodes or GPUs: gctl drain 3 -m 'fan is broken'",
    "undrain": "end a drain: gctl undrain 3",
    "down": "give up the runs of a node that is certainly off: gctl down lab2 --confirm",
    "reserve": "reserve GPUs for users, once or repeatedly; without a name: list them: gctl reserve",
    "unreserve": "delete a reservation: gctl unreserve course",
    "mig": "show how GPUs are divided by MIG, or divide one when it is idle: gctl mig set lab1:0 3g.40gb,2x2g.20gb; "
    "gctl mig forget lab1:0",
    "account": "show accounts with members, shares and usage: gctl account vision; or add, modify, remove, members: "
    "gctl account members vision add=bob:2 remove=carl",
    "queue": "show queues: guaranteed, held, borrowed and lent GPUs: gctl queue vision; or add, modify, remove: "
    "gctl queue modify vision max_gpus=4; start nothing new from one: gctl queue pause vision -m 'new disks', "
    "gctl queue resume vision",
    "qos": "add, modify or remove a QOS: gctl qos add night tier=-1",
    "budget": "show the GPU-hour budgets of accounts and users, and what is left, or give credit for this period: "
    "gctl budget vision credit=500 -m grant",
    "limit": "limit a user, for good or until a time; without words: list the limits: gctl limit user bob max_gpus=4 "
    "--until 1w -m 'disk full'; gctl limit remove bob",
    "log": "show who changed which settings, and when: gctl log --since 30d",
    "undo": "take one change of the settings back: gctl undo 17",
    "export": "print accounts, queues, QOS and limits of users as TOML: gctl export > lab.toml",
    "import": "make accounts, queues, QOS and limits of users those of a file: gctl import lab.toml --dry-run",
    "preset": "show the preset in force, and how each would have performed in the last weeks: gctl preset",
    "reload": "reload the config file: gctl reload",
}
"""Actions of gctl, for its help and completion."""


def gctl_table() -> OptionTable:
    return OptionTable(
        "gctl",
        [
            *_hold_options(),
            Option("--hold  hold the jobs until they are released", "With requeue"),
            Option("--dry-run  print the change (of the config file as a patch), and change nothing", _CHANGES),
            Option("--since WHEN  changes since: 30d, or a date 2026-11-01; default 7d", "With log", _since),
            Option("--to NAME  with remove: where its pending jobs, and what is below it, go", _CHANGES),
            Option("--judge  replay the last weeks under every preset now; admins only", "With preset"),
            Option("--confirm  yes, nothing runs there any more", "With down"),
            Option(
                "-m --message TEXT  with drain, down, queue pause, reserve, limit or budget: reason, shown to all users"
            ),
            *_reserve_options(),
            *common_options(),
        ],
    )


def _since(text: str) -> float:
    """A duration back from now, or a point in time."""
    from gpusched.instants import parse_since

    return parse_since(text)


def _every(text: str) -> int:
    """`hour`, `day`, `week`, or a duration."""
    return {"hour": 3600, "day": 86400, "week": 604800}.get(text.strip().lower()) or parse_duration_s(text)


def _gsub_table() -> OptionTable:
    from gpusched.cli.job_options import gsub_table  # many; needed for jobs only

    return gsub_table()


def _grun_table() -> OptionTable:
    from gpusched.cli.job_options import grun_table  # includes most of gsub's

    return grun_table()


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
    "gctl": gctl_table,
}
