"""How good the ranges of starts are that the daemon gives: a trace is replayed, and now and then one is asked for.

    python -m gpusched.simulate.ranges kth_sp2.swf.gz --jobs 6000

prints how many starts lay between the ends that the daemon works out (`policy.ahead.estimates`: as usual, and by
limits), and how many in the range that is made of those by what became of earlier ones (`predict.calibrating`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Prediction
from gpusched.policy.ahead.estimates import SLACK_S, forecast_starts
from gpusched.policy.standing import Standing
from gpusched.predict.calibrating import Calibration, Told, calibrate
from gpusched.predict.families import predict
from gpusched.simulate import runner
from gpusched.simulate.cluster import largest, nodes_of, processors
from gpusched.simulate.rules import rules_of
from gpusched.simulate.trace import TraceJob, read_trace


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the ranges."""

    asked: int
    between_ends: float
    """Part that started between the early and the late end, a minute more or less."""
    calibration: Calibration


def measure(
    jobs: Sequence[TraceJob], nodes: Sequence[NodeView], settings: Settings, every: int, cycles: int = 80
) -> Result:
    """Ask for one of so many jobs that have to wait, as it arrives."""
    asked: dict[int, tuple[float, float, float]] = {}
    runs: dict[object, list[float]] = {}
    seen = 0

    def usual(job_id: int) -> Prediction | None:
        job = jobs[job_id - 1]
        return predict(runs.get((job.user or job.queue, job.name, job.procs, job.gpus), ()))

    def watch(now: int, standing: Standing, waits: Sequence[int], ended: Sequence[int]) -> None:
        nonlocal seen
        for number in ended:
            job = jobs[number]
            runs.setdefault((job.user or job.queue, job.name, job.procs, job.gpus), []).append(job.run_s)
        for number in waits:
            seen += 1
            if seen % every == 0:
                found = forecast_starts(standing.snapshot(now), settings, usual, [number + 1], cycles)[number + 1]
                if found.low_at is not None and found.high_at is not None:
                    asked[number] = now, found.low_at, found.high_at

    starts = runner.run(jobs, nodes, settings, watch=watch).start_s
    inside = sum(low - SLACK_S <= starts[number] <= high + SLACK_S for number, (_, low, high) in asked.items())
    told = [Told(made_at, high_at, starts[number]) for number, (made_at, _, high_at) in asked.items()]
    return Result(len(asked), inside / max(1, len(asked)), calibrate(told))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gpusched.simulate.ranges", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("trace", help="a log")
    parser.add_argument("--nodes", help="8x8xA100; default: what the log says")
    parser.add_argument("--policy", default="fcfs+easy")
    parser.add_argument("--jobs", type=int, default=6000, help="so many from the beginning")
    parser.add_argument("--every", type=int, default=5, help="one of so many that have to wait is asked for")
    chosen = parser.parse_args()
    trace = read_trace(Path(chosen.trace))
    nodes = nodes_of(chosen.nodes) if chosen.nodes else processors(trace.procs or 0)
    gpus, procs = largest(nodes)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    found = measure(trace.jobs[: chosen.jobs], nodes, rules_of(chosen.policy).settings(), chosen.every)
    share = found.calibration.share
    sys.stdout.write(
        f"asked {found.asked}; between both ends {found.between_ends:.1%}; "
        f"in the range of four in five {'unknown' if share is None else f'{share:.1%}'} of {found.calibration.judged}\n"
    )


if __name__ == "__main__":
    main()
