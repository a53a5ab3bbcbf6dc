"""What processes of no job cost the queue: how many waiting jobs would start now if they were not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusched.model.cluster import GpuView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.extension import NO_EXTENSIONS, Extensions
from gpusched.scheduler.planner import decide

Left = Mapping[str, int]
"""By GPU UUID: memory of no job that would be left there, in MiB."""


def starts_without(
    snapshot: Snapshot, settings: Settings, cases: Sequence[Left], extensions: Extensions = NO_EXTENSIONS
) -> tuple[int, ...]:
    """How many more jobs would start now, for each case by itself. Every case is tried by `decide`."""
    before = len(decide(snapshot, settings, extensions).starts)
    return tuple(max(0, len(decide(_without(snapshot, left), settings, extensions).starts) - before) for left in cases)


def starts_on(
    snapshot: Snapshot, settings: Settings, left: Left, extensions: Extensions = NO_EXTENSIONS
) -> Mapping[str, tuple[int, ...]]:
    """Which jobs would start now beyond those that start anyway, by the GPUs that they would get."""
    before = {start.job_id for start in decide(snapshot, settings, extensions).starts}
    found: dict[str, tuple[int, ...]] = {}
    for start in decide(_without(snapshot, left), settings, extensions).starts:
        if start.job_id in before:
            continue
        for piece in (start.placement, *start.placement.others):
            for share in piece.gpus:
                found[share.uuid] = (*found.get(share.uuid, ()), start.job_id)
    return found


def _closes(gpu: GpuView, left_mib: int) -> bool:
    """Whether so much of no job would still keep whole-card jobs away."""
    return left_mib > gpu.foreign_limit_mib or (gpu.is_foreign_busy and left_mib > 0)


def _without(snapshot: Snapshot, left: Left) -> Snapshot:
    nodes = []
    for node in snapshot.nodes:
        gpus = tuple(
            replace(
                gpu,
                foreign_mib=left[gpu.uuid],
                why_not_whole=gpu.why_not_whole if _closes(gpu, left[gpu.uuid]) else None,
            )
            if gpu.uuid in left
            else gpu
            for gpu in node.gpus
        )
        nodes.append(replace(node, gpus=gpus))
    return replace(snapshot, nodes=tuple(nodes))
