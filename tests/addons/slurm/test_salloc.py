"""salloc: a job around a command or shell in the foreground."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from golden_cases import Places, cases, check
from slurm_lab import SlurmLab
from support import wait_until

PLACES = Places(mask=[r"allocation (\d+)", r"(?m)^in (\d+)$"])
GRANTED = re.compile(r"salloc: Granted job allocation (\d+)\n")


def started(
    lab: SlurmLab, line: str, *, stdin: int = subprocess.DEVNULL, terminal: int = -1
) -> subprocess.Popen[bytes]:
    """A command that goes on; with a terminal as its input and output, its messages are there, too."""
    piped = terminal < 0
    return subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=lab.work,
        env={**lab.env, "TERM": "dumb"},
        stdin=stdin if piped else terminal,
        stdout=subprocess.PIPE if piped else terminal,
        stderr=subprocess.PIPE if piped else terminal,
        start_new_session=True,
        # Its controlling one, so that Ctrl-C becomes a signal.
        preexec_fn=None if piped else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )


def shown_at_terminal(
    lab: SlurmLab, line: str, keys: bytes = b"", answers: Mapping[bytes, bytes] = MappingProxyType({})
) -> tuple[int, str]:
    """What a command shows at a terminal, and its exit code.

    Args: keys: what is typed at once. answers: what is typed each time that something is shown.
    """
    master, slave = pty.openpty()
    process = started(lab, line, terminal=slave)
    os.close(slave)
    os.write(master, keys)
    shown, answered = b"", dict.fromkeys(answers, 0)
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:
            break
        for prompt in answers:
            if shown.count(prompt) > answered[prompt]:
                answered[prompt] += 1
                os.write(master, answers[prompt])
    os.close(master)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def job_named(lab: SlurmLab, name: str) -> str:
    """The id of a new job of this name."""
    found = ""

    def is_there() -> bool:
        nonlocal found
        found = lab.ok(f"gq -a --quiet -n {name}").strip()
        return bool(found)

    wait_until(is_there, what=f"a job {name}")
    return found


@pytest.mark.parametrize("golden", cases("salloc"), ids=str)
def test_answers_as_slurm_does(golden: object, lab: SlurmLab) -> None:
    check(lab, golden, {}, PLACES, may_explain=True)  # type: ignore[arg-type]


def test_the_command_gets_input_output_and_exit_code(lab: SlurmLab) -> None:
    done = lab.type("echo given | salloc -J piped bash -c 'cat; echo bad >&2; exit 3'")
    assert (done.code, done.out) == (3, "given\n")
    assert re.sub(r"\d+", "N", done.err) == (
        "salloc: Granted job allocation N\nbad\nsalloc: Relinquishing job allocation N\n"
    )
    job = lab.job(job_named(lab, "piped"))
    assert (job["state"], job["exit_code"]) == ("FAILED", 3)


def test_quiet_prints_only_what_the_command_prints(lab: SlurmLab) -> None:
    done = lab.type("salloc -Q --hint=nomultithread echo hi")
    assert (done.code, done.out, done.err) == (0, "hi\n", "")


def test_a_shell_runs_at_the_terminal(lab: SlurmLab) -> None:
    code, shown = shown_at_terminal(
        lab, "env SHELL=/bin/sh salloc -c 2", b"test -t 0 && echo at-$((1+1)) $SLURM_JOB_CPUS_PER_NODE\nexit 5\n"
    )
    assert code == 5
    assert GRANTED.search(shown)
    assert "at-2 2\n" in shown
    assert re.search(r"salloc: Relinquishing job allocation \d+\n$", shown)


def test_options_and_variables_are_those_of_a_job(lab: SlurmLab) -> None:
    done = lab.type("SALLOC_PARTITION=debug SALLOC_TIMELIMIT=3 salloc -J opted -t 4 -D / pwd")
    assert done.out == "/\n"
    job = lab.job(job_named(lab, "opted"))
    assert (job["queue"], job["time_limit_s"]) == ("debug", 240)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("salloc --nosuch true", 255, "salloc: unrecognized option '--nosuch'\n"),
        ("salloc -t abc true", 255, "salloc: error: Invalid --time specification\n"),
        ("salloc -Ix true", 255, "salloc: error: Invalid --immediate specification\n"),
        ("salloc -p nosuch true", 1, "salloc: error: invalid partition specified: nosuch\n"),
        ("salloc --gres=gpu:9 true", 1, "salloc: error: Job submit/allocate failed: Requested node configuration"),
        ("salloc --reboot true", 255, "salloc: error: --reboot is not supported: "),
    ],
)
def test_mistakes_are_refused(lab: SlurmLab, line: str, code: int, message: str) -> None:
    done = lab.type(line)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(message)


def test_a_busy_machine_is_waited_for_unless_it_must_be_immediate(own_lab: SlurmLab) -> None:
    blocker = own_lab.submit("-c 8 --wrap 'sleep 100'")
    own_lab.wait_state(blocker, "RUNNING")
    done = own_lab.type("salloc -I1 -J hasty -c 8 true")
    assert (done.code, done.err) == (1, "salloc: error: Job submit/allocate failed: Requested nodes are busy\n")
    own_lab.wait_state(job_named(own_lab, "hasty"), "CANCELLED")
    waiting = started(own_lab, "salloc -c 8 echo started")
    assert waiting.stderr is not None
    seen = [waiting.stderr.readline().decode() for _ in range(2)]
    own_lab.ok(f"gcancel {blocker}")
    out, err = waiting.communicate(timeout=60)
    shown = re.sub(r"\d+", "N", "".join(seen) + err.decode())
    assert (waiting.returncode, out) == (0, b"started\n")
    assert shown == (
        "salloc: Pending job allocation N\nsalloc: job N queued and waiting for resources\n"
        "salloc: job N has been allocated resources\nsalloc: Granted job allocation N\n"
        "salloc: Relinquishing job allocation N\n"
    )


def test_a_signal_while_it_waits_revokes_the_allocation(own_lab: SlurmLab) -> None:
    blocker = own_lab.submit("-c 8 --wrap 'sleep 100'")
    own_lab.wait_state(blocker, "RUNNING")
    waiting = started(own_lab, "salloc -J signalled -c 8 true")
    assert waiting.stderr is not None
    waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert err.decode().endswith("has been revoked\n")
    own_lab.wait_state(job_named(own_lab, "signalled"), "CANCELLED")


def test_a_cancelled_job_ends_its_command(lab: SlurmLab) -> None:
    running = started(lab, "salloc -J victim sleep 100")
    assert running.stderr is not None
    granted = GRANTED.match(running.stderr.readline().decode())
    assert granted
    lab.wait_state(granted[1], "RUNNING")
    lab.ok(f"gcancel {granted[1]}")
    _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert f"salloc: Force Terminated JobId={granted[1]}\n" in err.decode()


def test_a_killed_salloc_ends_its_job(lab: SlurmLab) -> None:
    running = started(lab, "salloc -J orphan sleep 100")
    assert running.stderr is not None
    granted = GRANTED.match(running.stderr.readline().decode())
    assert granted
    lab.wait_state(granted[1], "RUNNING")
    running.kill()
    running.communicate(timeout=60)
    lab.wait_state(granted[1], "CANCELLED", "FAILED")


def test_without_a_shell_the_allocation_stays(lab: SlurmLab) -> None:
    done = lab.type("salloc --no-shell -c 2 -J held")
    granted = GRANTED.fullmatch(done.err)
    assert granted
    assert (done.code, done.out, lab.state(granted[1])) == (0, "", "RUNNING")
    shown = [
        lab.ok(f"squeue -h -s -o %i -j {granted[1]}"),
        lab.ok(f"sacct -n -X -P -o JobID -j {granted[1]}"),
        lab.ok(f"sacct -n -P -o JobID -j {granted[1]}"),
        lab.ok(f"squeue -h -O BatchFlag -j {granted[1]}").strip(),
    ]
    assert shown == ["", f"{granted[1]}\n", f"{granted[1]}\n", "0"]
    assert f"{granted[1]}.batch" not in lab.type(f"sstat -a -n -P -o JobID -j {granted[1]}").out
    assert lab.type(f"scontrol show step {granted[1]}").out == f"Job step {granted[1]} not found\n"
    assert "BatchFlag=0" in lab.ok(f"scontrol show job {granted[1]}")
    lab.ok(f"gcancel {granted[1]}")
    lab.wait_state(granted[1], "CANCELLED")
    assert not (lab.work / f"slurm-{granted[1]}.out").exists()
