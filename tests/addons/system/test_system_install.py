"""gpusched system install and uninstall as they are typed, below a folder of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from shell import Shell

from gpusched import __version__
from gpusched.addons.system import command as system
from gpusched.config import load_settings
from gpusched.engine.spool import take_claim
from gpusched.errors import NotReady, Refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "machine"


def test_the_plan_is_shown_without_being_applied(own: Shell, root: Path) -> None:
    told = own.ok("gpusched", "system", "install", "--root", str(root), "--plan")
    assert told.splitlines()[0].startswith(f"gpusched {__version__} in ")
    assert f"  write   {root}/etc/systemd/system/gpusched.service   (the scheduler)\n" in told
    assert f"  link    {root}/usr/local/bin/gsub -> " in told
    assert "No users or groups are created." in told
    assert not root.exists()


def test_a_noninteractive_install_needs_yes(own: Shell, root: Path) -> None:
    done = own.type("gpusched", "system", "install", "--root", str(root))
    assert (done.code, done.err) == (
        1,
        "gpusched: error: standard input is not a terminal, so nothing can be confirmed\n"
        "gpusched: hint: confirm with --yes\n",
    )
    assert f"write   {root}/etc/gpusched/config.toml" in done.out, "the plan is shown all the same"
    assert not root.exists()


def test_the_system_service_is_installed_once_and_removed(own: Shell, root: Path) -> None:
    words = ("--root", str(root), "--yes")
    assert own.ok("gpusched", "system", "install", *words).endswith("done\n")
    assert own.ok("gpusched", "system", "install", *words) == "nothing to do\n"
    told = own.ok("gpusched", "system", "uninstall", *words)
    assert f"  keep    {root}/etc/gpusched   (settings; --purge deletes it)\n" in told
    assert (root / "etc/gpusched/config.toml").exists()
    assert not os.listdir(root / "usr/local/bin")
    assert own.ok("gpusched", "system", "uninstall", *words) == "nothing to do\n"
    own.ok("gpusched", "system", "uninstall", "--purge", *words)
    assert not (root / "etc/gpusched").exists()


def test_a_node_gets_no_daemon_and_is_removed_in_the_same_way(own: Shell, root: Path) -> None:
    words = ("--root", str(root), "--yes")
    told = own.ok("gpusched", "system", "install", "--node", *words)
    assert "runs jobs of another machine's scheduler:\n" in told
    assert "[cluster] nodes = [" in told
    assert not (root / "etc/systemd").exists()
    assert {path.name for path in (root / "etc").rglob("*") if path.is_file()} == {"gpusched", "config.toml"}
    assert (root / "usr/local/bin/gpusched").is_symlink()
    assert own.ok("gpusched", "system", "install", "--node", *words) == "nothing to do\n"
    own.ok("gpusched", "system", "uninstall", "--purge", *words)
    assert not [path for path in root.rglob("*") if path.is_file() or path.is_symlink()]


def test_a_machine_with_a_scheduler_does_not_become_a_node(own: Shell, root: Path) -> None:
    words = ("--root", str(root), "--yes")
    own.ok("gpusched", "system", "install", *words)
    done = own.type("gpusched", "system", "install", "--node", *words)
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "gpusched: error: this machine has its own scheduler, which would book its GPUs a second time\n"
        "gpusched: hint: remove it first, its settings stay: sudo gpusched system uninstall\n"
    )


@pytest.mark.parametrize("unit", ["gpusched-head.service", "gpusched-node.service"])
def test_a_machine_leaves_its_cluster_before_it_loses_the_scheduler(own: Shell, root: Path, unit: str) -> None:
    path = root / "etc/systemd/system" / unit
    path.parent.mkdir(parents=True)
    path.touch()
    done = own.type("gpusched", "system", "uninstall", "--root", str(root), "--yes")
    assert (done.code, done.out) == (1, "")
    assert "hint: sudo gpusched cluster leave" in done.err
    assert path.exists()


def test_a_node_has_no_default_time_limit(own: Shell, root: Path) -> None:
    done = own.type("gpusched", "system", "install", "--node", "--default-time", "1d", "--root", str(root))
    assert (done.code, done.out) == (2, "")
    assert "--default-time is a setting of the scheduler" in done.err
    assert not root.exists()


def test_a_default_time_limit_is_offered_and_written_into_a_new_config_file(own: Shell, root: Path) -> None:
    words = ("gpusched", "system", "install", "--root", str(root), "--yes")
    config = root / "etc/gpusched/config.toml"
    for wrong in ("soon", "0", "4 h"):
        done = own.type(*words, "--default-time", wrong)
        assert (done.code, "--default-time" in done.err, root.exists()) == (2, True, False), wrong
    assert "--default-time 1d" in own.ok(*words[:-1], "--plan")
    told = own.ok(*words, "--default-time", "1d")
    assert f"write   {config}   (settings: a time limit of 1-00:00:00 for jobs that give none)" in told
    assert "will have none" not in told
    assert load_settings(str(config), {}).settings.default.time_limit_s == 86400
    text = config.read_text()
    done = own.type(*words, "--default-time", "4h")
    assert (done.code, "set in that file: [default] time_limit_s = 14400" in done.err) == (2, True)
    assert config.read_text() == text


def test_invalid_settings_are_reported_before_anything_is_written(own: Shell, root: Path) -> None:
    (root / "etc/gpusched").mkdir(parents=True)
    (root / "etc/gpusched/config.toml").write_text("[daemon]\nnonsense = 1\n")
    done = own.type("gpusched", "system", "install", "--root", str(root), "--yes")
    assert (done.code, "nonsense" in done.err) == (2, True)
    assert not (root / "etc/systemd").exists()
    (root / "etc/gpusched/config.toml").write_text('[life]\ncheckpoint_dir = "/scratch/of mine"\n')
    done = own.type("gpusched", "system", "install", "--root", str(root), "--yes")
    assert (done.code, "/scratch/of mine" in done.err) == (1, True)


def test_an_empty_root_is_a_mistake(own: Shell) -> None:
    done = own.type("gpusched", "system", "install", "--root", "/", "--yes")
    assert (done.code, "--root / is not a folder to install below" in done.err) == (2, True)


def test_only_root_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for act in (system.install, system.uninstall):
        with pytest.raises(Refused, match="only root can install") as caught:
            act(root=None)
        assert caught.value.hint.startswith("sudo ")


def test_without_systemd_the_start_command_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system.os.path, "isdir", lambda path: path != "/run/systemd/system")
    with pytest.raises(NotReady, match="this machine does not run systemd") as caught:
        system.install(root=None)
    assert caught.value.hint.endswith("gpuschedd --system")


def test_running_jobs_prevent_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "needs_systemd", lambda: None)
    counts = Lab().scheduler.state.counts()
    assert counts.keys() >= {"pending", "running", "completing"}
    jobs = {**counts, "pending": 3, "running": 1, "completing": 1}
    monkeypatch.setattr(system, "_status", lambda: {"jobs": jobs})
    with pytest.raises(Refused, match="2 jobs still running, and how they end would not be recorded"):
        system.uninstall(root=None, force=False)


def test_without_a_daemon_supervisors_reveal_running_jobs(tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    assert system.held_runs(spool) == 0
    os.mkdir(spool)
    ours = take_claim(spool, "7.1", os.getpid(), 1, os.geteuid(), "boot")
    other = take_claim(spool, "8.1", os.getpid(), 1, os.geteuid(), "boot")
    assert ours is not None
    assert other is not None
    os.close(other)
    assert system.held_runs(spool) == 1
    os.close(ours)
    assert system.held_runs(spool) == 0


def test_files_that_root_would_run_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusched.addons.system import command as system

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "needs_systemd", lambda: None)
    monkeypatch.setattr(system, "commands_folder", lambda: "/home/ann/venv/bin")
    monkeypatch.setattr(system, "first_doubt", lambda paths: "/home/ann belongs to ann")
    with pytest.raises(Refused, match="root must not run this installation: /home/ann belongs to ann") as caught:
        system.install(root=None)
    assert "python3 -m venv /opt/gpusched" in caught.value.hint
    monkeypatch.setattr(system, "commands_folder", lambda: "/opt/my tools")
    with pytest.raises(Refused, match="systemd cannot use the path"):
        system.install(root=None)


NODE = {"gpu_error": None, "gpu_source": "nvml"}


@pytest.mark.parametrize(
    ("cluster", "wanted"),
    [
        (None, "gsub -- hostname"),
        ({"nodes": [NODE], "gpus": [{}]}, "gsub -g 1 -- nvidia-smi"),
        ({"nodes": [NODE], "gpus": []}, "gsub -- hostname        # no GPU was found on this machine"),
        (
            {"nodes": [{**NODE, "gpu_error": "the driver does not answer"}], "gpus": []},
            "gsub -- hostname        # no GPU answers: the driver does not answer",
        ),
        (
            {"nodes": [{**NODE, "gpu_source": "simulated"}], "gpus": [{}]},
            "gsub -g 1 --wrap 'echo $CUDA_VISIBLE_DEVICES'        # the GPUs are simulated",
        ),
    ],
    ids=["no answer", "GPUs", "no GPU", "a driver that fails", "simulated GPUs"],
)
def test_the_suggested_first_job_can_run_here(cluster: dict[str, Any] | None, wanted: str) -> None:
    assert system.example_for(cluster) == wanted
    assert f"    {wanted}\n    gq\n" in system.next_commands("x", wanted)
