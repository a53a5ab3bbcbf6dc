"""Scripts that train on two nodes, in short: on two agents of this machine, where machines of their own cannot be made.

Names of nodes lead nowhere then, so the stand-ins are told an address. `tests/lab/test_scripts_on_nodes.py` runs all
scripts, over a network.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import Cluster
from network_lab import LabUnavailable, check_available
from training_scripts import TwoNodes, check_table

ADDRESS = "127.0.0.1"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    try:
        check_available()
        pytest.skip("machines can be made here: tests/lab/test_scripts_on_nodes.py runs these scripts on them")
    except LabUnavailable as error:
        print(f"on two agents of this machine: {error}")
    root = tmp_path_factory.mktemp("agents")
    cluster = Cluster(root, ["n2"], address=ADDRESS)
    yield TwoNodes(cluster, root / "scripts", env={"STAND_IN_ADDRESS": ADDRESS})
    cluster.head.close()


@pytest.fixture
def two(started: TwoNodes) -> Iterator[TwoNodes]:
    yield started
    started.reset()


@pytest.mark.parametrize("script", ["torchrun", "ddp", "jax"])
def test_a_script_trains_on_both_nodes(two: TwoNodes, script: str) -> None:
    job, output = two.run(f"{script}.sh")
    assert (job["state"], job["exit_code"], job["node"]) == ("COMPLETED", 0, "n[1-2]"), output
    check_table(script, output, {"n1": ADDRESS, "n2": ADDRESS})
    two.await_quiet()
