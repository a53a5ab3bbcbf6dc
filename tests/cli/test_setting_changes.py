"""Accounts, queues and QOS changed by command: the file afterwards, what holds, and what is refused."""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from shell import Result, Shell, compare, stopped

from gpusched.cli import output
from gpusched.cli.gctl import body
from gpusched.config import load_settings

START = """# The lab's scheduler.
[node]
name = "lab1"   # the only one
cpus = 8
mem_mib = 65536

# Who pays.
[account.science]
users = ["ann", "dora"]   # since 2024
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A scheduler whose settings the tests of this module change."""
    root = tmp_path_factory.mktemp("changes")
    (root / "home").mkdir()
    (root / "home" / "config.toml").write_text(START)
    shell = Shell(root / "home", root, GPUSCHED_FAKE_GPUS="2x24GiB")
    shell.ok("gpusched", "daemon", "start")
    yield shell
    stopped(shell)


@pytest.fixture(autouse=True)
def fresh(lab: Shell) -> None:
    path = lab.home / "config.toml"
    if path.read_text() != START:
        path.write_text(START)
        changed(lab, "reload")


def gctl(shell: Shell, *words: str) -> Result:
    """As typed, but within this process: most of a command's time is the start of Python."""
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, shell.env, clear=True), redirect_stdout(out), redirect_stderr(err):
        code = output.run("gctl", body, list(words))
    return Result(code, out.getvalue(), err.getvalue())


def changed(shell: Shell, *words: str) -> None:
    done = gctl(shell, *words)
    assert done.code == 0, (words, done)


def told(shell: Shell, *lines: str) -> str:
    """A transcript of commands and all that they print."""
    parts = []
    for line in lines:
        done = gctl(shell, *line.split())
        text = (done.out + done.err).replace(str(shell.home), "HOME")
        parts.append(f"$ gctl {line}\n{text}{f'exit code {done.code}' if done.code else ''}".rstrip("\n") + "\n")
    return "".join(parts)


def in_force(shell: Shell) -> dict[str, object]:
    """Settings that the file states; the file is what the daemon has read last."""
    assert gctl(shell, "reload").err.startswith("gctl: the settings have not changed")
    loaded = load_settings(str(shell.home / "config.toml"), {})
    return {path: value for path, value, origin in loaded.values() if origin.startswith("file")}


def test_day_of_an_admin_reads_as_before(lab: Shell) -> None:
    text = told(
        lab,
        "account add vision parent=science shares=4 --dry-run",
        "account add vision parent=science shares=4",
        "account add vision",
        "account members vision add=ann,bob:2",
        "account members vision remove=bob",
        "account modify vision shares=6 --json",
        "account modify vision shares=6",
        "qos add night tier=-1 max_time=12h",
        "queue add default",
        "queue add vision gpus=1 max_gpus=2 accounts=vision",
        "queue modify vision max_gpus=",
        "queue remove vision -q",
        "account remove science",
        "account remove vision",
    )
    compare("setting-changes.txt", text)
    compare("setting-changes.toml", (lab.home / "config.toml").read_text())


REFUSED = [
    "account add",
    "account add vision shares=none",
    "account add vision share=4 parent=science",
    "account add vision shares",
    "account add vision parent=scienc",
    "account modify vison shares=4",
    "account modify science",
    "account members science remove=anne",
    "account members science bob",
    "account members science add=bob:0",
    "account remove science now",
    "account remove science --to science",
    "account modify science --to vision",
    "account add vision --me",
    "queue members vision add=bob",
    "queue add big gpus=64",
    "queue modify default max_gpus=4",
    "qos",
    "qos add night preempts=day",
    "hold 1 --dry-run",
]


def test_refusals_change_nothing(lab: Shell) -> None:
    compare("setting-refusals.txt", told(lab, *REFUSED))
    assert (lab.home / "config.toml").read_text() == START
    assert gctl(lab, "reload").err == "gctl: the settings have not changed\n"


def test_first_queue_brings_the_default_queue_along(lab: Shell) -> None:
    assert gctl(lab, "queue", "add", "fast", "max_gpus=2").out == (
        "added queue fast, and queue default for jobs that name none\n"
    )
    assert (lab.home / "config.toml").read_text() == START + "\n[queue.default]\n\n[queue.fast]\nmax_gpus = 2\n"
    assert gctl(lab, "queue", "add", "slow").out == "added queue slow\n"
    (lab.home / "config.toml").write_text(START + '\n[default]\nqueue = "main"\n')
    changed(lab, "reload")
    assert gctl(lab, "queue", "add", "main").out == "added queue main\n"


OPEN = START.partition("# Who pays.")[0]
"""Without accounts: every user may submit."""
ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def open_lab(lab: Shell) -> Shell:
    (lab.home / "config.toml").write_text(OPEN)
    changed(lab, "reload")
    return lab


LOCKOUTS = [
    ("account add vision users=daemon", "is in no account"),
    ("queue add default users=daemon", "is admitted to no queue"),
]


@pytest.mark.parametrize(("words", "why"), LOCKOUTS, ids=["account", "queue"])
def test_change_that_shuts_users_out_must_be_confirmed(open_lab: Shell, words: str, why: str) -> None:
    done = gctl(open_lab, *words.split())
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines() == [
        f"gctl: error: this shuts out users of the last 30 days: {ME} {why}; nothing was changed",
        "gctl: hint: name them as well, or confirm with --yes that they are to be out",
    ]
    assert (open_lab.home / "config.toml").read_text() == OPEN
    trial = gctl(open_lab, *words.split(), "--dry-run")
    assert (trial.code, trial.err) == (0, f"gctl: this shuts out users of the last 30 days: {ME} {why}\n")
    sure = gctl(open_lab, *words.split(), "--yes")
    assert (sure.code, sure.err) == (0, f"gctl: this shuts out users of the last 30 days: {ME} {why}\n")
    # They are out already, so that this changes nothing for them.
    section, _, name, _ = words.split()
    assert gctl(open_lab, section, "modify", name, "users=daemon,bin").code == 0


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "code"), [("n\n", 1), ("y\n", 0)], ids=["no", "yes"])
def test_terminal_is_asked_after_it_is_told_whom_a_change_shuts_out(open_lab: Shell, typed: str, code: int) -> None:
    err = Terminal()
    with (
        patch.dict(os.environ, open_lab.env, clear=True),
        patch.object(sys, "stdin", Terminal(typed)),
        redirect_stdout(Terminal()),
        redirect_stderr(err),
    ):
        assert output.run("gctl", body, ["account", "add", "vision", "users=daemon"]) == code
    told, _, question = err.getvalue().partition("\n")
    assert told == f"gctl: this shuts out users of the last 30 days: {ME} is in no account"
    assert "+[account.vision]" in question
    assert "? [y/N] " in question
    assert ("[account.vision]" in (open_lab.home / "config.toml").read_text()) == (code == 0)


def test_removal_and_import_that_shut_users_out_must_be_confirmed(open_lab: Shell, tmp_path: Path) -> None:
    changed(open_lab, "account", "add", "vision", f"users={ME}")
    changed(open_lab, "account", "add", "nlp", "users=daemon")
    before = (open_lab.home / "config.toml").read_text()
    wanted = tmp_path / "lab.toml"
    wanted.write_text('[account.nlp]\nusers = ["daemon"]\n')
    for words in (
        ["account", "remove", "vision"],
        ["account", "members", "vision", "add=daemon", f"remove={ME}"],
        ["import", str(wanted)],
    ):
        done = gctl(open_lab, *words)
        assert (done.code, f"{ME} is in no account" in done.err) == (1, True), words
        assert (open_lab.home / "config.toml").read_text() == before


def test_change_that_asks_more_of_a_job_says_so(open_lab: Shell) -> None:
    changed(open_lab, "account", "add", "vision", f"users={ME}")
    done = gctl(open_lab, "account", "add", "nlp", f"users={ME}")
    assert (done.code, done.err) == (0, f"gctl: jobs of {ME} must name an account from now on (-A)\n")
    changed(open_lab, "queue", "add", "fast")
    done = gctl(open_lab, "queue", "modify", "default", "users=daemon")
    assert (done.code, done.err) == (0, f"gctl: jobs of {ME} must name a queue from now on (-q)\n")


def test_user_that_this_machine_does_not_have_is_named(open_lab: Shell) -> None:
    for words in ("account add vision users=no-such-user,{}", "queue add default operators=no-such-user"):
        done = gctl(open_lab, *words.format(ME).split())
        assert (done.code, done.err) == (
            0,
            "gctl: this machine has no user no-such-user; correct the name, or add the user\n",
        )
        (open_lab.home / "config.toml").write_text(OPEN)


def test_reload_config_check_and_doctor_say_whom_the_file_shuts_out(open_lab: Shell) -> None:
    (open_lab.home / "config.toml").write_text(OPEN + '[account.vision]\nusers = ["daemon"]\n')
    sentence = f"the settings shut out users of the last 30 days: {ME} is in no account"
    assert gctl(open_lab, "reload").err == f"gctl: {sentence}\n"
    assert sentence in open_lab.type("gpusched", "config", "check").err
    checks = json.loads(open_lab.type("gpusched", "doctor", "--json").out)["checks"]
    assert next(one for one in checks if one["check"] == "accounts")["text"] == sentence


def test_reload_that_is_refused_takes_the_change_back(lab: Shell) -> None:
    (lab.home / "config.toml").write_text(START + "\n[queue.default]\n")
    changed(lab, "reload")
    before = in_force(lab)
    done = gctl(lab, "queue", "modify", "default", "gpus=64")
    assert done.code == 1
    assert "config.toml is as it was" in done.err
    assert (lab.home / "config.toml").read_text() == START + "\n[queue.default]\n"
    assert in_force(lab) == before


def test_account_with_jobs_is_not_removed_until_they_move(lab: Shell) -> None:
    changed(lab, "account", "modify", "science", "users=*")
    changed(lab, "account", "add", "vision", "users=*")
    job = lab.submit("-A", "vision", "--hold", "--", "true")
    done = gctl(lab, "account", "remove", "vision")
    assert (done.code, done.err.splitlines()[0]) == (1, f"gctl: error: account vision has unfinished jobs: {job}")
    assert "--to NAME" in done.err
    changed(lab, "account", "remove", "vision", "--to", "science")
    assert json.loads(lab.ok("gshow", "--json", job))["jobs"][0]["account"] == "science"
    assert "vision" not in (lab.home / "config.toml").read_text()
    lab.ok("gcancel", job)


def test_children_and_lists_follow_where_an_account_goes(lab: Shell) -> None:
    for words in ("add vision", "add small parent=vision", "add tiny parent=small"):
        changed(lab, "account", *words.split())
    changed(lab, "qos", "add", "night", "accounts=vision,science")
    changed(lab, "account", "remove", "vision", "--to", "science")
    now = in_force(lab)
    assert now["account.small.parent"] == "science"
    assert now["account.tiny.parent"] == "small"
    assert now["qos.night.accounts"] == ("science",)


def test_two_admins_at_once_lose_no_change(lab: Shell) -> None:
    commands = [lab.argv("gctl", "account", "add", f"a{number}") for number in range(6)]
    started = [
        subprocess.Popen(argv, env=lab.env, cwd=lab.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for argv in commands
    ]
    for process in started:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (out, err)
    text = (lab.home / "config.toml").read_text()
    assert text.startswith(START)
    assert all(f"[account.a{number}]" in text for number in range(6))


def test_link_stays_a_link_and_mode_and_mistakes_are_kept(lab: Shell) -> None:
    path, real = lab.home / "config.toml", lab.home / "settings.toml"
    path.rename(real)
    path.symlink_to(real.name)
    real.chmod(0o640)
    try:
        changed(lab, "account", "add", "vision")
        assert path.is_symlink()
        assert real.stat().st_mode & 0o777 == 0o640
        real.write_text(START + "[account.x]\nshares = -1\n")
        done = gctl(lab, "account", "add", "speech")
        assert done.code == 1
        assert "the config file has a mistake already" in done.err
        assert real.read_text() == START + "[account.x]\nshares = -1\n"
    finally:
        path.unlink()
        real.rename(path)


def test_open_editor_is_mentioned(lab: Shell) -> None:
    swap = lab.home / ".config.toml.swp"
    swap.touch()
    try:
        assert "an editor may have" in gctl(lab, "account", "add", "vision").err
    finally:
        swap.unlink()


@pytest.mark.parametrize("step", ["fsync", "replace", "call"])
def test_killed_command_leaves_the_old_file_or_the_new_one(lab: Shell, step: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from gpusched.cli.gctl import body\n"
        "from gpusched.client import DaemonConnection\n"
        "die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "call = DaemonConnection.call\n"
        f"step = {step!r}\n"
        "if step == 'call':\n"
        "    DaemonConnection.call = lambda s, m, p, *a, **k: die() if 'reload' in p else call(s, m, p, *a, **k)\n"
        "else:\n"
        "    setattr(os, step, die)\n"
        "body(['account', 'add', 'vision', 'shares=4'])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=lab.env, cwd=lab.work, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    text = (lab.home / "config.toml").read_text()
    assert text == (START + "\n[account.vision]\nshares = 4\n" if step == "call" else START)
    # The next command finishes what was begun, and clears up.
    done = gctl(lab, "account", "add", "speech")
    assert done.code == 0, done
    assert "account.vision.shares" in in_force(lab) or step != "call"
    assert not list(Path(lab.home).glob(".config*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_read_only_file_is_answered_with_the_patch(lab: Shell) -> None:
    path = lab.home / "config.toml"
    path.chmod(0o444)
    try:
        done = gctl(lab, "account", "add", "vision")
    finally:
        path.chmod(0o644)
    assert done.code == 1
    assert "+[account.vision]" in done.out
    assert "nothing was changed" in done.err


def entries(shell: Shell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gctl(shell, "log", "--json").out)["entries"]
    return found


def test_log_and_undo_read_as_before(lab: Shell) -> None:
    number = entries(lab)[-1]["id"] if entries(lab) else 0
    text = told(
        lab,
        "account add vision shares=4",
        "account modify vision shares=6 parent=science",
        "queue add default max_gpus=2",
        f"undo {number + 1}",
        f"undo {number + 2} --dry-run",
        f"undo {number + 2}",
        f"undo {number + 2}",
        f"undo {number + 4}",
        f"undo {number + 3}",
        f"undo {number + 99}",
        "undo",
        "undo x",
        "log now",
        "log --since never",
        "reload --since 7d",
    )
    # The number in the hint is none of these.
    text = text.replace("for example: gctl undo 17", "for example: gctl undo EXAMPLE")
    for offset in (*range(1, 10), 99):
        text = re.sub(rf"\b(undo|undid|no change) {number + offset}\b", rf"\1 N+{offset}", text)
    compare("setting-undo.txt", text)
    shown = gctl(lab, "log").out.split(f"{number + 1:>4}  ")[1].replace(entries(lab)[-1]["user"], "USER")
    shown = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "WHEN", shown)
    for offset in range(1, 10):
        shown = re.sub(rf"^ {{,3}}{number + offset}  |(?<=undo ){number + offset}\b", f"N+{offset} ", shown, flags=re.M)
    compare("setting-log.txt", shown)
    assert gctl(lab, "log", "--quiet").out.split()[-1] == str(entries(lab)[-1]["id"])


def test_change_of_a_killed_command_or_an_editor_is_recorded_by_the_next_reload(lab: Shell) -> None:
    path = lab.home / "config.toml"
    path.write_text(START.replace("cpus = 8", "cpus = 4"))
    changed(lab, "account", "add", "vision")
    last = entries(lab)[-1]
    assert last["what"] == "gctl account add vision"
    assert [(one["key"], one["before"], one["after"]) for one in last["changes"]] == [
        (["account", "vision"], None, {}),
        (["node", "cpus"], 8, 4),
    ]
    # Both at once are taken back, since both came into force at once.
    changed(lab, "undo", str(last["id"]))
    assert path.read_text() == START
