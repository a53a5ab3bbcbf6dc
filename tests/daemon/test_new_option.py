"""An option is one field: the example of docs/contributing.md, applied to a copy of the package, arrives everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from page_examples import PAGE, ROOT, changed_copy, changes

TITLE = "Add an option"

PROBE = """
import json
from gpusched.api.routes import ROUTES
from gpusched.api.openapi import build
from gpusched.api.schema import SPEC_FIELDS, check_fields
from gpusched.cli.job_options import grun_table, gsub_table
from gpusched.cli.parse import parse
from gpusched.cli.submission import directives
from gpusched.cli.job_options import read_change
from gpusched.errors import UsageError
from gpusched.sdk.options import changes_of, spec_of
from tools.reference import pages

def refusal(read):
    try:
        return read()
    except UsageError as error:
        return error.message

schemas = build(ROUTES)["components"]["schemas"]
found = pages()
print(json.dumps({
    "typed": [parse(table(), ["--seed", "7"])[0] for table in (gsub_table, grun_table)],
    "script": directives(gsub_table(), b"#!/bin/sh\\n#GSUB --seed=7\\n#SBATCH -c 1\\ntrue\\n", "x.sh"),
    "update": [read_change("seed", text) for text in ("8", "")],
    "python": [spec_of({"seed": 7})["seed"], changes_of({"seed": 8})],
    "mistyped": refusal(lambda: parse(gsub_table(), ["--seed", "1000000"])),
    "refused": [refusal(lambda: check_fields({"seed": value}, SPEC_FIELDS)) for value in (-1, 1.5)],
    "openapi": [schemas[name]["properties"]["seed"] for name in ("Spec", "Changes")],
    "pages": sorted(name for name, text in found.items() if "GPUSCHED_SEED" in text or "Seed of the job" in text),
    "keyword": "    seed: int" in found["../../gpusched/sdk/job_options.py"],
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a copy of the package with the option of the example."""
    return changed_copy(tmp_path_factory.mktemp("option") / "copy", TITLE)


def run(copy: Path, daemon: Daemon, *words: str) -> str:
    """What a command of the copy prints."""
    if words[0] == "-c":
        command = [sys.executable, *words]
    else:
        code = f"from gpusched.cli.{words[0]} import main; raise SystemExit(main())"
        command = [sys.executable, "-c", code, *words[1:]]
    done = subprocess.run(command, cwd=copy, env=daemon.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def daemon(copy: Path, make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """A daemon of the copy."""
    monkeypatch.chdir(copy)  # python -m looks there first
    made = make_daemon(start=False)
    made.env["PYTHONPATH"] = f"{copy}:{ROOT}"
    made.start()
    return made


def test_the_example_takes_three_files() -> None:
    assert list(changes(TITLE)) == ["gpusched/model/spec.py", "gpusched/daemon/launch/environment.py"]
    assert f"`{Path(__file__).relative_to(ROOT)}`" in PAGE.read_text(encoding="utf-8"), "the third"


@pytest.mark.nightly
def test_a_new_option_reaches_every_interface_from_its_field(copy: Path, daemon: Daemon) -> None:
    found: Any = json.loads(run(copy, daemon, "-c", PROBE))
    assert found["typed"] == [{"seed": 7}, {"seed": 7}]
    assert found["script"] == {"seed": 7, "cpus": 1.0}
    assert found["update"] == [{"seed": 8}, {"seed": None}]
    assert found["python"] == [7, {"seed": 8}]
    assert found["mistyped"] == "--seed: 1000000 is out of range; it must be from 0 to 999999"
    assert found["refused"] == ["seed is -1; it must be at least 0", "seed is 1.5; it must be a whole number"]
    schema = {"type": ["integer", "null"], "minimum": 0, "maximum": 999999}
    assert found["openapi"] == [{**schema, "description": "Seed of the job's random numbers."}] * 2
    assert found["pages"] == ["../../gpusched/sdk/job_options.py", "cli.md", "openapi.json"]
    assert found["keyword"]


def test_a_new_option_is_stored_updated_shown_and_read(copy: Path, daemon: Daemon) -> None:
    script = copy / "job.sh"
    script.write_text("#!/bin/sh\n#GSUB --seed=7 -c 0 -H\necho seed $GPUSCHED_SEED\n")
    python = f"import gpusched; print(gpusched.Client().submit(script={str(script)!r}, hold=True, cpus=0, seed=9).id)"
    ids = [
        run(copy, daemon, "gsub", "--parsable", str(script)).strip(),
        run(copy, daemon, "gsub", "--parsable", "--seed=8", str(script)).strip(),
        run(copy, daemon, "-c", python).strip(),
    ]
    run(copy, daemon, "gctl", "update", ids[1], "seed=10")
    # What is stored outlives the daemon.
    daemon.kill()
    daemon.start()
    assert [seed(copy, daemon, job_id) for job_id in ids] == [7, 10, 9]
    run(copy, daemon, "gctl", "release", *ids)
    run(copy, daemon, "gwait", *ids)
    assert [run(copy, daemon, "glogs", "--no-prefix", job_id) for job_id in ids] == [
        "seed 7\n",
        "seed 10\n",
        "seed 9\n",
    ]


def seed(copy: Path, daemon: Daemon, job_id: str) -> int | None:
    """As gshow --json has it."""
    (job,) = json.loads(run(copy, daemon, "gshow", "--json", job_id))["jobs"]
    found: int | None = job["spec"]["seed"]
    return found
