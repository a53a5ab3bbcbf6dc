"""gsub --explain: what becomes of each option of a script; and what is said of them after a submission."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from shell import Shell

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train -A lab    # a comment
#SBATCH --qos high
#SBATCH --hint=nomultithread
#SBATCH --threads-per-core=1
#SBATCH --mail-user=me@example.org
#SBATCH -B 2
#SBATCH --gres=gpu:a100:2,scratch:1
#SBATCH --exclusive=user

#GSUB --nice 5
#SBATCH -t 5 -H
true
#SBATCH --late
"""
TABLE = """\
LINE  OPTION                       BECOMES
   2  --job-name=train             taken
   2  -A lab                       taken; a label while no accounts are configured
   3  --qos high                   taken; a label while no QOS are configured
   4  --hint=nomultithread         no effect: cores are booked by count; the kernel chooses which ones
   5  --threads-per-core=1         no effect: cores are booked by count; the kernel chooses which ones
   6  --mail-user=me@example.org   no effect: no --mail-type says when to send mail
   7  -B 2                         no effect: sockets are not distinguished; a number of them only multiplies \
--gpus-per-socket
   8  --gres=gpu:a100:2,scratch:1  taken as --gpus-per-node a100:2 --res scratch=1
   9  --exclusive=user             taken; no other job runs on the node, not even your own
  11  --nice 5                     taken
  12  -t 5                         taken
  12  -H                           taken
   -  --tmp 1G                     no effect: temporary disk space is not tracked; run df -h /tmp in the job
13 options: 8 taken, 5 without effect
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT)
    return path


def test_each_option_is_listed_with_what_becomes_of_it(sh: Shell, script: Path) -> None:
    before = sh.ok("gq", "-a", "--quiet")
    done = sh.type("gsub", "--explain", "--tmp", "1G", str(script))
    assert (done.code, done.err, done.out) == (0, "", TABLE)
    assert sh.ok("gq", "-a", "--quiet") == before


def test_refused_options_are_listed_and_change_the_code(sh: Shell, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    lines = [
        "--uid=0",
        "--gpus-per-socket=1",
        "--nosuch=2",
        "--gres=gpu:x:y:z",
        "-J two words",
        "-t soon -c 1",
        "-J 'x",
    ]
    path.write_text("\n".join(["#!/bin/sh", *(f"#SBATCH {line}" for line in lines), "true", ""]))
    done = sh.type("gsub", "--explain", "--json", str(path))
    rows = json.loads(done.out)["options"]
    assert done.code == 1
    assert [row["fate"] for row in rows] == [*["refused"] * 4, "taken", "refused", "refused", "taken", "refused"]
    assert [row["line"] for row in rows] == [2, 3, 4, 5, 6, 6, 7, 7, 8]
    texts = [row["text"] for row in rows]
    assert texts[0].startswith("it is not supported: a job runs as the user")
    assert texts[1] == "it needs --sockets-per-node, as in Slurm; or give the GPUs of a node: --gpus-per-node"
    assert texts[2] == "unknown option '--nosuch'"
    assert texts[8] == "the quote ' is not closed"


def test_sockets_multiply_gpus(sh: Shell, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --gpus-per-socket=1 --sockets-per-node=2 -H\ntrue\n")
    assert "--gpus-per-socket=1   taken as --gpus-per-node 2\n" in sh.ok("gsub", "--explain", str(path))
    job_id = sh.ok("gsub", "--quiet", str(path)).strip()
    assert json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0]["gpus_per_node"] == 2
    sh.ok("gcancel", job_id)
    # The command line asks for GPUs in another way.
    other = sh.ok("gsub", "--quiet", "-g", "1", str(path)).strip()
    assert json.loads(sh.ok("gshow", "--json", other))["jobs"][0]["gpus_per_node"] == 1
    sh.ok("gcancel", other)


def test_a_script_without_options_has_none(sh: Shell, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\ntrue\n")
    assert sh.ok("gsub", "--explain", str(path)) == "no options\n"
    assert sh.type("gsub", "--explain", str(tmp_path / "nosuch.sh")).code == 1


def test_options_of_a_script_without_effect_are_one_line_after_the_id(sh: Shell, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --hint=x --switches=1\n#SBATCH --mail-user=me@x.org -H\ntrue\n")
    argv = sh.argv("gsub", "--contiguous", str(path))
    both = subprocess.run(argv, env=sh.env, cwd=sh.work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    first, *notes = both.stdout.splitlines()
    assert first.startswith("Submitted job ")
    assert notes == [
        f"gsub: 3 options have no effect here: gsub --explain {path}",
        "gsub: --contiguous has no effect: there is no cluster network to choose",
    ]
    sh.ok("gcancel", first.split()[-1])


def test_one_option_without_effect_is_named_itself(sh: Shell, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --hint=x -H\ntrue\n")
    done = sh.type("gsub", str(path))
    assert done.err == "gsub: --hint has no effect: cores are booked by count; the kernel chooses which ones\n"
    sh.ok("gcancel", done.out.split()[-1])


def test_a_script_may_say_test_only(sh: Shell, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH --test-only\ntrue\n")
    before = sh.ok("gq", "-a", "--quiet")
    done = sh.type("gsub", str(path))
    assert (done.code, done.err) == (0, "gsub: nothing was submitted: the script has --test-only\n")
    assert sh.ok("gq", "-a", "--quiet") == before
    path.write_text("#!/bin/sh\n#GSUB --dry-run\ntrue\n")
    assert "--dry-run makes no sense in a script" in sh.type("gsub", str(path)).err
