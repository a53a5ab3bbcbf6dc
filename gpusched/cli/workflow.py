"""The options of gsub that tie jobs together: what a job waits for, and whole pipelines."""

from __future__ import annotations

from gpusched.cli.parse import Option, text
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Values


def kill_on_invalid_dep(value: str) -> Values:
    """Slurm's `yes` and `no`."""
    word = value.strip().lower()
    if word not in ("yes", "no"):
        raise ValueError(f"{printable(value, 40)!r} is neither yes nor no")
    return {"never_satisfied": "cancel" if word == "yes" else "wait"}


def variable(value: str) -> Values:
    """`NAME=VALUE` for a pipeline."""
    name, equals, content = value.partition("=")
    if not name or not equals:
        raise ValueError(f"{printable(value, 40)!r} is not NAME=VALUE")
    return {"vars": {name: content}}


def dependency_options(when: str) -> list[Option]:
    """What a job waits for, in the section that is named so."""
    return [
        Option(
            "-d",
            "--dependency",
            metavar="LIST",
            read=text("dependency"),
            section=when,
            help="afterok:41, afterany:41:42, afternotok:41, after:41 (started), after:41+10 (10 minutes later), "
            "singleton (no earlier job of this name is left); join with , (all) or ? (any)",
        ),
        Option(
            "--kill-on-invalid-dep",
            metavar="yes|no",
            read=kill_on_invalid_dep,
            section=when,
            completes="yes no",
            help="end the job when its dependency can never come true, or keep it; default: "
            "[life] never_satisfied of the config",
        ),
    ]


def pipeline_options(what: str) -> list[Option]:
    """Pipelines, in the section that is named so."""
    return [
        Option(
            "--dag",
            metavar="FILE",
            read=text("dag"),
            section=what,
            completes="file",
            help="a pipeline: jobs that wait for each other by name, in TOML; checked whole before any is recorded",
        ),
        Option(
            "--var",
            metavar="NAME=VALUE",
            read=variable,
            section=what,
            help="with --dag: a variable of its [vars]; may be repeated",
        ),
        Option(
            "--resume",
            metavar="PIPELINE",
            read=text("resume"),
            section=what,
            help="run again what of a pipeline, p42, did not finish COMPLETED",
        ),
    ]
