"""The build hook: a wheel brings what is made from declarations, and building asks for all that making it imports."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpusched.addons.system.man_pages import man_pages
from tools import compiled
from tools.async_client import async_client_module
from tools.job_options import keywords_module

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOOK = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]


class App:
    """What a hook tells the person who builds."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


class Interface:
    """Of hatchling's interface, the part that the hook uses."""

    def __init__(self) -> None:
        self.root, self.app = str(ROOT), App()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook over a stand-in for hatchling, which only builds need."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = Interface  # type: ignore[attr-defined]
    parts = interface.__name__.split(".")
    for length in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(".".join(parts[:length])))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DerivedFiles()


def test_every_page_goes_where_man_looks_beside_the_commands(hook: Any) -> None:
    before = list(sys.path)
    data: dict[str, Any] = {"shared_data": {}, "force_include": {}}
    hook.initialize("standard", data)
    pages = {target: Path(source).read_text() for source, target in data["shared_data"].items()}
    assert pages == {f"share/man/man1/{name}": text for name, text in man_pages().items()}
    hook.finalize("standard", data, "x.whl")
    assert not any(Path(source).exists() for source in data["shared_data"])
    assert sys.path == before


MODULES = {
    "gpusched/sdk/async_client.py": async_client_module,
    "gpusched/sdk/job_options.py": keywords_module,
}


def test_a_wheel_has_the_modules_that_are_made(hook: Any) -> None:
    data: dict[str, Any] = {"shared_data": {}, "force_include": {}}
    hook.initialize("standard", data)
    assert {target: Path(source).read_text() for source, target in data["force_include"].items()} == {
        name: make() for name, make in MODULES.items()
    }
    assert not any(Path(source).is_relative_to(ROOT) for source in data["force_include"])
    hook.finalize("standard", data, "x.whl")


def test_an_editable_wheel_has_them_in_the_clone(hook: Any, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "gpusched" / "sdk", tmp_path / "gpusched" / "sdk", ignore=shutil.ignore_patterns("__py*"))
    for name in MODULES:
        (tmp_path / name).unlink()
    hook.root = str(tmp_path)
    data: dict[str, Any] = {"shared_data": {}, "force_include": {}}
    hook.initialize("editable", data)
    hook.finalize("editable", data, "x.whl")
    assert {name: (tmp_path / name).read_text() for name in MODULES} == {name: make() for name, make in MODULES.items()}
    assert data["force_include"] == {}


def test_without_what_pages_need_the_wheel_has_none_and_says_so(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpusched.addons.system.man_pages", None)
    data: dict[str, Any] = {"shared_data": {}, "force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "x.whl")
    assert data["shared_data"] == {}
    assert list(data["force_include"].values()) == ["gpusched/sdk/async_client.py"]
    (said,) = hook.app.warnings
    assert said.startswith("no manual pages, and no types of keywords: ")


LIBRARIES = ["gpusched__mypyc.so", "gpusched/scheduler/planner.so"]


def fake_libraries(folder: Path) -> list[Path]:
    for name in LIBRARIES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"ELF")
    return [Path(name) for name in LIBRARIES]


@pytest.mark.parametrize(
    ("asked", "version", "made"),
    [("1", "standard", LIBRARIES), ("1", "editable", []), ("0", "standard", []), ("", "standard", [])],
)
def test_the_planner_is_compiled_for_who_asks_and_never_where_edits_count(
    hook: Any, monkeypatch: pytest.MonkeyPatch, asked: str, version: str, made: list[str]
) -> None:
    monkeypatch.setenv("GPUSCHED_COMPILE", asked)
    monkeypatch.setattr(compiled, "compile_into", fake_libraries)
    data: dict[str, Any] = {"shared_data": {}, "force_include": {}, "pure_python": True}
    hook.initialize(version, data)
    assert [name for name in data["force_include"].values() if name not in MODULES] == made
    assert (data["pure_python"], data.get("infer_tag", False)) == (not made, bool(made))
    assert [_plain(one) for one in hook.dependencies()] == (["mypy", "setuptools"] if asked == "1" else [])
    hook.finalize(version, data, "x.whl")


def test_who_asks_for_what_cannot_be_compiled_is_told_why(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> list[Path]:
        raise subprocess.CalledProcessError(1, "cc", "cc: not found")

    monkeypatch.setenv("GPUSCHED_COMPILE", "1")
    monkeypatch.setattr(compiled, "compile_into", fail)
    with pytest.raises(SystemExit, match=r"(?s)cc: not found.*install a C compiler and the headers of Python"):
        hook.initialize("standard", {"shared_data": {}, "force_include": {}})


def test_hook_asks_for_all_that_making_the_pages_imports() -> None:
    code = (
        "import json, sys\nfrom gpusched.addons.system.man_pages import man_pages\nman_pages()\n"
        "from tools.job_options import keywords_module\nkeywords_module()\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    owners = metadata.packages_distributions()
    imported = {_plain(owners[name][0]) for name in json.loads(done.stdout) if name in owners} - {"gpusched-lab"}
    asked: set[str] = set()
    todo = [_plain(one) for one in HOOK["dependencies"]]
    while todo:
        name = todo.pop()
        if name not in asked:
            asked.add(name)
            try:
                todo += [_plain(one) for one in metadata.requires(name) or () if "extra ==" not in one]
            except metadata.PackageNotFoundError:
                continue  # of another Python or system
    # What the interpreter itself loads at its start is no need of the pages.
    started = {"setuptools", "distutils-precedence", "coverage", "pip"}
    assert "typer" in imported
    assert imported - asked - started == set()


def _plain(requirement: str) -> str:
    return re.split(r"[\s<>=;~!\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")
