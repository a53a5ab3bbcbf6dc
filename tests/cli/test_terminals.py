"""What differs on a terminal, and streams that are closed, full, or cannot hold every sign."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from shell import Result, Shell
from support import wait_until

from gpusched.cli import tables


def on_terminal(sh: Shell, command: str, *words: str, answer: str = "", **env: str) -> Result:
    """Type on a pseudo-terminal; `out` is everything that it showed."""
    master, slave = pty.openpty()
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        process = subprocess.Popen(
            sh.argv(command, *words), env={**sh.env, **env}, cwd=sh.work, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        if answer:
            terminal.write(answer.encode())
        shown = b""
        try:
            while piece := terminal.read(65536):
                shown += piece
        except OSError:
            pass  # Linux says EIO when the last writer has gone
        return Result(process.wait(timeout=60), shown.decode(), "")


def in_shell(sh: Shell, line: str, *argv: str, **env: str) -> Result:
    """`line` with the command in place of CMD."""
    done = subprocess.run(
        ["/bin/sh", "-c", line.replace("CMD", shlex.join(argv))],
        env={**sh.env, **env},
        cwd=sh.work,
        capture_output=True,
        timeout=60,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_table_is_coloured_only_on_a_terminal(sh: Shell) -> None:
    job_id = sh.submit("-H", "-J", "a[red]b\x1b[31m", "--", "true")
    drawn = on_terminal(sh, "gq", job_id, TERM="xterm-256color").out
    assert "\x1b[1m" in drawn
    assert "\x1b[33mPD" in drawn
    plain = sh.ok("gq", job_id)
    for text in (drawn, plain):
        assert "a[red]b\\x1b[31m" in text
        assert "\x1b[31m" not in text.replace("\x1b[33m", "")
    assert "\x1b" not in plain
    sh.ok("gcancel", job_id)


def test_no_color_and_columns_are_respected(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "true")
    shown = on_terminal(sh, "gq", job_id, TERM="xterm-256color", NO_COLOR="1", COLUMNS="60").out
    assert "\x1b" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 60
    sh.ok("gcancel", job_id)


def test_json_is_indented_on_terminals_and_one_line_for_scripts(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "true")
    people, scripts = on_terminal(sh, "gq", "--json", job_id).out, sh.ok("gq", "--json", job_id)
    first, second = json.loads(people), json.loads(scripts)
    assert [job["id"] for job in first["jobs"]] == [job["id"] for job in second["jobs"]] == [job_id]
    assert (len(people.splitlines()) > 10, len(scripts.splitlines())) == (True, 1)
    sh.ok("gcancel", job_id)


def test_gcancel_confirms_before_cancelling_several_jobs(sh: Shell) -> None:
    first, second = (sh.submit("-H", "-J", "asked", "--", "true") for _ in range(2))
    done = on_terminal(sh, "gcancel", "-n", "asked", answer="n\n")
    assert done.code == 1
    assert f"cancel 2 jobs ({first}, {second})? [y/N]" in done.out
    assert "nothing was cancelled" in done.out
    assert sh.ok("gq", "--quiet", "-n", "asked").split() == [first, second]
    assert on_terminal(sh, "gcancel", first).out == ""
    assert on_terminal(sh, "gcancel", "-y", "-n", "asked").code == 0
    assert sh.ok("gq", "--quiet", "-n", "asked") == ""


def test_gcancel_cancels_after_confirmation(sh: Shell) -> None:
    for _ in range(2):
        sh.submit("-H", "-J", "agreed", "--", "true")
    assert on_terminal(sh, "gcancel", "-n", "agreed", answer="y\n").code == 0
    assert sh.ok("gq", "--quiet", "-n", "agreed") == ""


def test_a_bare_gsub_on_a_terminal_shows_its_usage(sh: Shell) -> None:
    done = on_terminal(sh, "gsub")
    assert (done.code, "for example: gsub" in done.out) == (2, True)


def test_closed_streams_do_not_crash(sh: Shell) -> None:
    job_id = sh.submit("-H", "-J", "mute", "--", "true")
    for line, *argv in (
        ("CMD >&-", *sh.argv("gsub", "-H", "-J", "mute", "--", "true")),
        ("CMD <&- >&- 2>&-", *sh.argv("gsub", "-H", "-J", "mute", "--", "true")),
        ("CMD >&-", *sh.argv("gq")),
        ("CMD <&-", *sh.argv("gcancel", job_id)),
    ):
        done = in_shell(sh, line, *argv)
        assert (done.code, done.out, done.err) == (0, "", ""), line
    assert len(sh.ok("gq", "-a", "--quiet", "-n", "mute").split()) == 3
    sh.ok("gcancel", "-n", "mute")


def test_unwritable_output_is_reported(sh: Shell) -> None:
    for command in ("gq", "ginfo"):
        done = in_shell(sh, "CMD >/dev/full", *sh.argv(command))
        assert (done.code, "No space left" in done.err, "Traceback" in done.err) == (1, True, False)


def test_characters_outside_the_encoding_are_escaped(sh: Shell) -> None:
    job_id = sh.submit("-H", "-J", "größe", "--", "true")
    assert "gr\\xf6\\xdfe" in sh.ok("gq", job_id, PYTHONIOENCODING="ascii")
    assert "größe" in sh.ok("gq", job_id)
    sh.ok("gcancel", job_id)


def test_the_first_command_makes_a_private_home(own: Shell, tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    own.home, own.env["GPUSCHED_HOME"], own.is_to_start = home, str(home), False
    assert own.type("gsub", "--", "true").out == "Submitted job 1\n"
    for path in (home, home / "run", home / "log"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert own.ok("gpusched", "daemon", "status", "--json")


def test_gpusched_without_a_command_lists_its_commands(sh: Shell) -> None:
    for words in ([], ["daemon"], ["config"]):
        done = sh.type("gpusched", *words)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"Usage: gpusched {' '.join(words)}".rstrip())


def test_ginfo_on_a_narrow_terminal_cuts_nothing_and_explains_below(own: Shell) -> None:
    gpus = own.work / "gpus.json"
    gpus.write_text(
        json.dumps(
            {
                "gpus": [
                    {"name": "NVIDIA A100-SXM4-80GB", "vram": "80GiB", "ecc_errors": 3},
                    {"name": "NVIDIA A100-SXM4-80GB", "vram": "80GiB", "mig": [{"profile": "1g.10gb"}]},
                    {"name": "NVIDIA A100-SXM4-80GB", "vram": "80GiB", "lost": True},
                ]
            }
        )
    )
    own.env["GPUSCHED_FAKE_GPUS"] = str(gpus)
    own.submit("-g", "1g.10gb", "--", "sleep", "1000")
    own.ok("gctl", "drain", "1:0", "-m", "fan")
    for columns in ("80", "64"):
        shown = on_terminal(own, "ginfo", COLUMNS=columns, TERM="xterm").out
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "")
        wide = [line for line in shown.splitlines() if len(line) > int(columns)]
        assert [line.strip() for line in wide] == [str(gpus)], "sentences are broken between words, paths are not"
        shown = shown.replace("\n    ", " ")
        table = shown.partition("note: ")[2].partition("GPU 0 suspect")[0].partition("\n")[2]
        assert max(map(len, table.splitlines())) <= int(columns)
        assert shown.count("0M/80G") == 2
        assert "MIG 1g.10gb of GPU 1" in shown
        assert "GPU 0 suspect: 3 uncorrectable memory errors" in shown
        assert "GPU 1:0 draining: fan" in shown
    assert re.search(r"suspect +0M/80G .* - +3 uncorrectable memory errors", own.ok("ginfo"))
    assert "GPU 1:0 is drained (fan)" in on_terminal(own, "gq", TERM="dumb").out


def test_sentences_are_broken_between_words_and_indented(own: Shell) -> None:
    job_id = own.submit("-g", "2", "-J", "first", "--", "sleep", "1000")
    waiting = own.submit("-g", "2", "-J", "second", "--comment", "a comment of many words " * 5, "--", "true")
    wait_until(lambda: "RUNNING" in own.ok("gq", "-o", "%T", "-j", job_id), what="the first one to run")
    shown = on_terminal(own, "gq", "--why", waiting, COLUMNS="50", TERM="dumb").out.replace("\r", "").splitlines()
    assert max(map(len, shown)) <= 50
    assert shown[1].startswith("    "), "the sentence goes on below its beginning"
    shown = on_terminal(own, "gshow", waiting, COLUMNS="50", TERM="dumb").out.replace("\r", "").splitlines()
    at = next(number for number, line in enumerate(shown) if line.startswith("Comment:"))
    assert shown[at + 1].startswith(" " * 12)
    assert not shown[at + 1].startswith(" " * 13)
    assert len(own.ok("gshow", waiting).partition("Comment:")[2].splitlines()[0]) > 100, "a pipe gets whole lines"


def test_a_word_wider_than_the_terminal_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "screen", lambda: (24, 20))
    assert tables.folded("output /a/path/that/is/wider/than/that (rank 1)") == (
        "output\n    /a/path/that/is/wider/than/that\n    (rank 1)"
    )
    assert tables.folded("  short") == "  short"
