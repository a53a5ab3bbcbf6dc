"""gpuschedd: the daemon in the foreground."""

from __future__ import annotations


def main() -> int:
    from gpusched.daemon.service_manager import ServiceManager

    manager = ServiceManager()
    # Before the imports, which on a busy machine or a slow disk take longer than everything else.
    manager.starting()
    from gpusched.daemon.main import main as run

    return run(manager=manager)
