"""Reports as files that anybody may have written: what is shown of them, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpusched.addons.simulate import measures
from gpusched.addons.web.reports import MEASURES, MOST_BYTES, Reports, read_report
from gpusched.errors import NotFound, Refused

DOCUMENT: dict[str, Any] = {
    "trace": "lab.swf",
    "notes": ["one row was mended"],
    "policies": [
        {"policy": "fcfs", "jobs": 10, "wait_s": {"mean": 3600.0}, "utilisation": 0.5, "users": [{"name": "ann"}]},
        {"policy": "sjf", "jobs": 10, "wait_s": {"mean": 1800.0}, "utilisation": None},
    ],
}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_measures_stand_side_by_side_and_users_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "nov.json", DOCUMENT)
    found = Reports(str(tmp_path)).read("nov")
    assert (found.trace, found.policies, found.notes) == ("lab.swf", ("fcfs", "sjf"), ("one row was mended",))
    lines = {title: [(one.text, one.part, one.is_best) for one in values] for title, values in found.lines}
    assert lines == {
        "jobs": [("10", 1.0, False), ("10", 1.0, False)],
        # From the least to the most of a line, and the better one is marked.
        "wait, mean": [("1:00:00", 1.0, False), ("30:00", 0.05, True)],
        "utilisation": [("50.0%", 1.0, False), ("n/a", None, False)],
    }
    assert "ann" not in repr(found)


def test_every_measure_is_one_of_the_simulators() -> None:
    known = {one.name: {part for part, _, _ in one.parts} for one in measures.MEASURES}
    for _, (name, *parts), _, _ in MEASURES:
        assert name in known
        assert bool(parts) is bool(known[name])
        assert set(parts) <= known[name]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "{}", '{"policies": []}', '{"policies": {}}', '{"policies": [1, "a"]}'),
        "[" * 100_000,
    ],
)
def test_what_is_no_report_is_said(tmp_path: Path, content: str) -> None:
    write(tmp_path, "x.json", content)
    with pytest.raises(Refused, match="not a report"):
        Reports(str(tmp_path)).read("x")


@pytest.mark.parametrize("value", [True, "7", [], {}, None, 1e300, float("nan"), float("inf")])
def test_odd_values_are_missing(value: Any) -> None:
    found = read_report("x", {"policies": [{"policy": "a", "jobs": value, "utilisation": 0.1}]})
    assert [title for title, _ in found.lines] == ["utilisation"]


@pytest.mark.parametrize("name", ["", ".", "..", "../nov", "a/b", "nov.json", "\0", "x" * 200, "none", "link", "pipe"])
def test_nothing_but_files_of_the_folder_is_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    write(tmp_path, "nov.json", DOCUMENT)
    (folder / "link.json").symlink_to(tmp_path / "nov.json")
    os.mkfifo(folder / "pipe.json")
    with pytest.raises(NotFound):
        Reports(str(folder)).read(name)
    assert Reports(str(folder)).listing() == []


def test_one_too_large_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "big.json", " " * (MOST_BYTES + 1))
    with pytest.raises(Refused, match="larger than 8 MiB"):
        Reports(str(tmp_path)).read("big")


def test_the_newest_comes_first_and_a_missing_folder_is_said(tmp_path: Path) -> None:
    for name, at in (("old.json", 100), ("new.json", 200), ("<b>.json", 300), ("notes.txt", 400)):
        write(tmp_path, name, DOCUMENT)
        os.utime(tmp_path / name, (at, at))
    assert [name for name, _ in Reports(str(tmp_path)).listing()] == ["new", "old"]
    with pytest.raises(Refused, match="cannot be read"):
        Reports(str(tmp_path / "none")).listing()
