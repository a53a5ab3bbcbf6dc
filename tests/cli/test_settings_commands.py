"""`gpusched config` as typed: what holds, what is wrong with the file, and what the machines cannot keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import Shell
from support import wait_until
from test_terminals import on_terminal

QUEUES = """[default]
queue = "vision"

[queue.vision]
guaranteed_gpus = 2
guaranteed_cpus = 6
weight = 2

[account.lab]
users = {root = 2}

[license]
matlab = 3
"""


@pytest.fixture
def alone(tmp_path: Path) -> Shell:
    """A home without a daemon; no command here starts one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    return Shell(tmp_path / "home", tmp_path / "work")


@pytest.fixture
def running(own: Shell) -> Shell:
    """A daemon with two GPUs on one node."""
    own.ok("gpusched", "daemon", "start")
    # Its first reading of the GPUs.
    own.type("gsub", "--wait", "true")
    return own


def write(shell: Shell, text: str) -> Path:
    path = shell.home / "config.toml"
    path.write_text(text)
    return path


def test_show_prints_tables_with_their_source_lines(alone: Shell) -> None:
    path = write(alone, QUEUES)
    shown = json.loads(alone.ok("gpusched", "config", "show", "--json"))["settings"]
    assert shown["queue.vision.weight"] == {"value": 2.0, "origin": f"file {path}, line 7"}
    assert shown["queue.vision.max_gpus"] == {"value": None, "origin": "default"}
    assert shown["account.lab.users"] == {"value": {"root": 2}, "origin": f"file {path}, line 10"}
    assert shown["license.matlab"] == {"value": 3, "origin": f"file {path}, line 13"}
    rows = [line.split(maxsplit=2) for line in alone.ok("gpusched", "config", "show").splitlines()]
    assert ["queue.vision.guaranteed_gpus", "2.0", f"file {path}, line 5"] in rows


def test_check_accepts_a_valid_file(alone: Shell) -> None:
    assert alone.ok("gpusched", "config", "check") == f"there is no {alone.home}/config.toml; the defaults apply\n"
    path = write(alone, QUEUES)
    assert alone.ok("gpusched", "config", "check") == f"{path} is fine\n"
    found = json.loads(alone.ok("gpusched", "config", "check", "--json"))
    assert found == {"schema_version": 1, "file": str(path), "exists": True, "problems": [], "warnings": []}


def test_check_uses_the_file_named_by_the_environment(alone: Shell, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[gpu]\nids = 'x'\n")
    done = alone.type("gpusched", "config", "check", GPUSCHED_CONFIG=str(other))
    assert (done.code, f"file {other}, line 2: gpu.ids is 'x'" in done.err) == (2, True)
    other.write_text("")
    assert alone.type("gpusched", "config", "check", GPUSCHED_CONFIG=str(other)).out == f"{other} is fine\n"


def test_check_reports_all_mistakes_in_file_order(alone: Shell) -> None:
    path = write(
        alone, "[queue.default]\nmax_gpus = 1\nguaranteed_gpus = 2\n[queue.a]\nparent = 'defualt'\nfactor = 3\n"
    )
    done = alone.type("gpusched", "config", "check")
    errors = [line for line in done.err.splitlines() if "error:" in line]
    assert done.code == 2
    assert errors == [
        f"gpusched: error: file {path}, line 3: queue default is guaranteed 2 gpus and may hold at most 1",
        f"gpusched: error: file {path}, line 6: queue.a.factor is 3; it must be a number of at least 0 and at most 1",
    ]
    write(alone, "[queue.default]\n[queue.a]\nparent = 'defualt'\n")
    done = alone.type("gpusched", "config", "check", "--json")
    (problem,) = json.loads(done.out)["problems"]
    assert problem["message"].endswith("line 3: queue a is below defualt, which does not exist")
    assert problem["hint"] == "did you mean default?"
    assert (done.code, done.err) == (2, "")


def test_check_without_a_daemon_uses_the_node_of_the_file(alone: Shell) -> None:
    path = write(alone, f"{QUEUES}[node]\ncpus = 4\n")
    done = alone.type("gpusched", "config", "check")
    where = f"gpusched: error: file {path}, line 6: "
    assert (done.code, done.err.splitlines()[0]) == (
        1,
        f"{where}queue vision is guaranteed 6 CPUs, but the machines have 4",
    )
    assert alone.type("gpusched", "daemon", "status").code == 1, "the check has started a daemon"


def test_check_compares_guarantees_with_the_nodes_of_the_daemon(running: Shell) -> None:
    node = '[node]\nname = "lab1"\ncpus = 8\nmem_mib = 65536\n'
    path = write(running, QUEUES + node)
    assert running.ok("gpusched", "config", "check") == f"{path} is fine\n"
    write(running, (QUEUES + node).replace("guaranteed_gpus = 2", "guaranteed_gpus = 3"))
    done = running.type("gpusched", "config", "check")
    assert (done.code, done.out) == (1, "")
    where = f"gpusched: error: file {path}, line 5: "
    assert done.err.splitlines() == [
        f"{where}queue vision is guaranteed 3 GPUs, but the machines have 2",
        "gpusched: hint: lower the guarantee; see the machine with: ginfo",
    ]
    write(running, (QUEUES + node).replace("guaranteed_gpus = 2", 'cells = ["lab2:2"]'))
    done = running.type("gpusched", "config", "check")
    assert (done.code, "line 5: 'lab2:2' names node lab2, which is not one of lab1" in done.err) == (1, True), done


def test_check_prefers_the_node_of_the_file_over_the_daemon(running: Shell) -> None:
    write(running, f"{QUEUES}[node]\ncpus = 4\n")
    done = running.type("gpusched", "config", "check")
    assert (done.code, "guaranteed 6 CPUs, but the machines have 4" in done.err) == (1, True), done


def test_check_doctor_and_reload_name_settings_without_effect(own: Shell) -> None:
    path = own.home / "config.toml"
    lines = path.read_text().count("\n")
    path.write_text(path.read_text() + "[qos.low]\n[qos.high]\ntier = 1\n[idle]\nafter_s = 0\nthen = 'requeue'\n")
    tier = "the tier of QOS high only orders jobs, and preempts none: no QOS lists another in preempts"
    then = "[idle] then has no effect: after_s = 0 marks no run as idle"
    add = 'add preempts = ["low"] to [qos.high], or preempts = [] if it is only to go first'
    own.ok("gpusched", "daemon", "start")
    done = own.type("gpusched", "config", "check")
    assert done.code == 0
    assert f"warning: file {path}, line {lines + 3}: {tier}; {add}\n" in done.err
    assert f"warning: file {path}, line {lines + 6}: {then}; " in done.err
    assert f"gctl: {tier}; {add}\n" in own.type("gctl", "reload").err
    checks = json.loads(own.type("gpusched", "doctor", "--json").out)["checks"]
    found = next(one for one in checks if one["check"] == "config")
    assert (found["level"], found["hint"]) == ("warn", add)
    assert tier in found["text"]
    assert then in found["text"]


def test_why_of_a_job_whose_qos_goes_first_says_why_it_preempts_nothing(own: Shell) -> None:
    path = own.home / "config.toml"
    path.write_text(path.read_text() + "[qos.low]\n[qos.high]\ntier = 1\n")
    first = own.submit("-g", "2", "--qos", "low", "--", "sleep", "600")
    wait_until(lambda: "RUNNING" in own.ok("gq", "-j", first, "-o", "%T"), what="the first job to run")
    second = own.submit("-g", "1", "--qos", "high", "--", "true")
    sentence = "its QOS high goes before jobs of QOS low, and preempts none of them: "
    sentence += 'an administrator can set preempts = ["low"] in [qos.high]'
    assert f"  preemption: {sentence}\n" in own.ok("gq", "--why", second)
    assert json.loads(own.ok("gq", "--why", second, "--json"))["why"]["preemption"] == sentence
    path.write_text(path.read_text() + "preempts = ['low']\n")
    own.ok("gctl", "reload")
    wait_until(lambda: "preemption:" not in own.ok("gq", "--why", second), what="no word on it")


def test_config_show_has_what_was_changed_alone_and_fits_the_terminal(own: Shell) -> None:
    config = own.home / "config.toml"
    config.write_text(f"{config.read_text()}[limit]\njobs = 4321\n")
    rows = own.ok("gpusched", "config", "show", "--changed").splitlines()[1:]
    assert "limit.jobs 4321" in [" ".join(row.split()[:2]) for row in rows]
    assert not any(row.endswith(" default") for row in rows)
    found = json.loads(own.ok("gpusched", "config", "show", "--changed", "--json"))["settings"]
    assert len(found) == len(rows)
    shown = on_terminal(own, "gpusched", "config", "show", COLUMNS="80", TERM="dumb").out.replace("\r", "").splitlines()
    assert len(shown) > 100
    at = next(number for number, row in enumerate(shown) if row.startswith("config.toml:"))
    assert " ".join(" ".join(shown[at:]).split()) == f"config.toml: {config}"
    shown = shown[:at]
    assert max(map(len, shown)) <= 80
    line = len(config.read_text().splitlines())
    (row,) = (one for one in shown if one.startswith("limit.jobs "))
    assert row.endswith(f"file config.toml, line {line}")
