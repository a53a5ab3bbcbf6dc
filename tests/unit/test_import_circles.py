"""Modules that import each other in a circle are understood, tested and left out only together: no more than three."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_import_directions import FILES, ROOT, facts_of

MOST = 3
"""Modules in a circle. Two that need each other where one is imported by a function are no harm."""


def module_of(path: Path) -> str:
    parts = ("gpusched", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """Modules of the package that a module imports when it runs, also inside functions."""
    # Of `from a import b`, the module a.b where there is one, otherwise a.
    inner = {name for name in facts_of(path).running if name in MODULES}
    return {name for name in inner if not any(other.startswith(f"{name}.") for other in inner)} - {module_of(path)}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules each of which leads to all others of its set."""
    while ends := {module for module, others in graph.items() if not others}:
        # What imports nothing of the rest is in no circle; most of the package goes so.
        graph = {module: others - ends for module, others in graph.items() if module not in ends}
    reached = {module: _reached(module, graph) for module in graph}
    found: list[set[str]] = []
    for module, others in reached.items():
        if module in others and not any(module in one for one in found):
            found.append({other for other in others if module in reached[other]})
    return found


def _reached(module: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [module]
    while ahead:
        for other in graph[ahead.pop()] - found:
            found.add(other)
            ahead.append(other)
    return found


def test_no_circle_of_imports_has_more_than_three_modules() -> None:
    large = [
        sorted(one) for one in circles({name: imported(path) for name, path in MODULES.items()}) if len(one) > MOST
    ]
    assert large == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [{"a", "b", "c"}]),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, [{"a", "b"}, {"c", "d"}]),
    ],
)
def test_circles_are_found(graph: dict[str, set[str]], found: list[set[str]]) -> None:
    assert circles(graph) == found
