"""The board of those who watch the queue: gtop, the web page."""

from __future__ import annotations

from aiohttp import web

from gpusched.api.board import BOARD, BoardQuery
from gpusched.api.requests import number, words
from gpusched.api.visibility import viewer_of
from gpusched.errors import UsageError
from gpusched.model.board import EXAMPLE, SORTS, VIEWS, parse_filter
from gpusched.model.units import is_digits, printable

MOST_ROWS = 500
MOST_WAIT_S = 30.0
_MOST_OFFSET = 10_000_000
_MOST_UNFOLDED = 100
PARAMETERS = {
    "after": "the version of an earlier answer: answer with what has changed since, once something has",
    "timeout_s": "answer after this long at the latest; at most 30, and 0 unless given",
    "view": "what the rows are: " + ", ".join(VIEWS) + "; active (default) and ended are jobs",
    "filter": "words that all hold of a job: key:value,value with key account, id, name, node, qos, queue, reason, "
    "state or user (me is the caller), -key:value for the opposite, or a part of a name or id",
    "sort": "order of jobs: " + ", ".join(SORTS) + "; with - before it reversed",
    "offset": "number of rows before the window",
    "limit": "number of rows in the window; at most 500, and 100 unless given",
    "fold": "0: each task of an array has a row",
    "unfold": "comma-separated ids of arrays whose tasks have their own rows",
    "find": "id of a row; `found` of the facts is its number among all rows",
}


async def board(request: web.Request) -> web.Response:
    """GET /v1/board"""
    viewer = viewer_of(request)
    query = _query(request)
    timeout_s = number(request, "timeout_s", 0.0, 0, MOST_WAIT_S) or 0.0
    return await request.app[BOARD].look(viewer, query, request.query.get("after"), timeout_s)


def _query(request: web.Request) -> BoardQuery:
    """What is asked for. Raises: UsageError."""
    for name in request.query:
        if name not in PARAMETERS:
            raise UsageError(f"unknown parameter {printable(name, 40)!r}", "parameters: " + ", ".join(PARAMETERS))
    view = _choice(request, "view", VIEWS)
    sort = request.query.get("sort", SORTS[0])
    if sort.removeprefix("-") not in SORTS:
        raise UsageError(f"sort is {printable(sort, 40)!r}; it must be one of {', '.join(SORTS)}", "try: sort=-time")
    try:
        wanted = parse_filter(request.query.get("filter", ""))
    except ValueError as error:
        raise UsageError(str(error), EXAMPLE) from None
    if wanted.terms and view == "queues":
        raise UsageError("queues cannot be filtered", "filter jobs instead: queue:vision")
    unfolded = words(request, "unfold")
    if len(unfolded) > _MOST_UNFOLDED or not all(is_digits(word) for word in unfolded):
        raise UsageError(f"unfold must be at most {_MOST_UNFOLDED} ids of arrays", "for example: unfold=42,57")
    return BoardQuery(
        view=view,
        filter=wanted,
        sort=sort.removeprefix("-"),
        is_reversed=sort.startswith("-"),
        offset=int(number(request, "offset", 0, 0, _MOST_OFFSET) or 0),
        limit=int(number(request, "limit", 100, 1, MOST_ROWS) or 1),
        unfolded=frozenset(int(word[:18]) for word in unfolded),
        folds=_choice(request, "fold", ("1", "0")) == "1",
        find=request.query.get("find"),
    )


def _choice(request: web.Request, name: str, known: tuple[str, ...]) -> str:
    """One of these words, by default the first. Raises: UsageError."""
    word = request.query.get(name, known[0])
    if word not in known:
        raise UsageError(f"{name} is {printable(word, 40)!r}; it must be one of {', '.join(known)}", "leave it out")
    return word
