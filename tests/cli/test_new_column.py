"""A column of gq is one line: the example of docs/contributing.md, in a copy of the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_examples import PAGE, ROOT, changed_copy, changes
from shell import Shell

TITLE = "Add a column"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    for folder in ("work", "home"):
        (tmp_path / folder).mkdir()
    made = Shell(tmp_path / "home", tmp_path / "work")
    yield made
    made.type("gpusched", "daemon", "stop")


def test_the_example_takes_one_file_and_its_test() -> None:
    assert list(changes(TITLE)) == ["gpusched/cli/gq.py"]
    assert f"`{Path(__file__).relative_to(ROOT)}`" in PAGE.read_text(encoding="utf-8")


def test_a_new_column_is_asked_for_and_shown(shell: Shell, tmp_path: Path) -> None:
    job_id = shell.submit("-H", "-A", "vision", "--", "true")
    folder = changed_copy(tmp_path / "copy", TITLE)
    code = "from gpusched.cli.gq import main; raise SystemExit(main())"
    environment = {**shell.env, "PYTHONPATH": f"{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()[:2]
    assert head.split()[:4] == ["ID", "NAME", "USER", "ACCOUNT"]
    assert [row.split()[0], row.split()[3]] == [job_id, "vision"]
