"""Accounts as typed: every command that names one, what a user may ask of their own, and what an admin is told."""

from __future__ import annotations

import json
import os
import pwd

import pytest
from shell import Shell, compare

USER = pwd.getpwuid(os.geteuid()).pw_name
CONFIG = """
[node]
name = "lab1"
cpus = 8

[account.lab]

[account.vision]
parent = "lab"
users = ["{user}"]

[account.course]
users = "*"

[account.theory]
parent = "lab"
users = ["daemon"]
"""
PIPELINE = '[step.train]\nrun = "true"\n\n[step.test]\nrun = "true"\nneeds = ["train"]\naccount = "theory"\n'


@pytest.fixture
def lab(own: Shell) -> Shell:
    """A scheduler with accounts; its user is a member of vision and course."""
    (own.home / "config.toml").write_text(CONFIG.format(user=USER))
    for name, first in (("sbatch.sh", "#SBATCH -A theory"), ("gsub.sh", "#GSUB --account=theory")):
        (own.work / name).write_text(f"#!/bin/sh\n{first}\ntrue\n")
    (own.work / "lines.txt").write_text("true\nfalse\n")
    (own.work / "steps.toml").write_text(PIPELINE)
    return own


def test_submitting_to_a_foreign_account_is_refused(lab: Shell) -> None:
    held = lab.submit("-H", "--", "true")
    lines = (
        "gsub -A theory -- true",
        "gsub -A lab -- true",
        "gsub -A physics -- true",
        "gsub -A vison -- true",
        "gsub -A theory -a 0-3 -- true",
        "gsub -A theory --batch lines.txt",
        "gsub -A theory --dry-run -- true",
        "gsub sbatch.sh",
        "gsub gsub.sh",
        "gsub --dag steps.toml",
        f"gsub --resubmit {held} -A theory",
        "grun -A theory -- true",
        f"gctl update {held} account=theory",
    )
    shown = []
    for line in lines:
        done = lab.type(*line.split())
        shown.append(f"$ {line}\n{done.out}{done.err}-> {done.code}\n")
    text = "\n".join(shown).replace(f"user {USER} ", "user USER ")
    compare("account-refusals.txt", text)
    (job,) = json.loads(lab.ok("gq", "--json", "-a"))["jobs"]
    assert (job["id"], job["account"]) == (held, "vision")


def test_a_user_asks_which_accounts_they_have(lab: Shell) -> None:
    lab.submit("-A", "course", "-H", "--", "true")
    assert lab.ok("gctl", "account", "--me", "--quiet") == "course\nvision\n"
    told = lab.type("gctl", "account", "--me")
    assert told.err == "gctl: you may submit to: course, vision (default)\n"
    rows = [line.split() for line in told.out.splitlines()]
    assert [row[0] for row in rows[1:]] == ["course", "course", "vision", "vision"]
    assert [row[-1] for row in rows if row[1] != USER] == ["MEMBERS", "*", USER]
    answer = json.loads(lab.ok("gctl", "account", "--me", "--json"))
    assert (answer["user"], answer["own_accounts"], answer["default_account"]) == (USER, ["course", "vision"], "vision")
    assert {row["account"] for row in answer["accounts"]} == {"course", "vision"}


def test_me_is_only_valid_with_the_accounts_table(lab: Shell) -> None:
    done = lab.type("gctl", "queue", "--me")
    assert (done.code, "for gctl queue; it belongs to: hold, release, account" in done.err) == (2, True)


def test_a_user_without_an_account_learns_whom_to_ask(lab: Shell) -> None:
    (lab.home / "config.toml").write_text('[account.theory]\nusers = ["daemon"]\n')
    done = lab.type("gctl", "account")
    assert done.err == "gctl: you are not a member of any account; ask an admin to add you to one\n"
    done = lab.type("gsub", "--", "true")
    assert done.err.splitlines() == [
        f"gsub: error: user {USER} is not a member of any account",
        f"gsub: hint: ask an admin to add {USER} to users of [account.NAME] in the config file",
    ]


def test_config_check_names_closed_accounts_and_unknown_members(lab: Shell) -> None:
    path = lab.home / "config.toml"
    path.write_text('[account.a]\nusers = ["no-such-user"]\ngroups = ["no-such-group"]\n[account.b]\n')
    done = lab.type("gpusched", "config", "check")
    assert (done.code, done.out) == (0, f"{path} is fine\n")
    assert [line.partition(";")[0] for line in done.err.splitlines()] == [
        f"gpusched: warning: file {path}, line 4: account b has no members, so no one can submit to it",
        f"gpusched: warning: file {path}, line 2: account a lists user no-such-user, unknown on this machine",
        f"gpusched: warning: file {path}, line 3: account a lists group no-such-group, unknown on this machine",
    ]
    found = json.loads(lab.ok("gpusched", "config", "check", "--json"))
    assert found["problems"] == []
    assert [one["hint"] for one in found["warnings"]] == [
        'list them, such as users = ["ann"], or open it: users = "*"',
        "add the user, or correct the name: getent passwd NAME",
        "add the group, or correct the name: getent group NAME",
    ]


def test_config_check_reports_open_accounts_of_an_old_config(lab: Shell) -> None:
    path = lab.home / "config.toml"
    path.write_text("[account.a]\nshares = 2\n[account.b]\n")
    done = lab.type("gpusched", "config", "check")
    assert done.code == 0
    assert "line 2: no account lists users or groups, so any user may submit to a and b" in done.err
    checks = {one["check"]: one for one in json.loads(lab.type("gpusched", "doctor", "--json").out)["checks"]}
    assert (checks["accounts"]["ok"], checks["accounts"]["level"]) == (True, "warn")
    assert "so any user may submit to a and b" in checks["accounts"]["text"]
    path.write_text('[account.a]\nusers = "*"\n')
    checks = {one["check"]: one for one in json.loads(lab.type("gpusched", "doctor", "--json").out)["checks"]}
    assert (checks["accounts"]["ok"], checks["accounts"]["text"]) == (True, "1 account, each with members")


def test_a_reload_names_accounts_that_became_closed(lab: Shell) -> None:
    lab.ok("gpusched", "daemon", "start")
    path = lab.home / "config.toml"
    path.write_text(path.read_text().replace('users = ["daemon"]', ""))
    done = lab.type("gctl", "reload")
    assert done.out == "reloaded account.theory\n"
    assert "gctl: account theory has no members, so no one can submit to it; list them" in done.err
