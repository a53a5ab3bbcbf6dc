"""Long lists of jobs: what is written, and that the daemon answers others meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from answering import answering
from hypothesis import example, given
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Caller, Lab

from gpusched.api import requests, visibility
from gpusched.api.handlers import forecast, jobs
from gpusched.api.render import JOB_FIELDS, encode
from gpusched.api.server import build_app
from gpusched.api.service import SERVICE, ApiService
from gpusched.api.visibility import Viewer
from gpusched.cli import gq
from gpusched.daemon.facade import DaemonFacade
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Alerting, ArraySpec, TaskLayout
from gpusched.model.mentions import render_json
from gpusched.model.settings import AccessSettings
from gpusched.testing import launch, request

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()) | st.floats(1e-4, 1e15) | st.just(0.0),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


@given(_JSON)
@example("a\x7f")
def test_encode_matches_json(value: object) -> None:
    assert encode(value) == json.dumps(value, separators=(",", ":")).encode()


class Api:
    """Requests of one caller to the handlers of a scheduler turned by hand."""

    def __init__(self, lab: Lab, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab = lab
        self.app = build_app(ApiService(DaemonFacade(lab.ticker)))
        self.caller = caller
        monkeypatch.setattr(visibility, "caller_of", lambda request: caller)

    async def listing(self, query: str = "") -> bytes:
        response = await answering(jobs.listing)(make_mocked_request("GET", f"/v1/jobs?{query}", app=self.app))
        assert isinstance(response, web.Response)
        assert isinstance(response.body, (bytes, bytearray))
        return bytes(render_json(response.body, Viewer(self.app[SERVICE], self.caller).audience.knows))

    def get(self, query: str = "") -> dict[str, Any]:
        text = asyncio.run(self.listing(query))
        found: dict[str, Any] = json.loads(text)
        assert text == json.dumps(found, separators=(",", ":")).encode()
        return found


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Api]:
    return lambda lab, caller=ROOT: Api(lab, caller, monkeypatch)


@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/history"])
@pytest.mark.parametrize("states", ["", "states=all&"])
def test_pages_lead_to_the_oldest_job(api: Callable[..., Api], route: str, states: str) -> None:
    lab = Lab(cpus=1)
    ids = [str(lab.submit()) for _ in range(5)]
    app = api(lab).app

    def page(query: str) -> list[str]:
        handler = jobs.listing if route == "/v1/jobs" else jobs.history
        answer = asyncio.run(answering(handler)(make_mocked_request("GET", f"{route}?{states}{query}", app=app)))
        return [job["id"] for job in json.loads(answer.body)["jobs"]]  # type: ignore[arg-type,union-attr]

    found, query = list[str](), "limit=2"
    while one := page(query):
        found = [*one, *found]
        query = f"limit=2&before={one[0]}"
    assert found == ids
    assert page(f"before={ids[2]}") == ids[:2]


def test_a_job_has_every_key_in_order(api: Callable[..., Api]) -> None:
    lab = Lab(cpus=1)
    lab.submit(name="r\udce9sum\u00e9", launch=launch("python", "\udcff.py"))
    lab.submit()
    lab.tick()
    found = api(lab).get()
    assert list(found) == ["schema_version", "jobs"]
    running, pending = found["jobs"]
    assert list(running) == list(pending) == list(JOB_FIELDS)
    assert (running["name"], running["state"], running["node"]) == ("r\udce9sum\u00e9", "RUNNING", "n1")
    assert running["command"] == "python '\udcff.py'"
    assert (pending["state"], pending["reason"], pending["node"], pending["gpus"]) == ("PENDING", "Resources", None, [])
    assert pending["priority"] == sum(pending["priority_parts"].values())


def test_a_job_is_the_same_alone_and_among_others_that_are_nearly_alike(api: Callable[..., Api]) -> None:
    lab = Lab(cpus=2, gpus=1)
    shared = request(cpus=2)
    changes: list[dict[str, Any]] = [
        *({"name": f"n{number}", "launch": launch("echo", str(number))} for number in range(3)),
        *({"request": one} for one in (request(cpus=2, mem_mib=7), request(cpus=1, gpus=1), request(cpus=2))),
        {"request": request(cpus=2, is_exclusive=True)},
        {"layout": TaskLayout(ntasks=2)},
        {"time_limit_s": 60},
        {"nice": 5},
        {"hold": True},
        {"comment": "c"},
        {"wckey": "w"},
        {"dependency": "afterok:1"},
        {"dependency": "afterok:2?afterany:3"},
        {"array": ArraySpec("0-3")},
        {"alerting": Alerting(("end",), ())},
        {"begin_at": lab.clock.now() + 60},
        {"key": "k"},
        {"account_label": "a"},
        {"qos_label": "q"},
    ]
    for change in changes:
        for _ in range(2):
            lab.submit(**{"request": shared, **change})
    lab.tick()
    one = api(lab)
    found = one.get("states=all")["jobs"]
    assert len(found) >= len(changes)
    assert found == [one.get(f"ids={job['id']}&states=all")["jobs"][0] for job in found]
    # What they have in common is given once, and is the same.
    names = ",".join(JOB_FIELDS)
    answer = one.get(f"states=all&shared=1&fields={names}")
    common = [dict(zip(answer["shared_fields"], values, strict=True)) for values in answer["shared"]]
    assert len(common) < len(found)
    assert found == [
        {**common[number], **dict(zip(answer["fields"], own, strict=True))} for number, *own in answer["rows"]
    ]


def test_a_list_with_names_beyond_ascii_has_what_jobs_have_in_common(api: Callable[..., Api]) -> None:
    lab = Lab(cpus=1)
    for number in range(3):
        lab.submit(name=f"\u00e9\udce9{number}", comment="\u00fc\x7f")
    lab.tick()
    found = api(lab).get()["jobs"]
    assert [(job["name"], job["comment"]) for job in found] == [
        (f"\u00e9\udce9{number}", "\u00fc\x7f") for number in range(3)
    ]


@pytest.mark.parametrize("query", ["", f"shared=1&fields={','.join(JOB_FIELDS)}"])
def test_what_jobs_have_in_common_is_masked_for_others(api: Callable[..., Api], query: str) -> None:
    lab = Lab(cpus=1, access=AccessSettings(private_data=("names",)))
    for _ in range(2):
        for caller in (ANN, BOB):
            lab.submit(caller=caller, name="secret", comment="mine")
    lab.tick()
    answer = api(lab, ANN).get(query)
    for caller in (ANN, BOB):
        seen = api(lab, caller).get("")["jobs"]
        assert [(job["name"], job["comment"]) for job in seen if job["user"] == caller.user] == [("secret", "mine")] * 2
        assert {(job["name"], job["comment"]) for job in seen if job["user"] != caller.user} == {("-", None)}
    if query:
        common = [dict(zip(answer["shared_fields"], values, strict=True)) for values in answer["shared"]]
        rows = [{**common[number], **dict(zip(answer["fields"], own, strict=True))} for number, *own in answer["rows"]]
        assert rows == api(lab, ANN).get("")["jobs"]


def test_fields_come_in_the_requested_order_and_number(api: Callable[..., Api]) -> None:
    lab = Lab(cpus=1)
    lab.submit(name="a")
    found = api(lab).get("fields=state,id,name,id")
    assert (found["fields"], found["rows"]) == (["state", "id", "name", "id"], [["RUNNING", "1", "a", "1"]])


@pytest.mark.parametrize(("private", "name", "found_by_name"), [((), "train", ["1"]), (("names",), "-", [])])
def test_a_row_of_another_user_shows_only_public_fields(
    api: Callable[..., Api], private: tuple[str, ...], name: str, found_by_name: list[str]
) -> None:
    lab = Lab(cpus=1, access=AccessSettings(private_data=private))
    lab.submit(name="train")
    lab.ask(lab.submission(BOB, name="own"))
    bob = api(lab, BOB)
    found = bob.get("fields=id,name,user,command,work_dir,state")
    assert found["rows"] == [["1", name, "ann", "-", "-", "RUNNING"], ["2", "own", "bob", "true", "/tmp", "PENDING"]]
    assert [job["id"] for job in bob.get("names=train")["jobs"]] == found_by_name
    assert api(lab, ROOT).get("fields=id,name")["rows"][0] == ["1", "train"]


@pytest.mark.parametrize(("private", "folded"), [((), {}), (("names",), {"3": ["3-4", 2]})])
def test_rows_of_others_are_folded_by_what_is_shown(
    api: Callable[..., Api], private: tuple[str, ...], folded: dict[str, Any]
) -> None:
    lab = Lab(cpus=1, access=AccessSettings(private_data=private))
    for name in ("first", "a", "b", "c"):
        lab.submit(name=name)
    lab.tick()
    assert api(lab, BOB).get("fold=1&fields=id")["folded"] == folded


def test_reasons_do_not_name_hidden_jobs(api: Callable[..., Api]) -> None:
    lab = Lab(cpus=1, access=AccessSettings(private_data=("jobs",)))
    lab.submit()
    lab.ask(lab.submission(BOB))
    lab.tick()
    assert "another job" in api(lab, BOB).get()["jobs"][0]["reason_text"]
    assert "job 1" in api(lab, ROOT).get()["jobs"][1]["reason_text"]


def test_other_requests_are_answered_while_a_list_is_made(
    api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "TURN_S", 0.0)
    lab = Lab(cpus=1)
    for _ in range(3 * requests._PIECE):
        lab.ask(lab.submission(ANN))
    caller = api(lab)

    async def both() -> tuple[int, bytes]:
        turns = 0
        making = asyncio.ensure_future(caller.listing())
        while not making.done():
            turns += 1
            if turns == 2:
                # Some end and one starts, while others of the same list are written.
                lab.ask(Cancel(ROOT, Selection(tuple(range(1, 3 * requests._PIECE, 2)))))
                lab.tick(11)
            await asyncio.sleep(0)
        return turns, making.result()

    turns, text = asyncio.run(both())
    assert turns > 3
    found = json.loads(text)["jobs"]
    assert [job["id"] for job in found] == [str(number) for number in range(1, 3 * requests._PIECE + 1)]
    # As of the instant at which they were asked for.
    assert [job["state"] for job in found] == ["RUNNING", *["PENDING"] * (len(found) - 1)]


@pytest.mark.parametrize("route", ["/v1/jobs?fold=1&order=queue", "/v1/starts"])
def test_jobs_that_end_while_a_list_is_made_stay_in_it(
    api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(requests, "TURN_S", 0.0)
    lab, count = Lab(cpus=1), 5 * requests._PIECE
    for _ in range(count):
        lab.ask(lab.submission(ANN))
    lab.tick(1)
    app = api(lab).app
    handler = jobs.listing if "jobs" in route else forecast.starts

    async def both() -> tuple[int, web.StreamResponse]:
        turns = 0
        making = asyncio.ensure_future(answering(handler)(make_mocked_request("GET", route, app=app)))
        while not making.done():
            turns += 1
            if turns % 3 == 0:
                lab.ask(Cancel(ROOT, Selection((turns,))))
                lab.tick(1)
            await asyncio.sleep(0)
        return turns, making.result()

    turns, response = asyncio.run(both())
    assert turns > 9
    assert isinstance(response, web.Response)
    assert isinstance(response.body, (bytes, bytearray))
    found = json.loads(render_json(response.body, Viewer(app[SERVICE], ROOT).audience.knows))
    if "starts" in found:
        assert sorted(int(one["id"]) for one in found["starts"]) == list(range(2, count + 1))
    else:
        sizes = {job_id: size for job_id, (_, size) in found["folded"].items()}
        assert sum(sizes.get(one["id"], 1) for one in found["jobs"]) == count


def test_a_request_of_many_steps_waits_for_one_piece_of_a_list_not_for_one_piece_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "TURN_S", 0.0)
    done: list[str] = []

    def row(number: int) -> int:
        if not number % requests._PIECE:
            done.append("piece")
        return number

    async def submission() -> None:
        for _ in range(10):
            before_s = thread_time()
            while thread_time() - before_s < 3 * requests._NOTHING * requests._rounds.shortest_s:
                pass
            done.append("step")
            await asyncio.sleep(0)

    async def both() -> None:
        for _ in range(100):
            await requests.give_way()
        items = map(row, range(5 * requests._PIECE))
        making = asyncio.ensure_future(requests.respond_list("jobs", items, {}, {}))
        await asyncio.gather(making, submission())

    asyncio.run(both())
    steps = [place for place, what in enumerate(done) if what == "step"]
    assert done.count("piece") == 5
    assert steps == list(range(steps[0], steps[0] + 10))


@pytest.fixture
def crowd() -> Lab:
    """Jobs that wait for all kinds of reasons, of two users; one runs."""
    lab = Lab(cpus=2, gpus=1)
    first = lab.submit(name="runs", request=request(cpus=2))
    for _ in range(3):
        lab.submit(name="batch", request=request(cpus=2))
        lab.submit(name="batch", request=request(gpus=1))
        lab.submit(name="batch", hold=True)
        lab.submit(name="batch", dependency=f"afterok:{first}")
        lab.submit(name="batch", begin_at=lab.clock.now() + 3600)
        lab.ask(lab.submission(BOB, name="secret"), lab.submission(BOB, name="own", request=request(cpus=2)))
    lab.submit(name="batch", array=ArraySpec("0-3"), request=request(cpus=2))
    lab.ask(lab.submission(ROOT, name="batch", array=ArraySpec("0-1"), request=request(cpus=2), nice=-1000))
    lab.tick()
    return lab


def test_a_code_covers_the_whole_reason(crowd: Lab) -> None:
    scheduler = crowd.scheduler
    code_of = scheduler.answers.reason_codes()
    codes = set()
    for job in scheduler.state.jobs.values():
        if (reason := scheduler.answers.reason_for(job)) is not None:
            assert code_of(job) is reason.code, job
            codes.add(reason.code)
    assert len(codes) > 4


@pytest.mark.parametrize("caller", [ROOT, ANN, BOB])
def test_the_daemon_folds_rows_that_look_the_same(crowd: Lab, caller: Caller, api: Callable[..., Api]) -> None:
    query = "order=queue&fields=id,name,user,state,gpu_request,reason,tasks_left"
    whole, folded = api(crowd, caller).get(query), api(crowd, caller).get(f"{query}&fold=1")
    rows = [dict(zip(whole["fields"], row, strict=True)) for row in whole["rows"]]
    heads, ranges = gq._fold(rows)
    assert [list(row.values()) for row in heads] == folded["rows"]
    assert ranges == folded["folded"]
    assert sum(count for _, count in ranges.values()) + len(heads) - len(ranges) == len(rows)
    assert len(heads) < len(rows)


def test_only_conditions_that_were_asked_for_are_named() -> None:
    asked = {"constraint": None, "nodes": ["n1", "n3"], "not": []}
    assert gq._fact("only", asked) == "nodes n1, n3"
    assert gq._fact("free", {"gpu": 0, "cpu": 1.5}) == "gpu 0, cpu 1.5"
