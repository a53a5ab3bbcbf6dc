"""The options that several commands share."""

from __future__ import annotations

from gpusched.cli.parse import Option, words_of
from gpusched.cli.readers import choice

STATES = (
    "PENDING RUNNING SUSPENDED COMPLETING COMPLETED FAILED CANCELLED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED "
    "DEADLINE all"
)


def common_options(*skip: str) -> list[Option]:
    """What every command takes, without the long spellings to skip."""
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


def selection_options() -> list[Option]:
    """Filters of the commands that take several jobs."""
    return [
        Option("-u", "--user", metavar="NAMES", read=words_of("users"), section="Which jobs", help="of these users"),
        Option("-n", "--name", metavar="NAMES", read=words_of("names"), section="Which jobs", help="with these names"),
        Option("-q", "--queue", metavar="NAMES", read=words_of("queues"), section="Which jobs", help="in these queues"),
    ]


def pager_option() -> Option:
    """Of the commands whose tables may be longer than a screen."""
    return Option(
        "--no-pager",
        sets={"no_pager": True},
        section="What to show",
        help="no GPUSCHED_PAGER, PAGER or less for a table that is longer than the terminal",
    )
