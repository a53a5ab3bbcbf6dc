"""Handlers of predictions: why a job is pending and what would help, and when pending jobs start.

The answers are computed in turn on a separate thread, so that the queue is served meanwhile.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gpusched.api.asked import OneJob
from gpusched.api.handlers.jobs import FilterQuery, filter_of, selected
from gpusched.api.handlers.queues import responses
from gpusched.api.render import (
    accuracy_json,
    alternative_json,
    expected_json,
    likely_range,
    plain,
    prediction_json,
    range_json,
)
from gpusched.api.requests import give_way, in_pieces, respond, respond_list
from gpusched.api.visibility import Viewer
from gpusched.lifecycle.overuse import intruder_text, unbooked_use_text
from gpusched.model.job import Job, Run
from gpusched.model.snapshot import Placement
from gpusched.model.states import JobState
from gpusched.model.units import gpu_label
from gpusched.scheduler.forecast import StartRange
from gpusched.scheduler.priority import class_key


async def why(viewer: Viewer, query: OneJob) -> web.Response:
    """Why a job is pending, with the facts; its place, when it starts, and what would make it start now."""
    service = viewer.service
    scheduler = service.scheduler
    job = viewer.read(query.path_id)
    reason = scheduler.answers.reason_for(job)
    # A running task is not in the queue with its array.
    key = scheduler.state.class_of(job.id) if job.state is JobState.PENDING else None
    is_pending, ranking = job.state is JobState.PENDING, scheduler.planner().state.ranking
    parts = ranking.priority(key or class_key(job), job.queued_at)
    text = reason.text if reason else job.reason_text
    facts = service.facts_of([job])(job)
    found = facts.findings
    about_gpus = [found.idle, found.vram_over, *map(unbooked_use_text, found.unbooked)]
    about_gpus += [intruder_text(one, service.scheduler.answers.name_of_run) for one in found.intruders]
    if facts.run is not None and facts.run.is_filler:
        spent = f"as a filler, since the budget of account {job.spec.account} was spent when it started"
        about_gpus.insert(0, f"{spent}: any job within its budget may preempt it")
    if job.state is JobState.RUNNING and any(about_gpus):
        text = "; ".join(["runs", *filter(None, about_gpus)])
    shares = found.shares.items() if job.state is JobState.RUNNING and facts.run else ()
    named = _named_gpus(facts.run) if shares and facts.run else {}
    limits = {named[uuid]: share.enforcement for uuid, share in shares}
    document: dict[str, Any] = {
        "id": job.shown_id,
        "state": job.state.value,
        "reason": str(reason.code) if reason else (job.reason and str(job.reason)),
        "text": text or f"is {job.state}",
        "is_explained": bool(text),
        "facts": viewer.facts(plain(reason.facts)) if reason else {"vram_limit": limits} if limits else {},
        "priority": {"total": parts.total, **dict(parts.parts)} if is_pending else None,
        "order": ranking.order_of(job.spec.queue) if is_pending else None,
        "response": responses(scheduler)(job) if is_pending and viewer.sees_all_of(job) else None,
        "position": scheduler.answers.position(job) if key is not None else None,
    }
    document.update(await _ahead_of(viewer, job))
    if viewer.is_restricted:
        # The answer must not reveal how many other users' jobs wait.
        document.update(place=None, of=None)
    return respond(why=document)


def _named_gpus(run: Run) -> dict[str, str]:
    """What to call the GPUs of a run, by UUID: `GPU 0`, and `GPU 0 on n2` where it has several nodes."""
    return {
        share.uuid: f"GPU {gpu_label(share.index)}" + (f" on {part.node}" if run.parts else "")
        for part in run.on_each_node
        for share in part.gpus
    }


async def limit(viewer: Viewer, query: OneJob) -> web.Response:
    """How long jobs like a pending one ran, and when it would start with a time limit; null if none would help."""
    job = viewer.read(query.path_id)
    question = viewer.service.daemon.limit_hint(job) if viewer.sees_all_of(job) else None
    found = None if question is None else await viewer.service.work_out(question, viewer.caller)
    return respond(hint=None if found is None else plain(found))


async def _ahead_of(viewer: Viewer, job: Job) -> dict[str, Any]:
    """Predictions for a job; empty unless it is pending."""
    nothing: dict[str, Any] = {"place": None, "of": None, "start": None, "alternatives": []}
    nothing |= {"accuracy": None, "predictions": None, "expected": None, "leanings": [], "burst": None}
    nothing |= {"preemption": None}
    if job.state is not JobState.PENDING:
        return nothing
    service, daemon, scheduler = viewer.service, viewer.service.daemon, viewer.service.scheduler
    found = await service.work_out(daemon.outlook(job), viewer.caller)
    place, alternatives = found.place, found.alternatives
    is_whole = viewer.sees_all_of(job)
    if not is_whole:
        # Run times of similar jobs are private to their owners.
        alternatives = tuple(one for one in alternatives if "time_limit_s" not in one.change)
    measure, calibration = scheduler.history.measure(job.user if is_whole else None), scheduler.estimates.calibration()
    return {
        "place": place and place[0],
        "of": place and place[1],
        "start": range_json(found.start, calibration, service.scheduler.now()),
        "alternatives": [alternative_json(one) for one in alternatives],
        "accuracy": accuracy_json(scheduler.estimates.accuracy(), calibration),
        "predictions": prediction_json(measure, service.scheduler.settings),
        "expected": expected_json(job, daemon, is_whole=is_whole),
        # What earlier runs did is private to their owners.
        "leanings": [plain(one) for one in daemon.leanings(job)] if is_whole else [],
        # What it asks for is, too.
        "burst": daemon.burst(job) if is_whole else None,
        "preemption": None if viewer.is_restricted else daemon.why_it_preempts_nothing(job),
        **_as_of(found.as_of),
    }


async def starts(viewer: Viewer, query: FilterQuery) -> web.Response:
    """Earliest and latest start of pending jobs; null is unknown."""
    service = viewer.service
    scheduler = service.scheduler
    jobs = [job for job in selected(viewer, filter_of(viewer, query)) if job.state is JobState.PENDING]
    kept = {one.job_id: one.placement for one in scheduler.plan.reservations}
    reason_of = scheduler.answers.reasons(viewer.audience.knows)
    question = service.daemon.starts(jobs if query.ids else ())
    if not query.ids:
        async for piece in in_pieces(jobs):
            question.add(piece)
    ranges = await service.work_out(question.look, viewer.caller)
    calibration, now = scheduler.estimates.calibration(), scheduler.now()
    in_order: list[tuple[bool, float, float, int, Job]] = []
    async for piece in in_pieces(jobs):
        in_order += [(*_soonest(ranges[job.id]), job.id, job) for job in piece]
    in_order.sort()
    jobs = [job for *_, job in in_order]
    await give_way()

    def row(job: Job) -> dict[str, Any]:
        found, reason, place = ranges[job.id], reason_of(job), kept.get(question.ids[job.id])
        likely = likely_range(found, calibration, now)
        return {
            "id": job.shown_id,
            "name": viewer.name_of(job),
            "user": job.user,
            "state": job.state.value,
            "start_low_at": found.low_at,
            "start_high_at": found.high_at,
            "likely_low_at": likely[0],
            "likely_high_at": likely[1],
            "nodes": _nodes(place),
            "reason": None if reason is None else str(reason.code),
            "reason_text": reason.text if reason is not None and viewer.sees_all_of(job) else None,
        }

    after: dict[str, Any] = {
        "accuracy": accuracy_json(scheduler.estimates.accuracy(), calibration),
        "predictions": prediction_json(scheduler.history.measure(), scheduler.settings),
    }
    after |= _as_of(question.as_of)
    if question.new:
        after["not_yet"] = [job.shown_id for job in jobs if job.id in question.new]
    return await respond_list("starts", map(row, jobs), {}, after)


def _as_of(at: float | None) -> dict[str, float]:
    """The instant at which the starts were computed, if it is not now."""
    return {} if at is None else {"as_of": at}


def _soonest(found: StartRange) -> tuple[bool, float, float]:
    return found.is_unknown, found.low_at or 0.0, float("inf") if found.high_at is None else found.high_at


def _nodes(place: Placement | None) -> list[str]:
    return [] if place is None else [piece.node for piece in (place, *place.others)]
