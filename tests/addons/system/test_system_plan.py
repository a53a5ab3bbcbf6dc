"""gpusched system install and uninstall below a root of their own, and whom root trusts."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import pytest

from gpusched import __version__
from gpusched.addons.system import command as system
from gpusched.addons.system.man_pages import MARK, man_pages
from gpusched.addons.system.system_plan import (
    COMMANDS,
    InstallTarget,
    PlanStep,
    ServiceState,
    install_plan,
    look,
    source,
    uninstall_plan,
    unit_text,
)
from gpusched.config import load_settings, problems_in
from gpusched.errors import NotReady
from gpusched.model.settings import Settings

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own files")


@pytest.fixture
def site(tmp_path: Path) -> InstallTarget:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name in COMMANDS:
        (folder / name).touch()
    return InstallTarget(str(folder), str(tmp_path / "root"), launcher="systemd", pages=man_pages)


def words(steps: list[PlanStep]) -> list[str]:
    return [f"{step.word} {step.target}" for step in steps]


def carry_out(steps: list[PlanStep]) -> None:
    for step in steps:
        if step.act is not None:
            step.act()


def files_below(root: str) -> set[str]:
    return {str(path)[len(root) :] for path in Path(root).rglob("*") if path.is_file() or path.is_symlink()}


def test_an_applied_plan_leaves_an_empty_one(site: InstallTarget) -> None:
    steps = install_plan(site, ServiceState())
    carry_out(steps)
    assert install_plan(site, ServiceState()) == []
    units = "/etc/systemd/system"
    assert files_below(site.root) == {
        *(f"{units}/gpusched.service", f"{units}/gpusched-metrics.service", f"{units}/gpusched-web.service"),
        "/etc/pam.d/gpusched",
        "/etc/gpusched/config.toml",
        *(f"/usr/local/bin/{name}" for name in COMMANDS),
        *(f"/usr/local/share/man/man1/{name}" for name in man_pages()),
    }
    man = f"{site.root}/usr/local/share/man/man1"
    assert {os.path.dirname(path) if man in path else path for path in map(site.at, files_below(site.root))} == {
        step.target for step in steps
    }


def test_commands_and_pages_of_a_package_are_not_repeated_below_usr_local(site: InstallTarget) -> None:
    packaged = Path(site.root, "usr/bin")
    packaged.mkdir(parents=True)
    (packaged / "gpusched").symlink_to(f"{site.folder}/gpusched")
    carry_out(install_plan(site, ServiceState()))
    assert not Path(site.root, "usr/local").exists()


def test_only_changed_pages_are_written_and_foreign_ones_kept(site: InstallTarget) -> None:
    carry_out(install_plan(site, ServiceState()))
    folder = Path(site.root, "usr/local/share/man/man1")
    (folder / "gq.1").write_text(".TH GQ 1\n")
    (folder / "gsub.1").write_text(MARK + "of an older release\n")
    (folder / "gold.1").write_text(MARK + "of a command that is gone\n")
    kept, written = steps = install_plan(site, ServiceState())
    assert words(steps) == [f"keep {folder}/gq.1", f"write {folder}"]
    assert written.why.startswith("1 manual page:")
    assert kept.act is None
    carry_out(steps)
    assert (folder / "gsub.1").read_text() == man_pages()["gsub.1"]
    carry_out(uninstall_plan(site, ServiceState(), purge=True))
    assert [path.name for path in folder.iterdir()] == ["gq.1"]


def test_removal_leaves_no_folder_of_manual_pages_that_it_made(site: InstallTarget) -> None:
    parent = Path(site.root, "usr/local/share/man")
    parent.mkdir(parents=True)
    carry_out(install_plan(site, ServiceState()))
    assert (parent / "man1").exists()
    carry_out(uninstall_plan(site, ServiceState(), purge=True))
    assert list(parent.iterdir()) == []


def test_written_files_are_world_readable_under_any_umask(site: InstallTarget) -> None:
    before = os.umask(0o077)
    try:
        carry_out(install_plan(site, ServiceState()))
    finally:
        os.umask(before)
    for path in Path(site.root, "etc").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_settings_of_the_administrator_are_never_touched(site: InstallTarget) -> None:
    config = Path(site.root, "etc/gpusched/config.toml")
    config.parent.mkdir(parents=True)
    config.write_text("[daemon]\npoll_s = 2\n")
    carry_out(steps := install_plan(site, ServiceState()))
    assert config.read_text() == "[daemon]\npoll_s = 2\n"
    assert f"keep {config}" in words(steps)
    assert not any(step.act for step in install_plan(site, ServiceState()))


def test_a_unit_of_an_older_release_is_replaced(site: InstallTarget) -> None:
    carry_out(install_plan(site, ServiceState()))
    unit = Path(site.root, "etc/systemd/system/gpusched.service")
    unit.write_text("[Service]\nType=simple\n")
    (step,) = install_plan(site, ServiceState())
    assert (step.word, step.target) == ("write", str(unit))
    carry_out([step])
    assert unit.read_text() == unit_text("gpusched.service", site)


def test_a_foreign_command_is_left_alone_and_an_old_link_is_not(site: InstallTarget) -> None:
    bin_folder = Path(site.root, "usr/local/bin")
    bin_folder.mkdir(parents=True)
    (bin_folder / "gq").write_text("#!/bin/sh\n")
    (bin_folder / "gsub").symlink_to("/opt/older/bin/gsub")
    (bin_folder / "grun").symlink_to("/usr/bin/green-run")
    carry_out(steps := install_plan(site, ServiceState()))
    assert (bin_folder / "gq").read_text() == "#!/bin/sh\n"
    assert os.readlink(bin_folder / "gsub") == f"{site.folder}/gsub"
    assert os.readlink(bin_folder / "grun") == "/usr/bin/green-run"
    kept = [step for step in steps if step.word == "keep"]
    assert [step.target for step in kept] == [str(bin_folder / "grun"), str(bin_folder / "gq")]
    assert f"{site.folder}/gq" in kept[1].why


def test_removal_removes_installed_files_and_keeps_those_of_the_admin(site: InstallTarget) -> None:
    carry_out(install_plan(site, ServiceState()))
    state = Path(site.root, "var/lib/gpusched")
    state.mkdir(parents=True)
    (state / "gpusched.db").touch()
    steps = uninstall_plan(site, ServiceState(), purge=False)
    assert [step.target for step in steps if step.act is None] == [f"{site.root}/etc/gpusched", str(state)]
    carry_out(steps)
    assert files_below(site.root) == {"/etc/gpusched/config.toml", "/var/lib/gpusched/gpusched.db"}
    assert not any(step.act for step in uninstall_plan(site, ServiceState(), purge=False))
    carry_out(uninstall_plan(site, ServiceState(), purge=True))
    assert files_below(site.root) == set()


def test_removal_keeps_an_edited_pam_file_and_foreign_commands(site: InstallTarget) -> None:
    carry_out(install_plan(site, ServiceState()))
    Path(site.root, "etc/pam.d/gpusched").write_text("session required pam_env.so\n")
    link = Path(site.root, "usr/local/bin/gq")
    link.unlink()
    link.write_text("#!/bin/sh\n")
    carry_out(uninstall_plan(site, ServiceState(), purge=True))
    assert files_below(site.root) == {"/etc/pam.d/gpusched", "/usr/local/bin/gq"}


def commands(site: InstallTarget, service: ServiceState) -> list[str]:
    return [step.target for step in install_plan(site, service) if step.word == "run"]


def with_systemd(site: InstallTarget) -> InstallTarget:
    """The files below the root, and systemd as on a machine."""

    class Machine(InstallTarget):
        def at(self, path: str) -> str:
            return site.root + path

    return Machine(site.folder, launcher="systemd")


def test_systemd_is_notified_of_changes(site: InstallTarget) -> None:
    assert commands(site, ServiceState()) == []
    carry_out(install_plan(site, ServiceState()))
    here = with_systemd(site)
    assert commands(here, ServiceState(is_enabled=True, is_active=True, version=__version__)) == []
    restart = ["systemctl restart gpusched.service"]
    older = ServiceState(is_enabled=True, is_active=True, version="0.0.1")
    assert commands(here, older) == restart
    (step,) = install_plan(here, older)
    assert "0.0.1" in step.why
    assert "jobs keep running" in step.why
    assert commands(here, ServiceState(is_enabled=True, is_active=True, version=None)) == restart
    assert commands(here, ServiceState()) == [
        "systemctl enable --quiet gpusched.service",
        "systemctl start gpusched.service",
    ]
    Path(site.root, "etc/systemd/system/gpusched.service").write_text("")
    now = ServiceState(is_enabled=True, is_active=True, version=__version__)
    assert commands(here, now) == ["systemctl daemon-reload", *restart]


def test_systemd_is_not_notified_of_units_removed_by_hand(site: InstallTarget) -> None:
    carry_out(install_plan(site, ServiceState()))
    here, units = with_systemd(site), Path(site.root, "etc/systemd/system")

    def told(service: ServiceState) -> list[str]:
        return [step.target for step in uninstall_plan(here, service, purge=False) if step.word == "run"]

    disable, reload = "systemctl disable --quiet --now", "systemctl daemon-reload"
    runs = ServiceState(is_enabled=True, is_active=True, version=__version__)
    assert told(runs) == [f"{disable} gpusched.service gpusched-metrics.service gpusched-web.service", reload]
    (units / "gpusched-metrics.service").unlink()
    (units / "gpusched-web.service").unlink()
    assert told(runs) == [f"{disable} gpusched.service", reload]
    (units / "gpusched.service").unlink()
    assert told(ServiceState(is_active=True, version=__version__)) == ["systemctl stop gpusched.service"]
    assert told(ServiceState()) == []


@pytest.mark.parametrize(
    ("state", "is_active"), [("active", True), ("activating", True), ("inactive", False), ("failed", False)]
)
def test_a_crash_looping_service_is_restarted_and_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_active: bool
) -> None:
    """`systemctl start` would wait for a start that began before the unit was mended, and fail with it."""
    program = tmp_path / "systemctl"
    program.write_text(
        f"#!/bin/sh\ncase $* in is-active*) echo {state};; is-enabled*) echo enabled;; *) echo '[not set]';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = look(os.environ, lambda: None)
    assert found == ServiceState(is_enabled=True, is_active=is_active, version=None)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("0", ["systemctl stop gpusched.slice"]),
        ("7", []),
        ("[not set]", []),
    ],
    ids=["it is empty", "jobs run in it", "nobody counts"],
)
def test_the_slice_of_the_runs_is_removed_when_empty(
    site: InstallTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, wanted: list[str]
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(
        "#!/bin/sh\ncase $* in 'is-active gpusched.slice') echo active;; is-active*) echo inactive;; "
        f"show*gpusched.slice) echo '{answer}';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    steps = uninstall_plan(with_systemd(site), look(os.environ, lambda: None), purge=True)
    assert [step.target for step in steps if step.word == "run" and "slice" in step.target] == wanted
    kept = [step.target for step in steps if step.word == "keep"]
    assert ("gpusched.slice" in kept) is (answer == "7")


def test_with_the_fork_launcher_there_is_no_sandbox(site: InstallTarget) -> None:
    forking = InstallTarget(site.folder, site.root, launcher="fork", pages=man_pages)
    carry_out(install_plan(forking, ServiceState()))
    conf = Path(site.root, "etc/systemd/system/gpusched.service.d/10-fork.conf")
    assert conf.exists()
    (step,) = install_plan(site, ServiceState())
    assert (step.word, step.target) == ("remove", str(conf))
    carry_out([step])
    assert not conf.parent.exists()


def test_the_fork_drop_in_reverts_every_part_of_the_sandbox() -> None:
    unit, conf = source("gpusched.service"), source("gpusched-fork.conf")
    sandbox = unit[unit.index("# --- what the daemon cannot do") : unit.index("[Install]")]
    names = {line.partition("=")[0] for line in sandbox.splitlines() if "=" in line and not line.startswith("#")}
    assert len(names) > 15
    taken_back = {line.partition("=")[0] for line in conf.splitlines() if "=" in line}
    assert names - taken_back == {"SystemCallErrorNumber"}


def test_the_paths_of_the_installation_are_in_the_units() -> None:
    site = InstallTarget("/srv/tools/bin", checkpoint_dir="/scratch/checkpoints")
    for name in ("gpusched.service", "gpusched-metrics.service", "gpusched-web.service"):
        text = unit_text(name, site)
        assert "/opt/gpusched" not in text
        assert "ExecStart=/srv/tools/bin/gpusched" in text
    assert "\nReadWritePaths=-/scratch/checkpoints\n" in unit_text("gpusched.service", site)
    assert "ReadWritePaths" not in unit_text("gpusched.service", InstallTarget("/srv/tools/bin"))


def test_units_parse_and_declare_what_the_daemon_relies_on() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(source("gpusched.service"))
    service = parser["Service"]
    assert (service["Type"], service["KillMode"], service["Restart"]) == ("notify", "process", "always")
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("gpusched", "restart")
    assert int(service["WatchdogSec"]) > 60, "a tick may take long on a busy machine"
    assert "Environment=TMPDIR=/var/lib/gpusched\n" in source("gpusched.service"), "/tmp cannot be written"


def test_the_default_settings_are_comments_that_are_valid_when_uncommented(tmp_path: Path) -> None:
    text = source("default-config.toml")
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert load_settings(str(path), {}).settings == Settings()
    lines = [line[2:] for line in text.splitlines() if line.startswith(("# [", "# ")) and ("=" in line or "[" in line)]
    path.write_text("\n".join(lines))
    assert problems_in(str(path), {}) == []
    assert load_settings(str(path), {}).settings != Settings()


# --- whom root trusts -------------------------------------------------------------------------------------


def test_every_part_of_a_path_is_checked_including_link_targets(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "python").touch()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to(tmp_path / "b" / ".." / "b")
    found = list(system._steps(str(tmp_path / "c" / "python")))
    for part in ("", "c", "b", "a", "a/python"):
        assert str(tmp_path / part).rstrip("/") in found
    (tmp_path / "loop").symlink_to("loop")
    assert len(list(system._steps(str(tmp_path / "loop")))) < 100


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "words"),
    [
        (0, 0, 0o755, None),
        (0, 0, 0o775, None),
        (1, 0, 0o755, "belongs to daemon, who could make root run anything"),
        (0, 0, 0o757, "everyone can write"),
        (0, 0, 0o700, "users cannot read"),
    ],
)
def test_a_file_is_unsafe_when(uid: int, gid: int, mode: int, words: str | None, tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.touch()
    os.chown(file, uid, gid)
    file.chmod(mode)
    found = system.doubt(str(file))
    assert (found is None) if words is None else (words in str(found))


@NEEDS_ROOT
def test_a_folder_closed_to_users_or_group_writable_is_unsafe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert "users cannot enter" in str(system.doubt(str(tmp_path)))
    tmp_path.chmod(0o775)
    assert system.doubt(str(tmp_path)) is None
    os.chown(tmp_path, 0, 50)
    monkeypatch.setattr(system, "_others_in", lambda gid: "ann" if gid == 50 else "")
    assert "ann can write" in str(system.doubt(str(tmp_path)))
    assert str(tmp_path / "x") in str(system.doubt(str(tmp_path / "x")))


@NEEDS_ROOT
def test_the_first_problem_names_the_first_unsafe_part(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "venv" / "bin").mkdir(parents=True)
    for folder in (tmp_path, home, home / "venv", home / "venv" / "bin"):
        folder.chmod(0o755)
    os.chown(home, 1, 1)
    (home / "venv" / "bin" / "python").symlink_to("/usr/bin/env")
    found = system.first_doubt([str(home / "venv" / "bin" / "python")])
    assert found is not None
    above = system.first_doubt([str(tmp_path)])
    assert found == above if above else found.startswith(f"{home} belongs to daemon")


def test_everything_root_runs_is_checked() -> None:
    found = set(system.parts_of_installation("/opt/gpusched/bin"))
    assert "/opt/gpusched/bin/gpuschedd" in found
    assert system.__file__ in found
    assert os.path.dirname(os.__file__) in found
    assert os.sys.executable in found  # type: ignore[attr-defined]


@pytest.mark.parametrize(("path", "ok"), [("/opt/gpusched/bin", True), ("/opt/my tools", False), ("/opt/%h", False)])
def test_unit_files_accept_paths(path: str, ok: bool) -> None:
    assert system.is_plain(path) is ok


def test_a_missing_file_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotReady, match=r"nothing\.service is missing"):
        source("nothing.service")
