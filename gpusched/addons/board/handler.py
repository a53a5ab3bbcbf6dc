"""The board of those who watch the queue: gtop, the web page."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web

from gpusched.addons.board.board import BOARD, Board, BoardQuery
from gpusched.addons.board.query import EXAMPLE, SORTS, VIEWS, parse_filter
from gpusched.api.asked import RequestQuery, about, one_of
from gpusched.api.requests import words
from gpusched.api.route import Route
from gpusched.api.service import ApiService
from gpusched.api.visibility import Viewer
from gpusched.errors import UsageError
from gpusched.model.units import is_digits

MOST_ROWS = 500
MOST_WAIT_S = 30.0
_MOST_OFFSET = 10_000_000
_MOST_UNFOLDED = 100


_SORT = one_of([sign + sort for sign in ("", "-") for sort in SORTS], "order of jobs; with - before it reversed")


class LookQuery(RequestQuery, forbid_unknown_fields=True):
    after: Annotated[
        str | None, about("the version of an earlier answer: answer with what has changed since, once something has")
    ] = None
    timeout_s: Annotated[
        float, about("answer after this long at the latest; at once unless given", ge=0, le=MOST_WAIT_S)
    ] = 0.0
    view: Annotated[str, one_of(VIEWS, "what the rows are; active (default) and ended are jobs")] = VIEWS[0]
    filter: Annotated[
        str,
        about(
            "terms that a job must all match: key:value,value with key account, id, name, node, qos, queue, reason, "
            "state or user (me is the caller), -key:value for the opposite, or a part of a name or id"
        ),
    ] = ""
    sort: Annotated[str, _SORT] = SORTS[0]
    offset: Annotated[int, about("number of rows before the window", ge=0, le=_MOST_OFFSET)] = 0
    limit: Annotated[int, about("number of rows in the window", ge=1, le=MOST_ROWS)] = 100
    fold: Annotated[bool, about("0: each task of an array has a row")] = True
    fold_alike: Annotated[
        bool,
        about(
            "1: pending jobs of a user with the same name, GPUs and reason have one row, with `alike` [ids, how many]"
        ),
    ] = False
    unfold: Annotated[
        str, about("comma-separated ids of arrays, and of rows with `alike`, whose tasks or jobs have their own rows")
    ] = ""
    find: Annotated[str | None, about("id of a row; `found` of the facts is its number among all rows")] = None


async def board(viewer: Viewer, query: LookQuery, request: web.Request) -> web.Response:
    """What viewers of the queue watch: totals, nodes, cards with their holders, and a window of rows; after a version
    only what has changed since."""
    return await request.app[BOARD].look(viewer, _query(query), query.after, query.timeout_s)


def _query(asked: LookQuery) -> BoardQuery:
    """What is asked for. Raises: UsageError."""
    try:
        wanted = parse_filter(asked.filter)
    except ValueError as error:
        raise UsageError(str(error), EXAMPLE) from None
    if wanted.terms and asked.view == "queues":
        raise UsageError("queues cannot be filtered", "filter jobs instead: queue:vision")
    unfolded = words(asked.unfold)
    if len(unfolded) > _MOST_UNFOLDED or not all(is_digits(word) for word in unfolded):
        raise UsageError(f"unfold must be at most {_MOST_UNFOLDED} ids of arrays", "for example: unfold=42,57")
    return BoardQuery(
        view=asked.view,
        filter=wanted,
        sort=asked.sort.removeprefix("-"),
        is_reversed=asked.sort.startswith("-"),
        offset=asked.offset,
        limit=asked.limit,
        unfolded=frozenset(int(word[:18]) for word in unfolded),
        folds=asked.fold,
        folds_alike=asked.fold_alike,
        find=asked.find,
    )


def attach(app: web.Application, service: ApiService) -> None:
    """Keep a board in the daemon."""
    app[BOARD] = board = Board(service)
    service.scheduler.signals.jobs_changed.connect(board.announce)


ROUTES = (
    Route(
        "GET",
        "/v1/board",
        board,
        "version, full (whether it replaces what was known), now, parts (daemon, notices, me, totals; only those "
        "that have changed), lists (nodes, cards, rows; only those that have changed: order is all ids, null if "
        "unchanged; set are new and changed entries)",
    ),
)
