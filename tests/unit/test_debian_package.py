"""The Debian package: an environment made to fit /opt/gpusched, and what is packed around it."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from gpusched.addons.system.man_pages import man_pages
from gpusched.addons.system.system_plan import COMMANDS
from gpusched.cli.options import TABLES
from tools.package import EXTRAS, SCRIPTS, debian_version, pack, refuse_paths, relocate

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = sorted((REPOSITORY / "systemd").glob("*.service"))
EPOCH = 1_790_000_000
NEEDS_DPKG = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb to pack with")
LIBRARY = "lib/python3.11/site-packages"


def environment(root: Path) -> Path:
    """What venv and pip leave behind, in little."""
    home = root / "opt/gpusched"
    about = home / LIBRARY / "gpusched_lab-1.dist-info"
    about.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "include/python3.11").mkdir(parents=True)
    (home / "share/man/man1").mkdir(parents=True)
    for name in (*COMMANDS, "typer"):
        (home / "bin" / name).write_text(f"#!{home}/bin/python\nimport gpusched\n")
        (home / "bin" / name).chmod(0o755)
    for name in ("activate", "Activate.ps1"):
        (home / "bin" / name).write_text(f"VIRTUAL_ENV={home}\n")
    (home / "bin/python3.11").symlink_to("/usr/local/bin/python3.11")
    (home / "pyvenv.cfg").write_text(f"home = /usr/local/bin\ncommand = python -m venv {home}\n")
    (home / LIBRARY / "module.py").write_text("X = 1\n")
    (about / "direct_url.json").write_text(f'{{"url": "file://{root}/gpusched_lab-1.whl"}}')
    rows = ["../../../bin/gsub,sha256=stale,1", "../../../bin/typer,sha256=stale,1", "module.py,sha256=stale,6"]
    rows += ["gpusched_lab-1.dist-info/direct_url.json,sha256=x,9", "gpusched_lab-1.dist-info/RECORD,,"]
    (about / "RECORD").write_text("\n".join(rows) + "\n")
    return home


def packed(folder: Path, name: str) -> Path:
    root = folder / name / "root"
    relocate(environment(root), "3.11")
    return pack(root, folder / name, EPOCH, version="3.11")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("deb"), "first")


@pytest.fixture(scope="module")
def unpacked(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["dpkg-deb", "-R", str(package), str(folder)], check=True)
    return folder


def test_an_environment_is_made_to_fit_its_final_place(tmp_path: Path) -> None:
    home = environment(tmp_path)
    relocate(home, "3.11")
    assert (home / "bin/gsub").read_text().splitlines()[0] == "#!/opt/gpusched/bin/python"
    assert {path.name for path in (home / "bin").iterdir()} == {*COMMANDS, "python", "python3"}
    assert os.readlink(home / "bin/python") == "/usr/bin/python3"
    assert not (home / "include").exists()
    assert not (home / "share/man").exists()
    record = home / LIBRARY / "gpusched_lab-1.dist-info/RECORD"
    rows = {row[0]: row[1:] for row in csv.reader(record.read_text().splitlines())}
    script = (home / "bin/gsub").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(script).digest()).rstrip(b"=").decode()
    assert rows["../../../bin/gsub"] == [f"sha256={digest}", str(len(script))]
    assert set(rows) == {"../../../bin/gsub", "module.py", "gpusched_lab-1.dist-info/RECORD"}
    refuse_paths(tmp_path, [str(tmp_path)])


@pytest.mark.parametrize("kind", ["text", "bytecode", "link"])
def test_a_path_of_the_building_machine_is_refused_with_its_file(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    forbidden = "/srv/build/checkout"
    if kind == "link":
        (root / "left").symlink_to(f"{forbidden}/x")
    else:
        (root / "left").write_bytes(b"\x00\xff" * (kind == "bytecode") + f"{forbidden}/x".encode())
    with pytest.raises(ValueError, match=r"^left names /srv/build/checkout, a path of this machine$"):
        refuse_paths(root, [forbidden])
    refuse_paths(root, ["/srv/build/check", "/srv/other/checkout"])


@pytest.mark.parametrize(
    ("release", "expected"),
    [("1.0", "1.0"), ("1.0rc1", "1.0~rc1"), ("0.2.0a3", "0.2.0~a3"), ("0.2.dev4", "0.2~dev4"), ("1.0.1", "1.0.1")],
)
def test_a_pre_release_is_older_than_its_release(release: str, expected: str) -> None:
    assert debian_version(release) == expected


@NEEDS_DPKG
def test_equal_trees_in_other_folders_give_equal_packages(package: Path, tmp_path: Path) -> None:
    assert packed(tmp_path, "another-folder").read_bytes() == package.read_bytes()


@NEEDS_DPKG
def test_a_package_brings_commands_pages_and_completion(unpacked: Path) -> None:
    for name in COMMANDS:
        assert os.readlink(unpacked / "usr/bin" / name) == f"/opt/gpusched/bin/{name}"
    pages = {path.name for path in (unpacked / "usr/share/man/man1").iterdir()}
    assert pages == {f"{name}.gz" for name in man_pages()}
    share = unpacked / "usr/share"
    for command in (*TABLES, "gpusched"):
        variable = f"_{command.upper()}_COMPLETE"
        assert variable in (share / "bash-completion/completions" / command).read_text()
        assert (share / f"zsh/vendor-completions/_{command}").read_text().startswith(f"#compdef {command}\n")
        assert variable in (share / f"fish/vendor_completions.d/{command}.fish").read_text()
        done = subprocess.run(["bash", "-n", str(share / "bash-completion/completions" / command)], check=False)
        assert done.returncode == 0
    # Nothing that systemd would find: `gpusched system install` writes the units.
    assert list(unpacked.rglob("*.service")) == []
    assert not (unpacked / "etc").exists()


@NEEDS_DPKG
def test_a_package_needs_the_python_that_it_was_built_for(package: Path, unpacked: Path) -> None:
    fields = subprocess.run(["dpkg-deb", "-f", str(package)], capture_output=True, text=True, check=True).stdout
    assert "Depends: python3 (>= 3.11), python3 (<< 3.12), libc6\n" in fields
    sums = dict(reversed(line.split("  ", 1)) for line in (unpacked / "DEBIAN/md5sums").read_text().splitlines())
    files = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file() and not p.is_symlink()}
    assert set(sums) == {name for name in files if not name.startswith("DEBIAN/")}
    assert {path.stat().st_mtime for path in unpacked.rglob("*") if path.is_file() and not path.is_symlink()} == {EPOCH}


@pytest.mark.parametrize("name", ["preinst", "postinst", "prerm", "postrm"])
def test_maintainer_scripts_stop_at_errors_and_start_nothing(name: str) -> None:
    text = (SCRIPTS / name).read_text()
    assert text.startswith("#!/bin/sh\nset -e\n")
    subprocess.run(["sh", "-n", str(SCRIPTS / name)], check=True)
    assert "systemctl" not in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["configure", ""], "nothing is started yet"),
        (["configure", "0.0.9"], "a daemon of the old release goes on until you restart it"),
        (["abort-upgrade", "0.0.9"], ""),
    ],
)
def test_installation_names_the_next_command(arguments: list[str], sentence: str) -> None:
    done = subprocess.run([str(SCRIPTS / "postinst"), *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sentence in done.stdout
    assert ("sudo gpusched system install\n" in done.stdout) == bool(sentence)


def test_units_need_no_extra() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    started = [re.findall(r"^ExecStart=\S*/gpusched (\w+)", unit.read_text(), re.M) for unit in UNITS]
    assert {word for words in started for word in words} & set(extras) == set()
    assert set(EXTRAS.split(",")) <= set(extras)
