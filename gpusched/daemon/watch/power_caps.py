"""Power caps of queues: which cards are to be held to which limit, and what became of it.

A run of a capped queue is recorded with the cap before it starts. What is wanted follows from the recorded runs alone,
so a restart of the daemon changes nothing; the node's reader of GPUs brings the cards in line (`gpu.power`), and its
next reading shows the outcome. Only then does the run start: with the cap, or without it and with a note in its story.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import Stage, Told, Watch
from gpusched.model.cluster import GpuSample
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.queue_settings import chain_of
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.states import RunState
from gpusched.model.units import plural_of
from gpusched.model.value import replace

PATIENCE_S = 20.0
"""Time after which a run starts without an answer of the driver."""


def power_cap(job: Job, placement: Placement, samples: Mapping[str, GpuSample], settings: Settings) -> float | None:
    """The cap that a job's run on these cards is to have; None for shared cards and MIG instances.

    Args: samples: of all cards by UUID.
    """
    queues = chain_of(job.spec.queue, settings.queue)
    cap_w = next((queue.power_cap_w for queue in queues if queue.power_cap_w is not None), None)
    shares = [share for place in (placement, *placement.others) for share in place.gpus]
    if cap_w is None or not shares:
        return None
    known = [samples.get(share.uuid) for share in shares]
    is_whole = all(share.is_whole for share in shares)
    return cap_w if is_whole and all(gpu is None or gpu.mig_parent is None for gpu in known) else None


class PowerCaps(Watch):
    """Keeps the cards of all nodes in line with the recorded runs."""

    name = "power caps"
    stage = Stage.BEFORE_COMMANDS

    def __init__(self, cluster: ClusterNodes) -> None:
        self._cluster = cluster
        self._answered: Told[str] = Told()
        """Runs whose outcome is recorded, so that they may start."""
        self._may_be_capped = True
        """Whether runs may have caps although no queue has one now."""

    def is_awaited(self, run: Run) -> bool:
        """Whether a run must not start yet."""
        return run.power_cap_w is not None and run.state is RunState.STARTING and run.id not in self._answered

    def carry_out(self, tx: TickTransaction) -> None:
        """Record the outcome of caps, from the newest readings."""
        if not self._has_caps(tx.settings):
            return
        samples = self._cluster.samples()
        for run in [run for run in tx.state.open_runs.values() if self.is_awaited(run)]:
            gpus = [gpu for share in run.gpus if (gpu := samples.get(share.uuid)) is not None]
            is_answered = has_read_targets(self._cluster, run) and all(map(_is_answered, gpus))
            if not is_answered and abs(tx.now - run.intent_at) < PATIENCE_S:
                continue
            self._answered.note(run.id, tx)
            in_force_w, text = _outcome(run, gpus)
            tx.put(
                tx.state.jobs[run.job_id],
                replace(run, power_cap_w=in_force_w),
                (JobEvent(run.job_id, tx.now, "note", text, run.number),),
            )

    def wanted(self, state: DaemonState, settings: Settings) -> dict[str, dict[str, float]]:
        """Caps of the recorded runs, ended ones until their cards are clean: by node, by UUID."""
        caps: dict[str, dict[str, float]] = {}
        if self._has_caps(settings):
            self._answered.intersection_update(state.open_runs.keys())
            for run in (*state.open_runs.values(), *state.releasing.values()):
                if run.power_cap_w is not None:
                    for part in run.on_each_node:
                        caps.setdefault(part.node, {}).update((share.uuid, run.power_cap_w) for share in part.gpus)
            self._may_be_capped = bool(caps)
        return caps

    def _has_caps(self, settings: Settings) -> bool:
        return self._may_be_capped or any(queue.power_cap_w is not None for queue in settings.queue.values())


def has_read_targets(cluster: ClusterNodes, run: Run) -> bool:
    """Whether the newest readings tell what became of what the run's cards were to be like."""
    return all((node := cluster.get(name)) is not None and node.has_read_targets for name in run.nodes)


def _is_answered(gpu: GpuSample) -> bool:
    return gpu.power_cap_w is not None or gpu.power_cap_refused is not None or gpu.is_lost


def _outcome(run: Run, gpus: list[GpuSample]) -> tuple[float | None, str]:
    """The highest limit in force on the cards of a run, and the sentence for its story."""
    assert run.power_cap_w is not None
    limits_w = [gpu.power_cap_w for gpu in gpus if gpu.power_cap_w is not None]
    refused: dict[str, list[int]] = {}
    for gpu in gpus:
        if gpu.power_cap_w is None:
            refused.setdefault(gpu.power_cap_refused or "no answer from the driver", []).append(gpu.index)
    if len(gpus) < len(run.gpus):
        refused.setdefault("no answer from the driver", []).extend(
            share.index for share in run.gpus if share.uuid not in {gpu.uuid for gpu in gpus}
        )
    if not refused:
        return max(limits_w), f"{_gpus([gpu.index for gpu in gpus])}: power limit {max(limits_w):g} W"
    reasons = "; ".join(f"{_gpus(found)}: {why}" for why, found in refused.items())
    text = f"runs without the queue's power cap of {run.power_cap_w:g} W: {reasons}"
    return (max(limits_w) if limits_w else None), text


def _gpus(indices: list[int]) -> str:
    return f"{plural_of(len(indices), 'GPU')} {', '.join(map(str, sorted(indices)))}"
