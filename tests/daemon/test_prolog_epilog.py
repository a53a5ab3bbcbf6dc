"""Prolog and epilog of jobs and of the site around real runs: order, identity, results, time-outs, kill -9."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import ENDS, LocalBench, WallClock, open_run
from remote_bench import RemoteBench
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.engine.linux.site_program import why_not_executed
from gpusched.engine.local import LocalEngine
from gpusched.engine.spool import read_record
from gpusched.model.execution import RunEnded, RunLost, SiteProgram, StopOrder

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start jobs of another user")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def site() -> Iterator[Path]:
    """A folder where programs of the site are trusted: root's alone, under root."""
    folder = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".gpusched-test-"))
    yield folder
    shutil.rmtree(folder)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def of_site(path: Path, text: str, timeout_s: float = 30.0) -> SiteProgram:
    made = SiteProgram(str(program(path, text)), timeout_s)
    if (why := why_not_executed(made.path)) is not None:
        pytest.skip(f"root's home is not root's alone: {why}")
    return made


# --- of the job ---------------------------------------------------------------------------------------------


def test_prolog_command_and_epilog_run_in_order_with_the_environment_of_the_job(bench: LocalBench) -> None:
    program(bench.folder / "before.sh", "echo before $WORD; cd /; sleep 0.05 &")
    program(bench.folder / "after.sh", "echo after $WORD $GPUSCHED_STATE $GPUSCHED_EXIT_CODE $GPUSCHED_RUN; pwd")
    env = {"PATH": "/usr/bin:/bin", "WORD": "x"}
    command = ("sh", "-c", "echo command $WORD")
    bench.start("1.1", argv=command, env=env, prolog="./before.sh", epilog=str(bench.folder / "after.sh"))
    end = bench.end_of("1.1")
    assert bench.output("1.1") == f"before x\ncommand x\nafter x COMPLETED 0 1.1\n{bench.folder}\n"
    assert (end.exit_code, end.epilog_failure, end.launch_error) == (0, None, None)


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("echo no data >&2; exit 3", 3, "its prolog ./before.sh failed, and the command was not started"),
        ("exec sleep 60", None, "its prolog ./before.sh did not end within 0.2 s, and the command was not started"),
    ],
)
def test_a_failed_prolog_fails_the_run_and_the_epilog_still_runs(
    bench: LocalBench, text: str, code: int | None, cause: str
) -> None:
    program(bench.folder / "before.sh", text)
    program(bench.folder / "after.sh", "echo after $GPUSCHED_STATE")
    bench.start(
        "1.1",
        argv=("sh", "-c", "echo command"),
        prolog="./before.sh",
        epilog="./after.sh",
        prolog_timeout_s=30.0 if code else 0.2,
    )
    end = bench.end_of("1.1")
    assert (end.exit_code, end.cause) == (code, cause)
    assert "command\n" not in bench.output("1.1")
    assert bench.output("1.1").endswith("after FAILED\n")


def test_a_late_prolog_that_ends_well_when_told_to_is_no_success_of_the_command(bench: LocalBench) -> None:
    program(bench.folder / "before.sh", "trap 'exit 0' TERM; sleep 60 & wait")
    bench.start("1.1", argv=("sh", "-c", "echo command"), prolog="./before.sh", prolog_timeout_s=0.2)
    end = bench.end_of("1.1")
    why = "its prolog ./before.sh did not end within 0.2 s, and the command was not started"
    assert (end.exit_code, end.launch_error) == (None, why)


@pytest.mark.parametrize("which", ["prolog", "command"])
def test_a_program_that_cannot_be_started_is_named(bench: LocalBench, which: str) -> None:
    program(bench.folder / "fine.sh", "exit 0")
    missing = {"prolog": {"prolog": "./none.sh"}, "command": {"prolog": "./fine.sh", "argv": ("./none.sh",)}}[which]
    bench.start("1.1", **missing)
    end = bench.end_of("1.1")
    assert end.launch_error is not None
    assert "none.sh" in end.launch_error
    assert end.exit_code is None


@pytest.mark.parametrize(
    ("stop", "state"), [(StopOrder("cancel"), "CANCELLED cancel"), (StopOrder("preempt"), "PREEMPTED preempt")]
)
def test_the_epilog_of_a_stopped_run_is_not_stopped_with_it(bench: LocalBench, stop: StopOrder, state: str) -> None:
    mark = bench.folder / "mark"
    program(bench.folder / "after.sh", f"touch {mark}; sleep 0.3; echo after $GPUSCHED_STATE $GPUSCHED_STOPPED_BY")
    bench.start("1.1", argv=("sh", "-c", "echo ready; exec sleep 60"), epilog="./after.sh")
    bench.ready("1.1")
    bench.engine.order("1.1", stop)
    bench.wait(mark.exists)
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    end = bench.end_of("1.1")
    assert bench.output("1.1").endswith(f"after {state}\n")
    assert end.epilog_failure is None


@pytest.mark.parametrize(
    ("ticket", "trap", "state"),
    [
        ({}, "exit 0", "PREEMPTED"),
        ({}, 'echo done > "$GPUSCHED_CHECKPOINT_FILE"; exit 0', "COMPLETED"),
        ({"requeue": False}, "exit 0", "COMPLETED"),
    ],
    ids=["saved", "done", "not requeued"],
)
def test_the_epilog_knows_what_exit_code_0_of_a_preempted_run_means(
    bench: LocalBench, ticket: dict[str, bool], trap: str, state: str
) -> None:
    program(bench.folder / "after.sh", "echo after $GPUSCHED_STATE $GPUSCHED_EXIT_CODE")
    text = f"trap '{trap}' TERM; echo ready; while :; do sleep 0.02; done"
    bench.start("1.1", argv=("sh", "-c", text), epilog="./after.sh", **ticket)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    bench.end_of("1.1")
    assert bench.output("1.1").endswith(f"after {state} 0\n")


def test_a_prolog_that_obeys_a_stop_with_exit_code_0_is_not_the_success_of_the_command(bench: LocalBench) -> None:
    program(bench.folder / "before.sh", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done")
    bench.start("1.1", argv=("touch", "started"), prolog="./before.sh")
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.signal, end.stopped_by) == (None, None, "preempt")
    assert not (bench.folder / "started").exists()


def test_the_time_limit_includes_the_prolog_and_not_the_epilog(bench: LocalBench) -> None:
    program(bench.folder / "before.sh", "sleep 60")
    program(bench.folder / "after.sh", "sleep 0.4; echo after $GPUSCHED_STATE")
    bench.start("1.1", prolog="./before.sh", epilog="./after.sh", time_limit_s=0.2)
    assert bench.end_of("1.1").stopped_by == "timeout"
    assert bench.output("1.1").endswith("after TIMEOUT\n")


@pytest.mark.parametrize(
    ("text", "timeout_s", "failure"),
    [
        ("exit 4", 30.0, "its epilog ./after.sh ended with exit code 4"),
        ("sleep 60", 0.2, "its epilog ./after.sh did not end within 0.2 s and was killed"),
    ],
)
def test_a_failed_epilog_is_told_and_changes_no_exit_code(
    bench: LocalBench, text: str, timeout_s: float, failure: str
) -> None:
    program(bench.folder / "after.sh", text)
    bench.start("1.1", argv=("sh", "-c", "exit 7"), epilog="./after.sh", epilog_timeout_s=timeout_s)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.epilog_failure) == (7, failure)
    assert f"gpusched: job 1: {failure}\n" in bench.output("1.1")
    assert bench.processes() == []


def test_output_of_all_three_is_rotated_with_the_log(bench: LocalBench) -> None:
    program(bench.folder / "before.sh", "echo before")
    program(bench.folder / "after.sh", "echo after")
    changes = {"prolog": "./before.sh", "epilog": "./after.sh", "log_max_mib": 1}
    bench.start("1.1", argv=("sh", "-c", "echo command"), **changes)
    bench.end_of("1.1")
    assert bench.output("1.1") == "before\ncommand\nafter\n"


@AS_ROOT
def test_prolog_and_epilog_run_as_the_user_of_the_job(bench: LocalBench) -> None:
    nobody = pwd.getpwnam("nobody")
    for folder in (bench.folder, *bench.folder.parents):
        folder.chmod(folder.stat().st_mode | 0o005)
    out = bench.folder / "out"
    out.mkdir()
    os.chown(out, nobody.pw_uid, nobody.pw_gid)
    for name in ("before.sh", "after.sh"):
        program(bench.folder / name, "id -u")
    paths = {"prolog": "./before.sh", "epilog": "./after.sh", "stdout_path": "out/1.1.out"}
    bench.start("1.1", uid=nobody.pw_uid, user="nobody", argv=("id", "-u"), **paths)
    assert bench.end_of("1.1").exit_code == 0
    assert (out / "1.1.out").read_text() == f"{nobody.pw_uid}\n" * 3


# --- of the site --------------------------------------------------------------------------------------------


def test_programs_of_the_site_see_ids_and_nothing_of_the_user(bench: LocalBench, site: Path) -> None:
    told = bench.folder / "told"
    before = of_site(site / "prolog", f"env | sort > {told}; id -u >> {told}; pwd >> {told}")
    after = of_site(site / "epilog", f"env | sort > {told}.after")
    env = {"PATH": str(bench.folder), "LD_PRELOAD": "/x.so", "HOME": "/h", "BASH_ENV": "/b"}
    gpus = (("GPU-aa", 0), ("GPU-bb", 3))
    bench.start("7.2", argv=("/bin/true",), env=env, site_prolog=before, site_epilog=after, gpus=gpus)
    assert bench.end_of("7.2").prolog_fault is None
    *words, uid, folder = told.read_text().splitlines()
    assert (uid, folder) == (str(os.geteuid()), "/")
    assert {word.partition("=")[0] for word in words} - {"PWD", "_", "OLDPWD", "SHLVL"} == {
        *("PATH", "LANG", "GPUSCHED_JOB_ID", "GPUSCHED_RUN", "GPUSCHED_SPOOL", "GPUSCHED_UID"),
        *("GPUSCHED_GPU_INDICES", "GPUSCHED_GPU_UUIDS"),
    }
    assert {"GPUSCHED_JOB_ID=7", "GPUSCHED_GPU_INDICES=0,3", "GPUSCHED_GPU_UUIDS=GPU-aa,GPU-bb"} <= set(words)
    assert "GPUSCHED_STATE=COMPLETED" in Path(f"{told}.after").read_text()


def test_a_failed_prolog_of_the_site_starts_nothing_and_is_cleaned_up_after(bench: LocalBench, site: Path) -> None:
    told = bench.folder / "told"
    before = of_site(site / "prolog", "echo nvidia-smi: no devices; exit 5")
    after = of_site(site / "epilog", f"echo $GPUSCHED_STATE > {told}")
    bench.start("1.1", argv=("touch", "started"), site_prolog=before, site_epilog=after)
    end = bench.end_of("1.1")
    assert end.prolog_fault == f"the prolog {before.path} ended with exit code 5: nvidia-smi: no devices"
    assert end.start_at is None
    assert not (bench.folder / "started").exists()
    assert told.read_text() == "NODE_FAIL\n"


def test_what_a_program_of_the_site_leaves_behind_and_one_that_hangs_are_killed(bench: LocalBench, site: Path) -> None:
    before = of_site(site / "prolog", "setsid sleep 61 & exit 0")
    after = of_site(site / "epilog", "sleep 62", timeout_s=0.2)
    bench.start("1.1", argv=("sh", "-c", "pgrep -x sleep -a || true"), site_prolog=before, site_epilog=after)
    end = bench.end_of("1.1")
    assert "sleep 61" not in bench.output("1.1")
    assert end.epilog_fault == f"the epilog {after.path} did not end within 0.2 s and was killed"
    assert end.exit_code == 0
    assert bench.processes() == []


def test_a_run_cancelled_during_the_prolog_of_the_site_is_not_started(bench: LocalBench, site: Path) -> None:
    mark, told = bench.folder / "mark", bench.folder / "told"
    before = of_site(site / "prolog", f"touch {mark}; sleep 0.3")
    after = of_site(site / "epilog", f"echo $GPUSCHED_STATE > {told}")
    bench.start("1.1", argv=("touch", "started"), site_prolog=before, site_epilog=after)
    bench.wait(mark.exists)
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert (end.stopped_by, end.start_at, end.prolog_fault) == ("cancel", None, None)
    assert not (bench.folder / "started").exists()
    assert told.read_text() == "CANCELLED\n"


@pytest.mark.parametrize("step", ["site_prolog", "prolog", "epilog", "site_epilog"])
def test_a_supervisor_killed_at_any_step_leaves_no_process_and_one_start(
    bench: LocalBench, site: Path, step: str
) -> None:
    mark, starts = bench.folder / "mark", bench.folder / "starts"
    hangs = f"touch {mark}; sleep 20"
    programs = {
        "site_prolog": of_site(site / "prolog", hangs if step == "site_prolog" else "exit 0"),
        "site_epilog": of_site(site / "epilog", hangs if step == "site_epilog" else "exit 0"),
        "prolog": str(program(bench.folder / "before.sh", hangs if step == "prolog" else "exit 0")),
        "epilog": str(program(bench.folder / "after.sh", hangs if step == "epilog" else "exit 0")),
    }
    bench.start("1.1", argv=("sh", "-c", f"echo x >> {starts}"), **programs)
    bench.wait(mark.exists)
    record = read_record(str(bench.spool), "1.1")
    assert record is not None
    assert record.pid is not None
    assert not [event for event in bench.of("1.1") if isinstance(event, ENDS)], "its GPUs stay booked"
    os.kill(record.pid, signal.SIGKILL)
    end = bench.until("1.1", *ENDS)
    if "epilog" in step:
        assert isinstance(end, RunEnded), "the command has ended, and is not repeated"
        cut = "did not end: the supervisor of the run was killed"
        assert (end.exit_code, end.epilog_failure) == (0, f"its epilog {programs['epilog']} {cut}")
        assert end.epilog_fault == f"the epilog {site / 'epilog'} {cut}"
    else:
        assert isinstance(end, RunLost)
    wait_until(lambda: bench.processes() == [], what="that nothing is left")
    assert (starts.read_text() if starts.exists() else "") == ("x\n" if "epilog" in step else "")


def test_a_machine_that_restarts_during_an_epilog_repeats_no_command(bench: LocalBench, site: Path) -> None:
    mark = bench.folder / "mark"
    bench.start("1.1", argv=("sh", "-c", "exit 3"), site_epilog=of_site(site / "epilog", f"touch {mark}; sleep 20"))
    bench.wait(mark.exists)
    record = read_record(str(bench.spool), "1.1")
    assert record is not None
    assert record.pid is not None
    bench.engine.close()
    os.kill(record.pid, signal.SIGKILL)
    wait_until(lambda: not proctree.lives(record.pid or 0, record.start_ticks), what="that it is gone")
    for process in bench.processes():
        proctree.send(process, signal.SIGKILL)
    bench.engine = LocalEngine(bench.spool, boot_id="boot-2", clock=WallClock())
    bench.engine.adopt([open_run("1.1")])
    end = bench.end_of("1.1")
    assert (end.exit_code, end.epilog_fault) == (3, None)


def test_a_restarted_daemon_finds_a_run_whose_epilog_goes_on(bench: LocalBench, site: Path) -> None:
    mark, go = bench.folder / "mark", bench.folder / "go"
    after = of_site(site / "epilog", f"touch {mark}; while ! test -e {go}; do sleep 0.05; done")
    bench.start("1.1", argv=("true",), site_epilog=after)
    bench.wait(mark.exists)
    bench.restart()
    bench.engine.reconcile([open_run("1.1")])
    go.touch()
    end = bench.end_of("1.1")
    assert isinstance(end, RunEnded)
    assert (end.exit_code, end.epilog_fault) == (0, None)


def test_another_node_executes_its_own_programs(tmp_path: Path, site: Path) -> None:
    before, after = of_site(site / "prolog", "exit 0"), of_site(site / "epilog", "echo scratch; exit 6")
    bench = RemoteBench(tmp_path)
    try:
        program(bench.folder / "in.sh", "echo in")
        program(bench.folder / "out.sh", "echo out $GPUSCHED_STATE; exit 2")
        programs = {"prolog": "./in.sh", "epilog": "./out.sh", "site_prolog": before, "site_epilog": after}
        bench.start("1.1", argv=("sh", "-c", "echo command"), **programs)
        end = bench.end_of("1.1")
        assert bench.output("1.1").startswith("in\ncommand\nout COMPLETED\n")
        assert end.epilog_failure == "its epilog ./out.sh ended with exit code 2"
        assert end.epilog_fault == f"the epilog {after.path} ended with exit code 6: scratch"
        bench.start("2.1", site_prolog=SiteProgram(f"{site}/none", 5.0))
        fault = bench.end_of("2.1").prolog_fault
        assert fault == f"the prolog was not started: {site}/none cannot be opened: No such file or directory"
    finally:
        bench.close()


def test_an_epilog_of_a_fallback_sees_how_its_own_command_ended(bench: LocalBench) -> None:
    program(bench.folder / "after.sh", "env | grep -E 'EXIT_CODE|SIGNAL|REASON'")
    env = {"PATH": "/usr/bin:/bin", "GPUSCHED_EXIT_CODE": "9", "GPUSCHED_SIGNAL": "9", "GPUSCHED_REASON": "x"}
    bench.start("1.1", argv=("true",), env=env, epilog="./after.sh")
    bench.end_of("1.1")
    assert bench.output("1.1") == "GPUSCHED_EXIT_CODE=0\n"


# --- paths that root does not execute -----------------------------------------------------------------------

UNTRUSTED = {
    "missing": "cannot be opened: No such file or directory",
    "not executable": "is not executable (mode 644)",
    "a folder": "is not a file",
    "group-writable": "others than root can write",
    "of a user": "belongs to uid",
    "a link": "is a symbolic link: name what it leads to",
    "below a link": "is a symbolic link: name what it leads to",
    "below a group-writable folder": "others than root can write",
    "below a user's folder": "belongs to uid",
    "below a sticky folder": "others than root can write",
    "with dots": "holds ..: name it by its plain path",
}


def untrusted(kind: str, site: Path) -> Path:
    """Make one of these; returns its path."""
    inner = site / "inner"
    inner.mkdir()
    path = program(inner / "prolog", "exit 0")
    if kind == "missing":
        return inner / "none"
    if kind == "not executable":
        path.chmod(0o644)
    elif kind == "a folder":
        return inner
    elif kind == "group-writable":
        path.chmod(0o775)
    elif kind == "of a user":
        os.chown(path, 12345, -1)
    elif kind in ("a link", "below a link"):
        (site / "link").symlink_to(path if kind == "a link" else inner)
        return site / "link" if kind == "a link" else site / "link" / "prolog"
    elif kind == "below a group-writable folder":
        inner.chmod(0o775)
    elif kind == "below a user's folder":
        os.chown(inner, 12345, -1)
    elif kind == "below a sticky folder":
        inner.chmod(0o777 | stat.S_ISVTX)
    else:
        return Path(f"{inner}/../inner/prolog")
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts paths")
@pytest.mark.parametrize("kind", UNTRUSTED)
def test_root_executes_only_what_is_roots_alone(site: Path, kind: str) -> None:
    of_site(site / "fine", "exit 0")
    why = why_not_executed(str(untrusted(kind, site)))
    assert why is not None
    assert UNTRUSTED[kind] in why


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts paths")
def test_a_program_that_became_untrusted_is_a_fault_of_the_node(bench: LocalBench, site: Path) -> None:
    before = of_site(site / "prolog", "exit 0")
    site.chmod(0o777)
    bench.start("1.1", argv=("touch", "started"), site_prolog=before)
    fault = bench.end_of("1.1").prolog_fault
    assert fault is not None
    assert fault.startswith("the prolog was not started: others than root can write")
    assert not (bench.folder / "started").exists()
