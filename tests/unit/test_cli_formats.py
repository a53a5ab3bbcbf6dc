"""Small languages: Slurm's % fields, instants, query values, the last lines of a file."""

from __future__ import annotations

import os
import pwd
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote as urllib_quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm.gq_format import _FIELDS, keys, render
from gpusched.cli.output import exit_code_of
from gpusched.cli.query import quote
from gpusched.instants import parse_instant, parse_since
from gpusched.tail import find_lines

JOB: dict[str, Any] = {
    "id": "42",
    "name": "train|net",
    "user": "ada",
    "account": "",
    "queue": "default",
    "state": "PENDING",
    "reason": "Priority",
    "node": None,
    "start_at": None,
    "end_at": None,
    "submit_at": 0.0,
    "time_limit_s": 3600,
    "cpus": 2.0,
    "mem_mib": 1536,
    "gpu_request": "a100:2",
    "gpu_type": "a100",
    "gpu_fraction": None,
    "vram_mib": None,
    "total_gpus": 2,
    "work_dir": "/data",
    "nice": 0,
    "dependency": None,
    "priority": 1234.5,
    "command": "train.sh",
    "suspended_at": None,
    "suspended_s": 0.0,
    "qos": None,
    "reservation": None,
    "nodes": 1,
    "gpus_per_node": 2,
    "nodelist": [],
    "exclude": [],
    "constraint": None,
    "licenses": {},
    "exclusive": False,
}
GANG: dict[str, Any] = {
    **JOB,
    "qos": "high",
    "reservation": "course",
    "nodes": 2,
    "gpu_request": "a100:4(8192M)",
    "total_gpus": 4,
    "vram_mib": 8192,
    "nodelist": ["lab1", "lab2"],
    "exclude": ["lab3"],
    "constraint": "nvlink",
    "licenses": {"ansys": 1, "matlab": 2},
    "exclusive": True,
}


SHARED = {**GANG, "gpu_request": "2x0.5", "gpus_per_node": 1, "gpu_fraction": 0.5, "gpu_type": None, "vram_mib": None}
SUBMITTED = {"uid": os.getuid(), "comment": None, "wckey": "sweep", "tasks_left": None, "throttle": None}


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("%i", "42"),
        ("%.8i", "      42"),
        ("%8i|", "42      |"),
        ("%.5j", "train"),
        ("%3j", "tra"),
        ("%A|%u|%t|%.15j|%Z", "42|ada|PD|      train|net|/data"),
        ("%i %T %r %R", "42 PENDING Priority (Priority)"),
        ("%M %l %L", "0:00 1:00:00 1:00:00"),
        ("%P %C %m %b %D", "default 2 1.5G gres:gpu:a100:2 1"),
        ("%N|%B|%S|%e|%a|%E", "|n/a|N/A|N/A|(null)|(null)"),
        ("%Q %p %y %o", "1234 1234.500000 0 train.sh"),
        ('"%i"\\x1f^^^', '"42"\\x1f^^^'),
        ("%-8i", "%-8i"),
        ("%", "%"),
        ("%%i", "%%i"),
        ("%.i", "42"),
        ("100%", "100%"),
        ("", ""),
    ],
)
def test_slurm_fields_are_printed(form: str, line: str) -> None:
    assert render(form, [JOB], header=False) == line + "\n"


def test_every_letter_of_slurm_is_a_field() -> None:
    assert set(_FIELDS) == set(string.ascii_letters)
    assert (
        render("%z|%.8G|%K|%w", [{**JOB, **SUBMITTED}], header=False)
        == f"*:*:*|{pwd.getpwuid(os.getuid()).pw_gid:>8}|N/A|sweep\n"
    )


def test_node_requests_are_shown_in_slurm_fields() -> None:
    form = "%q %v %D %f %W %n %x %h %b"
    assert render(form, [JOB], header=False) == "normal (null) 1 (null) (null)   OK gres:gpu:a100:2\n"
    line = "high course 2 nvlink ansys:1,matlab:2 lab1,lab2 lab3 NO gres:gpu:a100:2(8192M)\n"
    assert render(form, [GANG], header=False) == line
    assert render("%b", [SHARED], header=False) == "gres:gpu:0.5\n"


@pytest.mark.parametrize("letter", sorted(_FIELDS))
@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED"])
def test_a_field_uses_the_requested_keys(letter: str, state: str) -> None:
    known = {**GANG, **SUBMITTED, "state": state, "start_at": 1.0}
    asked = keys(f"%{letter}")
    assert render(f"%{letter}", [{key: known[key] for key in asked}]) == render(f"%{letter}", [known])


def test_only_printed_fields_are_requested() -> None:
    assert keys("%i %.8j|%t %T") == ["id", "name", "state"]
    assert keys("100% %%") == []


def test_titles_have_the_widths_of_their_fields() -> None:
    assert render("%.8i|%4t|%3j", [JOB]) == "   JOBID|ST  |NAM\n      42|PD  |tra\n"


def test_a_running_job_shows_place_and_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    job = {**JOB, "state": "RUNNING", "start_at": 900.0, "node": "lab1"}
    assert render("%t %M %L %R %N", [job], header=False) == "R 1:40 58:20 lab1 lab1\n"
    assert render("%L", [{**job, "time_limit_s": None}], header=False) == "UNLIMITED\n"


def test_a_field_never_prints_an_escape() -> None:
    assert render("%j", [{**JOB, "name": "a\x1b[31m\n"}], header=False) == "a\\x1b[31m\\n\n"


@given(st.text())
def test_any_format_prints_one_line_per_job(form: str) -> None:
    assert render(form, [JOB, JOB]).endswith("\n")


@pytest.fixture
def _berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


NOW = 1795251600.0
"""2026-11-21 10:00 in Berlin."""


@pytest.mark.usefixtures("_berlin")
@pytest.mark.parametrize(
    ("text", "after_s"),
    [
        ("now", 0),
        ("now+2h", 7200),
        ("now+1hour", 3600),
        ("now+30minutes", 1800),
        ("now+90", 90),
        ("now+2days", 172800),
        ("now-1h", -3600),
        ("now+1h30m", 5400),
        ("2h", 7200),
        ("6pm", 8 * 3600),
        ("18:00", 8 * 3600),
        ("09:00", 23 * 3600),
        ("10:00:01", 1),
        ("noon", 2 * 3600),
        ("midnight", 14 * 3600),
        ("tomorrow", 14 * 3600),
        ("2026-11-22", 14 * 3600),
        ("2026-11-21T10:30", 1800),
        ("2026-11-21T10:30:05", 1805),
        ("@1795251601", 1),
    ],
)
def test_instants_are_parsed(text: str, after_s: int) -> None:
    assert parse_instant(text, NOW) - NOW == after_s


@pytest.mark.usefixtures("_berlin")
def test_a_day_with_a_change_of_clocks_keeps_the_time_of_day() -> None:
    before = parse_instant("2026-10-24T12:00")
    assert parse_instant("2026-10-25T12:00") - before == 25 * 3600
    assert parse_instant("11:59", before) - before == 25 * 3600 - 60


@pytest.mark.parametrize("text", ["", "soon", "now-", "now+", "now+x", "25:00", "2026-02-30", "@", "@-1", "1"])
def test_an_invalid_instant_is_quoted(text: str) -> None:
    with pytest.raises(ValueError):
        parse_instant(text, NOW)


@given(st.text())
def test_any_text_raises_at_most_a_value_error(text: str) -> None:
    said = ""
    try:
        parse_instant(text, NOW)
    except ValueError as error:
        said = str(error)
    assert said.isprintable()


def test_since_counts_back() -> None:
    assert NOW - parse_since("7d", NOW) == 7 * 86400
    assert parse_since("@5", NOW) == 5.0


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_query_values_are_quoted_as_urllib_does(text: str) -> None:
    assert quote(text) == urllib_quote(text, safe=",@~")


@given(st.lists(st.sampled_from([b"", b"a", b"\r", b"\xff\0"]), max_size=8), st.booleans(), st.integers(0, 10))
def test_the_last_lines_of_a_file_are_read(lines: list[bytes], is_closed: bool, count: int) -> None:
    content = b"".join(line + b"\n" for line in lines) + (b"" if is_closed else b"open")
    whole = [line + b"\n" for line in lines] + ([] if is_closed else [b"open"])
    fd = os.memfd_create("lines")
    try:
        os.write(fd, content)
        assert content[find_lines(fd, count)[0] :] == b"".join(
            whole[len(whole) - count :] if count < len(whole) else whole
        )
    finally:
        os.close(fd)


def test_the_last_lines_of_a_file_larger_than_a_chunk_are_read(tmp_path: Path) -> None:
    lines = [b"%d %s\n" % (number, b"x" * (number % 200)) for number in range(3000)]
    path = tmp_path / "log"
    path.write_bytes(b"".join(lines))
    fd = os.open(path, os.O_RDONLY)
    try:
        for count in (1, 2, 500, 1500, 2999, 3000, 3001):
            assert path.read_bytes()[find_lines(fd, count)[0] :] == b"".join(lines[-count:])
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"state": "COMPLETED", "exit_code": 0, "signal": None}, 0),
        ({"state": "FAILED", "exit_code": 7, "signal": None}, 7),
        ({"state": "FAILED", "exit_code": None, "signal": 9}, 137),
        ({"state": "FAILED", "exit_code": None, "signal": None}, 1),
        ({"state": "TIMEOUT", "exit_code": None, "signal": 15}, 143),
        ({"state": "CANCELLED", "exit_code": 5, "signal": None}, 1),
        ({"state": "NODE_FAIL", "exit_code": None, "signal": None}, 1),
        ({"state": "TIMEOUT", "exit_code": 0, "signal": None}, 1),
    ],
)
def test_a_waiting_command_returns_the_exit_code(job: dict[str, Any], code: int) -> None:
    assert exit_code_of(job) == code
