"""The documentation as a site: `python -m tools.site FOLDER` (needs the extra `docs`, and no network).

The pages of `docs/` are what GitHub shows; the contents, which GitHub has no use for, are added here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

from sphinx.application import Sphinx

from gpusched import __version__


def _howto(names: str) -> tuple[str, ...]:
    return tuple(f"howto/{name}" for name in names.split())


DOCS = Path(__file__).parent.parent / "docs"
CHAPTERS = {
    "Start": ("quickstart", "howto/install", "howto/move-from-slurm", "glossary", "changelog", "contributing"),
    "How to run jobs": _howto(
        "recipes arrays dependencies pipelines retries time-limits environments containers snapshots templates "
        "logs-and-progress foreground notebooks training-on-several-nodes"
    ),
    "How to get the right GPU": _howto(
        "share-a-gpu variants linked-gpus idle-gpus amd-gpus foreign-processes isolation mend-a-gpu"
    ),
    "How to see what happens": _howto("watch web why-and-when alerts metrics energy who-used-how-much agents"),
    "How to share a server": _howto(
        "access accounts budgets limit-a-user queues presets preemption reservations change-settings "
        "prolog-and-epilog plugins recover backup-and-history upgrade"
    ),
    "How to use more machines": _howto("several-machines move-to-a-cluster hand-over-to-slurm slurm-commands"),
    "How to simulate": _howto("simulate"),
    "Reference": ("reference/*",),
    "Explanation": ("explanation/*",),
    "Decisions": ("decisions/*",),
}
_SETTINGS = {
    "project": "gpusched",
    "release": __version__,
    "html_title": f"gpusched {__version__}",
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "html_theme": "furo",
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "html_extra_path": [str(DOCS / "reference" / "openapi.json"), str(DOCS / "reference" / "grafana-dashboard.json")],
}


def contents(pages: set[str]) -> str:
    """The chapters as Sphinx's tables of contents, each page in the first chapter that names it."""
    text, left = "", set(pages) - {"index"}
    for chapter, patterns in CHAPTERS.items():
        # In the order of the patterns: what is asked for most comes first.
        found = [page for pattern in patterns for page in sorted(left) if Path(page).match(pattern)]
        left -= set(found)
        text += f"\n```{{toctree}}\n:caption: {chapter}\n:hidden:\n:maxdepth: 1\n\n" + "\n".join(found) + "\n```\n"
    return text


def build(folder: Path) -> int:
    """Build the site; returns Sphinx's exit code. Any warning, as of a link to nowhere, is a failure."""
    with TemporaryDirectory() as scratch:
        app = Sphinx(
            str(DOCS),
            None,
            str(folder),
            scratch,
            "html",
            confoverrides=_SETTINGS,
            status=None,
            warningiserror=True,
        )

        def add_contents(_: Sphinx, page: str, source: list[str]) -> None:
            if page == "index":
                source[0] += contents(set(app.env.found_docs))

        app.connect("source-read", add_contents)
        app.build(force_all=True)
        # Pages name pictures for dark screens in HTML, of which Sphinx copies no files.
        for picture in (*DOCS.glob("images/*.svg"), *DOCS.glob("images/*.png")):
            (folder / "images").mkdir(exist_ok=True)
            copy(picture, folder / "images")
        return int(app.statuscode)


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
