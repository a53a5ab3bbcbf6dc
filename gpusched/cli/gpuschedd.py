"""gpuschedd: the daemon in the foreground."""

from __future__ import annotations


def main() -> int:
    """Entry point."""
    from gpusched.daemon.main import main as run

    return run()
