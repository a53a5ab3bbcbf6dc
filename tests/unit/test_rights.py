"""Rights, paces and records by hand: what the tests with real users cannot bring about quickly."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import pwd
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from answering import answering
from lab import ANN, BOB, ROOT, Lab

from gpusched import access, paths
from gpusched.access import Act, may
from gpusched.api import visibility
from gpusched.api.handlers import daemon
from gpusched.api.handlers.jobs import selected
from gpusched.api.rate_limits import RateLimits, TokenBucket
from gpusched.api.render import JOB_FIELDS
from gpusched.api.server import build_app
from gpusched.api.service import ApiService
from gpusched.api.visibility import MASKED, Viewer
from gpusched.daemon.audit import PER_MINUTE, Audit
from gpusched.daemon.commit import AuditEvent
from gpusched.daemon.facade import DaemonFacade
from gpusched.errors import Forbidden, TooMany
from gpusched.model.commands import Caller, Hold, Release, Selection, Update
from gpusched.model.job import ArraySpec, Job
from gpusched.model.mentions import mention_job, mention_jobs
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import AccessSettings, LimitSettings, Settings
from gpusched.model.states import JobState
from gpusched.ports import JobFilter
from gpusched.testing import FakeClock, job

QUEUES = {
    "batch": QueueSettings("batch"),
    "lab": QueueSettings("lab", operators=("bob",)),
    "speech": QueueSettings("speech", parent="lab"),
    "vision": QueueSettings("vision", parent="lab"),
}


@pytest.fixture(autouse=True)
def daemon_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's own user may do everything: that is nobody of these, whoever runs the tests."""
    monkeypatch.setattr(access.os, "geteuid", lambda: 0)


def test_a_job_key_is_masked_unless_it_is_declared_public() -> None:
    assert JOB_FIELDS.keys() - {name for name, one in JOB_FIELDS.items() if one.is_public} == MASKED.keys()
    assert {"command", "work_dir", "comment", "key", "notify_to", "submit_line", "stdout_path"} < MASKED.keys()


@pytest.mark.parametrize("act", list(Act))
def test_rights_by_act(act: Act) -> None:
    settings = Settings(queue=QUEUES)
    theirs = job(1, uid=ANN.uid, user="ann", queue="vision")
    elsewhere = job(2, uid=ANN.uid, user="ann", queue="other")
    stranger = Caller(1002, "eve")
    assert may(ANN, act, theirs, settings)
    assert not may(stranger, act, theirs, settings)
    assert not may(BOB, act, elsewhere, settings)
    is_root_only = act in (Act.OUTPUT, Act.ATTACH, Act.REWRITE)
    assert may(BOB, act, theirs, settings) == (not is_root_only and act not in (Act.SCRIPT, Act.REPEAT, Act.ENTER))
    assert may(ROOT, act, theirs, settings) == (act not in (Act.REPEAT, Act.ENTER))


def test_the_owner_cannot_release_a_hold_of_others() -> None:
    lab = Lab(cpus=1)
    first, second = lab.submit(hold=True), lab.submit(array=ArraySpec("0-3"), hold=True)
    assert lab.ask(Hold(ROOT, (first, second + 1)))[0]["changed"] == [str(first), f"{second}_0"]
    again = lab.ask(Hold(ANN, (first,)), Hold(ROOT, (first,)))
    assert [answer["changed"] for answer in again] == [[], []]
    for held in (first, second + 1, second):
        (refused,) = lab.ask(Release(ANN, (held,)))
        assert isinstance(refused, Forbidden)
        assert "was held by an admin or operator, and ann cannot release it" in refused.message
    assert {lab.job(job_id).hold for job_id in (first, second + 1)} == {"admin"}
    assert lab.job(second).hold == "user"
    assert lab.ask(Release(ROOT, (first, second + 1)))[0]["changed"] == [str(first), f"{second}_0"]
    assert lab.ask(Release(ANN, (second,)))[0]["changed"] == [str(second)]
    assert [lab.job(job_id).hold for job_id in (first, second, second + 1)] == [None, None, None]


def test_hold_and_release_by_filter_affect_only_permitted_jobs() -> None:
    lab = Lab(cpus=1)
    running, mine, other = lab.submit(), lab.submit(name="a"), lab.submit(name="b")
    array = lab.submit(array=ArraySpec("0-3"), name="a")
    ((bobs,),) = [answer["ids"] for answer in lab.ask(lab.submission(BOB, name="a"))]
    lab.tick()
    assert lab.job(running).state is JobState.RUNNING
    everything = Selection(everything=True)
    (tried,) = lab.ask(Hold(ANN, filters=everything, dry_run=True))
    assert tried["changed"] == [str(mine), str(other), str(array)]
    assert lab.job(mine).hold is None
    assert lab.ask(Hold(ANN, filters=Selection(names=frozenset({"a"}))))[0]["changed"] == [str(mine), str(array)]
    assert lab.ask(Hold(ANN, filters=everything))[0] == {"changed": [str(other)], "unchanged": [], "running": []}
    named = Selection(states=frozenset({JobState.RUNNING}))
    assert lab.ask(Hold(ANN, filters=named))[0]["running"] == [str(running)]
    (refused,) = lab.ask(Hold(ANN, filters=Selection(users=frozenset({"bob"}))))
    assert isinstance(refused, Forbidden)
    assert lab.job(bobs).hold is None
    assert lab.ask(Hold(ROOT, filters=Selection(users=frozenset({"ann"}), names=frozenset({"b"}))))[0]["changed"]
    held = [str(running), str(mine), str(array)]
    assert lab.ask(Release(ANN, filters=everything))[0] == {"changed": held, "unchanged": []}
    assert lab.job(other).hold == "admin", "what others hold is theirs to release"


def test_going_first_in_the_own_queue_does_not_apply_to_others() -> None:
    lab = Lab(cpus=1, queue=QUEUES)
    lab.submit(queue="batch")
    (answer,) = lab.ask(lab.submission(BOB, queue="vision", nice=-100))
    (moved,) = answer["ids"]
    (refused,) = lab.ask(Update(BOB, (moved,), {"queue": "batch"}))
    assert isinstance(refused, Forbidden)
    assert refused.message.startswith("nice -100 would put the job ahead of other users' jobs, and bob is neither")
    assert lab.job(moved).spec.queue == "vision"
    assert lab.ask(Update(BOB, (moved,), {"queue": "speech"}))[0]["changed"] == [str(moved)]
    assert lab.ask(Update(BOB, (moved,), {"queue": "batch", "nice": 0}))[0]["changed"] == [str(moved)]
    # One that an admin has put first stays so, whatever else its owner changes.
    lab.ask(Update(ROOT, (moved,), {"nice": -5}))
    assert lab.ask(Update(BOB, (moved,), {"queue": "batch", "name": "mine"}))[0]["changed"] == [str(moved)]
    assert lab.job(moved).spec.nice == -5


def test_an_admin_is_a_current_member_of_the_group() -> None:
    user = pwd.getpwuid(1)
    group = grp.getgrgid(user.pw_gid).gr_name
    settings = Settings(access=AccessSettings(admin_group=group))
    assert access.is_admin(Caller(user.pw_uid, user.pw_name), settings)
    assert not access.is_admin(Caller(65533, "nobody-at-all"), settings)
    assert not access.is_admin(
        Caller(user.pw_uid, user.pw_name), Settings(access=AccessSettings(admin_group="no-such"))
    )


def test_texts_have_no_numbers_of_hidden_jobs() -> None:
    lab = Lab(access=AccessSettings(private_data=("jobs",)))
    one, other = lab.submit(), lab.submit()
    lab.ask(lab.submission(BOB))
    service = ApiService(DaemonFacade(lab.ticker))
    bob = Viewer(service, BOB)
    first, both = str(one), [str(one), str(other)]
    for text, whole, told in (
        (
            f"waits behind {mention_job(first)}, which",
            f"waits behind job {one}, which",
            "waits behind another job, which",
        ),
        (f"when {mention_jobs(both)} end", f"when jobs {one} and {other} end", "when other jobs end"),
        (mention_jobs([first, "3"]), f"jobs {one} and 3", "other jobs"),
        (mention_jobs([f"{one}_3", "3"]), f"jobs {one}_3 and 3", "other jobs"),
        (f"{mention_job(first, 'ann')} may run", f"job {one} of ann may run", "another job may run"),
        (f"{mention_job('3')} goes first", "job 3 goes first", "job 3 goes first"),
        ("runs 5 jobs at once", "runs 5 jobs at once", "runs 5 jobs at once"),
    ):
        assert bob.audience.text(text) == told
        assert Viewer(service, ROOT).audience.text(text) == whole


def test_the_status_counts_only_own_jobs_where_others_are_hidden() -> None:
    lab = Lab(cpus=1, access=AccessSettings(private_data=("jobs",)))
    lab.submit()
    lab.ask(lab.submission(BOB, array=ArraySpec("0-4")))
    lab.tick()
    service = ApiService(DaemonFacade(lab.ticker))

    def counts(caller: Caller) -> dict[str, int]:
        request = make_mocked_request("GET", "/v1/status", app=build_app(service))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(visibility, "caller_of", lambda request: caller)
            found = json.loads(asyncio.run(answering(daemon.status)(request)).body)["daemon"]["jobs"]  # type: ignore[arg-type]
        return {state: count for state, count in found.items() if count}

    assert counts(ROOT) == {"running": 1, "pending": 5}
    assert counts(ANN) == {"running": 1}
    assert counts(BOB) == {"pending": 5}
    assert counts(Caller(1002, "eve")) == {}


@pytest.mark.parametrize(
    ("caller", "private", "found"),
    [
        (ROOT, ("names",), [3, 4]),
        (ANN, ("names",), [2, 4]),
        (BOB, ("names",), [1, 3]),
        (Caller(1002, "eve"), ("names",), []),
        (BOB, ("jobs",), [1, 3]),
        (BOB, (), [3, 4]),
    ],
)
def test_jobs_by_name_reads_no_more_than_requested(
    caller: Caller, private: tuple[str, ...], found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(access=AccessSettings(private_data=private))
    for owner in (BOB, ANN, BOB, ANN):
        lab.ask(lab.submission(owner, name="train"))
    lab.tick(11)
    lab.tick(11)
    service = ApiService(DaemonFacade(lab.ticker))
    wanted = JobFilter(states=frozenset({JobState.COMPLETED}), names=frozenset({"train"}), limit=2)
    read: list[int] = []
    stored = lab.store.jobs

    def counted(which: JobFilter) -> list[Job]:
        jobs = stored(which)
        read.extend(job.id for job in jobs)
        return jobs

    monkeypatch.setattr(lab.store, "jobs", counted)
    assert [job.id for job in selected(Viewer(service, caller), wanted)] == found
    assert read == found


def test_a_bucket_grants_its_tokens_and_says_how_long_the_rest_takes() -> None:
    bucket = TokenBucket(10, now=0.0)
    assert [bucket.take(1, 10, 2.0, 0.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(1, 10, 2.0, 0.0) == 0.5
    assert bucket.take(1, 10, 2.0, 0.5) == 0.0
    assert bucket.take(25, 10, 2.0, 100.0) == 0.0
    assert bucket.take(1, 10, 2.0, 100.0) == 8.0


def test_requests_are_counted_per_user_and_not_for_root() -> None:
    clock = FakeClock()
    pace, limit = RateLimits(clock.now), LimitSettings(requests_per_s=1, requests_burst=10)
    for _ in range(10):
        pace.request(ANN, limit)
    with pytest.raises(TooMany, match="ann makes more than 1 requests per second") as caught:
        pace.request(ANN, limit)
    assert caught.value.retry_after_s == 1.0
    pace.request(BOB, limit)
    for _ in range(100):
        pace.request(ROOT, limit)
    clock.advance(1)
    pace.request(ANN, limit)


def test_bytes_in_flight_are_returned() -> None:
    pace = RateLimits(FakeClock().now)
    with pace.body(ANN, 150 << 20):
        with pytest.raises(TooMany), pace.body(ANN, 50 << 20):
            pass
        with pace.body(BOB, 50 << 20):
            pass
    with pace.body(ANN, 190 << 20):
        pass


def test_a_million_refusals_write_a_few_lines(tmp_path: Path) -> None:
    clock = FakeClock()
    settings = AccessSettings(audit_mib=0.01, audit_files=2)
    audit = Audit(str(tmp_path), clock.now, lambda: settings)
    audit.record(AuditEvent(BOB, "cancel", "job 1", "ann"))
    for _ in range(1000):
        audit.refused(ANN, "POST /v1/jobs/cancel", "job 2 belongs to bob, not to ann" + "x" * 5000)
    clock.advance(61)
    audit.poll()
    lines = [json.loads(line) for path in sorted(tmp_path.glob("refusals*")) for line in path.read_text().splitlines()]
    assert len(lines) == PER_MINUTE + 1
    assert [line["times"] for line in lines if "times" in line] == [1000 - PER_MINUTE]
    for _ in range(500):
        clock.advance(61)
        audit.refused(ANN, "GET /v1/snapshot", "only an admin may")
    assert len(list(tmp_path.glob("refusals*"))) == 3
    assert sum(path.stat().st_size for path in tmp_path.glob("refusals*")) < 3 * 0.011 * (1 << 20)
    (deed,) = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(deed)["owner"] == "ann"
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_failing_audit_record_stops_no_request(tmp_path: Path) -> None:
    audit = Audit(str(tmp_path / "gone"), FakeClock().now, AccessSettings)
    audit.record(AuditEvent(BOB, "cancel", "job 1", "ann"))
    assert audit.lost == 1
    (tmp_path / "gone").mkdir()
    audit.record(AuditEvent(BOB, "cancel", "job 1", "ann"))
    assert audit.lost == 0


def test_paths_of_the_system_and_of_a_trial_root_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_root", None)
    monkeypatch.setenv("GPUSCHED_HOME", "/somewhere")
    monkeypatch.delenv("GPUSCHED_CONFIG", raising=False)
    assert not paths.is_system()
    paths.serve_system()
    assert (paths.config_file(), paths.database()) == ("/etc/gpusched/config.toml", "/var/lib/gpusched/gpusched.db")
    assert (paths.socket_path(), paths.notify_file()) == (paths.SYSTEM_SOCKET, "/etc/gpusched/notify.toml")
    paths.serve_system("/tmp/x")
    assert (paths.state_dir(), paths.socket_path()) == ("/tmp/x/var/lib/gpusched", "/tmp/x/run/gpusched/api.sock")
    assert os.path.dirname(paths.config_file()) == "/tmp/x/etc/gpusched"


def test_clients_try_the_system_daemon_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "api.sock").touch()
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(tmp_path / "api.sock"))
    for name in ("GPUSCHED_HOME", "GPUSCHED_SOCKET", "GPUSCHED_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert paths.finds_system()
    assert paths.config_file() == "/etc/gpusched/config.toml"
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    assert not paths.finds_system()
    assert paths.config_file() == f"{tmp_path}/config.toml"
