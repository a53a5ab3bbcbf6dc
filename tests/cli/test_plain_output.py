"""What people read is sentences: no structures of the program, no names that they did not type, no empty places."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from shell import Shell

from gpusched.access import user_name
from gpusched.cli import accounts
from gpusched.cli.gshow import describe

ACCOUNT: dict[str, Any] = {
    "account": "lab",
    "user": None,
    "depth": 0,
    "shares": 1,
    "norm_shares": 1.0,
    "gpu_hours": 2.5,
    "core_hours": 1.0,
    "usage_s": 60.0,
    "effective_usage": 1.0,
    "level_fs": None,
    "fairshare": None,
}
HIDDEN = {**ACCOUNT, "gpu_hours": None, "core_hours": None, "usage_s": None, "effective_usage": None}


class Answers:
    """A client that is told one document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        return self._document


def test_private_usage_is_shown_as_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    accounts.print_accounts({"accounts": [ACCOUNT, HIDDEN]}, {})
    _, known, hidden = capsys.readouterr().out.splitlines()
    assert known.split() == ["lab", "1", "1.0000", "2.50", "1.00", "60", "1.0000", "inf"]
    assert hidden.split() == ["lab", "1", "1.0000", "-", "-", "-", "-", "-"]


def test_hidden_fields_of_foreign_jobs_are_omitted(sh: Shell) -> None:
    job_id = sh.submit("--wait", "--", "true")
    (job,) = json.loads(sh.ok("gshow", "--json", job_id))["jobs"]
    for run in job["runs"]:
        run["stdout_path"] = None
    shown = describe({**job, "state": "CANCELLED", "reason": "CancelledByUser", "reason_text": None})
    assert "State:      CANCELLED (CancelledByUser)\n" in shown
    assert "None" not in shown
    instance = {
        "index": 1021,
        "vram_mib": None,
        "vram_used_mib": None,
        "enforcement": "MIG",
        "enforcement_why": "the hardware gives it no more",
    }
    assert "Shares:     GPU 2:1: MIG (the hardware" in describe({**job, "gpus": [instance]})


def test_why_lists_each_unavailable_gpu_on_its_own_line(own: Shell) -> None:
    own.env["GPUSCHED_FAKE_GPUS"] = "5x24GiB"
    own.ok("ginfo")
    assert own.ok("gctl", "drain", "0,1,2,3", "-m", "fan").splitlines() == [
        f"drained GPU {index}" for index in range(4)
    ]
    job = own.submit("-g", "3", "--", "true")
    why = own.ok("gq", "--why", job)
    assert "{" not in why
    for index in range(4):
        assert f"  unavailable: GPU {index} of node lab1: drained: fan\n" in why
    assert own.ok("gctl", "undrain", "0") == "undrained GPU 0\n"
    again = own.type("gctl", "undrain", "0")
    assert (again.code, again.out, again.err) == (0, "", "gctl: GPU 0 was not drained\n")
    assert own.ok("gctl", "drain", "0") == "drained GPU 0\n"
    assert own.ok("gq", "--why", own.submit("--wait", "--", "true")).startswith("job 2 is COMPLETED: exit code 0\n")
    assert f"drained: by {user_name(os.geteuid())}" in own.ok("gq", "--why", job)


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("adopt", "abc"), "'abc' is not a process id", "list processes on GPUs with: ginfo --foreign"),
        (("adopt",), "Missing argument 'PID'", "see: gpusched adopt --help"),
        (("system", "guard", "maybe"), "No such command 'maybe'", "see: gpusched system guard --help"),
        (("sytem",), "No such command 'sytem'. Did you mean 'system'?", "see: gpusched --help"),
    ],
)
def test_an_invalid_word_is_named_with_its_reference(sh: Shell, words: tuple[str, ...], error: str, hint: str) -> None:
    result = sh.type("gpusched", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"gpusched: error: {error}\ngpusched: hint: {hint}\n"


def test_every_json_key_is_in_the_reference(own: Shell) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "scripts.md").read_text()
    known = set(re.findall(r"\w+", page))
    gpus = own.work / "gpus.json"
    stranger = {"pid": 1, "vram": "2GiB", "user": "eva", "name": "python"}
    gpus.write_text(json.dumps({"gpus": [{"vram": "24GiB", "processes": [stranger]}]}))
    own.env["GPUSCHED_FAKE_GPUS"] = str(gpus)
    job_id = own.submit("--hold", "--", "true")
    (job,) = json.loads(own.ok("gq", "--json", job_id))["jobs"]
    why = json.loads(own.ok("gq", "--why", job_id, "--json"))["why"]
    cluster = json.loads(own.ok("ginfo", "--json"))
    (gpu,) = cluster["gpus"]
    (row,) = json.loads(own.ok("ginfo", "--foreign", "--json"))["foreign"]
    drained = json.loads(own.ok("gctl", "drain", "0", "--json"))
    for keys in (job, why, cluster, cluster["nodes"][0]["isolation"], gpu, row, drained):
        assert set(keys) - known == set()


def test_repeated_mistakes_share_one_reference(own: Shell) -> None:
    (own.home / "config.toml").write_text('[gpu]\nvram_over = "kil"\nhot_s = -1\nvram_ovr = 1\n')
    result = own.type("gpusched", "config", "check")
    kinds = [line.split(": ")[1] for line in result.err.splitlines()]
    assert (result.code, kinds) == (2, ["error", "error", "hint", "error", "hint"])
    assert result.err.count("check a file with") == 1


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("true", "x"), "there is no script true", "run a command with: gsub -- true x"),
        (("true",), "there is no script true", "run a command with: gsub -- true"),
        (("-g", "1", "true", "x y"), "there is no script true", "run a command with: gsub -g 1 -- true 'x y'"),
        (
            ("-g1", "a.py", "x"),
            "the script a.py does not begin with #!",
            "run it with: gsub -g1 -- python a.py x; or make its first line #!/usr/bin/env python",
        ),
        (("sh -c true",), "there is no script sh -c true", "run a shell line with: gsub --wrap 'sh -c true'"),
        (("no.sh", "x"), "there is no script no.sh", "run a command with: gsub -- COMMAND [ARGS...]"),
        (("/",), "/ is a folder, not a script", "name a file, for example: gsub train.sh"),
    ],
)
def test_gsub_suggests_the_intended_command(sh: Shell, words: tuple[str, ...], error: str, hint: str) -> None:
    (sh.work / "a.py").write_text("print(1)\n")
    result = sh.type("gsub", *words)
    assert (result.code, result.out) == (1, "")
    assert result.err == f"gsub: error: {error}\ngsub: hint: {hint}\n"


def test_gshow_shows_the_shell_line_of_wrap(sh: Shell) -> None:
    job = sh.submit("--hold", "--wrap", "echo 'a b' |\n  wc -c")
    (shown,) = json.loads(sh.ok("gshow", "--json", job))["jobs"]
    assert shown["command"] == "echo 'a b' |\n  wc -c"
    assert "\nCommand:    echo 'a b' |" in sh.ok("gshow", job)
