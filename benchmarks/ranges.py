"""How good the ranges of starts are that the daemon gives: a trace is replayed, and now and then one is asked for.

    python -m benchmarks.ranges kth_sp2.swf.gz --jobs 6000

prints how many starts lay between the ends that the daemon works out (`scheduler.forecast`: as usual, and by
limits), and how many in the range that is made of those by what became of earlier ones (`predict.calibrating`). In a
log without estimates there are no limits: `--predict similar`, and then only the end as usual is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gpusched.addons.simulate.cluster import largest, nodes_of, processors
from gpusched.addons.simulate.event_loop import play
from gpusched.addons.simulate.planner_run import PlannerRun
from gpusched.addons.simulate.policies import policies_of
from gpusched.addons.simulate.trace import TraceJob, read_trace
from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Prediction
from gpusched.predict.calibration import Calibration, StartEstimate, calibrate
from gpusched.predict.family import predict
from gpusched.scheduler.forecast import MAX_CYCLES, SLACK_S, StartForecast
from gpusched.scheduler.state import PlannerState


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the ranges."""

    asked: int
    unknown: int
    """Those of whom nothing could be told."""
    between_ends: float | None
    """Part that started between the early and the late end, a minute more or less; None where no late end is known."""
    median_error_s: float | None
    """Median distance between the start and the early end; None if nothing could be told."""
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
    body = _Asking(jobs, nodes, settings, every, cycles, predict_by)
    starts = body.outcome(play([job.submit_s for job in jobs], body)).start_s
    asked, unknown = body.asked, body.unknown
    inside = [
        low - SLACK_S <= starts[number] <= high + SLACK_S
        for number, (_, low, high) in asked.items()
        if high is not None
    ]
    told = [
        StartEstimate(made_at, low if high is None else high, starts[number], is_latest=high is not None)
        for number, (made_at, low, high) in asked.items()
    ]
    between = sum(inside) / len(inside) if inside else None
    errors_s = [abs(starts[number] - low) for number, (_, low, _) in asked.items()]
    error_s = median(errors_s) if errors_s else None
    return Result(len(asked) + unknown, unknown, between, error_s, calibrate(told))


class _Asking(PlannerRun):
    """A run of the planner in which a range is worked out now and then."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: Sequence[NodeView],
        settings: Settings,
        every: int,
        cycles: int,
        predict_by: str | None,
    ) -> None:
        super().__init__(jobs, nodes, settings, predict=predict_by)
        self.asked: dict[int, tuple[float, float, float | None]] = {}
        """When each was asked for, and both ends of its range."""
        self.unknown = 0
        self._all, self._settings, self._every, self._cycles = jobs, settings, every, cycles
        self._came: list[int] = []
        self._waited = 0
        self._run_times_s: dict[object, list[float]] = {}

    def end(self, job_id: int) -> None:
        """Learn from a run."""
        super().end(job_id)
        job = self._all[job_id - 1]
        self._run_times_s.setdefault(_family(job), []).append(job.run_s)

    def arrive(self, job: int) -> None:
        """Look at it once the instant has been planned."""
        super().arrive(job)
        self._came.append(job)

    def settle(self, now: float) -> None:
        """Plan, and ask for one of so many of those that came and have to wait."""
        super().settle(now)
        for number in self._came:
            if self.starts[number] >= 0:
                continue
            self._waited += 1
            if self._waited % self._every == 0:
                self._ask(number, now)
        self._came.clear()

    def _ask(self, number: int, now: float) -> None:
        assert isinstance(self.state, PlannerState)  # nobody asks a stand-in for estimates
        snapshot = self.state.snapshot(now)
        found = StartForecast(snapshot, self._settings, self._usual).ranges([number + 1], self._cycles)[number + 1]
        if found.low_at is None:
            self.unknown += 1
        else:
            self.asked[number] = now, found.low_at, found.high_at

    def _usual(self, job_id: int) -> Prediction | None:
        return predict(self._run_times_s.get(_family(self._all[job_id - 1]), ()))


def _family(job: TraceJob) -> object:
    return job.user or job.queue, job.name, job.procs, job.gpus


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranges", description=(__doc__ or "").split("\n")[0])
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
        f"median error {'unknown' if found.median_error_s is None else f'{found.median_error_s:.0f} s'}; "
        f"in the range of four in five {_percent(found.calibration.share)} of {found.calibration.judged}\n"
    )


def _percent(part: float | None) -> str:
    return "unknown" if part is None else f"{part:.1%}"


if __name__ == "__main__":
    main()
