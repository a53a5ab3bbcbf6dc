"""What a machine can enforce, looked for in a made-up tree of control groups; and how ginfo says it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpusched.cli.ginfo import _limits
from gpusched.daemon.launch.limits import PERSONAL
from gpusched.daemon.launch.limits import isolation as facts_of
from gpusched.engine.linux import cgroup, device_rule, isolation
from gpusched.model.cluster import Isolation
from gpusched.model.settings import IsolationSettings


class Tree:
    """Files as the kernel has them; a made-up one checks nothing, and moves nobody."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mount = folder
        self.own = folder
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(cgroup, "MOUNT", str(folder))
        monkeypatch.setattr(isolation.cgroup, "path_of", lambda pid=None: str(self.own))
        monkeypatch.setattr(isolation, "_why_no_device_rules", lambda: None)
        self.fill(folder)

    def fill(self, folder: Path, controllers: str = "cpuset cpu memory pids", procs: str = "") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.controllers").write_text(controllers)
        (folder / "cgroup.subtree_control").write_text(controllers)
        (folder / "cgroup.procs").write_text(procs)

    def enter(self, name: str, procs: str = "", is_delegated: bool = True) -> None:
        self.own = self.mount / name
        self.fill(self.own, procs=procs)
        (self.own / "cgroup.type").write_text("domain\n")
        marks = {"trusted.delegate": b"1"} if is_delegated else {}

        def mark(path: str, name: str) -> bytes:
            if name not in marks:
                raise OSError(errno.ENODATA, "no such attribute")
            return marks[name]

        self.monkeypatch.setattr(os, "getxattr", mark)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    made = Tree(tmp_path, monkeypatch)
    monkeypatch.setattr(
        os.path, "exists", lambda path, exists=os.path.exists: exists(path) and "/run/systemd" not in path
    )
    return made


def test_without_cgroup_v2_nothing_is_limited(tree: Tree) -> None:
    (tree.mount / "cgroup.controllers").unlink()
    for launcher in ("systemd", "fork"):
        found = isolation.look(launcher)
        assert not found.is_limited
        assert found.why_not == "this machine does not use control groups version 2 alone"


def test_under_systemd_each_run_has_its_unit(tree: Tree) -> None:
    assert isolation.look("systemd") == Isolation("systemd", is_limited=True, can_pin=True)
    tree.fill(tree.mount, controllers="cpuset cpu")
    assert isolation.look("systemd").why_not == "its control groups lack memory and pids"


def test_a_delegated_cgroup_contains_those_of_runs(tree: Tree) -> None:
    tree.enter("mine.service")
    found = isolation.look("fork")
    assert found == Isolation("fork", is_limited=True, folder=str(tree.own), can_pin=True)
    assert (tree.own / "gpusched-daemon").is_dir()


def test_a_daemon_beside_an_earlier_ones_leaf_takes_it_over(tree: Tree) -> None:
    tree.enter("mine.service")
    tree.own = tree.own / "gpusched-daemon"
    tree.fill(tree.own)
    found = isolation.look("fork")
    assert found.folder == str(tree.mount / "mine.service")


def test_a_foreign_cgroup_is_left_alone(tree: Tree) -> None:
    tree.enter("session-1.scope", is_delegated=False)
    found = isolation.look("fork")
    assert not found.is_limited
    assert found.why_not is not None
    assert "is not delegated to it; under systemd, let systemd start runs as units" in found.why_not
    assert not (tree.own / "gpusched-daemon").exists()


def test_a_shared_cgroup_is_reported_and_its_processes_not_moved(tree: Tree) -> None:
    # The parent of this process is not below it.
    tree.enter("mine.service", procs=f"{os.getpid()}\n{os.getppid()}\n")
    found = isolation.look("fork")
    assert not found.is_limited
    assert found.why_not is not None
    assert f"(pid {os.getppid()}), which it does not move" in found.why_not


def test_a_cgroup_without_controllers_or_write_access_is_reported(tree: Tree) -> None:
    tree.enter("mine.service")
    tree.fill(tree.own, controllers="memory pids")
    assert not isolation.look("fork").can_pin
    tree.fill(tree.own, controllers="cpu")
    assert isolation.look("fork").why_not == "its control groups lack memory and pids"
    (tree.own / "gpusched-daemon").rmdir()
    (tree.own / "gpusched-daemon").write_text("in the way")
    why_not = isolation.look("fork").why_not
    assert why_not is not None
    assert "cannot be used: " in why_not


def test_a_kernel_without_device_rules_still_limits(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(device_rule, "load", lambda code, name="": (_ for _ in ()).throw(OSError(1, "not permitted")))
    assert isolation._why_no_device_rules() == "the kernel accepts no device rules: not permitted"


# --- in ginfo -----------------------------------------------------------------------------------------


def test_ginfo_shows_what_is_enforced() -> None:
    settings = IsolationSettings()
    full = facts_of(Isolation("systemd", is_limited=True), settings)
    assert _limits(full) == (
        "memory, tasks, CPU weight, GPUs; kept off the GPUs: no other processes, see gpusched system guard"
    )
    assert _limits({**full, "guard": ["user.slice", "cron.service"], "cpus": "own", "tmp": "own"}) == (
        "memory, tasks, own CPUs, GPUs, /tmp; kept off the GPUs: user.slice, cron.service"
    )
    without = facts_of(Isolation("fork", is_limited=True, why_not_devices="the kernel takes no device rule"), settings)
    assert _limits(without).startswith("memory, tasks, CPU weight (the kernel takes no device rule); ")
    assert _limits(facts_of(PERSONAL, settings)) == "none, requests are only booked (a personal daemon sets none)"
