"""Executables that people installed with gpusched 0.1 say `from gpusched.cli.slurm.sbatch import main`."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

from gpusched import slurm_entry

for _name in slurm_entry.COMMANDS:
    _module = sys.modules[f"{__name__}.{_name}"] = ModuleType(f"{__name__}.{_name}")
    _module.main = partial(slurm_entry.main, _name)  # type: ignore[attr-defined]
