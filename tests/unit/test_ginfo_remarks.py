"""What ginfo says of nodes below their table: each remark once."""

from __future__ import annotations

from typing import Any

from gpusched.cli.ginfo import _remarks

_NONE = {
    "memory": "none",
    "tasks": "none",
    "cpus": "none",
    "gpus": "none",
    "tmp": "shared",
    "why_not": None,
    "guard": [],
}
_LIMITS = "enforced limits: none, requests are only booked"


def _node(
    name: str, *notes: str, isolation: dict[str, Any] | None = _NONE, labels: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {"name": name, "notes": list(notes), "isolation": isolation, "labels": list(labels)}


def test_what_is_true_of_all_nodes_is_said_once() -> None:
    nodes = [_node(name, "the GPUs are simulated: 2x8G") for name in ("n1", "n2", "n3")]
    assert _remarks(nodes) == [_LIMITS, "note: the GPUs are simulated: 2x8G"]


def test_what_is_true_of_some_nodes_names_them() -> None:
    nodes = [
        _node("n1", "a", labels=("x", "y")),
        _node("n2", "a", "b", isolation={**_NONE, "memory": "cgroup"}),
        _node("n3", isolation=None, labels=("x", "y")),
        _node("n4", "a"),
    ]
    assert _remarks(nodes) == [
        "n[1,3]: labels: x, y",
        f"n[1,4]: {_LIMITS}",
        "n[1-2,4]: note: a",
        "n2: enforced limits: memory; kept off the GPUs: no other processes, see gpusched system guard",
        "n2: note: b",
    ]


def test_one_node_needs_no_name() -> None:
    assert _remarks([_node("n1", "a", labels=("x",))]) == ["labels: x", _LIMITS, "note: a"]
