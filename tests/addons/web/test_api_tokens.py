"""Tokens of the API on clocks of the test's own: what is kept, when they end, how often they may be used."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gpusched.addons.web.settings import CONTROL, SUBMIT
from gpusched.addons.web.tokens import (
    BURST,
    KEPT_S,
    LONGEST_S,
    MOST_AT_ONCE,
    MOST_TOKENS,
    PER_S,
    PREFIX,
    READ,
    READ_ROUTES,
    SCOPES,
    ApiTokens,
    scope_of,
)
from gpusched.errors import NotFound, NotReady, Refused, SignedOut, TooMany, UsageError
from gpusched.model.commands import Caller

ANN, BOB = 1000, 1001
DAY_S = 86400.0


class Clock:
    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> ApiTokens:
    return ApiTokens(now=clock, clock=clock)


def make(tokens: ApiTokens, name: str = "ci", *scope: str, uid: int = ANN, lasts_s: float = DAY_S) -> str:
    return tokens.make(uid, "ann" if uid == ANN else "bob", name, frozenset(scope or (READ,)), lasts_s)[0]


def test_a_token_is_found_until_it_expires_and_then_named(tokens: ApiTokens, clock: Clock) -> None:
    text = make(tokens, "ci", SUBMIT)
    assert text.startswith(PREFIX)
    assert len(text) == len(PREFIX) + 43
    found = tokens.find(text)
    assert (found.uid, found.name, found.scope, found.used_at) == (ANN, "ci", {READ, SUBMIT}, clock.at)
    clock.at += DAY_S
    with pytest.raises(SignedOut, match="the token ci expired"):
        tokens.find(text)
    clock.at += KEPT_S
    make(tokens, "other")
    with pytest.raises(SignedOut, match="wrong or was revoked"):
        tokens.find(text)


@pytest.mark.parametrize(
    ("name", "scope", "lasts_s"),
    [
        *(("", [READ], 60), ("a b", [READ], 60), ("a" * 41, [READ], 60), ("\u202eci", [READ], 60), (".x", [READ], 60)),
        *(("ci", [], 60), ("ci", ["admin"], 60), ("ci", [READ], 59), ("ci", [READ], LONGEST_S + 1)),
        ("ci", [READ], float("nan")),
    ],
)
def test_names_scopes_and_times_are_checked(tokens: ApiTokens, name: str, scope: list[str], lasts_s: float) -> None:
    with pytest.raises(UsageError):
        tokens.make(ANN, "ann", name, frozenset(scope), lasts_s)
    assert tokens.listing(None) == []


def test_a_name_is_used_again_once_its_token_has_expired(tokens: ApiTokens, clock: Clock) -> None:
    first = make(tokens)
    with pytest.raises(Refused, match="has a token ci already"):
        make(tokens)
    make(tokens, uid=BOB)
    clock.at += DAY_S
    make(tokens)
    assert [(one.user, one.name) for one in tokens.listing(None)] == [("ann", "ci"), ("bob", "ci")]
    with pytest.raises(SignedOut):
        tokens.find(first)


def test_a_user_has_a_bounded_number_of_tokens(tokens: ApiTokens) -> None:
    for number in range(MOST_TOKENS):
        make(tokens, f"t{number}")
    with pytest.raises(Refused, match="the maximum"):
        make(tokens, "more")
    make(tokens, uid=BOB)
    tokens.revoke(ANN, "t0")
    make(tokens, "more")


def test_revoking_is_about_own_tokens(tokens: ApiTokens) -> None:
    text = make(tokens)
    with pytest.raises(NotFound):
        tokens.revoke(BOB, "ci")
    tokens.find(text)
    tokens.revoke(ANN, "ci")
    with pytest.raises(SignedOut):
        tokens.find(text)


def test_one_token_too_busy_waits_and_others_do_not(tokens: ApiTokens, clock: Clock) -> None:
    busy, other = make(tokens, "busy"), make(tokens, "other")
    for _ in range(int(BURST)):
        tokens.find(busy)
    with pytest.raises(TooMany) as caught:
        tokens.find(busy)
    assert caught.value.retry_after_s == pytest.approx(1 / PER_S)
    tokens.find(other)
    clock.at += 1 / PER_S
    tokens.find(busy)


def test_a_user_has_a_bounded_number_of_open_requests(tokens: ApiTokens) -> None:
    ann, bob = Caller(ANN, "ann", is_token=True), Caller(BOB, "bob", is_token=True)
    turns = [tokens.turn(ann) for _ in range(MOST_AT_ONCE)]
    for tick in turns:
        tick.__enter__()
    with pytest.raises(TooMany), tokens.turn(ann):
        pass
    with tokens.turn(bob):
        pass
    turns[0].__exit__(None, None, None)
    with tokens.turn(ann):
        pass


def test_the_file_is_private_and_holds_hashes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "tokens.json"
    text = make(ApiTokens(str(path), clock), "ci", CONTROL)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert text not in path.read_text()
    again = ApiTokens(str(path), clock)
    assert again.find(text).scope == {READ, CONTROL}
    again.revoke(ANN, "ci")
    with pytest.raises(SignedOut):
        ApiTokens(str(path), clock).find(text)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tokens": [{}]}', '{"tokens": [{"token": "a", "uid": "x"}]}'])
def test_a_file_that_cannot_be_read_ends_all_tokens_and_no_daemon(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    assert ApiTokens(str(path)).listing(None) == []


def test_what_cannot_be_saved_is_not_handed_out_and_is_told_when_revoked(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "folder" / "tokens.json"
    path.parent.mkdir()
    tokens = ApiTokens(str(path), clock)
    text = make(tokens)
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(NotReady, match="cannot be saved"):
        make(tokens, "second")
    assert [one.name for one in tokens.listing(ANN)] == ["ci"]
    with pytest.raises(NotReady, match="only until the daemon restarts"):
        tokens.revoke(ANN, "ci")
    with pytest.raises(SignedOut):
        tokens.find(text)


def test_scopes_cover_no_methods_and_routes_but_those_listed() -> None:
    assert scope_of("GET", "/v1/jobs/{id}") == READ
    assert scope_of("POST", "/v1/jobs") == SUBMIT
    assert scope_of("POST", "/v1/jobs/cancel") == CONTROL
    for method, route in (
        *(("POST", "/v1/jobs/update"), ("POST", "/v1/drain"), ("GET", "/v1/jobs/{id}/script"), ("DELETE", "/v1/jobs")),
        *(("PUT", "/v1/jobs"), ("POST", "/v1/jobs/{id}"), ("GET", ""), ("POST", "/v1/web/tokens")),
    ):
        assert scope_of(method, route) is None
    assert set(SCOPES) == {READ, SUBMIT, CONTROL}
    assert not any("script" in route or "snapshot" in route or "attach" in route for route in READ_ROUTES)
