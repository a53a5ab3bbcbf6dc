"""The commands that a wheel installs: each is there, starts, and loads no more than it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import gpusched
from gpusched.cli import output

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(gpusched.__file__).parent.parent
PROMPT = "gsub grun gq gcancel gwait glogs gshow ginfo gtop ghist gctl".split()
COMMANDS = [*PROMPT, "gpuschedd", "gpusched"]


def test_the_wheel_installs_every_command_as_our_script() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert built["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-scripts"] == {
        f"scripts/{name}": name for name in COMMANDS
    }
    # An installer would write a console script over the one of the same name.
    assert "scripts" not in built["project"]
    assert sorted(path.name for path in (ROOT / "scripts").iterdir()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_installers_can_set_the_interpreter_of_a_script(command: str) -> None:
    path = ROOT / "scripts" / command
    assert path.read_text().startswith("#!python\n")
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("command", PROMPT)
def test_a_prompt_command_starts_without_importing_regular_expressions(command: str) -> None:
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
sys.argv = [{command!r}, "--version"]
before, leave = set(sys.modules), os._exit

def tell(code):
    print(*set(sys.modules) - before, file=sys.stderr, flush=True)
    leave(code)

os._exit = tell
exec(compile(open({str(ROOT / "scripts" / command)!r}).read(), {command!r}, "exec"), {{}})
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [command, gpusched.__version__])
    loaded = set(done.stderr.split())
    assert {"gpusched.cli.output", f"gpusched.cli.{command}"} <= loaded
    assert "re" not in loaded


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(PROMPT)))
def test_a_server_command_starts(command: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / command, "--help"], capture_output=True, text=True)
    assert (done.returncode, command in done.stdout) == (0, True)


def test_exit_flushes_and_keeps_the_code(tmp_path: Path) -> None:
    code = "from gpusched.cli.output import leave; print('out', end=''); leave(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "out")


def test_exit_reports_lost_output_by_its_code() -> None:
    code = "from gpusched.cli.output import leave; print('out'); leave(0)"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full).returncode == 1


def test_exit_without_streams_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    output.leave(4)
    assert codes == [4]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_pip_installs_every_command_and_each_starts(how: str, tmp_path: Path) -> None:
    """Needs an index for the build backend."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    # What gpusched depends on, not this checkout's gpusched: only the installed one must be found.
    folder = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    (folder / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [venv / "bin" / "pip", "install", "--no-deps", "--disable-pip-version-check"]
    if how == "wheel":
        subprocess.run([venv / "bin" / "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
        (wheel,) = tmp_path.glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert sorted(name.rpartition("/")[2] for name in names if ".data/scripts/" in name) == sorted(COMMANDS)
        assert not any(name.endswith("entry_points.txt") for name in names)
        subprocess.run([*pip, wheel], check=True)
    else:
        subprocess.run([*pip, "-e", ROOT], check=True)
    for command in COMMANDS:
        done = subprocess.run([venv / "bin" / command, "--help"], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, command in done.stdout) == (0, True), done
    where = subprocess.run(
        [venv / "bin" / "python", "-c", "import gpusched; print(gpusched.__file__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    ).stdout
    assert where.startswith(str(venv if how == "wheel" else ROOT))
