"""The table of a lab with a history: jobs and runs as the daemon would have recorded them."""

from __future__ import annotations

from pathlib import Path

from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.job import GpuShare, Job, JobEvent, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job, request, run

AT = 1_790_000_000.0
"""When the history begins."""


class Lab:
    """A table at `path`; each `ran` and `waits` adds a job to it."""

    def __init__(self, path: Path, gpus: int = 4) -> None:
        self._store = SqliteStore.open(path)
        self._next_id = 1
        self.sees(AT, *(81920 for _ in range(gpus)))

    def sees(self, at: float, *totals_mib: int) -> None:
        """The daemon has read the GPUs: one of each size."""
        cards = (
            GpuSample(f"GPU-{index}", index, "A100", vram_total_mib=total_mib, vram_used_mib=0)
            for index, total_mib in enumerate(totals_mib)
        )
        self._store.save_gpus("n1", GpuReading(at, "simulated", tuple(cards)))

    def ran(
        self, after_s: float, *runs_s: float, ends: tuple[str, ...] = (), wait_s: float = 0.0, gpus: int = 1, **parts
    ) -> Job:
        """A job that was submitted so long after the beginning; each of its runs in turn, at once after the other.

        Args: ends: the outcome of each run, COMPLETED unless it says so; parts: fields of Job and JobSpec.
        """
        submit_at = AT + after_s
        words = [*ends, *["COMPLETED"] * (len(runs_s) - len(ends))]
        if "spec" not in parts:
            parts = {"queue": "vision", "request": request(gpus=gpus), **parts}
        made = job(self._next_id, submit_at=submit_at, **parts)
        self._next_id += 1
        runs: dict[str, Run] = {}
        at = submit_at + wait_s
        for number, (run_s, word) in enumerate(zip(runs_s, words, strict=True), start=1):
            one = run(
                made,
                number=number,
                state=RunState.ENDED,
                intent_at=at,
                start_at=at,
                end_at=at + run_s,
                outcome=JobState(word),
                reason=ReasonCode.NONE,
                exit_code=0 if word == "COMPLETED" else 1,
                gpus=tuple(GpuShare(f"GPU-{index}", index) for index in range(gpus)),
                stdout_path="/tmp/out",
            )
            runs[one.id] = one
            at += run_s
        state = JobState(words[-1]) if words else JobState.CANCELLED
        ended = replace(made, state=state, end_at=at, run=len(runs_s), start_at=at if runs_s else None)
        self._store.commit(Changes(jobs={ended.id: ended}, runs=runs))
        return ended

    def tell(self, of: Job, after_s: float, kind: str) -> None:
        """A line of a job's story."""
        self._store.commit(Changes(events=[JobEvent(of.id, AT + after_s, kind, "by ann")]))

    def waits(self, after_s: float, **parts) -> Job:
        """A job that waits to this day."""
        made = job(self._next_id, submit_at=AT + after_s, **{"queue": "vision", **parts})
        self._next_id += 1
        self._store.commit(Changes(jobs={made.id: made}))
        return made

    def close(self) -> None:
        """Let go of the file."""
        self._store.close()
