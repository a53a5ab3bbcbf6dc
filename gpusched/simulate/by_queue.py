"""What became of the jobs of each queue, where runs could fail and make room. All times are seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gpusched.simulate.metrics import spread, width
from gpusched.simulate.outcome import Outcome

_FAILED = frozenset({"failed", "out_of_memory", "timeout", "node_fail"})


@dataclass(frozen=True, slots=True)
class QueueResult:
    """The jobs of one queue under one policy."""

    queue: str
    jobs: int
    wait_s: float
    """Mean, to the first start."""
    wait_p95_s: float
    completion_s: float
    """Mean, from submission to the end of the last run."""
    failed: int
    """Runs that did not end well: by themselves, or at their time limit."""
    preempted: int
    """Runs that were ended to make room."""
    lost_gpu_s: float
    """GPU seconds (core seconds of jobs without GPUs) of those, which were done once more."""


def results(outcome: Outcome) -> list[QueueResult]:
    """By queue, sorted by name."""
    places: dict[str, list[int]] = {}
    for number, job in enumerate(outcome.jobs):
        places.setdefault(job.queue, []).append(number)
    failed: Counter[str] = Counter()
    preempted: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for run in outcome.attempts:
        job = outcome.jobs[run.job]
        failed[job.queue] += run.how in _FAILED
        if run.how == "preempted":
            preempted[job.queue] += 1
            lost[job.queue] += round((width(job) or job.cpus) * (run.end_s - run.start_s))
    made = []
    for queue, numbers in sorted(places.items()):
        waits = spread([outcome.start_s[number] - outcome.jobs[number].submit_s for number in numbers])
        completions = spread([outcome.end_s(number) - outcome.jobs[number].submit_s for number in numbers])
        made.append(
            QueueResult(
                queue,
                len(numbers),
                waits.mean,
                waits.p95,
                completions.mean,
                failed[queue],
                preempted[queue],
                float(lost[queue]),
            )
        )
    return made
