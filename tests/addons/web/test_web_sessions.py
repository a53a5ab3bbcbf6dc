"""Codes and sessions of the web page, on a clock of the test's own."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.web import sessions as web_sessions
from gpusched.addons.web.sessions import CODE_S, CODE_TRIES, IDLE_S, LONGEST_S, MOST_SESSIONS, WebSession, WebSessions

ANN, BOB = 1000, 1001
NONE: frozenset[str] = frozenset()


class Clock:
    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> WebSessions:
    return WebSessions(now=clock)


# --- codes ----------------------------------------------------------------------------------------


def test_a_code_signs_in_once_however_it_is_typed(sessions: WebSessions) -> None:
    code, _ = sessions.new_code(ANN)
    assert sessions.redeem(f" {code.lower().replace('-', ' ')} ") == ANN
    assert sessions.redeem(code) is None


def test_a_code_ends_after_a_minute(sessions: WebSessions, clock: Clock) -> None:
    code, ends_at = sessions.new_code(ANN)
    assert ends_at == clock.at + CODE_S
    clock.at += CODE_S
    assert sessions.redeem(code) is None


def test_a_code_ends_with_its_fifth_wrong_half_and_not_before(sessions: WebSessions) -> None:
    def guess(code: str, times: int) -> None:
        wrong = code[:-1] + ("2" if code[-1] != "2" else "3")
        for _ in range(times):
            assert sessions.redeem(wrong) is None

    lucky, _ = sessions.new_code(ANN)
    guess(lucky, CODE_TRIES - 1)
    assert sessions.redeem(lucky) == ANN
    unlucky, _ = sessions.new_code(ANN)
    guess(unlucky, CODE_TRIES)
    assert sessions.redeem(unlucky) is None


def test_guesses_at_no_code_take_no_tries_from_others(sessions: WebSessions) -> None:
    code, _ = sessions.new_code(ANN)
    for _ in range(100):
        sessions.redeem("2222-" + code[5:]) if not code.startswith("2222") else None
    assert sessions.redeem(code) == ANN


def test_a_user_has_three_codes_at_most_and_leaves_those_of_others_alone(sessions: WebSessions) -> None:
    other, _ = sessions.new_code(BOB)
    codes = [sessions.new_code(ANN)[0] for _ in range(5)]
    assert [sessions.redeem(code) for code in codes] == [None, None, ANN, ANN, ANN]
    assert sessions.redeem(other) == BOB


@given(st.text(max_size=40))
def test_no_text_breaks_the_form(text: str) -> None:
    sessions = WebSessions()
    sessions.new_code(ANN)
    assert sessions.redeem(text) is None
    assert sessions.find(text) is None


# --- sessions -------------------------------------------------------------------------------------


def test_a_session_ends_after_twelve_idle_hours(sessions: WebSessions, clock: Clock) -> None:
    token = sessions.begin(ANN, NONE)
    for _ in range(3):
        clock.at += IDLE_S - 1
        assert sessions.find(token) is not None
    clock.at += IDLE_S
    assert sessions.find(token) is None


def test_a_session_ends_after_a_week_of_use(sessions: WebSessions, clock: Clock) -> None:
    token, began_at = sessions.begin(ANN, NONE), clock.at
    while sessions.find(token) is not None:
        clock.at += 3600
    assert clock.at - began_at == LONGEST_S


def test_a_token_is_long_and_kept_nowhere(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    token = WebSessions(str(path), clock).begin(ANN, frozenset({"control"}))
    assert len(token) >= 43
    text = path.read_text()
    assert token not in text
    assert [row["uid"] for row in json.loads(text)["sessions"]] == [ANN]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_sessions_survive_a_restart_and_ended_ones_do_not(clock: Clock, tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.json")
    before = WebSessions(path, clock)
    kept, ended = before.begin(ANN, frozenset({"control"})), before.begin(ANN, NONE)
    before.end(ended)
    after = WebSessions(path, clock)
    found = after.find(kept)
    assert found is not None
    assert (found.uid, found.scope) == (ANN, {"control"})
    assert after.find(ended) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sessions": [{}]}', '{"sessions": 4}', "\0" * 90])
def test_a_broken_file_costs_the_sessions_and_nothing_else(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    path.write_text(text)
    sessions = WebSessions(str(path))
    assert sessions.find(sessions.begin(ANN, NONE)) is not None


def test_a_user_signs_out_everywhere_and_leaves_others_signed_in(sessions: WebSessions) -> None:
    mine, other = [sessions.begin(ANN, NONE) for _ in range(2)], sessions.begin(BOB, NONE)
    code, _ = sessions.new_code(ANN)
    assert sessions.end_all(ANN) == 2
    assert [sessions.find(token) for token in mine] == [None, None]
    assert sessions.redeem(code) is None
    assert sessions.find(other) is not None


def test_the_session_unused_longest_gives_way(sessions: WebSessions, clock: Clock) -> None:
    tokens = []
    for _ in range(MOST_SESSIONS + 1):
        clock.at += 1
        tokens.append(sessions.begin(ANN, NONE))
    assert [sessions.find(token) is None for token in tokens] == [True] + [False] * MOST_SESSIONS


def test_a_web_process_that_says_nothing_any_more_is_gone(sessions: WebSessions, clock: Clock) -> None:
    assert sessions.serving() is None
    sessions.serve({"address": "http://127.0.0.1:8760"})
    assert sessions.serving() == {"address": "http://127.0.0.1:8760"}
    clock.at += web_sessions.SERVING_S + 1
    assert sessions.serving() is None


# --- scope ----------------------------------------------------------------------------------------


def test_a_session_reads_what_pages_show_and_changes_nothing_without_control() -> None:
    from gpusched.api.routes import ROUTES

    routes = {(route.method, route.path) for route in ROUTES}
    reader, controller = (WebSession(ANN, frozenset(scope), 0.0, 0.0) for scope in ((), ("control",)))
    may_read = {one for one in routes if reader.admits(*one)}
    assert {method for method, _ in may_read} == {"GET", "POST"}
    assert {path for method, path in may_read if method == "POST"} == {web_sessions.END_ROUTE}
    # Nothing is admitted that does not exist, and these are never admitted.
    assert {path for method, path in may_read if method == "GET"} == web_sessions.READ_ROUTES
    for path in ("/v1/jobs/{id}/script", "/v1/jobs/{id}/attach", "/v1/snapshot", "/v1/settings-log", "/v1/inside"):
        assert ("GET", path) in routes - may_read
    more = {one for one in routes if controller.admits(*one)} - may_read
    assert more == {("POST", path) for path in web_sessions.CONTROL_ROUTES}
