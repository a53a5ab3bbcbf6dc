"""Setting and removing [cluster] engine leaves every other setting and every line of a file as it is."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.ray.cluster_plan import with_engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINES = ["", "# engine = 1", "  # [cluster]", "poll_s = 0.1", 'name = "[cluster]"', 'engine_of = "x"']


@st.composite
def files(draw: st.DrawFn) -> str:
    sections = draw(st.lists(st.sampled_from(["node", "daemon", "cluster", "queue.a", "cluster.x"]), unique=True))
    text = []
    for section in sections:
        text.append(f"[{section}]" + draw(st.sampled_from(["", "  # words"])))
        text += draw(st.lists(st.sampled_from(LINES), unique=True))
        if section == "cluster" and draw(st.booleans()):
            text.append(draw(st.sampled_from(['engine = "command"', "  engine='ray' # why"])))
    return "\n".join(text) + draw(st.sampled_from(["", "\n"]))


def settings(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


@given(files(), st.sampled_from(["ray", "command"]))
def test_the_engine_is_set_and_nothing_else(text: str, engine: str) -> None:
    before, after = settings(text), settings(with_engine(text, engine))
    assert after["cluster"].pop("engine") == engine
    before.setdefault("cluster", {}).pop("engine", None)
    assert after == before
    lines = with_engine(text, engine).splitlines()
    assert [
        line for line in text.splitlines() if "engine =" not in line and "engine=" not in line and line not in lines
    ] == []


@given(files())
def test_the_engine_is_removed_and_nothing_else(text: str) -> None:
    before, after = settings(text), settings(with_engine(text, None))
    before.setdefault("cluster", {}).pop("engine", None)
    after.setdefault("cluster", {})
    assert after == before


@given(files())
def test_setting_it_twice_changes_nothing(text: str) -> None:
    once = with_engine(text, "ray")
    assert with_engine(once, "ray") == once
    assert with_engine(with_engine(text, None), None) == with_engine(text, None)
