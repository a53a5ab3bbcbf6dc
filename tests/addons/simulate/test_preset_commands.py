"""`gctl preset` and `ginfo`, as typed: which preset is in force, why, and what the others would have made of it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from preset_builders import history, result
from shell import Shell
from support import wait_until

from gpusched.addons.simulate.preset_choice import Judgement, PresetState, decide
from gpusched.cli import preset
from gpusched.model import value
from gpusched.model.value import replace
from gpusched.store.sqlite import SqliteStore

AT = 1_795_000_000.0


def configure(shell: Shell, text: str) -> None:
    path = shell.home / "config.toml"
    path.write_text(text)


def judged(folder: Path, in_force: str = "fair") -> None:
    """What a daemon leaves behind that has judged once: slurm would be better, but not by much, and wide jobs pay."""
    made = result(in_force, throughput=0.2, slurm=0.1)
    worth = {**made.worth, "slurm": replace(made.worth["slurm"], wide_wait_s=200_000.0)}
    # Not due again before the next night.
    state = decide(
        PresetState(in_force, tried_at=time.time()), Judgement(AT, 1234, AT - 28 * 86400, in_force, worth, made.gains)
    )
    (folder / "preset.json").write_bytes(value.encode(state))


@pytest.fixture
def auto(own: Shell) -> Shell:
    """A daemon that chooses by itself, and has judged once, some time ago."""
    configure(own, '[priority]\npreset = "auto"\nweight_age = 3\n')
    judged(own.home)
    own.ok("gpusched", "daemon", "start")
    return own


def test_the_table_shows_each_presets_result_for_the_last_weeks(auto: Shell) -> None:
    shown = auto.ok("gctl", "preset")
    first, *_ = shown.splitlines()
    assert first.startswith("preset: auto: fair; throughput is 20% better (better in 11 of 12 parts, p = 0.01); ")
    assert "\n1234 jobs that ended since 20" in shown
    rows = {line.split()[0]: line for line in shown.splitlines() if line.split(maxsplit=1)[:1] != []}
    assert rows["fair"].split()[1:3] == ["yes", "1-03:46:40"]
    assert "+20%" in rows["throughput"]
    assert rows["slurm"].rstrip().endswith("wide jobs would wait 2.5 times as long")


def test_the_document_is_complete(auto: Shell) -> None:
    found = json.loads(auto.ok("gctl", "preset", "--json"))["preset"]
    assert (found["setting"], found["in_force"], found["judged_at"], found["jobs"]) == ("auto", "fair", AT, 1234)
    assert [one["preset"] for one in found["presets"]] == ["fair", "throughput", "fifo", "slurm"]
    assert found["presets"][1]["gain"] == {"parts": 12, "better": 11, "worse": 1, "p": 0.01}
    assert auto.ok("gctl", "preset", "--quiet") == "fair\n"


def test_ginfo_shows_the_preset_in_force_and_why(auto: Shell) -> None:
    (line,) = [line for line in auto.ok("ginfo").splitlines() if line.startswith("preset: ")]
    assert line.startswith("preset: auto: fair; throughput is 20% better")
    assert ", judged 20" in line
    assert json.loads(auto.ok("ginfo", "--json"))["preset"]["in_force"] == "fair"


def test_the_choice_survives_a_restart_and_appears_in_config_show(own: Shell) -> None:
    configure(own, '[priority]\npreset = "auto"\nweight_age = 3\n')
    judged(own.home, "slurm")
    own.ok("gpusched", "daemon", "start")
    assert own.ok("gctl", "preset", "--quiet") == "slurm\n"
    settings = json.loads(own.ok("gpusched", "config", "show", "--json"))["settings"]
    assert settings["priority.weight_qos"] == {"value": 10000.0, "origin": "preset slurm, chosen by auto"}
    assert settings["priority.weight_age"]["value"] == 3.0
    assert own.ok("gctl", "reload") == ""
    configure(own, "")
    assert "reloaded priority.preset\n" in own.ok("gctl", "reload")
    assert own.ok("gctl", "preset", "--quiet") == "fair\n"


def test_too_little_history_is_reported(own: Shell) -> None:
    configure(own, '[priority]\npreset = "auto"\n')
    own.ok("gpusched", "daemon", "start")
    own.ok("gctl", "preset", "--judge")

    def document() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(own.ok("gctl", "preset", "--json"))["preset"]
        return found

    wait_until(lambda: not document()["is_judging"], what="the judgement")
    assert document()["why"] == "too little history: no job has ended yet"
    assert own.ok("gctl", "preset").startswith("preset: auto: fair; too little history: no job has ended yet")


def test_history_is_judged_while_the_daemon_runs_and_again_after_a_crash(own: Shell) -> None:
    configure(own, '[priority]\npreset = "auto"\n')
    own.home.chmod(0o700)
    store = SqliteStore.open(str(own.home / "gpusched.db"))
    store.commit(history(time.time()))
    store.close()
    own.ok("gpusched", "daemon", "start", GPUSCHED_FAKE_GPUS="4x24GiB")
    status = json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]
    own.ok("gctl", "preset", "--judge")
    assert "the presets are being evaluated" in own.type("gctl", "preset", "--judge").err
    os.kill(status["pid"], signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{status['pid']}"), what="the end of the daemon")
    own.ok("gpusched", "daemon", "start", GPUSCHED_FAKE_GPUS="4x24GiB")
    own.ok("gctl", "preset", "--judge")

    def document() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(own.ok("gctl", "preset", "--json"))["preset"]
        return found

    wait_until(lambda: not document()["is_judging"], 120, what="the judgement")
    found = document()
    assert found["problem"] is None
    assert found["jobs"] == 240
    assert all(one["worth"] is not None for one in found["presets"])
    assert "240 jobs that ended since" in own.ok("gctl", "preset")


def test_a_manually_chosen_preset_is_shown_as_such(own: Shell) -> None:
    configure(own, '[priority]\npreset = "fifo"\n')
    own.ok("gpusched", "daemon", "start")
    assert "\npreset: fifo\n" in own.ok("ginfo")
    shown = own.type("gctl", "preset")
    assert shown.out == "preset: fifo\n"
    assert "to try them now: gctl preset --judge" in shown.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("preset", "fifo"), "preset takes no operand, not 'fifo'"),
        (("hold", "--judge", "1"), "unknown option '--judge' for gctl hold; it belongs to: preset"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_hint(own: Shell, words: tuple[str, ...], text: str) -> None:
    shown = own.type("gctl", *words)
    assert shown.code == 2
    error, hint = shown.err.splitlines()
    assert text in error
    assert hint.startswith("gctl: hint: ")


def test_text_from_the_daemon_is_made_printable() -> None:
    found = {"setting": "auto", "in_force": "fair", "why": "a\x1b[31mb", "judged_at": None, "problem": "\x1b[31m"}
    assert "\x1b" not in preset.line_of(found)
