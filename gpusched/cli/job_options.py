"""The options of gsub, which a script's #GSUB and #SBATCH lines may hold too, and those of grun.

Those of the job itself come from its fields, `model.spec`; here are those of the commands.
"""

from __future__ import annotations

from gpusched.cli.common import common_options
from gpusched.cli.parse import Table
from gpusched.model.option import Option, choice, pair, whole, words
from gpusched.model.spec import FAIL, FIELDS, FILES, MANY, RES, SLURM, WHAT, WHEN, WHERE
from gpusched.model.syntax import memory_per_core, only_one
from gpusched.model.units import parse_duration_s

_SECTIONS = (WHAT, RES, WHEN, MANY, WHERE, FAIL, FILES, "Output", SLURM, "Other")
_OUTPUT = "Output"

ONLY_TYPED = frozenset(
    "wrap batch dry_run follow verbose json help version completion key_again resubmit dag resume vars".split()
)
"""What gsub's options set that makes no sense in a #GSUB line or a GSUB_* variable."""
OWN_OF_GRUN = frozenset({"pty", "keep", "lease_s", "attach", "ntasks", "quiet", "verbose"})
"""What the options set that are not gsub's."""


def gsub_table() -> Table:
    """gsub, and what a script's #GSUB and #SBATCH lines may say."""
    return _table("gsub", _own(), [option for field in FIELDS.values() for option in field.options], common_options())


def grun_table() -> Table:
    """grun: of gsub's options those that make sense for a job that somebody sits at, and its own."""
    front = "Foreground"
    own = [
        Option(
            "--pty  run it at a terminal of its own: a shell, an editor, a debugger; ~. on a new line leaves it", front
        ),
        Option("--keep  it goes on when this command is gone, by ~. or a lost connection; default: it is ended", front),
        Option("--attach ID  come back to a job that was kept", front),
        Option(
            "--lease TIME  end it after this long without typing and with hardly any computing, with a warning "
            "before: 30m; none for never; default with GPUs: [interactive] lease_s of the settings, 12 hours "
            "unless changed",
            front,
            _lease,
            key="lease_s",
        ),
        Option("-n --ntasks N  inside a job: start it this many times at once; default 1", front, whole(1, 4096)),
        Option("--quiet  do not say what it waits for", front),
    ]
    names = {name for option in own for name in option.names}
    shared = [option for option in gsub_table().options if option.is_shared and names.isdisjoint(option.names)]
    return Table("grun", [*own, *shared])


def _table(command: str, *groups: list[Option]) -> Table:
    """The options of all groups by section, in it as they come."""
    options = [option for group in groups for option in group]
    return Table(command, sorted(options, key=lambda option: _SECTIONS.index(option.section)))


def _lease(text: str) -> int:
    """A length of time, or a word for none."""
    return 0 if text.strip().lower() in ("0", "none", "unlimited") else parse_duration_s(text)


def _own() -> list[Option]:
    """What gsub does beside handing a job's fields over."""
    return [
        Option("--wrap LINE  run this shell line", WHAT, is_shared=False),
        Option(
            "--batch FILE  one shell line a job; - reads standard input; one transaction, ids printed in order",
            WHAT,
            completes="file",
            is_shared=False,
        ),
        Option(
            "--export LIST  environment to hand over: ALL (default), NONE, or names and KEY=VALUE with commas", WHAT
        ),
        Option("-E --env KEY=VALUE  one more variable; may be repeated", WHAT, pair("KEY=VALUE", "extra_env")),
        Option(
            "--dag FILE  a pipeline: jobs that wait for each other by name, in TOML; checked whole before any is "
            "recorded",
            WHAT,
            completes="file",
            is_shared=False,
        ),
        Option(
            "--var NAME=VALUE  with --dag: a variable of its [vars]; may be repeated",
            WHAT,
            pair("NAME=VALUE", "vars"),
            is_shared=False,
        ),
        Option("--resume PIPELINE  run again what of a pipeline, p42, did not finish COMPLETED", WHAT, is_shared=False),
        Option(
            "--key-again WHEN  make another job for the key once the last one has failed (ended, and not "
            "COMPLETED) or has ended in any way; default never",
            WHAT,
            choice("never", "failed", "ended"),
            is_shared=False,
        ),
        Option(
            "--resubmit IDS  once more what these jobs ran, ended or not: same script, arguments, environment, "
            "folder, requests; options given here win; -E adds to the environment",
            WHAT,
            words,
            is_shared=False,
        ),
        Option(
            "--snapshot  keep the code as it is now, and start every run in that copy: what git tracks or does "
            "not ignore, elsewhere (or with --snapshot=copy) the whole folder; --snapshot=no takes it back",
            WHAT,
            choice("auto", "git", "copy", "no"),
            sets={"snapshot": "auto"},
            is_shared=False,
        ),
        Option("-W --wait  wait and exit with the job's code", _OUTPUT, is_shared=False),
        Option(
            "-f --follow  print the job's output as it comes, then exit with the job's code", _OUTPUT, is_shared=False
        ),
        Option(
            "-v --verbose  list the variables that [submit] env_exclude leaves out of the job's environment", _OUTPUT
        ),
        Option("--parsable  print the id alone", _OUTPUT, key="quiet", is_shared=False),
        Option(
            "--dry-run  submit nothing; say whether it would start now, where, or why not", _OUTPUT, is_shared=False
        ),
        Option("--mem-per-cpu SIZE  host memory for each core", SLURM, memory_per_core),
        Option("-n --ntasks 1  1 is accepted", SLURM, only_one, is_shared=False),
        Option("--ntasks-per-node --tasks-per-node 1  1 is accepted", SLURM, only_one, is_shared=False),
    ]
