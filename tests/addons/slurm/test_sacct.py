"""sacct: what Slurm printed, every column, every way to select, and the calls of real clients."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import as_user
from golden_cases import FOLDER, Places, case, cases, check
from hypothesis import given
from hypothesis import strategies as st
from people import ANN, BOB, EVE, NEEDS_ROOT, SystemDaemon
from slurm_lab import SlurmLab, user

import gpusched
from gpusched.addons.slurm.accounting import COLUMNS, UNITS, AccountingView, short_cpu_time
from gpusched.addons.slurm.command import CommandError, parse
from gpusched.addons.slurm.command import run as run_command
from gpusched.addons.slurm.format import choose_columns, helpformat
from gpusched.addons.slurm.sacct import (
    COMMAND,
    DEFAULT,
    SacctQuery,
    body,
    main,
    read_job_words,
)
from gpusched.client import DaemonConnection
from gpusched.errors import UsageError

DAY_S = 86400


@pytest.fixture(scope="module")
def ended(lab: SlurmLab) -> dict[int, str]:
    """Jobs of the golden machine that have ended here as well: golden id -> ours."""
    lines = {
        1: "sbatch --wrap true",
        4: "sbatch job.sh 1 two 'three four'",
        8: "sbatch fail3.sh",
        9: "sbatch --wrap 'kill -9 $$'",
        47: "gsub --parsable -t 1s --wrap 'sleep 200'",
        63: "sbatch --wrap 'kill -9 $$'",
        64: "sbatch --wrap 'exit 300'",
        65: "sbatch fail3.sh",
        68: "sbatch --array=7 -J 'a b' --wrap true",
    }
    found = {golden: lab.ok(line).split()[-1] for golden, line in lines.items()}
    lab.wait(*found.values())
    return found


def rows(text: str, *starts: str) -> str:
    """The lines whose first word, without step and task, is one of these, after the two lines of titles."""
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:2], *(line for line in lines[2:] if _job_of(line) in starts)])


def _job_of(line: str) -> str:
    return line.split()[0].partition(".")[0].partition("_")[0]


# --- the golden files -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [5, 254, 255, 256, 257])
def test_prints_what_slurm_prints_without_jobs(lab: SlurmLab, number: int) -> None:
    check(lab, case("sacct", number), {})


@pytest.mark.parametrize("number", [248, 249])
def test_lists_jobs_and_their_scripts_as_slurm_does(lab: SlurmLab, ended: dict[int, str], number: int) -> None:
    golden = case("sacct", number)
    places = Places(jobs=ended)
    expected = rows(golden.out, *map(str, ended))
    seen = lab.ok(f"{golden.command} -j {','.join(ended.values())}")
    assert _in_columns(places.seen(lab, seen)) == _in_columns(_renumbered(expected, ended))


def _renumbered(text: str, ours: dict[int, str]) -> str:
    lines = []
    for line in text.splitlines():
        number = _job_of(line)
        if number.isdigit():
            first = line.split()[0]
            new = ours[int(number)] + first.removeprefix(number)
            line = new.ljust(12) + line[12:]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _in_columns(text: str) -> list[str]:
    """The rows by job, which are numbered in another order than on the golden machine."""
    return sorted(text.splitlines())


def test_shows_times_and_amounts_as_slurm_does(lab: SlurmLab, ended: dict[int, str]) -> None:
    golden = case("sacct", 253)
    ours = {number: ended[number] for number in (63, 64, 65)}
    seen = lab.ok(golden.command.replace("62,63,64,65,67,47,70,25", ",".join(ours.values())))
    expected = rows(golden.out, *map(str, ours))
    # Slurm gave each job all of the node's memory and started it up to a second later.
    places = Places(mask=[r",mem=24105M(?=,)", r" (?=<masked>)", r"00:00:0\d"])
    mine = places.seen(lab, seen).splitlines()
    theirs = [
        line.replace("<masked>,node=1", ",node=1")
        for line in places.expected(golden, _renumbered(expected, ours)).splitlines()
    ]
    assert [line.split() for line in sorted(mine)] == [line.split() for line in sorted(theirs)]


def test_joins_values_as_slurm_does(lab: SlurmLab, ended: dict[int, str]) -> None:
    job = ended[65]
    assert lab.ok(f"sacct -n -P -j {job}") == (
        f"{job}|fail3.sh|main|physics|1|FAILED|3:0\n{job}.batch|batch||physics|1|FAILED|3:0\n"
    )
    assert lab.ok(f"sacct -p -X -j {job}") == (
        f"JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode|\n{job}|fail3.sh|main|physics|1|FAILED|3:0|\n"
    )
    assert lab.ok(f"sacct -n -P --delimiter '^|^' -X -j {job} -o jobid,state") == f"{job}^|^FAILED\n"
    assert lab.ok(f"sacct -n -P --delimiter $'\\x1f' -X -j {job} -o jobid,state") == f"{job}\x1fFAILED\n"
    assert lab.ok(f"sacct -n -p --delimiter=' ; ' -X -j {job} -o jobid,state") == f"{job} ; FAILED ; \n"


def test_has_the_long_columns_of_slurm(lab: SlurmLab, ended: dict[int, str]) -> None:
    golden = case("sacct", 263)
    ours = lab.ok(f"sacct -l -j {ended[65]}").splitlines()
    assert ours[:2] == golden.out.splitlines()[:2]
    assert len(ours) == 4


def test_formats_names_and_widths_as_slurm_does() -> None:
    assert helpformat(COLUMNS.values()) == case("sacct", 257).out


def test_every_golden_width_is_ours() -> None:
    for golden in cases("sacct"):
        if golden.code or not golden.out.startswith(("JobID ", " ")) or "%" in golden.command:
            continue
        titles, dashes = golden.out.splitlines()[:2]
        at = 0
        for part in dashes.split():
            name = titles[at : at + len(part)].strip()
            assert abs(COLUMNS[name].width) == len(part), name
            at += len(part) + 1


def test_gives_the_json_document_the_keys_that_slurm_gives_it(lab: SlurmLab, ended: dict[int, str]) -> None:
    found = json.loads(lab.ok(f"sacct --json -j {ended[65]}"))
    golden = case("sacct", 260).out
    kept = golden[: golden.index('"steps": [')].rstrip().rstrip(",")
    theirs = json.loads(kept + "}]}")
    (job,) = found["jobs"]
    assert _shape(theirs["jobs"][0]).keys() <= _shape(job).keys()
    assert found["meta"] == theirs["meta"]
    assert job["state"] == {"current": "FAILED", "reason": "NonZeroExitCode"}
    assert job["exit_code"] == {"status": "ERROR", "return_code": 3}
    assert [step["step"]["id"] for step in job["steps"]] == ["batch"]
    assert job["time"]["limit"] == 60
    assert (job["job_id"], job["association"]["cluster"]) == (int(ended[65]), job["cluster"])


def _shape(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        return {key: kind for name, one in value.items() for key, kind in _shape(one, f"{path}.{name}").items()}
    return {path: type(value).__name__}


# --- columns ------------------------------------------------------------------------------------------


def test_every_name_of_helpformat_is_a_column(lab: SlurmLab, ended: dict[int, str]) -> None:
    names = lab.ok("sacct --helpformat").split()
    assert names == list(COLUMNS)
    text = lab.ok(f"sacct -P -j {ended[9]} -o {','.join(names)}")
    header, *records = csv.reader(io.StringIO(text), delimiter="|")
    assert header == names
    assert {len(record) for record in records} == {len(names)}
    assert lab.ok(f"sacct -P -j {ended[9]} -o ALL") == text


def test_no_table_names_a_column_that_does_not_exist() -> None:
    assert all(name == column.title for name, column in COLUMNS.items())


@given(st.sampled_from(sorted(COLUMNS)), st.integers(1, 400), st.booleans(), st.booleans())
def test_a_column_has_the_width_that_is_asked_for(name: str, width: int, is_left: bool, is_lower: bool) -> None:
    word = name.lower() if is_lower else name.upper()
    (column,) = choose_columns(COMMAND, f"{word}%{'-' if is_left else ''}{width}", COLUMNS.values())
    assert (column.title, column.width) == (name, -width if is_left else width)


@pytest.mark.parametrize("form", ["nosuch", "jobid,nosuch", "jobid%x", "jobid%--3", "jobid%", ",", "jobid%1.5"])
def test_a_wrong_format_is_refused(form: str) -> None:
    with pytest.raises(CommandError) as caught:
        choose_columns(COMMAND, form, COLUMNS.values())
    assert caught.value.code == 1


@given(st.text(max_size=30))
def test_any_format_is_read_or_refused(form: str) -> None:
    said = ""
    try:
        assert choose_columns(COMMAND, form, COLUMNS.values())
    except CommandError as error:
        said = error.text
    assert "\n" not in said


def test_a_name_may_be_cut_short(lab: SlurmLab, ended: dict[int, str]) -> None:
    assert lab.ok(f"sacct -X -P -j {ended[8]} -o jobi,stat") == f"JobID|State\n{ended[8]}|FAILED\n"


def test_takes_columns_from_the_environment(lab: SlurmLab, ended: dict[int, str]) -> None:
    assert lab.ok(f"sacct -n -X -j {ended[8]}", SACCT_FORMAT="state,exitcode%6") == "    FAILED    3:0 \n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00:00"), (0.014, "00:00.014"), (61.5, "01:01.500"), (3600.5, "01:00:00"), (90061, "1-01:01:01")],
)
def test_cpu_time_is_written_as_slurm_writes_it(seconds: float, text: str) -> None:
    assert short_cpu_time(seconds) == text


@pytest.mark.parametrize(
    ("kib", "units", "converts", "unit", "text"),
    [
        (1234, "", True, "K", "1234K"),
        (2048, "", True, "K", "2M"),
        (4 * 1024**2, "", True, "K", "4G"),
        (0, "", True, "K", "0"),
        (1500 * 1024, "", True, "M", "1500M"),
        (1500 * 1024, "G", True, "M", "1.46G"),
        (2 * 1024**2, "G", True, "M", "2G"),
        (4 * 1024**2, "", False, "M", "4096M"),
    ],
)
def test_memory_is_written_as_slurm_writes_it(kib: int, units: str, converts: bool, unit: str, text: str) -> None:
    assert AccountingView(0, "lab", units, converts).size(kib, unit) == text


@given(st.integers(0, 2**60), st.sampled_from(["", *UNITS]), st.booleans())
def test_an_amount_of_memory_never_loses_its_unit(kib: int, units: str, converts: bool) -> None:
    text = AccountingView(0, "", units, converts).size(kib)
    assert text == "0" or text[-1] in UNITS


# --- which jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("42", {"42": {""}}),
        ("42 43", {"42": {""}, "43": {""}}),
        ("42_7", {"42_7": {""}}),
        ("42.batch 42.0", {"42": {"batch", "0"}}),
        ("42_7.0", {"42_7": {"0"}}),
        ("42_[1-3%2]", {"42_[1-3%2]": {""}}),
        ("042", {"42": {""}}),
        ("9999999999999999999999", {}),
    ],
)
def test_jobs_and_steps_are_read(words: str, found: dict[str, set[str]]) -> None:
    assert read_job_words(COMMAND, words.split()) == found


@pytest.mark.parametrize("word", ["abc", "42_", "42_x", "_7", "42.x", "-1", "4 2", "42_[", "٤٢"])
def test_a_malformed_job_is_refused(word: str) -> None:
    with pytest.raises(CommandError) as caught:
        read_job_words(COMMAND, [word])
    assert caught.value.code == 1


@given(st.text(max_size=40))
def test_any_start_time_is_an_instant_or_one_line_of_error(text: str) -> None:
    now, said = time.time(), ""
    try:
        assert SacctQuery(parse(COMMAND, ["-S", text, "-j", "1"]), now).since >= 0
    except CommandError as error:
        said = error.text
    assert "\n" not in said


@pytest.mark.parametrize(
    ("options", "since", "until"),
    [
        ("", "midnight", None),
        ("-j 1", 0, None),
        ("-s R", "now", None),
        ("-j 1 -s R", 0, None),
        ("-S now-7days", -7 * DAY_S, None),
        ("-S now-2hours -E now-1hour", -7200, -3600),
        ("-S 1970-01-01-00:00:01", 1.0, None),
    ],
)
def test_the_window_of_time_is_slurms(options: str, since: float | str, until: float | None) -> None:
    now = float(int(time.time()))
    found = SacctQuery(parse(COMMAND, options.split()), now)
    today = time.localtime(now)
    expected = {
        "midnight": time.mktime((*today[:3], 0, 0, 0, 0, 0, -1)),
        "now": now,
    }
    if isinstance(since, str):
        assert found.since == expected[since]
    elif since < 0:
        assert found.since == now + since
    else:
        # Of the local day.
        assert abs(found.since - since) < DAY_S
    assert found.until == (float("inf") if until is None else now + until)


REFUSALS = [
    ("-S xyz", "sacct: error: Invalid time specification (pos=0): xyz\n"),
    ("-E 2026-13-01", "sacct: error: Invalid time specification (pos=0): 2026-13-01\n"),
    ("-s NOPE", "sacct: error: Invalid job state specified: NOPE\n"),
    ("-j abc", "sacct: error: Bad job/step specified: abc\n"),
    ("-u nosuchuser", "sacct: error: Invalid user id: nosuchuser\n"),
    ("-g nosuchgroup", "sacct: error: Invalid group id: nosuchgroup\n"),
    ("--units=Q", "sacct: error: Invalid --units specified: Q\n"),
    ("-i many", "sacct: error: Invalid --nnodes specified: many\n"),
    ("-K 10", "sacct: error: --timelimit-max requires --timelimit-min\n"),
    ("-k x", "sacct: error: Invalid time limit specified: x\n"),
    ("-c", "sacct: error: --completion: "),
    ("-x 3", "sacct: error: --associations: "),
    ("--env-vars", "sacct: error: --env-vars: "),
    ("-S now -E now-1hour", "sacct: error: Start time requested (now) is after the end time (now-1hour)\n"),
    ("1 2", "sacct: error: Unknown arguments: 1 2\n"),
    ("--nosuch", "sacct: unrecognized option '--nosuch'\nTry \"sacct --help\" for more information\n"),
    ("-1", "sacct: invalid option -- '1'\n"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS, ids=[options for options, _ in REFUSALS])
def test_bad_input_is_refused_before_anything_is_printed(lab: SlurmLab, options: str, message: str) -> None:
    done = lab.type(f"sacct {options}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(message)


def test_another_cluster_is_refused_and_this_one_taken(lab: SlurmLab, ended: dict[int, str]) -> None:
    (name,) = set(lab.ok(f"sacct -n -P -X -j {ended[1]} -o cluster").split())
    for word in ("all", name):
        assert lab.ok(f"sacct -n -P -X -M {word} -j {ended[1]} -o state") == "COMPLETED\n"
    done = lab.type("sacct -M nosuch")
    assert (done.code, done.out) == (1, "")


def ids(lab: SlurmLab, options: str, **env: str) -> set[str]:
    """First column of what sacct finds among jobs."""
    return set(lab.ok(f"sacct -n -P -X -o jobid {options}", **env).split())


def test_selects_by_what_jobs_are(lab: SlurmLab) -> None:
    one = lab.submit("-J one -p debug -q urgent -A physics --comment 'of note' -t 5 -c 2 --wrap true")
    two = lab.submit("-J two -p main -c 3 -t 10 --wrap false")
    lab.wait(one, two)
    both = f"-j {one},{two}"
    for options, found in [
        ("--name one", {one}),
        ("--name one,two", {one, two}),
        ("-r debug", {one}),
        ("-q urgent", {one}),
        ("-q normal", {two}),
        ("-A physics", {one, two}),
        ("-A chem", set()),
        ("-I 3", {two}),
        ("-I 1-2", {one}),
        ("-i 1", {one, two}),
        ("-i 2-4", set()),
        ("-k 5", {one}),
        ("-k 1 -K 20", {one, two}),
        ("-N node1", {one, two}),
        ("-N node2", set()),
        (f"-u {user()}", {one, two}),
        (f"-u {os.getuid()}", {one, two}),
        (f"-g {os.getgid()}", {one, two}),
        ("-s CD", {one}),
        ("-s F,CA", {two}),
        ("-s COMPLETED,failed", {one, two}),
        ("-s PD", set()),
        ("-s PD -S now-1hour", {one, two}),
        ("-s R -S now-1hour -E now", {one, two}),
        ("-E now-1hour", set()),
        ("-S now-1hour -E now", {one, two}),
        ("-S now+1hour", set()),
        ("-F SchedMain", set()),
        ("-W none", set()),
        ("-C nosuch", set()),
        ("-R NonZeroExitCode", {two}),
    ]:
        assert ids(lab, f"{both} {options}") == found, options


def test_shows_todays_jobs_of_the_caller_and_since_a_time(lab: SlurmLab, ended: dict[int, str]) -> None:
    mine = set(ended.values()) - {ended[68]}
    assert mine <= ids(lab, "")
    assert mine <= ids(lab, "-a -S 1970-01-01-00:00:01")
    assert mine.isdisjoint(ids(lab, "-S now+1hour"))
    assert mine.isdisjoint(ids(lab, "-s R"))


def test_a_job_is_there_as_soon_as_sbatch_returns_and_after_its_end(lab: SlurmLab) -> None:
    job = lab.submit("-H --wrap true")
    for line in (f"sacct -n -X -P -o state -j {job}", "sacct -n -X -P -o state -s PD --name wrap"):
        assert "PENDING" in lab.ok(line).split()
    row = lab.ok(f"sacct -n -P -j {job} -o start,end,elapsed,nodelist,alloctres,exitcode").strip()
    assert row == "Unknown|Unknown|00:00:00|None assigned||0:0"
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    assert lab.ok(f"sacct -n -P -j {job} -o state,start,nodelist,elapsed,exitcode").strip() == (
        f"CANCELLED by {os.getuid()}|None|None assigned|00:00:00|0:0"
    )
    assert lab.ok(f"sacct -n -X -j {job} -o state").strip() == "CANCELLED+"


def test_a_cancelled_run_shows_its_signal_in_its_script_only(lab: SlurmLab) -> None:
    job = lab.submit("--wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    assert lab.ok(f"sacct -n -P -j {job} -o jobid,state,end") == (
        f"{job}|RUNNING|Unknown\n{job}.batch|RUNNING|Unknown\n"
    )
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    assert lab.ok(f"sacct -n -P -j {job} -o jobid,state,exitcode") == (
        f"{job}|CANCELLED by {os.getuid()}|0:0\n{job}.batch|CANCELLED|0:15\n"
    )


def test_tasks_have_ids_of_their_array_and_their_own(lab: SlurmLab) -> None:
    array = lab.submit("-H --array=1-6,10%2 --wrap true")
    raw = int(array)
    assert lab.ok(f"sacct -X -n -P -j {array} -o jobid,jobidraw,state") == f"{array}_[1-6,10%2]|{raw}|PENDING\n"
    assert lab.ok(f"sacct -X -n -P -j {array}_3 -o jobid,jobidraw,state") == f"{array}_3|{raw + 3}|PENDING\n"
    assert lab.ok(f"sacct -X -n -P -j {array}_99,{array}_4 -o jobid") == f"{array}_4\n"
    assert lab.ok(f"sacct -X -n -P -j {array}_99 -o jobid") == ""
    lab.ok(f"gcancel {array}_2")
    seen = lab.ok(f"sacct -X -n -P -j {array} -o jobid,state").splitlines()
    assert seen == [f"{array}_[1,3-6,10%2]|PENDING", f"{array}_2|CANCELLED by {os.getuid()}"]
    lab.ok(f"gcancel {array}")
    lab.wait(array)
    first = lab.ok(f"sacct -X -j {array} -o jobid,jobidraw,state").splitlines()[2]
    assert first == f"{f'{array}_[1,3-6,10%2]':.11}+ {array:12} CANCELLED+ "


def test_finished_tasks_have_rows_and_their_array_has_none(lab: SlurmLab) -> None:
    array = lab.submit("--array=0-1 --wrap 'exit $SLURM_ARRAY_TASK_ID'")
    lab.wait(array)
    assert lab.ok(f"sacct -n -P -j {array} -o jobid,jobidraw,state,exitcode") == (
        f"{array}_0|{int(array) + 1}|COMPLETED|0:0\n{array}_0.batch|{int(array) + 1}.batch|COMPLETED|0:0\n"
        f"{array}_1|{int(array) + 2}|FAILED|1:0\n{array}_1.batch|{int(array) + 2}.batch|FAILED|1:0\n"
    )
    assert ids(lab, f"-j {int(array) + 2}") == {f"{array}_1"}
    assert ids(lab, f"-j {array}_[0-1]") == {f"{array}_0", f"{array}_1"}


def test_only_the_named_steps_are_shown(lab: SlurmLab, ended: dict[int, str]) -> None:
    job = ended[8]
    assert lab.ok(f"sacct -n -P -o jobid -j {job}.batch") == f"{job}.batch\n"
    assert lab.ok(f"sacct -n -P -o jobid -j {job}.7") == ""
    assert lab.ok(f"sacct -n -P -o jobid -j {job}.batch -j {job}") == f"{job}\n{job}.batch\n"


def test_every_run_of_a_requeued_job_is_a_row_with_duplicates(lab: SlurmLab) -> None:
    job = lab.submit("--requeue --wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    lab.ok(f"gctl requeue --hold {job}" if _can_hold(lab) else f"scontrol requeuehold {job}")
    lab.wait_state(job, "PENDING")
    assert lab.ok(f"sacct -n -P -X -j {job} -o state,start") == "PENDING|Unknown\n"
    former, waiting = lab.ok(f"sacct -n -P -X -D -j {job} -o state,start,end").splitlines()
    assert former.startswith("REQUEUED|20")
    assert f"{job}.batch|CANCELLED|0:15" in lab.ok(f"sacct -n -P -D -j {job} -o jobid,state,exitcode").splitlines()
    assert waiting == "PENDING|Unknown|Unknown"
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    # It was waiting when it was cancelled: it did not start a second time.
    assert lab.ok(f"sacct -n -P -X -j {job} -o start,elapsed,nodelist") == "None|00:00:00|None assigned\n"


def _can_hold(lab: SlurmLab) -> bool:
    return "--hold" in lab.type("gctl requeue --help").out


def test_steps_have_rows_and_the_job_their_highest_exit_code(lab: SlurmLab) -> None:
    golden = case("sacct", 250)
    job = lab.ok(case("sbatch", 230).command).strip()
    lab.wait(job)
    places = Places(jobs={62: job})
    assert places.seen(lab, lab.ok(f"sacct -j {job}")) == _renumbered(golden.out, {62: job})
    for number in (251, 252):
        check(lab, case("sacct", number), {}, places)
    assert lab.ok(f"sacct -n -P -X -j {job} -o derivedexitcode") == "5:0\n"
    assert lab.ok(f"sacct -n -P -j {job}.1 -o jobid,state,exitcode") == f"{job}.1|FAILED|5:0\n"


def test_a_job_of_srun_has_a_step_and_its_signal(lab: SlurmLab) -> None:
    golden = case("sacct", 248).out.splitlines()
    for number, line in ((48, "srun hostname"), (50, "srun bash -c 'exit 3'"), (52, "srun bash -c 'kill -9 $$'")):
        lab.type(line)
        job = lab.ok("sacct -n -P -X -o jobid").splitlines()[-1]
        expected = [row for row in golden if _job_of(f"{row} -") == str(number)]
        seen = lab.ok(f"sacct -n -j {job}").splitlines()
        assert seen == _renumbered("\n".join(expected), {number: job}).splitlines()


def test_tasks_that_never_started_have_one_row(lab: SlurmLab) -> None:
    array = lab.submit("--array=0-4%1 --wrap 'sleep 100'")
    lab.wait_state(f"{array}_0", "RUNNING")
    lab.ok(f"gcancel {array}")
    lab.wait(array)
    assert lab.ok(f"sacct -n -P -j {array} -o jobid,state,start,nodelist").splitlines()[0] == (
        f"{array}_[1-4%1]|CANCELLED by {os.getuid()}|None|None assigned"
    )
    assert lab.ok(f"sacct -n -P -j {array} -o jobid").split() == [
        f"{array}_[1-4%1]",
        f"{array}_0",
        f"{array}_0.batch",
    ]


def test_shows_what_was_measured_in_the_row_of_the_script(lab: SlurmLab) -> None:
    job = lab.submit("--mem 2G --wrap 'python3 -c \"bytearray(60 << 20)\"'")
    lab.wait(job)
    whole, batch = lab.ok(f"sacct -n -P -j {job} -o maxrss,reqmem,totalcpu,ntasks").splitlines()
    assert whole.startswith("|2G|")
    rss, _, cpu, tasks = batch.split("|")
    assert rss[-1] in "KM"
    assert tasks == "1"
    assert cpu == whole.split("|")[2] != "00:00:00"
    assert lab.ok(f"sacct -n -P -X -j {job} --units=G -o reqmem,alloctres").strip() == (
        "2G|billing=1,cpu=1,mem=2G,node=1"
    )


def test_a_step_shows_what_its_tasks_have_used(lab: SlurmLab) -> None:
    (lab.work / "burn.py").write_text(
        "import os, time\nb = bytearray(b'x') * ((60 << 20) * (1 + int(os.environ['SLURM_PROCID'])))\n"
        "while time.process_time() < 0.4: pass\n"
    )
    job = lab.submit("-n 2 --wrap 'srun python3 burn.py; srun -n1 dd if=/dev/zero of=/dev/null bs=1M count=2000'")
    lab.wait(job)
    names = "jobid,totalcpu,usercpu,systemcpu,avecpu,mincpu,maxrss,averss,maxrsstask,ntasks"
    lines = [line.split("|") for line in lab.ok(f"sacct -n -P --units=M -j {job} -o {names}").splitlines()]
    whole, batch, both, alone = lines
    assert [line[0] for line in lines] == [job, f"{job}.batch", f"{job}.0", f"{job}.1"]
    for line in lines:
        total, used, kernel = map(seconds, line[1:4])
        assert total == pytest.approx(used + kernel, abs=0.002)
    assert 0.8 < seconds(both[1]) < 3
    assert seconds(both[2]) > 0
    assert seconds(alone[3]) > 0
    assert seconds(whole[1]) == seconds(batch[1]) >= seconds(both[1]) + seconds(alone[1])
    largest, mean = (float(text.removesuffix("M")) for text in both[6:8])
    assert 120 < largest < 160
    assert largest - 40 < mean < largest - 20
    assert both[8:] == ["", "2"]
    assert alone[8:] == ["0", "1"]
    (document,) = json.loads(lab.ok(f"sacct -j {job} --json"))["jobs"]
    time_of_step = document["steps"][1]["time"]
    assert sum(time_of_step["user"].values()) > 0
    usage = lab.ok(f"sacct -n -P -j {job}.0 -o tresusageintot,tresusageinmax,tresusageinmin").strip().split("|")
    assert [[part.partition("=")[0] for part in text.split(",")] for text in usage] == [
        ["cpu", "energy", "mem"],
        ["energy", "mem"],
        ["energy"],
    ]


def seconds(text: str) -> float:
    """CPU time as sacct writes it."""
    found = 0.0
    for part in text.split(":"):
        found = found * 60 + float(part)
    return found


def test_nothing_is_known_of_a_step_whose_srun_was_killed(lab: SlurmLab) -> None:
    # The script has a row of its own from the start.
    is_there = "squeue -s -h -j $SLURM_JOB_ID -o %i | grep -q [.]0"
    job = lab.submit(f"--wrap 'srun sleep 100 & until {is_there}; do sleep 0.1; done; kill -9 $!; wait'")
    lab.wait(job)
    (line,) = lab.ok(f"sacct -n -P -j {job}.0 -o totalcpu,maxrss,averss,avecpu,mincpu").splitlines()
    assert line == "00:00:00||||"


def test_cuts_times_to_the_window(lab: SlurmLab, ended: dict[int, str]) -> None:
    job = ended[47]
    times = lab.ok(f"sacct -n -P -X -j {job} -o start,end").strip().split("|")
    assert times[0] < times[1]
    assert lab.ok(f"sacct -n -P -X -T -S {times[1]} -j {job} -o start,end,elapsed").strip() == (
        f"{times[1]}|{times[1]}|00:00:00"
    )


@pytest.mark.parametrize(
    ("words", "uid", "found"),
    [
        ("", 0, []),
        ("-j 1", 1, []),
        ("-N node1", 1, []),
        ("-a", 1, []),
        ("-u -1", 1, []),
        ("-u 0,bob", 1, ["root", "bob"]),
        ("-a -u bob", 1, []),
        ("", 1, [pwd.getpwuid(1).pw_name]),
    ],
)
def test_shows_jobs_of_the_caller_unless_asked_otherwise(
    words: str, uid: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert SacctQuery(parse(COMMAND, words.split()), time.time()).users == found


# --- other users ----------------------------------------------------------------------------------


@pytest.fixture
def make() -> Iterator[Callable[[str], SystemDaemon]]:
    made: list[SystemDaemon] = []

    def of(private: str) -> SystemDaemon:
        daemon = SystemDaemon(f'[access]\nadmin_group = "games"\nprivate_data = {private}\n')
        made.append(daemon)
        daemon.start()
        return daemon

    yield of
    for daemon in made:
        daemon.close()


def typed(daemon: SystemDaemon, person: str, line: str) -> tuple[int, str, str]:
    """What a user gets who types a line of sacct: exit code, stdout and stderr."""
    # A process that has become somebody else may not be able to read this Python.
    import grp  # noqa: F401

    from gpusched.addons.slurm import accounting_json  # noqa: F401

    def deed() -> tuple[int, str, str]:
        os.environ["GPUSCHED_SOCKET"] = str(daemon.socket)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command(COMMAND, body, line.split())
        return code, out.getvalue(), err.getvalue()

    return as_user(person, deed)


SECRET = "hush-hush"
EVERY = ",".join(COLUMNS)


def two_jobs(daemon: SystemDaemon) -> tuple[str, str]:
    """An ended job of ann's, with a secret wherever there is room for one, and one of bob's."""
    script = f"#!/bin/sh\n# {SECRET}\nexit 3\n"
    named = {"name": SECRET, "comment": SECRET, "wckey": SECRET, "submit_line": f"sbatch {SECRET}"}
    theirs = daemon.person(ANN).submit(script=script, script_path=f"/home/{SECRET}", work_dir="/tmp", **named)
    mine = daemon.person(BOB).submit("true", name="mine")
    daemon.wait(theirs, mine)
    return theirs, mine


@NEEDS_ROOT
def test_shows_of_other_users_only_what_everybody_may_know(make: Callable[[str], SystemDaemon]) -> None:
    daemon = make('["names"]')
    theirs, mine = two_jobs(daemon)
    assert typed(daemon, BOB, "-n -X -P -o jobid,user,jobname") == (0, f"{mine}|{BOB}|mine\n", "")
    seen = (0, f"{theirs}|{ANN}|-|FAILED|3:0\n{theirs}.batch||batch|FAILED|3:0\n", "")
    for words in (f"-u {ANN}", f"-u {ANN} -S 1970-01-01 -s F", f"-j {theirs}", f"-a -s F -j {theirs}"):
        assert typed(daemon, BOB, f"-n -P -o jobid,user,jobname,state,exitcode {words}") == seen, words
    assert typed(daemon, BOB, "-n -X -P -a -o jobid")[1].split() == [theirs, mine]
    # To find a job by what one may not know would tell it.
    assert typed(daemon, BOB, f"-n -X -a --name {SECRET} -o jobid") == (0, "", "")
    assert typed(daemon, BOB, f"-n -X -a -W {SECRET} -o jobid") == (0, "", "")
    figures = f"-n -P -j {theirs} -o totalcpu,maxrss,workdir,submitline"
    assert set(typed(daemon, BOB, figures)[1].split()) == {"00:00:00||-|", "00:00:00|||"}
    for words in (f"-a -P -o {EVERY}", "-a --json", "-a --json -D", f"-a -l -j {theirs}"):
        code, out, err = typed(daemon, BOB, words)
        assert (code, err, SECRET in out) == (0, "", False), words
        assert SECRET in typed(daemon, ANN, words)[1], words
    code, out, err = typed(daemon, BOB, f"-j {theirs} -B")
    assert (code, out, SECRET in err) == (1, "", False)
    assert SECRET in typed(daemon, ANN, f"-j {theirs} -B")[1]


@NEEDS_ROOT
def test_private_jobs_are_as_unknown_ones_to_others(make: Callable[[str], SystemDaemon]) -> None:
    daemon = make('["jobs"]')
    theirs, mine = two_jobs(daemon)
    for words in (
        f"-a -u {ANN}",
        f"-u {ANN}",
        f"-j {theirs}",
        f"-j {theirs},{theirs}.batch",
        f"-a -j {theirs} --json -n",
    ):
        code, out, err = typed(daemon, BOB, f"-n -X -P -o jobid,user {words}")
        assert (code, err) == (0, ""), words
        assert theirs not in out.replace('"', "").split(), words
        unknown = f"-n -X -P -o jobid,user {words}".replace(theirs, "99999")
        assert (code, out, err) == typed(daemon, BOB, unknown), words
    assert typed(daemon, BOB, "-n -X -P -a -o jobid") == (0, f"{mine}\n", "")
    assert typed(daemon, BOB, f"-n -X -P -j {theirs},{mine} -o jobid") == (0, f"{mine}\n", "")
    assert typed(daemon, ANN, "-n -X -P -a -o jobid,jobname") == (0, f"{theirs}|{SECRET}\n", "")
    assert typed(daemon, EVE, "-n -X -P -a -o jobid,jobname") == (0, f"{theirs}|{SECRET}\n{mine}|mine\n", "")


def test_the_history_gives_the_fields_that_are_asked_for(lab: SlurmLab, ended: dict[int, str]) -> None:
    with DaemonConnection(str(lab.home / "run" / "api.sock")) as client:
        answer = client.call("GET", f"/v1/history?ids={ended[65]}&fields=exit_code,runs,id")
        assert answer["fields"] == ["exit_code", "runs", "id"]
        ((code, runs, job_id),) = answer["rows"]
        assert (code, job_id, [run["exit_code"] for run in runs]) == (3, ended[65], [3])
        with pytest.raises(UsageError, match="unknown field 'nosuch'"):
            client.call("GET", "/v1/history?fields=nosuch")


def test_prints_the_script(lab: SlurmLab, ended: dict[int, str]) -> None:
    assert lab.ok(f"sacct -B -j {ended[65]}") == (f"Batch Script for {ended[65]}\n{'-' * 80}\n#!/bin/bash\nexit 3\n")


def test_thousands_of_ids_are_asked_for_in_portions(lab: SlurmLab, ended: dict[int, str]) -> None:
    many = ",".join(map(str, range(1_000_000, 1_004_000)))
    assert ids(lab, f"-j {many},{ended[1]}") == {ended[1]}


def test_no_daemon_is_an_error(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUSCHED_SOCKET", str(tmp_path / "nothing.sock"))
    monkeypatch.setattr("sys.argv", ["sacct", "-X"])
    assert main() == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("sacct: error: ")


# --- the calls of real clients ------------------------------------------------------------------------


def run(lab: SlurmLab, *words: str) -> subprocess.CompletedProcess[str]:
    """Without a shell, as clients do."""
    return subprocess.run([str(lab.bin / "sacct"), *words], env=lab.env, capture_output=True, text=True, timeout=60)


def test_submitit_finds_the_state_of_each_task(lab: SlurmLab) -> None:
    array = lab.submit("-H --array=0-3%2 --wrap true")
    lab.ok(f"gcancel {array}_1")
    done = run(lab, "-o", "JobID,State,NodeList", "--parsable2", "-j", array, "-j", f"{array}")
    titles, *lines = done.stdout.splitlines()
    states: dict[str, str] = {}
    for line in lines:
        found = dict(zip(titles.split("|"), line.split("|"), strict=True))
        if "." in found["JobID"]:
            continue
        for task in _submitit_ids(found["JobID"]):
            states[task] = found["State"]
    assert states == {
        f"{array}_0": "PENDING",
        f"{array}_1": f"CANCELLED by {os.getuid()}",
        f"{array}_2": "PENDING",
        f"{array}_3": "PENDING",
    }
    lab.ok(f"gcancel {array}")


def _submitit_ids(job_id: str) -> Iterator[str]:
    """As submitit expands `42_[0,2-3%2]`."""
    array, _, tasks = job_id.partition("_")
    if not tasks.startswith("["):
        yield job_id
        return
    for part in tasks[1:-1].partition("%")[0].split(","):
        low, _, high = part.partition("-")
        for task in range(int(low), int(high or low) + 1):
            yield f"{array}_{task}"


def test_parsl_finds_sacct_and_its_jobs(lab: SlurmLab, ended: dict[int, str]) -> None:
    assert run(lab, "-X").returncode == 0
    both = f"{ended[1]},{ended[8]}"
    done = run(lab, "-X", "--noheader", "--format=jobid,state%20", "--job", both)
    assert {tuple(line.split()[:2]) for line in done.stdout.splitlines()} == {
        (ended[1], "COMPLETED"),
        (ended[8], "FAILED"),
    }


def test_snakemake_asks_for_its_account_with_words_of_a_shell(lab: SlurmLab) -> None:
    done = run(lab, "-nu", user(), "-o", "Account%256", "|", "tail", "-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("sacct: invalid option -- '1'")


def test_snakemake_finds_its_jobs_by_name(lab: SlurmLab) -> None:
    job = lab.submit("-J 3f0c-aa --comment 'rule all' --wrap true")
    lab.wait(job)
    since = time.strftime("%Y-%m-%dT%H:%M", time.gmtime(time.time() - DAY_S))
    done = run(
        lab,
        *"-X --parsable2 --clusters all --noheader --format=JobIdRaw,State --endtime now --name 3f0c-aa".split(),
        "--starttime",
        since,
    )
    assert (done.returncode, done.stdout) == (0, f"{job}|COMPLETED\n")
    done = run(lab, "-j", f"{job}.0", "--format=Reason", "--noheader")
    assert (done.returncode, done.stdout) == (0, "")
    assert run(lab, "-j", job, "-n", "-X", "-o", "nodelist%-256").stdout.rstrip() == "node1"
    report = run(
        lab,
        "--name=3f0c-aa",
        "--parsable2",
        "--noheader",
        "--format=JobID,JobName,Comment,Elapsed,TotalCPU,NNodes,NCPUS,MaxRSS,ReqMem",
    ).stdout.splitlines()
    assert [line.split("|")[:3] for line in report] == [[job, "3f0c-aa", "rule all"], [f"{job}.batch", "batch", ""]]


def test_reportseff_takes_every_column_it_finds(lab: SlurmLab, ended: dict[int, str]) -> None:
    names = set(run(lab, "--helpformat").stdout.split())
    wanted = "AdminComment AllocCPUS Elapsed JobID JobIDRaw MaxRSS NNodes REQMEM State Timelimit TotalCPU".split()
    assert {name.lower() for name in wanted} <= {name.lower() for name in names}
    since = time.strftime("%m%d%y", time.gmtime())
    done = run(
        lab,
        *("--parsable", "-n", "--delimiter=^|^", f"--format={','.join(wanted)}"),
        *(f"--user={user()}", f"--starttime={since}"),
    )
    lines = [line.split("^|^") for line in done.stdout.splitlines()]
    assert {len(line) for line in lines} == {len(wanted) + 1}
    assert {ended[1], f"{ended[1]}.batch"} <= {line[3] for line in lines}


def test_slurm_usage_reads_a_day_of_all_users(lab: SlurmLab, ended: dict[int, str]) -> None:
    day = time.strftime("%Y-%m-%d", time.gmtime())
    names = ",".join(list(COLUMNS)[:60])
    done = run(lab, "-a", "-S", f"{day}T00:00:00", "-E", f"{day}T23:59:59", f"--format=JobID,{names}", "-P", "-n")
    assert ended[1] in {line.partition("|")[0] for line in done.stdout.splitlines()}
    assert run(lab, "--version").stdout.split() == ["slurm-wlm", "22.05.8"]


def test_torchx_lists_jobs_from_json_and_describes_them_by_columns(lab: SlurmLab, ended: dict[int, str]) -> None:
    jobs = json.loads(run(lab, "--json", "-S1970-01-01-00:00:01").stdout)["jobs"]
    states = {str(job["job_id"]): job["state"]["current"] for job in jobs}
    assert (states[ended[1]], states[ended[47]]) == ("COMPLETED", "TIMEOUT")
    done = run(lab, "--parsable2", "-j", ended[8])
    found = list(csv.DictReader(done.stdout.splitlines(), delimiter="|"))
    assert [row["JobID"] for row in found] == [ended[8], f"{ended[8]}.batch"]
    assert list(found[0]) == ["JobID", "JobName", "Partition", "Account", "AllocCPUS", "State", "ExitCode"]


def test_aiida_asks_for_all_columns(lab: SlurmLab, ended: dict[int, str]) -> None:
    done = lab.type(
        "sacct --format=$(sacct --helpformat | tr '\\n' ' ' | tr -s ' ' ',' | sed 's/,$//') --parsable "
        f"--jobs={ended[1]}"
    )
    assert done.code == 0
    assert {line.count("|") for line in done.out.splitlines()} == {len(COLUMNS)}


def test_open_ondemand_reads_columns_by_a_control_character(lab: SlurmLab, ended: dict[int, str]) -> None:
    names = "jobid,jobname,state,exitcode,elapsed,start,end,alloctres,reqmem,maxrss,nodelist"
    done = run(
        lab,
        *("-P", "--delimiter", "\x1f", "-n", "--units", "G", "--allocations", "-o", names),
        *("--state", "COMPLETED,FAILED", "-j", f"{ended[1]},{ended[8]}", "-S", "2020-01-01", "-E", "now"),
    )
    rows = [line.split("\x1f") for line in done.stdout.splitlines()]
    assert sorted(row[0] for row in rows) == sorted([ended[1], ended[8]])
    assert {len(row) for row in rows} == {11}


def test_jobscope_asks_twice(lab: SlurmLab, ended: dict[int, str]) -> None:
    day = time.strftime("%Y-%m-%d", time.gmtime())
    first = run(
        lab, "-u", user(), "-X", "-S", f"{day}T00:00:00", "-E", f"{day}T23:59:59", "-n", "-P", "-o", "JobID,State"
    )
    assert f"{ended[8]}|FAILED" in first.stdout.splitlines()
    names = "JobID,State,JobName,Elapsed,NNodes,AllocTRES,Start,End,JobIDRaw,Cluster,User,AdminComment"
    second = run(lab, "-j", f"{ended[1]},{ended[8]}", "-X", "-P", "-n", "--units=G", "-o", names)
    assert {len(line.split("|")) for line in second.stdout.splitlines()} == {12}


def test_jupyter_finds_its_running_sessions(lab: SlurmLab) -> None:
    job = lab.submit("-J notebook --wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    done = run(lab, *"-o jobid,jobname -n --delimiter ; -P -s RUNNING,PENDING".split())
    assert f"{job};notebook" in done.stdout.splitlines()
    lab.ok(f"gcancel {job}")


def test_defaults_are_slurms() -> None:
    titles = case("sacct", 248).out.splitlines()[0].split()
    assert [name.lower() for name in titles] == DEFAULT.split(",")
    assert (FOLDER / "sacct.txt").exists()


@pytest.mark.parametrize("number", [258, 259, 262])
def test_begins_with_the_titles_of_slurm(lab: SlurmLab, ended: dict[int, str], number: int) -> None:
    golden = case("sacct", number)
    seen = lab.ok(Places(jobs={28: ended[68]}).command(golden)).splitlines()
    assert seen[:2] == golden.out.splitlines()[:2]
    assert len(seen) > 2


@pytest.mark.parametrize("command", ["sacct", "sstat", "sacctmgr"])
def test_imports_nothing_heavy(command: str) -> None:
    heavy = "re json asyncio msgspec typer rich argparse subprocess datetime logging urllib".split()
    program = f"import sys; import gpusched.addons.slurm.{command}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _with_path(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(heavy) & set(done.stdout.split())


def _with_path(program: str) -> str:
    folders = [str(Path(gpusched.__file__).parent.parent)]
    return f"import sys; sys.path += {folders!r}; {program}"
