"""squeue: golden outputs, the fields of -o and -O, filters, and what tools that call it read."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from golden_cases import GoldenCase, Places, case, cases, check
from hypothesis import given
from hypothesis import strategies as st
from slurm_lab import SlurmLab
from support import wait_until

from gpusched.addons.slurm import squeue
from gpusched.addons.slurm.command import CommandError, parse
from gpusched.addons.slurm.format import long_pieces, percent_pieces, render
from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.job_fields import PERCENT, long_fields
from gpusched.addons.slurm.values import VALID_STATES, bare_tasks
from gpusched.model.states import ReasonCode

Busy = tuple[SlurmLab, dict[int, str]]

_AS_A_WHOLE = (2, 103, 106, 107, 108, 112, 114, 120, 121, 125, 131, 132)
_BY_ROW = (97, 98, 99, 100, 101, 104, 105, 109, 110, 111, 113, 115, 116, 119, 122, 123, 124, 126, 127, 128)
_MASKED = {123: (8, 9, 14, 15, 16, 18, 29, 32), 124: (15, 32, 37, 38, 42, 46)}
"""Columns of priorities, which are ours, of cores, more in two jobs, of expected starts and of what has passed."""
_APART = {
    "015-squeue-empty": "see the test of an empty queue",
    "016-squeue-empty-h": "see the test of an empty queue",
    "037-directive-after-command-name": "sbatch's",
    "043-squeue-env": "sbatch's",
    "082-squeue-partition-limit": "sbatch refuses such a job here",
    "102-squeue-u": "the one user of a personal daemon stands for bob, who has no account here",
    "117-squeue-S": "priorities are ours; see the test of orders",
    "118-squeue-start": "expected starts are ours; Slurm plans only the first of the queue; see its test",
    "129-squeue-json": "Slurm 22.05 ignores -j with --json; see the test of its shape",
    "173-squeue-suspended": "see the life of a job",
    "176-squeue-after-requeue": "see the life of a job",
    "178-squeue-after-requeuehold": "see the life of a job; a sentence in place of a word is none of ours",
    "235-dep-never-satisfied": "see the life of a job",
    "245-requeue-state": "a requeued job waits two minutes in Slurm; see the life of a job",
    "269-jobs-left": "see the life of a job",
}
"""Golden cases that are not compared here, and why."""


def rows_of(text: str, number: int, array: str) -> list[str]:
    """The lines of a listing, in one order, without what differs from run to run.

    Jobs of equal priority are listed by their starts here, in no order by Slurm. Slurm divides an array that depends
    on another into its tasks; here it stays one row. bob's job is alice's, and jobs book no memory unasked.
    """
    text = re.sub(r"  bob\b", "alice", text).replace("_*(", "(")  # all tasks of an array are meant by its id
    for theirs, ours in (
        ("|bob|", "|alice|"),
        ("|chem|", "|physics|"),
        (" chem", " physics"),
    ):
        text = text.replace(theirs, ours)
    if number != 100:
        text = re.sub(rf"(?m)^( *){array}_(\[1-)?10\b\]?", lambda found: f"{array}_[1-10]".rjust(len(found[0])), text)
        text = re.sub(rf"(?m)^ *{array}_\d.*\n", "", text)
        text = text.replace(f"|{array}|10|", f"|{array}|1-10|")
    lines = text.splitlines()
    if number in _MASKED:
        columns = [line.split("|") for line in lines]
        lines = ["|".join(word for at, word in enumerate(row) if at not in _MASKED[number]) for row in columns]
    elif number == 126:
        lines = [
            " ".join(re.sub(r"mem=\d+M,|(cpu|billing)=[12]\b", "", line).split()[:-1])
            for line in lines
            if " corr " not in line
        ]
    lines = [line for line in lines if number != 127 or int(line.split()[0] if line[0].isdigit() else 0) <= 33]
    return sorted(
        re.sub(r"\b[0-4]:\d\d\b(?!:)", "<t>", re.sub(r" +", " ", line) if number != 97 else line) for line in lines
    )


def test_every_golden_case_is_compared_or_has_a_reason() -> None:
    compared = {one.name for one in cases("squeue", *(f"{number:03d}" for number in (*_AS_A_WHOLE, *_BY_ROW)))}
    assert {one.name for one in cases("squeue")} - compared == set(_APART)


@pytest.mark.parametrize("case", cases("squeue", *(f"{number:03d}" for number in _AS_A_WHOLE)), ids=str)
def test_squeue_answers_as_slurm_did(busy: Busy, case: GoldenCase) -> None:
    lab, jobs = busy
    check(lab, case, {}, Places(jobs=jobs))


@pytest.mark.parametrize("case", cases("squeue", *(f"{number:03d}" for number in _BY_ROW)), ids=str)
def test_squeue_lists_the_rows_that_slurm_did(busy: Busy, case: GoldenCase) -> None:
    lab, jobs = busy
    places, number = Places(jobs=jobs), int(case.name[:3])
    done = lab.type(places.command(case))
    assert (done.code, done.err) == (case.code, case.err)
    ours, golden = places.seen(lab, done.out), places.expected(case, case.out)
    if number == 111:  # ours has nothing that ended before
        golden = "".join(line for line in golden.splitlines(True) if line.split()[1] in ("PENDING", "RUNNING"))
    if number in (101, 116):  # bob's is ours here
        ours = "".join(line for line in ours.splitlines(True) if line.split()[0] != jobs[26])
    assert rows_of(ours, number, jobs[33]) == rows_of(golden, number, jobs[33])


def test_an_empty_queue_is_a_header(own_lab: SlurmLab) -> None:
    for number in ("015", "016"):
        check(own_lab, case("squeue", number), {})


def test_expected_starts_are_listed_with_the_soonest_first(busy: Busy) -> None:
    lab, jobs = busy
    golden = case("squeue", "118")
    done = lab.type("squeue --start")
    lines, theirs = done.out.splitlines(), golden.out.splitlines()
    assert (done.code, done.err, lines[0]) == (0, "", theirs[0])
    starts = [line.split()[5] for line in lines[1:]]
    assert starts == sorted(starts)  # N/A is last
    by_id = {line.split()[0]: line.split()[5] for line in lines[1:]}
    assert len(by_id) == 11
    assert by_id[jobs[30]] == "N/A"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", by_id[jobs[26]])
    assert all(
        re.fullmatch(r" {1,18}\S+ +main +\w+ +\w+ PD .{19}      1 \S+ {1,20}\(\w+\)", line) for line in lines[1:]
    )


@pytest.mark.parametrize(
    ("letters", "form", "is_reversed"),
    [("i", "%A", False), ("-i", "%A", True), ("-p,i", "%Q", True), ("p", "%Q", False), ("j", "%j", False)],
)
def test_letters_order_the_rows(busy: Busy, letters: str, form: str, is_reversed: bool) -> None:
    lab, _ = busy
    found = lab.ok(f"squeue -h -S {letters} -o '{form}'").split()
    keys = [int(word) if word.isdigit() else word for word in found]
    assert len(keys) == 13
    assert keys == sorted(keys, reverse=is_reversed)  # type: ignore[type-var]


def test_the_usual_order_is_by_partition_and_state_and_then_of_the_starts(busy: Busy) -> None:
    lab, jobs = busy
    found = [line.split() for line in lab.ok("squeue -h -o '%T %i'").splitlines()]
    assert [state for state, _ in found] == ["PENDING"] * 11 + ["RUNNING"] * 2
    assert found[0][1] == jobs[26]


@pytest.mark.parametrize(
    ("line", "code", "err"),
    [
        ("squeue -S '!'", 1, "squeue: error: Invalid sort specification: !\n"),
        ("squeue -o %i -O jobid", 1, "squeue: error: -O (--Format) is incompatible with -o (--format)\n"),
        ("squeue -i 0", 1, "squeue: error: --iterate=0\n"),
        ("squeue -i soon", 1, "squeue: error: --iterate=soon\n"),
        ("squeue -j 1,", 0, None),
        ("squeue -j 1.5", 1, "squeue: error: Invalid job id: 1.5\n"),
        ("squeue -j 0", 1, "squeue: error: Invalid job id: 0\n"),
        ("squeue -s x", 1, "squeue: error: Invalid job_step id: x\n"),
        ("squeue -w nope", 1, "squeue: error: Invalid node name nope\n"),
        ("squeue -w '['", 1, "squeue: error: '[' invalid entry for --nodelist\n"),
        ("squeue -M elsewhere", 1, "squeue: error: No cluster 'elsewhere' known by database.\n"),
        ("squeue --only-job-state", 1, None),
        ("squeue -o", 1, None),
        ("squeue --format", 1, None),
        ("squeue --noheader=yes", 1, None),
        ("squeue -Z", 1, None),
    ],
)
def test_mistakes_fail_in_a_line_or_two(busy: Busy, line: str, code: int, err: str | None) -> None:
    done = busy[0].type(line)
    assert done.code == code
    assert err is None or (done.out, done.err) == ("", err)
    assert done.err.count("\n") <= 2
    assert all(line.startswith(("squeue: ", "Try ")) for line in done.err.splitlines())


def test_an_operand_belongs_to_jobs_or_steps(busy: Busy) -> None:
    lab, jobs = busy
    one = jobs[25]
    for line in (f"squeue -h -o %i -j {one}", f"squeue -j{one} -ho %i", f"squeue --jobs={one} -h -o %i"):
        assert lab.ok(line) == f"{one}\n"
    assert lab.ok(f"squeue -j -h -o %i {one}") == f"{one}\n"
    assert len(lab.ok("squeue -j -h -o %i").split()) == 13
    done = lab.type(f"squeue {one}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"squeue: error: Unrecognized option: {one}\n")


@pytest.mark.parametrize(
    ("options", "golden_ids"),
    [
        ("-p debug", []),
        ("-p main,debug -t R", [25, 27]),
        ("-A physics -t R", [25, 27]),
        ("-A chem", []),
        ("-q capped", [36, 37]),
        ("-q normal -t R", [25, 27]),
        ("-n small,big", [26, 27]),
        ("-u 0,root,{user} -t r", [25, 27]),
        ("-R class", []),
        ("-L matlab", []),
        ("-w node1", [25, 27]),
        ("-t CG,CF", []),
        ("-t R -j {25},{26}", [25]),
    ],
)
def test_filters_choose_rows(busy: Busy, options: str, golden_ids: list[int]) -> None:
    lab, jobs = busy
    words = options.replace("{user}", lab.ok("id -un").strip())
    words = re.sub(r"\{(\d+)\}", lambda found: jobs[int(found[1])], words)
    found = lab.type(f"squeue -h -o %i {words}")
    assert found.code == 0
    assert set(found.out.split()) == {jobs[one] for one in golden_ids}


def test_variables_stand_for_options(busy: Busy) -> None:
    lab, jobs = busy
    cases_of = {
        "SQUEUE_STATES": ("R", {25, 27}),
        "SQUEUE_NAMES": ("small", {27}),
        "SQUEUE_QOS": ("capped", {36, 37}),
        "SQUEUE_PARTITION": ("debug", set()),
        "SQUEUE_ACCOUNT": ("chem", set()),
        "SQUEUE_USERS": ("nobody", set()),
    }
    for variable, (value, wanted) in cases_of.items():
        found = lab.ok("squeue -h -o %i", **{variable: value}).split()
        assert set(found) == {jobs[one] for one in wanted}, variable
    assert lab.ok("squeue -h -t R", SQUEUE_FORMAT2="jobid:5,state:3") == f"{jobs[25]:5}RUN\n{jobs[27]:5}RUN\n"
    assert lab.ok("squeue -h -t R -o %A", SQUEUE_SORT="-i").split() == [jobs[27], jobs[25]]
    assert lab.ok("squeue -h -t R -o %A", SQUEUE_SORT="i", SQUEUE_FORMAT="no").split() == [jobs[25], jobs[27]]
    assert len(lab.ok("squeue -h", SQUEUE_ARRAY="1").splitlines()) == 13 - 3 + 10 + 10 + 5


def test_json_has_the_keys_of_slurm(busy: Busy) -> None:
    lab, jobs = busy
    golden = case("squeue", "129").out
    first = golden[golden.index('    {\n      "account"') : golden.index("    },\n    {\n") + 5]
    theirs = json.loads(first)
    found = json.loads(lab.ok(f"squeue --json -j {jobs[25]}"))
    assert found["meta"]["Slurm"]["release"] == "22.05.8"
    assert found["errors"] == []
    (ours,) = found["jobs"]
    assert set(ours) == set(theirs)
    differing = {key for key in ours if not _alike(ours[key], theirs[key])}
    assert differing <= {"cpus_per_task", "array_task_id"}
    assert (ours["job_id"], ours["job_state"], ours["tres_per_node"]) == (int(jobs[25]), "RUNNING", "gres:gpu:2")
    array = next(one for one in json.loads(lab.ok("squeue --json"))["jobs"] if one["job_id"] == int(jobs[28]))
    assert (array["array_job_id"], array["array_task_string"]) == (int(jobs[28]), "1-10%2")


def _alike(one: Any, other: Any) -> bool:
    return one is None or other is None or type(one) is type(other)


def test_yaml_says_what_json_does(busy: Busy) -> None:
    lab, jobs = busy
    text = lab.ok(f"squeue --yaml -j {jobs[25]}")
    document = json.loads(lab.ok(f"squeue --json -j {jobs[25]}"))
    head = "".join(line + "\n" for line in text.splitlines()[:12])
    assert case("squeue", "129").out.count("22.05.8") == 1
    assert head.startswith("%YAML 1.1\n--- !!map\n!!str meta: !!map\n  !!str plugin: !!map\n")
    for key in document["jobs"][0]:
        assert f"  !!str {key}: " in text
    assert f"  !!str job_id: !!int {jobs[25]}\n" in text
    assert "  !!str comment: !!null null\n" in text


def test_every_letter_and_every_name_prints(busy: Busy) -> None:
    lab, jobs = busy
    names = [*long_fields("c"), "JobID", "TRES_ALLOC"]
    done = lab.type(f"squeue -r -t all -O '{','.join(f'{name}:|' for name in names)}'")
    assert (done.code, done.err) == (0, "")
    assert {line.count("|") for line in done.out.splitlines()} == {len(names)}
    assert all(all(line.split("|")) or line for line in done.out.splitlines())
    form = "|".join(f"%{letter}" for letter in PERCENT)
    done = lab.type(f"squeue -o '{form}'")
    assert (done.code, done.err) == (0, "")
    assert {line.count("|") for line in done.out.splitlines()} == {len(PERCENT) - 1}
    done = lab.type(f"squeue -h -j {jobs[26]} -o '%-8i|%5.5i|%A'")
    assert (done.code, done.out) == (0, f"%-8i|%5.5i|{jobs[26]}\n")
    assert done.err == "".join(f"squeue: error: Invalid job format specification: {mark}\n" for mark in "-.")


def test_text_between_fields_is_printed_as_it_is(busy: Busy) -> None:
    lab, jobs = busy
    one = jobs[25]
    forms = {
        "'\"%A|%T\"'": f'"{one}|RUNNING"',
        r"'%A\x1f%T'": rf"{one}\x1fRUNNING",
        "'%i<><>%t'": f"{one}<><>R",
        "%iÄ%jÄ": f"{one}Ärunner" + "Ä",
        "'%1000N|'": f"{'node1':1000}|",
        "'%.15j|'": "         runner|",
        "'%3j|'": "run|",
        "'%.3N|'": "node1|",
    }
    for form, line in forms.items():
        assert lab.ok(f"squeue -h -j {one} -o {form}", PYTHONUTF8="1") == line + "\n", form
    longs = {
        "'jobid:###turm###,name:###turm###'": f"{one}###turm###runner###turm###",
        "$'Account:\\x1f,JobID:\\x1f'": f"physics\x1f{one}\x1f",
        "jobid:3,name:.8,state:3": f"{one:3}  runnerRUN",
        "name:8-,state": "runner  -RUNNING             ",
    }
    for form, line in longs.items():
        assert lab.ok(f"squeue -h -j {one} -O {form}") == line + "\n", form
    assert lab.ok(f"squeue -j {one} -O jobid:#,name:#").splitlines()[0] == "JOBID#NAME#"


def test_a_wide_list_of_tasks_is_cut_as_by_slurm() -> None:
    assert bare_tasks("1-10") == "1-10"
    assert bare_tasks("1-9:2") == "1,3,5,7,9"
    long = bare_tasks("0-998:2")
    assert (len(long), long[-3:]) == (63, "...")
    assert bare_tasks("1-5,7-9:2,20") == "1-5,7,9,20"


def test_slurm_bitstr_len_widens_the_list_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_BITSTR_LEN", "0")
    assert bare_tasks("0-998:2") == ",".join(map(str, range(0, 999, 2)))
    monkeypatch.setenv("SLURM_BITSTR_LEN", "10")
    assert bare_tasks("0-998:2") == "0,2,4,..."


def test_a_job_is_listed_from_its_submission_until_some_time_after_its_end(lab: SlurmLab) -> None:
    job = lab.submit("-c 1 --wrap 'exit 3' -J life --hold")
    assert (
        lab.ok(f"squeue -h -j {job} -o '%i %t %T %r %R %N|%B'") == f"{job} PD PENDING JobHeldUser (JobHeldUser) |n/a\n"
    )
    assert lab.ok(f"squeue -h -j {job} -o '%Q %S %M'") == "0 N/A 0:00\n"
    lab.ok(f"scontrol release {job}")
    lab.wait(job)
    for line in ("squeue -h -n life", f"squeue -h -j {job}", f"squeue -h -j {job},{job}", f"squeue -h -t R -j {job}"):
        done = lab.type(line)
        assert (done.code, done.out, done.err) == (0, "", ""), line
    assert lab.ok(f"squeue -h -t all -j {job} -o '%i %t %r %R'") == f"{job} F NonZeroExitCode (NonZeroExitCode)\n"
    assert f"{job} FAILED\n" in lab.ok("squeue -h -t all -o '%i %T'")
    assert f"{job} FAILED\n" in lab.ok("squeue -h --me --states=failed -o '%i %T'")


def test_what_ended_long_ago_is_unknown(lab: SlurmLab) -> None:
    job = lab.submit("--wrap true")
    lab.wait(job)
    patched = (
        "import sys, gpusched.addons.slurm.values as values; values.MIN_JOB_AGE_S = -5; "
        "sys.argv[0] = 'squeue'; from gpusched.addons.slurm.squeue import main; sys.exit(main())"
    )
    done = lab.type(f'{sys.executable} -c "{patched}" -j {job} -t all')
    assert (done.code, done.out, done.err) == (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    done = lab.type(f'{sys.executable} -c "{patched}" -h -j {job},{job} -t all')
    assert (done.code, done.out) == (0, "")
    assert f"{job} " not in lab.ok(f'{sys.executable} -c "{patched}" -h -t all -o "%i "')


def test_ids_of_tasks_are_listed_one_by_one(lab: SlurmLab) -> None:
    job = lab.submit("--hold -a 2-8:3%2 -J tasks --wrap true")
    assert lab.ok(f"squeue -h -j {job} -o '%i %F %K %A'") == f"{job}_[2,5,8%2] {job} 2,5,8%2 {job}\n"
    rows = [line.split() for line in lab.ok(f"squeue -h -r -j {job} -o '%i %F %K %A'").splitlines()]
    assert [row[:3] for row in rows] == [[f"{job}_{task}", job, str(task)] for task in (2, 5, 8)]
    numbers = [row[3] for row in rows]
    assert len({*numbers, job}) == 4
    for task, number in zip((2, 5, 8), numbers, strict=True):
        assert lab.ok(f"squeue -h -j {job}_{task} -o '%i %A'") == f"{job}_{task} {number}\n"
        assert lab.ok(f"squeue -h -j {number} -o %i") == f"{job}_{task}\n"
    assert lab.type(f"squeue -h -j {job}_3").code == 0
    assert lab.ok(f"squeue -h -j {job}_3") == ""
    lab.ok(f"scancel {job}_2")
    assert lab.ok(f"squeue -h -j {job} -o %i") == f"{job}_[5,8%2]\n"
    left = [line.split() for line in lab.ok(f"squeue -h -r -j {job} -o '%i %A'").splitlines()]
    assert left == [[f"{job}_{task}", number] for task, number in zip((5, 8), numbers[1:], strict=True)]
    lab.ok(f"scancel {job}")
    assert lab.ok(f"squeue -h -j {job}") == ""
    states = lab.ok(f"squeue -h -t all -j {job} -o '%i %T'").splitlines()
    assert sorted(states) == [f"{job}_2 CANCELLED", f"{job}_[5,8%2] CANCELLED"]


def test_a_requeued_task_waits_in_the_row_of_its_array(lab: SlurmLab) -> None:
    job = lab.submit("-c 1 -a 1-4%1 --wrap 'sleep 300'")
    lab.wait_state(f"{job}_1", "RUNNING")
    assert lab.ok(f"squeue -h -t PD -j {job} -o %i") == f"{job}_[2-4%1]\n"
    lab.ok(f"scontrol requeuehold {job}_1")
    lab.wait_state(f"{job}_1", "PENDING")
    found = list(lab.ok(f"squeue -h -t PD -j {job} -o '%i %r'").splitlines())
    assert len(found) == 1
    assert found[0].startswith(f"{job}_[1")
    assert "JobHeldUser" in found[0]
    lab.ok(f"scancel {job}")


def test_the_life_of_a_job_in_the_words_of_slurm(own_lab: SlurmLab) -> None:
    lab = own_lab
    job = lab.submit("-c 1 -p debug --wrap 'sleep 300'")
    lab.wait_state(job, "RUNNING")
    lab.ok(f"scontrol suspend {job}")
    lab.wait_state(job, "SUSPENDED")
    assert lab.ok(f"squeue -h -j {job} -o '%i %t %T %r'") == f"{job} S SUSPENDED None\n"
    lab.ok(f"scontrol resume {job}")
    lab.wait_state(job, "RUNNING")
    lab.ok(f"scontrol requeuehold {job}")
    lab.wait_state(job, "PENDING")
    assert lab.ok(f"squeue -h -j {job} -o '%i %t %M %R'") == f"{job} PD 0:00 (JobHeldUser)\n"
    assert lab.ok(f"squeue -h -j {job} -O restartcnt:2,exit_code:4,nodelist:,batchhost:") == "1 0:0 n/a\n"
    failing = lab.submit("-c 1 -p debug fail3.sh")
    lab.wait(failing)
    waiting = lab.submit(f"-d afterok:{failing} --wrap true")
    found = lab.ok(f"squeue -j {waiting}")
    assert found.splitlines()[1].endswith(" PD       0:00      1 (DependencyNeverSatisfied)")
    assert lab.ok(f"squeue -h -j {waiting} -o %E") == f"afterok:{failing}(failed)\n"
    lab.ok(f"scancel {waiting} {job}")
    assert lab.ok("squeue -h") == ""


def test_steps_of_running_jobs_are_listed(lab: SlurmLab) -> None:
    job = lab.submit("-c 1 --wrap 'srun -J inner sleep 300'")
    wait_until(lambda: f"{job}.0" in lab.ok("squeue -h -s -o %i").split(), what="the step to be there")
    rows = lab.ok(f"squeue -h -s -j {job} -o '%i %j %P %N %A'").splitlines()
    assert rows == [f"{job}.batch batch main node1 1", f"{job}.0 inner main node1 1"]
    assert lab.ok(f"squeue -h -s {job}.0 -o %i") == f"{job}.0\n"
    assert (
        lab.ok(f"squeue -h --steps={job} -O stepid:12,stepname:8")
        == f"{job + '.batch':12}batch   \n{job + '.0':12}inner   \n"
    )
    assert lab.type("squeue -s -O stepid,nosuch").err == (
        "squeue: error: Invalid job step format specification: nosuch\n"
    )
    lab.ok(f"scancel {job}")


def test_hostile_names_reach_no_terminal(lab: SlurmLab) -> None:
    job = lab.submit("--hold --wrap true -J $'a\\x1b[31mb'")
    assert lab.ok(f"squeue -h -j {job} -o %j") == "a\\x1b[31mb\n"
    lab.ok(f"scancel {job}")


class TestAsClientsCallIt:
    """The command lines of client libraries, and what they make of the result."""

    def test_simple_slurm_reads_csv(self, busy: Busy) -> None:
        lab, jobs = busy
        text = lab.ok("""squeue --me -t R -o '"%i","%j","%t","%M","%L","%D","%C","%m","%b","%R"'""")
        first, second = csv.DictReader(text.splitlines())
        assert (
            list(first) == "JOBID NAME ST TIME TIME_LEFT NODES CPUS MIN_MEMORY TRES_PER_NODE NODELIST(REASON)".split()
        )
        assert (int(first["JOBID"]), second["TRES_PER_NODE"]) == (int(jobs[25]), "N/A")

    def test_parsl_takes_two_words(self, busy: Busy) -> None:
        lab, jobs = busy
        text = lab.ok(f"squeue --clusters=all --noheader --format='%i %t' --job '{jobs[25]},{jobs[26]}'")
        found = dict(line.split()[:2] for line in text.splitlines())
        assert found == {jobs[25]: "R", jobs[26]: "PD"}

    def test_snakemake_looks_names_up(self, busy: Busy) -> None:
        lab, jobs = busy
        text = lab.ok("squeue --format='%i|%T' --states=all --noheader --name arr")
        assert text == f"{jobs[28]}_[1-10%2]|PENDING\n"

    def test_pysqa_splits_at_bars(self, busy: Busy) -> None:
        lab, _jobs = busy
        text = lab.ok("squeue --format '%A|%u|%t|%.15j|%Z' --noheader")
        rows = [line.split("|") for line in text.splitlines()]
        assert {len(row) for row in rows} == {5}
        assert all(row[0].isdigit() and len(row[3]) == 15 for row in rows)

    def test_psij_wants_three_words_and_known_states(self, lab: SlurmLab) -> None:
        ends = [lab.submit(f"-c 1 --wrap '{text}'") for text in ("true", "exit 3", "kill -9 $$")]
        lab.wait(*ends)
        lab.ok(f"scancel {lab.submit('--hold --wrap true')}")
        text = lab.ok("squeue -O JobArrayID,StateCompact,Reason -t all --me")
        states = set("BF CA CD CF CG DL F NF OOM PD PR R RD RF RH RQ SO TO RS RV SI SE ST S".split())
        reasons = {"NonZeroExitCode", "TimeLimit", "JobLaunchFailure", "NodeDown", "SystemFailure"}
        lines = text.splitlines()[1:]
        assert len(lines) >= 4
        for line in lines:
            _, state, reason = line.split()
            assert state in states
            assert state != "F" or reason in reasons
        assert set(ends) <= set(lab.ok("squeue --me -o %i -h -r -t all").split())

    def test_qtoolkit_and_aiida_send_one_id_twice(self, busy: Busy) -> None:
        lab, jobs = busy
        form = "%i<><> %t<><> %r<><> %j<><> %u<><> %P<><> %l<><> %D<><> %C<><> %M<><> %m"
        for number in jobs.values():
            text = lab.ok(f"SLURM_TIME_FORMAT='standard' squeue --noheader -o '{form}' --jobs={number},{number}")
            (words,) = [line.split("<><> ") for line in text.splitlines()]
            assert len(words) == 11
            assert re.fullmatch(r"(\d+-)?(\d+:)?\d+:\d\d|UNLIMITED|NOT_SET", words[6])
            assert re.fullmatch(r"(\d+-)?(\d+:)?\d+:\d\d", words[9])
            assert re.fullmatch(r"0|\d+[MGT]", words[10])
        done = lab.type(f"squeue --noheader -o '{form}' --jobs=99999,99999")
        assert (done.code, done.out) == (0, "")
        more = lab.ok("squeue --noheader -o '%i^^^%t^^^%r^^^%B^^^%u^^^%D^^^%C^^^%R^^^%P^^^%l^^^%M^^^%S^^^%j^^^%V'")
        assert {line.count("^^^") for line in more.splitlines()} == {13}

    def test_nextflow_reads_final_states(self, lab: SlurmLab) -> None:
        job = lab.submit("-c 1 --wrap true")
        lab.wait(job)
        user = lab.ok("id -un").strip()
        found = dict(
            line.split() for line in lab.ok(f"squeue --noheader -o '%i %t' -t all -p main -u {user}").splitlines()
        )
        assert found[job] == "CD"
        assert lab.type("squeue --noheader --only-job-state -t all").code == 1

    def test_batchspawner_reads_state_and_host(self, busy: Busy) -> None:
        lab, jobs = busy
        assert lab.ok(f"squeue -h -j {jobs[25]} -o '%T %B'") == "RUNNING node1\n"
        assert lab.ok(f"squeue -h -j {jobs[26]} -o '%T %B'") == "PENDING n/a\n"

    def test_nemo_run_asks_for_the_start(self, busy: Busy) -> None:
        lab, jobs = busy
        text = lab.ok(f"squeue --start --noheader -j {jobs[26]} -o '%i|%S|%T'")
        assert re.fullmatch(rf"{jobs[26]}\|\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\|PENDING\n", text)

    def test_slurm_gpustat_reads_wide_columns(self, busy: Busy) -> None:
        lab, _jobs = busy
        text = lab.ok("squeue -O tres-per-node:100,nodelist:100,username:100,jobid:100 --noheader -t R")
        assert [len(line) for line in text.splitlines()] == [400, 400]
        assert text.splitlines()[0].split()[0] == "gres:gpu:2"

    def test_slurm_usage_splits_at_slashes(self, busy: Busy) -> None:
        lab, _ = busy
        head, *lines = lab.ok("squeue -ro %u/%t/%D/%P/%C/%N/%h").splitlines()
        assert head == "USER/ST/NODES/PARTITION/CPUS/NODELIST/OVER_SUBSCRIBE"
        assert all(line.split("/")[6] in ("OK", "NO", "YES", "USER") for line in lines)

    def test_stui_gets_its_quotes_back(self, busy: Busy) -> None:
        lab, _ = busy
        text = lab.ok("""squeue --noheader --all --format='"%A|%i|%F|%K|%C|%j|%P|%r|%u|%y|%T|%M|%b|%N"'""")
        assert all(line[0] == line[-1] == '"' and line.count("|") == 13 for line in text.splitlines())

    def test_turm_splits_at_its_mark(self, busy: Busy) -> None:
        lab, _ = busy
        names = (
            "jobid name state username timeused StartTime tres-alloc partition nodelist stdout stderr command "
            "statecompact reason ArrayJobID ArrayTaskID NodeList WorkDir"
        ).split()
        text = lab.ok(f"squeue --array --noheader --Format {','.join(f'{name}:###turm###' for name in names)}")
        rows = [line.split("###turm###") for line in text.splitlines()]
        assert {len(row) for row in rows} == {19}
        assert all(row[2] in VALID_STATES and (row[15] == "N/A" or row[15].isdigit()) for row in rows)

    def test_ondemand_skips_its_header(self, busy: Busy) -> None:
        lab, _jobs = busy
        names = (
            "Account JobID BatchHost MinCpus NumCPUs MinTmpDisk NumNodes EndTime Dependency Feature ArrayJobID "
            "GroupName GroupID OverSubscribe Sockets JobArrayID Cores Name Threads Comment ArrayTaskID TimeLimit "
            "TimeLeft MinMemory TimeUsed ReqNodes NodeList Command Contiguous QOS Partition PriorityLong Reason "
            "StartTime StateCompact State UserName UserID Reservation SubmitTime WCKey Licenses ExcNodes CoreSpec "
            "Nice SchedNodes SCT WorkDir gres tres "
        ).split()
        form = ",".join(f"{name}:\x1f" for name in names)
        done = lab.type(f"squeue --all --states=all --noconvert -O '{form}'")
        assert (done.code, done.err) == (0, "")
        rows = done.out.split("\x1f\n")[1:-1]
        assert len(rows) >= 13
        assert all(row.count("\x1f") == len(names) - 1 for row in rows)
        assert "Invalid job id specified" in lab.type(f"squeue --all --states=all --noconvert -j 99999 -O '{form}'").err

    def test_skypilot_and_monitors(self, busy: Busy) -> None:
        lab, jobs = busy
        assert lab.ok("squeue -h --states=running,completing -o %i").split() == [jobs[25], jobs[27]]
        assert lab.ok("squeue -h --name big -o %T") == "PENDING\n"
        assert lab.ok(f"squeue -h --jobs {jobs[26]} --states all -o %r") == "Resources\n"
        ends, asked = lab.ok("squeue --format='%e %b' --states=RUNNING --noheader").splitlines()[0].split()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", ends)
        assert asked == "gres:gpu:2"
        assert lab.ok("squeue -h -n dask-worker -t PD,R -o %i") == ""


JOB: dict[str, Any] = {
    "native_id": "90817",
    **dict.fromkeys(
        "account qos reservation deadline_at comment wckey constraint prefer dependency begin_at start_at end_at node "
        "suspended_at priority preempt_at throttle tasks_left array_id task cpus_per_task cpus_per_gpu gpus_per_task "
        "mem_per_cpu_mib mem_per_gpu_mib ntasks ntasks_per_node stdin_path stdout_path stderr_path gpu_type exit_code "
        "signal time_limit_s script_path".split()
    ),
    **dict.fromkeys("id name user queue command work_dir".split(), "7"),
    **dict.fromkeys("job_id uid nice run restarts eligible_at submit_at suspended_s gpus_per_node".split(), 0),
    **dict.fromkeys("total_gpus total_mem_mib".split(), 0),
    "nodes_max": None,
    "total_cpus": 1.0,
    "state": "PENDING",
    "reason": "Priority",
    "hold": None,
    "nodes": 1,
    "cpus": 1.0,
    "mem_mib": 0,
    "num_tasks": 1,
    "gpu_request": "0",
    "gpus": [],
    "licenses": {},
    "nodelist": [],
    "exclude": [],
    "exclusive": False,
    "is_foreground": False,
    "is_batch": True,
    "requeue": True,
}


@given(st.text("%.-0123456789ijRtaZz!| é\x1f", max_size=24))
def test_any_format_prints_one_line_for_a_job(form: str) -> None:
    unknown: list[str] = []
    text = render(percent_pieces(form, PERCENT, unknown), [SlurmJob(JOB)], header=False)
    assert text.count("\n") == 1


@given(st.text("jobidname:.-0123456789,|", max_size=30))
def test_any_long_format_prints_one_line_for_a_job(form: str) -> None:
    pieces, unknown = long_pieces(form, long_fields("c"))
    assert render(pieces, [SlurmJob(JOB)], header=False).count("\n") == 1
    assert not {name.lower() for name in unknown} & set(long_fields("c"))


@given(st.sampled_from([*PERCENT, *long_fields("c")]))
def test_a_field_reads_only_the_keys_that_it_names(name: str) -> None:
    field = PERCENT.get(name) or long_fields("c")[name]
    asked = {key: JOB[key] for key in field.keys.split()}
    assert field.cell(SlurmJob(asked)) == field.cell(SlurmJob(JOB))


@pytest.mark.parametrize("state", sorted(squeue.OURS))
@pytest.mark.parametrize("reason", [*map(str, ReasonCode), None])
def test_states_and_reasons_are_words_of_slurm(state: str, reason: str | None) -> None:
    job = SlurmJob({**JOB, "state": state, "reason": reason})
    assert PERCENT["T"].cell(job) in VALID_STATES
    assert PERCENT["t"].cell(job).isupper()
    assert re.fullmatch(r"\w+", job.reason)
    assert state != "FAILED" or job.reason != "None"


@given(st.text("PtiS,+-!x", max_size=8))
def test_any_order_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        found, _ = squeue.order_of(parse(squeue.COMMAND, [f"--sort={text}"]))
    except CommandError as error:
        assert error.text.startswith("squeue: error: Invalid sort specification: ")  # noqa: PT017  not always raised
    else:
        assert all(letter in text or text == "" for letter, _, _ in found)


def test_nothing_heavy_is_imported_at_the_prompt() -> None:
    code = "import sys; import gpusched.addons.slurm.squeue, gpusched.addons.slurm.scancel; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", f"import sys; sys.path = {sys.path!r}; {code}"], capture_output=True
    )
    heavy = {"re", "enum", "json", "dataclasses", "typing", "asyncio", "msgspec", "rich", "typer", "signal", "socket"}
    assert heavy & set(done.stdout.decode().split()) == set()
    assert b"gpusched.addons.slurm.scancel" in done.stdout


def test_iterate_prints_again_and_again(busy: Busy) -> None:
    lab, jobs = busy
    line = f"exec squeue -i 1 -j {jobs[25]} -o %A"
    with subprocess.Popen(
        ["bash", "-c", line], cwd=lab.work, env=lab.env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        found = [process.stdout.readline().rstrip("\n") for _ in range(8)]
        process.terminate()
    assert found[1:4] == found[5:8] == ["JOBID", jobs[25], ""]
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", found[0])
