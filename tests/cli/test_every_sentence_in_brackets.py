"""Rewording every sentence changes nothing: a build in which each is in brackets acts and answers like the real one."""

from __future__ import annotations

import ast
import getpass
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shell import Result, Shell, stopped
from support import wait_until

import gpusched

PACKAGE = Path(gpusched.__file__).parent
SLURM = ("sbatch", "squeue", "srun", "scancel", "sacct", "scontrol")
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
            if one.arg == "reason_text" or (one.arg == "text" and place is not None):
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
def shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, Shell]]:
    """Two users at the same jobs: of the package as it is, and of the one with brackets."""
    made = []
    for name in ("plain", "brackets"):
        root = tmp_path_factory.mktemp(name)
        shutil.copytree(PACKAGE, root / "copy" / "gpusched", ignore=shutil.ignore_patterns("__pycache__"))
        for folder in ("home", "work"):
            (root / folder).mkdir()
        (root / "home" / "config.toml").write_text(SETTINGS)
        env = {"GPUSCHED_FAKE_GPUS": "2x24GiB", "PYTHONPATH": str(root / "copy")}
        made.append(Shell(root / "home", root / "work", **env))
    assert put_in_brackets(made[1].home.parent / "copy" / "gpusched") > 100
    try:
        yield made[0], made[1]
    finally:
        for shell in made:
            stopped(shell)


def typed(shell: Shell, line: str) -> Result:
    command, *words = line.split()
    if command not in SLURM:
        return shell.type(command, *words)
    code = f"import sys; sys.argv[0] = {command!r}; from gpusched.addons.slurm.{command} import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, *words]
    done = subprocess.run(argv, env=shell.env, cwd=shell.work, capture_output=True, text=True, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


def play(shell: Shell) -> dict[str, Result]:
    """What each command printed, once six jobs are in six different situations."""
    shell.submit("-g", "2", "-J", "holder", "--", "sleep", "600")
    shell.submit("-g", "1", "-J", "waits", "--", "true")
    shell.submit("-d", "afterok:1", "-J", "follows", "--", "true")
    shell.submit("--hold", "-J", "held", "--", "true")
    shell.submit("-J", "fails", "--", "false")
    shell.submit("-d", "afterok:1", "-J", "cancelled", "--", "true")
    shell.ok("gcancel", "6")
    shell.type("gwait", "5", "6")
    wait_until(lambda: "RUNNING" in shell.ok("gq", "-j", "1", "-o", "%T"), what="job 1 to run")
    found = {line: typed(shell, line) for line in TYPED.strip().splitlines()}
    (shell.work / "job.sh").write_text("#!/bin/sh\n")
    job = shell.submit("-t", "5m", "--wrap", IN_A_JOB)
    shell.type("gwait", job)
    return {**found, "a Slurm script": shell.type("glogs", job)}


_MEASURED = re.compile(r"^ *GPU \d+ +use .*$", re.MULTILINE)
_VARIES = re.compile(
    r"\b\d+%|\d+-\d+-\d+[T ]\d+:\d+(:\d+)?|\b\d+:\d\d(:\d\d)?\b|\b\d+(\.\d+)? ?(s|ms|min|h|M)\b|\d+\.\d+"
)


def alike(shell: Shell, text: str) -> str:
    """A text without what differs between two homes, and without brackets."""
    if text.startswith("{"):
        text = json.dumps(without_measurements(json.loads(text)))
    text = _MEASURED.sub("", text).replace(str(shell.home.parent), "ROOT")
    text = " ".join(_VARIES.sub("~", re.sub(r"[\[\]]", "", text)).split())
    return re.sub(r"~( ~)+", "~", text)


def without_measurements(value: object) -> object:
    if isinstance(value, dict):
        left = {
            name: one
            for name, one in value.items()
            if not name.endswith(("_at", "_s", "_sha", "_mib", "pid", "_ticks", "is_busy"))
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
        before = (one.code, alike(shells[0], one.out), alike(shells[0], one.err))
        after = (other.code, alike(shells[1], other.out), alike(shells[1], other.err))
        if before != after:
            changed[line] = (before, after)
    assert not changed
    in_brackets = [line for line in plain if "[" in brackets[line].out + brackets[line].err]
    assert len(in_brackets) > len(plain) // 2, "few sentences are in brackets"
    assert {one.code for one in plain.values()} >= {0, 1}
