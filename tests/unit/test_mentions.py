"""Texts rendered for viewers: what a viewer may not know is left out, whatever the sentence says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpusched
from gpusched.access import Audience
from gpusched.api.render import encode
from gpusched.model.commands import Caller
from gpusched.model.mentions import (
    JOB,
    RESERVATION,
    is_name,
    mention_job,
    mention_jobs,
    mention_reservation,
    mentioned_name,
    render,
    render_json,
    render_value,
)
from gpusched.model.settings import AccessSettings, Settings

ANY_TEXT = st.text(st.characters(exclude_characters="\x02\x03\x1f", exclude_categories=("Cs",)))


def knows_even_jobs(kind: str, name: str) -> bool:
    return kind == JOB and int(name.partition("_")[0]) % 2 == 0


@pytest.mark.parametrize(
    ("text", "whole", "shown"),
    [
        (f"waits behind {mention_job('7')}", "waits behind job 7", "waits behind another job"),
        (f"waits behind {mention_job('8')}", "waits behind job 8", "waits behind job 8"),
        (mention_jobs(["8", "7_1"]), "jobs 8 and 7_1", "other jobs"),
        (mention_jobs(["2", "4", "6", "7"]), "jobs 2, 4, 6 and 1 more", "jobs 2, 4, 6 and 1 more"),
        (mention_job("7", "ann"), "job 7 of ann", "another job"),
        (f"{mention_reservation('x')} ends", "reservation x ends", "a reservation ends"),
        ("runs 7 jobs", "runs 7 jobs", "runs 7 jobs"),
        (mention_jobs([]), "", ""),
    ],
)
def test_a_text_is_rendered_for_its_viewer(text: str, whole: str, shown: str) -> None:
    assert render(text) == whole
    assert render(text, knows_even_jobs) == shown


@given(ANY_TEXT, ANY_TEXT, st.integers(1, 99))
def test_a_document_is_rendered_as_each_of_its_texts(before: str, after: str, job: int) -> None:
    text = f"{before}{mention_job(str(job))}{after}"
    for written in (encode([text, {"a": text}]), json.dumps([text, {"a": text}]).encode()):
        for knows in (None, knows_even_jobs):
            expected = render(text, knows)
            assert json.loads(render_json(written, knows)) == [expected, {"a": expected}]
            assert render_value([text, {"a": text}], knows) == [expected, {"a": expected}]


@given(st.integers(0, 80))
def test_a_text_cut_anywhere_gives_nothing_away(length: int) -> None:
    text = f"needs {mention_jobs(['777', '779'], 'ann')}, which {mention_reservation('secret')} keeps"[:length]
    shown = json.loads(render_json(encode([text]), lambda kind, name: False))[0]
    for found in (shown, render(text, lambda kind, name: False)):
        assert not any(word in found for word in ("77", "ann", "secret"))


def test_a_bare_name_is_told_from_a_sentence() -> None:
    assert is_name(mentioned_name(RESERVATION, "x"))
    assert not is_name(f"{mention_job('7')} ends")
    assert not is_name("7")


REFUSALS = frozenset({"NotFound", "Refused", "Refusal", "BrokenInvariant", "_refuse"})
"""Errors about a job that the caller has named and may know."""
FOLDERS = ("scheduler", "lifecycle", "gpu", "daemon/watch")
"""What explains to one user what others do."""
OWN = {
    "scheduler/invariants.py": "problems for the log",
    "lifecycle/fallback.py": "a job and its fallback have one owner",
    "lifecycle/failures.py": "the runs of one job",
    "lifecycle/run_transitions.py": "the id in the other scheduler",
}


def test_explanations_mention_jobs_and_reservations() -> None:
    package = Path(gpusched.__file__).parent
    paths = [path for folder in FOLDERS for path in (package / folder).rglob("*.py")]
    bare = {f"{path.relative_to(package).as_posix()}": lines for path in paths if (lines := bare_names(path))}
    assert {path: lines for path, lines in bare.items() if path not in OWN} == {}


def bare_names(path: Path) -> list[int]:
    """Lines with a sentence that puts a name after "job", and is no refusal."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    refusals = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) in REFUSALS]
    spared = {id(part) for node in refusals for part in ast.walk(node)}
    sentences = [node for node in nodes if isinstance(node, ast.JoinedStr) and id(node) not in spared]
    return [
        node.lineno
        for node in sentences
        for text, value in zip(node.values, node.values[1:], strict=False)
        if isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue)
        if str(text.value).endswith(("job ", "jobs ", "reservation "))
        and not str(text.value).endswith("--reservation ")
    ]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", ["", "x", "-1", "7_x", "9" * 40, "٣", "1;"])
def test_marks_in_the_words_of_a_user_name_no_job(name: str) -> None:
    settings = Settings(access=AccessSettings(private_data=("jobs",)))
    found: list[int] = []
    audience = Audience(Caller(1000, "ann"), settings, lambda job_id: found.append(job_id), {}, {})
    assert audience.text(f"\x02j{name}\x1fsaid\x03") == "another job"
    assert all(job_id == 7 for job_id in found)
