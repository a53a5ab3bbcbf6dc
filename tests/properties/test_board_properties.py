"""The board: filters are read as they are written, and versions put together are the board as it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlencode

import pytest
from aiohttp.test_utils import make_mocked_request
from answering import answering
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.board import board
from gpusched.addons.board.handler import board as handler
from gpusched.addons.board.query import BoardCopy, parse_filter
from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api import visibility
from gpusched.api.server import build_app
from gpusched.api.service import ApiService
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.model.commands import Caller, Cancel, Drain, Hold, Release, Selection, Update
from gpusched.model.job import ArraySpec
from gpusched.model.settings import AccessSettings
from gpusched.testing import request

VIEWS: tuple[dict[str, Any], ...] = (
    {},
    {"limit": 2, "offset": 1},
    {"limit": 3, "sort": "-id"},
    {"filter": "st:PD"},
    {"unfold": "1,4", "limit": 5},
    {"fold": 0, "sort": "name"},
    {"fold_alike": 1, "unfold": "2,5", "limit": 6},
    {"view": "ended"},
    {"view": "people"},
    {"view": "queues"},
)


class Viewer:
    """A copy of the board that is looked at again and again, beside a new look at all of it."""

    def __init__(self, caller: Caller, query: dict[str, Any]) -> None:
        self.caller = caller
        self.query = query
        self.copy = BoardCopy()

    async def ask(self, app: Any, **more: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(visibility, "caller_of", lambda request: self.caller)
            path = "/v1/board?" + urlencode({**self.query, **more})
            return dict(json.loads((await answering(handler)(make_mocked_request("GET", path, app=app))).body))  # type: ignore

    async def look(self, app: Any) -> None:
        after = {} if self.copy.version is None else {"after": self.copy.version}
        self.copy.apply(await self.ask(app, **after))
        whole = BoardCopy()
        whole.apply(await self.ask(app))
        assert self.copy.version == whole.version
        assert self.copy.parts == whole.parts
        assert self.copy.facts == whole.facts
        # As lists: the order counts.
        assert {name: list(one.items()) for name, one in self.copy.lists.items()} == {
            name: list(one.items()) for name, one in whole.lists.items()
        }


EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from((ANN, BOB)), st.integers(0, 2), st.sampled_from(("a", "b", "c"))),
    st.tuples(st.just("array"), st.sampled_from((ANN, BOB)), st.integers(1, 4), st.just("sweep")),
    st.tuples(st.sampled_from(("cancel", "hold", "release", "nice")), st.just(ROOT), st.integers(1, 12), st.just("")),
    st.tuples(st.sampled_from(("turn", "drain", "restart", "look")), st.just(ROOT), st.integers(0, 40), st.just("")),
)


def happen(lab: Lab, what: str, caller: Caller, number: int, name: str) -> None:
    if what == "submit":
        lab.ask(lab.submission(caller, request=request(number), name=name))
    elif what == "array":
        lab.ask(lab.submission(caller, request=request(1), name=name, array=ArraySpec(f"0-{number}")))
    elif what == "turn":
        lab.tick(number)
    elif what == "drain":
        lab.ask(Drain(ROOT, ("n1",), None if number % 2 else "fan"))
    elif what == "cancel":
        lab.ask(Cancel(caller, Selection(ids=(number,))))
    elif what == "hold":
        lab.ask(Hold(caller, (number,)))
    elif what == "release":
        lab.ask(Release(caller, (number,)))
    elif what == "nice":
        lab.ask(Update(caller, (number,), {"nice": number}))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(EVENTS, max_size=20),
    st.lists(st.tuples(st.sampled_from((ANN, BOB, ROOT)), st.sampled_from(VIEWS)), min_size=1, max_size=4),
    st.sampled_from(((), ("jobs",))),
)
def test_changes_put_together_are_the_whole_board(
    events: list[tuple[str, Caller, int, str]],
    viewers: list[tuple[Caller, dict[str, Any]]],
    private: tuple[str, ...],
) -> None:
    async def scenario() -> None:
        lab = Lab(3, outcome=SimulatedOutcome(runs_s=30), access=AccessSettings(private_data=private))
        app = build_app(ApiService(DaemonFacade(lab.ticker)))
        watching = [Viewer(caller, query) for caller, query in viewers]
        for number, (what, caller, count, name) in enumerate(events):
            if what == "restart":
                adopt_open_runs(lab.restart().state, lab.engine)
                app = build_app(ApiService(DaemonFacade(lab.ticker)))
            else:
                happen(lab, what, caller, count, name)
            # Not all of them each time: some fall behind.
            for one in watching[: 1 + number % len(watching)]:
                await one.look(app)
        for one in watching:
            await one.look(app)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "ROUND_S", 0.0)
        patch.setattr(board, "PAUSE", 0)
        patch.setattr(board, "HELD_VERSIONS", 3)
        patch.setattr(board.Board, "_look_ahead", lambda self: None)
        asyncio.run(scenario())


WORDS = st.text(st.characters(codec="utf-8"), max_size=12)


@given(st.lists(st.one_of(WORDS, st.builds("{}:{}".format, st.sampled_from(("user", "st", "-q", "name", "x")), WORDS))))
def test_a_filter_is_read_as_it_is_written_or_refused_in_a_sentence(words: list[str]) -> None:
    found: object = None
    sentence = "read"
    try:
        found = parse_filter(" ".join(words))
    except ValueError as error:
        sentence = str(error)
    assert sentence
    assert "\n" not in sentence
    if found is not None and len(str(found)) <= 500:
        assert parse_filter(str(found)) == found
