"""The quickstart, typed as it is printed, on two simulated GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from shell import Shell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_quickstart_runs_as_printed(own: Shell) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 4
    shown = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", block],
            cwd=own.work,
            env={**own.env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{own.env['PATH']}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        shown.append(done.stdout)
    first, script, scripted, pending = shown
    assert "I may use GPU " in first
    assert "epoch 3 of 3" in script
    assert (own.work / "logs" / "train-2.out").exists()
    assert "it worked" in scripted
    assert re.search(r"^job \d+ is PENDING \(Resources\): needs 1 GPU, none of 2 free; ", pending, re.MULTILINE)
