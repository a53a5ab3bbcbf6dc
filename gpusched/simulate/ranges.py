"""How good the ranges of starts are that the daemon gives: a trace is replayed, and now and then one is asked for.

    python -m gpusched.simulate.ranges kth_sp2.swf.gz --jobs 6000

prints how many starts lay between the ends that the daemon works out (`policy.ahead.estimates`: as usual, and by
limits), and how many in the range that is made of those by what became of earlier ones (`predict.calibrating`). In a
log without estimates there are no limits: `--predict similar`, and then only the end as usual is known.
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
from gpusched.policy.ahead.estimates import MAX_CYCLES, SLACK_S, forecast_starts
from gpusched.policy.standing import Standing
from gpusched.predict.calibrating import Calibration, Told, calibrate
from gpusched.predict.families import predict
from gpusched.simulate import planner_run
from gpusched.simulate.cluster import largest, nodes_of, processors
from gpusched.simulate.policies import policies_of
from gpusched.simulate.trace import TraceJob, read_trace


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the ranges."""

    asked: int
    unknown: int
    """Those of whom nothing could be told."""
    between_ends: float | None
    """Part that started between the early and the late end, a minute more or less; None where no late end is known."""
    calibration: Calibration


def measure(
    jobs: Sequence[TraceJob],
    nodes: Sequence[NodeView],
    settings: Settings,
    every: int,
    cycles: int = MAX_CYCLES,
    predict_by: str | None = None,
) -> Result:
    """Ask for one of so many jobs that have to wait, as it arrives. `predict_by`: as `predict` of `planner_run.run`."""
    asked: dict[int, tuple[float, float, float | None]] = {}
    runs: dict[object, list[float]] = {}
    seen = unknown = 0

    def usual(job_id: int) -> Prediction | None:
        job = jobs[job_id - 1]
        return predict(runs.get((job.user or job.queue, job.name, job.procs, job.gpus), ()))

    def watch(now: int, standing: Standing, waits: Sequence[int], ended: Sequence[int]) -> None:
        nonlocal seen, unknown
        for number in ended:
            job = jobs[number]
            runs.setdefault((job.user or job.queue, job.name, job.procs, job.gpus), []).append(job.run_s)
        for number in waits:
            seen += 1
            if seen % every == 0:
                found = forecast_starts(standing.snapshot(now), settings, usual, [number + 1], cycles)[number + 1]
                if found.low_at is None:
                    unknown += 1
                else:
                    asked[number] = now, found.low_at, found.high_at

    starts = planner_run.run(jobs, nodes, settings, predict=predict_by, watch=watch).start_s
    inside = [
        low - SLACK_S <= starts[number] <= high + SLACK_S
        for number, (_, low, high) in asked.items()
        if high is not None
    ]
    told = [
        Told(made_at, low if high is None else high, starts[number], is_latest=high is not None)
        for number, (made_at, low, high) in asked.items()
    ]
    between = sum(inside) / len(inside) if inside else None
    return Result(len(asked) + unknown, unknown, between, calibrate(told))


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
    parser.add_argument("--predict", help="how run times are guessed, and planned with: as gpusched simulate has it")
    chosen = parser.parse_args()
    trace = read_trace(Path(chosen.trace))
    nodes = nodes_of(chosen.nodes) if chosen.nodes else processors(trace.procs or 0)
    gpus, procs = largest(nodes)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    (policy,) = policies_of([chosen.policy], predict=chosen.predict)
    found = measure(trace.jobs[: chosen.jobs], nodes, policy.settings, chosen.every, predict_by=policy.predict)
    sys.stdout.write(
        f"asked {found.asked}, unknown {found.unknown}; between both ends {_percent(found.between_ends)}; "
        f"in the range of four in five {_percent(found.calibration.share)} of {found.calibration.judged}\n"
    )


def _percent(part: float | None) -> str:
    return "unknown" if part is None else f"{part:.1%}"


if __name__ == "__main__":
    main()
