"""The options of gsub for work that may have been submitted before: --key, --resubmit."""

from __future__ import annotations

import sys

from gpusched.cli import output
from gpusched.cli.options import choice
from gpusched.cli.parse import Option, text, words_of
from gpusched.errors import UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values


def repeat_options(what: str) -> list[Option]:
    """The options, in the section that is named so."""
    return [
        Option(
            "--key",
            metavar="TEXT",
            read=text("key"),
            section=what,
            help="submitting the same key again, by the same user, returns the job of the first time, ended or not",
        ),
        Option(
            "--key-again",
            metavar="WHEN",
            read=choice("key_again", "never", "failed", "ended"),
            section=what,
            completes="never failed ended",
            help="make another job for the key once the last one has failed (ended, and not COMPLETED) or has "
            "ended in any way; default never",
        ),
        Option(
            "--resubmit",
            metavar="IDS",
            read=words_of("resubmit"),
            section=what,
            help="once more what these jobs ran, ended or not: same script, arguments, environment, folder, requests; "
            "options given here win; -E adds to the environment",
        ),
    ]


def check_resubmission(given: Values, operands: list[str]) -> None:
    """Refuse what says anew what is run. Raises: UsageError."""
    for name in ("wrap", "batch", "export"):
        if name in given:
            raise UsageError(f"--resubmit and --{name} were both given", "give one thing to run; -E adds a variable")
    if operands:
        raise UsageError(f"--resubmit and {printable(operands[0], 40)} were both given", "give one thing to run")
    if not given["resubmit"]:
        raise UsageError("--resubmit names no job", "for example: gsub --resubmit 42   or: gsub --resubmit @")
    if given.get("mem_per_cpu_mib") is not None and given.get("cpus") is None:
        raise UsageError("--mem-per-cpu says nothing here without -c", "say how much memory in all: -m SIZE")


def say_found(answer: dict[str, Any], values: Values) -> None:
    """Tell a person that nothing new was submitted."""
    if not answer.get("existing") or values.get("json") or values.get("quiet"):
        return
    job = answer["job"]
    # The result comes first, also where both go to one terminal.
    sys.stdout.flush()
    output.note(
        "gsub", f"job {job['id']} ({job['state']}) has the key {printable(job['key'])!r}; nothing new was submitted"
    )
    if answer["differs"]:
        output.note("gsub", f"it was submitted with another {', '.join(answer['differs'])}, and keeps that")
