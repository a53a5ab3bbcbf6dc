"""The pictures in the documentation are of the views as they are now."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tools.pictures import IMAGES, MADE, THEMES, digests, gtop_lines, gtop_svg, page_html, recording_svg, scene

AGAIN = "the pictures are older than the views; draw them again, and look at them: python -m tools.pictures"


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("view", ["gtop", "page", "recording"])
def test_pictures_are_of_the_views_as_they_are(view: str) -> None:
    assert digests(scene())[view] == json.loads(MADE.read_text())[view], AGAIN


@pytest.mark.parametrize("theme", THEMES)
def test_drawings_are_what_the_script_draws_and_read_as_xml(theme: str) -> None:
    kept = scene()
    for name, drawn in (
        ("gtop", gtop_svg(gtop_lines(kept), theme)),
        ("recording", recording_svg(kept["typed"], theme)),
    ):
        assert (IMAGES / f"{name}-{theme}.svg").read_text() == drawn, AGAIN
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (IMAGES / f"page-{theme}.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_show_no_name_of_the_machine_or_person_that_made_them() -> None:
    kept = scene()
    body = page_html(kept).partition("</head>")[2]
    shown = "".join(piece for line in gtop_lines(kept) for piece, _ in line) + body + json.dumps(kept)
    assert "alice" in shown
    assert "lab1" in shown
    assert not re.search(r"\broot\b|/tmp/", shown)
    assert str(IMAGES.parent.parent) not in shown


def test_every_picture_is_shown_by_a_page() -> None:
    root = IMAGES.parent.parent
    pages = "".join(path.read_text() for path in (root / "README.md", *(root / "docs").rglob("*.md")))
    for path in (*IMAGES.glob("*.svg"), *IMAGES.glob("*.png")):
        assert f"images/{path.name}" in pages, path.name
