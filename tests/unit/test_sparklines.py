"""Sparklines of gshow and ginfo: unknown is not zero, both sets of characters, and what of a job is private."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gpusched.cli import sparklines
from gpusched.cli.sparklines import add_last_hour, add_series, last_hour, run_lines, spark
from gpusched.errors import Forbidden


class Client:
    """Answers of a daemon, by job and run or for all cards."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def call(self, _: str, path: str) -> dict[str, Any]:
        self.asked.append(path)
        for word, answer in self.answers.items():
            if word in path:
                if isinstance(answer, Exception):
                    raise answer
                return {"series": answer}
        raise AssertionError(path)


@pytest.fixture(params=[False, True], ids=["blocks", "ascii"])
def is_ascii(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(sparklines, "draws_blocks", lambda: not request.param)
    return bool(request.param)


def card(use: list[float | None], vram: list[float | None], index: int | None = 0) -> dict[str, Any]:
    return {"index": index, "use": use, "vram_mib": vram, "vram_max_mib": vram}


@pytest.mark.parametrize(
    ("named", "draws"),
    [
        ({}, True),
        ({"LANG": "de_DE.UTF-8"}, True),
        ({"LANG": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "POSIX"}, False),
        ({"TERM": "linux"}, False),
    ],
)
def test_blocks_are_for_terminals_whose_locale_has_them(
    named: dict[str, str], draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, word in named.items():
        monkeypatch.setenv(name, word)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert sparklines.draws_blocks() is draws


def test_a_run_has_a_line_for_each_card(is_ascii: bool) -> None:
    lines = run_lines([card([0.0, 0.5, 1.0, None], [0.0, 1024.0, 2048.0, None]), card([None], [None], 3)])
    drawn = " +@?" if is_ascii else " ▄█?"
    assert lines == [
        f"  GPU 0  use |{drawn}| mean 50%  memory |{drawn}| peak 2G",
        "  GPU 3  use n/a  memory n/a",
    ]


def test_a_narrow_terminal_breaks_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparklines, "draws_blocks", lambda: False)
    monkeypatch.setattr(sparklines, "screen", lambda: (24, 60))
    lines = run_lines([card([0.0] * 20, [0.0] * 20)])
    assert lines == [f"  GPU 0  use |{'':20}| mean 0%", f"         memory |{'':20}| peak 0M"]


def test_zero_and_unknown_differ(is_ascii: bool) -> None:
    assert spark([0.0, None, 2.0, -1.0], 4, is_ascii) == (" ?@ " if is_ascii else " ?█ ")
    (line,) = run_lines([card([0.0, 0.0], [0.0, 0.0], None)])
    assert line == "  GPU ?  use |  | mean 0%  memory |  | peak 0M"


def test_a_run_of_one_second_has_figures_and_no_curve(is_ascii: bool) -> None:
    (line,) = run_lines([card([0.4, None], [None, 1024.0])])
    assert line == "  GPU 0  use mean 40%  memory peak 1G"


def test_a_run_on_many_cards_shows_some() -> None:
    lines = run_lines([card([0.1], [1.0], at) for at in range(20)])
    assert (len(lines), lines[-1]) == (17, "  and 4 more GPUs")


def test_series_are_asked_for_runs_with_gpus_that_have_started() -> None:
    client = Client({"run=1": [card([0.1], [1.0])], "run=3": Forbidden("private")})
    runs: list[dict[str, Any]] = [
        {"run": 1, "gpus": [{}], "start_at": 1.0},
        {"run": 2, "gpus": [{}], "start_at": None},
        {"run": 3, "gpus": [{}], "start_at": 2.0},
        {"run": 4, "gpus": [], "start_at": 2.0},
    ]
    add_series(client, {"id": "42_1", "runs": runs})  # type: ignore[arg-type]
    assert [len(run["series"]) for run in runs] == [1, 0, 0, 0]
    assert len(client.asked) == 2


def test_a_card_without_samples_has_no_last_hour(is_ascii: bool) -> None:
    about = {"start_at": 0.0, "step_s": 150}
    client = Client({"cards=all": [{"uuid": "a", **about, "use": [None, 0.25], "vram_mib": [None, 1.0]}]})
    cards: list[dict[str, Any]] = [{"uuid": "a"}, {"uuid": "b"}]
    add_last_hour(client, cards)  # type: ignore[arg-type]
    assert cards[0]["last_hour"] == {**about, "use": [None, 0.25], "vram_mib": [None, 1.0]}
    assert [last_hour(one) for one in cards] == [f"|?{':' if is_ascii else '▂'}| mean 25%", "n/a"]
