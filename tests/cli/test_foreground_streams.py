"""grun without a terminal: streams as they are, pressure in both directions, codes, signals; tasks inside a job."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import Shell
from support import wait_until

MIB = 1 << 20


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start grun and leave it running; nothing of it stays behind."""
    begun: list[subprocess.Popen[bytes]] = []

    def started(sh: Shell, *words: str, **streams: Any) -> subprocess.Popen[bytes]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        begun.append(subprocess.Popen(sh.argv("grun", *words), env=sh.env, cwd=sh.work, **streams))
        return begun[-1]

    yield started
    for process in begun:
        process.kill()
        with process:
            pass


def in_shell(sh: Shell, line: str, *argv: str) -> subprocess.CompletedProcess[bytes]:
    """`line` with the command in place of CMD."""
    full = line.replace("CMD", shlex.join(argv))
    return subprocess.run(["/bin/bash", "-c", full], env=sh.env, cwd=sh.work, capture_output=True, timeout=60)


def job(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def named(sh: Shell, name: str) -> dict[str, Any]:
    """The newest job of this name."""
    return job(sh, sh.ok("gq", "-a", "--quiet", "-n", name).split()[-1])


def until_ended(sh: Shell, name: str) -> dict[str, Any]:
    sh.type("gwait", "--timeout", "60s", named(sh, name)["id"])
    return named(sh, name)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """50 MB of noise and its sum."""
    path = tmp_path_factory.mktemp("big") / "noise"
    data = os.urandom(50 * MIB)
    path.write_bytes(data)
    return path, hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_of_the_command_is_returned(sh: Shell, code: int) -> None:
    assert sh.type("grun", "sh", "-c", f"exit {code}").code == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_command_returns_128_plus_the_signal(sh: Shell, number: int) -> None:
    assert sh.type("grun", "sh", "-c", f"kill -{number} $$").code == 128 + number


def test_the_three_streams_stay_separate(sh: Shell) -> None:
    done = sh.type("grun", "sh", "-c", "cat; echo to-err >&2", stdin=b"to-out\n")
    assert (done.code, done.out, done.err) == (0, "to-out\n", "to-err\n")


def test_a_job_without_a_terminal_sees_its_own_gpus(sh: Shell) -> None:
    done = sh.type("grun", "-g", "1", "sh", "-c", "tty; echo [$CUDA_VISIBLE_DEVICES]")
    assert done.out.startswith("not a tty\n[")
    assert done.out.strip()[-2].isdigit()


@pytest.mark.parametrize("line", ["CMD < {}", "cat {} | CMD", "CMD < {} | cat"])
def test_50_mb_pass_through_intact(sh: Shell, big: tuple[Path, str], line: str) -> None:
    path, md5 = big
    done = in_shell(sh, f"set -o pipefail; {line.format(path)} | md5sum", *sh.argv("grun", "-o", "/dev/null", "cat"))
    assert (done.returncode, done.stdout.split()[0].decode(), done.stderr) == (0, md5, b"")


def test_both_outputs_pass_through_intact_at_once(sh: Shell, start: Start, big: tuple[Path, str]) -> None:
    path, md5 = big
    process = start(sh, "-o", "/dev/null", "sh", "-c", f"cat {path} & cat {path} >&2; wait")
    out, err = process.communicate(timeout=60)
    for data in (out, err):
        assert hashlib.md5(data, usedforsecurity=False).hexdigest() == md5


def test_a_slow_reader_blocks_the_job_and_loses_nothing(sh: Shell, start: Start, big: tuple[Path, str]) -> None:
    path, md5 = big
    process = start(sh, "-J", "held-up", "sh", "-c", f"cat {path}; echo said-all >&2")
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    log = Path(named(sh, "held-up")["stdout_path"])
    sizes = [-1]

    def stands() -> bool:
        sizes.append(log.stat().st_size)
        time.sleep(0.2)
        return sizes[-1] == sizes[-2] > 0

    wait_until(stands, what="the job to be held up")
    assert sizes[-1] < 2 * MIB
    out, err = process.communicate(timeout=60)
    assert hashlib.md5(first + out, usedforsecurity=False).hexdigest() == md5
    assert (process.returncode, err) == (0, b"said-all\n")


def test_stderr_is_delivered_while_stdout_is_not_read(sh: Shell, start: Start) -> None:
    script = "head -c 3000000 /dev/zero & echo from-err >&2; wait"
    process = start(sh, "sh", "-c", script)
    assert process.stderr is not None
    assert process.stderr.readline() == b"from-err\n"
    out, _ = process.communicate(timeout=60)
    assert len(out) == 3_000_000


def test_the_gpu_is_freed_despite_a_slow_reader(sh: Shell, start: Start) -> None:
    process = start(sh, "-J", "slow-reader", "-g", "1", "head", "-c", "300000", "/dev/zero")
    wait_until(lambda: sh.ok("gq", "-a", "--quiet", "-n", "slow-reader"), what="the job")
    assert until_ended(sh, "slow-reader")["state"] == "COMPLETED"
    assert process.poll() is None
    out, _ = process.communicate(timeout=60)
    assert (len(out), process.returncode) == (300_000, 0)


def test_end_of_input_is_delivered_and_output_continues(sh: Shell) -> None:
    done = sh.type("grun", "sh", "-c", "cat >/dev/null; sleep 0.3; echo after-the-end", stdin=b"x" * 100_000)
    assert (done.code, done.out) == (0, "after-the-end\n")


def test_writing_to_a_command_that_does_not_read_fails(sh: Shell) -> None:
    done = in_shell(sh, "yes | CMD; echo ${PIPESTATUS[*]}", *sh.argv("grun", "sh", "-c", "exec <&-; sleep 1; echo x"))
    assert done.stdout == b"x\n141 0\n"


def test_closing_the_output_ends_the_job(sh: Shell) -> None:
    done = in_shell(sh, "CMD | head -2; echo ${PIPESTATUS[*]}", *sh.argv("grun", "-J", "unwanted", "yes"))
    assert done.stdout == b"y\ny\n141 0\n"
    assert until_ended(sh, "unwanted")["reason"] == "ClientLost"


def test_a_full_disk_behind_the_output_is_reported(sh: Shell) -> None:
    done = in_shell(sh, "CMD > /dev/full", *sh.argv("grun", "echo", "hello"))
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr


def test_the_output_is_also_written_to_the_log_files(sh: Shell) -> None:
    done = sh.type("grun", "-J", "logged", "-e", "err.txt", "sh", "-c", "echo out; echo err >&2")
    assert (done.out, done.err) == ("out\n", "err\n")
    found = named(sh, "logged")
    assert Path(found["stdout_path"]).read_text() == "out\n"
    assert Path(found["stderr_path"]).read_text() == "err\n"
    assert sh.ok("glogs", found["id"]) == "out\n"


def test_ctrl_c_reaches_the_job_and_its_exit_code_is_returned(sh: Shell, start: Start) -> None:
    script = "import signal, sys; signal.signal(2, lambda *_: sys.exit(44)); print('ready', flush=True); signal.pause()"
    process = start(sh, "python3", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 44


def test_the_third_ctrl_c_kills_a_job_that_ignores_it(sh: Shell, start: Start) -> None:
    process = start(sh, "-J", "ignores", "--grace", "1s", "sh", "-c", "trap '' INT; echo ready; sleep 600; sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert process.stderr is not None
    said = b""
    # Two of one kind that wait are one, so the second is sent until it has come.
    while b"once more terminates the job" not in said:
        process.send_signal(signal.SIGINT)
        if select.select([process.stderr], [], [], 1.0)[0]:
            said += os.read(process.stderr.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert until_ended(sh, "ignores")["reason"] == "ClientLost"


def test_term_ends_the_client_and_the_job(sh: Shell, start: Start) -> None:
    process = start(sh, "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143


def test_a_killed_client_ends_its_job_and_a_kept_job_continues(sh: Shell, start: Start) -> None:
    for name, options, lasts in (("taken", (), "sleep 600"), ("kept-pipes", ("--keep",), "sleep 1.5")):
        process = start(sh, *options, "-J", name, "sh", "-c", f"echo ready; {lasts}; echo done; exit 3")
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        process.wait()
    assert until_ended(sh, "taken")["reason"] == "ClientLost"
    found = until_ended(sh, "kept-pipes")
    assert (found["exit_code"], Path(found["stdout_path"]).read_text()) == (3, "ready\ndone\n")


def test_a_kept_job_without_a_terminal_can_be_reattached(sh: Shell, start: Start) -> None:
    process = start(sh, "--keep", "-J", "back", "sh", "-c", "echo ready; cat; exit 5", stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait()
    done = sh.type("grun", "--attach", named(sh, "back")["id"], stdin=b"late\n")
    assert (done.code, done.out) == (5, "late\n")


def test_a_killed_supervisor_yields_an_exit_code_and_a_sentence(sh: Shell, start: Start) -> None:
    process = start(sh, "sh", "-c", "echo $PPID; exec sleep 600")
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"NODE_FAIL" in err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ((), 2, "there is nothing to run"),
        (("--lease", "soon", "true"), 2, "--lease"),
        (("no-such-command-at-all",), 1, "it is not in the job's PATH"),
        (("--retries", "2", "true"), 2, "unknown option '--retries'"),
        (("-n", "2", "true"), 2, "2 tasks can be started only inside a job"),
        (("-g", "77", "true"), 1, "77"),
        (("--attach", "@", "extra"), 2, "--attach takes a job id and no other options"),
        (("-D", "/no/such/folder", "true"), 1, "cannot enter the working directory /no/such/folder"),
    ],
)
def test_a_command_that_cannot_run_is_reported_in_one_sentence(
    sh: Shell, words: tuple[str, ...], code: int, sentence: str
) -> None:
    done = sh.type("grun", *words)
    assert (done.code, done.out) == (code, "")
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert "hint: " in done.err


def test_background_and_ended_jobs_cannot_be_attached(sh: Shell) -> None:
    job_id = sh.submit("--", "sleep", "60")
    done = sh.type("grun", "--attach", job_id)
    assert (done.code, f"glogs -f {job_id}" in done.err) == (1, True)
    sh.ok("gcancel", job_id)
    sh.type("grun", "-J", "over", "true")
    assert sh.type("grun", "--attach", named(sh, "over")["id"]).code == 0


def test_inside_a_job_tasks_start_in_its_allocation_without_queueing(sh: Shell) -> None:
    inner = shlex.join(sh.argv("grun", "sh", "-c", 'echo "$GPUSCHED_JOB_ID [$CUDA_VISIBLE_DEVICES]"; exit 6'))
    done = sh.type(
        "grun", "-J", "outer", "-g", "2", "sh", "-c", f'echo "$GPUSCHED_JOB_ID [$CUDA_VISIBLE_DEVICES]"; {inner}'
    )
    first, second = done.out.splitlines()
    assert (done.code, first) == (6, second)
    assert sh.ok("gq", "-a", "--quiet").split()[-1] == named(sh, "outer")["id"]


def test_parallel_tasks_are_numbered_and_the_highest_exit_code_counts(sh: Shell) -> None:
    inner = shlex.join(
        sh.argv("grun", "-n", "4", "sh", "-c", "echo task-$SLURM_PROCID/$SLURM_NTASKS; exit $SLURM_PROCID")
    )
    done = sh.type("grun", "sh", "-c", inner)
    assert done.code == 3
    assert sorted(done.out.split()) == [f"task-{number}/4" for number in range(4)]


def test_tasks_inside_a_job_cannot_request_more_resources(sh: Shell) -> None:
    done = sh.type("grun", "sh", "-c", shlex.join(sh.argv("grun", "-g", "1", "true")))
    assert (done.code, "tasks share its resources" in done.err) == (2, True)


def test_a_forged_variable_does_not_join_a_foreign_job(sh: Shell) -> None:
    holder = sh.submit("--", "sleep", "60")
    done = sh.type("grun", "-J", "pretends", "sh", "-c", "echo $GPUSCHED_JOB_ID", GPUSCHED_JOB_ID=holder)
    assert done.code == 0
    assert done.out.strip() == named(sh, "pretends")["id"]
    assert "starting a new job" in done.err
    sh.ok("gcancel", holder)
