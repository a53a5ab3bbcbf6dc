"""Handlers about MIG: which cards can be divided, how they are, and how they shall be."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.api.asked import RequestBody, RequestQuery
from gpusched.api.requests import respond
from gpusched.api.visibility import Viewer
from gpusched.lifecycle.mig import current_layout, runs_on, why_not_idle
from gpusched.model.cluster import GpuSample
from gpusched.model.commands import SetMigLayout
from gpusched.model.mig import EXAMPLE, CardLayout
from gpusched.model.units import gpu_label
from gpusched.ports.tables import MIG_LAYOUTS


async def cards(viewer: Viewer, _: RequestQuery) -> web.Response:
    """GPUs that can do MIG: their profiles, their layout, and the one that was set by command."""
    scheduler = viewer.service.scheduler
    found = []
    waiting = dict(scheduler.state.rows[MIG_LAYOUTS])
    for node in scheduler.nodes(scheduler.now()):
        reading = None if node.is_unknown else scheduler.cluster[node.name].reading
        samples = {sample.uuid: sample for sample in (reading.gpus if reading is not None else ())}
        for sample in samples.values():
            if sample.mig is not None:
                waiting.pop(sample.uuid, None)
                found.append(_card(viewer, node.name, sample, samples))
    return respond(cards=[*found, *map(_absent, waiting.values())])


def _absent(known: CardLayout) -> dict[str, Any]:
    """A card with a layout by command that cannot be read now, or was taken out."""
    wanted, made = known.wanted, known.made
    return {
        "gpu": f"{known.node}:{gpu_label(known.index)}",
        "node": known.node,
        "index": known.index,
        "uuid": known.uuid,
        "name": "unknown",
        "layout": "unknown",
        "wanted": None if wanted is None else str(wanted),
        "made": None if made is None else str(made),
        "set_by": known.user,
        "set_at": known.at,
        "failure": known.failure,
        "waits": None if wanted is None else f"the card cannot be read; if it is gone: gctl mig forget {known.uuid}",
        "held_by": [],
        "why_not": None,
        "profiles": [],
    }


def _card(viewer: Viewer, node: str, card: GpuSample, samples: dict[str, GpuSample]) -> dict[str, Any]:
    assert card.mig is not None
    state = viewer.service.scheduler.state
    known = state.rows[MIG_LAYOUTS].get(card.uuid)
    runs = (*state.open_runs.values(), *state.releasing.values())
    names = {run.id: state.name_of(run.job_id) for run in runs}
    shown = [state.jobs[run.job_id] for run in runs_on(node, card, samples, runs)]
    is_pending = known is not None and known.wanted is not None
    return {
        "gpu": f"{node}:{gpu_label(card.index)}",
        "node": node,
        "index": card.index,
        "uuid": card.uuid,
        "name": card.name,
        "layout": str(current_layout(card, samples)),
        "wanted": str(known.wanted) if known is not None and known.wanted is not None else None,
        "made": str(known.made) if known is not None and known.made is not None else None,
        "set_by": None if known is None else known.user,
        "set_at": None if known is None else known.at,
        "failure": None if known is None else known.failure,
        "waits": why_not_idle(node, card, samples, runs, names) if is_pending else None,
        "held_by": [{"job": state.name_of(job.id), "user": job.user} for job in shown if viewer.sees(job)],
        "why_not": card.mig.why_not,
        "profiles": [
            {"name": one.name, "memory_mib": one.memory_mib, "slices": one.slices, "most": one.most}
            for one in card.mig.profiles
        ],
    }


class MigBody(RequestBody):
    hint = EXAMPLE
    target: Annotated[str, Meta(min_length=1, title="GPU")]
    layout: Annotated[str, Meta(max_length=500)] | None = None
    dry_run: bool = False


async def change(viewer: Viewer, body: MigBody) -> web.Response:
    """Change a GPU's MIG layout once it is idle; null removes the layout set earlier; for admins."""
    command = SetMigLayout(viewer.caller, body.target, body.layout, body.dry_run)
    return respond(plan=await viewer.service.daemon.ask(command))
