"""The folders of Slurm's commands: what is written, what it starts, what is left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpusched
from gpusched import entry_points, slurm_commands, slurm_entry
from gpusched.cli import admin

PACKAGE = Path(gpusched.__file__).parent
FAKE = """\
import json, sys
def main():
    json.dump({"argv": sys.argv[1:], "path": sys.path, "name": __name__, "flags": list(sys.flags)}, sys.stdout)
    return 7
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two commands, in place of gpusched."""
    slurm = tmp_path / "lib" / "gpusched" / "addons" / "slurm"
    cli = slurm.parent.parent / "cli"
    for folder in (slurm, cli):
        folder.mkdir(parents=True)
    for folder in (slurm, slurm.parent, cli, cli.parent):
        (folder / "__init__.py").touch()
    (cli / "output.py").write_text("import sys\nleave = sys.exit\n")
    for name in ("squeue", "srun"):
        (slurm / f"{name}.py").write_text(FAKE)
    (slurm / "helper.py").write_text("")
    for name in ("slurm_entry.py", "entry_points.py", "errors.py"):
        shutil.copy(PACKAGE / name, cli.parent)
    brought = {f"slurm.{name}": f"gpusched.addons.slurm.{name}" for name in ("squeue", "srun")}
    (slurm / "__init__.py").write_text(f"ENTRY_POINTS = {brought}\n")
    find = entry_points.where

    def where(point: str) -> str | None:
        kind, _, name = point.partition(".")
        return find(point) if kind != "slurm" else point if (slurm / f"{name}.py").exists() else None

    monkeypatch.setattr(entry_points, "where", where)
    monkeypatch.setattr(slurm_commands, "_PACKAGE", str(slurm.parent.parent))
    return slurm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "bin"
    found.mkdir()
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def typed(path: Path, *words: str, **env: str) -> dict[str, object]:
    done = subprocess.run([path, *words], capture_output=True, text=True, env={**os.environ, **env}, timeout=60)
    assert done.returncode == 7, done.stderr
    return dict(json.loads(done.stdout))


def linked_python(at: Path) -> str:
    """This interpreter under another name: an environment of its own that finds the same standard library."""
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(os.path.realpath(sys.executable))
    return str(at)


OF_RELEASE_0_1 = """\
#!{python} -IS
# One of gpusched's Slurm commands.
import sys
sys.path += {folders!a}
from gpusched.cli.slurm.{name} import main
from gpusched.cli.output import leave
leave(main())
"""


@pytest.mark.parametrize("name", slurm_entry.COMMANDS)
def test_an_executable_of_the_last_release_goes_on_working(folder: Path, name: str) -> None:
    path = folder / name
    folders = slurm_commands.import_folders()
    path.write_text(OF_RELEASE_0_1.format(python=sys.executable, folders=folders, name=name))
    path.chmod(0o755)
    assert slurm_commands.is_ours(str(path))
    old = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    path.write_bytes(slurm_commands.executable_text(name))
    new = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    assert (old.returncode, old.stderr) == (0, "")
    assert old.stdout == new.stdout != ""


class TestWriting:
    def test_writes_a_command_for_each_module_that_exists(self, package: Path, folder: Path) -> None:
        done = slurm_commands.write_commands(str(folder))
        assert done.changed == ("squeue", "srun")
        assert names_in(folder) == ["squeue", "srun"]
        assert all(os.stat(folder / name).st_mode & 0o777 == 0o755 for name in done.changed)

    def test_runs_its_module_with_the_words_and_leaves_with_its_code(self, package: Path, folder: Path) -> None:
        slurm_commands.write_commands(str(folder))
        found = typed(folder / "squeue", "-o", "a b", "")
        assert found["argv"] == ["-o", "a b", ""]
        assert found["name"] == "gpusched.addons.slurm.squeue"

    def test_loads_nothing_from_the_place_or_the_variables_of_the_caller(
        self, package: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slurm_commands.write_commands(str(folder))
        trap = tmp_path / "trap"
        trap.mkdir()
        (trap / "json.py").write_text("raise SystemExit('trapped')\n")
        (folder / "json.py").write_text("raise SystemExit('trapped')\n")
        monkeypatch.chdir(trap)
        env = {"PYTHONPATH": str(trap), "PYTHONHOME": "/nowhere", "PYTHONINSPECT": "1"}
        searched = typed(folder / "squeue", **env)["path"]
        assert isinstance(searched, list)
        assert {str(trap), str(folder), ""} & set(searched) == set()

    def test_starts_an_interpreter_whose_path_is_longer_than_a_first_line_may_be(
        self, package: Path, folder: Path, tmp_path: Path
    ) -> None:
        python = linked_python(tmp_path / ("d" * 100) / ("e" * 100) / "python3")
        assert len(python) > 200
        path = folder / "squeue"
        path.write_bytes(slurm_commands.executable_text("squeue", python))
        path.chmod(0o755)
        assert path.read_bytes().startswith(b"#!/bin/sh\n")
        assert typed(path, "-h", "a b")["argv"] == ["-h", "a b"]

    def test_starts_an_interpreter_with_blanks_and_quotes_in_its_path(
        self, package: Path, folder: Path, tmp_path: Path
    ) -> None:
        python = linked_python(tmp_path / 'it\'s a "$HOME" `x`' / "python3")
        path = folder / "srun"
        path.write_bytes(slurm_commands.executable_text("srun", python))
        path.chmod(0o755)
        assert slurm_commands.is_ours(str(path))
        assert typed(path, "*", "$HOME")["argv"] == ["*", "$HOME"]

    def test_finds_a_package_in_a_folder_whose_name_is_no_text(
        self, package: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff'")
        os.rename(tmp_path / "lib", odd)
        monkeypatch.setattr(slurm_commands, "_PACKAGE", f"{odd}/gpusched")
        slurm_commands.write_commands(str(folder))
        assert typed(folder / "squeue")["argv"] == []

    def test_writes_nothing_twice_and_renews_what_differs(self, package: Path, folder: Path) -> None:
        slurm_commands.write_commands(str(folder))
        before = os.stat(folder / "squeue").st_ino
        assert slurm_commands.write_commands(str(folder)).changed == ()
        assert os.stat(folder / "squeue").st_ino == before
        (folder / "srun").write_bytes((folder / "srun").read_bytes() + b"# older\n")
        assert slurm_commands.write_commands(str(folder)).changed == ("srun",)
        os.chmod(folder / "srun", 0o600)
        assert slurm_commands.write_commands(str(folder)).changed == ("srun",)
        assert os.stat(folder / "srun").st_mode & 0o777 == 0o755

    def test_removes_ours_for_a_command_that_is_gone(self, package: Path, folder: Path) -> None:
        slurm_commands.write_commands(str(folder))
        (package / "srun.py").unlink()
        slurm_commands.write_commands(str(folder))
        assert names_in(folder) == ["squeue"]

    def test_leaves_the_old_command_and_no_draft_when_the_disk_is_full(
        self, package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slurm_commands.write_commands(str(folder))
        old = (folder / "squeue").read_bytes() + b"# older\n"
        (folder / "squeue").write_bytes(old)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(slurm_commands.os, "fchmod", full)
        with pytest.raises(OSError, match="No space"):
            slurm_commands.write_commands(str(folder))
        assert names_in(folder) == ["squeue", "srun"]
        assert (folder / "squeue").read_bytes() == old


class TestOthers:
    def test_a_file_a_link_a_folder_and_a_pipe_are_not_ours(self, package: Path, folder: Path, tmp_path: Path) -> None:
        slurm_commands.write_commands(str(folder))
        other = tmp_path / "other"
        other.mkdir()
        (other / "sbatch").write_text("#!/bin/sh\n")
        (other / "squeue").symlink_to(folder / "squeue")
        (other / "srun").mkdir()
        os.mkfifo(other / "sinfo")
        (other / "sacct").symlink_to("/nowhere")
        assert slurm_commands.foreign_commands(str(other)) == ["sbatch", "squeue", "sinfo", "sacct", "srun"]
        assert slurm_commands.write_commands(str(other)).changed == ()
        assert (other / "sbatch").read_text() == "#!/bin/sh\n"

    def test_finds_a_real_slurm_elsewhere_and_not_ours(self, package: Path, folder: Path, tmp_path: Path) -> None:
        slurm_commands.write_commands(str(folder))
        twin = tmp_path / "twin"
        twin.symlink_to(folder)
        real = tmp_path / "real"
        real.mkdir()
        search = f"{folder}:{twin}::relative:{real}"
        assert slurm_commands.other_slurm("/elsewhere", search) is None
        (real / "squeue").write_text("#!/bin/sh\n")
        assert slurm_commands.other_slurm("/elsewhere", search) is None, "it cannot be executed"
        (real / "squeue").chmod(0o755)
        assert slurm_commands.other_slurm("/elsewhere", search) == str(real / "squeue")
        assert slurm_commands.other_slurm(str(real), search) is None


class TestForJobs:
    def test_makes_a_folder_that_everybody_can_use_whatever_the_umask(self, package: Path, tmp_path: Path) -> None:
        old = os.umask(0o077)
        try:
            assert slurm_commands.write_for_jobs(str(tmp_path / "home" / "slurm" / "bin"), for_others=False) is None
        finally:
            os.umask(old)
        assert os.stat(tmp_path / "home" / "slurm" / "bin").st_mode & 0o777 == 0o755
        assert names_in(tmp_path / "home" / "slurm" / "bin") == ["squeue", "srun"]

    @pytest.mark.parametrize("made", ["file", "link"])
    def test_says_that_something_else_is_in_its_place(self, package: Path, tmp_path: Path, made: str) -> None:
        place = tmp_path / "bin"
        if made == "file":
            place.touch()
        else:
            (tmp_path / "elsewhere").mkdir()
            place.symlink_to(tmp_path / "elsewhere")
        assert str(place) in (slurm_commands.write_for_jobs(str(place), for_others=False) or "")
        assert made == "file" or names_in(tmp_path / "elsewhere") == []

    def test_says_that_path_cannot_hold_a_colon(self, package: Path, tmp_path: Path) -> None:
        assert "colon" in (slurm_commands.write_for_jobs(str(tmp_path / "a:b"), for_others=False) or "")
        assert not (tmp_path / "a:b").exists()

    def test_says_where_others_cannot_reach_the_interpreter(self, package: Path, tmp_path: Path) -> None:
        home = tmp_path / "root"
        python = home / "venv" / "python3"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
        for parent in (tmp_path, *tmp_path.parents):
            if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        assert slurm_commands.unreachable_part([str(python)]) is None
        home.chmod(0o700)
        assert slurm_commands.unreachable_part([str(python)]) == f"users cannot enter {home} (mode 700)"
        home.chmod(0o755)
        python.chmod(0o700)
        assert slurm_commands.unreachable_part([str(python)]) == f"users cannot run {python} (mode 700)"


def gpusched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["gpusched", "slurm-commands", *words])
    code = admin.main()
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def _reachable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's own interpreter may be where nobody else comes."""
    if request.cls is TestInstalling:
        monkeypatch.setattr(slurm_commands, "unreachable_part", lambda paths: None)


class TestInstalling:
    def test_installs_says_what_to_add_to_path_and_can_be_repeated(
        self, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = tmp_path / "my bin"
        monkeypatch.setenv("PATH", "/usr/nowhere")
        code, out, err = gpusched(capsys, monkeypatch, "install", str(place))
        assert (code, err) == (0, "")
        assert out == (
            f"wrote 2 commands in {place}: squeue srun\n"
            f"add the folder to your PATH, for example in ~/.bashrc: export PATH=\"$PATH:\"'{place}'\n"
        )
        monkeypatch.setenv("PATH", f"/usr/nowhere:{place}")
        assert gpusched(capsys, monkeypatch, "install", str(place)) == (
            *(0, f"already there: 2 commands in {place}: squeue srun\n"),
            "",
        )
        assert gpusched(capsys, monkeypatch, "install", "-q", str(place)) == (0, "", "")
        document = json.loads(gpusched(capsys, monkeypatch, "install", "--json", str(place))[1])
        assert document == {
            "schema_version": 1,
            "folder": str(place),
            "written": [],
            "unchanged": ["squeue", "srun"],
            "on_path": True,
            "other_slurm": None,
        }

    def test_refuses_a_folder_of_a_real_slurm_and_writes_nothing_there(
        self, package: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "sinfo").write_text("#!/bin/sh\n")
        code, out, err = gpusched(capsys, monkeypatch, "install", str(folder))
        assert (code, out) == (1, "")
        assert err == (
            f"gpusched: error: {folder}/sinfo is not gpusched's; it may belong to a real Slurm\n"
            "gpusched: hint: choose one of your folders: gpusched slurm-commands install ~/.local/bin\n"
        )
        assert names_in(folder) == ["sinfo"]

    def test_warns_of_a_real_slurm_elsewhere(
        self,
        *,
        package: Path,
        folder: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        real = tmp_path / "real"
        real.mkdir()
        (real / "squeue").touch(mode=0o755)
        monkeypatch.setenv("PATH", f"{real}:{folder}")
        code, _, err = gpusched(capsys, monkeypatch, "install", "-q", str(folder))
        assert code == 0
        assert err == (
            f"gpusched: warning: {real}/squeue belongs to another Slurm: the first in PATH is the one that runs\n"
        )

    def test_warns_root_of_an_interpreter_that_nobody_else_can_run(
        self, package: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_commands, "unreachable_part", lambda paths: "users cannot enter /root (mode 700)")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        _, _, err = gpusched(capsys, monkeypatch, "install", "-q", str(folder))
        assert err == "gpusched: warning: only you can use the commands: users cannot enter /root (mode 700)\n"

    def test_names_a_parent_that_is_missing_and_a_file_and_nothing(
        self, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, _, err = gpusched(capsys, monkeypatch, "install", f"{tmp_path}/a/b")
        assert code == 1
        assert err == f"gpusched: error: there is no folder {tmp_path}/a\ngpusched: hint: mkdir -p {tmp_path}/a/b\n"
        (tmp_path / "file").touch()
        code, _, err = gpusched(capsys, monkeypatch, "install", f"{tmp_path}/file")
        assert (code, err.splitlines()[0]) == (2, f"gpusched: error: {tmp_path}/file is not a folder")
        code, _, err = gpusched(capsys, monkeypatch, "uninstall", "")
        assert (code, err.splitlines()[0]) == (2, "gpusched: error: '' cannot be a folder of PATH")

    def test_uninstall_says_that_a_folder_is_not_there(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code, out, err = gpusched(capsys, monkeypatch, "uninstall", str(tmp_path / "typo"))
        assert (code, out) == (2, "")
        assert err.startswith(f"gpusched: error: there is no folder {tmp_path}/typo\n")

    def test_uninstall_removes_ours_alone(
        self, package: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpusched(capsys, monkeypatch, "install", str(folder))
        (folder / "sinfo").write_text("#!/bin/sh\n")
        (folder / "mine").touch()
        assert gpusched(capsys, monkeypatch, "uninstall", str(folder)) == (
            *(0, f"removed 2 commands from {folder}: squeue srun\nleft in place, not written by gpusched: sinfo\n"),
            "",
        )
        assert names_in(folder) == ["mine", "sinfo"]
        (folder / "sinfo").unlink()
        assert gpusched(capsys, monkeypatch, "uninstall", str(folder)) == (0, f"removed 0 commands from {folder}\n", "")
        document = json.loads(gpusched(capsys, monkeypatch, "uninstall", "--json", str(folder))[1])
        assert document == {"schema_version": 1, "folder": str(folder), "removed": [], "not_ours": []}
