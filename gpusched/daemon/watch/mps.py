"""Runs with a share of a card's SMs: the MPS control daemons that they need, and the fate that they share.

Which control daemons are to run follows from the open runs alone; the reader of a node's GPUs starts and ends them
(`gpu.mps`). A run starts when its own is there, and fails if it cannot be started: without it, nothing would hold the
job to its share.
"""

from __future__ import annotations

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watch.power_caps import PATIENCE_S, has_read_targets
from gpusched.model.cluster import Enforcement
from gpusched.model.job import Job, Run
from gpusched.model.mentions import mention_job
from gpusched.model.settings import Settings
from gpusched.model.states import JobState, RunState
from gpusched.model.units import format_duration
from gpusched.model.value import replace

_SAME_FAULT_S = 15.0
"""Longest time between the ends of runs that one fault of a shared MPS server ended."""
_MOST_ENDS = 100


class MpsRuns:
    """Follows the runs under control daemons that gpusched keeps."""

    def __init__(self, cluster: ClusterNodes) -> None:
        self._cluster = cluster
        self._failed: dict[str, tuple[float, frozenset[str]]] = {}
        """Failed runs under MPS: their ends and the UUIDs of their cards, by handle; the newest."""

    def wanted(self, state: DaemonState, settings: Settings) -> dict[str, dict[str, int]]:
        """Users whose runs need a control daemon: by node, by UUID."""
        found: dict[str, dict[str, int]] = {}
        if settings.gpu.mps_dir is None:
            for run in state.open_runs.values():
                for part in run.on_each_node:
                    for share in part.gpus:
                        if share.limit == Enforcement.MPS:
                            found.setdefault(part.node, {})[share.uuid] = state.jobs[run.job_id].uid
        return found

    def is_awaited(self, run: Run, settings: Settings) -> bool:
        """Whether a run must not start yet."""
        return self._needs_control(run, settings) and not self._is_there(run)

    def refusal(self, run: Run, settings: Settings, now: float) -> str | None:
        """Why a run can never start, as a sentence; None if it can, or must wait."""
        if not self._needs_control(run, settings) or self._is_there(run):
            return None
        samples = self._cluster.samples()
        if has_read_targets(self._cluster, run):
            for share in run.gpus:
                sample = samples.get(share.uuid)
                if sample is not None and sample.mps_trouble is not None:
                    return f"no MPS control daemon for GPU {share.index}: {sample.mps_trouble}"
        if abs(now - run.intent_at) < PATIENCE_S:
            return None
        return f"no MPS control daemon for GPU {run.gpus[0].index} within {format_duration(PATIENCE_S)}"

    def _is_there(self, run: Run) -> bool:
        samples = self._cluster.samples()
        is_served = all((gpu := samples.get(share.uuid)) is not None and gpu.mps for share in run.gpus)
        return is_served and has_read_targets(self._cluster, run)

    @staticmethod
    def _needs_control(run: Run, settings: Settings) -> bool:
        has_limit = any(share.limit == Enforcement.MPS for share in run.gpus)
        return has_limit and run.state is RunState.STARTING and settings.gpu.mps_dir is None

    def judge(self, job: Job, run: Run, tx: TickTransaction) -> Run:
        """Name another run under the same MPS server that failed at about the same time."""
        cards = frozenset(share.uuid for share in run.gpus if share.limit == Enforcement.MPS)
        if not cards or run.outcome is not JobState.FAILED or run.end_at is None:
            return run
        near = [
            (abs(run.end_at - end_at), handle)
            for handle, (end_at, others) in self._failed.items()
            if handle != run.id and others & cards and abs(run.end_at - end_at) <= _SAME_FAULT_S
        ]
        self._failed[run.id] = run.end_at, cards
        for handle in list(self._failed)[:-_MOST_ENDS]:
            del self._failed[handle]
        if not near:
            return run
        other = tx.state.name_of(int(min(near)[1].partition(".")[0]))
        text = f"{mention_job(other)} failed on the same GPU at the same time: under MPS, a fault of one job ends all"
        return replace(run, reason_text=f"{run.reason_text}; {text}" if run.reason_text else text)
