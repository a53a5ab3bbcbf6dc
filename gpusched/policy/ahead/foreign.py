"""What processes of no job cost the queue: how many waiting jobs would start now if they were not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.policy.cycle import decide
from gpusched.policy.extension import NO_EXTENSIONS, Extensions

Left = Mapping[str, int]
"""By GPU UUID: memory of no job that would be left there, in MiB."""


def starts_without(
    snapshot: Snapshot, settings: Settings, cases: Sequence[Left], extensions: Extensions = NO_EXTENSIONS
) -> tuple[int, ...]:
    """How many more jobs would start now, for each case by itself. Every case is tried by `decide`."""
    before = len(decide(snapshot, settings, extensions).starts)
    return tuple(
        max(0, len(decide(_without(snapshot, settings, left), settings, extensions).starts) - before) for left in cases
    )


def _without(snapshot: Snapshot, settings: Settings, left: Left) -> Snapshot:
    nodes = []
    for node in snapshot.nodes:
        gpus = tuple(
            replace(
                gpu,
                foreign_mib=left[gpu.uuid],
                why_not_whole=gpu.why_not_whole if left[gpu.uuid] > settings.gpu.foreign_mib else None,
            )
            if gpu.uuid in left
            else gpu
            for gpu in node.gpus
        )
        nodes.append(replace(node, gpus=gpus))
    return replace(snapshot, nodes=tuple(nodes))
