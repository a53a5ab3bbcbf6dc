"""What a sender says is taken for the word of a process that runs as a user: nothing of it can harm the daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.notify.courier import SenderOutput

TOLD = {"key": "1", "target": "a", "outcome": "told", "tries": 1}
FAILED = {"key": "1", "target": "a", "outcome": "failed", "tries": 1, "error": "500", "failures": 2, "next_s": 5.0}
DONE = {"key": "1", "done": True}


def heard(*said: Any) -> list[dict[str, Any]]:
    hearing = SenderOutput(["1"])
    return hearing.take(b"".join(json.dumps(one).encode() + b"\n" for one in said))


def test_reports_are_parsed_in_order_and_in_pieces() -> None:
    hearing = SenderOutput(["1"])
    data = b"\n" + b"\n".join(json.dumps(one).encode() for one in (FAILED, TOLD, DONE)) + b"\n"
    found = [report for at in range(0, len(data), 7) for report in hearing.take(data[at : at + 7])]
    assert found == [FAILED, TOLD, DONE]
    assert not hearing.has_ended


@pytest.mark.parametrize(
    ("said", "next_s"),
    [
        *((None, None), (2.5, 2.5), (-1, 0), (1e300, 86400.0), ("x", 0.0), (float("nan"), 0.0)),
        *((float("inf"), 0.0), (10**400, 86400.0), (-(10**400), 0.0)),
    ],
    ids=lambda said: str(said)[:10],
)
def test_the_last_line_says_when_the_rest_is_due(said: Any, next_s: float | None) -> None:
    hearing = SenderOutput()
    assert hearing.take(json.dumps({"next_s": said}).encode() + b"\n") == []
    assert (hearing.has_ended, hearing.next_s) == (True, next_s)


@pytest.mark.parametrize(
    "said",
    [
        {**TOLD, "key": "2"},
        {**TOLD, "key": ["1"]},
        {**TOLD, "outcome": "eaten"},
        {**TOLD, "outcome": ["told"]},
        {**TOLD, "target": None},
        {**TOLD, "tries": "1"},
        {"key": "1"},
        {"key": "1", "done": 1},
        ["1"],
        None,
        "1",
    ],
)
def test_reports_of_unknown_alerts_are_ignored(said: Any) -> None:
    assert heard(said, TOLD) == [TOLD]


def test_reports_after_the_end_of_an_alert_are_ignored() -> None:
    assert heard(DONE, TOLD, DONE) == [DONE]


def test_texts_are_truncated_and_made_printable() -> None:
    (report,) = heard({**FAILED, "error": "\x1b[2J\ud800" + "x" * 5000, "next_s": "soon", "tries": -3})
    assert report["error"].startswith("\\x1b[2J\\ud800xxx")
    assert len(report["error"]) == 600
    assert (report["next_s"], report["tries"]) == (0.0, 0)
    (report,) = heard({**FAILED, "failures": 10**30})
    assert report["failures"] == 1 << 16
    (report,) = heard({**FAILED, "error": {}, "next_s": float("inf")})
    assert (report["error"], report["next_s"]) == ("unknown reason", 0.0)


def test_endless_lines_and_output_are_invalid() -> None:
    hearing = SenderOutput()
    hearing.take(b"x" * 70_000)
    assert hearing.is_invalid
    hearing = SenderOutput(["1"])
    hearing.take((json.dumps(FAILED).encode() + b"\n") * 1001)
    assert hearing.is_invalid


@given(st.lists(st.binary(max_size=40)))
def test_any_bytes_are_parsed_without_an_error(parts: list[bytes]) -> None:
    hearing = SenderOutput(["1"])
    for part in parts:
        hearing.take(part)
