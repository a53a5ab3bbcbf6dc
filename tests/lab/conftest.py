"""A head and two nodes on machines of their own, made of namespaces; skipped with the reason where they are refused.

python -m pytest tests/lab               # short
python -m pytest -m nightly tests/lab    # outages as long as real ones
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_cluster import Cluster
from network_lab import LabUnavailable, Network, network


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three machines, on for all tests of a module."""
    try:
        with network(tmp_path_factory.mktemp("lab")) as lab:
            yield lab
    except LabUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def started(machines: Network) -> Iterator[Cluster]:
    made = Cluster(machines)
    made.start()
    yield made
    made.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The same for all tests, without jobs and with every machine there."""
    yield started
    started.reset()
