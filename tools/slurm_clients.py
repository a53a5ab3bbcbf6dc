"""Try Slurm's commands with the client libraries of `.[slurm-clients]`, in an environment of their own.

    python -m tools.slurm_clients [--venv DIR] [PYTEST OPTION...]      # -k submitit: that library alone

Makes the environment and installs the libraries from PyPI unless DIR has them, and runs `tests/addons/slurm/clients`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
_DEFAULT = ROOT / ".venv-slurm-clients"


def libraries() -> list[str]:
    """The requirements of the extra `slurm-clients`."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(document["project"]["optional-dependencies"]["slurm-clients"])


def main(words: list[str]) -> int:
    """Install and test. Returns the exit code of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tools.slurm_clients", description=__doc__)
    parser.add_argument("--venv", type=Path, default=_DEFAULT, metavar="DIR")
    options, more = parser.parse_known_args(words)
    python = options.venv.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(options.venv, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *libraries()], check=True)
    environment = {**os.environ, "GPUSCHED_SLURM_CLIENTS": str(python)}
    argv = [sys.executable, "-m", "pytest", "-m", "clients", "tests/addons/slurm/clients", *more]
    return subprocess.run(argv, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
