"""Tests go to workers from both ends of their order, each once and few at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from distribution import BothEnds


@dataclass(eq=False)
class Worker:
    """A worker that takes tests as xdist's would."""

    name: str
    got: list[int] = field(default_factory=list)
    shutting_down: bool = False

    @property
    def gateway(self) -> Any:
        return SimpleNamespace(id=self.name)

    def send_runtest_some(self, indices: list[int]) -> None:
        self.got += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class Options:
    """The options of a command line with this many workers."""

    def __init__(self, workers: int) -> None:
        self.values = {"tx": ["popen"] * workers, "maxschedchunk": None}

    def getoption(self, name: str) -> Any:
        return self.values[name]

    getvalue = getoption


def distribute(workers: int, tests: int, busy: str = "", of_a_module: int = 1) -> dict[str, list[int]]:
    """Run tests, one of each worker at a time; who is `busy` stays with its first. Returns what each was given."""
    options: Any = Options(workers)
    scheduling = BothEnds(options, None)
    nodes: list[Any] = [Worker(f"gw{number}") for number in range(workers)]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(
            node, [f"test_{number // of_a_module}.py::test_{number}" for number in range(tests)]
        )
    scheduling.schedule()
    while running := [node for node in nodes if scheduling.node2pending[node] and node.name != busy]:
        for node in running:
            scheduling.mark_test_complete(node, scheduling.node2pending[node][0])
    assert scheduling.tests_finished or busy
    return {node.name: node.got for node in nodes}


@pytest.mark.parametrize("tests", [0, 1, 3, 7, 40, 1001])
@pytest.mark.parametrize("workers", [1, 2, 4, 9])
def test_each_test_is_given_to_one_worker(workers: int, tests: int) -> None:
    given = distribute(workers, tests)
    assert sorted(number for numbers in given.values() for number in numbers) == list(range(tests))


def test_a_quarter_of_the_workers_takes_from_the_back() -> None:
    given = distribute(8, 1000)
    first = {name: numbers[0] for name, numbers in given.items()}
    assert {name for name, number in first.items() if number > 900} == {"gw3", "gw7"}
    assert given["gw3"][:8] == [996, 997, 998, 999, 988, 989, 990, 991]


def test_a_module_is_not_divided_without_need() -> None:
    given = distribute(6, 5000, of_a_module=20)
    parts = [{number // 20 for number in numbers} for numbers in given.values()]
    divided = [module for module in range(250) if sum(module in part for part in parts) > 1]
    # Some at the end, when few are left.
    assert len(divided) < 25
    assert min(map(len, given.values())) > 5000 / 6 / 2


def test_a_long_module_is_divided() -> None:
    given = distribute(6, 5000, of_a_module=5000)
    assert all(600 < len(numbers) < 1100 for numbers in given.values())


def test_a_worker_with_a_long_test_keeps_few_others_from_the_rest() -> None:
    given = distribute(4, 1000, busy="gw0")
    assert len(given["gw0"]) == 4
