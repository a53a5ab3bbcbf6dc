"""A control group that the tests may do with as they like; without one they are skipped, and say why."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.engine.linux import cgroup

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))

from limited_runs import LimitedBench, made_cgroup


def _trouble() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if not cgroup.is_unified():
        return "needs control groups of version 2 alone at /sys/fs/cgroup"
    try:
        cgroup.enable(cgroup.MOUNT)
    except OSError as error:
        return f"needs control groups that it may write: {error.strerror}"
    missing = {"memory", "pids", "cpuset"} - set((cgroup.read(cgroup.MOUNT, "cgroup.subtree_control") or "").split())
    return f"needs the controllers {', '.join(sorted(missing))}" if missing else None


TROUBLE = _trouble()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is below this folder where the machine has no control groups for it."""
    if TROUBLE is None:
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.skip(reason=TROUBLE))


@pytest.fixture
def own_cgroup() -> Iterator[str]:
    """A control group of its own."""
    with made_cgroup() as path:
        yield path


@pytest.fixture(scope="module")
def gpu_nodes() -> Iterator[list[str]]:
    """Nodes of three GPUs and of their driver without any driver: to open one says ENXIO when that is let through."""
    made: list[str] = []
    for name, minor in (("nvidia0", 0), ("nvidia1", 1), ("nvidia2", 2), ("nvidiactl", 255)):
        path = f"/dev/{name}"
        if not os.path.exists(path):
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, minor))
            os.chmod(path, 0o666)
            made.append(path)
        elif os.path.exists("/proc/driver/nvidia"):
            pytest.skip("this machine has a driver; these tests make nodes without one")
    yield ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl"]
    for path in made:
        os.unlink(path)


@pytest.fixture
def bench(own_cgroup: str) -> Iterator[LimitedBench]:
    cgroup.enable(own_cgroup)
    # Not below pytest's own folder, into which other users may not go.
    folder = Path(tempfile.mkdtemp(prefix="gpusched-run_cgroups-"))
    made = LimitedBench(folder, own_cgroup)
    yield made
    made.close()
    shutil.rmtree(folder)
