"""Limits of a run, and the CPUs it is pinned to. Pure: facts in, limits out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gpusched.model.cluster import GpuSample, Processor
from gpusched.model.execution import RunLimits
from gpusched.model.job import Run
from gpusched.model.settings import IsolationSettings
from gpusched.model.units import format_size_mib, plural

_WEIGHT_PER_CORE = 100
"""Default weight of systemd and the kernel."""
_LEAST_WEIGHT, _MOST_WEIGHT = 10, 10_000


def limits_of(
    run: Run, settings: IsolationSettings, gpus: Iterable[GpuSample | None], cpus: tuple[int, ...] = ()
) -> RunLimits:
    """The limits of a run, from its bookings.

    Args: gpus: its GPUs; if one is unknown, or its device nodes are, no GPU is hidden. cpus: ids chosen for it.
    """
    samples = tuple(gpus)
    known = [sample for sample in samples if sample is not None and sample.minor is not None]
    instances = [sample for sample in known if sample.mig_profile is not None]
    mig = tuple(
        (one.minor or 0, one.mig_gi, one.mig_ci)
        for one in instances
        if one.mig_gi is not None and one.mig_ci is not None
    )
    is_known = len(known) == len(samples) and len(mig) == len(instances)
    weight = round(run.cpus * _WEIGHT_PER_CORE)
    return RunLimits(
        mem_mib=_mem_limit_mib(run, settings),
        swap=settings.swap,
        oom_kills_job=settings.oom_kills == "job",
        tasks=settings.tasks or None,
        cpu_weight=min(max(weight, _LEAST_WEIGHT), _MOST_WEIGHT),
        cpus=cpus,
        gpu_minors=tuple(sorted({one.minor or 0 for one in known})) if settings.devices and is_known else None,
        mig=mig,
        private_tmp=settings.private_tmp,
    )


def _mem_limit_mib(run: Run, settings: IsolationSettings) -> int | None:
    if run.mem_mib:
        return run.mem_mib if settings.mem else None
    return settings.default_mem_mib


def describe(limits: RunLimits) -> str:
    """For the job's event log: `kept to 4G of memory, 16384 tasks, CPUs 0-3, its own GPUs`."""
    parts = []
    if limits.mem_mib is not None:
        parts.append(f"{format_size_mib(limits.mem_mib)} of memory")
    if limits.tasks is not None:
        parts.append(plural(limits.tasks, "task"))
    if limits.cpus:
        parts.append(f"CPUs {as_list(limits.cpus)}")
    if limits.gpu_minors is not None:
        parts.append("the GPUs that it was given" if limits.gpu_minors else "no GPU")
    if limits.private_tmp:
        parts.append("its own /tmp")
    return "kept to " + ", ".join(parts) if parts else "kept to its share of the processors only"


def as_list(ids: Iterable[int]) -> str:
    """Ids in the kernel's list format: `0-3,8`."""
    ranges: list[tuple[int, int]] = []
    for one in sorted(ids):
        if ranges and ranges[-1][1] == one - 1:
            ranges[-1] = ranges[-1][0], one
        else:
            ranges.append((one, one))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def choose_cpus(
    processors: Sequence[Processor], cpus: float, taken: Collection[int], near: Collection[int] = ()
) -> tuple[int, ...]:
    """CPU ids for a run that asks for `cpus` cores; empty for fractions of cores, or if not enough are free.

    Prefers a single NUMA node, one of `near` first, else the one with the least to spare; whole physical cores
    before partial ones, and partially used cores before splitting others.
    """
    wanted = int(cpus)
    free = [one for one in processors if one.id not in taken]
    if wanted < 1 or wanted != cpus or len(free) < wanted:
        return ()
    by_numa: dict[int, list[Processor]] = {}
    for one in free:
        by_numa.setdefault(one.numa, []).append(one)

    def rank(numa: int) -> tuple[bool, bool, int, int]:
        count = len(by_numa[numa])
        # The fullest that holds the whole run; else the emptiest, so that it is split as little as possible.
        return numa not in near, count < wanted, count if count >= wanted else -count, numa

    sizes: dict[int, int] = {}
    for one in processors:
        sizes[one.core] = sizes.get(one.core, 0) + 1
    chosen: list[int] = []
    for numa in sorted(by_numa, key=rank):
        chosen += _of_node(by_numa[numa], wanted - len(chosen), sizes)
        if len(chosen) == wanted:
            break
    return tuple(sorted(chosen))


def _of_node(free: Sequence[Processor], wanted: int, sizes: dict[int, int]) -> list[int]:
    """At most `wanted` of these processors of one NUMA node."""
    cores: dict[int, list[int]] = {}
    for one in free:
        cores.setdefault(one.core, []).append(one.id)
    whole = [ids for core, ids in sorted(cores.items()) if len(ids) == sizes[core]]
    broken = [ids for core, ids in sorted(cores.items()) if len(ids) < sizes[core]]
    chosen: list[int] = []
    for ids in whole:
        if len(chosen) + len(ids) <= wanted:
            chosen += ids
    rest = [one for ids in (*broken, *whole) for one in ids if one not in set(chosen)]
    return chosen + rest[: wanted - len(chosen)]
