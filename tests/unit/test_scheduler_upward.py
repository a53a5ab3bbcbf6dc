"""Walks up trees whose nodes name their parents."""

from __future__ import annotations

import pytest

from gpusched.model.queue_settings import AccountSettings, QueueSettings, chain_of, parent_in

TREE = {
    name: QueueSettings(name, parent=parent)
    for name, parent in {
        "top": None,
        "mid": "top",
        "low": "mid",
        "orphan": "nobody",
        "own": "own",
        "a": "b",
        "b": "a",
        "below": "a",
    }.items()
}

CHAINS = {
    "top": (["top"], None),
    "mid": (["mid", "top"], "top"),
    "low": (["low", "mid", "top"], "mid"),
    "orphan": (["orphan"], None),
    "own": (["own"], None),
    "a": (["a", "b"], None),
    "b": (["b", "a"], None),
    "below": (["below", "a", "b"], None),
    "nobody": ([], None),
}


@pytest.mark.parametrize(("name", "wanted"), CHAINS.items(), ids=CHAINS)
def test_ancestors_are_listed_from(name, wanted):
    assert ([one.name for one in chain_of(name, TREE)], parent_in(name, TREE)) == wanted


def test_an_orphan_has_a_parent():
    accounts = {"a": AccountSettings("a", parent="gone"), "b": AccountSettings("b", parent="a")}
    assert parent_in("b", accounts) == "a"
