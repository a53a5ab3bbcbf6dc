"""The API for programs at a system's daemon: tokens, what each scope may do with whose jobs, and refusals."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from people import ANN, BOB, EVE, NEEDS_ROOT, Person, SystemDaemon
from support import wait_until
from web_host import Answer, Visitor, WebHost

from gpusched.addons.web.api import WRONG_BURST, routes
from gpusched.addons.web.settings import CONTROL, SUBMIT
from gpusched.addons.web.tokens import MOST_AT_ONCE, PREFIX, READ, SCOPES, scope_of

pytestmark = NEEDS_ROOT

OPERATOR, ADMIN = "www-data", "backup"
# The web process of the test is the test, which runs as root.
CONFIG = f"""
[web]
user = "root"
allow = ["control", "submit"]
[access]
admin_group = "{ADMIN}"
private_data = ["jobs"]
[queue.lab]
operators = ["{OPERATOR}"]
[default]
queue = "lab"
"""


class Site:
    """A daemon, its web process, and people with tokens."""

    def __init__(self) -> None:
        self.daemon = SystemDaemon(CONFIG)
        self.daemon.start()
        self.host = WebHost(str(self.daemon.socket), allow=("control", "submit"))
        self.people = {user: self.daemon.person(user) for user in (ANN, BOB, EVE, OPERATOR, ADMIN)}
        self.made = 0

    def token(self, user: str, *scope: str, **more: Any) -> str:
        self.made += 1
        body = {"name": f"t{self.made}", "scope": list(scope), "lasts_s": 3600, **more}
        return str(self.people[user].call("POST", "/v1/web/tokens", body)["token"])

    def close(self) -> None:
        self.host.close()
        self.daemon.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _end_tokens(site: Site) -> Iterator[None]:
    yield
    for one in site.people[ADMIN].call("GET", "/v1/web/tokens?all=1")["tokens"]:
        site.people[ADMIN].call("POST", "/v1/web/tokens/revoke", {"name": one["name"], "user": one["user"]})


def ask(host: WebHost, token: str | None, method: str, path: str, body: Any = None, **headers: Any) -> Answer:
    """A request of a program."""
    sent: dict[str, str | None] = {"Content_Type": "application/json", "Origin": None}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    text = None if method == "GET" else json.dumps({} if body is None else body)
    return Visitor(host).ask(method, path, text, **{**sent, **headers})


def error_of(answer: Answer) -> dict[str, Any]:
    return dict(json.loads(answer.text)["error"])


def body_of(path: str, job: str) -> dict[str, Any]:
    spec = {"argv": ["/bin/true"], "work_dir": "/tmp", "stdout": "/dev/null", "env": {"PATH": "/bin"}, "hold": True}
    if path == "/v1/jobs":
        return {"spec": spec}
    del spec["env"]
    if path == "/v1/pipelines":
        return {"name": "p", "source": "", "steps": [{"step": "a", "spec": spec}]}
    return {} if "pipelines" in path else {"ids": [job]}


@pytest.mark.parametrize("user", [ANN, EVE, OPERATOR])
@pytest.mark.parametrize("scope", SCOPES)
def test_each_route_takes_its_scope_and_the_rights_of_the_tokens_user(site: Site, scope: str, user: str) -> None:
    token = site.token(user, scope)
    for method, path in routes():
        ann = site.people[ANN]
        job = ann.submit("true", hold=True)
        if "pipelines/{id}" in path:
            steps = body_of("/v1/pipelines", job)
            job = str(ann.call("POST", "/v1/pipelines", steps)["pipeline"])
        where = "/api" + path.replace("{id}", job) + (f"?ids={job}&timeout_s=0" if path == "/v1/wait" else "")
        answer = ask(site.host, token, method, where, body_of(path, job))
        needed = scope_of(method, path)
        names_the_job = "{id}" in path or path == "/v1/wait" or needed == CONTROL
        if needed not in (READ, scope):
            assert answer.status == 403, (path, answer.text)
            assert f"may not {needed}" in error_of(answer)["message"]
        elif user == EVE and names_the_job:
            assert answer.status == 404, (path, answer.text)
        elif path.endswith(("/tail", "/log")):
            # It has no run yet; who reads the output of one is tried elsewhere.
            assert answer.status in (403, 404), (path, answer.text)
        elif user == OPERATOR and "pipelines/{id}" in path:
            # Of their owner alone, as by command.
            assert answer.status in (403, 404), (path, answer.text)
        else:
            # 409: a job on hold cannot be resumed, and the like.
            assert answer.status in (200, 409), (path, answer.text)
        if (needed not in (READ, scope) or user == EVE) and "pipelines" not in path:
            assert ann.call("GET", f"/v1/jobs/{job}")["job"]["hold"] == "user", path


def test_what_is_not_for_tokens_is_not_there(site: Site) -> None:
    token, job = site.token(ANN, *SCOPES), site.people[ANN].submit("true", hold=True)
    for method, path in (
        ("GET", f"/v1/jobs/{job}/script"),
        ("GET", "/v1/snapshot"),
        ("POST", "/v1/drain"),
        ("POST", "/v1/shutdown"),
        ("POST", "/v1/jobs/update"),
        ("POST", "/v1/web/tokens"),
        ("POST", "/v1/web/code"),
        ("GET", "/v1/web/session"),
        ("DELETE", "/v1/jobs"),
        ("GET", ""),
    ):
        answer = ask(site.host, token, method, f"/api{path}", {})
        assert (answer.status, error_of(answer)["code"]) == (404, "not_found"), path
    # And the daemon refuses what a broken web process would pass on.
    for path in ("/v1/web/tokens", "/v1/drain", "/v1/jobs/update", "/v1/shutdown"):
        status, found = site_ask(site, token, path)
        assert (status, "tokens may not use" in found["error"]["message"]) == (403, True), path


def site_ask(site: Site, token: str, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """As a web process that passes everything on."""
    import http.client

    connection = http.client.HTTPConnection("gpusched")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(site.daemon.socket))
    try:
        connection.request("POST", path, "{}", {"Gpusched-Token": token, **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_answers_are_those_of_the_socket(site: Site) -> None:
    ann = site.people[ANN]
    job = ann.submit("true")
    ann.call("GET", f"/v1/wait?ids={job}&timeout_s=60")
    token = site.token(ANN, READ)
    for path in (f"/v1/jobs/{job}", f"/v1/jobs?ids={job}", f"/v1/wait?ids={job}", "/v1/queues"):
        assert json.loads(ask(site.host, token, "GET", f"/api{path}").text) == ann.call("GET", path), path
    for path in ("/v1/jobs/999999", "/v1/jobs?states=sleeping", "/v1/wait?ids="):
        answer, error = ask(site.host, token, "GET", f"/api{path}"), ann.refusal("GET", path)
        assert (error_of(answer)["message"], error_of(answer)["code"]) == (error.message, error.code)


def test_the_story_of_a_job_names_the_token(site: Site) -> None:
    token = site.token(ANN, SUBMIT, CONTROL, name="nightly")
    made = ask(site.host, token, "POST", "/api/v1/jobs", body_of("/v1/jobs", ""))
    job = json.loads(made.text)["job"]["id"]
    ask(site.host, token, "POST", "/api/v1/jobs/release", {"ids": [job]})
    ask(site.host, token, "POST", "/api/v1/jobs/cancel", {"ids": [job]})
    texts = [event["text"] for event in site.people[ANN].call("GET", f"/v1/jobs/{job}")["job"]["events"]]
    for word in ("submitted", "released"):
        assert any(text.startswith(f"{word} by {ANN} through token nightly") for text in texts), texts


def test_acts_on_others_jobs_are_audited_with_the_token(site: Site) -> None:
    job = site.people[ANN].submit("true", hold=True)
    token = site.token(OPERATOR, CONTROL, name="guard")
    assert ask(site.host, token, "POST", "/api/v1/jobs/cancel", {"ids": [job]}).status == 200
    made, record = site.daemon.records()[-2:]
    assert (made["what"], made["target"]) == ("token", "made guard: control, read")
    assert (record["user"], record["through"], record["target"]) == (OPERATOR, "token guard", f"job {job}")


def test_an_idempotency_key_makes_one_job(site: Site) -> None:
    token, path = site.token(ANN, SUBMIT), "/api/v1/jobs"
    body = body_of("/v1/jobs", "")
    first, again = (ask(site.host, token, "POST", path, body, Idempotency_Key="night-1") for _ in range(2))
    one, two = json.loads(first.text), json.loads(again.text)
    assert (one["job"]["id"], one["existing"], two["existing"]) == (two["job"]["id"], False, True)
    other = {"spec": {**body["spec"], "key": "other"}}
    assert ask(site.host, token, "POST", path, other, Idempotency_Key="night-1").status == 400
    batch = {**body, "batch": ["a", "b"]}
    assert ask(site.host, token, "POST", path, batch, Idempotency_Key="night-1").status == 400
    pipeline = body_of("/v1/pipelines", "")
    assert ask(site.host, token, "POST", "/api/v1/pipelines", pipeline, Idempotency_Key="night-1").status == 400


def test_a_token_starts_no_job_in_the_foreground(site: Site) -> None:
    spec = {**body_of("/v1/jobs", "")["spec"], "interactive": "pipes"}
    del spec["hold"]
    answer = ask(site.host, site.token(ANN, SUBMIT), "POST", "/api/v1/jobs", {"spec": spec})
    assert (answer.status, "in the foreground" in error_of(answer)["message"]) == (409, True), answer.text


# --- who gets in ----------------------------------------------------------------------------------


def test_the_api_takes_no_cookies_and_pages_take_no_tokens(site: Site) -> None:
    visitor = Visitor(site.host)
    assert visitor.sign_in(site.people[ANN]).status == 303
    answer = visitor.get("/api/v1/jobs")
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="gpusched"')
    assert "no cookies" in error_of(answer)["message"]
    session = visitor.cookies[visitor.cookie_name]
    assert ask(site.host, session, "GET", "/api/v1/jobs").status == 401
    token = site.token(ANN, *SCOPES)
    for path in ("/", "/queue", "/jobs/1/cancel"):
        assert ask(site.host, token, "GET", path).status == 403, path
    thief = Visitor(site.host, {visitor.cookie_name: token})
    assert thief.get("/").headers["Location"] == "/login"
    both = site_ask(site, token, "/v1/jobs/hold", **{"Gpusched-Session": session})
    assert both[0] == 403


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer a b", "Bearer " + "x" * 300, "Bearer \xe9"]
)
def test_without_a_token_the_answer_is_401_and_a_sentence(site: Site, value: str | None) -> None:
    answer = ask(site.host, None, "GET", "/api/v1/jobs", Authorization=value)
    assert (answer.status, error_of(answer)["code"]) == (401, "signed_out")
    assert answer.headers["Content-Type"].startswith("application/json")


def test_a_token_in_an_address_is_refused(site: Site) -> None:
    token = site.token(ANN, READ)
    answer = ask(site.host, token, "GET", f"/api/v1/jobs?access_token={token}")
    assert (answer.status, token in answer.text) == (400, False)
    assert ask(site.host, None, "GET", f"/api/v1/jobs?token={token}").status == 401


def test_other_accounts_cannot_present_tokens(site: Site) -> None:
    """A token is worth something to the web process alone: its network side is where requests are limited."""
    site.daemon.configure(CONFIG.replace('user = "root"', 'user = "nobody"'))
    site.people[ADMIN].call("POST", "/v1/reload", {})
    try:
        status, found = site_ask(site, site.token(ANN, READ), "/v1/jobs")
        assert (status, found["error"]["message"]) == (403, "only the web process may do this, not root")
    finally:
        site.daemon.configure(CONFIG)
        site.people[ADMIN].call("POST", "/v1/reload", {})


def test_a_site_that_does_not_allow_a_scope_refuses_it_also_to_old_tokens(site: Site) -> None:
    token = site.token(ANN, SUBMIT)
    site.daemon.configure(CONFIG.replace('allow = ["control", "submit"]', 'allow = ["control"]'))
    site.people[ADMIN].call("POST", "/v1/reload", {})
    try:
        answer = ask(site.host, token, "POST", "/api/v1/jobs", body_of("/v1/jobs", ""))
        assert (answer.status, error_of(answer)["message"]) == (403, "tokens may not submit here")
        body = {"name": "x", "scope": ["submit"], "lasts_s": 600}
        assert str(site.people[ANN].refusal("POST", "/v1/web/tokens", body)) == "tokens may not submit here"
    finally:
        site.daemon.configure(CONFIG)
        site.people[ADMIN].call("POST", "/v1/reload", {})


def test_a_read_only_page_passes_on_nothing_that_changes_anything(site: Site) -> None:
    host = WebHost(str(site.daemon.socket))
    try:
        token, job = site.token(ANN, *SCOPES), site.people[ANN].submit("true", hold=True)
        for method, path in routes():
            answer = ask(host, token, method, "/api" + path.replace("{id}", job), body_of(path, job))
            is_refused = answer.status == 403
            assert is_refused is (method == "POST"), (path, answer.text)
        document = json.loads(ask(host, None, "GET", "/api/v1/openapi.json").text)
        assert not [path for path, operations in document["paths"].items() if "post" in operations]
    finally:
        host.close()


def test_guessing_is_slowed_down_and_locks_nobody_out(site: Site) -> None:
    host = WebHost(str(site.daemon.socket))
    try:
        token = site.token(ANN, READ)
        assert ask(host, token, "GET", "/api/v1/queues").status == 200
        found = [ask(host, f"{PREFIX}{number:043d}", "GET", "/api/v1/queues") for number in range(int(WRONG_BURST) + 9)]
        assert {one.status for one in found} == {401, 429}
        assert found[-1].headers["Retry-After"] == "1"
        assert ask(host, token, "GET", "/api/v1/queues").status == 200
    finally:
        host.close()
    wait_until(lambda: site.daemon.records("refusals.jsonl"), what="the audit")
    refused = site.daemon.records("refusals.jsonl")
    assert any(one["why"] == "this token is wrong or was revoked" for one in refused)
    assert not any(PREFIX in json.dumps(one) for one in refused)


@pytest.mark.parametrize(
    ("headers", "size", "status"),
    [
        ({"Content_Encoding": "gzip"}, 2, 400),
        ({"Content_Type": "text/plain"}, 2, 400),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 2, 400),
        ({}, 9 << 20, 400),
    ],
)
def test_bodies_are_small_plain_json(site: Site, headers: dict[str, Any], size: int, status: int) -> None:
    answer = ask(site.host, site.token(ANN, SUBMIT), "POST", "/api/v1/jobs", "x" * size, **headers)
    assert answer.status == status


def test_one_users_tokens_hold_a_few_requests_open_and_others_are_answered(site: Site) -> None:
    job = site.people[ANN].submit("true", hold=True)
    tokens = [site.token(ANN, READ) for _ in range(2)]
    other = site.token(BOB, READ)
    wait = f"/api/v1/wait?ids={job}&timeout_s=60"
    threads = [
        threading.Thread(target=ask, args=(site.host, tokens[at % 2], "GET", wait)) for at in range(MOST_AT_ONCE)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: ask(site.host, tokens[0], "GET", "/api/v1/queues").status == 429, what="all to wait")
    assert ask(site.host, other, "GET", "/api/v1/queues").status == 200
    site.people[ANN].call("POST", "/v1/jobs/cancel", {"ids": [job]})
    for thread in threads:
        thread.join(30)
    assert ask(site.host, tokens[0], "GET", "/api/v1/queues").status == 200


def test_nothing_is_read_of_a_stranger(site: Site) -> None:
    """A body that never comes, of a request whose token is wrong."""
    with socket.create_connection(("127.0.0.1", site.host.port), timeout=10) as sock:
        sock.sendall(
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 800000\r\n\r\n{"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")
        sock.sendall(b" " * 799_999)


# --- the life of a token --------------------------------------------------------------------------


def test_a_revoked_token_ends_at_once_and_an_admin_revokes_those_of_others(site: Site) -> None:
    first, second = site.token(ANN, READ, name="own"), site.token(ANN, READ, name="leaked")
    site.people[ANN].call("POST", "/v1/web/tokens/revoke", {"name": "own"})
    assert ask(site.host, first, "GET", "/api/v1/queues").status == 401
    assert site.people[BOB].refusal("POST", "/v1/web/tokens/revoke", {"name": "leaked"}).code == "not_found"
    body = {"name": "leaked", "user": ANN}
    assert site.people[BOB].refusal("POST", "/v1/web/tokens/revoke", body).code == "forbidden"
    assert ask(site.host, second, "GET", "/api/v1/queues").status == 200
    site.people[ADMIN].call("POST", "/v1/web/tokens/revoke", body)
    assert ask(site.host, second, "GET", "/api/v1/queues").status == 401


def test_lists_show_own_tokens_without_their_texts(site: Site) -> None:
    text = site.token(BOB, READ, name="listed")
    ask(site.host, text, "GET", "/api/v1/queues")
    (one,) = site.people[BOB].call("GET", "/v1/web/tokens")["tokens"]
    assert (one["name"], one["user"], one["used_at"] is not None) == ("listed", BOB, True)
    own = json.loads(ask(site.host, text, "GET", "/api/v1/web/token").text)
    assert own["name"] == "listed"
    assert text not in json.dumps([one, own])
    assert site.people[BOB].refusal("GET", "/v1/web/tokens?all=1").code == "forbidden"
    site.token(ANN, READ)
    everybody = site.people[ADMIN].call("GET", "/v1/web/tokens?all=1")["tokens"]
    assert {ANN, BOB} <= {one["user"] for one in everybody}


def test_root_has_no_tokens(site: Site) -> None:
    root = Person("root", str(site.daemon.socket))
    try:
        body = {"name": "x", "scope": ["read"], "lasts_s": 600}
        assert root.refusal("POST", "/v1/web/tokens", body).code == "forbidden"
    finally:
        root.leave()


def test_tokens_survive_kill_9_and_expired_ones_are_told_so(site: Site) -> None:
    good, old, foreign = (site.token(ANN, READ, name=name) for name in ("good", "old", "foreign"))
    site.daemon.kill()
    path = site.daemon.state_dir / "web-tokens.json"
    text = path.read_text()
    assert not any(token in text for token in (good, old, foreign))
    assert path.stat().st_mode & 0o777 == 0o600
    rows = json.loads(text)["tokens"]
    for row in rows:
        if row["name"] == "old":
            row["expires_at"] = 1.0
        if row["name"] == "foreign":
            row["user"] = BOB
    path.write_text(json.dumps({"tokens": rows}))
    site.daemon.start()
    assert ask(site.host, good, "GET", "/api/v1/queues").status == 200
    answer = ask(site.host, old, "GET", "/api/v1/queues")
    assert (answer.status, error_of(answer)["message"].startswith("the token old expired ")) == (401, True), answer.text
    # The uid has another name by now.
    assert ask(site.host, foreign, "GET", "/api/v1/queues").status == 401


def test_the_description_is_cut_to_what_tokens_may_use(site: Site) -> None:
    document = json.loads(ask(site.host, None, "GET", "/api/v1/openapi.json").text)
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert described == {(method, f"/api{path}") for method, path in routes()}
    ids = [one["operationId"] for operations in document["paths"].values() for one in operations.values()]
    assert len(ids) == len(set(ids))
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
