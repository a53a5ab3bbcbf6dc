"""What the executables named as Slurm's commands run: a name that stays, since people keep them through upgrades."""

from __future__ import annotations

import sys

from gpusched import entry_points
from gpusched.errors import NotReady

COMMANDS = (
    *("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct", "srun", "salloc"),
    *("sacctmgr", "sprio", "sshare", "sstat", "sdiag", "sattach"),
)


def main(name: str) -> int:
    """Run one of COMMANDS; where no add-on brings it, say what to type instead. Returns the exit code."""
    try:
        command = entry_points.need(f"slurm.{name}", "slurm", name)
    except NotReady as error:
        sys.stderr.write(f"{name}: error: {error.message}\n{name}: hint: use gsub, gq and gcancel; or {error.hint}\n")
        return error.exit_code
    return int(command.main())
