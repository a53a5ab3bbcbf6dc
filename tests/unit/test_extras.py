"""The command that adds an optional library to this copy of gpusched, for each way in which it may be installed."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gpusched import extras
from gpusched.extras import install_command

PYTHON = "/opt/gpu sched/bin/python"
NEEDED = "'mcp<3,>=2'"


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Pretend an environment, with what is there: pip, ensurepip, uv."""

    def of(*there: str, writable: bool = True) -> Path:
        monkeypatch.setattr(sys, "executable", PYTHON)
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setattr(extras, "_packages", lambda: str(tmp_path))
        monkeypatch.setattr(extras, "_requirements", lambda extra: ["mcp<3,>=2"])
        monkeypatch.setattr(os, "access", lambda path, mode: writable)
        monkeypatch.setattr(extras, "find_spec", lambda name: name if name in there else None)
        monkeypatch.setattr(extras.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
        return tmp_path

    return of


RUN = shlex.quote(PYTHON)
VENV = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
CASES = {
    "a user's environment": (("pip",), True, f"{RUN} -m pip install {NEEDED}"),
    "one of root's": (("pip", "uv"), False, f"sudo {RUN} -m pip install {NEEDED}"),
    "the Debian package": (
        ("ensurepip",),
        False,
        f"sudo {RUN} -m ensurepip && sudo {RUN} -m pip install {NEEDED}",
    ),
    "the Debian package without python3-venv": (
        (),
        False,
        f"sudo apt install {VENV} && sudo {RUN} -m ensurepip && sudo {RUN} -m pip install {NEEDED}",
    ),
    "an environment made by uv": (("uv", "ensurepip"), True, f"/usr/bin/uv pip install --python {RUN} {NEEDED}"),
}


@pytest.mark.parametrize(("there", "writable", "wanted"), CASES.values(), ids=CASES)
def test_command_fits_the_environment(at: Any, there: tuple[str, ...], writable: bool, wanted: str) -> None:
    at(*there, writable=writable)
    assert install_command("mcp") == wanted


@pytest.mark.parametrize(("writable", "start"), [(True, "pipx inject"), (False, "sudo pipx inject --global")])
def test_pipx_is_asked_to_inject_it(at: Any, writable: bool, start: str) -> None:
    prefix = at("pip", writable=writable)
    (prefix / "pipx_metadata.json").write_text("{}")
    assert install_command("mcp") == f"{start} {prefix.name} {NEEDED}"


def test_python_of_the_operating_system_needs_its_permission(at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = at("pip", writable=False)
    monkeypatch.setattr(sys, "base_prefix", str(prefix))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(prefix))
    (prefix / "EXTERNALLY-MANAGED").write_text("[externally-managed]\n")
    assert install_command("mcp") == f"sudo {RUN} -m pip install --break-system-packages {NEEDED}"


@pytest.mark.parametrize("extra", ["notify", "plot", "amd", "executor", "mcp", "ray"])
def test_libraries_are_those_that_the_distribution_names(extra: str) -> None:
    command = shlex.split(install_command(extra))
    needed = command[command.index("install") + 1 :]
    listed = [one.partition(";")[0].strip() for one in metadata.requires("gpusched-lab") or () if f"'{extra}'" in one]
    assert needed == listed
    assert needed
    assert not any("gpusched-lab" in word for word in command)


def test_copy_without_metadata_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setattr(metadata, "distribution", missing)
    clone = Path(extras.__file__).parents[1]
    assert shlex.split(install_command("mcp"))[-1] == f"{clone}[mcp]"


def test_no_message_names_the_distribution_that_pip_cannot_find() -> None:
    package = Path(extras.__file__).parent
    named = [path for path in package.rglob("*.py") if "gpusched-lab[" in path.read_text(encoding="utf-8")]
    assert named == [package / "extras.py"]
