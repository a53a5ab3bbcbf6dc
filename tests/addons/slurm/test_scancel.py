"""scancel: golden outputs, what each way to name jobs ends, and who gets a signal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from golden_cases import Places, case, cases, check, check_table
from hypothesis import given
from hypothesis import strategies as st
from slurm_lab import SlurmLab, user
from support import wait_until

from gpusched.addons.slurm import scancel
from gpusched.addons.slurm.command import CommandError, run
from gpusched.addons.slurm.scancel import COMMAND, CancelTarget
from gpusched.errors import Forbidden

DIFFERS = {
    "200-scancel-others": "the one user of a personal daemon stands for bob as well",
}
SIGNALS = """#!/bin/bash
trap 'echo shell got USR1 >> "$1"' USR1
srun bash -c 'trap "echo step got USR1 >> $0" USR1; touch $0.ready; while [ ! -e $0.stop ]; do sleep 0.02; done' "$1" &
while [ ! -e "$1.stop" ]; do sleep 0.02; done
wait
"""


def test_agrees_with_slurm_command_by_command(own_lab: SlurmLab) -> None:
    """The golden commands in their order, each on what the ones before have left; job 25 waits, as it did there."""
    lab = own_lab
    jobs = lab.submit_golden_queue()
    lab.ok(f"scontrol requeuehold {jobs[25]}")
    lab.wait_state(jobs[25], "PENDING")
    jobs[1] = lab.submit("--wrap true")
    lab.wait(jobs[1])
    played = cases("scancel")
    check_table("scancel", DIFFERS, played)
    wrong = []
    for one in played:
        try:
            check(lab, replace(one, command=one.command.replace("alice", user())), DIFFERS, Places(jobs=jobs))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert lab.ok("squeue -h -t PD -o %i") == ""


def running(lab: SlurmLab, *words: str) -> str:
    """A job that runs until it is cancelled."""
    job = lab.submit(" ".join(["-c 1", *words, "--wrap 'sleep 300'"]))
    lab.wait_state(job, "RUNNING")
    return job


@pytest.fixture
def signalled(lab: SlurmLab) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """A running job whose shell and step write down each USR1; what they wrote."""
    (lab.work / "signals.sh").write_text(SIGNALS)
    path = lab.work / f"signals-{len(list(lab.work.glob('signals-*')))}"
    path.touch()
    job = lab.submit(f"-c 1 signals.sh {path}")
    wait_until(lambda: Path(f"{path}.ready").exists(), what="the step to be ready")
    yield job, lambda: path.read_text().splitlines()
    Path(f"{path}.stop").touch()
    lab.ok(f"scancel {job}")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("scancel --signal=USR1 {}", ["step got USR1"]),
        ("scancel {} --signal SIGUSR1", ["step got USR1"]),
        ("scancel -s 10 {}", ["step got USR1"]),
        ("scancel -b -s usr1 {}", ["shell got USR1"]),
        ("scancel -f -s USR1 {}", ["shell got USR1", "step got USR1"]),
        ("scancel -s USR1 {}.0", ["step got USR1"]),
        ("scancel -s USR1 {}.batch", ["shell got USR1"]),
    ],
)
def test_a_signal_goes_to_the_steps_unless_others_are_named(
    lab: SlurmLab, signalled: tuple[str, Callable[[], list[str]]], line: str, told: list[str]
) -> None:
    job, heard = signalled
    done = lab.type(line.format(job))
    assert (done.code, done.out, done.err) == (0, "", "")
    wait_until(lambda: len(heard()) >= len(told), what="the signal to arrive")
    # To both, as a mark: whoever was told wrongly would have written it before.
    lab.ok(f"scancel -f -s USR1 {job}")
    wait_until(lambda: len(heard()) >= len(told) + 2, what="the second signal to arrive")
    assert sorted(heard()) == sorted([*told, "shell got USR1", "step got USR1"])
    assert lab.state(job) == "RUNNING"


def test_a_signal_to_a_job_that_has_ended_is_an_error_and_ending_it_is_none(lab: SlurmLab) -> None:
    job = lab.submit("--wrap true")
    lab.wait(job)
    for line in (f"scancel {job}", f"scancel -s KILL {job}", f"scancel {job} {job}"):
        done = lab.type(line)
        assert (done.code, done.out, done.err) == (0, "", ""), line
    done = lab.type(f"scancel -s USR1 {job}")
    assert (done.code, done.err) == (1, f"scancel: error: Kill job error on job id {job}: Invalid job id specified\n")
    assert lab.type(f"scancel -Q -s USR1 {job}").err == ""


@pytest.mark.parametrize("options", ["", "-s KILL", "--signal=9", "-f", "-f -s KILL"])
def test_kill_ends_a_job_as_cancelled(lab: SlurmLab, options: str) -> None:
    job = running(lab)
    assert lab.ok(f"scancel {options} {job}") == ""
    assert lab.wait_state(job, "CANCELLED", "FAILED", "COMPLETED") == "CANCELLED"


def test_kill_of_the_batch_shell_is_no_cancellation(lab: SlurmLab) -> None:
    job = running(lab)
    lab.ok(f"scancel -b {job}")
    assert lab.wait_state(job, "CANCELLED", "FAILED", "COMPLETED") == "FAILED"


def test_parts_of_an_array_end_and_the_rest_stays(lab: SlurmLab) -> None:
    job = lab.submit("--hold -a 0-9 --wrap true")
    lab.ok(f"scancel {job}_1 {job}_[3-4,6]")
    assert lab.ok(f"squeue -h -j {job} -o %i") == f"{job}_[0,2,5,7-9]\n"
    lab.ok(f"scancel {job}_0,{job}_[2,5]")
    assert lab.ok(f"squeue -h -j {job} -o %K") == "7-9\n"
    assert lab.type(f"scancel {job}_99").code == 0
    lab.ok(f"scancel {job}_*")
    assert lab.ok(f"squeue -h -j {job} -o %i") == ""


def test_a_state_filter_spares_the_running_tasks_of_an_array(lab: SlurmLab) -> None:
    job = lab.submit("-c 1 -a 1-3%1 -J partly --wrap 'sleep 300'")
    lab.wait_state(f"{job}_1", "RUNNING")
    lab.ok("scancel -n partly -t PENDING")
    assert lab.ok(f"squeue -h -j {job} -o '%i %t'") == f"{job}_1 R\n"
    lab.ok("scancel -n partly")
    lab.wait(f"{job}_1")
    assert lab.state(f"{job}_2") == "CANCELLED"


@pytest.mark.parametrize(
    ("options", "is_chosen"),
    [
        ("-n chosen", True),
        ("--name=other", False),
        ("-p debug", True),
        ("-p main -n chosen", False),
        ("-A physics -n chosen", True),
        ("-A chem -n chosen", False),
        ("-q normal -n chosen", True),
        ("-q urgent -n chosen", False),
        ("-t PENDING -n chosen", True),
        ("-t pd -n chosen", True),
        ("-t R -n chosen", False),
        ("-u {user} -n chosen", True),
        ("--me -n chosen", True),
        ("-R class -n chosen", False),
        ("-w node1 -n chosen", False),
        ("--wckey=key -n chosen", True),
        ("--wckey=none -n chosen", False),
        ("-n chosen {job}", True),
        ("-n other {job}", False),
    ],
)
def test_filters_choose_and_no_match_is_no_error(lab: SlurmLab, options: str, is_chosen: bool) -> None:
    job = lab.submit("--hold -J chosen -p debug --wckey=key --wrap true")
    done = lab.type(f"scancel {options.format(user=user(), job=job)}")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert lab.state(job) == ("CANCELLED" if is_chosen else "PENDING")
    lab.ok(f"scancel {job}")


@pytest.mark.parametrize(("variable", "value"), [("SCANCEL_NAME", "mine"), ("SCANCEL_PARTITION", "debug")])
def test_variables_are_filters(lab: SlurmLab, variable: str, value: str) -> None:
    job = lab.submit("--hold -J mine -p debug --wrap true")
    lab.ok("scancel", **{variable: value})
    assert lab.state(job) == "CANCELLED"


def test_interactive_asks_for_each_job(lab: SlurmLab) -> None:
    job = lab.submit("--hold -J asked --wrap true")
    for answer, state in ((b"", "PENDING"), (b"n\n", "PENDING"), (b"what\ny\n", "CANCELLED")):
        done = lab.type(f"scancel -i {job}", stdin=answer)
        assert (done.code, lab.state(job)) == (0, state)
        assert done.out.startswith(f"Cancel job_id={job} name=asked partition=main [y/n]? ")


def test_verbose_says_what_is_done_on_stderr(lab: SlurmLab) -> None:
    job = running(lab)
    said = {
        f"scancel -v -s USR1 {job}": f"scancel: Signal 10 to job {job}\n",
        f"scancel -v -f -s USR2 {job}": f"scancel: Signal 12 to full job {job}\n",
        f"scancel -v {job}": f"scancel: Terminating job {job}\n",
    }
    for line, err in list(said.items())[:1] + list(said.items())[2:]:
        done = lab.type(line)
        assert (done.code, done.out, done.err) == (0, "", err)


def test_one_cluster_is_known(lab: SlurmLab) -> None:
    job = lab.submit("--hold --wrap true")
    assert lab.type(f"scancel -M elsewhere {job}").code == 1
    assert lab.state(job) == "PENDING"
    assert lab.type(f"scancel --clusters=all {job}").code == 0
    assert lab.state(job) == "CANCELLED"


def test_many_ids_with_unknown_ones_among_them_end_the_others(lab: SlurmLab) -> None:
    jobs = [lab.submit("--hold --wrap true") for _ in range(3)]
    lab.ok(f"scancel 999999 {jobs[0]} 999998_3 {jobs[1]},{jobs[2]}")
    assert [lab.state(job) for job in jobs] == ["CANCELLED"] * 3


class TestAsClientsCallIt:
    """The command lines of client libraries, and what they make of the result."""

    def test_submitit_signals_after_the_id(self, lab: SlurmLab) -> None:
        job = running(lab)
        for line in (f"scancel {job} --signal SIGTERM", f"scancel {job} --signal USR2", f"scancel {job}"):
            assert lab.type(line).code == 0

    def test_simple_slurm_signals_and_cancels_all(self, lab: SlurmLab) -> None:
        job = running(lab)
        for line in (f"scancel --signal=TERM {job}", f"scancel --signal=KILL {job}", "scancel --me"):
            assert lab.type(line).code == 0
        lab.wait_state(job, "CANCELLED")
        assert lab.type(f"scancel --signal=KILL {job}").code == 0

    def test_parsl_and_snakemake_cancel_several(self, lab: SlurmLab) -> None:
        jobs = [lab.submit("--hold --wrap true") for _ in range(2)]
        lab.ok(f"scancel --clusters=lab {jobs[0]}")
        lab.ok(f"scancel {jobs[0]} {jobs[1]} --clusters=all")
        assert [lab.state(job) for job in jobs] == ["CANCELLED"] * 2

    def test_psij_wants_success_also_for_an_ended_job(self, lab: SlurmLab) -> None:
        job = lab.submit("--wrap true")
        lab.wait(job)
        assert lab.type(f"scancel -Q {job}").code == 0

    def test_qtoolkit_reads_stderr(self, lab: SlurmLab) -> None:
        job = lab.submit("--hold --wrap true")
        assert lab.type(f"scancel -v {job}").err.startswith(f"scancel: Terminating job {job}")

    def test_ipyparallel_sends_a_number_or_a_name(self, lab: SlurmLab) -> None:
        job = running(lab)
        for line in (f"scancel -s 2 {job}", f"scancel -s INT {job}", f"scancel {job}"):
            assert lab.type(line).code == 0

    def test_skypilot_names_jobs_and_steps(self, lab: SlurmLab) -> None:
        job = running(lab, "-J sky")
        assert lab.type(f"scancel --signal INT {job}.batch").code == 0
        assert lab.type("scancel --name sky").code == 0
        lab.wait_state(job, "CANCELLED", "FAILED")


@given(st.text("0123456789_[],-.:*%abx ", max_size=14))
def test_a_text_names_a_job_or_is_refused_in_one_line(text: str) -> None:
    with contextlib.suppress(CommandError):
        assert CancelTarget(text).job.partition("_")[0].isdigit()
        return
    with pytest.raises(CommandError, match=r"\Ascancel: error: Invalid job id [^\n]*\Z"):
        CancelTarget(text)


def test_help_and_usage_name_the_options(lab: SlurmLab) -> None:
    text = lab.ok("scancel --help")
    assert all(option.names[0] in text for option in COMMAND.options)
    assert lab.ok("scancel --usage").startswith("Usage: scancel")


class DaemonOfTwoUsers:
    """Answers like the daemon where job 2 is another user's: a request that names it is refused as a whole."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def __enter__(self) -> DaemonOfTwoUsers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, method: str, path: str, body: dict[str, list[str]]) -> dict[str, list[str]]:
        assert (method, path) == ("POST", "/v1/jobs/cancel")
        if "2" in body["ids"]:
            raise Forbidden("only its owner may cancel job 2")
        self.ended += body["ids"]
        return {"cancelled": body["ids"], "signalled": [], "ended": [], "missing": []}


@pytest.mark.parametrize("words", [["2"], ["1", "2", "3"], ["-Q", "1", "2"]])
def test_another_users_job_is_refused_and_the_others_end(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = DaemonOfTwoUsers()
    monkeypatch.setattr(scancel, "connect", lambda: daemon)
    assert run(COMMAND, scancel.body, words) == 210
    golden = case("scancel", "200").err.replace("26", "2")
    assert capsys.readouterr() == ("", "" if "-Q" in words else golden)
    assert daemon.ended == [word for word in words if word in ("1", "3")]
