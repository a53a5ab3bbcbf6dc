"""Answers that a user asks for, and does not take in or has to be thought about: they are bounded."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest
from aiohttp import web
from lab import ANN, BOB, ROOT, Lab

from gpusched.access import Audience
from gpusched.api import server
from gpusched.api.server import build_app, limiter_for
from gpusched.api.service import MOST_QUESTIONS, ApiService
from gpusched.api.visibility import Viewer
from gpusched.daemon.facade import DaemonFacade
from gpusched.errors import TooMany
from gpusched.model.commands import Caller, Reserve
from gpusched.model.job import Alerting
from gpusched.model.mentions import JOB, mention_job, mention_reservation, mentioned_name, render_value
from gpusched.model.settings import AccessSettings
from gpusched.model.snapshot import CalendarEntry
from gpusched.testing import request

ASKED = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.filterwarnings("ignore")  # of aiohttp's, about keys
def test_unread_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_PER_USER", 1 << 20)
    # Whoever runs the tests is the daemon's own user, who is not counted.
    monkeypatch.setattr(server, "is_root", lambda caller: False)
    path = str(tmp_path / "api.sock")

    async def ask() -> tuple[list[bytes], int]:
        app = build_app(ApiService(DaemonFacade(Lab().ticker)))
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        gate = limiter_for(app, runner)
        listener = await asyncio.get_running_loop().create_unix_server(gate, path)
        # The document is made when it is first asked for.
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(ASKED)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        held = []
        for _ in range(60):
            sock = socket.socket(socket.AF_UNIX)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(path)
            sock.setblocking(False)
            sock.sendall(ASKED * 8)
            held.append(sock)
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        said = [await loop.sock_recv(sock, 4096) for sock in held]
        unread = gate.unread_of(os.getuid())
        for sock in held:
            sock.close()
        listener.close()
        await runner.cleanup()
        return said, unread

    said, unread = asyncio.run(ask())
    heads = [answer.split(b"\r\n")[0] for answer in said]
    assert heads.count(b"HTTP/1.1 200 OK") > 2
    assert heads.count(b"HTTP/1.1 429 Too Many Requests") > 2
    assert unread <= 1 << 20
    assert any(b"are unread" in answer for answer in said)


def test_expensive_queries_are_bounded() -> None:
    service = ApiService(DaemonFacade(Lab().ticker))
    ann, bob = Caller(4242, "ann"), Caller(4243, "bob")
    done = threading.Event()

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(service.work_out(done.wait, ann)) for _ in range(MOST_QUESTIONS)]
        await asyncio.sleep(0)
        with pytest.raises(TooMany, match=f"ann has {MOST_QUESTIONS} forecasts open"):
            await service.work_out(done.wait, ann)
        other = loop.create_task(service.work_out(done.wait, bob))
        await asyncio.sleep(0)
        done.set()
        assert await asyncio.gather(*asked, other) == [True] * (MOST_QUESTIONS + 1)
        assert await service.work_out(done.wait, ann)
        assert service.thinking == {}

    try:
        asyncio.run(ask())
    finally:
        service.thinker.shutdown()


def test_a_foreign_reservation_has_no_name_when_private() -> None:
    lab = Lab(access=AccessSettings(private_data=("reservations",)))
    start_at = lab.clock.now() + 3600
    lab.ask(Reserve(ROOT, "thesis", start_at, 3600, is_node=True, users=("ann",), message="of ann"))
    job = lab.submit(request=request(gpus=1), time_limit_s=7200)
    reason = lab.scheduler.answers.reason_for(lab.job(job))
    assert reason is not None
    service = ApiService(DaemonFacade(lab.ticker))
    try:
        for caller, name in ((ANN, "reservation thesis"), (ROOT, "reservation thesis"), (BOB, "a reservation")):
            viewer = Viewer(service, caller)
            text = f"needs 1 GPU; {name} begins in about 60 min, and the job's time limit is longer"
            assert viewer.audience.text(reason.text) == text
            assert ("reservation" in viewer.facts(dict(reason.facts))) is (caller is not BOB)
    finally:
        service.thinker.shutdown()


def test_a_list_checks_reservation_access_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(access=AccessSettings(private_data=("reservations",)))
    lab.ask(Reserve(ROOT, "thesis", lab.clock.now() + 3600, 3600, is_node=True, users=("ann",)))
    service = ApiService(DaemonFacade(lab.ticker))
    asked: list[str] = []
    may_use = Audience.may_use

    def counted(self: Audience, entry: CalendarEntry) -> bool:
        asked.append(entry.name)
        return may_use(self, entry)

    monkeypatch.setattr(Audience, "may_use", counted)
    try:
        viewer = Viewer(service, BOB)
        texts = [viewer.audience.text(f"{mention_reservation('thesis')} begins soon") for _ in range(3)]
        assert texts == ["a reservation begins soon"] * 3
        assert asked == ["thesis"]
    finally:
        service.thinker.shutdown()


def test_foreign_jobs_on_unbooked_gpus_have_no_number() -> None:
    lab = Lab(gpus=2, access=AccessSettings(private_data=("jobs",)))
    astray = lab.submit(request=request(gpus=1))
    (answer,) = lab.ask(lab.submission(BOB, request=request(gpus=1), alerting=Alerting(on=("gpu_intruder",))))
    booker = int(answer["ids"][0])
    lab.tick(1)
    lab.held[f"{astray}.1"] = (1, 20480)
    for _ in range(3):
        lab.tick(1)
    (answer,) = lab.ask(lab.submission(BOB, request=request(gpus=1, vram_mib=70000)))
    waits = int(answer["ids"][0])
    reason = lab.scheduler.answers.reason_for(lab.job(waits))
    (alert,) = lab.scheduler.alerts.rows.values()
    assert reason is not None
    assert "another job, which did not book GPU 1," in str(dict(alert.facts)["message"])
    service = ApiService(DaemonFacade(lab.ticker))
    try:
        for caller, name in ((ANN, f"job {astray}"), (ROOT, f"job {astray}"), (BOB, "another job")):
            viewer = Viewer(service, caller)
            assert viewer.job_of(f"{astray}.1") == ("-" if caller is BOB else str(astray))
            (text,) = [event.text for event in lab.store.events(booker) if event.kind == "intruder"]
            assert (
                viewer.audience.text(text)
                == f"{name}, which did not book GPU 1, holds 20G of it; its owner is notified"
            )
        found = Viewer(service, BOB).job_json(lab.job(booker), service.facts_of([lab.job(booker)])(lab.job(booker)))
        assert [(one["index"], one["job"], one["vram_mib"]) for one in found["intruders"]] == [(1, "-", 20480)]
        facts = {
            "unavailable": [{"why": f"GPU 1: unbooked use of 20G: {mention_job(str(astray))}, which did not book it"}]
        }
        shown = render_value(Viewer(service, BOB).facts(facts)["unavailable"], Viewer(service, BOB).audience.knows)
        assert shown == [{"why": "GPU 1: unbooked use of 20G: another job, which did not book it"}]
    finally:
        service.thinker.shutdown()


def test_foreign_jobs_using_licenses_have_no_number() -> None:
    lab = Lab(license={"matlab": 1}, access=AccessSettings(private_data=("jobs",)))
    service = ApiService(DaemonFacade(lab.ticker))
    lab.submit(request=request(licenses=(("matlab", 1),)))
    lab.submit(request=request(licenses=(("matlab", 1),)))
    reason = lab.scheduler.answers.reason_for(lab.job(2))
    assert reason is not None
    try:
        assert reason.render().text.startswith("needs 1 license matlab, none of 1 free (in use by job 1 of ann); ")
        text = Viewer(service, BOB).audience.text(reason.text)
        assert text is not None
        assert text.startswith("needs 1 license matlab, none of 1 free (in use by another job); ")
        assert "preempts" not in Viewer(service, BOB).facts({"preempts": [mentioned_name(JOB, "1")]})
    finally:
        service.thinker.shutdown()
