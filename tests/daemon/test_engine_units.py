"""Runs as units, with a stand-in for systemd that misbehaves: nothing is lost, run twice, or waited for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import ENDS, FOREVER, Does, LocalBench, StandInBench, open_run, to_start

from gpusched.engine import launchers
from gpusched.engine.launchers import UnitNames
from gpusched.engine.linux import proctree
from gpusched.errors import NotReady
from gpusched.model.execution import RunEnded, RunNeverStarted, RunStarted, StopOrder

SLEEPS = Does(lasts_s=FOREVER)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StandInBench]:
    made = StandInBench(tmp_path)
    yield made
    made.close()


def never_started(bench: StandInBench, run: str) -> RunNeverStarted:
    end = bench.until(run, *ENDS)
    assert isinstance(end, RunNeverStarted), end
    return end


def test_a_start_refused_by_systemd_never_ran_and_says_why(bench: StandInBench) -> None:
    bench.systemd.refuses = "Unit gpusched-1.1.service already exists."
    bench.start("1.1")
    detail = never_started(bench, "1.1").detail
    assert detail == "systemd refused gpusched-1.1.service: Unit gpusched-1.1.service already exists."


@pytest.mark.parametrize("result", ["failed", "canceled", "timeout", "dependency"])
def test_a_unit_that_fails_to_start_never_ran_and_says_where_to_look(bench: StandInBench, result: str) -> None:
    bench.systemd.result = result
    bench.start("1.1")
    detail = never_started(bench, "1.1").detail
    assert detail == f"systemd could not start gpusched-1.1.service ({result}); see: journalctl -u gpusched-1.1.service"


def test_open_calls_are_limited_and_all_are_made(bench: StandInBench) -> None:
    bench.systemd.is_silent = True
    bench.engine.reconcile(to_start([bench.ticket(f"{job}.1", Does(exit_code=job)) for job in range(1, 41)]))
    bench.wait(lambda: bench.systemd.most_open == 16)
    bench.let_pass(0.2)
    assert bench.systemd.most_open == 16
    bench.systemd.release()
    assert [bench.end_of(f"{job}.1").exit_code for job in range(1, 41)] == list(range(1, 41))


def test_a_slow_systemd_does_not_block(bench: StandInBench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.systemd.is_silent = True
    bench.start("2.1", Does(exit_code=2))
    bench.wait(lambda: bench.systemd.most_open == 1)
    assert bench.engine.events() == []
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    # Of the other one nothing is heard as long as nobody answers.
    assert not bench.of("2.1")
    bench.systemd.release()
    assert bench.end_of("2.1").exit_code == 2


def test_a_closed_bus_loses_no_run_and_starts_none_twice(bench: StandInBench) -> None:
    bench.start("1.1", SLEEPS)
    first = bench.ready("1.1")
    bench.systemd.is_silent = True
    tickets = [bench.ticket(f"{job}.1", Does(exit_code=job)) for job in range(2, 32)]
    bench.engine.reconcile(to_start(tickets))
    bench.wait(lambda: bench.systemd.most_open == 16)
    bench.systemd.hang_up()
    details = {never_started(bench, ticket.run).detail for ticket in tickets}
    assert details == {"systemd was gone before it was started"}
    # What it had been asked for before comes to life now, and finds that the run was given back.
    bench.systemd.release()
    bench.start("40.1", Does(exit_code=40))
    assert bench.end_of("40.1").exit_code == 40
    bench.wait(lambda: len(bench.systemd.started) == 1 + 16 + 1)
    bench.let_pass(0.5)
    assert not [event for ticket in tickets for event in bench.of(ticket.run) if isinstance(event, RunStarted)]
    assert bench.of("1.1") == [first]
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_a_call_with_a_lost_answer_is_not_repeated(bench: StandInBench) -> None:
    bench.systemd.is_silent = True
    bench.start("1.1", SLEEPS)
    bench.wait(lambda: bench.systemd.most_open == 1)
    bench.restart()
    bench.engine.adopt([open_run("1.1")])
    never_started(bench, "1.1")
    bench.engine.reconcile((), ["1.1"])
    bench.systemd.release()
    bench.wait(lambda: bench.systemd.started == ["gpusched-1.1.service"])
    bench.start("2.1", Does(lasts_s=0.3))
    bench.end_of("2.1")
    assert not [event for event in bench.of("1.1") if isinstance(event, RunStarted)]
    assert not bench.output("1.1")


def test_a_silent_systemd_times_out(bench: StandInBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.engine.systemd.SILENCE_S", 0.3)
    bench.systemd.is_silent = True
    bench.start("1.1")
    assert never_started(bench, "1.1").detail == "systemd was gone before it was started"


def test_a_missing_bus_refuses_calls_and_recovers(bench: StandInBench) -> None:
    there = bench.systemd.path
    away = there.with_name("away")
    there.rename(away)
    bench.systemd.hang_up()
    bench.wait(lambda: bench.engine._server is None)
    bench.start("1.1")
    assert "no supervisor can be started" in never_started(bench, "1.1").detail
    away.rename(there)
    bench.start("1.2", Does(exit_code=5))
    assert bench.end_of("1.2").exit_code == 5


def test_waiting_for_a_supervisor_times_out(bench: StandInBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.engine.systemd.CLAIM_S", 0.2)
    bench.systemd.starts_nothing = True
    bench.start("1.1")
    assert "did not claim its run; see: journalctl -u gpusched-1.1.service" in never_started(bench, "1.1").detail


def test_a_ticket_of_another_release_is_not_read(bench: StandInBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.engine.unit.__version__", "0.0.9")
    bench.start("1.1")
    assert "upgraded from 0.0.9" in never_started(bench, "1.1").detail


def test_a_unit_contains_no_user_text(bench: StandInBench) -> None:
    env = {"PATH": os.environ["PATH"], "SECRET": "%n $HOME hunter2"}
    bench.start("1.1", argv=("sh", "-c", "exit 3", "$HOME %i hunter2"), env=env, user="hunter2")
    assert bench.end_of("1.1").exit_code == 3
    told = bench.systemd.properties["gpusched-1.1.service"]
    assert told["Description"] == "run 1 of gpusched's job 1"
    words = repr({name: value for name, value in told.items() if name != "Environment"})
    assert "hunter2" not in words
    assert str(bench.folder) not in words
    assert all("hunter2" not in entry for entry in told["Environment"])


def test_a_large_script_is_transferred(bench: StandInBench) -> None:
    script = b"#!/bin/sh\nexit 9\n#" + b"x" * (9 << 20)
    bench.start("1.1", argv=(), script=script)
    assert bench.end_of("1.1").exit_code == 9


def test_a_revocation_stays_while_a_unit_may_still_claim(bench: StandInBench) -> None:
    bench.systemd.is_silent = True
    bench.start("1.1")
    bench.wait(lambda: bench.systemd.most_open == 1)
    for _ in range(2):
        bench.restart()
        bench.engine.adopt([])
    bench.engine.close()
    bench.engine = bench.make()
    bench.engine.adopt([open_run("1.1")])
    never_started(bench, "1.1")
    bench.restart()
    bench.engine.adopt([])
    bench.systemd.release()
    bench.wait(lambda: bench.systemd.started)
    bench.let_pass(0.5)
    assert not bench.output("1.1")


def test_units_are_named_by_run() -> None:
    assert UnitNames("gpusched-0a1b").unit("12.3") == "gpusched-0a1b-12.3.service"


# --- which launcher ---------------------------------------------------------------------------------------


def test_a_personal_daemon_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launchers.choose("auto", is_system=False).kind == "fork"
    assert launchers.choose("fork", is_system=True).kind == "fork"
    with pytest.raises(NotReady, match='launcher is "systemd", but this daemon is not the system\'s'):
        launchers.choose("systemd", is_system=False)


def test_without_systemd_auto_forks_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "BOOTED", str(tmp_path / "nothing"))
    assert launchers.choose("auto", is_system=True).text == "fork server: PID 1 is not systemd"
    with pytest.raises(NotReady, match="but PID 1 is not systemd"):
        launchers.choose("systemd", is_system=True)


@pytest.mark.parametrize(("version", "kind"), [("252.39-1~deb12u2", "systemd"), ("219", "fork")])
def test_the_systemd_version_is_queried(
    bench: StandInBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, kind: str
) -> None:
    bench.systemd.version = version
    monkeypatch.setattr(launchers, "BOOTED", str(tmp_path))
    monkeypatch.setattr("gpusched.engine.systemd.SYSTEM_BUS", str(bench.systemd.path))
    assert launchers.choose("auto", is_system=True).kind == kind


def test_trial_daemons_have_separate_units() -> None:
    assert launchers.names_of("").unit("1.1") == "gpusched-1.1.service"
    assert launchers.names_of("/tmp/a").unit("1.1") != launchers.names_of("/tmp/b").unit("1.1")
    assert launchers.names_of("/tmp/a").slice == "gpusched.slice"


def test_the_remains_of_a_killed_supervisor_are_ended(bench: StandInBench) -> None:
    bench.start("1.1", SLEEPS)
    started = bench.ready("1.1")
    assert proctree.read_process(started.pid) is not None
    os.kill(started.supervisor_pid, 9)
    end = bench.until("1.1", *ENDS)
    assert not isinstance(end, RunEnded)
    bench.wait(lambda: not bench.processes())


@pytest.mark.parametrize("make", [LocalBench, StandInBench], ids=["the fork server", "systemd"])
def test_a_supervisor_is_started_isolated(
    make: type[LocalBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its own command line, in a folder and an environment of somebody who wants to run something as root."""
    evil, proof = tmp_path / "evil", tmp_path / "was run"
    evil.mkdir()
    for name in ("sitecustomize", "usercustomize", "marshal", "fcntl", "gpusched", "startup"):
        (evil / f"{name}.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    monkeypatch.chdir(evil)
    monkeypatch.setenv("PYTHONPATH", str(evil))
    monkeypatch.setenv("PYTHONSTARTUP", str(evil / "startup.py"))
    bench = make(tmp_path)
    try:
        bench.start("1.1", SLEEPS)
        started = bench.until("1.1", RunStarted)
        command = Path(f"/proc/{started.supervisor_pid}/cmdline").read_bytes().decode().split("\0")
        environ = Path(f"/proc/{started.supervisor_pid}/environ").read_bytes()
        assert b"PYTHON" not in environ
        flags = command[1 : command.index("-c")]
        shows = "import sys; print(sys.flags.isolated, sys.flags.no_site, *sys.path, sep='\\n')"
        done = subprocess.run([command[0], *flags, "-c", shows], capture_output=True, text=True, check=True)
        isolated, no_site, *places = done.stdout.splitlines()
        assert (isolated, no_site) == ("1", "1")
        assert str(evil) not in places
        assert "" not in places
    finally:
        bench.close()
    assert not proof.exists()
