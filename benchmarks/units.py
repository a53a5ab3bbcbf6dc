"""Runs started by systemd beside runs started by the fork server: latency of one, time for many at once.

python -m benchmarks units          as root, where PID 1 is systemd
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks.engine import Starts, bench_engine, end_all, latencies, make_ticket, to_start
from benchmarks.harness import show
from gpusched.engine.launchers import ForkServer, UnitNames, choose
from gpusched.engine.local import LocalEngine
from gpusched.errors import NotReady

BURST = 200


def main(repeats: int = 30, burst: int = BURST) -> None:
    """Print both figures for each launcher."""
    launchers: dict[str, Starts] = {"fork server": ForkServer}
    try:
        choose("systemd", is_system=True)
    except NotReady as error:
        print(f"without units: {error.message}")
    else:
        from gpusched.engine.systemd import UnitLauncher

        launchers["systemd"] = partial(UnitLauncher, names=UnitNames("gpusched-measured", "gpusched-measured.slice"))
    for name, launcher in launchers.items():
        with bench_engine(launcher) as (engine, folder):
            # More than a supervisor of the fork server stays idle: each run has a new one.
            show(f"ticket to first instruction, {name}", latencies(engine, folder, repeats, idle_s=2.5))
            show(f"{burst} x true at once, {name}", [_burst(engine, folder, burst)], "s")


def _burst(engine: LocalEngine, folder: str, burst: int) -> float:
    tickets = [make_ticket(f"{1 + number}.1", folder, "/bin/true") for number in range(burst)]
    began = time.perf_counter()
    engine.reconcile(to_start(tickets))
    end_all(engine, burst)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
