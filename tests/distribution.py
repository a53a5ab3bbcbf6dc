"""Which worker of pytest-xdist runs which test, so that none is left with a long queue while the others are done.

A test of a real daemon mostly waits, a property mostly computes. So the first are at the front of the order, the second
at the back, and what is over in milliseconds in between. A quarter of the workers take from the back, the others from
the front, a few tests at a time; they meet among the quick ones. xdist's own distribution would hand a sixteenth of all
tests to each worker at the start, the whole of `tests/cli` to one of them.

A module is not divided without need: each worker that has a part of it makes its fixtures, such as a cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

_AT_ONCE = 4
"""Tests handed over together."""
_MOST_AT_ONCE = 40
"""The same, where they are of one module."""
_FRONT = ("lab", "daemon", "cli", "addons", "security", "contract", "system", "hardware", "server")
_BACK = ("scenarios", "addons/simulate", "properties")


def sort_tests(items: list[pytest.Item]) -> None:
    """Order tests by their folder as above; those of one folder stay in their order."""
    ranks = {name: rank - len(_FRONT) for rank, name in enumerate(_FRONT)}
    ranks |= {name: rank + 1 for rank, name in enumerate(_BACK)}
    root = Path(__file__).parent
    of_folder: dict[Path, int] = {}

    def rank(item: pytest.Item) -> int:
        folder = item.path.parent
        if folder not in of_folder:
            names = [
                path.relative_to(root).as_posix() for path in (folder, *folder.parents) if path.is_relative_to(root)
            ]
            of_folder[folder] = next((ranks[name] for name in names if name in ranks), 0)
        return of_folder[folder]

    items.sort(key=rank)


class BothEnds(LoadScheduling):
    """A distribution of tests to workers from both ends of their order."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self.maxschedchunk = _AT_ONCE

    def check_schedule(self, node: WorkerController, duration: float = 0) -> None:
        """Hand over some more when the worker begins the last but one that it has."""
        if node.shutting_down:
            return
        if not self.pending:
            node.shutdown()
        elif len(self.node2pending[node]) <= 2:
            self._send_tests(node, _AT_ONCE)

    def _send_tests(self, node: WorkerController, num: int) -> None:
        is_from_back = self._takes_from_back(node)
        num = self._up_to_end_of_module(num, is_from_back)
        if is_from_back:
            # What it takes it runs in order, as all fixtures of a module are then made once.
            self.pending[:] = self.pending[-num:] + self.pending[:-num]
        super()._send_tests(node, num)

    def _up_to_end_of_module(self, num: int, is_from_back: bool) -> int:
        """So many tests, and what else their last module has; fewer when few are left for the others."""
        most = max(num, min(_MOST_AT_ONCE, len(self.pending) // (2 * self.numnodes)))
        next_ones = self.pending[: -most - 1 : -1] if is_from_back else self.pending[:most]
        modules = [self.collection[index].partition("::")[0] for index in next_ones]
        while 0 < num < len(modules) and modules[num] == modules[num - 1]:
            num += 1
        return num

    def _takes_from_back(self, node: WorkerController) -> bool:
        number = int(node.gateway.id.removeprefix("gw"))
        return self.numnodes > 1 and number % 4 == min(self.numnodes, 4) - 1
