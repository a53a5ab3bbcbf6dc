"""Signing in to the web page at a system's daemon: who may, as whom requests count, and what a session may do."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from people import ANN, BOB, EVE, NEEDS_ROOT, SystemDaemon
from support import wait_until

pytestmark = NEEDS_ROOT

WEB = "nobody"
CONFIG = f"""
[web]
user = "{WEB}"
allow = ["control"]
user_header = "X-Remote-User"
[access]
private_data = ["jobs"]
"""


class Connection(http.client.HTTPConnection):
    """HTTP to the daemon's socket, with headers."""

    def __init__(self, path: Path) -> None:
        super().__init__("gpusched")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class Site:
    """A daemon and what the web process asks it."""

    def __init__(self, daemon: SystemDaemon) -> None:
        self.daemon = daemon
        self.web = daemon.person(WEB)
        self.ann, self.bob, self.eve = (daemon.person(user) for user in (ANN, BOB, EVE))

    def sign_in(self, person: Any, *allow: str) -> str:
        code = person.call("POST", "/v1/web/code", {})["code"]
        return str(self.web.call("POST", "/v1/web/sessions", {"code": code, "allow": list(allow)})["token"])

    def ask(
        self, token: str, method: str, path: str, body: Any = None, as_user: str = WEB
    ) -> tuple[int, dict[str, Any]]:
        """A request with a session's token from a process of an account."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            import pwd

            try:
                account = pwd.getpwnam(as_user)
                os.setgroups([])
                os.setgid(account.pw_gid)
                os.setuid(account.pw_uid)
                connection = Connection(self.daemon.socket)
                text = None if body is None else json.dumps(body)
                connection.request(method, path, text, {"Gpusched-Session": token})
                answer = connection.getresponse()
                os.write(writer, json.dumps([answer.status, json.loads(answer.read())]).encode()[:60_000])
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            status, found = json.loads(file.read())
        os.waitpid(child, 0)
        return int(status), found


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    daemon = SystemDaemon(CONFIG)
    try:
        daemon.start()
        yield Site(daemon)
    finally:
        daemon.close()


def test_requests_of_a_session_have_the_rights_of_its_user_and_no_others(site: Site) -> None:
    own, other = site.ann.submit("true", hold=True), site.bob.submit("true", hold=True)
    token = site.sign_in(site.ann)
    assert site.ask(token, "GET", "/v1/web/session")[1]["user"] == ANN
    assert site.ask(token, "GET", f"/v1/jobs/{own}")[0] == 200
    assert site.ask(token, "GET", f"/v1/jobs/{other}")[0] == 404

    def rows() -> dict[int, str]:
        status, found = site.ask(token, "GET", "/v1/board")
        assert status == 200
        return {row["id"]: row["user"] for row in found["lists"]["rows"]["set"]}

    # A board that another test has just asked for is shown once more. Tests before may have left more jobs of both.
    wait_until(lambda: own in rows())
    shown = rows()
    assert other not in shown
    assert set(shown.values()) == {ANN}


def test_a_token_in_the_hands_of_another_account_is_worth_nothing(site: Site) -> None:
    token = site.sign_in(site.ann)
    for thief in (EVE, ANN):
        status, found = site.ask(token, "GET", "/v1/web/session", as_user=thief)
        assert (status, found["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("body", [{"code": "KD4F-7QXM"}, {"user": ANN}])
def test_only_the_web_process_signs_users_in(site: Site, body: dict[str, Any]) -> None:
    error = site.eve.refusal("POST", "/v1/web/sessions", body)
    assert str(error) == f"only the web process may do this, not {EVE}"
    assert site.eve.refusal("POST", "/v1/web/serving", {"address": "http://evil", "port": 1}).code == "forbidden"


def test_a_session_reads_no_scripts_and_changes_nothing_that_was_not_allowed(site: Site) -> None:
    job = site.ann.submit("true", hold=True)
    token = site.sign_in(site.ann)
    for method, path, body in (
        ("GET", f"/v1/jobs/{job}/script", None),
        ("POST", "/v1/jobs", {"spec": {"argv": ["true"]}}),
        ("POST", "/v1/jobs/cancel", {"ids": [job]}),
        ("POST", "/v1/jobs/update", {"ids": [job], "changes": {"nice": 1}}),
        ("POST", "/v1/web/code", {}),
        ("POST", "/v1/web/sessions", {"user": BOB}),
        ("POST", "/v1/shutdown", {}),
    ):
        status, found = site.ask(token, method, path, body)
        assert (status, found["error"]["code"]) == (403, "forbidden"), path


def test_a_session_with_control_cancels_own_jobs_and_knows_of_no_others(site: Site) -> None:
    own, other = site.ann.submit("true", hold=True), site.bob.submit("true", hold=True)
    token = site.sign_in(site.ann, "control")
    assert site.ask(token, "POST", "/v1/jobs/release", {"ids": [own]})[0] == 200
    assert site.ask(token, "POST", "/v1/jobs/cancel", {"ids": [own]})[0] == 200
    assert site.ask(token, "POST", "/v1/jobs/cancel", {"ids": [other]})[0] == 404


def test_a_session_ends_by_signing_out_here_or_everywhere(site: Site) -> None:
    first, second = site.sign_in(site.ann), site.sign_in(site.ann)
    assert site.ask(first, "POST", "/v1/web/session/end", {})[0] == 200
    status, found = site.ask(first, "GET", "/v1/board")
    assert (status, found["error"]["code"]) == (401, "signed_out")
    assert site.ask(second, "GET", "/v1/board")[0] == 200
    assert site.ann.call("POST", "/v1/web/session/end", {})["ended"] >= 1
    assert site.ask(second, "GET", "/v1/board")[0] == 401


def test_a_proxys_user_must_exist_and_is_never_root(site: Site) -> None:
    token = site.web.call("POST", "/v1/web/sessions", {"user": BOB})["token"]
    assert site.ask(token, "GET", "/v1/web/session")[1]["user"] == BOB
    for name in ("root", "no-such-user", "a\0b", ""):
        assert site.web.refusal("POST", "/v1/web/sessions", {"user": name}).code == "forbidden"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "a session begins with a code or a user"),
        ({"code": "a", "user": "b"}, "a session begins with a code or a user"),
        ({"code": 4}, "code is 4; it must be a text"),
        ({"code": "KD4F-7QXM", "allow": ["submit"]}, "'submit' cannot be allowed"),
        ({"code": "KD4F-7QXM", "scope": "all"}, "unknown field 'scope'"),
        ({"code": "KD4F-7QXM"}, "this code is wrong, older than a minute, or used"),
    ],
)
def test_a_wrong_request_for_a_session_is_one_sentence(site: Site, body: dict[str, Any], text: str) -> None:
    assert str(site.web.refusal("POST", "/v1/web/sessions", body)) == text


def test_the_end_of_an_output_is_read_with_the_rights_of_the_jobs_user(site: Site) -> None:
    folder = site.daemon.home / "out"
    folder.mkdir(mode=0o777, exist_ok=True)
    folder.chmod(0o777)
    secret = site.daemon.home / "secret"
    secret.write_text("for root alone\n")
    secret.chmod(0o600)
    own = site.ann.submit("seq", "1000", stdout=f"{folder}/own.txt")
    stolen = site.ann.submit("true", stdout=f"{folder}/link.txt")
    for job in (own, stolen):
        site.ann.call("GET", f"/v1/wait?ids={job}&timeout_s=60")
    (folder / "link.txt").unlink()
    (folder / "link.txt").symlink_to(secret)
    token = site.sign_in(site.ann)
    status, found = site.ask(token, "GET", f"/v1/jobs/{own}/tail?lines=2")
    assert (status, found.get("text"), found.get("is_cut")) == (200, "999\n1000\n", True), found
    status, found = site.ask(token, "GET", f"/v1/jobs/{stolen}/tail")
    assert (status, "Permission denied" in found["error"]["message"]) == (409, True)
    assert site.bob.refusal("GET", f"/v1/jobs/{own}/tail").code == "not_found"
    (folder / "link.txt").unlink()
    assert site.ann.call("GET", f"/v1/jobs/{stolen}/tail")["is_found"] is False
    os.mkfifo(folder / "link.txt")
    os.chmod(folder / "link.txt", 0o666)
    assert "not a regular file" in str(site.ann.refusal("GET", f"/v1/jobs/{stolen}/tail"))


def test_sessions_survive_kill_9_of_the_daemon(site: Site) -> None:
    token = site.sign_in(site.ann)
    site.daemon.kill()
    site.daemon.start()
    assert site.ask(token, "GET", "/v1/web/session")[1]["user"] == ANN
