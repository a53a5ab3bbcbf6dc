"""What a job that was preempted waits for again, as far as one can tell from what it held."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.model.cluster import Allocation
from gpusched.model.job import Request
from gpusched.model.snapshot import ClassKey


def key_of(pieces: Sequence[Allocation]) -> ClassKey:
    """The class of a running job, by what it holds on each of its nodes."""
    held = pieces[0]
    share = held.gpus[0] if held.gpus else None
    limit_s = None if held.expected_end_at is None else int(held.expected_end_at - held.start_at)
    request = Request(
        gpus=len(held.gpus),
        gpu_fraction=share.fraction if share else None,
        vram_mib=share.vram_mib if share and share.fraction is None else None,
        cpus=held.cpus,
        mem_mib=held.mem_mib,
        nodes=len(pieces),
        is_exclusive=held.is_exclusive,
        licenses=held.licenses,
        resources=held.resources,
    )
    return ClassKey(
        uid=held.uid,
        account=held.account,
        queue=held.queue,
        nice=0,
        time_limit_s=limit_s,
        request=request,
        user=held.user,
        qos=held.qos,
        reservation=held.reservation,
        is_front=True,
        can_requeue=held.can_requeue,
        can_suspend=held.can_suspend,
    )
