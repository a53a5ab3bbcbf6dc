"""From the MIG layout that an admin wants for a card to the one that is there. Pure.

set       recorded as `wanted`; from that commit on the card takes no jobs
idle      orders for the layout go out with every reading, until one has the outcome
made      `wanted` becomes `made`, and the card takes jobs again; it is made again when a start finds it missing
given up  the card has its layout from before, and takes jobs again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpusched.model.cluster import GpuProcess, GpuSample
from gpusched.model.job import Run
from gpusched.model.mentions import mention_jobs
from gpusched.model.mig import CardLayout, MigLayout, MigOrder, layout_of
from gpusched.model.units import card_index
from gpusched.model.value import replace


def instances_of(uuid: str, samples: Mapping[str, GpuSample]) -> list[GpuSample]:
    """The MIG instances of a card."""
    return [sample for sample in samples.values() if sample.mig_parent == uuid]


def current_layout(card: GpuSample, samples: Mapping[str, GpuSample]) -> MigLayout:
    if not card.mig_enabled:
        return MigLayout(False)
    return layout_of(sample.mig_profile or "" for sample in instances_of(card.uuid, samples))


def runs_on(node: str, card: GpuSample, samples: Mapping[str, GpuSample], runs: Iterable[Run]) -> list[Run]:
    """Runs that hold a card or a part of it. Args: runs: open ones, and ended ones with GPUs not proven clean."""
    uuids = {card.uuid, *(sample.uuid for sample in instances_of(card.uuid, samples))}
    found = []
    for run in runs:
        shares = [share for part in run.on_each_node if part.node == node for share in part.gpus]
        # An instance that is gone is known by its index alone.
        if any(share.uuid in uuids or card_index(share.index) == card.index for share in shares):
            found.append(run)
    return found


def processes_on(card: GpuSample, samples: Mapping[str, GpuSample]) -> list[GpuProcess] | None:
    """Processes on a card and its instances, one entry each; None if the driver does not list them."""
    found: dict[int, GpuProcess] = {}
    for sample in (card, *instances_of(card.uuid, samples)):
        if sample.processes is None:
            return None
        found.update((process.pid, process) for process in (*sample.processes, *sample.openers))
    return [found[pid] for pid in sorted(found)]


def describe_process(process: GpuProcess) -> str:
    """`process 4242 of eva (python)`."""
    owner = f" of {process.user}" if process.user else ""
    return f"process {process.pid}{owner}" + (f" ({process.name})" if process.name else "")


def why_not_idle(
    node: str, card: GpuSample, samples: Mapping[str, GpuSample], runs: Iterable[Run], names: Mapping[str, str]
) -> str | None:
    """Why the layout of a card cannot be changed now, as a clause; None if it can. Args: names: of the runs' jobs."""
    if card.is_lost or card.error is not None:
        return card.error or "the card is lost"
    held = runs_on(node, card, samples, runs)
    if held:
        ids = sorted({names[run.id] for run in held})
        return f"waits for {mention_jobs(ids, named=len(ids))}"
    processes = processes_on(card, samples)
    if processes is None:
        return "the driver does not list the processes on it"
    return f"waits for {describe_process(processes[0])}, which belongs to no job" if processes else None


def wanting(
    known: CardLayout | None, card: GpuSample, node: str, layout: MigLayout, before: MigLayout, user: str, now: float
) -> CardLayout:
    return CardLayout(
        uuid=card.uuid,
        node=node,
        index=card.index,
        made=None if known is None else known.made,
        wanted=layout,
        before=before,
        number=max(round(now * 1000), 0 if known is None else known.number + 1),
        user=user,
        at=now,
    )


def order_for(layout: CardLayout) -> MigOrder:
    assert layout.wanted is not None
    return MigOrder(layout.number, layout.uuid, layout.wanted, layout.before)


def settled(layout: CardLayout, card: GpuSample) -> CardLayout:
    """The record after a reading: with the outcome of the order if that has it, else as it was."""
    if layout.wanted is None or card.mig is None or card.mig.order != layout.number:
        return layout
    if card.mig.failure is not None:
        return replace(layout, wanted=None, failure=card.mig.failure)
    return replace(layout, wanted=None, made=layout.wanted, failure=None)
