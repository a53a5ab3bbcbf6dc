"""Users of one daemon who are strangers to each other, as real users of the kernel: every route, every act."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from typing import Any

import pytest
from people import ANN, BOB, EVE, NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.addons.simulate.recording import decode
from gpusched.api.openapi import build
from gpusched.api.routes import ROUTES
from gpusched.cli.gshow import describe
from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused

pytestmark = NEEDS_ROOT

SECRET = "hush-hush"

CONFIG = """
[access]
admin_group = "games"
private_data = {private}
[default]
queue = "vision"
[queue.lab]
operators = ["sys"]
[queue.vision]
parent = "lab"
"""

ADMINS_ALONE = {
    ("POST", "/v1/drain"): {"targets": ["0"]},
    ("POST", "/v1/undrain"): {"targets": ["0"]},
    ("POST", "/v1/mig"): {"target": "0", "layout": "7x1g.10gb"},
    ("POST", "/v1/down"): {"targets": ["n1"], "confirm": True},
    ("POST", "/v1/reservations"): {"name": "r", "start_at": 4e9, "duration_s": 60, "gpus": 1, "users": [BOB]},
    ("POST", "/v1/unreserve"): {"names": ["r"]},
    ("POST", "/v1/reload"): {},
    ("POST", "/v1/limits"): {"user": "root", "max_jobs": 0, "until_at": 4e9},
    ("POST", "/v1/limits/remove"): {"user": "root"},
    ("POST", "/v1/credits"): {"account": "a", "gpu_hours": 9},
    ("POST", "/v1/members"): {"account": "a", "add": [BOB]},
    ("POST", "/v1/queues/pause"): {"queue": "lab"},
    ("POST", "/v1/queues/resume"): {"queue": "lab"},
    ("POST", "/v1/settings-log/undo"): {"id": 1},
    ("POST", "/v1/shutdown"): {},
    ("POST", "/v1/preset/judge"): {},
    ("GET", "/v1/snapshot"): None,
}
ACTS = {
    "cancel": {},
    "hold": {},
    "release": {},
    "suspend": {},
    "resume": {},
    "requeue": {},
    "update": {"changes": {"time_limit_s": 60}},
}
OWN = {
    *(("POST", "/v1/jobs"), ("POST", "/v1/pipelines"), ("GET", "/v1/inside"), ("GET", "/v1/ended")),
    *(("POST", "/v1/steps"), ("POST", "/v1/steps/end")),
    *(("POST", f"/v1/web/{name}") for name in ("code", "sessions", "session/end", "serving")),
    *(("POST", "/v1/web/tokens"), ("POST", "/v1/web/tokens/revoke")),
}
"""What a stranger may do, as it is about their own jobs."""


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[SystemDaemon] = []

    def of(private: str = "[]", more: str = "") -> SystemDaemon:
        daemon = SystemDaemon(CONFIG.format(private=private) + more)
        made.append(daemon)
        daemon.start()
        return daemon

    yield of
    for daemon in made:
        daemon.close()


def a_secret(ann: Any, name: str = SECRET) -> tuple[str, str]:
    """A running job of this name and a pipeline of ann's, with a secret wherever else there is room for one."""
    job = ann.submit(
        script=f"#!/bin/sh\n# {SECRET}\nexec sleep 600\n",
        name=name,
        script_path=f"/home/{SECRET}/train.sh",
        env={"PATH": "/usr/bin:/bin", "TOKEN": SECRET},
        stdout="/dev/null",
        fallback=f"echo {SECRET}",
        key=SECRET,
        notify=["end"],
        notify_to=[f"{SECRET}@example.org"],
        gpus=1,
    )
    spec = {"argv": ["/bin/sleep", "600", SECRET], "work_dir": "/tmp", "stdout": f"/tmp/{SECRET}", "hold": True}
    spec["name"] = name
    step = {"step": SECRET, "spec": spec}
    pipeline = ann.call("POST", "/v1/pipelines", {"name": SECRET, "source": SECRET, "steps": [step]})["pipeline"]
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{job}")["job"]["state"] == "RUNNING", what="the job to run")
    return job, str(pipeline)


def answers(person: Any, job: str, pipeline: str) -> Iterator[tuple[str, str, Any]]:
    """What each route of the document tells a stranger who names this job; the routes must all be known here."""
    for path, operations in build(ROUTES)["paths"].items():
        for method in map(str.upper, operations):
            if (method, path) in OWN:
                continue
            where = path.replace("{id}", pipeline if "pipelines" in path else job)
            body: Any = ADMINS_ALONE.get((method, path))
            if path == "/v1/steps/cancel":
                body = {"id": job, "step": 0}
            if path.endswith(("/enter", "/connect")):
                body = {}
            if path.endswith("/connect"):
                where += f"?token=0a&run={job}.1"
            if path == "/v1/adopt":
                # Of root, like the first process of the machine.
                body = {"pid": 1}
            if method == "POST" and body is None:
                act = path.rpartition("/")[2]
                body = {} if path.endswith("/resume") and "pipelines" in path else {"ids": [job], **ACTS[act]}
            if method == "GET":
                where += {
                    "/v1/wait": f"?ids={job}&timeout_s=0",
                    "/v1/logs": f"?ids={job}",
                    "/v1/usage": f"?ids={job}",
                    "/v1/jobs": "?states=all",
                    "/v1/history": "?states=all",
                    "/v1/starts": "?states=all",
                    "/v1/steps": "?states=all",
                }.get(path, "")
            try:
                yield method, path, person.call(method, where, body)
            except GpuschedError as error:
                yield method, path, error


@pytest.mark.parametrize("private", ["[]", '["names"]'])
def test_users_can_neither_read_nor_change_foreign_jobs(make: Any, private: str) -> None:
    daemon = make(private)
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    name = "train" if private == "[]" else SECRET
    job, pipeline = a_secret(ann, name)
    before = ann.call("GET", f"/v1/jobs/{job}")["job"]
    seen = 0
    for method, path, answer in answers(bob, job, pipeline):
        told = f"{answer.message} {answer.hint}" if isinstance(answer, GpuschedError) else repr(answer)
        assert SECRET not in told, (path, told)
        if method == "POST" or (method, path) in ADMINS_ALONE:
            assert isinstance(answer, Forbidden), (path, answer)
            assert answer.hint, path
        seen += 1
    assert seen >= 35
    after = ann.call("GET", f"/v1/jobs/{job}")["job"]
    for key in ("state", "hold", "time_limit_s", "run", "events"):
        assert after[key] == before[key]
    assert after["name"] == name
    row = next(one for one in bob.call("GET", "/v1/jobs")["jobs"] if one["id"] == job)
    shown_name = "-" if private == '["names"]' else name
    assert (row["name"], row["command"], row["work_dir"], row["stdout_path"]) == (shown_name, "-", "-", None)
    assert (row["user"], row["state"], len(row["gpus"])) == (ANN, "RUNNING", 1)
    found = [one["id"] for one in bob.call("GET", f"/v1/jobs?names={name}")["jobs"]]
    assert found == ([] if private == '["names"]' else [job, str(int(job) + 1)])
    shown = describe(bob.call("GET", f"/v1/jobs/{job}")["job"])
    assert f"This job belongs to {ANN}" in shown
    assert "Alerts" not in shown
    refused = {line["what"] for line in daemon.records("refusals.jsonl")}
    assert "POST /v1/jobs/cancel" in refused
    assert {line["user"] for line in daemon.records("refusals.jsonl")} == {BOB}
    assert daemon.records() == []


def test_hidden_jobs_are_not_counted(make: Any) -> None:
    daemon = make('["jobs", "usage", "accounts", "reservations"]')
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    job, pipeline = a_secret(ann)
    # The same questions about what does not exist are answered in the same words.
    real = {(method, path): answer for method, path, answer in answers(bob, job, pipeline)}
    none = {(method, path): answer for method, path, answer in answers(bob, "770", "p770")}
    for (method, path), answer in real.items():
        if path in ("/v1/status", "/v1/cluster", "/v1/doctor", "/v1/accounts", "/v1/starts", "/v1/queues"):
            continue
        if path == "/v1/metrics":
            assert isinstance(answer, Forbidden)
        if isinstance(answer, GpuschedError):
            other = none[method, path]
            assert isinstance(other, GpuschedError), path
            same = other.message.replace("770", job).replace(f"p{job}", pipeline)
            assert (type(answer), answer.message, answer.hint) == (type(other), same, other.hint), path
        assert SECRET not in repr(answer)
        # The board has a part about the daemon, which is ann's name, too.
        shown = repr(answer).replace("'daemon': {", "") if path == "/v1/board" else repr(answer)
        assert f"'{ANN}'" not in shown, path
    for path in ("/v1/jobs?states=all", "/v1/history?states=all", f"/v1/jobs?ids={job},770"):
        assert bob.call("GET", path)["jobs"] == []
    assert bob.refusal("GET", f"/v1/jobs?ids={job}").message == f"there is no job {job}"
    assert bob.call("GET", "/v1/pipelines")["pipelines"] == []
    assert sum(bob.call("GET", "/v1/status")["daemon"]["jobs"].values()) == 0
    cluster = bob.call("GET", "/v1/cluster")
    assert [gpu["booked_by"] for gpu in cluster["gpus"]] == [[], []]
    assert {row["pending"] + row["running"] for row in cluster["queues"]} == {0}
    for act in ("cancel", "hold", "release", "suspend", "resume", "requeue"):
        for named in (pipeline, "p770"):
            error = bob.refusal("POST", f"/v1/jobs/{act}", {"ids": [named]})
            assert (type(error), error.message) == (NotFound, f"there is no pipeline {named}")
    for dependency in (job, "770"):
        spec = {"argv": ["/bin/true"], "work_dir": "/tmp", "dependency": f"afterok:{dependency}"}
        error = bob.refusal("POST", "/v1/jobs", {"spec": spec})
        assert (type(error), error.message) == (Refused, f"there is no job {dependency} to depend on")
    assert bob.call("POST", "/v1/jobs/cancel", {"ids": [job, "770"]})["missing"] == [job, "770"]
    own = bob.submit("/bin/sleep", "600", gpus=2)
    found = bob.call("GET", f"/v1/jobs/{own}/why")["why"]
    assert f"job {job}" not in repr(found)
    assert "another job" in found["text"]
    assert found["of"] is None
    assert any(line["target"] == f"job {job}" for line in daemon.records("refusals.jsonl") if "target" in line)


def test_acts_of_admins_and_operators_are_recorded(make: Any) -> None:
    daemon = make('["jobs"]')
    ann, eve, operator = daemon.person(ANN), daemon.person(EVE), daemon.person("sys")
    job = ann.submit("/bin/sleep", "600", name=SECRET, hold=True)
    assert operator.call("GET", f"/v1/jobs/{job}")["job"]["name"] == SECRET
    assert operator.call("POST", "/v1/jobs/release", {"ids": [job]})["changed"] == [job]
    assert operator.call("POST", "/v1/jobs/hold", {"ids": [job]})["changed"] in ([job], [])
    ann.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    # Released for a moment, it may have started.
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{job}")["job"]["state"] == "CANCELLED", what="the end of the job")
    job = ann.submit("/bin/sleep", "600", begin_at=4e9)
    assert operator.call("POST", "/v1/jobs/hold", {"ids": [job]})["changed"] == [job]
    error = ann.refusal("POST", "/v1/jobs/release", {"ids": [job]})
    assert "was held by an admin or operator" in error.message
    assert eve.call("POST", "/v1/jobs/release", {"ids": [job]})["changed"] == [job]
    # Neither may have anything run as its owner.
    for person in (operator, eve):
        for changes in ({"fallback": "id"}, {"notify": ["end"], "notify_to": ["me@example.org"]}):
            assert isinstance(person.refusal("POST", "/v1/jobs/update", {"ids": [job], "changes": changes}), Forbidden)
        assert isinstance(person.refusal("POST", "/v1/jobs", {"resubmit": [job]}), Forbidden)
    assert isinstance(operator.refusal("GET", f"/v1/jobs/{job}/script"), NotFound | Forbidden)
    assert eve.call("GET", f"/v1/jobs/{job}/script")["argv"] == ["/bin/sleep", "600"]
    assert isinstance(operator.refusal("POST", "/v1/drain", {"targets": ["0"]}), Forbidden)
    eve.call("POST", "/v1/drain", {"targets": ["0"]})
    # Before others by a nice value below 0: whoever has a say in the queue.
    assert isinstance(ann.refusal("POST", "/v1/jobs/update", {"ids": [job], "changes": {"nice": -5}}), Forbidden)
    operator.call("POST", "/v1/jobs/update", {"ids": [job], "changes": {"nice": -5}})
    # A filter that names nobody is about one's own jobs.
    assert eve.call("POST", "/v1/jobs/cancel", {"all": True})["cancelled"] == []
    assert isinstance(ann.refusal("POST", "/v1/jobs/cancel", {"users": [EVE]}), Forbidden)
    assert eve.call("POST", "/v1/jobs/cancel", {"users": [ANN]})["cancelled"] == [job]
    deeds = [(line["user"], line["what"], line["target"]) for line in daemon.records()]
    assert ("sys", "hold", f"job {job}") in deeds
    assert (EVE, "cancel", f"job {job}") in deeds
    assert (EVE, "drain") in [deed[:2] for deed in deeds]
    assert all(line["owner"] == ANN for line in daemon.records() if line["target"].startswith("job"))
    assert {line["pid"] for line in daemon.records() if line["user"] == EVE} == {eve.pid}


def test_only_admins_read_the_policy_input_and_it_is_recorded(make: Any) -> None:
    daemon = make()
    ann, bob, eve = daemon.person(ANN), daemon.person(BOB), daemon.person(EVE)
    job, _ = a_secret(ann)
    error = bob.refusal("GET", "/v1/snapshot")
    assert isinstance(error, Forbidden)
    assert error.message == f"only an admin may see the policy's whole input, not {BOB}"
    # An operator of a queue has a say in its jobs, and none in what all are told by.
    assert isinstance(daemon.person("sys").refusal("GET", "/v1/snapshot"), Forbidden)
    assert daemon.records() == []
    found = eve.call("GET", "/v1/snapshot")
    recording = decode(found)
    assert [held.job_id for held in recording.snapshot.allocations] == [int(job)]
    assert recording.settings.access.admin_group == "games"
    assert SECRET not in repr(found), "what runs, and where, is not the policy's to know"
    assert [(line["user"], line["what"], line["target"]) for line in daemon.records()] == [
        (EVE, "record", "the policy's input")
    ]
    refused = [line["user"] for line in daemon.records("refusals.jsonl") if line["what"] == "GET /v1/snapshot"]
    assert refused == [BOB, "sys"]


def test_jobs_run_as_their_users_and_daemon_files_belong_to_root(make: Any) -> None:
    daemon = make()
    ann = daemon.person(ANN)
    out = daemon.home / "out"
    out.mkdir()
    out.chmod(0o777)
    job = ann.submit("/usr/bin/id", "-un", stdout=f"{out}/who")
    wait_until(lambda: ann.call("GET", f"/v1/wait?ids={job}&timeout_s=5")["done"], what="the job to end")
    assert (out / "who").read_text().strip() == ANN
    ann.refusal("POST", "/v1/shutdown", {})
    modes = {
        daemon.socket: 0o666,
        daemon.socket.parent: 0o755,
        daemon.state_dir: 0o711,
        daemon.state_dir / "gpusched.db": 0o600,
        daemon.state_dir / "log": 0o700,
        daemon.state_dir / "log" / "refusals.jsonl": 0o600,
        daemon.state_dir / "spool": 0o711,
    }
    for path, mode in modes.items():
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
        assert path.stat().st_uid == 0


def test_idle_connections_of_one_user_do_not_lock_out_others(make: Any) -> None:
    daemon = make(more="[limit]\nconnections_per_user = 30\nconnections = 60\n")
    # Root's own are not counted: those of a real user are.
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    crowd = [daemon.person(EVE) for _ in range(35)]
    for one in crowd:
        one.call("GET", "/v1/jobs")
    assert bob.call("GET", "/v1/jobs")["jobs"] == []
    assert ann.submit("/bin/true")
    # Those that were given up for later ones connect again without noticing.
    for one in crowd:
        assert one.submit("/bin/true")


def test_excess_requests_are_deferred_and_clients_wait(make: Any) -> None:
    daemon = make(more="[limit]\nrequests_per_s = 2\nrequests_burst = 10\n")
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    began = time.monotonic()
    for _ in range(13):
        ann.call("GET", "/v1/jobs")
    assert time.monotonic() - began > 0.5
    bob.call("GET", "/v1/jobs")
    put_off = [
        line["user"] for line in daemon.records("refusals.jsonl") if "requests per second" in line.get("why", "")
    ]
    assert set(put_off) == {ANN}


def test_the_share_of_one_user_in_the_table_is_limited(make: Any) -> None:
    daemon = make(more="[limit]\njobs_per_user = 3\nstored_mib_per_user = 1\nsubmitted_mib_per_user = 4\n")
    ann, bob = daemon.person(ANN), daemon.person(BOB)
    for _ in range(3):
        ann.submit("/bin/true", hold=True)
    error = ann.refusal("POST", "/v1/jobs", {"spec": {"argv": ["/bin/true"]}})
    assert "the limit of 3 per user" in error.message
    assert "jobs_per_user" in error.hint
    ids = [bob.submit(script="#!/bin/sh\n" + "# 0" * 200_000)]
    error = bob.refusal("POST", "/v1/jobs", {"spec": {"script": "#!/bin/sh\n#" + "x" * 600_000}})
    assert "the limit of 1 MiB" in error.message
    # The same text again takes nothing more, until there is too much of it within a day.
    spec = {"script": "#!/bin/sh\n" + "# 0" * 200_000}
    for _ in range(4):
        bob.call("POST", "/v1/jobs/cancel", {"ids": ids})
        ids.append(bob.submit(**spec))
    assert "within a day" in bob.refusal("POST", "/v1/jobs", {"spec": spec}).message
    daemon.submit("/bin/true")


def test_silent_and_partial_requests_are_cut_off(make: Any) -> None:
    daemon = make()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket))
        sock.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost")
        sock.settimeout(30)
        assert sock.recv(100) == b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket))
        sock.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        sock.settimeout(30)
        assert b"has no Content-Length" in sock.recv(4000)
