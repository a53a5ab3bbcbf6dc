"""The points at which add-ons serve the core: every one leads somewhere, and is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpusched
from gpusched import entry_points
from gpusched.errors import NotReady

ROOT = Path(gpusched.__file__).parent
POINTS = entry_points._points()


@pytest.mark.parametrize("point", sorted(POINTS))
def test_what_an_add_on_brings_is_there(point: str) -> None:
    assert entry_points.find(point) is not None


def test_every_folder_of_add_ons_brings_something_of_its_own() -> None:
    owners: dict[str, int] = {}
    for folder in (path for path in (ROOT / "addons").iterdir() if (path / "__init__.py").exists()):
        brought = entry_points._brought_by(folder.name)
        assert brought, folder
        assert all(where.startswith(f"gpusched.addons.{folder.name}.") for where in brought.values())
        for point in brought:
            owners[point] = owners.get(point, 0) + 1
    assert owners == dict.fromkeys(POINTS, 1)


def test_the_page_lists_every_point_and_no_other() -> None:
    page = (ROOT.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    section = page.partition("## Add an add-on")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`[^|]+) \|", section, re.M))))
    kinds = {one.partition(".")[0]: one for one in listed if one.endswith(".NAME")}
    assert {kinds.get(point.partition(".")[0], point) for point in POINTS} == listed


def test_a_point_that_nobody_serves_is_none_or_a_sentence() -> None:
    assert entry_points.find("command.nothing") is None
    with pytest.raises(NotReady) as raised:
        entry_points.need("gtop", "no_such_add_on", "gtop")
    assert raised.value.message == "gtop needs the add-on no_such_add_on, which this copy of gpusched does not have"
    assert raised.value.hint.startswith("install gpusched with all of its add-ons: ")
