"""Until when others may start ahead of a job or delay it is in `gq --why` alone: lists say when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpusched
from gpusched.cli import forecast

PACKAGE = Path(gpusched.__file__).parent


@pytest.mark.parametrize("view", ["board", "top", "web"])
def test_views_of_many_jobs_read_no_bound(view: str) -> None:
    files = [one for one in (PACKAGE / "addons" / view).rglob("*") if one.suffix in (".py", ".html", ".js")]
    assert files
    names = (*forecast.BOUNDS, "bound_lines")
    assert not [(file.name, name) for file in files for name in names if name in file.read_text(encoding="utf-8")]
