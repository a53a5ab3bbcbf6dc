"""The options that several commands share."""

from __future__ import annotations

from gpusched.model.option import Option, choice, words

STATES = (
    "PENDING RUNNING SUSPENDED COMPLETING COMPLETED FAILED CANCELLED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED "
    "DEADLINE all"
)


def common_options(*skip: str) -> list[Option]:
    """What every command takes, without the long spellings to skip."""
    options = [
        Option("--json  one JSON document with schema_version", "Output", is_shared=False),
        Option("--quiet  bare values only", "Output", is_shared=False),
        Option("-h --help  show this and exit", "Other"),
        Option("--version  show the version and exit", "Other"),
        Option(
            "--completion SHELL  print a completion script for bash, zsh or fish; add it to your shell's start-up file",
            "Other",
            choice("bash", "zsh", "fish"),
        ),
    ]
    return [option for option in options if option.long not in skip]


def selection_options() -> list[Option]:
    """Filters of the commands that take several jobs."""
    return [
        Option("-u --user NAMES  of these users", "Which jobs", words, key="users"),
        Option("-n --name NAMES  with these names", "Which jobs", words, key="names"),
        Option("-q --queue NAMES  in these queues", "Which jobs", words, key="queues"),
    ]


def pager_option() -> Option:
    """Of the commands whose tables may be longer than a screen."""
    return Option(
        "--no-pager  do not use GPUSCHED_PAGER, PAGER or less for tables longer than the terminal", "What to show"
    )
