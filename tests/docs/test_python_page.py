"""The examples of the page about Python do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md"

PRINTED = [
    ["COMPLETED 0 42"],
    ["sweep 0", "sweep 0"],
    ["seed 1", "0 0"],
    ["True True"],
    ["1000 GPUs"],
    ["120", "[1.0, 2.0, 3.0]"],
]
"""What the lines begin with that each example prints."""


def test_the_examples_print_their_documented_output(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == len(PRINTED)
    mark = "print('----', flush=True)\n"
    env = {key: text for key, text in os.environ.items() if not key.startswith(("GPUSCHED_", "GSUB_", "SLURM_"))}
    env.update(GPUSCHED_HOME=str(tmp_path / "home"), GPUSCHED_FAKE_GPUS="1x24GiB")
    end = "with gpusched.Client() as client:\n    client.call('POST', '/v1/shutdown', {})\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", mark.join([*blocks, end])],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = [part.splitlines() for part in done.stdout.split("----\n")]
    for lines, wanted in zip(found, PRINTED, strict=False):
        lines = [line for line in lines if line]
        assert len(lines) == len(wanted)
        assert all(line.startswith(text) or text in line for line, text in zip(lines, wanted, strict=True)), lines
