"""What a job meets when the local engine starts it, and how it is ended: real processes."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench import FOREVER, Does, LocalBench, open_run
from support import is_alive, wait_until

from gpusched.engine import local as local_module
from gpusched.engine.forkserver import RUNS_PER_SUPERVISOR
from gpusched.engine.launchers import ForkServer, ticket_facts
from gpusched.engine.linux import proctree
from gpusched.engine.spool import read_record
from gpusched.model.execution import LimitOrder, RunEnded, RunStarted, RunStopping, SignalOrder, StopOrder, Ticket
from gpusched.model.job import Notice
from gpusched.model.value import replace

SLEEPS = Does(lasts_s=FOREVER)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start jobs of another user")
NOT_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def shell(bench: LocalBench, text: str, run: str = "1.1", **changes: object) -> RunEnded:
    bench.start(run, argv=("sh", "-c", text), **changes)
    return bench.end_of(run)


# --- what the job sees -----------------------------------------------------------------------------------


def test_a_command_gets_arguments_environment_and_work_dir_unchanged(bench: LocalBench) -> None:
    strange = os.fsdecode(b"\xff\xfe b\nc")
    folder = bench.folder / "wörk dir"
    folder.mkdir()
    code = "import os,sys; print(ascii([sys.argv[1:], os.environ['STRANGE'], os.getcwd(), oct(os.umask(0))]))"
    env = {"PATH": os.environ["PATH"], "STRANGE": strange, "PYTHONUTF8": "1"}
    argv = (sys.executable, "-c", code, strange, "", "ü")
    bench.start("1.1", argv=argv, env=env, work_dir=str(folder), umask=0o027)
    assert bench.end_of("1.1").exit_code == 0
    expected = ascii([[strange, "", "ü"], strange, str(folder), "0o27"])
    assert (folder / "1.1.out").read_text().strip() == expected


def test_the_environment_is_that_of_the_ticket_plus_marks(bench: LocalBench) -> None:
    bench.start("1.1", argv=("env",), env={"PATH": "/usr/bin:/bin", "GPUSCHED_RUN": "77.7"})
    bench.end_of("1.1")
    names = {line.partition("=")[0] for line in bench.output("1.1").splitlines()}
    account = {"HOME", "USER", "LOGNAME", "SHELL"}
    assert names - account == {
        *("PATH", "GPUSCHED_RUN", "GPUSCHED_SPOOL", "GPUSCHED_CHECKPOINT_FILE", "GPUSCHED_PROGRESS")
    }
    assert "GPUSCHED_RUN=1.1\n" in bench.output("1.1")


def test_a_job_starts_with_default_signals_no_open_files_and_its_own_group(bench: LocalBench) -> None:
    text = "grep -E 'Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd | wc -l; readlink /proc/$$/fd/0"
    shell(bench, text + "; cut -d' ' -f5 /proc/$$/stat; echo $$")
    blocked, ignored, files, stdin, group, pid = bench.output("1.1").splitlines()
    # glibc's posix_spawn always ignores 32 and 33, which it keeps for its threads.
    assert [int(line.split()[1], 16) & ~(3 << 31) for line in (blocked, ignored)] == [0, 0]
    assert int(files) == 4, "standard three and the folder that ls reads"
    assert stdin == "/dev/null"
    assert group == pid


def test_a_second_run_of_the_same_supervisor_starts_the_same_way(bench: LocalBench) -> None:
    text = "grep -E 'Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd | wc -l; umask; pwd"
    (bench.folder / "other").mkdir()
    bench.start("1.1", argv=("sh", "-c", text), umask=0o077, work_dir=str(bench.folder / "other"))
    bench.end_of("1.1")
    first = bench.until("1.1", RunStarted)
    # It takes a moment to become idle; a run that comes too early gets a supervisor of its own.
    for job in range(2, 100):
        shell(bench, text, f"{job}.1")
        if bench.until(f"{job}.1", RunStarted).supervisor_pid == first.supervisor_pid:
            break
    else:
        pytest.fail("the supervisor was never used again")
    one = (bench.folder / "other" / "1.1.out").read_text().splitlines()
    two = bench.output(f"{job}.1").splitlines()
    assert one[:3] == two[:3]
    assert (one[3], two[3:]) == ("0077", ["0022", str(bench.folder)])


def test_a_script_is_copied_and_run_with_its_arguments(bench: LocalBench) -> None:
    bench.start("1.1", script=b'#!/bin/sh\necho "$0|$1|$2"\nexit 9\n', argv=("a b", "c"))
    assert bench.end_of("1.1").exit_code == 9
    assert bench.output("1.1") == f"{bench.spool}/1.1.script|a b|c\n"


def test_a_script_of_ten_megabytes_runs(bench: LocalBench) -> None:
    bench.start("1.1", script=b"#!/bin/sh\nexit 8\n" + b"#" * 10_000_000, argv=())
    assert bench.end_of("1.1").exit_code == 8


def test_usage_of_a_run_is_measured(bench: LocalBench) -> None:
    code = "x = bytearray(80 << 20)\nfor i in range(2_000_000): pass"
    bench.start("1.1", argv=(sys.executable, "-c", code))
    end = bench.end_of("1.1")
    assert end.cpu_s is not None
    assert end.peak_mem_mib is not None
    assert end.system_cpu_s is not None
    assert 0.02 < end.cpu_s < 20
    assert 0 <= end.system_cpu_s < end.cpu_s
    assert 80 < end.peak_mem_mib < 160


def may_be_negative() -> bool:
    """Whether this user may raise a priority: root of a container often may not."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) != 0, reason="these tests run at a niceness of their own")
def test_a_supervisor_is_oom_killed_before_its_job(bench: LocalBench) -> None:
    bench.start("1.1", argv=("sh", "-c", "nice; cat /proc/self/oom_score_adj; echo ready; exec sleep 600"))
    supervisor = bench.ready("1.1").supervisor_pid
    niceness, score = map(int, bench.output("1.1").split()[:2])
    assert niceness == 0
    if may_be_negative():
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, supervisor) == -10, what="the supervisor to be raised")
    assert int(Path(f"/proc/{supervisor}/oom_score_adj").read_text()) < score


# --- log files ---------------------------------------------------------------------------------------------


def test_stdout_and_stderr_go_to_their_files(bench: LocalBench) -> None:
    shell(bench, "echo out; echo err >&2", stderr_path="error.log")
    assert bench.output("1.1") == "out\n"
    assert (bench.folder / "error.log").read_text() == "err\n"


def test_both_streams_share_one_file_without_overwriting(bench: LocalBench) -> None:
    shell(bench, "echo a; echo b >&2; echo c", stderr_path=str(bench.folder / "1.1.out"))
    assert bench.output("1.1") == "a\nb\nc\n"


def test_a_log_is_truncated_or_appended_to(bench: LocalBench) -> None:
    for run, append in (("1.1", False), ("1.2", False), ("1.3", True)):
        shell(bench, f"echo {run}", run, stdout_path="log", append=append, umask=0o027)
    log = bench.folder / "log"
    assert log.read_text() == "1.2\n1.3\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o640


def test_log_folders_are_created(bench: LocalBench) -> None:
    shell(bench, "echo out; echo err >&2", stdout_path="logs/1/a.out", stderr_path="logs/e/a.err", umask=0o027)
    assert (bench.folder / "logs/1/a.out").read_text() == "out\n"
    assert (bench.folder / "logs/e/a.err").read_text() == "err\n"
    assert stat.S_IMODE((bench.folder / "logs/1").stat().st_mode) == 0o750


def test_a_log_folder_that_cannot_be_created_is_reported(bench: LocalBench) -> None:
    (bench.folder / "file").write_text("")
    (bench.folder / "dangling").symlink_to(bench.folder / "nowhere")
    end = shell(bench, "true", stdout_path="file/a/b.out")
    assert end.launch_error == f"cannot write the output to {bench.folder}/file/a/b.out: Not a directory"
    end = shell(bench, "true", "2.1", stdout_path="dangling/b.out")
    assert end.launch_error == f"cannot make {bench.folder}/dangling for the output: File exists"
    assert not (bench.folder / "nowhere").exists()


def test_a_job_reads_its_input_from_a_file_or_a_pipe(bench: LocalBench) -> None:
    (bench.folder / "in.txt").write_text("one\n")
    assert shell(bench, "cat; ls /proc/self/fd | wc -l", stdin_path=str(bench.folder / "in.txt")).exit_code == 0
    assert bench.output("1.1").split() == ["one", "4"]
    pipe = bench.folder / "pipe"
    os.mkfifo(pipe)
    # Opened before the job starts: without any writer a reader would find the end of its input.
    with open(os.open(pipe, os.O_RDWR), "w", encoding="utf-8") as writer:
        bench.start("2.1", argv=("head", "-n", "1"), stdin_path=str(pipe))
        bench.until("2.1", RunStarted)
        writer.write("two\n")
        writer.flush()
        assert bench.end_of("2.1").exit_code == 0
    assert bench.output("2.1") == "two\n"


def test_the_group_of_the_user_is_among_the_variables_of_slurm(bench: LocalBench) -> None:
    shell(bench, "echo $SLURM_JOB_GID", env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"})
    assert bench.output("1.1") == f"{os.getegid()}\n"


def test_dev_null_is_a_valid_log(bench: LocalBench) -> None:
    assert shell(bench, "echo x", stdout_path="/dev/null").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stdout_path": "link"}, "it is a symbolic link"),
        ({"stdout_path": "folder"}, "Is a directory"),
        ({"stdout_path": "pipe"}, "it is a pipe without a reader"),
        ({"stderr_path": "target/such"}, "error output"),
        ({"work_dir": "/no/such/place"}, "/no/such/place"),
        ({"stdin_path": "/no/such/input"}, "cannot read the input from /no/such/input: No such file or directory"),
        ({"argv": ("./text",)}, "neither a program nor a script with a #! line"),
        ({"argv": ("./lost",)}, "the interpreter in its #! line does not exist"),
        ({"argv": ("./plain",)}, "Permission denied"),
        ({"argv": ("plain",), "env": {"PATH": ".:/usr/bin"}}, "is not executable"),
        ({"argv": ("folder",), "env": {"PATH": ".:/usr/bin"}}, "is not in the job's PATH"),
        ({"argv": ()}, "the command is empty"),
        ({"argv": ("a\0b",)}, "null"),
        ({"argv": ("true",), "env": {"A=B": "c", "PATH": "/usr/bin:/bin"}}, "environment"),
        ({"script": b"echo no first line\n", "argv": ()}, "(first line 'echo no first line')"),
        ({"uid": 4_000_000_000, "user": "nobody-at-all"}, "4000000000"),
    ],
)
def test_a_failed_launch_says_why(bench: LocalBench, changes: dict[str, object], words: str) -> None:
    (bench.folder / "target").touch()
    (bench.folder / "link").symlink_to("target")
    (bench.folder / "folder").mkdir()
    os.mkfifo(bench.folder / "pipe")
    for name, text, mode in (("text", "hello", 0o755), ("lost", "#!/no/such", 0o755), ("plain", "#!/bin/sh", 0o644)):
        (bench.folder / name).write_text(text)
        (bench.folder / name).chmod(mode)
    bench.start("1.1", **{"argv": ("true",), **changes})
    end = bench.end_of("1.1")
    assert end.launch_error is not None
    assert words in end.launch_error
    assert (end.start_at, end.exit_code) == (None, None)
    assert shell(bench, "exit 3", "2.1").exit_code == 3, "the engine goes on"


# --- another user -------------------------------------------------------------------------------------------


@AS_ROOT
def test_a_job_of_another_user_runs_and_writes_as_that_user(tmp_path: Path) -> None:
    # pytest's own folder is closed to others.
    folder = Path(os.path.realpath(tmp_path))
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    home = folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    bench = LocalBench(folder)
    try:
        nobody = {"uid": 65534, "user": "nobody", "work_dir": str(home)}
        bench.start("1.1", script=b"#!/bin/sh\nid -u; id -G; umask; exit 4\n", argv=(), umask=0o077, **nobody)
        bench.start("2.1", argv=("no-such",), **nobody)
        (folder / "closed").mkdir(mode=0o700)
        bench.start("3.1", argv=("true",), **{**nobody, "work_dir": str(folder / "closed")})
        bench.start("4.1", argv=("true",), **nobody, stdout_path=str(folder / "closed" / "x"))
        assert bench.end_of("1.1").exit_code == 4
        log = home / "1.1.out"
        assert log.read_text().split() == ["65534", "65534", "0077"]
        assert (log.stat().st_uid, log.stat().st_gid, log.stat().st_mode & 0o777) == (65534, 65534, 0o600)
        assert "not in the job's PATH" in str(bench.end_of("2.1").launch_error)
        for run in ("3.1", "4.1"):
            assert "Permission denied" in str(bench.end_of(run).launch_error)
        bench.start("5.1", SLEEPS, **nobody)
        bench.until("5.1", RunStarted)
        bench.engine.order("5.1", StopOrder("cancel"))
        assert bench.end_of("5.1").stopped_by == "cancel"
        text = 'test -e "$GPUSCHED_CHECKPOINT_FILE" && read word && touch "$GPUSCHED_CHECKPOINT_FILE"; exec sleep 600'
        os.mkfifo(home / "go")
        (home / "go").chmod(0o666)
        bench.start("6.1", argv=("sh", "-c", f"exec < go; {text}"), **nobody)
        bench.until("6.1", RunStarted)
        assert bench.engine.checkpoints() == {}
        (home / "go").write_text("go\n")
        bench.wait(lambda: bench.engine.checkpoints().keys() == {"6.1"}, what="the mark of saved work")
    finally:
        bench.close()


@NOT_ROOT
def test_another_users_job_is_refused_without_root(bench: LocalBench) -> None:
    bench.start("1.1", uid=0, user="root")
    assert "not root" in str(bench.end_of("1.1").launch_error)


# --- the whole tree -------------------------------------------------------------------------------------------

ESCAPE = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if "stubborn" in sys.argv:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ.clear()
        open("escaped", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("escaped") or not open("escaped").read():
    time.sleep(0.01)
print("ready", flush=True)
if "stay" in sys.argv:
    time.sleep(600)
"""


@pytest.mark.parametrize("temper", ["mild", "stubborn"])
def test_a_process_outside_the_session_is_found(bench: LocalBench, temper: str) -> None:
    bench.start("1.1", argv=(sys.executable, "-c", ESCAPE, temper))
    end = bench.end_of("1.1")
    pid = int((bench.folder / "escaped").read_text())
    assert end.exit_code == 0
    assert [name for name in end.leftovers if name.endswith(f"({pid})")]
    assert not is_alive(pid)


def test_cancel_reaches_a_process_outside_the_session(bench: LocalBench) -> None:
    bench.start("1.1", argv=(sys.executable, "-c", ESCAPE, "stay"))
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGTERM, "cancel")
    assert not is_alive(int((bench.folder / "escaped").read_text()))


def test_a_stopped_process_is_ended_too(bench: LocalBench) -> None:
    bench.start("1.1", SLEEPS)
    started = bench.ready("1.1")
    os.kill(started.pid, signal.SIGSTOP)
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").signal == signal.SIGTERM


def test_processes_that_keep_forking_are_killed(bench: LocalBench) -> None:
    # A bounded one: each generation replaces itself for as long as the run is not ended.
    text = (
        "trap '' TERM; f() { [ -e done ] || { sleep 0.01; f & }; }; for i in 1 2 3 4 5 6; do f & done; echo ready; wait"
    )
    bench.start("1.1", argv=("sh", "-c", text), grace_s=0.1)
    bench.ready("1.1")
    bench.let_pass(0.2)
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    (bench.folder / "done").touch()
    assert bench.processes() == []


def test_a_pipe_behind_the_first_process_may_finish(bench: LocalBench) -> None:
    code = "import os,time\nif os.fork() == 0:\n time.sleep(0.1)\n print('last words', flush=True)\n"
    bench.start("1.1", argv=(sys.executable, "-c", code), leftover_grace_s=20.0)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.leftovers) == (0, ())
    assert bench.output("1.1") == "last words\n"
    assert not [event for event in bench.of("1.1") if isinstance(event, RunStopping)]


# --- notices, lines in the log, orders ------------------------------------------------------------------------

WAITS = "trap 'echo noticed; exit 0' USR1; echo ready; while :; do sleep 0.02; done"


def test_the_notice_precedes_the_limit(bench: LocalBench) -> None:
    notice = Notice(signal.SIGUSR1, before_s=60, main_only=True)
    bench.start("1.1", argv=("sh", "-c", WAITS), time_limit_s=62.0, notice=notice)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (0, None)
    assert end.start_at is not None
    assert end.end_at - end.start_at >= 2.0
    assert "noticed" in bench.output("1.1")


SAVES = """
import signal, sys, time
def save(number, frame):
    print("saves at", number, flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(600)
"""


def test_the_program_of_a_script_saves_on_its_signal_and_the_shell_does_not_continue(bench: LocalBench) -> None:
    (bench.folder / "save.py").write_text(SAVES)
    script = f"#!/bin/sh\n{sys.executable} save.py\necho next line\n".encode()
    notice = Notice(signal.SIGUSR1, before_s=60, main_only=False)
    bench.start("1.1", script=script, argv=(), stop_signal=None, notice=notice)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGTERM, "preempt")
    assert "saves at 10\nsaved\n" in bench.output("1.1")
    assert "next line" not in bench.output("1.1")


@pytest.mark.parametrize("begin", ["#!{python}\n", "#!/bin/sh\nexec {python} save.py\n"])
def test_a_script_that_execs_its_program_saves_on_its_signal_beside_its_workers(bench: LocalBench, begin: str) -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '600'])\n" + SAVES
    (bench.folder / "save.py").write_text(text)
    script = begin.format(python=sys.executable) + text
    notice = Notice(signal.SIGUSR1, before_s=60, main_only=False)
    bench.start("1.1", script=script.encode(), argv=(), stop_signal=None, notice=notice)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (75, "preempt")
    assert "saves at 10\nsaved\n" in bench.output("1.1")


def test_a_script_without_a_handler_survives_the_notice_to_its_program(bench: LocalBench) -> None:
    (bench.folder / "save.py").write_text(SAVES)
    text = f"import subprocess, sys\nsys.exit(subprocess.call([{sys.executable!r}, 'save.py']) - 70)\n"
    bench.start("1.1", script=f"#!{sys.executable}\n{text}".encode(), argv=())
    bench.ready("1.1")
    bench.engine.order("1.1", SignalOrder(signal.SIGUSR1))
    assert bench.end_of("1.1").exit_code == 5


def test_children_end_after_a_signal_to_the_first_process_alone(bench: LocalBench) -> None:
    child = "trap 'echo child is told; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    text = f"sh -c \"{child}\" & trap 'echo main saves; exit 9' USR1; wait; exit 8"
    notice = Notice(signal.SIGUSR1, before_s=60, main_only=True)
    bench.start("1.1", argv=("sh", "-c", text), stop_signal=None, notice=notice, grace_s=600.0)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    assert bench.end_of("1.1").exit_code == 9
    words = bench.output("1.1")
    assert 0 < words.index("main saves") < words.index("child is told")


def test_a_stop_after_the_notice_begins_with_term(bench: LocalBench) -> None:
    text = "trap 'echo noticed' USR1; trap 'echo stopped; exit 4' TERM; echo ready; while :; do sleep 0.02; done"
    notice = Notice(signal.SIGUSR1, before_s=600, main_only=True)
    bench.start("1.1", argv=("sh", "-c", text), stop_signal=None, notice=notice)
    bench.ready("1.1")
    bench.engine.order("1.1", LimitOrder(600.0))
    bench.wait(lambda: "noticed" in bench.output("1.1"))
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").exit_code == 4


def test_the_time_limit_sends_term(bench: LocalBench) -> None:
    text = "trap 'echo noticed' USR1; trap 'echo stopped; exit 4' TERM; echo ready; while :; do sleep 0.02; done"
    notice = Notice(signal.SIGUSR1, before_s=1, main_only=True)
    bench.start("1.1", argv=("sh", "-c", text), stop_signal=None, notice=notice, time_limit_s=3.0)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (4, "timeout")
    words = bench.output("1.1").split()
    assert [word for word in words if word in ("noticed", "stopped")] == ["noticed", "stopped"]


def test_a_signal_goes_to_the_first_process_or_to_all(bench: LocalBench) -> None:
    child = "trap 'echo child; exit 0' USR1; echo ready; while :; do sleep 0.02; done"
    text = f"sh -c \"{child}\" & trap 'echo main' USR1; wait; wait; wait"
    bench.start("1.1", argv=("sh", "-c", text))
    bench.ready("1.1")
    bench.engine.order("1.1", SignalOrder(signal.SIGUSR1, "main"))
    bench.wait(lambda: "main" in bench.output("1.1"))
    assert "child" not in bench.output("1.1")
    bench.engine.order("1.1", SignalOrder(signal.SIGUSR1))
    bench.wait(lambda: "child" in bench.output("1.1"))
    bench.end_of("1.1")


@pytest.mark.parametrize(
    ("why", "tail"),
    [
        *(("cancel", ""), ("preempt", " DUE TO PREEMPTION"), ("timeout", " DUE TO TIME LIMIT")),
        ("shutdown", " DUE TO SHUTDOWN OF THE MACHINE"),
    ],
)
def test_the_log_says_why_a_job_was_stopped(bench: LocalBench, why: str, tail: str) -> None:
    bench.start("12.3", SLEEPS, time_limit_s=0.3 if why == "timeout" else None, stderr_path="err")
    if why != "timeout":
        bench.ready("12.3")
        bench.engine.order("12.3", StopOrder(why))
    bench.end_of("12.3")
    line = (bench.folder / "err").read_text()
    assert line.startswith("gpusched: job 12 CANCELLED AT 2")
    assert line.removesuffix("\n").endswith(tail)
    assert len(line) == len("gpusched: job 12 CANCELLED AT 2026-01-02T03:04:05\n") + len(tail)


def test_a_stop_before_the_start_starts_nothing(bench: LocalBench) -> None:
    os.kill(bench.engine.server_pid or 0, signal.SIGSTOP)
    bench.start("1.1", argv=("touch", "started"))
    bench.engine.order("1.1", StopOrder("cancel"))
    os.kill(bench.engine.server_pid or 0, signal.SIGCONT)
    end = bench.end_of("1.1")
    assert (end.start_at, end.stopped_by, end.exit_code) == (None, "cancel", None)
    assert not (bench.folder / "started").exists()


def test_a_signal_before_the_start_is_delivered_with_it(bench: LocalBench) -> None:
    os.kill(bench.engine.server_pid or 0, signal.SIGSTOP)
    bench.start("1.1", SLEEPS)
    bench.engine.order("1.1", SignalOrder(signal.SIGTERM))
    os.kill(bench.engine.server_pid or 0, signal.SIGCONT)
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGTERM, None)
    assert end.start_at is not None


def test_many_orders_are_all_carried_out(bench: LocalBench) -> None:
    code = (
        "import signal, time\nseen = []\n"
        "for n in range(40, 60): signal.signal(n, lambda n, _: seen.append(n))\n"
        "print('ready', flush=True)\n"
        "while len(seen) < 20: time.sleep(0.01)\n"
        "print(sorted(seen) == list(range(40, 60)))\n"
    )
    bench.start("1.1", argv=(sys.executable, "-c", code))
    bench.ready("1.1")
    for number in range(40, 60):
        bench.engine.order("1.1", SignalOrder(number))
    assert bench.end_of("1.1").exit_code == 0
    assert "True" in bench.output("1.1")


def test_a_plain_term_to_the_supervisor_is_a_cancel(bench: LocalBench) -> None:
    bench.start("1.1", SLEEPS)
    started = bench.ready("1.1")
    os.kill(started.supervisor_pid, signal.SIGTERM)
    assert bench.end_of("1.1").stopped_by == "cancel"


# --- GPU memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_gpus", "code", "stream", "found"),
    [(True, 1, 1, True), (True, 1, 2, True), (True, 0, 1, False), (False, 1, 1, False)],
)
def test_gpu_out_of_memory_is_read_from_the_tail(
    bench: LocalBench, has_gpus: bool, code: int, stream: int, found: bool
) -> None:
    text = f"echo torch.OutOfMemoryError: CUDA out of memory. >&{stream}; head -c 9000 /dev/zero; exit {code}"
    end = shell(bench, text, stderr_path="err", has_gpus=has_gpus)
    assert end.gpu_oom is found


def test_a_message_of_an_earlier_attempt_in_an_appended_log_does_not_count(bench: LocalBench) -> None:
    log = {"stdout_path": "log", "append": True, "has_gpus": True}
    assert shell(bench, "echo CUDA out of memory; exit 1", "1.1", **log).gpu_oom
    assert not shell(bench, "exit 1", "1.2", **log).gpu_oom


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("echo 'KeyError: x'; exit 1", "KeyError: x"),
        ("trian || exit 3", "sh: 1: trian: not found"),
        ("echo error: out; echo error: err >&2; exit 1", "error: err"),
        ("echo epoch 1; exit 1", None),
        ("echo error: ignored; exit 0", None),
        ("echo error: before; kill -TERM $$", None),
        ("echo error: before; kill -ABRT $$", "error: before"),
    ],
)
def test_the_error_that_ended_a_run_is_read_from_its_output(bench: LocalBench, text: str, cause: str | None) -> None:
    end = shell(bench, text, stderr_path="err")
    assert end.cause == cause


def test_a_supervisor_is_replaced_after_many_runs(bench: LocalBench) -> None:
    supervisors = set()
    for job in range(1, RUNS_PER_SUPERVISOR + 20):
        bench.start(f"{job}.1", argv=("true",))
        assert bench.end_of(f"{job}.1").exit_code == 0
        supervisors.add(bench.until(f"{job}.1", RunStarted).supervisor_pid)
        bench.seen.clear()
    assert len(supervisors) >= 2


# --- what it leaves ---------------------------------------------------------------------------------------------


def test_a_forgotten_run_leaves_nothing(bench: LocalBench) -> None:
    bench.start("1.1", script=b"#!/bin/sh\nsleep 600\n", argv=())
    bench.until("1.1", RunStarted)
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    assert {path.suffix for path in bench.spool.glob("1.1.*")} == {".record", ".order", ".script"}
    bench.engine.reconcile((), ["1.1"])
    wait_until(lambda: not list(bench.spool.glob("1.1.*")), what="an empty spool")
    assert (bench.spool / "engine.log").read_text() == ""


def is_held(bench: LocalBench, run: str) -> bool:
    record = read_record(str(bench.spool), run)
    assert record is not None
    return record.is_held


def test_the_record_of_a_forgotten_run_is_reused(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.engine.janitor._QUIET_S", 60.0)
    inodes = set()
    for job in range(1, 6):
        run = f"{job}.1"
        bench.start(run, Does(exit_code=job))
        assert bench.end_of(run).exit_code == job
        wait_until(lambda run=run: not is_held(bench, run), what="its supervisor to close it")  # type: ignore[misc]
        assert [path.name for path in bench.spool.glob("*.record")] == [f"{run}.record"]
        inodes.add((bench.spool / f"{run}.record").stat().st_ino)
        bench.engine.reconcile((), [run])
    assert len(inodes) == 1


def test_a_ticket_says_which_ends_are_recorded(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    send = ForkServer.send

    def note(server: ForkServer, ticket: Ticket, facts: dict[str, Any]) -> None:
        told.append(facts["recorded"])
        send(server, ticket, facts)

    monkeypatch.setattr(ForkServer, "send", note)
    for job in range(1, 4):
        bench.start(f"{job}.1")
        bench.end_of(f"{job}.1")
        if job != 2:
            bench.engine.reconcile((), [f"{job}.1"])
    bench.start("4.1")
    assert told == [[], ["1.1"], ["1.1"], ["1.1", "3.1"]]


def test_idle_supervisors_and_the_server_end(bench: LocalBench) -> None:
    bench.start("1.1")
    started = bench.until("1.1", RunStarted)
    bench.end_of("1.1")
    server = bench.engine.server_pid
    bench.engine.close()
    for pid in (started.supervisor_pid, server):
        assert pid is not None
        wait_until(lambda pid=pid: (found := proctree.read_process(pid)) is None or not found.is_alive)
    bench.engine = bench.make()


# --- brought in line with the table ----------------------------------------------------------------------


def test_a_repeated_order_is_written_once(bench: LocalBench) -> None:
    bench.start("1.1", Does(lasts_s=FOREVER, ignores_stop=True), grace_s=600)
    wanted = open_run("1.1", bench.ready("1.1"), order=StopOrder("cancel"))
    for _ in range(3):
        bench.engine.reconcile([wanted])
    bench.restart()
    # The next daemon's engine knows from the file what the run was told.
    bench.engine.adopt([wanted])
    bench.engine.reconcile([wanted])
    lines = (bench.spool / "1.1.order").read_text().split()
    assert lines.count("stop") == 1


def test_a_notice_is_not_repeated_with_an_unchanged_limit(bench: LocalBench) -> None:
    text = "trap 'echo noticed' USR1; echo ready; while :; do sleep 0.02; done"
    # Two seconds after the start, which is long enough to set a trap.
    notice = Notice(signal.SIGUSR1, 598, main_only=True)
    bench.start("1.1", argv=("bash", "-c", text), time_limit_s=600.0, notice=notice)
    started = bench.until("1.1", RunStarted)
    bench.wait(lambda: "noticed" in bench.output("1.1"))
    bench.restart()
    bench.engine.adopt([replace(open_run("1.1", started), limit=LimitOrder(600.0))])
    assert "limit 600.0 ." in (bench.spool / "1.1.order").read_text()
    bench.engine.order("1.1", SignalOrder(signal.SIGWINCH))
    bench.let_pass(0.3)
    assert bench.output("1.1").count("noticed") == 1


def test_an_unwritable_ticket_leaves_nothing_behind(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = {job: bench.ticket(f"{job}.1", Does(exit_code=job)) for job in (1, 2, 3)}
    runs = [replace(open_run(ticket.run), ticket=ticket) for ticket in tickets.values()]

    def facts(ticket: Ticket, *arguments: Any) -> dict[str, Any]:
        if ticket.run == "2.1":
            raise RuntimeError("a bug")
        return ticket_facts(ticket, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(local_module, "ticket_facts", facts)
        with pytest.raises(RuntimeError):
            bench.engine.reconcile(runs)
        bench.engine.reconcile(runs[:1])
        bench.engine.reconcile(runs[2:])
        assert [bench.end_of(f"{job}.1").exit_code for job in (1, 3)] == [1, 3]
    bench.engine.reconcile(runs)
    assert bench.end_of("2.1").exit_code == 2
