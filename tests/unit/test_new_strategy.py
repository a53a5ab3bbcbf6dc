"""A placement strategy is a function and a name: the example of docs/contributing.md, in a copy of the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from page_examples import PAGE, ROOT, changed_copy, changes

TITLE = "Add a placement strategy"

PROBE = """
import json
from gpusched.config import load_settings, problems_in
from gpusched.scheduler.planner import decide
from gpusched.testing import job, node, request, snapshot

open("config.toml", "w").write("[placement]\\nstrategy = 'last'\\n")
settings = load_settings("config.toml", {}).settings
open("config.toml", "w").write("[placement]\\nstrategy = 'lost'\\n")
view = snapshot(*(node(f"n{number}", gpus=number) for number in (1, 2, 3)), waiting=[job(1, request=request(gpus=1))])
print(json.dumps({
    "nodes": [one.placement.node for one in decide(view, settings).starts],
    "problem": problems_in("config.toml", {})[0].message,
}))
"""


def test_the_example_takes_three_files() -> None:
    files = ["gpusched/scheduler/strategies/scores.py", "gpusched/model/planner_settings.py"]
    assert list(changes(TITLE)) == files
    assert f"`{Path(__file__).relative_to(ROOT)}`" in PAGE.read_text(encoding="utf-8"), "the third"


def test_a_new_strategy_places_jobs_and_its_name_is_checked(tmp_path: Path) -> None:
    folder = changed_copy(tmp_path, TITLE)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] == ["n3"]
    assert "last" in found["problem"], "the names that may stand there"
