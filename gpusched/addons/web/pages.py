"""The pages: what each asks the daemon, and the values that its template shows."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from gpusched.addons.board.query import VIEWS, BoardCopy, parse_filter
from gpusched.addons.web import drawing
from gpusched.addons.web.app import Viewing
from gpusched.addons.web.drawing import LANE, MOST_LANES, GanttChart, plot
from gpusched.addons.web.heat_map import LINE, heat_map, legend, unknown
from gpusched.addons.web.task_grid import EVERY_STATE, TASK_FIELDS, asked_ids, task_grid
from gpusched.addons.web.text import first_ids, job_of_row
from gpusched.errors import GpuschedError, NotFound, NotReady, SignedOut, UsageError
from gpusched.model.states import FINAL_STATES
from gpusched.model.tasks import state_of_all
from gpusched.model.units import format_duration, is_digits

ROWS = 200
"""Of one page of the queue."""
OWN_ROWS = 20
MOST_PLANNED = 60
"""Rows of pending jobs in the timeline."""
MOST_BRIEF = 300
"""Ended jobs whose short runs are in the timeline."""
LEAST_HELD_S = 60.0
"""Runs from this length on are among the holders of cards."""
_SPANS = {"1h": 3600, "6h": 6 * 3600, "1d": 86400, "7d": 7 * 86400, "30d": 30 * 86400, "1y": 365 * 86400}
_POINTS = 320
HEAT_POINTS = 288
"""Of each card, five minutes of a day."""
_HEAT_WIDTH = 1100
MOST_PLOTS = 16
"""Cards with their own curve beside the picture of all."""
_MOST_PAGES = 10_000
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}:[0-9]{1,4}(?:\.[0-9]{1,3})?")
_JOB = re.compile(r"[0-9]{1,18}(?:_[0-9]{1,18})?")
_MOST_FILES = 100
"""Of a run of many ranks, or runs of a job, as links."""
_MONTH = re.compile(r"[12][0-9]{3}-(?:0[1-9]|1[0-2])")
_ENDED = ",".join(sorted(state.value for state in FINAL_STATES))
_CAN_END = frozenset({"PENDING", "RUNNING", "SUSPENDED"})


async def _board(viewing: Viewing, **query: Any) -> BoardCopy:
    copy = BoardCopy()
    copy.apply(await viewing.get("/v1/board", **query))
    return copy


def _head(board: BoardCopy, now: float) -> dict[str, Any]:
    return {
        "now": now,
        "daemon": board.parts["daemon"],
        "notices": board.parts["notices"],
        "me": board.parts["me"],
        "totals": board.parts["totals"],
        "nodes": list(board.lists["nodes"].values()),
        "cards": list(board.lists["cards"].values()),
        "rows": board.rows(),
        "total": board.facts["rows"]["total"],
    }


async def overview(viewing: Viewing) -> web.Response:
    """GET /"""
    board = await _board(viewing, filter="user:me", limit=OWN_ROWS, fold_alike=1)
    found = _head(board, time.time())
    waiting = [row for row in found["rows"] if row.get("place") is not None]
    return await viewing.page("overview.html", first=min(waiting, key=lambda row: row["place"], default=None), **found)


async def queue(viewing: Viewing) -> web.Response:
    """GET /queue"""
    query = viewing.request.query
    text, view = query.get("q", "").strip(), query.get("view", "active")
    page = int(query["page"]) if query.get("page", "").isdigit() and len(query["page"]) < 6 else 1
    if view not in VIEWS[:2]:
        raise UsageError("there is no such list", "the lists are those of active and of ended jobs")
    problem = None
    try:
        parse_filter(text)
    except ValueError as error:
        # Shown beside the field, with the whole queue below.
        problem = str(error)
    page = min(max(1, page), _MOST_PAGES)
    wanted = "" if problem else text
    unfold = query.get("unfold", "")
    if not (is_digits(unfold) and len(unfold) < 10):
        unfold = ""
    part = {"offset": (page - 1) * ROWS, "limit": ROWS, "fold_alike": 1, "unfold": unfold}
    board = await _board(viewing, view=view, filter=wanted, **part)
    found = _head(board, time.time())
    pages = max(1, -(-found["total"] // ROWS))

    def link(number: int, **other: str) -> str:
        parts = {"q": text, "view": view, "page": str(number), **other}
        return "/queue?" + urlencode({name: word for name, word in parts.items() if word})

    return await viewing.page(
        "queue.html",
        q=text,
        view=view,
        problem=problem,
        page=page,
        pages=pages,
        before=link(page - 1) if page > 1 else None,
        after=link(page + 1) if page < pages else None,
        unfold=link(page) + "&unfold=",
        **found,
    )


# --- one job --------------------------------------------------------------------------------------


async def job(viewing: Viewing) -> web.Response:
    """GET /jobs/{id}"""
    shown_id = viewing.request.match_info["id"]
    if _JOB.fullmatch(shown_id) is None:
        raise NotFound("there is no such job", "go to the queue")
    found = (await viewing.get(f"/v1/jobs/{shown_id}"))["job"]
    is_whole = found["spec"] is not None
    wanted = viewing.request.query.get("run", "")
    numbers = [run["run"] for run in found["runs"]]
    number = int(wanted) if wanted.isdigit() and len(wanted) < 6 else (numbers[-1] if numbers else 0)
    if wanted and number not in numbers:
        raise NotFound(f"job {shown_id} has no such run", "its runs are listed on its page")

    async def part(path: str, **query: Any) -> dict[str, Any] | None:
        try:
            return await viewing.get(path, **query)
        except (SignedOut, NotReady):
            raise
        except GpuschedError as error:
            # One part that is missing does not cost the page.
            return {"problem": error.message}

    async def nothing() -> None:
        return None

    is_pending = found["state"] == "PENDING"
    ids, left_out = asked_ids(shown_id, found["array_tasks"]) if found["tasks"] is not None else ("", 0)
    why, tail, series, tasks = await asyncio.gather(
        part(f"/v1/jobs/{shown_id}/why") if is_whole and is_pending else nothing(),
        part(f"/v1/jobs/{shown_id}/tail", run=number, lines=200) if is_whole and number else nothing(),
        part("/v1/series", job=shown_id, run=number, points=_POINTS) if number else nothing(),
        part("/v1/history", ids=ids, states=EVERY_STATE, fields=TASK_FIELDS) if ids else nothing(),
    )
    array = None if tasks is None or "problem" in tasks else task_grid(tasks["fields"], tasks["rows"], left_out)
    many = (series or {}).get("series", [])
    # How large whole cards are: running ones do not say.
    cards = (await _board(viewing, limit=1)).lists["cards"] if many else {}
    return await viewing.page(
        "job.html",
        now=time.time(),
        job=found,
        array=array,
        shown_state=state_of_all(found["tasks"] or {}) or found["state"],
        is_whole=is_whole,
        number=number,
        why=(why or {}).get("why"),
        tail=tail,
        curves=[_curves(one, found, number, cards.get(one["uuid"], {})) for one in many],
        can_cancel=found["state"] in _CAN_END,
        can_hold=is_pending and found["hold"] is None,
        can_release=is_pending and found["hold"] is not None,
    )


async def log(viewing: Viewing) -> web.Response:
    """GET /jobs/{id}/log"""
    shown_id, query = viewing.request.match_info["id"], viewing.request.query
    if _JOB.fullmatch(shown_id) is None:
        raise NotFound("there is no such job", "go to the queue")
    words = {name: query[name] for name in ("run", "file", "err", "page") if query.get(name)}
    if wrong := [name for name, word in words.items() if not (is_digits(word) and len(word) < 10)]:
        raise UsageError(f"{wrong[0]} is not a number", f"for example: /jobs/{shown_id}/log?run=1&page=1")
    found, shown = await asyncio.gather(
        viewing.get(f"/v1/jobs/{shown_id}/log", **words), viewing.get(f"/v1/jobs/{shown_id}")
    )
    job = shown["job"]

    def link(**other: int | None) -> str:
        """This page with other parameters; None leaves one out."""
        kept = {**words, "run": found["run"], **other}
        return f"/jobs/{shown_id}/log?" + urlencode({name: word for name, word in kept.items() if word is not None})

    number, pages, is_error = found["page"], found["pages"], words.get("err") == "1"
    is_open = any(run["run"] == found["run"] and run["end_at"] is None for run in job["runs"])
    return await viewing.page(
        "log.html",
        job=job,
        log=found,
        at_end="page" not in words,
        follows=is_open and "page" not in words,
        choices={
            "Run": [
                (f"run {run['run']}", link(run=run["run"], file=None, page=None), run["run"] == found["run"])
                for run in job["runs"][-_MOST_FILES:]
            ],
            "Stream": [
                ("output", link(err=None, file=None, page=None), not is_error),
                ("errors", link(err=1, file=None, page=None), is_error),
            ][: 2 if found["has_other"] else 0],
            "File": [
                (label, link(file=place, page=None), place == int(words.get("file", "0")))
                for place, label in enumerate(found["files"][:_MOST_FILES])
            ],
        }.items(),
        first=link(page=1) if number > 1 else None,
        before=link(page=number - 1) if number > 1 else None,
        after=link(page=number + 1) if number < pages else None,
        last=link(page=None) if number < pages or "page" in words else None,
    )


def _curves(series: Mapping[str, Any], job: Mapping[str, Any], number: int, card: Mapping[str, Any]) -> dict[str, Any]:
    """Plots of one card of a run, with booking and power cap as limits. Args: card: empty for one that is gone."""
    run: Mapping[str, Any] = next((one for one in job["runs"] if one["run"] == number), {})
    share: Mapping[str, Any] = next((gpu for gpu in run.get("gpus", []) if gpu["uuid"] == series["uuid"]), {})
    measured: Mapping[str, Any] = next(
        (one for one in (run.get("measured") or {}).get("cards", []) if one.get("uuid") == series["uuid"]), {}
    )
    label = series["uuid"] if not share else f"{share['node']}:{share['index']}"
    vram_mib = share.get("vram_mib") or measured.get("vram_mib") or (card.get("vram_total_mib") if share else None)
    limits = {"vram_mib": vram_mib, "power_w": run.get("power_cap_w") or measured.get("power_limit_w")}
    return {"label": label, "plots": _plots(series, limits)}


def _plots(series: Mapping[str, Any], limits: Mapping[str, float | None]) -> list[drawing.Plot]:
    def scaled(name: str, factor: float) -> list[float | None]:
        return [None if value is None else value * factor for value in series.get(name, [])]

    vram = limits.get("vram_mib")
    start_at, step_s = series["start_at"], series["step_s"]
    made = (
        plot("GPU use", scaled("use", 100), start_at, step_s, unit="%", limit=100),
        plot("GPU memory", scaled("vram_mib", 1 / 1024), start_at, step_s, unit="GiB", limit=vram and vram / 1024),
        plot("Power", scaled("power_w", 1), start_at, step_s, unit="W", limit=limits.get("power_w")),
        plot("Temperature", scaled("temperature_c", 1), start_at, step_s, unit="\N{DEGREE SIGN}C"),
    )
    return [one for one in made if one is not None]


# --- cards ----------------------------------------------------------------------------------------


def _span(viewing: Viewing, default: str) -> str:
    word = viewing.request.query.get("span", default)
    if word not in _SPANS:
        raise UsageError("there is no such span", "spans: " + ", ".join(_SPANS))
    return word


async def cards(viewing: Viewing) -> web.Response:
    """GET /cards"""
    span = _span(viewing, "1d")
    query = {"cards": "all", "from": -_SPANS[span], "points": HEAT_POINTS, "fields": "use"}
    board, series = await asyncio.gather(_board(viewing, limit=1), viewing.get("/v1/series", **query))
    by_card = {one["uuid"]: one for one in series["series"]}
    found = _head(board, time.time())
    many = found.pop("cards")
    has_plots = len(many) <= MOST_PLOTS
    drawn = by_card if has_plots else {}
    shown = [{**card, "use": _use_of(drawn[card["id"]]) if card["id"] in drawn else None} for card in many]
    return await viewing.page(
        "cards.html",
        span=span,
        spans=list(_SPANS),
        cards=shown,
        has_plots=has_plots,
        heat=_heat(many, by_card),
        **found,
    )


def _heat(cards: list[dict[str, Any]], by_card: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The picture of all cards; None if nothing is known of any."""
    series = [by_card.get(card["id"]) for card in cards]
    known = [one for one in series if one is not None and any(value is not None for value in one["use"])]
    if not known:
        return None
    length = max(len(one["use"]) for one in known)
    start_at, step_s = known[0]["start_at"], known[0]["step_s"]
    cell_width = max(1, _HEAT_WIDTH // length)
    width, height = cell_width * length, LINE * len(cards)
    labels = [f"{card['node']}:{card['label']}" for card in cards]
    return {
        "picture": heat_map([[None] * length if one is None else one["use"] for one in series], cell_width),
        "left": 16 + 7 * min(18, max(map(len, labels))),
        "step_s": step_s,
        "legend": legend(),
        "unknown": unknown(),
        "width": width,
        "height": height,
        "line": LINE,
        "ticks": drawing.ticks(start_at, start_at + step_s * length, width),
        "start_at": start_at,
        "end_at": start_at + step_s * length,
    }


def _use_of(series: Mapping[str, Any]) -> drawing.Plot | None:
    values = [None if value is None else 100 * value for value in series["use"]]
    return plot("GPU use", values, series["start_at"], series["step_s"], unit="%", limit=100)


async def card(viewing: Viewing) -> web.Response:
    """GET /cards/{label}"""
    label, span = viewing.request.match_info["label"], _span(viewing, "1d")
    if _LABEL.fullmatch(label) is None:
        raise NotFound("there is no such card", "go to the cards")
    query = {"cards": label, "from": -_SPANS[span], "points": _POINTS, "holders": "1"}
    board, series = await asyncio.gather(_board(viewing, limit=1), viewing.get("/v1/series", **query))
    (one,) = series["series"]
    found = _head(board, time.time())
    now = next((row for row in found.pop("cards") if row["id"] == one["uuid"]), None)
    limits = {"vram_mib": None if now is None else now["vram_total_mib"]}
    return await viewing.page(
        "card.html",
        label=label,
        card=now,
        span=span,
        spans=list(_SPANS),
        series=one,
        plots_made=_plots(one, limits),
        **found,
    )


# --- timeline -------------------------------------------------------------------------------------


async def timeline(viewing: Viewing) -> web.Response:
    """GET /timeline"""
    back, ahead = _hours(viewing, "from", "-6h"), _hours(viewing, "to", "24h")
    now = time.time()
    past = {"cards": "all", "from": -abs(back), "points": 1, "fields": "use", "holders": "1"}
    brief = {"since": now - abs(back), "limit": MOST_BRIEF, "states": _ENDED, "fields": "id,name,user,runs"}
    board, series, booked, starts, ended = await asyncio.gather(
        _board(viewing, filter="st:R,S,CG", limit=500),
        viewing.get("/v1/series", **past),
        viewing.get("/v1/reservations"),
        _board(viewing, filter="st:PD", limit=MOST_PLANNED, fold_alike=1),
        viewing.get("/v1/history", **brief),
    )
    found = _head(board, now)
    chart = GanttChart(now - abs(back), now + abs(ahead), now)
    holders = {one["uuid"]: one.get("holders", []) for one in series["series"]}
    brief_runs = _brief_runs(ended["rows"])
    for one in found["cards"][:MOST_LANES]:
        y = _card_lane(chart, one, holders.get(one["id"], []), found["rows"], booked["reservations"])
        for start_at, end_at, title, job_id in brief_runs.get(one["id"], ()):
            chart.add(drawing.PAST, y, start_at, end_at, "", title, job_id)
    for row in starts.rows():
        _planned_lane(chart, row, now)
    return await viewing.page(
        "timeline.html",
        chart=chart,
        lane_height=LANE,
        back=viewing.request.query.get("from", "-6h"),
        ahead=viewing.request.query.get("to", "24h"),
        pending=starts.facts["rows"]["total"],
        **found,
    )


def _hours(viewing: Viewing, name: str, default: str) -> float:
    found = re.fullmatch(r"-?(\d{1,3})(h|d)", viewing.request.query.get(name, default))
    seconds = 0 if found is None else int(found[1]) * (3600 if found[2] == "h" else 86400)
    if not 3600 <= seconds <= 366 * 86400:
        raise UsageError(f"{name} is not a span of time", "for example: /timeline?from=-6h&to=24h")
    return float(seconds)


def _brief_runs(rows: list[list[Any]]) -> dict[str, list[tuple[float, float, str, str]]]:
    """Ended runs of less than a minute, which are not among the holders of a card, by card."""
    found: dict[str, list[tuple[float, float, str, str]]] = {}
    for job_id, name, user, runs in rows:
        for run in runs:
            start_at, end_at = run["start_at"], run["end_at"]
            if start_at is None or end_at is None or end_at - start_at >= LEAST_HELD_S:
                continue
            title = f"job {job_id} {name} of {user}: {format_duration(end_at - start_at)}"
            for gpu in run["gpus"] or ():
                found.setdefault(gpu["uuid"], []).append((start_at, end_at, title, job_id))
    return found


def _card_lane(
    chart: GanttChart,
    card: Mapping[str, Any],
    holders: list[Mapping[str, Any]],
    rows: list[dict[str, Any]],
    booked: list[Mapping[str, Any]],
) -> float:
    label = f"{card['node']}:{card['label']}"
    y, now = chart.lane(label, f"/cards/{label}"), chart.now
    open_ids = {one["id"] for one in card["jobs"]}
    for one in booked:
        window, places = one["next"], one["held"]
        is_here = any(
            place["node"] == card["node"] and (place["is_node"] or card["id"] in {gpu["uuid"] for gpu in place["gpus"]})
            for place in places
        )
        if is_here and window is not None:
            title = f"reserved: {one['name']}"
            chart.add(drawing.BOOKED, y, window["start_at"], window["end_at"], one["name"], title)
    for one in holders:
        if one["job"] is None:
            chart.add(drawing.OTHERS, y, one["start_at"], one["end_at"] or now, "others", "another user's job")
        elif one["job"] not in open_ids:
            title = f"job {one['job']} {one['name']} of {one['user']}, run {one['run']}"
            end_at = now if one["end_at"] is None else one["end_at"]
            chart.add(drawing.PAST, y, one["start_at"], end_at, f"{one['job']} {one['name']}", title, one["job"])
    known = {row["id"]: row for row in rows}
    for one in card["jobs"]:
        row = known.get(one["id"], {})
        title, start_at = f"job {one['id']} {one['name']} of {one['user']}", one["start_at"] or now
        label = f"{one['id']} {one['name']}"
        chart.add(drawing.NOW, y, start_at, now, label, title, one["id"])
        limit_s, eta_at = row.get("time_limit_s"), row.get("eta_at")
        ends_at = eta_at or (None if limit_s is None else start_at + limit_s + (row.get("suspended_s") or 0.0))
        if ends_at is None:
            chart.add(drawing.OPEN, y, now, chart.end_at, "", f"job {one['id']} has no time limit", one["id"])
        elif ends_at > now:
            chart.add(drawing.ENDS, y, now, ends_at, "", f"job {one['id']} ends by then", one["id"])
    if card["others"] and not any(one["job"] is None and one["end_at"] is None for one in holders):
        chart.add(drawing.OTHERS, y, now - 60, now, "", "another user's job")
    for one in card["foreign"]:
        title = f"foreign: {one['user'] or '?'} {one['name'] or '?'} {one['pid']}"
        chart.add(drawing.FOREIGN, y, now, chart.end_at, title, title)
    return y


def _planned_lane(chart: GanttChart, row: Mapping[str, Any], now: float) -> None:
    expected = row.get("expected")
    if not expected:
        return
    low_at, high_at = expected["low_at"], expected["high_at"]
    first_at = low_at if low_at is not None else high_at
    if first_at is None or first_at > chart.end_at:
        return
    others = f" and {row['alike'][1] - 1:,} more" if row["alike"] else ""
    ids = first_ids(row["alike"][0]) if row["alike"] else row["id"]
    job_id = job_of_row(row["id"])
    y = chart.lane(f"{ids} {row['name']}", f"/jobs/{job_id}")
    length = row["time_limit_s"] or 3600
    if high_at is not None and high_at > first_at:
        chart.add(drawing.WHISKER, y, first_at, high_at, "", f"job {row['id']} starts by then", job_id)
    title = f"job {row['id']} {row['name']} of {row['user']}{others}: expected to start, {row['gpus']} GPUs"
    begin_at = max(now, first_at)
    chart.add(drawing.PLAN, y, begin_at, begin_at + length, f"{row['id']} {row['user']}{others}", title, job_id)


# --- people ---------------------------------------------------------------------------------------


async def people(viewing: Viewing) -> web.Response:
    """GET /people"""
    board, budgets, accounts, usage, queues = await asyncio.gather(
        _board(viewing, view="people", limit=ROWS),
        viewing.get("/v1/budgets"),
        viewing.get("/v1/accounts"),
        viewing.get("/v1/usage", by="user"),
        viewing.get("/v1/queues"),
    )
    return await viewing.page(
        "people.html",
        budgets=budgets["budgets"],
        accounts=[one for one in accounts["accounts"] if one["user"] is None],
        usage=sorted(usage["usage"], key=lambda one: -(one.get("gpu_hours") or 0.0))[:ROWS],
        since=usage["since"],
        queues=queues["queues"],
        **_head(board, time.time()),
    )


async def account(viewing: Viewing) -> web.Response:
    """GET /accounts/{name}"""
    name = viewing.request.match_info["name"]
    month = viewing.request.query.get("month", "this")
    if month != "this" and _MONTH.fullmatch(month) is None:
        raise UsageError("there is no such month", "for example: /accounts/vision?month=2026-11")
    found, statement, budgets = await asyncio.gather(
        viewing.get("/v1/accounts", name=name),
        viewing.get("/v1/statement", month=month),
        viewing.get("/v1/budgets"),
    )
    since = time.localtime(statement["since"])
    return await viewing.page(
        "account.html",
        account=name,
        rows=found["accounts"],
        half_life_s=found["half_life_s"],
        statement=statement,
        used=[row for row in statement["rows"] if row["account"] == name],
        budgets=[row for row in budgets["budgets"] if row["account"] == name],
        before=_month_after(since, -1),
        after=_month_after(since, 1) if statement["until"] <= statement["now"] else None,
    )


def _month_after(since: time.struct_time, months: int) -> str:
    number = 12 * since.tm_year + since.tm_mon - 1 + months
    return f"{number // 12:04d}-{number % 12 + 1:02d}"


# --- reports --------------------------------------------------------------------------------------


async def reports(viewing: Viewing) -> web.Response:
    """GET /reports"""
    # Only signed-in users may see what is in the folder.
    await viewing.get("/v1/web/session")
    if not viewing.reports.is_there:
        raise NotFound("this page has no reports", "start it with: gpusched web --reports DIR")
    return await viewing.page("reports.html", reports=viewing.reports.listing())


async def report(viewing: Viewing) -> web.Response:
    """GET /reports/{id}"""
    await viewing.get("/v1/web/session")
    return await viewing.page("report.html", report=viewing.reports.read(viewing.request.match_info["id"]))


PAGES: dict[str, Callable[[Viewing], Awaitable[web.Response]]] = {
    "/": overview,
    "/queue": queue,
    "/timeline": timeline,
    "/cards": cards,
    "/cards/{label}": card,
    "/people": people,
    "/accounts/{name}": account,
    "/jobs/{id}": job,
    "/jobs/{id}/log": log,
    "/reports": reports,
    "/reports/{id}": report,
}
