"""What one user's requests cost the others: time, memory, rows of the database. Each refusal is told and recorded."""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

import pytest
from attacks import as_user, connect, daemon_pid, resident_mib
from people import ANN, BOB, EVE, NEEDS_ROOT, Person

from gpusched.api.arrays import MOST_IDS, read_array
from gpusched.api.rate_limits import BUSY_PART, FREE_S, RateLimits
from gpusched.api.requests import MOST_NAMES, MOST_PARTS, check_parts
from gpusched.api.resources import request_values
from gpusched.api.schema import SPEC_FIELDS, check_fields
from gpusched.errors import Refused, TooMany, UsageError
from gpusched.model.commands import Caller
from gpusched.model.hostlist import expand
from gpusched.model.settings import LimitSettings
from gpusched.model.tasks import parse_tasks

SOON_S = 5.0
"""Of processor time: these are refused in a few milliseconds; without their bounds they take minutes, or all memory."""


def refused_soon(deed: Any, kind: type[Exception] = UsageError) -> str:
    began = time.process_time()
    with pytest.raises(kind) as caught:
        deed()
    assert time.process_time() - began < SOON_S
    return str(caught.value)


LARGE: dict[str, dict[str, Any]] = {
    "a path": {"stdout": "x" * 5000},
    "a dependency": {"dependency": "afterok" + ":1" * 5000},
    "an array": {"array": ",".join(map(str, range(0, 20_000, 2)))},
    "a constraint": {"constraint": "(" * 5000},
    "many licenses": {"licenses": {f"license{number}": 1 for number in range(1000)}},
    "many nodes": {"nodelist": ["n" * 40] * 2000},
    "many words": {"retry_on": ["oom"] * 2000},
    "many targets": {"notify_to": ["phone"] * 20_000},
    "a whole number": {"cpus": 10**400},
    "another": {"gpus": 10**400},
    "a negative one": {"nice": -(10**400)},
    "no number": {"cpus": float("nan")},
}


@pytest.mark.parametrize("name", LARGE)
def test_absurdly_large_requests_are_refused(name: str) -> None:
    message = refused_soon(lambda: check_fields(LARGE[name], SPEC_FIELDS))
    assert next(iter(LARGE[name])) in message
    assert len(message) < 300


def test_a_short_text_cannot_expand_to_billions() -> None:
    again = ",".join(["0-4000000"] * 1500)
    assert "repeats tasks" in refused_soon(lambda: parse_tasks(again), ValueError)
    refused_soon(lambda: read_array({"array": again}))
    sweep = [f"n{number}=0..3999999" for number in range(90)]
    assert "combinations" in refused_soon(lambda: read_array({"sweep": sweep}))
    assert "names" in refused_soon(lambda: read_array({"sweep": [f"n{number}=1" for number in range(101)]}))
    refused_soon(lambda: expand("n[" + ",".join(["1-4096"] * 8000) + "]"), ValueError)
    refused_soon(lambda: expand(",".join(["n[1-4096]"] * 8000)), ValueError)
    refused_soon(lambda: request_values({"nodelist": ["n[1-4096]"] * 8000}))


def test_placeholder_matching_is_time_limited() -> None:
    began = time.process_time()
    texts = [
        "{" + "".join(chr(97 + (number >> 4 * place) % 16) for place in range(6)) + "}" for number in range(60_000)
    ]
    read_array({"sweep": [f"zzzzzz{number}=1" for number in range(100)], "argv": ["".join(texts)]})
    assert time.process_time() - began < SOON_S


def test_values_are_counted_before_expansion() -> None:
    check_parts(b"[" + b"[]," * (MOST_PARTS // 2 - 10) + b"[]]")
    assert "values" in refused_soon(lambda: check_parts(b"[" + b"[]," * (MOST_PARTS // 2 + 10) + b"[]]"))
    assert "values" in refused_soon(lambda: check_parts(b'["' + b'","' * (2 * MOST_PARTS + 10) + b'"]'))
    # Commas and brackets within texts are no values.
    check_parts(json.dumps({"script": '#!,"\\{[,' * (MOST_PARTS // 3)}).encode())


def test_expensive_text_is_refused_early() -> None:
    """A text of commas alone kept the daemon for half a minute, names that are like no other and long numbers for
    seconds."""
    began = time.process_time()
    check_parts(b'{"script": "' + b"," * (85 << 20) + b'"}')
    assert time.process_time() - began < SOON_S
    names = b",".join(b'"%d":1' % number for number in range(MOST_NAMES + 10))
    assert "names" in refused_soon(lambda: check_parts(b"{" + names + b"}"))
    assert "digits" in refused_soon(lambda: check_parts(b"[" + b"123456789" * 10_000 + b"]"))
    check_parts(b'["' + b"123456789" * 10_000 + b'"]')


def pace_at(times: list[float]) -> tuple[RateLimits, Caller, LimitSettings]:
    return RateLimits(lambda: times[0]), Caller(4242, "ann"), LimitSettings(requests_per_s=10.0, requests_burst=20)


def test_processing_time_counts_as_requests() -> None:
    now = [0.0]
    pace, ann, limit = pace_at(now)
    for _ in range(100):
        pace.spent(ann, FREE_S, limit)
    pace.request(ann, limit)
    pace.spent(ann, FREE_S + 2.0, limit)
    with pytest.raises(TooMany, match="expensive"):
        pace.request(ann, limit)
    # Whoever was quiet has used two seconds of burst; now it takes until half of all time has been everybody's.
    now[0] += 2.0 / BUSY_PART
    pace.request(ann, limit)
    pace.request(Caller(4243, "bob"), limit)


def test_writes_of_updates_count_like_submissions() -> None:
    now = [0.0]
    pace, ann, _ = pace_at(now)
    limit = LimitSettings(submitted_mib_per_user=1.0)
    pace.check_writing(ann, limit)
    pace.written(ann, 3 << 20, limit)
    with pytest.raises(Refused, match="1 MiB of jobs, scripts, environments and changes within a day"):
        pace.check_writing(ann, limit)
    now[0] += 2.1 * 86400
    pace.check_writing(ann, limit)


def test_a_submission_larger_than_the_allowance_waits_for_all_of_it_and_is_owed_from_then_on() -> None:
    now = [0.0]
    pace, ann, _ = pace_at(now)
    limit = LimitSettings(submitted_mib_per_user=1.0)
    pace.submission(ann, [], 3 << 20, limit)
    now[0] += 2.9 * 86400
    with pytest.raises(Refused, match="ann has submitted 1 MiB"):
        pace.submission(ann, [], 3 << 20, limit)
    now[0] += 0.2 * 86400
    pace.submission(ann, [], 3 << 20, limit)


@NEEDS_ROOT
def test_a_history_is_bounded(make: Any) -> None:
    daemon = make("[limit]\nsubmitted_mib_per_user = 1\n")
    ann = daemon.person(ANN)
    ids = [ann.submit("/bin/true", hold=True) for _ in range(50)]

    def change_for_ever() -> None:
        for number in range(200):
            ann.call("POST", "/v1/jobs/update", {"ids": ids, "changes": {"fallback": f"echo {number} " + "x" * 20_000}})

    with pytest.raises(Refused, match="within a day, the maximum"):
        change_for_ever()
    for act in ("hold", "release", "requeue"):
        assert "the maximum" in ann.refusal("POST", f"/v1/jobs/{act}", {"ids": ids}).message
    # Whoever has used up theirs can still be rid of what they have.
    assert ann.call("GET", "/v1/jobs")["jobs"]
    assert sum(path.stat().st_size for path in daemon.state_dir.glob("gpusched.db*")) < 64 << 20
    assert daemon.person(BOB).submit("/bin/true")


@NEEDS_ROOT
def test_many_tasks_are_named_as_an_array_or_in_parts(make: Any) -> None:
    daemon = make()
    ann = daemon.person(ANN)
    job = ann.submit("/bin/true", array="0-99999", hold=True)
    for named in ([f"{job}_[0-99999]"], [f"{job}_[0-{MOST_IDS - 1}]", f"{job}_[{MOST_IDS}-{MOST_IDS + 5}]"]):
        for act in ("hold", "cancel"):
            error = ann.refusal("POST", f"/v1/jobs/{act}", {"ids": named})
            assert isinstance(error, UsageError)
            assert str(MOST_IDS) in error.message
    assert str(MOST_IDS) in ann.refusal("GET", f"/v1/jobs?ids={job}_[0-99999]").message
    assert str(MOST_IDS) in ann.refusal("POST", "/v1/jobs/hold", {"ids": list(range(1, MOST_IDS + 2))}).message
    assert ann.call("POST", "/v1/jobs/cancel", {"ids": [job]})["cancelled"] == [job]


def answer_to(person: str, path: Any, data: bytes) -> bytes:
    """What this user is told who sends these bytes."""

    def ask() -> bytes:
        with connect(path) as sock:
            sock.sendall(data)
            said = b""
            while part := sock.recv(65536):
                said += part
                if b"\r\n\r\n" in said:
                    break
            return said

    return as_user(person, ask)


@NEEDS_ROOT
def test_a_compression_bomb_is_not_unpacked(make: Any) -> None:
    daemon = make()
    before = resident_mib(daemon_pid(daemon))
    body = zlib.compress(b'{"spec":"' + b"x" * (200 << 20) + b'"}', 9)
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(5):
        said = answer_to(BOB, daemon.socket, head.encode() + body)
        assert b"400" in said.split(b"\r\n")[0]
    assert resident_mib(daemon_pid(daemon)) - before < 40


@NEEDS_ROOT
def test_non_http_traffic_fills_no_log(make: Any) -> None:
    daemon = make()
    daemon.person(BOB).call("GET", "/v1/status")
    log = daemon.state_dir / "log" / "gpuschedd.log"
    before = log.stat().st_size
    for data in (b"\0\1\2\r\n\r\n", b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx\r\n\r\n"):
        for _ in range(20):
            answer_to(BOB, daemon.socket, data)
    for _ in range(20):
        daemon.people[0].refusal("POST", "/v1/reload", {})
    assert log.stat().st_size - before < 2000


@NEEDS_ROOT
def test_every_refusal_has_a_sentence_and_a_record(make: Any) -> None:
    daemon = make(
        '[access]\nadmin_group = "games"\nprivate_data = ["jobs"]\n'
        "[limit]\nrequests_per_s = 1\nrequests_burst = 60\nconnections_per_user = 5\n"
    )
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job = ann.submit("/bin/sleep", "600")
    asked: list[tuple[str, str, Any]] = [
        *((("POST", f"/v1/jobs/{act}", {"ids": [job]})) for act in ("cancel", "hold", "requeue", "suspend", "resume")),
        ("GET", f"/v1/jobs/{job}", None),
        ("GET", f"/v1/jobs/{job}/script", None),
        ("GET", f"/v1/logs?ids={job}", None),
        ("POST", "/v1/jobs/cancel", {"users": [ANN]}),
        ("POST", "/v1/drain", {"targets": ["0"]}),
        ("POST", "/v1/shutdown", {}),
        ("GET", "/v1/snapshot", None),
        ("POST", "/v1/jobs", {"spec": {"argv": ["/bin/true"], "nice": -1}}),
    ]
    for method, path, body in asked:
        error = bob.refusal(method, path, body)
        assert error.message, path
        assert error.hint, path
    lines = daemon.records("refusals.jsonl")
    assert {line["user"] for line in lines} == {BOB}
    assert all(line["pid"] == bob.pid and line["why"] for line in lines)
    assert {line["what"] for line in lines} >= {f"{method} {path.partition('?')[0]}" for method, path, _ in asked[5:]}

    def flood() -> bytes:
        with connect(daemon.socket) as sock:
            said = b""
            for _ in range(200):
                sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
                said = sock.recv(65536)
                if said.startswith(b"HTTP/1.1 429"):
                    break
            return said

    assert b"requests per second" in as_user(EVE, flood)
    assert any("requests per second" in line["why"] for line in daemon.records("refusals.jsonl") if line["user"] == EVE)


@NEEDS_ROOT
def test_foreign_text_cannot_control_a_terminal(make: Any) -> None:
    import os
    import subprocess
    import sys

    daemon = make('[access]\nadmin_group = "games"\n')
    ann: Person = daemon.person(ANN)
    evil = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\n\u2028x"
    job = ann.submit(
        "/bin/sh", "-c", f"echo {evil}; exec sleep 600", name=evil, env={"PATH": "/bin", "X": evil}, key="k"
    )
    ann.submit("/bin/true", work_dir=f"/tmp/{evil}", name="b" + evil)
    ann.submit(
        "/bin/true", hold=True, fallback=f"echo {evil}", constraint=None, stdout=f"/tmp/{evil}", sweep=[f"x={evil}"]
    )
    steps = [{"step": "a", "spec": {"argv": ["/bin/true", evil], "name": evil, "hold": True, "work_dir": "/tmp"}}]
    ann.call("POST", "/v1/pipelines", {"name": evil, "source": evil, "steps": steps})
    ann.call("POST", "/v1/jobs/cancel", {"names": ["nothing" + evil]})
    env = {**os.environ, "GPUSCHED_SOCKET": str(daemon.socket), "COLUMNS": "200"}
    commands = [
        *(["gq", "-a"], ["gq", "--tree"], ["gq", "-a", "--json"], ["gshow", job], ["gshow", "2"], ["gshow", "p1"]),
        *(
            ["ghist"],
            ["ginfo"],
            ["gq", "--why", "3"],
            ["gcancel", evil],
            ["glogs", "2"],
            ["gq", "-n", evil],
            ["gshow", "3"],
        ),
    ]
    for command, *arguments in commands:
        code = f"from gpusched.cli.{command} import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, check=False)
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        assert "Traceback" not in said, said
        strange = {char for char in said if not char.isprintable()} - {"\n"}
        assert not strange, (command, arguments, strange)
    for name in ("audit.jsonl", "refusals.jsonl"):
        for line in daemon.records(name):
            assert line
