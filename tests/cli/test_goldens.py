"""What is printed for a scheduler in a known state: tables, documents, refusals. Times and paths are left out."""

from __future__ import annotations

import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest
from shell import Shell, compare

MISTAKES = """\
gsub
gsub --colour red -- true
gsub --retrys 3 -- true
gsub --re -- true
gsub -t soon -- true
gsub -t -- true
gsub --mem lots -- true
gsub --mem lots -t soon -c many -- true
gsub --mem lots --colour red -t soon -- true
gsub -g 1.5 -- true
gsub -g 9 -- true
gsub -g h100:1 -- true
gsub --vram 100G -- true
gsub -c 999 -- true
gsub --signal HUGE@5 -- true
gsub -d afterok:99999 -- true
gsub -d sometime:1 -- true
gsub -N 4-2 -- true
gsub -N 2-4 -- true
gsub -n 3 -N 1 --ntasks-per-node 2 -- true
gsub --cpus-per-gpu 2 -- true
gsub --uid root -- true
gsub -N 4 -g 3 -- true
gsub -N 2 -g 0.5 -- true
gsub -g 4 --gpus-per-node 3 -- true
gsub --gres mps:101 -- true
gsub --gpus-linked -- true
gsub -w lab[1- -- true
gsub -w lab1 -x lab1 -- true
gsub -C a&&b -- true
gsub -L matlab:0 -- true
gsub -L a|b -- true
gsub --res scratch= -- true
gsub --exclusive=me -- true
gsub --reservation course -- true
gsub --deadline soon -- true
gsub --
gsub no-such-script.sh
gsub .
gsub empty.sh
gsub bare.sh
gsub dos.sh
gsub mail.sh
gsub many.sh
gsub --batch nothing
gq abc
gq -j 99999
gq --sort colour
gq -s SLEEPING
gq --why 99999
gcancel
gcancel 99999
gcancel -s HUGE 1
gwait
gwait 99999
gwait --timeout x 1
glogs 1 2
glogs 99999
gshow 99999
ginfo here
ghist --since whenever
ghist --by colour
ghist --usage --efficiency
ghist --usage --limit 3
gctl
gctl polish
gctl hold
gctl hold 99999
gctl update 2 colour=red
gctl update 2 time=soon
gctl update 2 nodes=4 gpus=3
gctl update 2 exclusive=maybe
gctl queue nowhere
gctl queue default max_gpus=4
gctl queue a b
gctl drain nowhere
gctl hold 1 -m why
gpusched polish
"""


@pytest.fixture
def known(own: Shell) -> Shell:
    """Job 1 completed, 2 held, 3 failed."""
    own.ok("gsub", "-W", "--quiet", "-J", "done", "-g", "1", "-t", "1h", "-m", "2G", "-o", "one.out", "--", "true")
    own.submit("-H", "-J", "held", "-g", "0.5", "--retries", "2", "--", "python", "train.py", "--rate", "0.1")
    assert own.type("gsub", "-W", "--quiet", "-J", "failed", "--wrap", "exit 3").code == 3
    return own


def tidy(sh: Shell, text: str) -> str:
    user = pwd.getpwuid(os.geteuid()).pw_name
    text = text.replace(str(sh.work), "<WORK>")
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", "<TIME>", text)
    text = re.sub(r"\b\d+:\d\d\b", "M:SS", text)
    return re.sub(rf"\b{re.escape(user)}\b", "user", text)


def squeezed(text: str) -> str:
    return re.sub(" +", " ", text)


def shape(value: Any, key: str = "") -> Any:
    """The document with its measured values replaced by their kind."""
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in value.items()}
    if key == "lines":
        return "<MEASURED>"
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, float) and (key.endswith("_at") or key in ("at", "total", "age", "priority", "cpu_s")):
        return "<FLOAT>"
    if key in (
        "pid",
        "uid",
        "system_cpu_s",
        "peak_mem_mib",
        "mem_available_mib",
        "cpu_fraction",
        "disk_mib_s",
        "net_mib_s",
        "free_mib",
        *("waited_s", "ran_s", "cpus_used"),
    ):
        return "<MEASURED>"
    return value


def test_error_output_matches_the_goldens(known: Shell) -> None:
    (known.work / "empty.sh").write_text("")
    (known.work / "bare.sh").write_text("true\n")
    (known.work / "dos.sh").write_text("#!/bin/sh\r\ntrue\r\n")
    (known.work / "mail.sh").write_text("#!/bin/sh\n#SBATCH --mail-type=STAGE_OUT\n")
    (known.work / "many.sh").write_text("#!/bin/sh\n#SBATCH -t soon --mem lots\n\n#SBATCH --colour=red\n#GSUB -J a b\n")
    shown = []
    for line in MISTAKES.splitlines():
        command, *words = line.split()
        done = known.type(command, *words)
        assert done.code in (1, 2), line
        assert done.out == "", line
        shown.append(f"$ {line}\n{done.err}-> {done.code}\n")
    compare("errors.txt", "\n".join(shown))


def test_history_output_matches_the_goldens(known: Shell) -> None:
    compare("ghist.txt", squeezed(tidy(known, known.ok("ghist"))))
    compare("ghist.csv", re.sub("<TIME>|M:SS", "T", tidy(known, known.ok("ghist", "--csv"))))


def test_history_has_the_newest_first_and_the_cause_in_words(known: Shell) -> None:
    (known.work / "fail.py").write_text("{}['checkpoint']\n")
    known.type("gsub", "-W", "--quiet", "-J", "lookup", "--", "python3", "fail.py")
    rows = known.ok("ghist").splitlines()
    assert rows[0].split()[-1] == "CAUSE"
    assert [row.split()[1] for row in rows[1:]] == ["lookup", "failed", "done"]
    assert rows[1].endswith(" KeyError: 'checkpoint' (fail.py:1)")
    by_id = [row.split(",")[1] for row in known.ok("ghist", "--csv").splitlines()]
    assert by_id == ["name", "done", "failed", "lookup"], "scripts get the order of ids"


def test_cluster_output_matches_the_goldens(known: Shell) -> None:
    text = re.sub(r"\d+%", "N%", known.ok("ginfo"))
    text = re.sub(r"(N%|-) +\S+\n", r"\1 <AVAILABLE>\n", text, count=1)
    compare("ginfo.txt", squeezed(text))


@pytest.mark.parametrize(
    ("name", "command", "words"),
    [
        ("gq.json", "gq", ["-a"]),
        ("gq-why.json", "gq", ["--why", "2"]),
        ("gshow.json", "gshow", ["3"]),
        ("gwait.json", "gwait", ["1"]),
    ],
)
def test_documents_keep_their_shape(known: Shell, name: str, command: str, words: list[str]) -> None:
    document = json.loads(known.ok(command, "--json", *words))
    text = tidy(known, json.dumps(shape(document), indent=1))
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    compare(name, re.sub(r"[0-9a-f]{32,}", "<SHA>", text) + "\n")
