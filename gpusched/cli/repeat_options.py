"""The options of gsub for work that can be repeated: --key, --resubmit, --snapshot."""

from __future__ import annotations

from gpusched.cli.parse import Option, text, words_of
from gpusched.cli.readers import choice


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
        Option(
            "--snapshot",
            sets={"snapshot": "auto"},
            read=choice("snapshot", "auto", "git", "copy", "no"),
            section=what,
            help="keep the code as it is now, and start every run in that copy: what git tracks or does not ignore, "
            "elsewhere (or with --snapshot=copy) the whole folder; --snapshot=no takes it back",
        ),
    ]
