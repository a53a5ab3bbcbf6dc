"""Build hook: what is made from declarations, so that it is not kept in the repository.

- `gpusched.sdk.async_client` from the source of the client, and `gpusched.sdk.job_options` from the fields of a job; an
  editable wheel has them beside these.
- Manual pages, which pip puts into share/man/man1 of the environment, where `man` looks.

The last two are made from what the commands use, so building needs what declaring them imports: `dependencies` of the
hook in pyproject.toml. Where these are missing (`--no-build-isolation`), the wheel has neither the pages nor the
keywords, which only type checkers read.

With `GPUSCHED_COMPILE=1` a wheel, unless it is editable, also has the planner compiled, see `tools.compiled`. That
takes a C compiler and the headers of Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DerivedFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Adds them to a wheel, also to an editable one."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """What building needs beside what is declared."""
        return ["mypy>=2.4", "setuptools>=77"] if _is_to_compile() else []

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
        if _is_to_compile() and version != "editable":
            self._compile(folder / "compiled", build_data)

    def _compile(self, folder: Path, build_data: dict[str, Any]) -> None:
        """Add the compiled planner, beside the modules that it is made from."""
        sys.path.insert(0, self.root)
        try:
            from tools.compiled import compile_into

            folder.mkdir()
            libraries = compile_into(folder)
        except subprocess.CalledProcessError as error:
            if self._folder is not None:
                self._folder.cleanup()
            hint = "install a C compiler and the headers of Python, or leave GPUSCHED_COMPILE out"
            raise SystemExit(f"{error.stdout}\nthe planner could not be compiled; {hint}") from None
        finally:
            sys.path.remove(self.root)
        for library in libraries:
            build_data["force_include"][str(folder / library)] = str(library)
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()


def _is_to_compile() -> bool:
    """Whether the person who builds asks for the compiled planner."""
    return os.environ.get("GPUSCHED_COMPILE", "") not in ("", "0")
