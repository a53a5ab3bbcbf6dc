"""Frames of gtop: the state as lines, at several sizes, and what keys and answers do to the state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import compare

from gpusched.addons.top.feed import find_next
from gpusched.addons.top.frame import frame
from gpusched.addons.top.state import Log, Question, TopState
from gpusched.addons.top.text import bar, clean, plain, when
from gpusched.cli.sparklines import spark
from gpusched.cli.tables import cells
from gpusched.model.units import ordinal, span

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_795_442_400.0
"""14:00 on 23 November 2026, in UTC."""
GIB = 1024
SIZES = [(80, 24), (100, 30), (140, 40), (200, 60)]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def card(number: int, **parts: Any) -> dict[str, Any]:
    return {
        "id": f"GPU-{number}",
        "node": "lab1",
        "index": number,
        "label": str(number),
        "name": "NVIDIA A100-SXM4-80GB",
        "state": "idle",
        "why": None,
        "mig_parent": None,
        "mig_profile": None,
        "vram_total_mib": 80 * GIB,
        "vram_used_mib": 0,
        "utilisation": 0.0,
        "temperature_c": 41.0,
        "power_w": 63.0,
        "jobs": [],
        "others": 0,
        "foreign": [],
        **parts,
    }


def holder(number: str, user: str, name: str, **parts: Any) -> dict[str, Any]:
    one = {"id": number, "user": user, "name": name, "start_at": NOW - 11520, "idle_at": None, "vram_mib": None}
    return {**one, "fraction": None, "is_ending": False, **parts}


def row(number: str, **parts: Any) -> dict[str, Any]:
    return {
        "id": number,
        "name": "train",
        "user": "alice",
        "account": "vision",
        "queue": "default",
        "qos": None,
        "state": "PENDING",
        "reason": None,
        "reason_text": None,
        "hold": None,
        "nice": 0,
        "submit_at": NOW - 12000,
        "start_at": None,
        "end_at": None,
        "time_limit_s": None,
        "suspended_s": 0.0,
        "suspended_at": None,
        "idle_at": None,
        "preempt_at": None,
        "cpus": 4,
        "mem_mib": 8 * GIB,
        "exit_code": None,
        "signal": None,
        "restarts": 0,
        "progress": None,
        "progress_text": None,
        "eta_at": None,
        "gpus": 1,
        "depth": 0,
        "is_open": False,
        "where": "",
        "tasks": None,
        **parts,
    }


def expected(low: float, high: float | None) -> dict[str, Any]:
    high_at = None if high is None else NOW + high
    return {"low_at": NOW + low, "high_at": high_at, "likely_low_at": None, "likely_high_at": None}


CARDS = [
    card(
        0,
        state="allocated",
        utilisation=0.97,
        vram_used_mib=71 * GIB,
        temperature_c=88.0,
        power_w=391.0,
        jobs=[holder("42", "alice", "train")],
    ),
    card(1, state="allocated", utilisation=0.964, vram_used_mib=70 * GIB, jobs=[holder("42", "alice", "train")]),
    card(2, state="allocated", vram_used_mib=4 * GIB, jobs=[holder("57", "bob", "notebook", idle_at=NOW - 2700)]),
    card(
        3,
        utilisation=0.31,
        vram_used_mib=18 * GIB,
        foreign=[{"pid": 4711, "user": "carl", "name": "/usr/bin/python3", "vram_mib": 18 * GIB, "job": None}],
    ),
    card(4, utilisation=None, vram_used_mib=None, vram_total_mib=None, temperature_c=None, power_w=None),
    card(5, state="drained", why="fan is broken"),
]
ROWS = [
    row(
        "42",
        state="RUNNING",
        start_at=NOW - 11520,
        time_limit_s=43200,
        gpus=2,
        where="lab1:0,1",
        progress=0.1556,
        progress_text="epoch 14/90",
        eta_at=NOW + 31200,
    ),
    row("57", name="notebook", user="bob", state="RUNNING", start_at=NOW - 4000, where="lab1:2", idle_at=NOW - 2700),
    row("58", name="cpu", user="bob", state="RUNNING", start_at=NOW - 400, time_limit_s=3600, where="lab1", gpus=0),
    row(
        "63",
        name="sweep",
        reason="Resources",
        reason_text="needs 1 GPU, none of 6 free",
        tasks={"PENDING": 998},
        place=1,
        expected=expected(4200, 9600),
    ),
    row("70", name="eval", user="bob", reason="BudgetSpent", place=999, expected=expected(8 * 86400, 9 * 86400)),
    row("71", name="held", user="bob", reason="JobHeldUser", hold="user"),
    row("72", name="-", user="carl", reason="Priority", place=1002, expected=expected(7200, None)),
]


def board(**parts: Any) -> dict[str, Any]:
    """A full answer of GET /v1/board."""
    cards, rows = parts.pop("cards", CARDS), parts.pop("rows", ROWS)
    nodes = parts.pop("nodes", [{"id": "lab1", "state": "up", "why": None, "gpu_error": None}])
    facts = parts.pop("facts", {"total": len(rows), "offset": 0, "found": None})

    def listed(entries: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
        return {"order": [one["id"] for one in entries], "set": entries, "facts": facts}

    answer: dict[str, Any] = {
        "schema_version": 1,
        "version": "a.1",
        "full": True,
        "now": NOW,
        "parts": {
            "daemon": {"version": "1", "node": "lab1", "cluster_name": "lab", "warnings": [], "failing_steps": []},
            "notices": [{"kind": "drain", "what": "GPU 5", "message": "fan is broken"}],
            "me": {
                "user": "alice",
                "uid": 1000,
                "is_admin": False,
                "is_operator": False,
                "account": "vision",
                "fair_share": 0.61,
                "jobs": {"RUNNING": 1, "PENDING": 998},
                "config_problem": None,
            },
            "totals": {
                "jobs": {"RUNNING": 3, "PENDING": 1001, "HELD": 1},
                "gpus": 6,
                "gpus_busy": 3,
                "gpus_free": 1,
            },
        },
        "lists": {"nodes": listed(nodes, {}), "cards": listed(cards, {}), "rows": listed(rows, facts)},
    }
    return {**answer, **parts}


def state(**parts: Any) -> TopState:
    found = TopState(is_ascii=parts.pop("is_ascii", True))
    for name, value in parts.items():
        setattr(found, name, value)
    found.take(board(), found.view)
    return found


# --- frames -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_of_each_size_is_as_recorded(width: int, height: int) -> None:
    found = state()
    found.log = Log("42", note="run 1")
    found.log.lines.extend(f"[14:02:{second:02d}] step {41200 + second} loss 1.2{second}" for second in range(30))
    compare(f"gtop-{width}x{height}.txt", plain(frame(found, width, height)), GOLDEN)


def test_ended_jobs_show_how_and_when_they_ended() -> None:
    found = TopState(is_ascii=True, has_ended=True)
    ended = {"start_at": NOW - 7200, "end_at": NOW - 3600}
    rows = [
        row("8", state="COMPLETED", reason="None", exit_code=0, **ended),
        row("9", state="FAILED", reason="NonZeroExitCode", exit_code=3, **ended),
        row("10", state="COMPLETED", tasks={"COMPLETED": 40}, **ended),
    ]
    found.take(board(rows=rows), "ended")
    lines = [" ".join(line.split()) for line in plain(frame(found, 80, 24)).splitlines()]
    assert "> 8 train alice CD 1h00 1 13:00" in lines
    assert "9 train alice F 1h00 1 exit 3 NonZeroExitCode 13:00" in lines
    assert "  10[40]+ train" in plain(frame(found, 80, 24))
    assert "ended within a day, 1 of 3" in plain(frame(found, 80, 24))


def test_ended_jobs_tell_the_cause_in_words() -> None:
    found = TopState(is_ascii=True, has_ended=True)
    ended = {"start_at": NOW - 7200, "end_at": NOW - 3600, "exit_code": 1, "state": "FAILED"}
    text = "exit code 1: KeyError: 'checkpoint' (fail.py:4)"
    found.take(board(rows=[row("9", reason="NonZeroExitCode", reason_text=text, **ended)]), "ended")
    assert "KeyError: 'checkpoint' (fail.py:4)" in plain(frame(found, 120, 24))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_header_keeps_its_counts_at_any_width(width: int) -> None:
    found = state()
    head = plain(frame(found, width, 24)).splitlines()[0]
    assert "6 cards 3 busy" in head
    assert "R 3 PD 1,001" in head
    assert ("14:00:00" in head) == (width >= 80)
    assert ("lab1" in head) == (width >= 60)
    found.board.parts["daemon"]["warnings"] = ["the disk is full"]
    head = plain(frame(found, width, 24)).splitlines()[0]
    assert head.endswith("1 warning: !" if width >= 60 else "1 !")
    assert "R 3 PD 1,001" in head


@pytest.mark.parametrize(
    ("width", "texts"),
    [
        (40, ["41st in line", "BudgetSpent", "IDLE 40:00"]),
        (60, ["41st in line  13:50-4 Dec", "BudgetSpent   22:20-13:30", "IDLE 40:00    by 01:00"]),
        (80, ["Priority, 41st", "BudgetSpent, 1,042nd", "IDLE 40:00, 64% done"]),
    ],
)
def test_a_narrow_list_says_less_in_whole_words(width: int, texts: list[str]) -> None:
    found = state()
    busy = {"state": "RUNNING", "start_at": NOW - 2400, "time_limit_s": 42_000}
    rows = [
        row("46", reason="Priority", place=41, expected=expected(85_800, 900_000)),
        row("47", reason="BudgetSpent", place=1042, expected=expected(30_000, 84_600)),
        row("48", progress=0.649, idle_at=NOW - 2400, **busy),
    ]
    found.take(board(rows=rows), found.view)
    lines = plain(frame(found, width, 24)).splitlines()
    for number, text in zip(("46", "47", "48"), texts, strict=True):
        (line,) = [line for line in lines if f" {number} " in line[:10]]
        assert text in line
        assert "+" not in line


def test_a_start_that_is_not_there_says_why_and_latest_starts_are_rounded_as_at_the_prompt() -> None:
    found = state()
    rows = [
        row("46", reason="BudgetSpent", place=1, expected=None, expected_is="unknown"),
        row("47", reason="Priority", place=2, expected=None, expected_is="pending"),
        row("48", reason="Priority", place=9000, expected=None, expected_is="beyond"),
        row("49", reason="JobHeldUser", expected=None, expected_is="none"),
        row("50", reason="Resources", place=3, expected=expected(3600, 3630)),
    ]
    found.take(board(rows=rows), found.view)
    lines = plain(frame(found, 80, 24)).splitlines()
    ends = [next(line for line in lines if f" {number} " in line[:10]).rstrip() for number in range(46, 51)]
    later = time.strftime("%H:%M", time.localtime(-(-(NOW + 3630) // 60) * 60))
    for line, end in zip(ends, ("  unknown", "  not yet", "  far behind", "JobHeldUser", f"  {later}"), strict=True):
        assert line.endswith(end)


def test_warnings_are_shown_in_full() -> None:
    found = state(has_warnings=True)
    assert "nothing" in plain(frame(found, 80, 24))
    found.board.parts["daemon"]["warnings"] = ["the disk is full " * 12]
    found.board.parts["daemon"]["failing_steps"] = [{"step": "series", "error": "disk"}]
    text = " ".join(plain(frame(found, 60, 24)).split())
    assert text.count("the disk is full") == 12
    assert "series fails: disk" in text


def test_equal_jobs_share_a_row_that_is_opened_and_acted_on_as_a_whole() -> None:
    found = state()
    assert found.query()["fold_alike"] == "1"
    rows = [row("5", state="RUNNING", start_at=NOW), row("111", alike=["111-113,115", 4]), row("7", alike=None)]
    found.take(board(rows=rows), found.view)
    assert "  111[4]+ " in plain(frame(found, 80, 24))
    found.go(1)
    found.ask("cancel")
    assert found.question is not None
    assert (found.question.command, found.question.count) == ("gcancel 111-113,115", 4)
    assert found.question.body == {"ids": ["111-113", "115"]}
    found.question = None
    found.mark()
    found.take(board(rows=rows[:1]), found.view)
    found.ask("hold")
    assert found.question is not None
    assert found.question.count == 4, "what was marked is what it stood for"
    found.question = None
    found.marked.clear()
    opened = [rows[0], {**rows[1], "is_open": True}, row("112", depth=1), row("113", depth=1)]
    found.take(board(rows=opened), found.view)
    found.go(1)
    found.ask("cancel")
    assert found.question is not None
    assert found.question.body == {"ids": ["111"]}, "an opened one is itself alone"
    found.question = None
    found.unfolded = {"111"}
    found.go(3)
    found.fold()
    assert found.unfolded == set()
    assert found.cursor_id == "111"


def test_a_bar_of_memory_is_beside_use_and_colours_tell_the_load() -> None:
    full = card(0, utilisation=0.95, vram_used_mib=79 * GIB, state="allocated")
    idle = card(1, utilisation=0.01, vram_used_mib=40 * GIB)
    found = state()
    found.take(board(cards=[full, idle]), found.view)
    first, second = frame(found, 120, 24)[2:4]
    bars = [[(text, style) for text, style in line if text and set(text) == {"#"}] for line in (first, second)]
    assert bars == [[("#" * 10, "full"), ("#" * 10, "warn")], [("#" * 5, "good")]]


def test_a_wide_terminal_has_the_log_of_the_cursor_beside_the_list() -> None:
    found = state()
    found.log = Log("42", note="run 1", is_of_cursor=True)
    found.log.lines.append("step 41200 loss 1.2")
    lines = plain(frame(found, 200, 40)).splitlines()
    (line,) = [line for line in lines if "step 41200" in line]
    assert line.index("step 41200") > 120
    assert any("|output of 42" in line for line in lines)
    found.log.is_of_cursor = False
    (line,) = [line for line in plain(frame(found, 200, 40)).splitlines() if "step 41200" in line]
    assert line.startswith("step 41200"), "one that was asked for is below"


@pytest.mark.parametrize("pane", ["cards", "queues", "people"])
def test_a_frame_of_each_pane_is_as_recorded(pane: str) -> None:
    found = TopState(is_ascii=True, pane=pane)
    rows: list[dict[str, Any]] = ROWS
    if pane == "people":
        rows = [
            {
                "id": "alice",
                "user": "alice",
                "jobs": {"RUNNING": 1},
                "gpus": 2.0,
                "gpus_waiting": 998,
                "fair_share": 0.6,
            },
            {"id": "bob", "user": "bob", "jobs": {"PENDING": 2}, "gpus": 0.5, "gpus_waiting": 2, "fair_share": None},
        ]
    elif pane == "queues":
        amounts = {"used_gpus": 3.0, "guaranteed_gpus": 4.0, "max_gpus": None, "borrowed_gpus": 0.0, "lent_gpus": 1.0}
        rows = [
            {"id": "lab", "name": "lab", "depth": 0, "running": 3, "pending": 1001, **amounts},
            {"id": "vision", "name": "vision", "depth": 1, "running": 1, "pending": 9, **amounts},
        ]
    found.take(board(rows=rows), found.view)
    compare(f"gtop-{pane}.txt", plain(frame(found, 80, 24)), GOLDEN)


@pytest.mark.parametrize(("width", "height"), [(40, 8), (79, 9), (80, 24), (100, 30), (129, 12), (140, 40), (200, 60)])
@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("kind", ["jobs", "cards", "help", "away", "question", "typing", "empty", "first", "wide"])
def test_a_frame_fits_its_terminal(width: int, height: int, is_ascii: bool, kind: str) -> None:
    found = state(is_ascii=is_ascii) if kind != "first" else TopState()
    if kind == "cards":
        found.pane = "cards"
    elif kind == "help":
        found.has_help = True
    elif kind == "away":
        found.away_since = NOW
    elif kind == "question":
        found.question = Question("gcancel " + ",".join(map(str, range(100))), "/v1/jobs/cancel", {}, count=100)
    elif kind == "typing":
        found.typing, found.message = "user:" + "x" * 300, "no such thing"
    elif kind == "empty":
        found.take(board(rows=[], cards=[]), "active")
    elif kind == "wide":
        found.take(board(rows=[row("1", name="名前" * 40, user="ユーザー" * 9)]), "active")
    found.log = Log("42") if kind in ("jobs", "wide") else None
    if found.log is not None:
        found.log.lines.extend(["x" * 500, "汉" * 300])
    lines = frame(found, width, height)
    assert len(lines) == height
    assert max(sum(cells(text) for text, _ in line) for line in lines) <= width


def test_many_cards_share_lines_and_the_rest_is_counted() -> None:
    found = state()
    found.take(board(cards=[card(number) for number in range(64)]), "active")
    text = plain(frame(found, 80, 24))
    assert "and 54 more cards, 54 of them idle; all: 1" in text
    found.pane = "cards"
    text = plain(frame(found, 80, 24))
    assert "more cards" not in text
    assert "cards 1-40 of 64" in text


def test_the_pane_of_cards_scrolls_to_its_last_line() -> None:
    found = state(pane="cards")
    found.take(board(cards=[card(number) for number in range(64)]), "active")
    frame(found, 80, 24)
    found.move(3)
    text = plain(frame(found, 80, 24))
    assert "cards 7-46 of 64" in text
    assert "\n6  [" in text
    for press in (lambda: found.go(found.total - 1), lambda: found.move(1)):
        press()
        text = plain(frame(found, 80, 24))
        assert "cards 25-64 of 64" in text
        assert "62 [" in text
    found.go(0)
    assert "cards 1-40 of 64" in plain(frame(found, 80, 24))
    found.go(12)
    assert "of 64" not in plain(frame(found, 80, 80)), "all fit, and none is out of sight"
    assert found.card_top == 0


RESERVATIONS = [
    {
        "id": "course",
        "name": "course",
        "is_active": False,
        "is_maintenance": False,
        "message": None,
        "users": ["alice", "evil\x1b[31m"],
        "accounts": ["vision"],
        "every_s": None,
        "next": {"start_at": NOW + 7200, "end_at": NOW + 14_400},
        "held": [{"node": "lab1", "is_node": False, "gpus": [{"index": 0}, {"index": 1}], "cpus": 8, "mem_mib": GIB}],
    },
    {
        "id": "update",
        "name": "update",
        "is_active": True,
        "is_maintenance": True,
        "message": "new driver",
        "users": [],
        "accounts": [],
        "every_s": None,
        "next": {"start_at": NOW - 60, "end_at": NOW + 3600},
        "held": [{"node": "lab1", "is_node": True, "gpus": [], "cpus": 0, "mem_mib": 0}],
    },
]


def test_reservations_and_maintenance_have_a_pane() -> None:
    found = state(pane="reservations")
    assert "waiting for the daemon's answer" in plain(frame(found, 80, 24))
    found.reservations = []
    assert "no reservations and no maintenance" in plain(frame(found, 80, 24))
    found.reservations = RESERVATIONS
    found.follow()
    found.move(1)
    assert (found.cursor, found.cursor_id) == (1, "update")
    found.take(board(version="a.9"), "active")
    assert found.cursor_id == "update", "a new board moves no cursor of this pane"
    compare("gtop-reservations.txt", plain(frame(found, 100, 24)), GOLDEN)
    found.ask("cancel")
    assert found.question is None
    assert "more cards" not in plain(frame(found, 140, 70))


def test_cards_of_several_nodes_have_their_node() -> None:
    found = state()
    nodes = [
        {"id": "lab1", "state": "up", "why": None, "gpu_error": None},
        {"id": "lab2", "state": "unreachable", "why": "lab2 does not answer since 13:50", "gpu_error": None},
    ]
    found.take(board(nodes=nodes, cards=[card(0), card(1, node="lab2", label="0")]), "active")
    text = plain(frame(found, 80, 24))
    assert "lab1:0 A100" in text
    assert "lab2:0 A100" in text
    assert "lab2 unreachable: lab2 does not answer since 13:50" in text


def test_what_is_not_known_is_no_zero() -> None:
    text = plain(frame(state(), 80, 24))
    assert "4 A100 [??????] n/a [??????]      n/a  n/a  n/a  idle" in text
    assert "1 A100 [######]" in text
    assert "GPU-4" not in text


@pytest.mark.parametrize("pane", ["jobs", "cards"])
def test_a_lost_daemon_dims_everything_but_the_header(pane: str) -> None:
    found = state(away_since=NOW - 600)
    found.pane = pane
    lines = frame(found, 80, 24)
    assert "daemon away since 13:50" in plain(lines[:1])
    assert {style for line in lines[1:] for _, style in line} == {"dim"}
    assert plain(lines[-1:]) == "q quit\n"


# --- hostile text -------------------------------------------------------------------------------

HOSTILE = {
    "a\x1b[31mb": "a[31mb",
    "a\x9b31mb": "a31mb",
    "a\x07\x08\x7fb": "ab",
    "a\nb\tc\rd": "a b c d",
    "\u202eabc\u2066d": "abcd",
    "a\u200bb\u200dc\ufeffd\u00ade": "abcde",
    "e\u0301\u0301\u0301": "e",
    "\ufe0f\ufe0fx": "x",
    "a\u00a0b\u2028c": "a b c",
    "\udc80\ud800": "",
    "\U000e0041x": "x",
    "名前": "名前",
    "[bold]x[/]": "[bold]x[/]",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_signs_that_move_or_hide_text_are_dropped(text: str) -> None:
    assert clean(text) == HOSTILE[text]


def test_hostile_names_reach_no_line() -> None:
    bad = "x\x1b]0;owned\x07\u202e\u200b\x9b2J"
    found = state()
    rows = [row("1", name=bad, user=bad, account=bad, queue=bad, reason=bad, reason_text=bad, where=bad, nice=1)]
    rows[0].update(state="RUNNING", start_at=NOW, progress=0.5, progress_text=bad)
    cards = [
        card(0, jobs=[holder("1", bad, bad)], name=bad, node=bad),
        card(1, foreign=[{"pid": 1, "user": bad, "name": bad, "vram_mib": 1, "job": None}]),
        card(2, state="suspect", why=bad),
    ]
    nodes = [{"id": bad, "state": "down", "why": bad, "gpu_error": bad}]
    answer = board(rows=rows, cards=cards, nodes=nodes)
    answer["parts"]["daemon"].update(node=bad, cluster_name=bad, warnings=[bad])
    answer["parts"]["me"].update(user=bad, config_problem=bad)
    answer["parts"]["notices"] = [{"kind": "drain", "what": bad, "message": bad}]
    found.take(answer, "active")
    found.why = {"id": "1", "text": bad, "alternatives": [{"text": bad, "starts": "now"}]}
    found.log = Log(bad, note=bad)
    found.log.lines.append(bad)
    found.marked = {"1"}
    found.filter = bad
    for width in (80, 140):
        for line in frame(found, width, 40):
            for text, _ in line:
                assert text.isprintable(), text
    found.ask("cancel")
    assert all(text.isprintable() for line in frame(found, 80, 24) for text, _ in line)


# --- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59, "0:59"), (3599, "59:59"), (3600, "1h00"), (90_000, "1d01h"), (9_000_000, "104d"), (-5, "0:00")],
)
def test_spans_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("after_s", "text"),
    [(0, "now"), (600, "14:10"), (40_000, "01:06"), (80_000, "12:13"), (90_000, "24 Nov"), (40 * 86400, "2 Jan 27")],
)
def test_instants_are_short(after_s: float, text: str) -> None:
    assert when(NOW + after_s, NOW) == text


@pytest.mark.parametrize(("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (1203, "1,203rd")])
def test_places_are_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(None, "[????]"), (0.0, "[----]"), (0.5, "[##--]"), (1.0, "[####]"), (7.0, "[####]")]
)
def test_bars_are_as_long_as_their_fraction(fraction: float | None, text: str) -> None:
    assert "".join(part for part, _ in bar(fraction, 4, True)) == text


def test_bars_have_eighths_of_a_column() -> None:
    assert "".join(part for part, _ in bar(0.5625, 2, False)) == "[█▏]"


def test_sparks_are_the_last_values() -> None:
    assert spark([0.0, 0.5, 1.0, None], 5, False) == "  ▄█?"
    assert spark([0.1] * 9, 3, True) == "..."


# --- the state ----------------------------------------------------------------------------------


def test_the_cursor_stays_on_its_job_when_rows_move() -> None:
    found = state()
    found.go(3)
    assert found.cursor_id == "63"
    found.take(board(rows=[row("9"), *ROWS], version="a.2"), "active")
    assert (found.cursor, found.cursor_id) == (4, "63")
    found.take(board(rows=[one for one in ROWS if one["id"] != "63"], version="a.3"), "active")
    # Its job is gone: the cursor is where it was, on the next one.
    assert (found.cursor, found.cursor_id) == (4, "71")
    found.take(board(rows=[], version="a.4"), "active")
    assert (found.cursor, found.row()) == (0, None)


def test_scrolling_asks_for_other_rows_in_steps() -> None:
    found = state(visible=10)
    found.take(board(facts={"total": 10_000, "offset": 0, "found": None}), "active")
    first = found.query()
    found.go(5)
    assert found.query() == first
    found.go(5000)
    assert found.top == 4991
    asked = found.query()
    assert int(asked["offset"]) <= 4991 <= 5001 <= int(asked["offset"]) + int(asked["limit"])


def test_filters_and_orders_are_parts_of_the_query() -> None:
    found = state()
    found.set_filter("user:bob  st:PD ")
    found.is_mine, found.sort, found.unfolded = True, "time", {"63"}
    asked = found.query()
    assert (asked["filter"], asked["sort"], asked["unfold"]) == ("user:bob  st:PD user:me", "time", "63")
    found.set_filter("color:red")
    assert found.is_refusal
    assert found.filter == "user:bob  st:PD"
    found.choose("queues")
    assert "filter" not in found.query()


QUESTIONS = [
    # verb, cursor, marks: command, number to type
    ("cancel", 0, set(), "gcancel 42", None),
    ("hold", 0, set(), "gctl hold 42", None),
    ("requeue", 0, set(), "gctl requeue 42", None),
    ("nicer", 0, set(), "gctl update 42 nice=10", None),
    ("less nice", 0, set(), "gctl update 42 nice=-10", None),
    ("cancel", 1, set(), "gcancel 57", 1),
    ("cancel", 3, set(), "gcancel 63", 998),
    ("release", 0, {"42", "63"}, "gctl release 42,63", 999),
]


@pytest.mark.parametrize(("verb", "cursor", "marked", "command", "count"), QUESTIONS)
def test_an_action_asks_and_shows_its_command(
    verb: str, cursor: int, marked: set[str], command: str, count: int | None
) -> None:
    found = state(marked=set(marked))
    found.go(cursor)
    found.ask(verb)
    assert found.question is not None
    assert (found.question.command, found.question.count) == (command, count)
    assert not found.question.is_confirmed
    found.question.typed = "y"
    assert found.question.is_confirmed is (count is None)
    found.question.typed = str(count)
    assert found.question.is_confirmed is (count is not None)


def test_an_ended_job_is_submitted_again_rather_than_requeued() -> None:
    found = state(has_ended=True)
    found.take(board(), "ended")
    found.go(0)
    found.ask("requeue")
    assert found.question is not None
    assert (found.question.command, found.question.path) == ("gsub --resubmit 42", "/v1/jobs")
    assert found.question.body == {"spec": {}, "resubmit": ["42"]}


NAMES = ["a", "fix-1", "b", "fix-2", "c", "d", "fix-3"]
"""Rows of a daemon, of which a window holds some."""


@pytest.mark.parametrize(
    ("cursor", "sought", "expected"),
    [(0, "fix", 1), (1, "fix", 3), (2, "fix", 3), (3, "fix", 6), (5, "fix", 6), (6, "fix", 1), (4, "none", None)],
)
def test_n_finds_the_next_row_of_all(cursor: int, sought: str, expected: int | None) -> None:
    found = state()
    found.set_filter(f"st:PD {sought}")
    found.set_filter("user:alice")
    assert found.sought == sought, "the word outlives its filter"
    found.cursor, found.cursor_id = cursor, NAMES[cursor]
    asked: list[dict[str, str]] = []

    async def ask(query: dict[str, str]) -> dict[str, Any]:
        asked.append(query)
        words = [word for word in query["filter"].split() if word != "user:alice"]
        names = [name for name in NAMES if all(word in name for word in words)]
        at = int(query.get("offset", 0))
        facts = {"total": len(names), "found": names.index(query["find"]) if query.get("find") in names else None}
        return {"lists": {"rows": {"order": names[at : at + 1], "facts": facts}}}

    assert asyncio.run(find_next(ask, found)) == expected
    assert {query["limit"] for query in asked} == {"1"}


@pytest.mark.parametrize("change", [{"is_read_only": True}, {"pane": "people"}, {"has_ended": True}, {"cursor": 99}])
def test_an_action_that_makes_no_sense_says_so(change: dict[str, Any]) -> None:
    found = state()
    for name, value in change.items():
        setattr(found, name, value)
    found.ask("cancel")
    assert found.question is None
    assert found.is_refusal


def test_an_array_is_unfolded_and_folded_again() -> None:
    found = state()
    found.go(3)
    found.fold()
    assert found.unfolded == {"63"}
    found.fold()
    assert found.unfolded == set()
    found.go(0)
    found.fold()
    assert found.message == "job 42 is not an array, and no other is equal to it"
