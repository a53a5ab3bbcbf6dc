"""GET /v1/board on a scheduler turned by hand: rows, filters, rights, versions and waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from answering import answering
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.board import board
from gpusched.addons.board.handler import board as handler
from gpusched.addons.board.query import BoardCopy
from gpusched.addons.board.rows import node_row
from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api import requests, visibility
from gpusched.api.server import build_app
from gpusched.api.service import ApiService
from gpusched.api.visibility import Viewer
from gpusched.daemon.facade import DaemonFacade
from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.commands import Caller, Cancel, Drain, Hold, Selection
from gpusched.model.job import ArraySpec
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import AccessSettings
from gpusched.model.states import FINAL_STATES
from gpusched.ports import JobFilter
from gpusched.testing import request

CARL = Caller(1002, "carl")


class Watch:
    """The board of a lab, asked on one event loop without any pause between rounds."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.loop = asyncio.new_event_loop()
        self.begin()

    def begin(self) -> None:
        """A new life of the daemon's API."""
        self.app: web.Application = build_app(ApiService(DaemonFacade(self.lab.ticker)))

    async def answer(self, caller: Caller = ANN, **query: Any) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(visibility, "caller_of", lambda request: caller)
            path = "/v1/board?" + urlencode(query)
            waiting = asyncio.ensure_future(answering(handler)(make_mocked_request("GET", path, app=self.app)))
            await asyncio.sleep(0)
        found = await waiting
        assert isinstance(found, web.Response)
        return dict(json.loads(found.body))  # type: ignore[arg-type]

    def ask(self, caller: Caller = ANN, **query: Any) -> dict[str, Any]:
        return self.loop.run_until_complete(self.answer(caller, **query))

    def rows(self, caller: Caller = ANN, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask(caller, **query)["lists"]["rows"]["set"])

    def ids(self, caller: Caller = ANN, **query: Any) -> list[str]:
        return [row["id"] for row in self.rows(caller, **query)]


@pytest.fixture
def lab() -> Lab:
    return Lab(2, outcome=SimulatedOutcome(runs_s=3600))


@pytest.fixture
def watch(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(board, "ROUND_S", 0.0)
    monkeypatch.setattr(board, "PAUSE", 0)
    found = Watch(lab)
    yield found
    found.loop.run_until_complete(asyncio.sleep(0))
    found.loop.close()


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts change no rows."""
    monkeypatch.setattr(board.Board, "_look_ahead", lambda self: None)


def end(lab: Lab, job_id: int) -> None:
    lab.ask(Cancel(ROOT, Selection(ids=(job_id,))))
    while job_id in lab.scheduler.state.jobs:
        lab.tick(1)


def gpus(lab: Lab, count: int = 1, caller: Caller = ANN, **parts: Any) -> int:
    ((ids),) = [lab.ask(lab.submission(caller, request=request(count), **parts))[0]["ids"]]
    return int(ids[0])


# --- rows ---------------------------------------------------------------------------------------


def test_running_jobs_come_first_and_the_next_to_start_after_them(watch: Watch) -> None:
    lab = watch.lab
    for name in ("a", "b", "c", "d"):
        gpus(lab, name=name)
    lab.tick()
    rows = watch.rows()
    assert [(row["name"], row["state"], row["where"]) for row in rows[:2]] == [
        ("a", "RUNNING", "n1:0"),
        ("b", "RUNNING", "n1:1"),
    ]
    assert [(row["name"], row["reason"]) for row in rows[2:]] == [("c", "Resources"), ("d", "Priority")]
    totals = watch.ask()["parts"]["totals"]
    assert totals == {"jobs": {"RUNNING": 2, "PENDING": 2}, "gpus": 2, "gpus_free": 0, "gpus_busy": 2}


def test_pending_jobs_have_their_place_and_expected_start_once_a_forecast_is_made(watch: Watch) -> None:
    lab = watch.lab
    for _ in range(4):
        gpus(lab, time_limit_s=600)
    lab.tick()

    async def wait_for_forecast() -> list[dict[str, Any]]:
        while True:
            rows = (await watch.answer(timeout_s=1))["lists"]["rows"]["set"]
            if rows[2]["expected"] is not None:
                return list(rows)
            await asyncio.sleep(0.01)

    rows = watch.loop.run_until_complete(wait_for_forecast())
    watch.app[board.BOARD]._forecast_at -= 1000
    watch.app[board.BOARD]._next_forecast_at -= 1000
    lab.ask(Hold(ANN, (4,)))
    # Nobody has looked for long: nothing is told until the next forecast.
    assert watch.rows()[2]["expected"] is None
    assert [row.get("place") for row in rows] == [None, None, 1, 2]
    assert [round(row["expected"]["high_at"] - lab.clock.now()) for row in rows[2:]] == [600, 600]


def test_cards_name_their_holders(watch: Watch) -> None:
    lab = watch.lab
    number = gpus(lab, name="train")
    lab.tick()
    first, second = watch.ask()["lists"]["cards"]["set"]
    assert [(one["id"], one["user"], one["name"]) for one in first["jobs"]] == [(str(number), "ann", "train")]
    assert (first["state"], second["state"], second["jobs"]) == ("allocated", "idle", [])


def test_an_array_is_one_row_that_counts_its_tasks(watch: Watch) -> None:
    lab = watch.lab
    number = gpus(lab, array=ArraySpec("0-9"), name="sweep")
    lab.tick()
    (row,) = watch.rows()
    assert (row["id"], row["state"], row["tasks"]) == (str(number), "RUNNING", {"PENDING": 8, "RUNNING": 2})
    assert row["where"] == "n1:0,1"


def test_an_unfolded_array_is_followed_by_its_tasks(watch: Watch) -> None:
    lab = watch.lab
    number = gpus(lab, array=ArraySpec("0-4"), name="sweep")
    other = gpus(lab)
    lab.tick()
    rows = watch.rows(unfold=number)
    assert [(row["id"], row["depth"]) for row in rows] == [
        (str(number), 0),
        *((f"{number}_{task}", 1) for task in range(5)),
        (str(other), 0),
    ]
    assert [row["state"] for row in rows[1:6]] == ["RUNNING", "RUNNING", "PENDING", "PENDING", "PENDING"]
    assert watch.ids(fold=0) == [f"{number}_0", f"{number}_1", str(number), str(other)]


def test_equal_pending_jobs_have_one_row_if_wanted(watch: Watch) -> None:
    lab = watch.lab
    for name in ("a", "a", "b", "b", "b", "c", "b"):
        gpus(lab, name=name)
    theirs = gpus(lab, name="b", caller=BOB)
    wide = gpus(lab, 2, name="b")
    array = gpus(lab, array=ArraySpec("0-1"), name="b")
    lab.tick()
    rows = watch.rows(fold_alike=1)
    assert sorted((row["id"], row["alike"]) for row in rows) == sorted(
        [("1", None), ("2", None), ("3", ["3-5,7", 4]), ("6", None)]
        + [(str(one), None) for one in (theirs, wide, array)]
    )
    assert len(watch.rows()) == 10
    assert {row["alike"] and row["alike"][1] for row in watch.rows()} == {None}
    opened = [(row["id"], row["depth"], row["is_open"]) for row in watch.rows(fold_alike=1, unfold=3)]
    place = opened.index(("3", 0, True))
    assert opened[place + 1 : place + 4] == [("4", 1, False), ("5", 1, False), ("7", 1, False)]


def test_a_filter_by_state_counts_only_those_tasks_of_an_array(watch: Watch) -> None:
    lab = watch.lab
    gpus(lab, array=ArraySpec("0-9"))
    lab.tick()
    (row,) = watch.rows(filter="st:PD")
    assert (row["state"], row["tasks"]) == ("PENDING", {"PENDING": 8})


FILTERS = {
    "user:ann": ["1", "2"],
    "user:me": ["1", "2"],
    "u:bob,carl": ["3"],
    "-user:bob": ["1", "2"],
    "st:R": ["1", "3"],
    "state:pending": ["2"],
    "queue:vis*": ["1"],
    "node:n1": ["1", "3"],
    "node:n2": [],
    "name:train": ["1"],
    "name:TRAIN*": ["1", "2"],
    "trai": ["1", "2"],
    "3": ["3"],
    "id:2": ["2"],
    "reason:Resources": ["2"],
    "user:ann st:R": ["1"],
    "user:ann -st:R": ["2"],
    '"train big"': ["2"],
}


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_selects_jobs(watch: Watch, text: str) -> None:
    lab = watch.lab
    gpus(lab, name="train", queue="vision")
    gpus(lab, name="train big", count=2)
    gpus(lab, caller=BOB, name="eval")
    lab.tick()
    assert sorted(watch.ids(ROOT if "me" not in text else ANN, filter=text)) == FILTERS[text]


SORTS = {
    "id": ["1", "2", "3"],
    "-id": ["3", "2", "1"],
    "name": ["3", "2", "1"],
    "gpus": ["2", "1", "3"],
    "user": ["1", "2", "3"],
    "time": ["1", "2", "3"],
    "state": ["2", "1", "3"],
    "queue": ["1", "3", "2"],
    "expected": ["1", "3", "2"],
}


@pytest.mark.parametrize("sort", SORTS)
def test_rows_are_sorted(watch: Watch, sort: str) -> None:
    lab = watch.lab
    gpus(lab, name="c")
    gpus(lab, name="b", count=2)
    gpus(lab, caller=BOB, name="a")
    lab.tick()
    assert watch.ids(ROOT, sort=sort) == SORTS[sort]


REFUSALS = {
    "view=cards": "view is 'cards'; it must be one of active, ended, people, queues",
    "sort=size": "sort is 'size'; it must be one of queue, id, name",
    "filter=color:red": "'color' is not a filter key; the keys are account, id",
    "filter=st:XX": "'xx' is not a job state",
    "filter=%22a": "is not closed by a quotation mark",
    "filter=user:": "'user:' ",
    "filter=user:,": "no value after 'user'",
    "filter=" + "a" * 501: "the filter has 501 characters; the maximum is 500",
    "filter=" + "a+" * 21: "the filter has 21 words; the maximum is 20",
    "view=queues&filter=a": "queues cannot be filtered",
    "limit=0": "limit is '0'; it must be a whole number from 1 to 500",
    "limit=501": "limit is '501'",
    "offset=-1": "offset is '-1'",
    "timeout_s=31": "timeout_s is '31'",
    "unfold=x": "unfold must be at most 100 ids of arrays",
    "fold=2": "fold is '2'; it must be 1 or 0",
    "rows=3": "unknown parameter 'rows'",
}


@pytest.mark.parametrize("query", REFUSALS)
def test_an_unknown_parameter_is_refused_in_a_sentence(watch: Watch, query: str) -> None:
    if query == "filter=user:":
        # A key without a value is a word of its own.
        assert watch.ids(filter="user:") == []
        return
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError) as caught:
        patch.setattr(visibility, "caller_of", lambda request: ANN)
        watch.loop.run_until_complete(
            answering(handler)(make_mocked_request("GET", f"/v1/board?{query}", app=watch.app))
        )
    assert REFUSALS[query] in caught.value.message


def test_a_window_tells_how_many_rows_there_are_and_where_a_job_is(watch: Watch) -> None:
    lab = watch.lab
    for _ in range(6):
        gpus(lab)
    lab.tick()
    rows = watch.ask(offset=2, limit=2, find="5")["lists"]["rows"]
    assert rows["order"] == ["3", "4"]
    assert rows["facts"] == {"total": 6, "offset": 2, "found": 4}
    assert watch.ask(offset=100)["lists"]["rows"]["order"] == []
    assert watch.ask(find="77")["lists"]["rows"]["facts"]["found"] is None


def test_ended_jobs_are_a_view_of_their_own_newest_first(watch: Watch) -> None:
    lab = watch.lab
    first, second = gpus(lab), gpus(lab)
    lab.tick()
    end(lab, first)
    assert watch.ids(view="ended") == [str(first)]
    end(lab, second)
    assert watch.ids(view="ended") == [str(second), str(first)]
    assert watch.ids() == []


def test_ended_tasks_are_one_row_while_others_of_their_array_go_on(watch: Watch) -> None:
    lab = watch.lab = Lab(2, outcome=SimulatedOutcome(runs_s=10))
    watch.begin()
    number = gpus(lab, array=ArraySpec("0-4"))
    while len(lab.scheduler.store.jobs(JobFilter(states=FINAL_STATES))) < 2:
        lab.tick(1)
    (row,) = watch.rows(view="ended")
    assert (row["id"], row["state"], row["tasks"]) == (str(number), "COMPLETED", {"COMPLETED": 2})
    assert row["end_at"] is not None
    assert "place" not in row
    assert watch.rows()[0]["state"] in ("PENDING", "RUNNING")


def test_people_and_queues_are_views_of_their_own(watch: Watch) -> None:
    lab = watch.lab
    gpus(lab)
    gpus(lab, caller=BOB, count=2)
    gpus(lab, caller=BOB)
    lab.tick()
    people = {row["id"]: (row["jobs"], row["gpus"], row["gpus_waiting"]) for row in watch.rows(view="people")}
    assert people == {"ann": ({"RUNNING": 1}, 1.0, 0), "bob": ({"RUNNING": 1, "PENDING": 1}, 1.0, 2)}
    assert [row["id"] for row in watch.rows(view="people", filter="st:PD")] == ["bob"]
    assert [(row["id"], row["running"], row["pending"]) for row in watch.rows(view="queues")] == [("default", 2, 1)]


# --- nodes --------------------------------------------------------------------------------------


def test_cards_and_jobs_of_several_nodes_name_their_node(watch: Watch) -> None:
    lab = watch.lab = Lab(1, outcome=SimulatedOutcome(runs_s=3600), more_nodes=("n2",))
    watch.begin()
    first, second = gpus(lab), gpus(lab)
    lab.tick()
    lists = watch.ask()["lists"]
    assert [(node["id"], node["state"]) for node in lists["nodes"]["set"]] == [("n1", "up"), ("n2", "up")]
    held = {card["node"]: card["jobs"][0]["id"] for card in lists["cards"]["set"]}
    assert sorted(held) == ["n1", "n2"]
    assert {row["where"]: row["id"] for row in lists["rows"]["set"]} == {f"{node}:0": one for node, one in held.items()}
    assert sorted(held.values()) == [str(first), str(second)]
    assert watch.ids(filter="node:n2") == [held["n2"]]


def test_a_drained_node_says_why(watch: Watch) -> None:
    watch.lab.ask(Drain(ROOT, ("n1",), "fan"))
    answer = watch.ask()
    (node,) = answer["lists"]["nodes"]["set"]
    assert node["state"] == "drained"
    assert "fan" in node["why"]
    assert answer["parts"]["totals"]["gpus_free"] == 0


NODES = [
    (NodeView("n1", 1, 1), "up"),
    (NodeView("n1", 1, 1, why_not="drained: fan"), "drained"),
    (NodeView("n1", 1, 1, why_not="does not answer", is_unreachable=True), "unreachable"),
    (NodeView("n9", 0, 0, why_not="has not joined", is_unreachable=True, is_unknown=True), "down"),
]


@pytest.mark.parametrize(("node", "state"), NODES)
def test_a_node_has_one_of_four_states(watch: Watch, node: NodeView, state: str) -> None:
    row = node_row(Viewer(watch.app[board.BOARD]._service, ROOT), node)
    assert (row["state"], row["why"]) == (state, node.why_not)


# --- rights -------------------------------------------------------------------------------------

NOBODY, ALL = frozenset[str](), frozenset({"jobs", "usage", "accounts", "reservations"})
NAMES = frozenset({"names"})
RIGHTS = [
    # who, private data: ids of the rows, the name of bob's job, the jobs counted, bob on the card, others on it
    (ANN, NOBODY, ["1", "2", "3"], "secret", 3, "secret", 0),
    (ANN, NAMES, ["1", "2", "3"], "-", 3, "-", 0),
    (BOB, NAMES, ["1", "2", "3"], "secret", 3, "secret", 0),
    (CARL, NAMES, ["1", "2", "3"], "secret", 3, "secret", 0),
    (BOB, NOBODY, ["1", "2", "3"], "secret", 3, "secret", 0),
    (CARL, NOBODY, ["1", "2", "3"], "secret", 3, "secret", 0),
    (ROOT, NOBODY, ["1", "2", "3"], "secret", 3, "secret", 0),
    (ANN, ALL, ["1"], None, 1, None, 1),
    (BOB, ALL, ["2", "3"], "secret", 2, "secret", 0),
    (CARL, ALL, ["2"], "secret", 1, "secret", 0),
    (ROOT, ALL, ["1", "2", "3"], "secret", 3, "secret", 0),
]


@pytest.mark.parametrize(("who", "private", "ids", "name", "count", "holder", "others"), RIGHTS)
def test_a_viewer_sees_what_gq_shows(
    who: Caller,
    private: frozenset[str],
    ids: list[str],
    name: str | None,
    count: int,
    holder: str | None,
    others: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board, "ROUND_S", 0.0)
    queues = {"open": QueueSettings("open"), "vision": QueueSettings("vision", operators=("carl",))}
    access = AccessSettings(private_data=tuple(sorted(private)))
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=3600), queue=queues, access=access)
    watch = Watch(lab)
    gpus(lab, queue="open", name="mine")
    gpus(lab, caller=BOB, queue="vision", name="secret")
    gpus(lab, caller=BOB, queue="open", name="late")
    lab.tick()
    # Another viewer has looked before: nothing made for them may be shown to this one.
    for other in (ROOT, ANN, BOB):
        watch.ask(other)
    answer = watch.ask(who)
    rows = {row["id"]: row for row in answer["lists"]["rows"]["set"]}
    assert sorted(rows) == ids
    assert rows.get("2", {}).get("name") == name
    assert sum(answer["parts"]["totals"]["jobs"].values()) == count
    card = answer["lists"]["cards"]["set"][1]
    assert (card["jobs"][0]["name"] if card["jobs"] else None, card["others"]) == (holder, others)
    # What is not shown can be neither found nor told by its place.
    assert watch.ids(who, filter="secret") == (["2"] if name == "secret" else [])
    found = watch.ask(who, find="2", sort="id")["lists"]["rows"]["facts"]["found"]
    assert found == (ids.index("2") if "2" in ids else None)
    if name == "-":
        assert watch.ids(who, sort="name") == ["2", "3", "1"]
        assert "secret" not in json.dumps(answer)
    watch.loop.close()


# --- versions -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("calm")
def test_an_answer_after_a_version_has_only_what_has_changed(watch: Watch) -> None:
    lab = watch.lab
    for _ in range(3):
        gpus(lab)
    lab.tick()
    first = watch.ask()
    assert first["full"]
    same = watch.ask(after=first["version"])
    assert (same["full"], same["version"], same["parts"], same["lists"]) == (False, first["version"], {}, {})
    lab.ask(Hold(ANN, (3,)))
    lab.tick()
    changed = watch.ask(after=first["version"])
    assert not changed["full"]
    assert set(changed["lists"]) == {"rows"}
    assert [row["id"] for row in changed["lists"]["rows"]["set"]] == ["3"]
    assert changed["lists"]["rows"]["order"] is None
    assert set(changed["parts"]) == {"me", "totals"}


@pytest.mark.parametrize("query", [{"limit": 2}, {"filter": "st:R"}, {"sort": "-id"}, {"view": "people"}])
def test_a_version_with_other_parameters_gets_the_whole_board(watch: Watch, query: dict[str, Any]) -> None:
    gpus(watch.lab)
    watch.lab.tick()
    version = watch.ask()["version"]
    assert watch.ask(**query, after=version)["full"]


def test_a_version_of_an_earlier_daemon_gets_the_whole_board(watch: Watch) -> None:
    gpus(watch.lab)
    watch.lab.tick()
    version = watch.ask()["version"]
    watch.begin()
    again = watch.ask(after=version)
    assert again["full"]
    assert again["version"] != version


def test_a_version_of_another_viewer_gets_the_whole_board(watch: Watch) -> None:
    gpus(watch.lab)
    watch.lab.tick()
    assert watch.ask(BOB, after=watch.ask(ANN)["version"])["full"]


def test_a_version_too_old_gets_the_whole_board(watch: Watch) -> None:
    lab = watch.lab
    version = watch.ask()["version"]
    for _ in range(board.HELD_VERSIONS):
        gpus(lab)
        watch.ask()
    assert watch.ask(after=version)["full"]


def test_windows_that_nobody_looks_at_are_dropped(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MOST_WINDOWS", 3)
    for offset in range(10):
        watch.ask(offset=offset)
    assert len(watch.app[board.BOARD]._windows) == 3
    # A user who looks at much takes no place from others.
    watch.ask(BOB)
    monkeypatch.setattr(board, "MOST_OF_USER", 1)
    for offset in range(10):
        watch.ask(offset=offset)
    assert {key[0] for key in watch.app[board.BOARD]._windows} == {ANN.uid, BOB.uid}
    monkeypatch.setattr(board, "FORGET_S", -1.0)
    watch.ask(offset=11)
    assert len(watch.app[board.BOARD]._windows) == 1


def test_rounds_are_shared_and_take_place_once_a_second(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ROUND_S", 1000.0)
    made: list[int] = []
    order = watch.lab.scheduler.answers.active_in_order
    monkeypatch.setattr(watch.lab.scheduler.answers, "active_in_order", lambda: made.append(1) or order())
    for caller in (ANN, BOB, ROOT):
        for limit in (10, 20):
            gpus(watch.lab)
            watch.ask(caller, limit=limit)
    assert made == [1]


def test_a_slow_round_is_followed_by_a_longer_pause(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.ask()
    found = watch.app[board.BOARD]
    monkeypatch.setattr(board, "PAUSE", 20)
    found._busy_s = 10.0
    gpus(watch.lab)
    assert watch.ids() == []
    found._busy_s = 0.0
    assert watch.ids() == ["1"]


async def turns_during(waiting: asyncio.Future[Any], most: int = 1_000_000) -> int:
    """How often another task gets its turn before this one is done."""
    turns = 0
    while not waiting.done() and turns < most:
        turns += 1
        await asyncio.sleep(0)
    return turns


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("query", [{}, {"fold_alike": 1}, {"fold": 0}, {"view": "people"}, {"filter": "user:me"}])
def test_others_get_turns_during_a_round(watch: Watch, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "TURN_S", 0.0)
    for _ in range(4 * requests._PIECE):
        gpus(watch.lab)

    async def scenario() -> tuple[int, dict[str, Any]]:
        waiting = asyncio.ensure_future(watch.answer(**query))
        return await turns_during(waiting), waiting.result()

    turns, answer = watch.loop.run_until_complete(scenario())
    # Jobs are counted in four pieces, and their rows made in four.
    assert turns > 8
    assert answer["parts"]["totals"]["jobs"] == {"RUNNING": 2, "PENDING": 4 * requests._PIECE - 2}


@pytest.mark.usefixtures("calm")
def test_a_viewer_who_leaves_during_a_round_keeps_nobody_from_its_news(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "TURN_S", 0.0)
    watch.ask()
    for _ in range(4 * requests._PIECE):
        gpus(watch.lab)

    async def leave() -> None:
        waiting = asyncio.ensure_future(watch.answer())
        assert await turns_during(waiting, 4) == 4
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    watch.loop.run_until_complete(leave())
    assert watch.ask(limit=500)["lists"]["rows"]["facts"]["total"] == 4 * requests._PIECE


# --- waiting ------------------------------------------------------------------------------------


def test_a_viewer_waits_until_something_changes(watch: Watch) -> None:
    async def scenario() -> dict[str, Any]:
        version = (await watch.answer())["version"]
        waiting = asyncio.ensure_future(watch.answer(after=version, timeout_s=30))
        while not watch.app[board.BOARD]._waiting:
            await asyncio.sleep(0.001)
        gpus(watch.lab)
        return await asyncio.wait_for(waiting, 20)

    answer = watch.loop.run_until_complete(scenario())
    assert [row["id"] for row in answer["lists"]["rows"]["set"]] == ["1"]


@pytest.mark.usefixtures("calm")
def test_waiting_ends_in_time_with_the_same_version(watch: Watch) -> None:
    first = watch.ask()
    again = watch.ask(after=first["version"], timeout_s=0.05)
    assert (again["version"], again["lists"]) == (first["version"], {})
    assert watch.app[board.BOARD]._timer is None


@pytest.mark.usefixtures("calm")
def test_a_change_for_others_does_not_wake_a_viewer_who_may_not_see_it(watch: Watch) -> None:
    lab = Lab(2, access=AccessSettings(private_data=("jobs",)))
    watch.lab = lab
    watch.begin()

    async def scenario() -> dict[str, Any]:
        version = (await watch.answer(ANN))["version"]
        waiting = asyncio.ensure_future(watch.answer(ANN, after=version, timeout_s=0.3))
        await asyncio.sleep(0.05)
        lab.ask(lab.submission(BOB, hold=True))
        answer = await waiting
        assert answer["version"] == version
        return answer

    assert watch.loop.run_until_complete(scenario())["lists"] == {}


@pytest.mark.usefixtures("calm")
def test_a_copy_is_replaced_by_a_full_answer_and_changed_by_others(watch: Watch) -> None:
    lab, copy = watch.lab, BoardCopy()
    for _ in range(3):
        gpus(lab)
    lab.tick()
    assert copy.apply(watch.ask())
    assert [row["id"] for row in copy.rows()] == ["1", "2", "3"]
    end(lab, 3)
    assert copy.apply(watch.ask(after=copy.version))
    assert [row["id"] for row in copy.rows()] == ["1", "2"]
    assert not copy.apply(watch.ask(after=copy.version))
