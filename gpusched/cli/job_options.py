"""The options of gsub, also valid in a script's #GSUB and #SBATCH lines, of grun, and of gctl update.

Options of the job itself come from its fields in `model.spec`; the commands' own are here.
"""

from __future__ import annotations

from gpusched.cli.parse import OptionTable, common_options, read
from gpusched.cli.slurm_options import parsed_options
from gpusched.model.option import (
    BOX,
    FAIL,
    FILES,
    GPU_VARIANTS,
    LAYOUT,
    MANY,
    RES,
    SLURM,
    WHAT,
    WHEN,
    WHERE,
    Field,
    Option,
    choice,
    pair,
    whole,
    words,
    yes_or_no,
)
from gpusched.model.request import GPU_KEYS
from gpusched.model.spec import FIELDS, UPDATABLE
from gpusched.model.units import parse_duration_s, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


_SECTIONS = ("Foreground", WHAT, RES, LAYOUT, WHEN, MANY, WHERE, FAIL, FILES, BOX, "Output", SLURM, "Other")
_OUTPUT = "Output"

ONLY_TYPED = frozenset(
    "wrap batch dry_run follow json help version completion key_again resubmit dag resume vars print "
    "ignore_image explain".split()
)
"""Values of gsub's options that have no meaning in a #GSUB line or a GSUB_* variable."""
OWN_OF_GRUN = frozenset({"pty", "keep", "lease_s", "attach", "job", "jupyter", "ntasks", "quiet", "verbose"})
"""Values set by options that gsub does not have."""


def gsub_table() -> OptionTable:
    """gsub, and the directives of a script."""
    of_fields = [option for field in FIELDS.values() for option in field.options]
    options = [*_own_of_gsub(), *_own_of_both(), *of_fields, *common_options()]
    taken = {name for option in options for name in option.names}
    return _table("gsub", options, list(parsed_options(taken)))


def grun_table() -> OptionTable:
    """grun: its own options, and those of gsub that apply to interactive jobs."""
    front = _SECTIONS[0]
    own = [
        Option("--pty  give it its own terminal, for a shell, editor or debugger; ~. on a new line detaches", front),
        Option(
            "--jupyter  start JupyterLab and print how to open it on your own computer; words after -- go "
            "to jupyter lab; it ends after --lease without computing, here 2 hours by default",
            front,
        ),
        Option("--keep  keep the job running after ~. or a lost connection; default: it ends", front),
        Option("--attach ID  reattach to a job started with --keep", front, completes="job-id"),
        Option(
            "--job ID  run the command, or without one a shell, in this running job of yours, to see what it does on "
            "its GPUs, for example; it ends with its client or with the job, and ends neither",
            front,
            completes="job-id",
        ),
        Option(
            "--lease TIME  end the job after this long without input or noticeable CPU use, after a warning: 30m; "
            "none for never; default with GPUs: [interactive] lease_s of the settings, initially 12 hours",
            front,
            _lease,
            key="lease_s",
        ),
        Option("-n --ntasks N  inside a job: number of parallel tasks; default 1", front, whole(1, 4096)),
        Option("--quiet  do not report why the job is pending", front),
    ]
    of_fields = [option for field in FIELDS.values() for option in field.options if option.is_shared]
    return _table("grun", [*own, *_own_of_both(), *of_fields, *common_options("--json", "--quiet")])


def _table(command: str, options: list[Option], hidden: Sequence[Option] = ()) -> OptionTable:
    """The options by section, in their given order within each."""
    return OptionTable(command, sorted(options, key=lambda option: _SECTIONS.index(option.section)), hidden)


def _form(text: str) -> str:
    """What --print writes; `k8s` may name the image."""
    form, colon, image = text.partition(":")
    if form not in ("sbatch", "k8s") or (colon and (form != "k8s" or not image)):
        raise ValueError(f"{printable(text, 40)!r} is not one of sbatch, k8s, k8s:IMAGE")
    return text


def _lease(text: str) -> int:
    """A duration, or a word for none."""
    return 0 if text.strip().lower() in ("0", "none", "unlimited") else parse_duration_s(text)


def _own_of_both() -> list[Option]:
    """Options of both gsub and grun that are not derived from the job's fields."""
    return [
        Option(
            "--export LIST  environment to pass on: ALL (default), NONE, or names and KEY=VALUE separated by commas",
            WHAT,
        ),
        Option("-E --env KEY=VALUE  an additional variable; may be repeated", WHAT, pair("KEY=VALUE", "extra_env")),
        Option(
            "-v --verbose  list the variables that [submit] env_exclude removes from the job's environment", _OUTPUT
        ),
    ]


def _own_of_gsub() -> list[Option]:
    """Options of gsub alone that are not derived from the job's fields."""
    return [
        Option("--wrap LINE  run this shell command instead of a script", WHAT),
        Option(
            "--template NAMES  options of these templates of the site or of yours; options beside it take precedence; "
            "list shows all templates",
            WHAT,
            words,
            completes="template",
        ),
        Option(
            "--batch FILE  one job per shell line of this file; - reads standard input; all or none, ids in order",
            WHAT,
            completes="file",
        ),
        Option(
            "--dag FILE  submit a pipeline: jobs with dependencies by name, in TOML; checked as a whole before "
            "anything is recorded",
            WHAT,
            completes="file",
        ),
        Option(
            "--var NAME=VALUE  with --dag: a variable of its [vars]; may be repeated",
            WHAT,
            pair("NAME=VALUE", "vars"),
        ),
        Option("--resume PIPELINE  rerun the steps of a pipeline (p42) that did not complete", WHAT),
        Option(
            "--key-again WHEN  create another job for the key once the last one has failed (ended other than "
            "COMPLETED) or has ended at all; default never",
            WHAT,
            choice("never", "failed", "ended"),
        ),
        Option(
            "--resubmit IDS  submit copies of these jobs, ended or not: same script, arguments, environment, folder, "
            "requests; options given here override; -E adds variables",
            WHAT,
            words,
        ),
        Option(
            "--snapshot  copy the code as it is now and start every run in the copy: files that git tracks or does "
            "not ignore; outside of git, or with --snapshot=copy, the whole folder; --snapshot=no overrides",
            WHAT,
            choice("auto", "git", "copy", "no"),
            sets={"snapshot": "auto"},
        ),
        Option(
            "--ignore-image  with a Kubernetes Job, job.yaml: run its command on this machine, without its image", WHAT
        ),
        Option("-W --wait  wait and exit with the job's code", _OUTPUT),
        Option("-f --follow  print the job's output live, then exit with the job's code", _OUTPUT),
        Option("--parsable  print only the id", _OUTPUT, key="quiet"),
        Option(
            "--dry-run --test-only  do not submit; show whether and where the job would start now, or why not",
            _OUTPUT,
        ),
        Option(
            "--explain  do not submit; list each option of a script's #SBATCH and #GSUB lines, and what becomes of it",
            _OUTPUT,
        ),
        Option(
            "--print FORM  do not submit; print the job for another cluster: sbatch is a script for Slurm, k8s or "
            "k8s:IMAGE a Job for Kubernetes",
            _OUTPUT,
            _form,
            completes="sbatch k8s",
        ),
    ]


UPDATES: dict[str, Field] = {}
"""The fields that `gctl update` changes, by keyword."""
for _field in UPDATABLE.values():
    UPDATES.setdefault(_field.word, _field)


def read_change(word: str, text: str) -> dict[str, Any]:
    """The API changes for `word=text`; an empty text resets the field. Raises: ValueError."""
    field = UPDATES[word]
    if not text:
        return {field.name: None}
    if field.kind == "boolean":
        return {field.name: yes_or_no(text)}
    option = field.options[0] if field.options else None
    found = read(option, text) if option else {field.name: whole(int(field.low or 0), int(field.high or 0))(text)}
    if word == "gpus":
        # Whole cards reset an earlier fraction and vice versa; the type is kept unless given.
        found["gpus"] = 1 if found["gpus"] is None else found["gpus"]
        if others := found.get(GPU_VARIANTS):
            found["variants"] = list(others)
        found = {key: value for key, value in found.items() if key != "gpu_type" or value is not None}
    # The scheduler replaces an amount that was stated in another way.
    return {key: value for key, value in found.items() if key in UPDATABLE and (value is not None or key in GPU_KEYS)}
