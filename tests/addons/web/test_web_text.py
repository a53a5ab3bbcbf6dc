"""Values as the pages write them: output with colors, ranges of instants, ids."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpusched.addons.web.text import clock, clock_after, first_ids, overtaken_in, percent_done, pieces, step


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", [("", "plain")]),
        ("a\x1b[31mred\x1b[0m b", [("", "a"), ("c1", "red"), ("", " b")]),
        ("\x1b[1;32mok\x1b[22m still", [("c2 bold", "ok"), ("c2", " still")]),
        ("\x1b[38;5;196mone of 256\x1b[39m none", [("c4", "one of 256"), ("", " none")]),
        ("\x1b[48;2;1;31;3mback", [("", "back")]),
        ("\x1b[2K\x1b[1Gdone\x1b[?25h", [("", "done")]),
        ("\x1b]0;a title\x07text\x1b(B", [("", "text")]),
        ("\x1b", []),
        ("a\x1b", [("", "a")]),
        ("50%\r\x1b[32m51%\r\n", [("c2", "51%\n")]),
        ("\x00\u202e", [("", "\\x00\\u202e")]),
        ("\x1b[97mwhite", [("", "white")]),
    ],
)
def test_output_is_shown_with_colors_and_without_codes(text: str, shown: list[tuple[str, str]]) -> None:
    assert pieces(text) == shown


def test_output_of_codes_alone_takes_no_longer_than_its_length() -> None:
    began = time.process_time()
    assert pieces("\x1b[" * 30_000 + "\x1b]" * 30_000) is not None
    assert time.process_time() - began < 5


def test_the_day_of_a_range_is_said_once() -> None:
    noon = time.mktime((*time.localtime()[:3], 12, 0, 0, 0, 0, -1)) + 2 * 86400
    assert (clock(noon)[-5:], clock_after(noon + 3600, noon)) == ("12:00", "13:00")
    assert clock_after(noon + 86400, noon) == clock(noon + 86400)
    assert clock_after(noon + 40 * 86400, noon + 40 * 86400) == clock(noon + 40 * 86400)


def test_ids_are_cut_and_percentages_rounded_down() -> None:
    assert [first_ids(ids) for ids in ("3", "3-5,7", "100-200,300-400,500")] == ["3", "3-5,7", "100-200,..."]
    assert [percent_done(part) for part in (0.0, 0.999, 1.0)] == ["0%", "99%", "100%"]


def test_steps_of_curves_are_in_their_unit() -> None:
    assert [step(seconds) for seconds in (1, 60, 90, 300, 3600, 86_400)] == [
        "1 s",
        "1 min",
        "90 s",
        "5 min",
        "1 h",
        "24 h",
    ]


def test_rows_of_the_board_name_the_job_that_others_overtake() -> None:
    def row(job_id: str, reason: str, high_at: float | None) -> dict[str, Any]:
        return {"id": job_id, "reason": reason, "expected": None if high_at is None else {"high_at": high_at}}

    rows = [{"id": "9"}, row("1", "Resources", 300.0), row("2", "Priority", 100.0), row("3", "Priority", None)]
    assert overtaken_in(rows).startswith("job 1 is further ahead")
    assert overtaken_in(rows[:2]) == ""
