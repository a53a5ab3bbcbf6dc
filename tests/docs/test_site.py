"""The pages as a site: every link leads somewhere, and a browser asks no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"|url\((https?:[^)]+)\)"""
)


@pytest.mark.nightly
def test_the_pages_are_built_without_warnings_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.site", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert {
        str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")
    } <= pages
    index = (tmp_path / "index.html").read_text()
    assert all(f'href="{page}"' in index for page in pages - {"index.html", "genindex.html", "search.html"})
    loaded = {next(filter(None, found)) for page in pages for found in LOADED.findall((tmp_path / page).read_text())}
    assert loaded
    pictures = re.findall(r'<(?:img|source)\b[^>]*(?:src|srcset)="(images/[^"]+)"', index)
    assert pictures
    assert [picture for picture in pictures if not (tmp_path / picture).is_file()] == []
    assert [address for address in loaded if address.startswith(("http:", "https:", "//"))] == []
