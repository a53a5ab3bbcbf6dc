"""The limits that a run starts under, as far as this machine can enforce them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from gpusched.engine.linux.guard import guarded
from gpusched.model.cluster import Enforcement, GpuSample, Isolation, Processor, is_amd
from gpusched.model.execution import RunLimits
from gpusched.model.job import GpuShare, Request, Run
from gpusched.model.settings import IsolationSettings, Settings
from gpusched.model.snapshot import Placement
from gpusched.model.value import replace
from gpusched.scheduler.isolation import choose_cpus, limits_of


def with_limit(
    request: Request, placement: Placement, samples: Mapping[str, GpuSample], settings: Settings
) -> Placement:
    """The placement to record: on each node, a slice of one GPU starts under MPS if it asks for that or MPS runs there.

    Slices of several GPUs do not: each GPU has its own MPS, and a process can use only one.
    Args: samples: newest ones of all nodes by UUID.
    """
    if request.sm_percent is None and settings.gpu.mps_dir is None:
        return placement
    gpus = placement.gpus
    if request.sm_percent is not None or _has_mps(gpus, samples):
        gpus = tuple(replace(share, limit=Enforcement.MPS) for share in gpus)
    others = tuple(with_limit(request, other, samples, settings) for other in placement.others)
    return replace(placement, gpus=gpus, others=others)


def _has_mps(shares: Sequence[GpuShare], samples: Mapping[str, GpuSample]) -> bool:
    if len(shares) != 1 or shares[0].is_whole or shares[0].vram_mib is None:
        return False
    sample = samples.get(shares[0].uuid)
    return sample is not None and sample.mps is True


PERSONAL = Isolation(
    "fork",
    why_not="a personal daemon sets none",
    why_not_devices="a personal daemon sets none",
)


def isolation(found: Isolation, settings: IsolationSettings) -> dict[str, Any]:
    """Limits that the kernel enforces on runs by kind, for the API; `none` if only booked."""
    why_not = found.why_not
    if why_not is None and not settings.enforce:
        why_not = "switched off by [isolation] enforce"
    limits = why_not is None
    has_memory = limits and (settings.mem or settings.default_mem_mib is not None)
    if why_not is None and settings.pin_cpus and not found.can_pin:
        why_not = "no dedicated processors: its control groups lack cpuset"
    devices = limits and settings.devices and found.why_not_devices is None
    return {
        "launcher": found.launcher,
        "memory": "cgroup" if has_memory else "none",
        "tasks": "cgroup" if limits and settings.tasks else "none",
        "cpus": ("own" if settings.pin_cpus and found.can_pin else "weight") if limits else "none",
        "gpus": "device rule" if devices else "environment",
        "tmp": "own" if limits and settings.private_tmp else "shared",
        "guard": [] if found is PERSONAL else list(guarded(settings.guard_units)),
        "why_not": why_not or (found.why_not_devices if settings.devices else None),
    }


class RunLimiter:
    """Sets the limits of runs as far as this machine can enforce them.

    Args: processors: of this machine. ask: returns the processors that a run of an earlier daemon is confined
    to, by the pid of its first process; empty if it may use any.
    """

    def __init__(
        self,
        found: Isolation = PERSONAL,
        processors: Sequence[Processor] = (),
        ask: Callable[[int], tuple[int, ...]] = lambda pid: (),
    ) -> None:
        self.isolation = found
        self._processors = processors
        self._ask = ask
        self._limits: dict[str, RunLimits] = {}
        self._held: dict[str, tuple[int, ...]] = {}

    def limits_for(
        self,
        run: Run,
        settings: IsolationSettings,
        samples: Mapping[str, GpuSample],
        open_runs: Mapping[str, Run],
    ) -> RunLimits | None:
        """Limits of a run about to start; None when nothing is enforced here.

        A start that could not be recorded is retried under the same id, perhaps elsewhere, so earlier limits of
        this id are dropped.
        """
        self._limits.pop(run.id, None)
        self._held.pop(run.id, None)
        if not self.isolation.is_limited or not settings.enforce:
            return None
        gpus = [samples.get(share.uuid) for share in run.gpus]
        near = {sample.numa for sample in gpus if sample is not None and sample.numa is not None}
        cpus: tuple[int, ...] = ()
        if settings.pin_cpus and self.isolation.can_pin:
            taken = self._taken(one for one in open_runs.values() if run.node in one.nodes)
            cpus = choose_cpus(self._processors, run.cpus, taken, near)
        limits = replace(limits_of(run, settings, gpus, cpus), has_amd=any(map(is_amd, samples)))
        if self.isolation.why_not_devices is not None:
            limits = replace(limits, gpu_minors=None)
        self._limits = {known: one for known, one in self._limits.items() if known in open_runs}
        self._limits[run.id] = limits
        self._held[run.id] = cpus
        return limits

    def known(self, run: str) -> RunLimits | None:
        """Limits of a run as of its last start."""
        return self._limits.get(run)

    def _taken(self, runs: Iterable[Run]) -> Collection[int]:
        """Processors reserved for the other open runs."""
        open_runs = {run.id: run for run in runs}
        self._held = {run: ids for run, ids in self._held.items() if run in open_runs}
        for run in open_runs.values():
            if run.id not in self._held and run.pid is not None:
                self._held[run.id] = self._ask(run.pid)
        return {one for ids in self._held.values() for one in ids}
