"""A setting is one field: a copy of the package with one more field reads, checks, shows, reloads and documents it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import copy_package

ROOT = Path(__file__).resolve().parents[2]
FIELD = '''    spare_s: Annotated[float, Range(0, 60), AT_START] = 4.0
    """Throw-away setting of a test, in seconds."""
'''
BEFORE = "    poll_s: Annotated"

PROBE = """
import json
from gpusched.config import SETTINGS, load_settings, problems_in
from gpusched.daemon.reload import reread
from gpusched.model.commands import Caller, Reload
from tools.reference import settings_page
from gpusched.model.settings import Settings

def loaded(text):
    open("config.toml", "w").write(text)
    return load_settings("config.toml", {})

right = loaded("[daemon]\\nspare_s = 7\\n")
reloaded = reread(Reload(Caller(0, "root")), Settings(), lambda: right, lambda settings: ())
open("config.toml", "w").write("[daemon]\\nspare_s = 61\\nspares_s = 3\\n")
print(json.dumps({
    "value": right.settings.daemon.spare_s,
    "shown": [row for row in right.values() if row[0] == "daemon.spare_s"],
    "problems": [[one.message, one.hint] for one in problems_in("config.toml", {})],
    "reload": reloaded.answer(),
    "after_reload": reloaded.settings.daemon.spare_s,
    "page": [line for line in settings_page().splitlines() if "spare_s" in line],
}))
"""


def test_a_new_setting_needs_only_its_field(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found["value"] == 7.0
    assert found["shown"] == [["daemon.spare_s", 7.0, "file config.toml, line 2"]]
    wrong, unknown = found["problems"]
    wanted = "daemon.spare_s is 61; it must be a number of at least 0 and at most 60"
    assert wrong[0] == f"file config.toml, line 2: {wanted}"
    assert unknown == ["file config.toml, line 3: unknown setting daemon.spares_s", "did you mean daemon.spare_s?"]
    assert found["reload"] == {"changed": [], "needs_restart": ["daemon.spare_s"]}
    assert found["after_reload"] == 4.0
    (row,) = found["page"]
    assert row == (
        "| `spare_s` | `4` | a number of at least 0 and at most 60 | Throw-away setting of a test, in seconds. "
        "A change needs a restart. |"
    )


def probe(folder: Path) -> Any:
    package = copy_package(folder)
    declared = package / "model" / "settings.py"
    text = declared.read_text()
    assert text.count(BEFORE) == 1
    declared.write_text(text.replace(BEFORE, FIELD + BEFORE))
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
