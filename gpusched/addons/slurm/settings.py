"""`[handover]` of the config file; see `model.settings` for how settings are declared. The core's `config` reads it."""

from __future__ import annotations

from typing import Annotated

from gpusched.model.rules import AT_START, WAIT, Folder, Range, Text
from gpusched.model.settings import Settings
from gpusched.model.value import Value


class HandoverSettings(Value):
    """Hand-over of jobs to the site's Slurm; see [hand over to Slurm](../howto/hand-over-to-slurm.md)."""

    commands: Annotated[str | None, Folder(), AT_START] = None
    """Folder of the site's own `sbatch`, `squeue`, `scancel`, `sacct` and `scontrol`, such as `/usr/bin`. Unset: no job
    is handed over."""
    folder: Annotated[str, Text(), AT_START] = ".gpusched/handed-over"
    """Folder in which handed-over jobs record their exit codes, on storage that the cluster's nodes share with this
    machine: absolute, or below the home of the job's owner."""
    poll_interval_s: Annotated[float, Range(0.1, 3600), AT_START] = 7.0
    """Time between two questions to Slurm about all handed-over jobs, in seconds."""
    deadline_s: Annotated[float, Range(1, 3600), AT_START] = 60.0
    """Longest time that one of Slurm's commands may take, in seconds."""
    lost_after_s: Annotated[float, WAIT, AT_START] = 300.0
    """Time after which a job that Slurm no longer knows, and that has recorded no end, counts as lost, in seconds."""


def handover_settings(settings: Settings) -> HandoverSettings:
    """The section of these settings; with defaults where the file has none."""
    found: HandoverSettings = settings.of_add_ons.get("handover") or HandoverSettings()
    return found
