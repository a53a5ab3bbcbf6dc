"""Build hook: manual pages for the wheel, which pip puts into share/man/man1 of the environment, where `man` looks.

They are made from the declarations that the commands use, so building needs what declaring them imports: `dependencies`
of the hook in pyproject.toml. Where these are missing (`--no-build-isolation`), the wheel has no manual pages.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the pages of all commands to a wheel, also to an editable one."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the pages into a folder of their own, and name them as shared data."""
        sys.path.insert(0, self.root)
        # Root may build from a clone that is not root's.
        sys.dont_write_bytecode = True
        try:
            from gpusched.cli.admin.man_pages import man_pages
        except ImportError as error:
            self.app.display_warning(f"no manual pages: {error}")
            return
        finally:
            sys.path.remove(self.root)
        self._folder = tempfile.TemporaryDirectory(prefix="gpusched-man-")
        for name, text in man_pages().items():
            path = Path(self._folder.name, name)
            path.write_text(text, encoding="ascii")
            build_data["shared_data"][str(path)] = f"share/man/man1/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
