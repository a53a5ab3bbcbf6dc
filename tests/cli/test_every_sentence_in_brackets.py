"""Rewording every sentence changes nothing: a build in which each is in brackets acts and answers like the real one."""

from __future__ import annotations

import ast
import compileall
import getpass
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from people import ANN, BOB, NEEDS_ROOT, SystemDaemon
from shell import Result, Shell, stopped
from support import copy_package, wait_until

import gpusched

PACKAGE = Path(gpusched.__file__).parent
SLURM = ("sbatch", "squeue", "srun", "scancel", "sacct", "scontrol", "sinfo")
SENTENCES = {"JobEvent": 3, "Reason": 1, "DrainEntry": 0}
"""Calls with a sentence among their arguments, and at which place."""
IN_BRACKETS = """
def bracketed(text):
    if not isinstance(text, str) or not text or (text.startswith("[") and text.endswith("]")):
        return text
    return f"[{text}]"
"""
BY_HAND = {
    "errors.py": (
        "        super().__init__(message)\n        self.message = message\n",
        "        message, hint = bracketed(message), bracketed(hint)\n"
        "        super().__init__(message)\n        self.message = message\n",
    ),
}
SETTINGS = f"""\
[node]
name = "lab1"
cpus = 8
mem_mib = 65536
[default]
queue = "main"
[queue.main]
[queue.night]
max_time_s = 600
[account.physics]
users = ["{getpass.getuser()}"]
"""
GPUS = json.dumps({"gpus": [{"vram": "24GiB"}] * 2})
IN_A_JOB = """
for words in "sbatch -p nowhere job.sh" "scancel 99" "scontrol hold 5" "srun --nodes=9 true" "srun false" \\
  "squeue -h -j 2 -o %T,%r" "sacct -n -P -j 6 -o JobID,State"; do
  $words </dev/null; echo "exit code $?"
done 2>&1
"""
TYPED = """
gsub -g 9 --wrap true
gsub --json -g 9 --wrap true
gsub -q nowhere --wrap true
gsub -q night -t 2h --wrap true
gsub -d afterok:99 --wrap true
gq
gq --long
gq --json
gq -o %i,%T,%r
gq --why 2
gq --why 3
gq --why --json 4
gshow 1
gshow 5
gshow --json 6
gshow 99
gwait 5
gwait 6
gwait 99
glogs 2
gcancel 99
gcancel 5
gctl hold 1
gctl hold 5
gctl release 2
gctl suspend 2
gctl requeue 2
gctl update 5 time=5m
gctl drain lab1 -m fan
ginfo
ginfo --json
gctl undrain lab1
sbatch -p nowhere --wrap true
sbatch --gres=gpu:9 --wrap true
sbatch -d afterok:99 --wrap true
sbatch -p night -t 120 --wrap true
squeue -o %i,%T,%r,%R
squeue --start
scancel 5
scancel 99
scontrol show job 2
scontrol hold 5
scontrol release 99
scontrol update JobId=5 TimeLimit=5
sacct -X -P -o JobID,State,ExitCode,Reason
srun -p nowhere true
srun --jobid=5 true
gsub --explain script.sh
glogs -f 7
"""
OF_A_BROKEN_DRIVER = """
ginfo
ginfo --json
gq --why 2
gsub -g 1 --wrap true
"""


class Brackets(ast.NodeTransformer):
    """Puts every sentence that a module makes into brackets."""

    found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        place = SENTENCES.get(name)
        if place is not None and len(node.args) > place:
            node.args[place] = self._wrapped(node.args[place])
        for one in node.keywords:
            if one.arg in ("reason_text", "gpu_error") or (one.arg == "text" and place is not None):
                one.value = self._wrapped(one.value)
        return node

    def _wrapped(self, value: ast.expr) -> ast.expr:
        self.found += 1
        return ast.Call(ast.Name("bracketed", ast.Load()), [value], [])


def put_in_brackets(package: Path) -> int:
    """Rewrite a copy of the package; returns the number of places."""
    (package / "brackets.py").write_text(IN_BRACKETS)
    places = 0
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        before, after = BY_HAND.get(path.relative_to(package).as_posix(), ("", ""))
        assert text.count(before) == 1 or not before, path
        tree = ast.parse(text.replace(before, after) if before else text)
        brackets = Brackets()
        brackets.visit(tree)
        if brackets.found or before:
            places += brackets.found + bool(before)
            future = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
            at = tree.body.index(future[0]) + 1 if future else 1
            tree.body.insert(at, ast.ImportFrom("gpusched.brackets", [ast.alias("bracketed")], 0))
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    return places


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with the package as it is, and with brackets; both compiled, which all interpreters would do anew."""
    plain, brackets = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("brackets")
    for folder in (plain, brackets):
        copy_package(folder)
    assert put_in_brackets(brackets / "gpusched") > 100
    compileall.compile_dir(brackets, quiet=1)
    return plain, brackets


@pytest.fixture(scope="module")
def shells(packages: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, Shell]]:
    """Two users at the same jobs: of the package as it is, and of the one with brackets."""
    made = []
    for package in packages:
        root = tmp_path_factory.mktemp("user")
        for folder in ("home", "work"):
            (root / folder).mkdir()
        (root / "home" / "config.toml").write_text(SETTINGS)
        (root / "work" / "gpus.json").write_text(GPUS)
        (root / "work" / "script.sh").write_text("#!/bin/sh\n#SBATCH -p night --gres=gpu:2\n#SBATCH -t x\n")
        env = {"GPUSCHED_FAKE_GPUS": str(root / "work" / "gpus.json"), "PYTHONPATH": str(package)}
        made.append(Shell(root / "home", root / "work", **env))
    try:
        yield made[0], made[1]
    finally:
        for shell in made:
            # Else the GPUs of the first job are waited for, which nobody can read.
            (shell.work / "gpus.json").write_text(GPUS)
            stopped(shell)


def typed(shell: Shell, line: str) -> Result:
    command, *words = line.split()
    if command not in SLURM:
        return shell.type(command, *words)
    done = subprocess.run(argv_of(line), env=shell.env, cwd=shell.work, capture_output=True, text=True, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


def argv_of(line: str) -> list[str]:
    """What starts this command from the copy of the package that the environment names."""
    command, *words = line.split()
    package = "addons.slurm" if command in SLURM else "cli"
    code = f"import sys; sys.argv[0] = {command!r}; from gpusched.{package}.{command} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *words]


def play(shell: Shell) -> dict[str, Result]:
    """What each command printed, once jobs are in different situations, and when the driver fails at last."""
    shell.submit("-g", "2", "-J", "holder", "--", "sleep", "600")
    shell.submit("-g", "1", "-J", "waits", "--", "true")
    shell.submit("-d", "afterok:1", "-J", "follows", "--", "true")
    shell.submit("--hold", "-J", "held", "--", "true")
    shell.submit("-J", "fails", "--", "false")
    shell.submit("-d", "afterok:1", "-J", "cancelled", "--", "true")
    shell.submit("-a", "0-1", "-J", "array", "--", "false")
    shell.ok("gcancel", "6")
    shell.type("gwait", "5", "6", "7")
    wait_until(lambda: "RUNNING" in shell.ok("gq", "-j", "1", "-o", "%T"), what="job 1 to run")
    found = {line: typed(shell, line) for line in TYPED.strip().splitlines()}
    (shell.work / "job.sh").write_text("#!/bin/sh\n")
    job = shell.submit("-t", "5m", "--wrap", IN_A_JOB)
    shell.type("gwait", job)
    found["a Slurm script"] = shell.type("glogs", job)
    (shell.work / "gpus.json").write_text(json.dumps({"gpus": [{"vram": "24GiB"}] * 2, "init_error": 18}))
    wait_until(lambda: has_no_driver(json.loads(shell.ok("ginfo", "--json"))), what="the driver to fail")
    # The next plan tells the jobs.
    wait_until(
        lambda: json.loads(shell.ok("gq", "2", "--json"))["jobs"][0]["reason"] == "ReqNodeNotAvail", what="a plan"
    )
    return found | {f"without a driver: {line}": typed(shell, line) for line in OF_A_BROKEN_DRIVER.strip().splitlines()}


def has_no_driver(cluster: dict[str, Any]) -> bool:
    return bool(cluster["nodes"][0]["gpu_error"]) and all(gpu["state"] == "unknown" for gpu in cluster["gpus"])


_MEASURED = re.compile(r"^ *GPU \d+ +use .*$", re.MULTILINE)
_VARIES = re.compile(
    # A plan may know earlier runs or not yet.
    r"expected (unknown|\d+:\d\d(:\d\d)?)|turn \d+|\b\d+%|\d+-\d+-\d+[T ]\d+:\d+(:\d+)?|\b\d+:\d\d(:\d\d)?\b|"
    r"\b\d+(\.\d+)? ?(s|ms|min|h|M|G)\b|\d+\.\d+(e-\d+)?|\b1\d{9}\b"
)


def alike(root: Path, text: str) -> str:
    """A text without what differs between two homes, and without brackets."""
    if text.startswith("{"):
        text = json.dumps(without_measurements(json.loads(text)))
    text = _MEASURED.sub("", text).replace(str(root), "ROOT")
    text = " ".join(_VARIES.sub("~", re.sub(r"[\[\]]", "", text)).split())
    return re.sub(r"~( ~)+", "~", text)


def without_measurements(value: object) -> object:
    if isinstance(value, dict):
        left = {
            name: one
            for name, one in value.items()
            if not name.endswith(("_at", "_s", "_sha", "_mib", "pid", "_ticks", "is_busy", "turn", "ratio"))
        }
        return {name: without_measurements(one) for name, one in left.items()}
    # A list in JSON has brackets of its own.
    return dict(enumerate(map(without_measurements, value))) if isinstance(value, list) else value


def test_rewording_every_sentence_changes_no_answer(shells: tuple[Shell, Shell]) -> None:
    with ThreadPoolExecutor(2) as both:
        plain, brackets = both.map(play, shells)
    changed = {}
    for line, one in plain.items():
        other = brackets[line]
        roots = [shell.home.parent for shell in shells]
        before = (one.code, alike(roots[0], one.out), alike(roots[0], one.err))
        after = (other.code, alike(roots[1], other.out), alike(roots[1], other.err))
        if before != after:
            changed[line] = (before, after)
    assert not changed
    in_brackets = [line for line in plain if "[" in brackets[line].out + brackets[line].err]
    assert len(in_brackets) > len(plain) // 2, "few sentences are in brackets"
    assert {one.code for one in plain.values()} >= {0, 1}


# --- several users ---------------------------------------------------------------------------------

SECRET = "hush"
PRIVATE = """\
[access]
private_data = {private}
[default]
queue = "main"
[queue.main]
"""
UNSAFE = '[prolog]\npath = "/tmp/prolog"\n'
"""Everybody can write there, so that the daemon drains the node instead of executing it."""
SEEN = """
gq --long
gq -a --json
gq -o %i,%j,%u,%T,%r
gq --why 2
gq --why 6
gq --why 7
gq --json --why 6
gshow 2
gshow 5
gshow 6
gshow --json 2
gshow --json 6
ghist
gwait 5
gcancel 1
ginfo --json
squeue -o %i,%j,%u,%T,%r,%R
squeue --json
sacct -a -P -o JobID,JobName,User,State,ExitCode,Reason
scontrol show job
"""
AFTER_A_DRAIN = """
gq --long
gq --why 6
gshow 6
ginfo
ginfo --json
squeue -o %i,%j,%u,%T,%r,%R
scontrol show job 6
sinfo -h -o %E
"""


def become(user: str) -> list[str]:
    """What starts a command as this user, who may read Python even where root alone may enter its folder."""
    capability = "+dac_read_search"
    as_user = [f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]
    return ["setpriv", *as_user, f"--inh-caps={capability}", f"--ambient-caps={capability}"]


class LabOfMany(SystemDaemon):
    """A system's daemon of a copy of the package, perhaps with brackets, and commands that users type."""

    is_warm = False

    def __init__(self, private: str, package: Path) -> None:
        super().__init__()
        self.hides_jobs = "jobs" in private
        self.config = 'name = "lab1"\n' + PRIVATE.format(private=private)
        self.configure(self.config)
        self.env["PYTHONPATH"] = str(package)
        # Not where the test is: Python would find the package that is there first.
        self.prefix = ["env", "-C", str(self.home)]

    def typed(self, user: str, line: str) -> Result:
        """What a command of this user prints."""
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": self.env["PYTHONPATH"], "COLUMNS": "120", "HOME": "/tmp"}
        done = subprocess.run(
            [*become(user), *argv_of(line)],
            env={**env, "GPUSCHED_SOCKET": str(self.socket)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def play(self) -> dict[str, Result]:
        """What each of two users is shown of the jobs of both, before and after a fault that a job of one brings."""
        self.start()
        ann, bob = self.person(ANN), self.person(BOB)
        ann.submit("/bin/sleep", "600", name=f"{SECRET}1", gpus=2)
        wait_until(lambda: ann.call("GET", "/v1/jobs/1")["job"]["state"] == "RUNNING", what="job 1 to run")
        ann.submit("/bin/true", name=f"{SECRET}2", gpus=1)
        ann.submit("/bin/true", name=f"{SECRET}3", hold=True)
        ann.submit("/bin/true", name=f"{SECRET}4", dependency="afterok:1")
        ann.submit("/bin/false", name=f"{SECRET}5")
        wait_until(lambda: ann.call("GET", "/v1/jobs/5")["job"]["state"] == "FAILED", what="job 5 to fail")
        bob.submit("/bin/true", name="waits", gpus=2)
        bob.submit("/bin/true", name="follows", dependency="afterok:6")
        night = {"name": "night", "start_at": 4e9, "duration_s": 60, "gpus": 1, "users": [ANN], "ignore_jobs": True}
        self.call("POST", "/v1/reservations", night)
        self.call("POST", "/v1/jobs/cancel", {"ids": ["4"]})
        # Who is first depends on what ann has used by then: almost nothing, until use is counted again.
        wait_until(lambda: self.call("GET", "/v1/jobs/6")["job"]["reason"] == "Resources", what="bob to be first")
        wait_until(lambda: self.call("GET", "/v1/jobs/2")["job"]["reason"] == "Priority", what="ann to be behind")
        found = self._views("before", SEEN)
        self.stop()
        self.configure(self.config + UNSAFE)
        self.start()
        self.person(ANN).submit("/bin/true", name=f"{SECRET}8")
        wait_until(lambda: self.call("GET", "/v1/cluster")["nodes"][0]["drain_cause"], what="a drain by the daemon")
        # After the delay of its retry, it waits for the node like the others.
        for job in (2, 6, 8):
            wait_until(lambda job=job: self.call("GET", f"/v1/jobs/{job}")["job"]["reason"] == "ReqNodeNotAvail")
        return {**found, **self._views("after", AFTER_A_DRAIN)}

    def _views(self, when: str, lines: str) -> dict[str, Result]:
        typed = [(BOB, line) for line in lines.strip().splitlines()]
        typed += [(ANN, line) for line in ("gq --long", "gq --why 2", "gshow 1")]
        return {f"{when}, {user}: {line}": self.typed(user, line) for user, line in typed}


# What hides names alone is also tried, without brackets, in `tests/daemon/test_access.py`.
@pytest.fixture(
    params=[
        pytest.param('["jobs", "names", "usage", "accounts", "reservations"]', id="all"),
        pytest.param('["names"]', id="names"),
    ]
)
def labs(request: pytest.FixtureRequest, packages: tuple[Path, Path]) -> Iterator[tuple[LabOfMany, LabOfMany]]:
    made = [LabOfMany(request.param, package) for package in packages]
    try:
        yield made[0], made[1]
    finally:
        for lab in made:
            lab.close()


@NEEDS_ROOT
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to type commands as other users")
@pytest.mark.nightly
def test_rewording_every_sentence_hides_and_reveals_nothing(labs: tuple[LabOfMany, LabOfMany]) -> None:
    with ThreadPoolExecutor(2) as both:
        plain, brackets = both.map(LabOfMany.play, labs)
    changed = {}
    for line, one in plain.items():
        other = brackets[line]
        before = (one.code, alike(labs[0].home, one.out), alike(labs[0].home, one.err))
        after = (other.code, alike(labs[1].home, other.out), alike(labs[1].home, other.err))
        if before != after:
            changed[line] = (before, after)
    assert not changed
    assert not [line for line, one in plain.items() if "Traceback" in one.err]
    of_bob = {line: one.out + one.err for line, one in brackets.items() if f" {BOB}:" in line}
    assert not [line for line, text in of_bob.items() if SECRET in text]
    assert any(SECRET in one.out for one in brackets.values()), "ann sees her own names"
    shown, hidden = ("another job", "job 1 ") if labs[0].hides_jobs else ("job 1 ", "another job")
    assert shown in of_bob[f"before, {BOB}: gshow 6"]
    assert hidden not in of_bob[f"before, {BOB}: gshow 6"]
    assert sum("[" in text for text in of_bob.values()) > len(of_bob) // 3, "few sentences are in brackets"
