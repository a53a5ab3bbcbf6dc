"""`gsub --print`: the submission as an sbatch script or a Kubernetes Job on standard output. Nothing is submitted.

No daemon is asked: what the submission leaves to the defaults of this server is left to those of the target.
"""

from __future__ import annotations

import sys

from gpusched.addons.slurm.handover.losses import SBATCH, check_losses
from gpusched.cli import output
from gpusched.cli.slurm_options import NOTES
from gpusched.cli.submission import say_without_effect
from gpusched.errors import UsageError
from gpusched.model.layout import arrange

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values

_ALONE = ("batch", "dag", "resume", "resubmit", "wait", "follow", "dry_run", "json")
"""Options of gsub that need a job, or say what a job is."""
_NO_IMAGE = "the image of the container is not known: put it in place of IMAGE, or type: --print k8s:IMAGE"
_NO_ENVIRONMENT = "the pod has the environment of its image; name what it needs with -E or --export"


def check_alone(given: Values) -> None:
    """Refuse options that make no sense with --print. Raises: UsageError."""
    for name in _ALONE:
        if name in given:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--print and {option} were both given", "use one of them; --print submits nothing")


def print_job(table: OptionTable, spec: dict[str, Any], values: Values) -> int:
    """Print the job, and what the target cannot say on stderr. Raises: Refused, UsageError.

    Args: spec: fields as gsub sends them, without environment, and with a `work_dir` only if one was named.
    """
    target, _, image = values["print"].partition(":")
    image = image or spec.get("image") or ""
    try:
        if spec.get("array"):
            from gpusched.model.tasks import parse_tasks  # few jobs are arrays

            parse_tasks(spec["array"].partition("%")[0])
        layout = arrange(spec, 1.0)
    except ValueError as error:
        raise UsageError(str(error), "see: gsub --help") from None
    derived = {"nodes": layout.nodes, "ntasks": layout.ntasks, "snapshot": values.get("snapshot", "no") != "no"}
    notes = check_losses(target, {**spec, **derived})
    if target == SBATCH:
        from gpusched.addons.kubernetes.sbatch_script import sbatch_script

        text, kept = sbatch_script(table, spec, values, layout.nodes)
        values = {**values, NOTES: [sentence for sentence in values.get(NOTES, ()) if sentence not in kept]}
    else:
        from gpusched.addons.kubernetes.manifest import manifest
        from gpusched.addons.kubernetes.yaml_text import yaml_text

        text = yaml_text(manifest(spec, values, layout, image))
        if not image:
            notes.append(_NO_IMAGE)
        if "ALL" in str(values.get("export", "ALL")).split(","):
            notes.append(_NO_ENVIRONMENT)
    say_without_effect("gsub", values)
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
    if not values.get("quiet"):
        for note in notes:
            output.note("gsub", f"note: {note}")
    return 0
