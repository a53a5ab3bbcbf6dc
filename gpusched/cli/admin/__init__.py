"""`gpusched` and its commands: the daemon, the doctor, settings, backups, the installation of the machine."""

from __future__ import annotations


def main() -> int:
    from gpusched.cli.admin.app import main as run  # imports typer, which other importers of the package do not need

    return run()
