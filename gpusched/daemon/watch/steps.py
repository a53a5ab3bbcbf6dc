"""Open steps whose process, `srun`, is gone without a word: they end, and what they started is killed.

Processes of the daemon's own node are looked at directly. Those of another node its agent looks at for each report, as
long as there are any.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.daemon.state import DaemonState
from gpusched.daemon.tick import Ticker
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.linux import proctree
from gpusched.lifecycle import steps as step_life
from gpusched.model.commands import LoseSteps
from gpusched.model.execution import StepStopOrder
from gpusched.model.job import run_id
from gpusched.model.step import JobStep

_Process = tuple[int, int]
"""Pid and start, in clock ticks since boot."""


class StepWatch:
    """Checks at each poll whether the processes of open steps are alive."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker, self._scheduler = ticker, ticker.scheduler
        self._state: DaemonState | None = None
        self._watched: set[str] = set()
        """Nodes besides the daemon's own that watch processes."""

    def poll(self) -> None:
        """Have the next tick end the steps whose process is gone."""
        state, own = self._scheduler.state, self._scheduler.head.name
        steps = state.steps.all()
        is_first = self._state is None
        if self._state is not state:
            self._state = state
            for step in steps.values():
                if step.cancel_uid is not None:
                    # The order may have been lost with the daemon that recorded the cancel.
                    self._scheduler.engine.order(run_id(step.job_id, step.run), StepStopOrder(step.number))
            self._end_what_lives_on(state)
        by_node: dict[str, dict[_Process, JobStep]] = {}
        for step in steps.values():
            if step.pid is not None:
                by_node.setdefault(step.node, {})[step.pid, step.start_ticks or 0] = step
        here = by_node.pop(own, {})
        gone = [step.id for process, step in here.items() if not proctree.lives(*process)]
        gone += self._gone_elsewhere(by_node)
        if gone:
            self._ticker.submit(LoseSteps(tuple(gone), is_seen=not is_first))

    def _end_what_lives_on(self, state: DaemonState) -> None:
        """Repeat the orders that a node has not heard, perhaps, from the daemon that recorded the ends of its steps."""
        on_several = [run for run in state.open_runs.values() if run.parts]
        for step in self._scheduler.store.steps([run.job_id for run in on_several]):
            handle = run_id(step.job_id, step.run)
            if handle in state.open_runs and not step.is_open and step_life.may_live_on(step):
                self._scheduler.engine.order(handle, StepStopOrder(step.number, 0.0))

    def _gone_elsewhere(self, by_node: dict[str, dict[_Process, JobStep]]) -> Iterable[tuple[int, int, int]]:
        engine = self._scheduler.engine
        if not isinstance(engine, ClusterEngine):
            return
        for node in self._watched - by_node.keys():
            engine.gone(node, ())
        self._watched = set(by_node)
        for node, steps in by_node.items():
            for process in engine.gone(node, steps):
                yield steps[process].id
