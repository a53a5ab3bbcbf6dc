"""A limit is one gate: the example of docs/contributing.md, in a copy of the package, holds jobs and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_examples import PAGE, ROOT, changed_copy, changes

TITLE = "Add a limit"

PROBE = """
import json
from gpusched.config import load_settings, problems_in
from gpusched.model.snapshot import Budget
from gpusched.model.value import replace
from gpusched.model.variants import of_specs
from gpusched.scheduler import events
from gpusched.scheduler.planner import Planner, decide
from gpusched.testing import NOW, allocation, job, node, request, snapshot

open("config.toml", "w").write("[limit]\\nrunning = 2\\n")
settings = load_settings("config.toml", {}).settings
open("config.toml", "w").write("[limit]\\nrunning = 0\\n")

def job_of(job_id, **parts):
    return job(job_id, submit_at=NOW - 100 + job_id, time_limit_s=600, request=request(gpus=1), **parts)

def told(plan):
    return [[one.job_id for one in plan.starts], sorted({reason.text for reason in plan.reasons.values()})]

view = snapshot(node(gpus=8), waiting=[job_of(1), job_of(2), job_of(3)])
planner = Planner.from_snapshot(view, replace(settings, limit=replace(settings.limit, running=None)))
planner.state.apply(events.SettingsChanged(settings, planner.state.extensions))
several = job_of(4)
several = replace(several, spec=of_specs([several.spec, replace(several.spec, request=request(gpus=2))], [(), ()]))
full = snapshot(node(gpus=8), running=[allocation(8, "n1", [0]), allocation(9, "n1", [1])], waiting=[several])
spent = Budget("lab", ("lab",), gpu_s=0.0, when_spent="filler")
poor = [job_of(5, account="lab"), job_of(6, account="lab"), job_of(7, account="lab")]
fillers = replace(snapshot(node(gpus=8), waiting=poor), budgets=(spent,))
print(json.dumps({
    "problem": problems_in("config.toml", {})[0].message,
    "alone": told(decide(view, settings)),
    "by_event": told(planner.plan(NOW)),
    "variants": told(decide(full, settings)),
    "fillers": [[one.job_id, one.is_filler] for one in decide(fillers, settings).starts],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the probe saw in the changed copy."""
    folder = changed_copy(tmp_path_factory.mktemp("copy"), TITLE)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_example_takes_three_files() -> None:
    files = ["gpusched/scheduler/running_limit.py", "gpusched/scheduler/rules.py", "gpusched/model/settings.py"]
    assert list(changes(TITLE)) == files
    assert f"`{Path(__file__).relative_to(ROOT)}`" in PAGE.read_text(encoding="utf-8")


def test_a_new_limit_holds_the_jobs_beyond_it_and_says_why(found: Any) -> None:
    text = "at most 2 jobs may run at once, and 2 run"
    assert found["alone"] == [[1, 2], [text]]
    assert found["by_event"] == found["alone"], "the setting came with a reload"


def test_a_new_limit_holds_each_variant_and_fillers(found: Any) -> None:
    starts, (text,) = found["variants"]
    assert starts == []
    assert text.count("at most 2 jobs may run at once, and 2 run") == 2
    assert found["fillers"] == [[5, True], [6, True]]


def test_a_new_limit_is_checked_where_it_is_set(found: Any) -> None:
    assert "limit.running is 0" in found["problem"]
