"""Waiting for many jobs costs a look at each of them, not one look at all of them for every job that ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp.test_utils import make_mocked_request
from answering import answering
from lab import ANN, Lab

from gpusched.api import visibility
from gpusched.api.handlers import jobs
from gpusched.api.server import build_app
from gpusched.api.service import ApiService
from gpusched.cli import gwait
from gpusched.daemon.facade import DaemonFacade
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import ArraySpec, Job
from gpusched.model.states import JobState

JOBS = 40


class Waiter:
    """A client that waits while the lab is turned. `looked_up` counts the jobs that were looked up for it."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(visibility, "caller_of", lambda request: ANN)
        self.lab = lab
        self.looked_up = 0
        self.service = ApiService(DaemonFacade(lab.ticker))
        self.app = build_app(self.service)
        find_all = ApiService.find_all

        def counted(service: ApiService, ids: Any) -> dict[int, Job]:
            found = find_all(service, ids)
            self.looked_up += len(found)
            return found

        monkeypatch.setattr(ApiService, "find_all", counted)

    async def wait(self, ids: str) -> dict[str, Any]:
        request = make_mocked_request("GET", f"/v1/wait?ids={ids}&timeout_s=60", app=self.app)
        waiting = asyncio.ensure_future(answering(jobs.wait)(request))
        for _ in range(10 * JOBS):
            await asyncio.sleep(0)
            if waiting.done():
                break
            self.lab.tick(6)
        response = await asyncio.wait_for(waiting, 1)
        assert not self.service.watchers, "nobody is left who waits"
        return dict(json.loads(response.body))  # type: ignore[arg-type]


def test_waiting_for_many_jobs_examines_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gpus=0, cpus=2)
    ids = [lab.submit() for _ in range(JOBS)]
    waiter = Waiter(lab, monkeypatch)
    answer = asyncio.run(waiter.wait(",".join(map(str, ids))))
    assert answer["done"]
    assert [job["state"] for job in answer["jobs"]] == ["COMPLETED"] * JOBS
    assert waiter.looked_up <= 3 * JOBS


def test_waiting_for_tasks_without_a_row_ends_with_their_array(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gpus=0, cpus=1)
    array = lab.submit(array=ArraySpec("0-9"))
    lab.tick(1)
    waiter = Waiter(lab, monkeypatch)

    async def cancelled() -> dict[str, Any]:
        waiting = asyncio.ensure_future(waiter.wait(f"{array}_8,{array}_9"))
        await asyncio.sleep(0)
        lab.ask(Cancel(ANN, Selection(ids=(array,))))
        return await waiting

    answer = asyncio.run(cancelled())
    assert answer["done"]
    assert [job["state"] for job in answer["jobs"]] == [JobState.CANCELLED.value] * 2


def test_tasks_that_never_had_a_row_are_looked_up_once_for_each_array(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gpus=0, cpus=1)
    arrays = [lab.submit(array=ArraySpec("0-49")) for _ in range(3)]
    lab.tick(1)
    lab.ask(Cancel(ANN, Selection(ids=tuple(arrays))))
    lab.tick(30)
    around, asked = lab.scheduler.store.array_around, []
    monkeypatch.setattr(lab.scheduler.store, "array_around", lambda one: asked.append(one) or around(one))
    tasks = [array + 1 + number for array in arrays for number in range(50)]
    found = ApiService(DaemonFacade(lab.ticker)).find_all(tasks)
    assert [found[task].state for task in tasks] == [JobState.CANCELLED] * 150
    assert len(asked) == 3


class Daemon:
    """Refuses addresses that are too long, as the real one does, and knows that all jobs but some have ended."""

    def __init__(self, *running: str) -> None:
        self.running = running

    def call(self, method: str, path: str) -> dict[str, Any]:
        assert len(path) < 8190
        (words,) = parse_qs(urlsplit(path).query)["ids"]
        ids = words.split(",")
        states = ["RUNNING" if job_id in self.running else "COMPLETED" for job_id in ids]
        jobs = [{"id": job_id, "state": state} for job_id, state in zip(ids, states, strict=True)]
        return {"done": "RUNNING" not in states, "jobs": jobs}


@pytest.mark.parametrize("running", [(), ("7",), ("2999",)])
def test_gwait_accepts_any_number_of_ids(running: tuple[str, ...]) -> None:
    ids = [str(number) for number in range(3000)]
    answer = gwait.wait_until_done(Daemon(*running), ids, 0.0)  # type: ignore[arg-type]
    assert [job["id"] for job in answer["jobs"]] == ids
    assert answer["done"] is not bool(running)
