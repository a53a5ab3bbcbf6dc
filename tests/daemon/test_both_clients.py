"""What gpusched.Client and gpusched.AsyncClient both keep to, and what only the asynchronous one can do."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

import gpusched
from gpusched.errors import DaemonUnreachable, NotFound, NotReady, Refused, UsageError, WaitTimeout
from gpusched.sdk.async_client import AsyncSubmittedJob
from gpusched.sdk.client import SubmittedJob


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("clients") / "home")
    daemon.start()
    yield daemon
    daemon.close()


class Awaited:
    """An asynchronous object with the synchronous interface: its calls are made in an event loop of a thread."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self._loop = loop

    def _now(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(60)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*given: Any, **options: Any) -> Any:
            answer = found(*(one.inner if isinstance(one, Awaited) else one for one in given), **options)
            if inspect.isasyncgen(answer):
                return self._steps(answer)
            answer = self._now(answer)
            return Awaited(answer, self._loop) if isinstance(answer, AsyncSubmittedJob) else answer

        return call

    def _steps(self, steps: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._now(anext(steps))
            except StopAsyncIteration:
                return


@pytest.fixture(params=["Client", "AsyncClient"])
def client(request: pytest.FixtureRequest, lab: Daemon) -> Iterator[Any]:
    if request.param == "Client":
        with gpusched.Client(lab.socket) as made:
            yield made
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    found = Awaited(gpusched.AsyncClient(lab.socket), loop)
    yield found
    found.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


QUICK: dict[str, Any] = {"cpus": 0, "output": "/dev/null"}


def test_a_job_runs_from_submission_to_its_output(client: Any, tmp_path: Path) -> None:
    job = client.submit(["sh", "-c", "echo out; echo more; exit 3"], cpus=0, chdir=tmp_path, name="three", time="1h")
    ended = job.wait(timeout_s=60)
    assert (ended.name, ended.state, ended.result_code, ended.time_limit_s) == ("three", "FAILED", 3, 3600)
    assert list(job.logs()) == ["out\n", "more\n"]
    assert list(client.logs(ended, lines=1)) == ["more\n"]


def test_output_is_followed_through_retries(client: Any, tmp_path: Path) -> None:
    line = "echo begin; [ -e tried ] && { printf end; exit 0; }; touch tried; exit 1"
    job = client.submit(line, cpus=0, retries=1, backoff=0, chdir=tmp_path)
    assert list(job.logs(follow=True)) == ["begin\n", "begin\n", "end"]


def test_many_jobs_are_submitted_listed_and_awaited(client: Any) -> None:
    ids = client.submit_all(["true", "exit 2"], **QUICK)
    assert [job.result_code for job in client.wait(ids)] == [0, 2]
    assert sorted(job.id for job in client.as_completed(ids)) == sorted(ids)
    assert [job.id for job in client.jobs(ids=ids)] == ids


def test_jobs_are_held_changed_released_requeued_and_cancelled(client: Any) -> None:
    job = client.submit("sleep 100", hold=True, **QUICK)
    client.update(job, name="new", time="2h")
    assert (client.job(job).name, client.job(job.id).time_limit_s) == ("new", 7200)
    client.release(job)
    client.hold(job)
    client.requeue(job.id, hold=True)
    assert client.job(job).hold == "user"
    assert job.cancel() == [job.id]
    assert client.wait(job.id).state == "CANCELLED"


def test_a_key_makes_one_job(client: Any, request: pytest.FixtureRequest) -> None:
    key = request.node.name
    first, again = (client.submit("true", key=key, **QUICK) for _ in range(2))
    assert (first.existing, again.existing, again.id) == (False, True, first.id)
    assert client.resubmit(first, name="copy").wait().name == "copy"


def test_mistakes_are_errors_with_a_hint(client: Any, tmp_path: Path) -> None:
    held = client.submit("true", hold=True, **QUICK)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "did you mean gpus", lambda: client.submit("true", gpu=1)),
        (UsageError, "give either a command or a script", lambda: client.submit()),
        (Refused, "GPU", lambda: client.submit("true", gpus=1000)),
        (NotFound, "no job 999999", lambda: client.job(999_999)),
        (NotFound, "no job 999999", lambda: list(client.logs(999_999))),
        (Refused, "has not started", lambda: list(client.logs(held.id))),
        (WaitTimeout, f"not ended in time: {held.id}", lambda: client.wait(held.id, timeout_s=0.05)),
        (WaitTimeout, "not ended in time", lambda: list(client.as_completed([held.id], timeout_s=0.05))),
    ]
    for kind, words, attempt in wrong:
        with pytest.raises(kind, match=words):
            attempt()
    client.cancel(held.id)


def test_copies_of_a_job_leave_its_client_behind(lab: Daemon) -> None:
    with gpusched.Client(lab.socket) as client:
        job = client.submit("true", **QUICK)
        copy = pickle.loads(pickle.dumps(job))
        assert isinstance(job, SubmittedJob)
        assert (copy, asdict(copy)) == (job, asdict(job))
        with pytest.raises(UsageError, match="is a copy without its client"):
            copy.wait()
        assert client.wait(copy).result_code == 0


def test_both_clients_have_the_same_methods() -> None:
    def shape(kind: type) -> dict[str, list[tuple[str, Any]]]:
        return {
            name.replace("__a", "__"): [(one.name, one.default) for one in inspect.signature(found).parameters.values()]
            for name, found in vars(kind).items()
            if inspect.isfunction(found)
        }

    assert shape(gpusched.Client) == shape(gpusched.AsyncClient)
    assert shape(SubmittedJob) == shape(AsyncSubmittedJob)


# --- asyncio ----------------------------------------------------------------------------------------


def test_waits_go_side_by_side_and_end_when_cancelled(lab: Daemon) -> None:
    async def main() -> None:
        async with gpusched.AsyncClient(lab.socket) as client:
            held = [await client.submit("true", hold=True, **QUICK) for _ in range(3)]
            waits = [asyncio.create_task(job.wait()) for job in held]
            lines = asyncio.create_task(_first(held[0].logs(follow=True)))
            while client._link._open < 4:
                await asyncio.sleep(0.005)
            waits[0].cancel()
            lines.cancel()
            await asyncio.wait([waits[0], lines], timeout=5)
            assert waits[0].cancelled()
            assert lines.cancelled()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(held[0].wait(), 0.05)
            assert client._link._open == 2
            for job in held:
                await client.release(job)
            assert [job.result_code for job in await asyncio.gather(*waits[1:])] == [0, 0]
            assert (await held[0].wait()).result_code == 0

    asyncio.run(main())


async def _first(lines: AsyncIterator[str]) -> str:
    return await anext(lines)


def test_more_waits_than_connections_all_end(lab: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.sdk.async_link.MOST_WAITS", 4)
    monkeypatch.setattr("gpusched.sdk.async_link._CROWDED_S", 0.05)

    async def main() -> None:
        async with gpusched.AsyncClient(lab.socket) as client:
            held = [await client.submit("true", hold=True, **QUICK) for _ in range(9)]
            waits = [asyncio.create_task(job.wait()) for job in held]
            while client._link._open < 9:
                await asyncio.sleep(0.005)
            assert len(await asyncio.wait_for(client.jobs(ids=held), 5)) == 9, "not behind the waits"
            for job in reversed(held):
                await client.release(job)
            assert len(await asyncio.wait_for(asyncio.gather(*waits), 30)) == 9

    asyncio.run(main())


def test_a_daemon_that_restarts_is_waited_for(lab: Daemon) -> None:
    async def main() -> None:
        async with gpusched.AsyncClient(lab.socket) as client:
            job = await client.submit("true", hold=True, **QUICK)
            waiting = asyncio.create_task(job.wait())
            while not client._link._open:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(lab.kill)
            submitting = asyncio.create_task(client.submit("true", key="restart", **QUICK))
            await asyncio.to_thread(lab.start)
            await client.release(job)
            assert (await waiting).result_code == 0
            assert not (await submitting).existing

    asyncio.run(main())


def test_a_lost_answer_is_told_unless_a_key_makes_it_safe(tmp_path: Path) -> None:
    """The daemon dies after it has read the request; the one after it answers."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head.split(b"\r\n")[0])
        if len(seen) % 2 == 0:
            content = b'{"job": {"id": "7", "name": "n", "user": "u", "state": "PENDING"}, "existing": true}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
            await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(answer, tmp_path / "s")
        async with server, gpusched.AsyncClient(tmp_path / "s") as client:
            job = await client.submit("true", key="k")
            assert (job.id, job.existing, len(seen)) == ("7", True, 2)
            with pytest.raises(NotReady, match="may or may not have taken effect"):
                await client.submit("true")
            assert len(seen) == 3

    asyncio.run(main())


def test_nobody_there_is_one_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with gpusched.AsyncClient(tmp_path / "api.sock") as client:
            with pytest.raises(DaemonUnreachable, match="no daemon answers on"):
                await client.jobs()

    asyncio.run(main())
    wait_until(lambda: threading.active_count() < 50, what="threads of the loop to end")
