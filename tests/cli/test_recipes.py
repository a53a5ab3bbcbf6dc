"""The recipes of the documentation: their files written, their blocks run in order, on one scheduler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Shell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "recipes.md"
BLOCK = re.compile(r"(?:^`(?P<file>[\w./-]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
FIELDS = re.compile(r"(?:[\d*/,-]+ +){5}(?P<command>.+)")

TORCHRUN = """\
import os, subprocess, sys
words = sys.argv[1:]
assert words[0] == "--standalone", words
world = int(words[1].removeprefix("--nproc-per-node="))
ranks = [{"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(world)} for n in range(world)]
started = [subprocess.Popen([sys.executable, *words[2:]], env={**os.environ, **rank}) for rank in ranks]
sys.exit(max([one.wait() for one in started]))
"""
SNAKEMAKE = """\
import subprocess, sys, time
assert sys.argv[1:3] == ["--executor", "slurm"] and sys.argv[-2:] == ["--", "all.txt"], sys.argv
assert all(word in open("Snakefile").read() for word in ("--gpus=1", "cat {input} > {output}", "echo part"))

def runs(*lines):
    submit = ["sbatch", "--parsable", "--output=/dev/null", "--partition=main", "--time=10"]
    ids = [subprocess.check_output([*submit, *line], text=True).strip() for line in lines]
    while True:
        rows = subprocess.check_output(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(ids)], text=True)
        states = dict(row.split("|") for row in rows.split("\\n") if row)
        if set(states) == set(ids) and not {"PENDING", "RUNNING", "COMPLETING"} & set(states.values()):
            break
        time.sleep(0.1)
    assert set(states.values()) == {"COMPLETED"}, states

runs(*(["--gpus=1", f"--wrap=echo part {n} > part-{n}.txt"] for n in (1, 2, 3)))
runs(["--wrap=cat part-1.txt part-2.txt part-3.txt > all.txt"])
"""
JUPYTER = """\
import contextlib, io, json, sys
assert sys.argv[1:6] == ["nbconvert", "--to", "notebook", "--execute", "--output"], sys.argv
book = json.load(open(sys.argv[7]))
for cell in book["cells"]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("".join(cell["source"]))
    cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed.getvalue()}]
json.dump(book, open(sys.argv[6], "w"), indent=1)
"""
STAND_INS = {
    "torchrun": (TORCHRUN, "torch"),
    "snakemake": (SNAKEMAKE, "snakemake_executor_plugin_slurm"),
    "jupyter": (JUPYTER, "nbconvert"),
}
"""What takes a program's place unless the program is there, with the module that it needs."""

EXPECTED = {
    "A sweep over hyperparameters": r"\{'lr': 0\.001, 'seed': 0, 'loss': 0\.0\}$",
    "Training on several GPUs with torchrun": r"^rank 0 of 2 on GPU (\S+)\nrank 1 of 2 on GPU (?!\1$)\S+$",
    "A workflow with Snakemake": r"^part 1\npart 2\npart 3$",
    "A notebook, executed as a job": r"GPU \S+",
    "Every night, from cron": r"^evaluated on GPU \S+$",
}


def recipes() -> dict[str, str]:
    """Title -> text of each."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture
def environment(sh: Shell, tmp_path: Path) -> dict[str, str]:
    """The shared scheduler's, with the commands of this checkout and the stand-ins that are needed on PATH."""
    commands = Path(sys.executable).parent
    if not (commands / "gsub").exists():
        pytest.skip(f"gpusched's commands are not installed beside {sys.executable}")
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, (text, module) in STAND_INS.items():
        if shutil.which(name) is None or importlib.util.find_spec(module) is None:
            (stand_ins / name).write_text(f"#!{sys.executable}\n{text}")
            (stand_ins / name).chmod(0o755)
    (tmp_path / "work").mkdir()
    search = os.pathsep.join([str(stand_ins), str(commands), sh.env["PATH"]])
    return {**sh.env, "PATH": search, "HOME": str(tmp_path / "work"), "PYTHONWARNINGS": ""}


def test_the_page_has_the_recipes_that_are_tried() -> None:
    assert list(recipes()) == list(EXPECTED)


@pytest.mark.parametrize("title", EXPECTED)
def test_a_recipe_leads_where_it_says(title: str, environment: dict[str, str]) -> None:
    work = Path(environment["HOME"])

    def typed(shell: list[str], text: str) -> str:
        done = subprocess.run(
            [*shell, "-c", text], cwd=work, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        return done.stdout

    printed = ""
    kinds = set()
    for block in BLOCK.finditer(recipes()[title]):
        kinds.add(block["language"])
        if block["file"]:
            (work / block["file"]).write_text(block["text"])
        elif block["language"] == "bash":
            printed = typed(["bash", "-euo", "pipefail"], block["text"])
        else:
            assert block["language"] == "text", "a block without a name that nothing runs"
            (found,) = FIELDS.findall(block["text"])
            for _ in range(2):
                typed(["sh"], found.replace("\\%", "%"))
    assert "bash" in kinds
    assert re.search(EXPECTED[title], printed.strip(), re.M), printed
    if "cron" in title:
        assert len(list(work.glob("nightly-*.out"))) == 1, "the second submission found the first"
