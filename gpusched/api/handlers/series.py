"""Handlers about what happened over time: series of cards, queues and runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, field

from gpusched.access import user_name
from gpusched.api.asked import Number, RequestQuery, about
from gpusched.api.requests import give_way, respond
from gpusched.api.visibility import Viewer
from gpusched.errors import NotFound, UsageError
from gpusched.model.job import run_id, split_run_id
from gpusched.model.samples import CARD, QUEUE, SampleKind, SeriesPiece
from gpusched.model.units import gpu_label, printable

_DEFAULT_SPAN_S = 3600.0
_LONGEST_S = 366 * 86400.0
_MOST_POINTS = 2000
_MOST_VALUES = 400_000
"""In one answer, over all series: a heat map of 64 cards has 20,000."""
_MOST_HOLDERS = 500
_PRIVATE_QUEUE_FIELDS = frozenset({"running", "pending", "held"})


_Instant = Annotated[float, Meta(ge=-1e10, le=1e10)]


class SeriesQuery(RequestQuery, forbid_unknown_fields=True):
    cards: Annotated[str | None, about("all (the default), or comma-separated UUIDs, indexes or NODE:INDEX")] = None
    queues: Annotated[
        str | None, about("all, or comma-separated names; the whole cluster is the one without a name")
    ] = None
    job: Annotated[str | None, about("id of a job: its last run, or that of `run`")] = None
    run: Annotated[Number | None, about("number of a run of the job")] = None
    start: Annotated[
        _Instant | None, about("first instant (epoch seconds); a negative one is that long ago. Default: an hour ago")
    ] = field(name="from", default=None)
    to: Annotated[_Instant | None, about("last instant; default: now")] = None
    points: Annotated[int, about("steps at most", ge=1, le=_MOST_POINTS)] = 256
    fields: Annotated[str | None, about("comma-separated names; default all")] = None
    holders: Annotated[bool, about("1: with cards, also the runs that used each; those of hidden jobs have no job")] = (
        False
    )


async def show(viewer: Viewer, query: SeriesQuery) -> web.Response:
    """What cards, queues or one job's runs did over time, in a bounded number of steps; null is unknown."""
    if sum(one is not None for one in (query.cards, query.queues, query.job)) > 1:
        raise UsageError("cards, queues and job exclude each other", "for example: /v1/series?cards=all")
    points = query.points
    kind = CARD if query.queues is None else QUEUE
    names = _names(kind, query.fields)
    if query.job is not None:
        return respond(series=_of_job(viewer, query.job, query.run, points, names))
    now = viewer.service.scheduler.now()
    start_at, end_at = _span(query.start, query.to, now)
    asked = query.cards if query.queues is None else query.queues
    words = "all" if asked is None else asked
    subjects = _queues(viewer, words, start_at, end_at) if kind is QUEUE else _cards(viewer, words)
    if len(subjects) * points * len(names) > _MOST_VALUES:
        raise UsageError(
            f"{len(subjects)} series of {points} points with {len(names)} fields are too many",
            "ask for fewer points or fields: points=128&fields=use",
        )
    found = []
    for subject, labels in subjects:
        piece = viewer.service.daemon.series.piece(kind, subject, start_at, end_at, points, names)
        row = {**labels, **_piece_json(piece)}
        if kind is QUEUE and viewer.is_restricted:
            _hide_counts(row, subject)
        if query.holders and kind is CARD:
            row["holders"] = _holders(viewer, subject, start_at, end_at)
        found.append(row)
        # A year of one card takes some 30 ms.
        await give_way()
    return respond(series=found)


def _piece_json(piece: SeriesPiece) -> dict[str, Any]:
    columns = {
        name: [None if value is None else round(value, 3) for value in column] for name, column in piece.columns.items()
    }
    return {"start_at": piece.start_at, "step_s": piece.step_s, **columns}


def _hide_counts(row: dict[str, Any], subject: str) -> None:
    """Remove what reveals other users' jobs; the cards of the whole cluster are for all."""
    hidden = _PRIVATE_QUEUE_FIELDS if not subject else _PRIVATE_QUEUE_FIELDS | {"gpus_held"}
    for name in hidden & row.keys():
        row[name] = [None] * len(row[name])


def _of_job(viewer: Viewer, word: str, run: int | None, points: int, names: Sequence[str]) -> list[dict[str, Any]]:
    job = viewer.find(viewer.service.job_id(word, viewer.caller))
    number = job.run if run is None else run
    if number > max(1, job.run):
        raise UsageError(f"run is {number}; job {job.shown_id} has runs 1 to {job.run}")
    cards = {sample.uuid: sample for sample in _samples(viewer).values()}
    found = []
    for uuid, piece in viewer.service.daemon.series.curves(run_id(job.id, number), points, names):
        card = cards.get(uuid)
        labels = {"job": job.shown_id, "run": number, "uuid": uuid, "index": None if card is None else card.index}
        found.append({**labels, **_piece_json(piece)})
    return found


def _samples(viewer: Viewer) -> dict[str, Any]:
    scheduler = viewer.service.scheduler
    return {view.uuid: view for node in scheduler.nodes(scheduler.now()) for view in node.gpus}


def _cards(viewer: Viewer, words: str) -> list[tuple[str, dict[str, Any]]]:
    """UUID and labels of the named cards. Raises: NotFound."""
    scheduler = viewer.service.scheduler
    nodes = scheduler.nodes(scheduler.now())
    known: list[tuple[str, dict[str, Any]]] = []
    named: dict[str, int] = {}
    for node in nodes:
        for view in node.gpus:
            label = gpu_label(view.index)
            for name in (view.uuid, f"{node.name}:{label}", *([label] if len(nodes) == 1 else ())):
                named[name] = len(known)
            known.append(
                (view.uuid, {"node": node.name, "index": view.index, "uuid": view.uuid, "name": view.name}),
            )
    if words == "all":
        return known
    for word in words.split(","):
        if word not in named:
            raise NotFound(f"there is no GPU {printable(word, 60)!r}", "list them with: ginfo")
    return [known[named[word]] for word in dict.fromkeys(words.split(","))]


def _queues(viewer: Viewer, words: str, start_at: float, end_at: float) -> list[tuple[str, dict[str, Any]]]:
    kept = viewer.service.daemon.series.subjects(QUEUE, start_at, end_at)
    names = [*kept] if words == "all" else words.split(",")
    for name in names:
        if name and name not in kept and name not in viewer.service.settings.queue:
            raise NotFound(f"there are no samples of a queue {printable(name, 60)!r}", "list queues with: ginfo")
    return [(name, {"queue": name or None}) for name in names]


def _holders(viewer: Viewer, uuid: str, start_at: float, end_at: float) -> list[dict[str, Any]]:
    """Runs that used a card; of hidden ones only when."""
    runs = viewer.service.daemon.series.holders(uuid, start_at, end_at, _MOST_HOLDERS)
    jobs = viewer.find_all({split_run_id(handle)[0] for handle, _, _ in runs})
    rows = []
    for handle, first_at, last_at in runs:
        job_id, number = split_run_id(handle)
        job = jobs.get(job_id)
        rows.append(
            {
                "job": None if job is None else job.shown_id,
                "run": None if job is None else number,
                "user": None if job is None else user_name(job.uid),
                "name": None if job is None else viewer.name_of(job),
                "start_at": first_at,
                "end_at": last_at,
            }
        )
    return rows


def _names(kind: SampleKind, words: str | None) -> tuple[str, ...]:
    if words is None:
        return kind.names
    names = tuple(dict.fromkeys(words.split(",")))
    for name in names:
        if name not in kind.names:
            raise UsageError(f"there is no field {printable(name, 60)!r}", "fields: " + ", ".join(kind.names))
    return names


def _span(start: float | None, end: float | None, now: float) -> tuple[float, float]:
    """First and last instant. Raises: UsageError."""
    end_at = now if end is None else _instant(end, now)
    start_at = end_at - _DEFAULT_SPAN_S if start is None else _instant(start, now)
    if not start_at < end_at:
        raise UsageError("from must be before to", "for example: from=-3600")
    if end_at - start_at > _LONGEST_S:
        raise UsageError("samples are kept for a year", "for example: from=-31536000")
    return start_at, end_at


def _instant(found: float, now: float) -> float:
    return now + found if found < 0 else found
