"""The actions of gctl as data: what each does, how it is typed, its options, and the function that runs it."""

from __future__ import annotations

from gpusched.cli.options import since, state_option
from gpusched.cli.parse import OptionTable, common_options, selection_options
from gpusched.errors import UsageError
from gpusched.model.option import Option, OptionError, decimal, find_option, hosts, whole, words
from gpusched.model.units import parse_duration_s, parse_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpusched.cli.parse import Values

    Run = Callable[[str, list[str], Values], int]
    """Takes the action's name, its operands and the values of its options; returns the exit code."""


class Action:
    """One action of gctl; `queue pause` is one with a verb."""

    __slots__ = ("_run", "about", "example", "name", "operands", "options", "text")

    def __init__(self, text: str, run: str, *options: Option) -> None:
        """Args: text: as in `hold [IDS...]  keep jobs from starting: gctl hold 41`; run: `module:function`."""
        typed, _, self.text = text.partition("  ")
        self.name = " ".join(word for word in typed.split() if word.isalpha() and word.islower())
        self.operands = typed[len(self.name) :].strip()
        said, _, example = self.text.partition(": gctl ")
        self.about, self.example = f"{said[0].upper()}{said[1:]}.", f"gctl {example}"
        self.options = options
        self._run = run

    @property
    def usage(self) -> str:
        return f"gctl {self.name} [OPTIONS] {self.operands}".rstrip()

    def table(self) -> OptionTable:
        """The options of this action alone, which refuses those of others by name."""
        return OptionTable(f"gctl {self.name}", [*self.options, *common_options()], elsewhere=_whose)

    def function(self) -> Run:
        """What runs it, from a module that only this action may need."""
        from importlib import import_module

        module, _, name = self._run.partition(":")
        function: Run = getattr(import_module(f"gpusched.cli.{module}"), name)
        return function


def _every(text: str) -> int:
    """`hour`, `day`, `week`, or a duration."""
    return {"hour": 3600, "day": 86400, "week": 604800}.get(text.strip().lower()) or parse_duration_s(text)


_ME = Option("--me  only mine; of accounts, those that I may submit to", "Which jobs")
_YES = Option("-y --yes  do not ask for confirmation")
_JOBS = (
    *selection_options(),
    state_option("-t --state STATES  in these states; default: hold pending jobs, release held ones"),
    _ME,
    Option("--all  all my jobs", "Which jobs"),
    _YES,
)
_MESSAGE = Option("-m --message TEXT  reason, shown to all users")
_DRY_RUN = Option("--dry-run  print the change (of the config file as a patch), and change nothing")
_CHANGE = (_DRY_RUN, _YES)
_TO = Option("--to NAME  move its pending jobs and children to NAME")
_UNTIL = Option(
    "--until TIME  no repetition starts after this; of a limit its end: 1w or a date", "When", key="until_at"
)
RESERVE = (
    Option("--start TIME  start, as in gsub --begin", "When", key="start_at"),
    Option("--duration TIME  how long: 4h", "When", parse_duration_s, key="duration_s"),
    Option("--every PERIOD  repeat every hour, day, week, or 2d", "When", _every, key="every_s"),
    _UNTIL,
    Option("--ignore-jobs  allow overlap with running jobs, which are left alone", "When"),
    Option("-g --gpus N  number of GPUs; the scheduler picks those with the fewest conflicts", "What", whole(1, 1024)),
    Option("--gpu LIST  these GPUs: 0,1 or UUIDs", "What", words, key="cards"),
    Option("--node  the whole node", "What", key="is_node"),
    Option("-w --nodelist NODES  on each of these nodes: lab2,gpu[01-03]; default: one that suits", "What", hosts),
    Option("-c --cpus N  cores; default: the same fraction as of the GPUs", "What", decimal(0, 65536)),
    Option("--mem SIZE  host memory; default: the same fraction as of the GPUs", "What", parse_size_mib, key="mem_mib"),
    Option(
        "--maint  maintenance of the whole node: no job may overlap; -m gives the reason", "What", key="is_maintenance"
    ),
    Option("--users NAMES  users who may use it", "For whom", words),
    Option("--accounts NAMES  accounts that may use it", "For whom", words),
    _MESSAGE,
)
"""Options of `gctl reserve`; each sets a field of the request."""


def _tables(section: str, thing: str, example: str, *more: Action) -> list[Action]:
    """What changes accounts, queues or QOS."""
    run = "setting_changes:change_table"
    return [
        Action(f"{section} add NAME KEY=VALUE...  add {thing}: gctl {section} add {example}", run, *_CHANGE),
        Action(f"{section} modify NAME KEY=VALUE...  change {thing}: gctl {section} modify {example}", run, *_CHANGE),
        *more,
        Action(
            f"{section} remove NAME  remove {thing}: gctl {section} remove {example.split()[0]}", run, _TO, *_CHANGE
        ),
    ]


_ALL = (
    Action(
        "hold [IDS...]  keep jobs from starting, or starting again: gctl hold 41 42, gctl hold -n sweep",
        "gctl:change_jobs",
        *_JOBS,
    ),
    Action("release [IDS...]  undo a hold: gctl release 41, gctl release --all", "gctl:change_jobs", *_JOBS),
    Action("suspend IDS...  suspend running jobs; they keep their memory: gctl suspend 41", "gctl:change_jobs"),
    Action("resume IDS...  resume suspended jobs: gctl resume 41", "gctl:change_jobs"),
    Action(
        "requeue IDS...  stop running jobs and queue them again, with --hold held: gctl requeue 41",
        "gctl:change_jobs",
        Option("--hold  hold the jobs until they are released"),
    ),
    Action(
        "update IDS... NAME=VALUE...  change the requests of jobs: gctl update 41 time=2h nice=5 gpus=2",
        "gctl:change_jobs",
    ),
    Action(
        "drain NODE|GPU...  keep new work off nodes or GPUs: gctl drain 3 -m 'fan is broken'",
        "gctl:change_nodes",
        _MESSAGE,
    ),
    Action("undrain NODE|GPU...  end a drain: gctl undrain 3", "gctl:change_nodes"),
    Action(
        "down NODE...  give up the runs of a node that is certainly off: gctl down lab2 --confirm",
        "gctl:change_nodes",
        Option("--confirm  yes, nothing runs there any more"),
        _MESSAGE,
    ),
    Action(
        "reserve [NAME]  reserve GPUs for users, once or repeatedly; without a name: list them: "
        "gctl reserve course --start 14:00 --duration 4h --gpus 2 --users ann,bob",
        "reservations:reserve",
        *RESERVE,
    ),
    Action("unreserve NAMES...  delete a reservation: gctl unreserve course", "reservations:unreserve"),
    Action("mig [list [GPU]]  show how GPUs are divided by MIG: gctl mig, gctl mig list lab1:0", "mig:show"),
    Action(
        "mig set GPU LAYOUT  divide a GPU by MIG when it is idle: gctl mig set lab1:0 3g.40gb,2x2g.20gb",
        "mig:change",
        *_CHANGE,
    ),
    Action("mig forget GPU  do not divide it again after a reboot: gctl mig forget lab1:0", "mig:change", *_CHANGE),
    Action(
        "account [NAME]  show accounts with members, shares and usage: gctl account vision",
        "accounts:show_accounts",
        _ME,
    ),
    *_tables(
        "account",
        "an account",
        "vision shares=4",
        Action(
            "account members NAME add=NAMES|remove=NAMES...  change the members of an account; its coordinators "
            "may, too: gctl account members vision add=bob:2 remove=carl",
            "setting_changes:change_table",
            *_CHANGE,
        ),
    ),
    Action(
        "queue [NAME]  show queues: guaranteed, held, borrowed and lent GPUs: gctl queue vision", "accounts:show_queues"
    ),
    *_tables("queue", "a queue", "vision max_gpus=4"),
    Action(
        "queue pause NAMES...  start nothing new from queues: gctl queue pause vision -m 'new disks'",
        "pauses:change",
        _MESSAGE,
    ),
    Action("queue resume NAMES...  end a pause: gctl queue resume vision", "pauses:change"),
    *_tables("qos", "a QOS", "night tier=-1"),
    Action(
        "budget [NAME [credit=HOURS]]  show the GPU-hour budgets of accounts and users, and what is left, or give "
        "credit for this period: gctl budget vision credit=500 -m grant",
        "accounts:budget",
        _MESSAGE,
        _YES,
    ),
    Action("limit  list the limits of users: gctl limit", "limits:show"),
    Action(
        "limit user NAME KEY=VALUE...  limit a user, for good or until a time: "
        "gctl limit user bob max_gpus=4 --until 1w -m 'disk full'",
        "limits:change",
        _UNTIL,
        _MESSAGE,
        *_CHANGE,
    ),
    Action("limit remove NAME  remove the limit of a user: gctl limit remove bob", "limits:change", *_CHANGE),
    Action(
        "log  show who changed which settings, and when: gctl log --since 30d",
        "settings_log:show_log",
        Option("--since WHEN  changes since: 30d, or a date 2026-11-01; default 7d", read=since),
    ),
    Action("undo NUMBER  take one change of the settings back: gctl undo 17", "settings_log:undo", *_CHANGE),
    Action(
        "export  print accounts, queues, QOS and limits of users as TOML: gctl export > lab.toml",
        "transfer:export",
        _YES,
    ),
    Action(
        "import FILE  make accounts, queues, QOS and limits of users those of a file: gctl import lab.toml --dry-run",
        "transfer:import_from",
        *_CHANGE,
    ),
    Action(
        "preset  show the preset in force, and how each would have performed in the last weeks: gctl preset",
        "preset:show",
        Option("--judge  replay the last weeks under every preset now; admins only"),
    ),
    Action("reload  reload the config file: gctl reload", "gctl:reload"),
)
ACTIONS = {action.name: action for action in _ALL}
WORDS = list(dict.fromkeys(name.partition(" ")[0] for name in ACTIONS))
"""First words of actions."""


def gctl_table() -> OptionTable:
    """The options of all actions."""
    options = dict.fromkeys(option for action in _ALL for option in action.options)
    return OptionTable("gctl", [*options, *common_options()])


def with_option(option: Option) -> dict[str, list[str]]:
    """The actions that take an option: first words, each with its verbs."""
    found: dict[str, list[str]] = {}
    for action in _ALL:
        if option in action.options:
            word, _, verb = action.name.partition(" ")
            found.setdefault(word, []).extend([verb] if verb else [])
    return found


def sections() -> dict[str, list[Option]]:
    """All options by the actions that take them, and by their section: `With hold, release: which jobs`."""
    found: dict[str, list[Option]] = {}
    for option in gctl_table().options:
        names = with_option(option)
        title = option.section
        if names:
            title = f"With {', '.join(names)}"
            title += f": {option.section.lower()}" if option.section != "Options" else ""
        found.setdefault(title, []).append(option)
    return found


def _whose(name: str) -> str:
    """The actions that take an option, as in `hold, queue add|remove`; empty for an unknown one."""
    try:
        found = with_option(find_option(name, gctl_table().by_name))
    except OptionError:
        return ""
    return ", ".join(f"{word} {'|'.join(of_word)}".rstrip() for word, of_word in found.items())


def verbs(word: str) -> list[str]:
    """What `queue` and others do besides showing: `add`, `modify`."""
    return [name.partition(" ")[2] for name in ACTIONS if name.startswith(f"{word} ")]


def find_action(operands: Sequence[str]) -> Action | None:
    """The action that the first operands name."""
    word, verb = (*operands[:2], "", "")[:2]
    if (found := ACTIONS.get(f"{word} {verb}")) is not None:
        return found
    return None if verb in _VERBS and verbs(word) else ACTIONS.get(word)


def unknown_action(operands: Sequence[str]) -> UsageError:
    """The sentence for operands that name no action."""
    if not operands:
        return UsageError("no action given", _THERE_ARE)
    word, known = operands[0], verbs(operands[0])
    if not known:
        return UsageError(f"unknown action {printable(word, 40)!r}", _THERE_ARE)
    if len(operands) < 2:
        return UsageError(f"{word} needs one of {', '.join(known)}", ACTIONS[f"{word} {known[0]}"].text)
    return UsageError(
        f"gctl {word} has no {printable(operands[1], 40)}", f"it has: {', '.join(known)}; see gctl --help"
    )


_VERBS = frozenset(verbs("account"))
"""Verbs that are not taken for names of a queue or QOS that has no such verb."""
_THERE_ARE = f"actions: {', '.join(WORDS)}; see gctl --help"
