"""The options of gsub that say what happens when a job fails, or does nothing."""

from __future__ import annotations

from gpusched.cli.parse import Option, text


def failing_options(section: str) -> list[Option]:
    """The options, in the section that is named so."""
    return [
        Option(
            "--fallback",
            metavar="LINE",
            read=text("fallback"),
            section=section,
            help="shell line that runs once after the last failure, as a job of its own with the same request",
        ),
        Option(
            "--ignore-idle",
            sets={"ignore_idle": True},
            section=section,
            help="GPUs that do nothing are no reason to warn or to act, see [idle] in the config",
        ),
    ]
