"""Requests that clients of release 0.1.0 sent are understood as they were, and today's clients send the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.api.validate import read_changes, read_submission
from gpusched.cli.job_options import gsub_table, read_change
from gpusched.cli.parse import parse
from gpusched.cli.submission import spec_of
from gpusched.model.settings import Settings
from gpusched.sdk.options import changes_of
from gpusched.sdk.options import spec_of as spec_of_python

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "requests_0_1_0.json").read_text(encoding="utf-8")
)
"""What was sent for a line or for keywords, and what the daemon made of it, without what it makes of any request."""


def stated(spec: dict[str, Any]) -> Any:
    """What a request has set in the job, as built-in types."""
    made = msgspec.to_builtins(read_submission(spec, None, Settings(), {}, 0.0).specs[0])
    plain = msgspec.to_builtins(read_submission({"argv": ["true"]}, None, Settings(), {}, 0.0).specs[0])
    # That release kept the booked amounts only, not how they were asked for.
    del made["layout"]
    for part in ("request", "launch", "retry"):
        made[part] = {name: value for name, value in made[part].items() if value != plain[part][name]}
    return as_json({name: value for name, value in made.items() if value != plain[name]})


def as_json(value: object) -> Any:
    return json.loads(json.dumps(msgspec.to_builtins(value)))


@pytest.mark.parametrize("old", [*RECORDED["submitted"], *RECORDED["python"]], ids=lambda old: str(old)[:60])
def test_a_submission_of_the_last_release_makes_the_same_job(old: dict[str, Any]) -> None:
    assert stated(old["spec"]) == old["job"]


@pytest.mark.parametrize("old", [*RECORDED["updated"], *RECORDED["python_updates"]], ids=lambda old: str(old)[:60])
def test_an_update_of_the_last_release_makes_the_same_change(old: dict[str, Any]) -> None:
    assert as_json(read_changes(old["changes"], Settings())) == old["changed"]


@pytest.mark.parametrize("old", RECORDED["submitted"], ids=lambda old: str(old["line"]))
def test_gsub_sends_the_same_request(old: dict[str, Any]) -> None:
    surroundings = ("argv", "script", "script_name", "env", "env_named", "umask", "work_dir")
    fields = spec_of(parse(gsub_table(), shlex.split(old["line"])[1:])[0])
    fields.pop("work_dir", None)
    around = {name: value for name, value in old["spec"].items() if name in surroundings}
    assert stated({**as_json(fields), **around}) == old["job"]
    # Tasks, and memory for each core, are computed by the daemon now.
    also = (*surroundings, "ntasks", "mem_per_cpu_mib", *(["mem_mib"] if "--mem-per-cpu" in old["line"] else []))
    then = {name: value for name, value in old["spec"].items() if name not in also}
    assert {name: value for name, value in as_json(fields).items() if name not in also} == then


@pytest.mark.parametrize("old", RECORDED["updated"], ids=lambda old: str(old["line"]))
def test_gctl_update_sends_the_same_request(old: dict[str, Any]) -> None:
    changes: dict[str, Any] = {}
    for word in shlex.split(old["line"])[3:]:
        changes.update(read_change(*word.split("=", 1)))
    assert as_json(changes) == old["changes"]


def test_python_sends_the_same_request() -> None:
    for old in RECORDED["python"]:
        sent = spec_of_python(old["options"])
        assert {name: as_json(sent[name]) for name in old["spec"] if name not in ("argv", "env")} == {
            name: value for name, value in old["spec"].items() if name not in ("argv", "env")
        }
    for old in RECORDED["python_updates"]:
        assert as_json(changes_of(old["options"])) == old["changes"]
