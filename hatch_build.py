"""Build hook: what is made from declarations, so that it is not kept in the repository.

- `gpusched.sdk.async_client` from the source of the client, and `gpusched.sdk.job_options` from the fields of a job; an
  editable wheel has them beside these.
- Manual pages, which pip puts into share/man/man1 of the environment, where `man` looks.

The last two are made from what the commands use, so building needs what declaring them imports: `dependencies` of the
hook in pyproject.toml. Where these are missing (`--no-build-isolation`), the wheel has neither the pages nor the
keywords, which only type checkers read.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DerivedFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Adds them to a wheel, also to an editable one."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write them into a folder of their own and name what is in it; modules of an editable wheel into the clone."""
        sys.path.insert(0, self.root)
        # Root may build from a clone that is not root's.
        sys.dont_write_bytecode = True
        pages: dict[str, str] = {}
        try:
            from tools.async_client import async_client_module

            modules = {"gpusched/sdk/async_client.py": async_client_module()}
            from gpusched.addons.system.man_pages import man_pages
            from tools.job_options import keywords_module

            modules["gpusched/sdk/job_options.py"] = keywords_module()
            pages = man_pages()
        except ImportError as error:
            self.app.display_warning(f"no manual pages, and no types of keywords: {error}")
        finally:
            sys.path.remove(self.root)
        self._folder = tempfile.TemporaryDirectory(prefix="gpusched-build-")
        folder = Path(self._folder.name)
        for name, text in pages.items():
            (folder / name).write_text(text, encoding="ascii")
            build_data["shared_data"][str(folder / name)] = f"share/man/man1/{name}"
        for name, text in modules.items():
            is_editable = version == "editable"
            path = Path(self.root, name) if is_editable else folder / Path(name).name
            path.write_text(text, encoding="utf-8")
            if not is_editable:
                build_data["force_include"][str(path)] = name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
