"""srun outside of a job: a job of its own in the foreground."""

from __future__ import annotations

import os
import re
import signal
from itertools import groupby

import pytest
from golden_cases import GoldenCase, Places, cases, check, check_table
from slurm_lab import SlurmLab
from test_salloc import job_named, shown_at_terminal, started

# The golden machine's slurmstepd has its node in its name, others have not.
PLACES = Places(
    mask=[
        r"Id=(\d+)",
        r"StepId=(\d+)\.",
        r"STEP (\d+)\.",
        r"[Jj]ob (\d+)",
        r"allocation (\d+)",
        r"on nodes (\S+)",
        r"slurmstepd[\w-]*",
    ]
)
DIFFERS = {"222-srun-too-many": "a real one says twice that the allocation has been revoked"}
ELSEWHERE = {"006-srun-version", "215-srun-n2-label", "224-srun-immediate"}
COMPARED = [one for one in cases("srun") if one.name not in ELSEWHERE]


@pytest.mark.parametrize("golden", COMPARED, ids=str)
def test_answers_as_slurm_does(golden: GoldenCase, lab: SlurmLab) -> None:
    check(lab, golden, DIFFERS, PLACES, may_explain=True)


def test_every_difference_has_a_reason() -> None:
    check_table("srun", DIFFERS, COMPARED)


def test_labels_say_which_task_wrote_a_line(lab: SlurmLab) -> None:
    (golden,) = cases("srun", 215)
    done = lab.type(golden.command)
    # Tasks write in any order.
    assert (done.code, sorted(done.out.splitlines()), done.err) == (0, golden.out.splitlines(), "")


def test_input_and_output_are_passed_on(lab: SlurmLab) -> None:
    done = lab.type("printf 'echo out; echo err >&2; exit 4' | srun -J fed sh -s")
    assert (done.code, done.out) == (4, "out\n")
    assert done.err.startswith("err\n")
    assert lab.state(job_named(lab, "fed")) == "FAILED"


def test_what_was_seen_is_left_in_no_file(lab: SlurmLab) -> None:
    (lab.work / "tidy").mkdir()
    lab.ok("cd tidy && srun echo seen && salloc -Q echo seen")
    assert os.listdir(lab.work / "tidy") == []
    lab.ok("cd tidy && srun -o own-%j.txt echo kept")
    (own,) = (lab.work / "tidy").iterdir()
    assert own.read_text() == "kept\n"


def test_much_output_arrives_whole(lab: SlurmLab) -> None:
    done = lab.type("head -c 3000000 /dev/zero | srun cat | wc -c")
    assert done.out.strip() == "3000000"


def test_the_job_has_sruns_options_and_the_name_of_the_command(lab: SlurmLab) -> None:
    # Jobs named sleep are those of other tests, too.
    lab.ok("ln -s $(command -v sleep) long-sleep")
    running = started(lab, "srun -p debug -t 5 -c 2 --gres=gpu:1 --comment=hello ./long-sleep 101")
    job = lab.job(job_named(lab, "long-sleep"))
    assert (job["queue"], job["time_limit_s"]) == ("debug", 300)
    assert (job["request"]["cpus"], job["request"]["gpus"]) == (2, 1)
    assert job["spec"]["comment"] == "hello"
    running.terminate()
    running.communicate(timeout=60)
    lab.wait(job["id"])


def test_a_command_may_look_like_an_option(lab: SlurmLab) -> None:
    done = lab.type("srun -Q -n1 -- -nosuch")
    assert (done.code, done.err.splitlines()[0]) == (
        2,
        "slurmstepd: error: execve(): -nosuch: No such file or directory",
    )


def test_notes_are_printed_once(lab: SlurmLab) -> None:
    done = lab.type("srun --hint=nomultithread true")
    assert done.err.count("--hint has no effect") == 1


def test_variables_are_options(lab: SlurmLab) -> None:
    done = lab.type("srun -J by-variables sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS' | sort", SLURM_NTASKS="2")
    assert done.out == "0 of 2\n1 of 2\n"
    assert lab.job(job_named(lab, "by-variables"))["queue"] == "main"


def test_signals_reach_the_tasks(lab: SlurmLab) -> None:
    running = started(
        lab, "srun -J hears sh -c 'trap \"echo heard; exit 9\" USR1; echo ready; while :; do sleep 0.05; done'"
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"
    running.send_signal(signal.SIGUSR1)
    out, _ = running.communicate(timeout=60)
    assert (running.returncode, out) == (9, b"heard\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_the_end_of_srun_is_that_of_the_job(lab: SlurmLab, number: signal.Signals) -> None:
    name = f"dies-of-{number.name}"
    running = started(lab, f"srun -J {name} sleep 102")
    job = job_named(lab, name)
    lab.wait_state(job, "RUNNING")
    running.send_signal(number)
    running.communicate(timeout=60)
    lab.wait(job)


def test_a_terminal_is_passed_on_with_pty(lab: SlurmLab) -> None:
    code, shown = shown_at_terminal(lab, "srun --pty sh -c 'test -t 0 && test -t 1 && echo at-a-$((40+2)); exit 6'")
    assert (code, "at-a-42\n" in shown) == (6, True)


def test_only_a_second_interrupt_ends_the_tasks(lab: SlurmLab) -> None:
    # On a loaded machine the second may come too late, and asks anew.
    answers = {b"ready\r\n": b"\x03", b"to abort)\r\n": b"\x03"}
    code, shown = shown_at_terminal(lab, "srun sh -c 'echo ready; sleep 100'", answers=answers)
    assert code == 130
    lines = re.sub(r"\d+", "N", shown.replace("^C", "")).splitlines()
    assert [line for line, _ in groupby(lines)][:3] == [
        "ready",
        "srun: interrupt (one more within N sec to abort)",
        "srun: sending Ctrl-C to StepId=N.N",
    ]


@pytest.mark.parametrize("option", ["-X", "--quit-on-interrupt"])
def test_one_interrupt_is_enough_where_it_is_asked_for(lab: SlurmLab, option: str) -> None:
    code, shown = shown_at_terminal(
        lab, f"srun {option} sh -c 'echo ready; sleep 100'", answers={b"ready\r\n": b"\x03"}
    )
    assert (code, "one more" in shown) == (130, False)


def test_a_busy_machine_is_waited_for_unless_it_must_be_immediate(own_lab: SlurmLab) -> None:
    blocker = own_lab.submit("-c 8 --wrap 'sleep 100'")
    own_lab.wait_state(blocker, "RUNNING")
    (golden,) = cases("srun", 224)
    check(own_lab, golden, {}, PLACES)
    waiting = started(own_lab, "srun -c 8 echo started")
    assert waiting.stderr is not None
    first = waiting.stderr.readline().decode()
    own_lab.ok(f"gcancel {blocker}")
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, b"started\n")
    assert re.sub(r"\d+", "N", first + err.decode()) == (
        "srun: job N queued and waiting for resources\nsrun: job N has been allocated resources\n"
    )


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("srun -p nosuch true", 1, "srun: error: invalid partition specified: nosuch\n"),
        ("srun --gres=gpu:9 true", 1, "srun: error: Unable to allocate resources: Requested node configuration"),
        ("srun -t abc true", 255, "srun: error: Invalid --time specification\n"),
        ("srun --uid=1 true", 255, "srun: error: --uid "),
    ],
)
def test_mistakes_are_refused(lab: SlurmLab, line: str, code: int, message: str) -> None:
    done = lab.type(line)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(message)
