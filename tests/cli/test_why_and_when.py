"""gq --why and gq --start, typed against a real daemon with simulated GPUs: when, and what would help."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from shell import Shell, compare, stopped
from support import wait_until

from gpusched.cli import forecast
from gpusched.cli.forecast import instant, when, why_lines

NOW = time.mktime((2026, 3, 5, 12, 0, 30, 0, 0, -1))


@pytest.fixture
def lab(own: Shell) -> Shell:
    """Two cards: job 1 has one for two hours, both are reserved for job 2 at once, job 3 wants one for three hours."""
    config = own.home / "config.toml"
    config.write_text(f"{config.read_text()}[priority]\nreserve_after_s = 0\nreserve_after_runs = 0\n")
    own.submit("-g", "1", "-t", "2h", "--", "sleep", "600")
    own.submit("-g", "2", "-t", "1h", "-J", "wide", "--", "sleep", "600")
    own.submit("-g", "1", "-t", "3h", "-J", "long", "--", "sleep", "600")
    wait_until(lambda: "RUNNING" in own.ok("gq", "-j", "1", "-o", "%T"), what="job 1 to run")
    return own


def starts(sh: Shell, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(sh.ok("gq", "--start", "--json", *words))["starts"]
    return found


def test_suggested_commands_help_when_typed(lab: Shell) -> None:
    lines = lab.ok("gq", "--why", "3")
    (advice,) = [line for line in lines.splitlines() if "would start now" in line]
    typed = re.fullmatch(r"  would start now with -t (\S+) \(if .*\): gctl (update 3 time=\1)", advice)
    assert typed is not None, lines
    lab.ok("gctl", *typed.group(2).split())
    wait_until(lambda: "RUNNING" in lab.ok("gq", "-j", "3", "-o", "%T"), what="job 3 to run")


def test_why_prints_the_parts_of_the_priority(lab: Shell) -> None:
    text = lab.ok("gq", "--why", "3")
    assert re.search(
        r"^  response ratio: \d+\.\d\d \(turn 1, share 1\.00, waited 0:\d\d, expected 3:00:00, ", text, re.M
    )
    assert "  priority: " not in text
    config = lab.home / "config.toml"
    config.write_text(config.read_text() + 'order = "multifactor"\n')
    lab.ok("gctl", "reload")
    text = lab.ok("gq", "--why", "3")
    assert re.search(r"^  priority: \d+\.\d \(age \d+\.\d, fairshare ", text, re.MULTILINE)
    assert "response ratio" not in text
    config.write_text(config.read_text().replace("multifactor", "fifo"))
    lab.ok("gctl", "reload")
    text = lab.ok("gq", "--why", "3")
    assert "  priority: " not in text
    assert "response ratio" not in text


def test_place_and_start_are_shown(lab: Shell) -> None:
    text = lab.ok("gq", "--why", "2")
    assert "  position in the queue: 1 of 2\n" in text
    assert re.search(r"  start: \S+ at the latest, if no later submission goes ahead of it\n", text)
    why = json.loads(lab.ok("gq", "--why", "3", "--json"))["why"]
    assert (why["place"], why["of"]) == (2, 2)
    assert why["start"]["high_at"] - time.time() == pytest.approx(3 * 3600, abs=120)
    (one,) = [one for one in why["alternatives"] if one["option"].startswith("-t")]
    assert (one["starts"], one["change"]) == ("now", {"time_limit_s": 6900})


def test_a_running_task_of_a_pending_array_is_shown_as_running(own: Shell) -> None:
    array = own.submit("-a", "0-2%1", "-t", "1h", "--", "sleep", "600")
    wait_until(lambda: "RUNNING" in own.ok("gq", "-j", f"{array}_0", "-o", "%T"), what="the first task to run")
    assert own.ok("gq", "--why", f"{array}_0") == f"job {array}_0 is RUNNING\n"
    why = json.loads(own.ok("gq", "--why", f"{array}_1", "--json"))["why"]
    assert (why["id"], why["reason"]) == (f"{array}_1", "JobArrayTaskLimit")


def test_an_arrays_start_is_that_of_its_next_task(own: Shell) -> None:
    own.submit("-g", "2", "-t", "1h", "--", "sleep", "600")
    array = own.submit("-a", "0-2", "-g", "2", "-t", "30m", "--", "sleep", "600")
    why, task = (json.loads(own.ok("gq", "--why", job, "--json"))["why"] for job in (array, f"{array}_0"))
    assert (why["place"], why["of"], task["place"]) == (1, 3, 1)
    assert why["start"]["high_at"] == task["start"]["high_at"] is not None
    (row,) = starts(own)
    assert (row["id"], row["start_high_at"]) == (array, why["start"]["high_at"])
    begins = own.submit("-a", "0-2", "-g", "1", "--begin", "now+2d", "-t", "1h", "--", "true")
    assert next(one for one in starts(own) if one["id"] == begins)["start_high_at"] is not None


def test_starts_are_shown_as_a_table(lab: Shell) -> None:
    lab.submit("-H", "-J", "held", "--", "true")
    titles, *rows = [line.split() for line in lab.ok("gq", "--start").splitlines()]
    assert titles == ["JOBID", "NAME", "USER", "ST", "START_TIME", "NODELIST", "REASON"]
    assert [(row[0], row[1], row[3], *row[5:]) for row in rows] == [
        ("2", "wide", "PD", "lab1", "(Resources)"),
        ("3", "long", "PD", "N/A", "(Priority)"),
        ("4", "held", "PD", "N/A", "(JobHeldUser)"),
    ]
    assert rows[2][4] == "N/A"
    assert lab.ok("gq", "--start", "--quiet").split() == ["2", "3", "4"]
    assert lab.ok("gq", "--start", "--noheader").split()[0] == "2"


def test_starts_are_shown_as_a_document(lab: Shell) -> None:
    wide, long = starts(lab)
    now = time.time()
    assert (wide["id"], wide["nodes"], wide["reason"]) == ("2", ["lab1"], "Resources")
    assert wide["start_high_at"] - now == pytest.approx(7200, abs=60)
    assert long["start_high_at"] - now == pytest.approx(10_800, abs=120)
    assert [row["id"] for row in starts(lab, "-j", "3")] == ["3"]
    assert starts(lab, "-j", "1") == [], "a running job does not wait"


def test_unknown_starts_are_shown_as_unknown(own: Shell) -> None:
    own.submit("-g", "2", "--", "sleep", "600")
    waiting = own.submit("-g", "1", "--", "true")
    text = own.ok("gq", "--why", waiting)
    assert "  start: unknown, neither time limits nor earlier runs tell when the jobs before it end\n" in text
    (row,) = starts(own)
    assert (row["start_low_at"], row["start_high_at"]) == (None, None)


def test_earlier_runs_determine_the_earliest_start(own: Shell) -> None:
    for _ in range(3):
        own.ok("gsub", "-W", "--quiet", "-g", "2", "-t", "1h", "--", "sleep", "0.2")
    own.submit("-g", "2", "-t", "1h", "--wrap", "sleep 600")
    own.submit("-g", "2", "-t", "1h", "--", "sleep", "0.3")
    own.submit("-g", "2", "-t", "1h", "--", "true")
    usual, last = starts(own)
    # Nothing like the wrapped line has run: its limit is all that is known of it.
    assert usual["start_low_at"] == usual["start_high_at"]
    # The one between is like three that took a moment, but may take its hour.
    assert last["start_low_at"] - usual["start_high_at"] < 60
    assert last["start_high_at"] - usual["start_high_at"] == pytest.approx(3600, abs=60)


def test_the_expected_run_time_is_shown_while_pending(own: Shell) -> None:
    for _ in range(2):
        own.ok("gsub", "-g", "1", "--wait", "--", "sleep", "0.1")
    own.submit("-g", "1", "--hold", "--", "sleep", "0.1")
    # A loaded machine takes longer over them.
    said = re.search(r"^  expected to run 0:(\d\d), like similar jobs$", own.ok("gq", "--why", "3"), re.MULTILINE)
    assert said is not None
    assert re.search(rf"^Expected: +to run 0:{said[1]}, like similar jobs$", own.ok("gshow", "3"), re.MULTILINE)
    (job,) = json.loads(own.ok("gshow", "3", "--json"))["jobs"]
    assert (job["expected"]["by"], job["expected"]["length_s"]) == ("prediction", int(said[1]))
    (ended,) = json.loads(own.ok("gshow", "1", "--json"))["jobs"]
    assert ended["expected"] is None


def test_estimates_are_recorded_and_completed(own: Shell) -> None:
    own.submit("-g", "2", "-t", "1h", "--", "sleep", "9")
    waiting = own.submit("-g", "2", "-t", "1h", "--", "true")
    own.ok("gwait", waiting)
    database = sqlite3.connect(own.home / "gpusched.db")
    rows = database.execute("SELECT job_id, low_at, high_at, start_at FROM estimates").fetchall()
    database.close()
    ((job_id, low_at, high_at, start_at),) = rows
    assert job_id == int(waiting)
    assert low_at <= high_at
    assert start_at < high_at


def test_a_dry_run_shows_the_start_and_what_would_help(lab: Shell) -> None:
    lines = lab.ok("gsub", "--dry-run", "-g", "1", "-t", "3h", "--", "true").splitlines()
    assert lines[0].startswith("would wait: ")
    assert re.fullmatch(r"start: \S+ at the latest, if no later submission goes ahead of it", lines[1])
    unknown = "if that is long enough: too few jobs like it have ended to tell"
    assert lines[2:] == [f"would start now with -t 1h55m ({unknown})"]
    assert not [line for line in lab.ok("gsub", "--dry-run", "-g1", "-t8h", "--", "true").splitlines() if "-t" in line]
    found = json.loads(lab.ok("gsub", "--dry-run", "--json", "-g", "1", "-t", "3h", "--", "true"))["dry_run"]
    assert [one["option"] for one in found["alternatives"]] == ["-t 1h55m"]
    assert found["start_at"] >= found["start_low_at"] > time.time()
    assert lab.ok("gsub", "--dry-run", "-g", "1", "-t", "1h", "--", "true").startswith("would start now on lab1, GPU ")


def test_hundreds_of_pending_jobs_cost_the_daemon_little_time(own: Shell, tmp_path: Path) -> None:
    """It answers nobody else meanwhile. Measured in its own processor time, beside that of a loop on this machine."""
    own.submit("-g", "1", "-t", "2h", "--", "sleep", "600")
    own.submit("-g", "1", "-t", "3h", "--", "sleep", "600")
    for hours in (1, 2, 3, 4, 5):
        lines = tmp_path / f"batch{hours}"
        lines.write_text("".join(f"echo {number}\n" for number in range(100)))
        own.ok("gsub", "--quiet", "-g", "1", "-t", f"{hours}h", "--batch", str(lines))
    pid = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
    ratios = []
    for _ in range(3):
        began = psutil.Process(pid).cpu_times()
        assert len(starts(own)) == 500
        ended = psutil.Process(pid).cpu_times()
        ratios.append((ended.user + ended.system - began.user - began.system) / of_a_loop_s())
    assert min(ratios) < 2, ratios


def of_a_loop_s() -> float:
    """Processor time of three million steps through a dictionary: about 0.2 s on a machine of 2020."""
    found = dict.fromkeys(range(1000), 0)
    began = time.process_time()
    for _ in range(3000):
        for key in found:
            found[key] += 1
    return time.process_time() - began


def waits_for(own: Shell, settings: str) -> str:
    """The second of two jobs that each want both cards, with these settings of [priority]."""
    with (own.home / "config.toml").open("a") as file:
        file.write(f"[priority]\n{settings}\n")
    own.submit("-g", "2", "--", "sleep", "600")
    return own.submit("-g", "2", "-t", "1h", "--", "true")


BOUNDED = {
    "before anything is reserved": "",
    "once room is reserved": "reserve_after_s = 0\nreserve_after_runs = 0",
    "past the bound": "reserve_after_s = 0\nreserve_after_runs = 0\nfence_s = 0.01",
}


def test_the_delay_bound_is_shown(tmp_path: Path, own: Shell) -> None:
    shown = []
    for number, (title, settings) in enumerate(BOUNDED.items()):
        home, work = tmp_path / f"home{number}", tmp_path / f"work{number}"
        home.mkdir()
        work.mkdir()
        (home / "config.toml").write_text((own.home / "config.toml").read_text())
        sh = Shell(home, work, GPUSCHED_FAKE_GPUS="2x24GiB")
        try:
            job = waits_for(sh, settings)
            deadline = time.monotonic() + 60
            while title == "past the bound" and "only the jobs that run there" not in sh.ok("gq", "--why", job):
                assert time.monotonic() < deadline, sh.ok("gq", "--why", job)
                # Something else to plan for, so that the plan is of a later instant.
                sh.submit("-g", "2", "-t", "2h", "--", "true")
            facts = json.loads(sh.ok("gq", "--why", job, "--json"))["why"]["facts"]
            instants = sorted(name for name in facts if name in ("reserves_at", "delay_ends_at"))
            text = re.sub(r" of \d+\n", " of N\n", sh.ok("gq", "--why", job))
            text = re.sub(r"(\d{4}-\d\d-\d\dT)?(?<!\d)\d\d:\d\d(?!\d)", "<TIME>", text)
            shown.append(f"# {title}: {', '.join(instants)}\n" + re.sub(r"  response ratio: .*\n", "", text))
        finally:
            stopped(sh)
    compare("gq-why-bounds.txt", "\n".join(shown))


# --- the words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low_s", "high_s", "shown"),
    [
        (None, None, "N/A"),
        (0, 0, "now"),
        (600, 600, "12:11"),
        (600, 1200, "12:10 - 12:21"),
        (600, None, "12:10 - N/A"),
        (0, 1200, "now - 12:21"),
        (600, 630, "12:11"),
        (30, 86_400 * 2, "12:01 - 2026-03-07T12:01"),
    ],
)
def test_ranges_are_rounded_outwards(low_s: float | None, high_s: float | None, shown: str) -> None:
    low_at, high_at = (None if at is None else NOW + at for at in (low_s, high_s))
    assert when(low_at, high_at, NOW) == shown


def test_a_past_instant_is_shown_as_now() -> None:
    assert instant(NOW - 100, NOW) == "now"


def asked(**parts: Any) -> dict[str, Any]:
    bare = {
        "id": "7",
        "state": "PENDING",
        "reason": "Priority",
        "place": None,
        "of": None,
        "start": None,
        "alternatives": [],
    }
    return {**bare, "accuracy": None, **parts}


def test_jobs_that_are_not_pending_show_no_start() -> None:
    assert why_lines(asked(state="RUNNING"), NOW) == []


def test_accuracy_is_shown_once_there_are_enough_estimates() -> None:
    start = {"low_at": NOW + 600, "high_at": NOW + 1200}
    good = {"count": 40, "inside": 0.8, "median_error_s": 75.0}
    line = why_lines(asked(start=start, accuracy=good), NOW)[-1]
    assert line == (
        "accuracy so far: 80% of 40 jobs started within their range, half of them within 1:15 of its beginning"
    )
    assert len(why_lines(asked(start=start, accuracy={**good, "count": 4}), NOW)) == 1
    assert len(why_lines(asked(accuracy=good), NOW)) == 1


def test_the_80_percent_range_is_shown_once_known() -> None:
    start = {"low_at": NOW + 600, "high_at": NOW + 1200, "likely_low_at": NOW + 90, "likely_high_at": NOW + 1530}
    first, last = (instant(at, NOW) for at in (NOW + 90, NOW + 1530))
    assert f"four in five jobs with this estimate started between {first} and {last}" in why_lines(
        asked(start=start), NOW
    )
    good = {"count": 40, "inside": 0.5, "median_error_s": 75.0, "likely_count": 30, "likely_inside": 0.8}
    assert why_lines(asked(start=start, accuracy=good), NOW)[-1].endswith(
        "; 80% of 30 within the range for four in five"
    )


OFF = {"runs": 40, "guess_factor": 1.41, "limit_factor": 12.06, "is_own": True, "is_used": True}
OWN = "limits of ann's last 40 jobs were off by a factor of 12.1, predictions by 1.4"
EXPECTED = {
    "a prediction": ({"by": "prediction"}, f"3:00:00, as predicted: {OWN}"),
    "its limit": ({"by": "limit", "length_s": 36000}, f"10:00:00, its time limit: {OWN}"),
    "everybody's runs": (
        {"by": "prediction", "predictions": {**OFF, "is_own": False}},
        f"3:00:00, as predicted: {OWN.replace('ann', 'the', 1).replace(chr(39) + 's', '', 1)}",
    ),
    "too few runs": ({"by": "prediction", "predictions": {**OFF, "runs": 19}}, "3:00:00, as predicted"),
    "its limit, of which little is known": ({"by": "limit", "predictions": {**OFF, "runs": 19}}, ""),
    "runs that reached their limit": (
        {"by": "overruns", "overruns": 5, "length_s": 3600, "time_limit_s": 600},
        "1:00:00 instead of 10:00: 5 similar jobs reached the time limit",
    ),
    "no limit": ({"by": "prediction", "is_stated": False, "time_limit_s": None}, "3:00:00, like similar jobs"),
    "a default limit": ({"by": "limit", "is_stated": False}, ""),
    "nothing": ({"by": "unknown", "is_stated": False, "length_s": None, "time_limit_s": None}, ""),
}


@pytest.mark.parametrize(("parts", "text"), EXPECTED.values(), ids=EXPECTED)
def test_the_expected_run_time_is_shown_with_its_basis(parts: dict[str, Any], text: str) -> None:
    bare = {
        "length_s": 10800,
        "overruns": 0,
        "user": "ann",
        "time_limit_s": 36000,
        "is_stated": True,
        "predictions": OFF,
    }
    lines = why_lines(asked(expected={**bare, **parts}), NOW)
    assert lines[1:] == ([f"expected to run {text}"] if text else [])


def test_foreign_jobs_show_only_their_expected_run_time() -> None:
    assert why_lines(asked(expected={"length_s": 600}), NOW)[1:] == ["expected to run 10:00"]


def test_a_bound_is_shown_as_an_instant_until_it_passes() -> None:
    later = why_lines(asked(facts={"reserves_at": NOW + 600}), NOW)[1:]
    assert later == ["other jobs may start ahead of it until 12:11; after that, resources are reserved for it"]
    (line,) = why_lines(asked(facts={"delay_ends_at": NOW + 86_400}), NOW)[1:]
    assert line == "other jobs may delay it until 2026-03-06T12:01 at most"
    assert why_lines(asked(facts={"delay_ends_at": NOW - 1}), NOW)[1:] == [
        "only the jobs that run there still delay it"
    ]
    assert why_lines(asked(facts={"reserves_at": NOW - 1}), NOW)[1:] == []


@pytest.mark.parametrize(
    ("fact", "after_s", "said"),
    [
        ("reserves_at", 7200, "if it has not started by 14:01, resources are reserved for it from then on"),
        (
            "reserves_at",
            300,
            "other jobs may start ahead of it until 12:06; after that, resources are reserved for it until it starts",
        ),
        ("delay_ends_at", 7200, "other jobs may delay it beyond that, until 14:01 at most"),
        ("delay_ends_at", 300, "no job that starts after 12:06 delays it"),
    ],
)
@pytest.mark.parametrize("ends", [{"low_at": None}, {"high_at": None}, {}])
def test_a_bound_is_related_to_the_expected_start(fact: str, after_s: int, said: str, ends: dict[str, None]) -> None:
    start = {"low_at": NOW + 600, "high_at": NOW + 1200, "likely_low_at": None, "likely_high_at": NOW + 9000, **ends}
    assert why_lines(asked(start=start, facts={fact: NOW + after_s}), NOW)[-1] == said


@pytest.mark.parametrize(
    ("reason", "place", "said"),
    [
        ("JobHeldUser", None, "unknown while it is held"),
        ("PartitionDown", None, "unknown while the queue is paused"),
        ("BudgetSpent", 1, "unknown until there is room in the budget"),
        ("Resources", 1, "unknown, neither time limits nor earlier runs tell when the jobs before it end"),
        (
            "Priority",
            700,
            "unknown, it is far behind, or neither time limits nor earlier runs tell when the jobs before it end",
        ),
    ],
)
def test_an_unknown_start_says_why(reason: str, place: int | None, said: str) -> None:
    assert why_lines(asked(reason=reason, place=place, of=place), NOW)[-1] == f"start: {said}"


def test_one_earlier_run_tells_when_a_run_without_a_time_limit_ends(own: Shell) -> None:
    (own.work / "train.sh").write_text("#!/bin/sh\nsleep $1\n")
    own.ok("gsub", "-W", "--quiet", "-g", "2", "train.sh", "8")
    own.submit("-g", "2", "train.sh", "600")
    waiting = own.submit("-g", "2", "train.sh", "1")
    (row,) = starts(own)
    assert row["id"] == waiting
    assert row["start_high_at"] is None
    assert row["start_low_at"] is not None


def test_both_ends_are_explained() -> None:
    both = why_lines(asked(start={"low_at": NOW + 600, "high_at": NOW + 1200}), NOW)
    assert both[0].startswith("start: between 12:10, if jobs run as long as usual, and 12:21, if ")
    early = why_lines(asked(start={"low_at": NOW + 600, "high_at": None}), NOW)
    assert early == ["start: 12:10, if jobs run as long as usual; the latest start is unknown"]


def test_help_without_a_gctl_command_is_given_in_words() -> None:
    dropped = {"text": "would start now without -C nvlink", "update": "", "starts": "now"}
    later = {"text": "would start in about 1 h with -g 1", "update": "gpus=1", "starts": NOW + 3600}
    lines = why_lines(asked(alternatives=[dropped, later]), NOW)
    assert lines[1:] == [
        "would start now without -C nvlink",
        "would start in about 1 h with -g 1 (13:00): gctl update 7 gpus=1",
    ]


class Told:
    """Answers GET /v1/starts, for a list at a terminal."""

    def __init__(self, rows: list[dict[str, Any]], not_yet: list[str]) -> None:
        self.answer = {"starts": rows, "not_yet": not_yet}

    def call(self, method: str, path: str) -> dict[str, Any]:
        return self.answer


def row(job_id: str, reason: str, high_at: float | None) -> dict[str, Any]:
    who = {"id": job_id, "name": "train", "user": "ann", "state": "PENDING", "nodes": []}
    return {**who, "start_low_at": None, "start_high_at": high_at, "reason": reason}


def test_a_start_that_is_not_worked_out_yet_is_not_unknown() -> None:
    rows = [row("3", "Priority", None), row("4", "Priority", None)]
    lines = forecast.starts_view(Told(rows, ["4"]), "", {}).splitlines()  # type: ignore[arg-type, union-attr]
    assert [" ".join(line.split()[4:-2]) for line in lines[1:]] == ["N/A", "not yet"]


def test_why_the_first_in_line_starts_after_others_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast.sys.stdout, "isatty", lambda: True)
    first, later = row("1", "Resources", NOW + 7200), row("202", "Priority", NOW + 60)
    forecast.starts_view(Told([later, first], []), "", {})  # type: ignore[arg-type]
    assert "job 1 is further ahead in line than its start tells" in capsys.readouterr().err
    forecast.starts_view(Told([first, later], []), "", {})  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rows", "overtaken"),
    [
        ([], ""),
        ([("1", "Resources"), ("2", "Priority")], ""),
        ([("2", "Licenses"), ("1", "Resources")], ""),
        ([("2", "Priority"), ("1", "Resources")], "1"),
    ],
)
def test_a_job_ahead_that_starts_after_one_behind_it_is_named(
    rows: list[tuple[str, str | None]], overtaken: str
) -> None:
    text = forecast.overtaken(rows)
    assert (
        text.startswith(f"job {overtaken} is further ahead in line than its start tells: ") if overtaken else not text
    )
