"""What a reader of the output of arrays is told: everything once, then what has changed, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from answering import answering
from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api import visibility
from gpusched.api.handlers import logs
from gpusched.api.server import build_app
from gpusched.api.service import ApiService
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.model.commands import Caller, Cancel, Selection
from gpusched.model.job import ArraySpec, RetryRule


def app_of(lab: Lab) -> web.Application:
    return build_app(ApiService(DaemonFacade(lab.ticker)))


def ask(app: web.Application, ids: str, since: str = "", caller: Caller = ANN) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "caller_of", lambda request: caller)
        request = make_mocked_request("GET", f"/v1/logs?ids={ids}&since={since}", app=app)
        return dict(json.loads(asyncio.run(answering(logs.logs)(request)).body))  # type: ignore[arg-type]


class Reader:
    """What glogs knows, and how much it was sent for it."""

    def __init__(self, ids: str, caller: Caller = ANN) -> None:
        self.ids = ids
        self.caller = caller
        self.jobs: dict[str, dict[str, Any]] = {}
        self.version = ""
        self.answers: list[int] = []
        self.is_done = False

    def look(self, app: web.Application) -> None:
        while True:
            answer = ask(app, self.ids, self.version, self.caller)
            self.version = answer["version"]
            self.jobs.update({job["id"]: job for job in answer["jobs"]})
            self.answers.append(len(answer["jobs"]))
            self.is_done = answer["done"]
            assert not (answer["more"] and answer["done"])
            if not answer["more"]:
                return


def everything(app: web.Application, ids: str) -> dict[str, dict[str, Any]]:
    fresh = Reader(ids)
    fresh.look(app)
    return fresh.jobs


def test_ended_tasks_are_reported_once() -> None:
    lab = Lab(cpus=4)
    array = lab.submit(array=ArraySpec("0-39"))
    app, reader = app_of(lab), Reader("")
    reader.ids = str(array)
    reader.look(app)
    for _ in range(12):
        lab.tick(11)
        reader.look(app)
    assert reader.is_done
    assert sorted(reader.jobs) == sorted(f"{array}_{n}" for n in range(40))
    assert max(reader.answers) <= 8, "those that have ended, and those that run instead"


def test_the_arrays_of_several_users_are_followed_at_once() -> None:
    lab = Lab(cpus=4)
    ids = [lab.ask(lab.submission(owner, array=ArraySpec("0-3")))[0]["ids"][0] for owner in (ANN, BOB)]
    app, reader = app_of(lab), Reader(",".join(map(str, ids)), ROOT)
    reader.look(app)
    for _ in range(4):
        lab.tick(11)
        reader.look(app)
    assert reader.is_done
    assert {task: job["state"] for task, job in reader.jobs.items()} == {
        f"{array}_{n}": "COMPLETED" for array in ids for n in range(4)
    }


def test_a_large_array_is_reported_in_parts_and_changes_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TASKS_AT_ONCE", 7)
    lab = Lab(cpus=10)
    one, other = lab.submit(array=ArraySpec("0-19")), lab.submit(array=ArraySpec("5-9"))
    lab.tick(11)
    app = app_of(lab)
    ids = f"{one},{other},{lab.submit()}"
    answer = ask(app, ids)
    jobs, parts = {job["id"]: job for job in answer["jobs"]}, [len(answer["jobs"])]
    while answer["more"]:
        # The tasks of the first part end while the later parts are read.
        lab.tick(11)
        assert not answer["done"]
        answer = ask(app, ids, answer["version"])
        jobs.update({job["id"]: job for job in answer["jobs"]})
        parts.append(len(answer["jobs"]))
    assert answer["done"]
    assert len(jobs) == 26
    assert {job["state"] for job in jobs.values()} == {"COMPLETED"}
    assert len(parts) == 5
    assert jobs == everything(app, ids)


@pytest.mark.parametrize("since", ["x", "a~b", "a~b~c", "a~b~-1", "~~", "a~b~99999999999999999999", "a~b~5"])
def test_an_invalid_version_is_that_of_a_new_reader(since: str) -> None:
    lab = Lab()
    array = lab.submit(array=ArraySpec("0-3"))
    assert len(ask(app_of(lab), str(array), since)["jobs"]) == len(everything(app_of(lab), str(array)))


moves = st.lists(
    st.tuples(
        st.floats(0, 12),
        st.sampled_from(
            [SimulatedOutcome(runs_s=5), SimulatedOutcome(runs_s=5, exit_code=1), SimulatedOutcome(runs_s=3, lost=True)]
        ),
        st.sampled_from(["", "", "", "restart", "cancel"]),
        st.booleans(),
    ),
    max_size=12,
)


@given(st.lists(st.sampled_from(["0-9", "0-2", "3,7-9%2"]), min_size=1, max_size=3), st.integers(1, 6), moves)
def test_incremental_readers_know_what_new_readers_know(
    arrays: list[str], at_once: int, turns: list[tuple[float, SimulatedOutcome, str, bool]]
) -> None:
    lab = Lab(cpus=4)
    ids = [lab.submit(array=ArraySpec(*split(text)), retry=RetryRule(retries=1, backoff_s=2.0)) for text in arrays]
    named = ",".join(map(str, [*ids, lab.submit(), f"{ids[0]}_[{1 if ',' not in arrays[0] else 3}]"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "TASKS_AT_ONCE", at_once)
        app, reader = app_of(lab), Reader(named)
        for seconds, outcome, event, looks in turns:
            lab.outcome = outcome
            lab.tick(seconds)
            if event == "restart":
                adopt_open_runs(lab.restart().state, lab.engine)
                # A start that was not recorded yet is told of again.
                lab.tick()
                app = app_of(lab)
            elif event == "cancel":
                lab.ask(Cancel(ANN, Selection((ids[-1],))))
            if looks:
                reader.look(app)
                assert reader.jobs == everything(app, named)
        lab.outcome = SimulatedOutcome(runs_s=5)
        for _ in range(40):
            lab.tick(6)
        reader.look(app)
        assert reader.jobs == everything(app, named)
        assert reader.is_done


def split(text: str) -> tuple[str, int | None]:
    tasks, _, throttle = text.partition("%")
    return tasks, int(throttle) if throttle else None
