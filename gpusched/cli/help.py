"""--help, shell completion and the reference page, all generated from the option tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from gpusched.cli.actions import ACTIONS, WORDS, Action, sections, verbs
from gpusched.cli.job_options import UPDATES
from gpusched.cli.options import TABLES
from gpusched.cli.parse import OptionTable, common_options
from gpusched.errors import UsageError
from gpusched.model.option import BOX, FAIL, FILES, LAYOUT, MANY, RES, SLURM, WHAT, WHEN, WHERE, Option
from gpusched.model.units import printable

WIDTH = 100
_COLUMN = 28
_WORD = 12

ABOUT: dict[str, tuple[str, str, str]] = {
    "%%gpu": (
        "Run a notebook's cell as a job.",
        "%%gpu -g 1 -t 1h -i data -o model",
        "%%gpu [OPTIONS]",
    ),
    "gsub": (
        "Submit a job and print its id.",
        "gsub -g 1 -t 4h train.sh",
        """gsub [OPTIONS] SCRIPT [ARGS...]
gsub [OPTIONS] -- COMMAND [ARGS...]
gsub [OPTIONS] --wrap 'shell line'
gsub [OPTIONS] --batch FILE|-
gsub [OPTIONS] job.yaml
gsub [OPTIONS] < script""",
    ),
    "grun": (
        "Run a command or shell in the foreground on allocated GPUs; inside a job, run tasks of it.",
        "grun -g 1 --pty bash",
        """grun [OPTIONS] COMMAND [ARGS...]
grun [OPTIONS] --pty [COMMAND [ARGS...]]
grun --attach ID""",
    ),
    "gq": (
        "Show the queue: running jobs and where, pending jobs and why.",
        "gq --why 42",
        "gq [OPTIONS] [IDS...]",
    ),
    "gcancel": ("Cancel jobs, or send them a signal.", "gcancel 42", "gcancel [OPTIONS] [IDS...]"),
    "gwait": ("Wait for jobs; the exit code is 0 only if all COMPLETED.", "gwait 41 42", "gwait [OPTIONS] IDS..."),
    "glogs": ("Print the output of jobs, or follow it live.", "glogs -f 42", "glogs [OPTIONS] [IDS...]"),
    "gshow": ("Show everything about a job: request, runs, history.", "gshow 42", "gshow [OPTIONS] [IDS...]"),
    "ginfo": (
        "Show nodes, GPUs and queues: free, booked, used, borrowed, lent.",
        "ginfo",
        "ginfo [OPTIONS]",
    ),
    "gtop": (
        "Watch the cards and the queue live; cancel, hold and release by key.",
        "gtop user:bob st:PD",
        "gtop [OPTIONS] [FILTER...]",
    ),
    "ghist": (
        "Show finished jobs, the newest first, and what they used, or usage by user, account or queue.",
        "ghist --since 30d --usage",
        "ghist [OPTIONS] [IDS...]",
    ),
    "gctl": (
        "Hold, suspend, requeue and update jobs; drain and reserve GPUs; show accounts and queues; reload.",
        "gctl update 42 time=2h",
        "gctl ACTION [OPTIONS] [OPERANDS...]\ngctl ACTION --help",
    ),
    **{f"gctl {name}": (one.about, one.example, one.usage) for name, one in ACTIONS.items()},
}
"""Purpose, example and usage of each command, and of each action of gctl."""

AFTER = {
    "gsub": """A script may set options in lines such as '#GSUB -g 1' or '#SBATCH --gpus=1' before its first command.
The command line overrides GSUB_* variables (GSUB_TIME=4h), which override the script. Unknown options are errors.
job.yaml is a Kubernetes Job; --print writes one, or an sbatch script.""",
    "grun": """The exit code is the command's own, or 128 plus the signal that killed it. Without --pty, standard input,
output and error are passed through unchanged. Ctrl-C while the job is pending cancels it. Inside a job the command
starts at once on the job's GPUs, and resource options such as -g are rejected.""",
    "gq": "IDS are job ids; @ is your last job.",
    "glogs": """Without IDS: your last job. An array means all of its tasks that have output. With -f the exit code
is the job's own; for several jobs it is 0 only if all COMPLETED, as with gwait; with --run it is that run's.""",
    "gtop": """FILTER is a part of a name or id, or user:, st:, queue:, node:, account:, qos:, name:, id: or reason:
with values; - before it negates. ? shows the keys.""",
    "gcancel": """Sends TERM, or the signal that the job was submitted with (--signal), to all processes of the job, and
KILL after the grace period.""",
}


MOST_USED = {
    "gsub": (
        *("--gpus", "--time", "--name", "--cpus", "--mem", "--vram", "--array", "--dependency", "--output", "--wrap"),
        *("--follow", "--dry-run"),
    ),
    "grun": (
        *("--pty", "--jupyter", "--keep", "--attach", "--job", "--lease", "--gpus", "--time", "--cpus", "--mem"),
        *("--vram", "--name"),
    ),
    "gctl": (
        *("hold", "release", "requeue", "update", "suspend", "resume", "drain", "undrain", "reserve", "account"),
        *("queue", "reload"),
    ),
}
"""Options that most people need, of gctl actions: --help shows these, and the topics of all others."""
_TOPICS = {
    "Foreground": "foreground",
    WHAT: "run",
    RES: "resources",
    LAYOUT: "tasks",
    WHEN: "when",
    MANY: "arrays",
    WHERE: "where",
    FAIL: "failure",
    FILES: "files",
    BOX: "container",
    "Output": "output",
    SLURM: "slurm",
    "Other": "other",
}
"""Words for the sections of gsub and grun."""
_OF_GCTL = {
    "jobs": ("hold", "release", "suspend", "resume", "requeue", "update"),
    "nodes": ("drain", "undrain", "down", "mig"),
    "reservations": ("reserve", "unreserve"),
    "accounts": ("account", "queue", "qos", "budget", "limit"),
    "settings": ("log", "undo", "export", "import", "preset", "reload"),
}
"""First words of gctl's actions by topic."""
ALL = "all"


def help_text(table: OptionTable, topics: Sequence[str] = ()) -> str:
    """The text of --help: purpose, example, usage, and what most people need with the topics of the rest.

    Args: topics: words behind --help, of commands with many options. Raises: UsageError.
    """
    if table.command not in MOST_USED or ALL in topics:
        return _whole_text(table)
    if topics:
        return "\n".join(line for topic in topics for line in [*_topic(table, topic.lstrip("-")), ""])
    lines = [*_head(table), "Most used:"]
    if table.command == "gctl":
        lines += _actions(ACTIONS[name] for name in MOST_USED["gctl"])
    else:
        for option in map(table.find, MOST_USED[table.command]):
            lines += option_lines(option)
    one = "gctl ACTION --help" if table.command == "gctl" else f"{table.command} --help OPTION"
    lines += ["", f"More: {one}, {table.command} --help all, or {table.command} --help TOPIC:"]
    for word, what in _topics(table).items():
        lines += [f"  {word:<{_WORD}} {textwrap.shorten(what, WIDTH - _WORD - 3, placeholder=' ...')}"]
    lines.append("")
    if table.command in AFTER:
        lines += [*textwrap.wrap(AFTER[table.command], WIDTH), ""]
    return "\n".join(lines)


def _topics(table: OptionTable) -> dict[str, str]:
    """The topics of a command, and what each is about."""
    if table.command == "gctl":
        return {word: ", ".join(verb for verb in of_word) for word, of_word in _OF_GCTL.items()}
    found = {}
    for section, options in options_by_section(table).items():
        word = _TOPICS[section]
        title = "" if word == section.lower() else f"{section}: "
        found[word] = title + " ".join(one.long for one in options if one.long not in MOST_USED[table.command])
    return found


def _topic(table: OptionTable, topic: str) -> list[str]:
    """The lines about one topic, or one option. Raises: UsageError."""
    if table.command == "gctl" and topic in _OF_GCTL:
        return [f"Actions, {topic}:", *_actions(one for one in ACTIONS.values() if _first(one) in _OF_GCTL[topic])]
    for section, options in options_by_section(table).items():
        if table.command != "gctl" and topic == _TOPICS[section]:
            return [f"{section}:", *(line for option in options for line in option_lines(option))]
    for option in table.options:
        if topic in (name.lstrip("-") for name in option.names):
            return option_lines(option)
    known = f"topics: {', '.join([*_topics(table), ALL])}; or the name of an option"
    raise UsageError(f"no help about {printable(topic, 40)!r}", known)


def _first(action: Action) -> str:
    return action.name.partition(" ")[0]


def _head(table: OptionTable) -> list[str]:
    about, example, usage = ABOUT[table.command]
    return [about, "", f"  example: {example}", "", "usage: " + usage.replace("\n", "\n       "), ""]


def _actions(actions: Iterable[Action]) -> list[str]:
    return [line for one in actions for line in _in_columns(f"  {one.name} {one.operands}".rstrip(), one.text)]


def _whole_text(table: OptionTable) -> str:
    lines = _head(table)
    if table.command == "gctl":
        lines += ["Actions:", *_actions(ACTIONS.values()), ""]
    if table.command in ("gctl", "gctl update"):
        takes = f"update takes: {', '.join(UPDATES)}"
        lines += [*textwrap.wrap(takes, WIDTH, initial_indent="  ", subsequent_indent="    "), ""]
    for section, options in options_by_section(table).items():
        lines.append(f"{section}:")
        for option in options:
            lines.extend(option_lines(option))
        lines.append("")
    if table.command in AFTER:
        lines += [*textwrap.wrap(AFTER[table.command], WIDTH), ""]
    return "\n".join(lines)


def options_by_section(table: OptionTable) -> dict[str, list[Option]]:
    """The options under the titles of their sections."""
    if table.command == "gctl":
        return sections()
    found: dict[str, list[Option]] = {}
    for option in table.options:
        found.setdefault(option.section, []).append(option)
    return found


def option_lines(option: Option) -> list[str]:
    """An option with its value and its explanation."""
    return _in_columns("  " + ", ".join(option.names) + option_value(option), option.help)


def _in_columns(head: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - _COLUMN)
    if len(head) >= _COLUMN:
        return [head, *(" " * _COLUMN + line for line in lines)]
    return [head.ljust(_COLUMN) + lines[0], *(" " * _COLUMN + line for line in lines[1:])]


# --- completion ----------------------------------------------------------------------------------------


def click_command(table: OptionTable) -> click.Command:
    """The table as a click command, used for completion only and never run."""
    params = [_click_option(f"value{at}", option) for at, option in enumerate(table.options)]
    if table.command == "gctl":
        actions = {word: _click_action(word) for word in WORDS}
        return click.Group(table.command, params=params, commands=actions, add_help_option=False)
    kind: Any = {"type": click.Path()} if table.command in ("gsub", "grun") else {"shell_complete": _job_ids}
    operand = click.Argument(["operand"], nargs=-1, **kind)
    return click.Command(table.command, params=[*params, operand], add_help_option=False)


def _click_option(name: str, option: Option) -> click.Option:
    kind: Any = {"is_flag": not option.metavar}
    if option.completes in _OFFERS:
        kind = {"shell_complete": _OFFERS[option.completes]}
    elif option.metavar and option.completes == "file":
        kind = {"type": click.Path()}
    elif option.metavar and option.completes == "dir":
        kind = {"type": click.Path(file_okay=False)}
    elif option.metavar and option.completes:
        kind = {"type": click.Choice(option.completes.split())}
    return click.Option([name, *option.names], help=option.help, **kind)


def _click_action(word: str) -> click.Command:
    """An action of gctl with the options of all its verbs."""
    of_word = [action for action in ACTIONS.values() if action.name.partition(" ")[0] == word]
    table = OptionTable(word, [*dict.fromkeys(one for action in of_word for one in action.options), *common_options()])
    operand: Any = {}
    if verbs(word):
        operand = {"type": click.Choice(verbs(word))}
    elif of_word[0].operands.strip("[]").startswith("IDS"):
        operand = {"shell_complete": _job_ids}
    elif of_word[0].operands == "FILE":
        operand = {"type": click.Path()}
    params: list[click.Parameter] = [_click_option(f"value{at}", option) for at, option in enumerate(table.options)]
    params.append(click.Argument(["operand"], nargs=-1, **operand))
    return click.Command(word, params=params, help=of_word[0].about, add_help_option=False)


MOST_OFFERED = 200
"""Jobs or names offered at once: more are no help, and slow in every shell."""


def _rows(query: str) -> list[list[Any]]:
    """Rows of the daemon; none without one, or if it does not answer soon: a prompt is not a place for an error."""
    from gpusched.client import connect
    from gpusched.errors import GpuschedError

    try:
        with connect(autostart=False) as client:
            rows: list[list[Any]] = client.call("GET", f"/v1/jobs?{query}", timeout_s=1.0)["rows"]
            return rows
    except (GpuschedError, OSError):
        return []


def _job_ids(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids that begin with the text, or ids of jobs whose name does, newest first."""
    found = []
    newest = "" if incomplete else f"&limit={MOST_OFFERED}"
    for job_id, name in reversed(_rows(f"fields=id,name{newest}")):
        if job_id.startswith(incomplete) or (name.startswith(incomplete) and not incomplete[:1].isdigit()):
            found.append(CompletionItem(job_id, help=printable(name)))
            if len(found) == MOST_OFFERED:
                break
    return found


def _job_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of unfinished jobs; of a list the last one is completed."""
    before, comma, begin = incomplete.rpartition(",")
    names = dict.fromkeys(row[0] for row in _rows("fields=name&fold=1"))
    # A shell would interpret the other characters that a name may have.
    fits = [name for name in names if name.startswith(begin) and name == printable(name) and not _SPECIAL & {*name}]
    return [CompletionItem(f"{before}{comma}{name}") for name in sorted(fits[:MOST_OFFERED])]


_SPECIAL = frozenset(" \t\n,;&|<>()$`\\\"'*?[]{}!#~")


def _templates(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from gpusched.cli.saved_options import LIST, templates

    known = {LIST: "show them all", **{name: f"of the {one.source}" for name, one in templates().items()}}
    return [CompletionItem(name, help=text) for name, text in known.items() if name.startswith(incomplete)]


def _views(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from gpusched.cli.saved_options import saved_views
    from gpusched.errors import GpuschedError

    try:
        known = saved_views()
    except GpuschedError:
        return []
    return [CompletionItem(name, help=printable(text)) for name, text in known.items() if name.startswith(incomplete)]


_OFFERS = {"job-name": _job_names, "job-id": _job_ids, "template": _templates, "view": _views}
"""What only a look at the daemon or at the user's files can offer, by `Option.completes`."""


def _variable(command: str) -> str:
    return f"_{command.upper()}_COMPLETE"


def completion_script(table: OptionTable, shell: str) -> str:
    """Completion code for a shell's start-up file. Raises: UsageError for an unsupported shell."""
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"no completion for {shell!r}", "there are: bash, zsh, fish")
    complete = kind(click_command(table), {}, table.command, _variable(table.command))
    # click checks the version of bash here, which a container may not have.
    return str(complete.source_template % complete.source_vars()) + "\n"


def complete(command: str, instruction: str) -> int:
    """Answer a completion request of a shell."""
    shell, _, _ = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None:
        return 1
    found = kind(click_command(TABLES[command]()), {}, command, _variable(command))
    click.echo(found.complete())
    return 0


def option_value(option: Option) -> str:
    """The option's value as shown in the help."""
    if option.metavar:
        return f" {option.metavar}"
    return "[=MODE]" if option.read is not None else ""
