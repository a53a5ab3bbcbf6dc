"""A node with news costs what one node costs, however many others there are: work is counted, not timed.

`python -m benchmarks.scale` measures what it takes, see docs/explanation/scale.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.engine.cluster import ClusterEngine
from gpusched.gpu.history import GpuHistory
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import HostSample, NodeView
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.value import replace
from gpusched.scheduler import planner
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.testing import request

GPUS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the parts of a tick are done that look at one card or node, or at all of them."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, word: str) -> None:
        called = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            counts[word] += 1
            return called(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(GpuTracker, "_view", "views of cards")
    count(GpuTracker, "reconcile_releases", "looks at releases")
    count(GpuHistory, "fold", "samples")
    count(ClusterLayout, "__init__", "layouts")
    count(planner, "walk_queue", "cycles")
    count(SimulatedEngine, "events", "engines asked")
    return counts


def crowd(nodes: int, **sections: Any) -> Lab:
    """So many nodes, all GPUs in use, and a job that waits for some."""
    names = tuple(f"n{number}" for number in range(2, nodes + 1))
    lab = Lab(gpus=GPUS, more_nodes=names, outcome=SimulatedOutcome(runs_s=1e6), **sections)
    lab.outcomes["1.1"] = SimulatedOutcome(runs_s=10)
    for node in lab.scheduler.cluster:
        node.host = replace(node.host, cpu_fraction=0.5)
    lab.ask(*(lab.submission(request=request(gpus=1)) for _ in range(GPUS * nodes)))
    lab.tick(1)
    assert len(lab.scheduler.state.open_runs) == GPUS * nodes
    lab.submit(request=request(gpus=GPUS))
    lab.tick(1)
    return lab


def tell_load(lab: Lab, name: str) -> None:
    """A node reports: another load, and nothing else that is new."""
    node = lab.scheduler.cluster[name]
    lab.clock.advance(0.1)
    load = HostSample(lab.clock.now(), name, 8, 65536, 50000, cpu_fraction=lab.clock.now() % 1, boot_id="simulated")
    node.host = load
    lab.read_node(name)
    assert node.reading is not None
    busy = tuple(replace(gpu, utilisation=lab.clock.now() % 1) for gpu in node.reading.gpus)
    lab.scheduler.observe_gpus(replace(node.reading, gpus=busy), node, {})


@pytest.mark.parametrize("nodes", [3, 30])
def test_a_report_of_one_node_costs_what_one_node_costs(calls: Counter[str], nodes: int) -> None:
    """Its cards are viewed once, and those of no other; no machine is laid out, and no job is looked at again."""
    lab = crowd(nodes)
    tell_load(lab, "n2")
    lab.ticker.tick()
    calls.clear()
    tell_load(lab, "n2")
    lab.ticker.tick()
    assert calls == {"samples": 2 * GPUS, "views of cards": GPUS, "engines asked": nodes}


@pytest.mark.parametrize("nodes", [3, 30])
def test_a_tick_without_news_views_nothing(calls: Counter[str], nodes: int) -> None:
    lab = crowd(nodes)
    calls.clear()
    lab.clock.advance(0.1)
    lab.scheduler.look_again()
    lab.ticker.tick()
    assert calls == {"engines asked": nodes}


def test_the_planner_knows_the_newest_load_although_it_plans_nothing_anew(calls: Counter[str]) -> None:
    lab = crowd(3)
    calls.clear()
    tell_load(lab, "n2")
    lab.ticker.tick()
    assert not calls["cycles"]
    known = {node.name: node for node in lab.scheduler.planner().state.layout.nodes}
    assert known == {node.name: node for node in lab.scheduler.nodes(lab.clock.now())}
    assert lab.ticker.check_planner() == []


def test_where_load_counts_it_is_looked_at(calls: Counter[str]) -> None:
    """A ceiling on measured load: each report may let a job start."""
    lab = crowd(3, ceiling=CeilingSettings(cpu_fraction=0.9))
    calls.clear()
    tell_load(lab, "n2")
    lab.ticker.tick()
    assert calls["cycles"] == 1


def test_what_stands_against_a_card_changes_that_card_alone(calls: Counter[str]) -> None:
    """A drained node: its cards are viewed anew, and the jobs looked at, but no machine is laid out again."""
    lab = crowd(30)
    before: dict[str, NodeView] = {node.name: node for node in lab.scheduler.nodes(lab.clock.now())}
    calls.clear()
    lab.scheduler.cluster["n7"].be_in_trouble("its spool is full")
    lab.scheduler.look_again()
    lab.ticker.tick()
    assert (calls["layouts"], calls["views of cards"], calls["cycles"]) == (0, 0, 1)
    after = {node.name: node for node in lab.scheduler.nodes(lab.clock.now())}
    assert [name for name in after if after[name] is not before[name]] == ["n7"]
    assert lab.ticker.check_planner() == []


def test_gpus_of_an_ended_run_concern_its_node_alone(calls: Counter[str]) -> None:
    lab = crowd(30)
    calls.clear()
    lab.clock.advance(10)
    lab.ticker.tick()
    assert lab.scheduler.state.releasing, "its GPUs wait for a reading"
    assert calls["looks at releases"] == 1
    lab.clock.advance(0.1)
    lab.read_head()
    lab.ticker.tick()
    assert not lab.scheduler.state.releasing
    assert calls["looks at releases"] == 2


def test_with_a_waker_only_engines_with_news_are_asked(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lab = crowd(30)
    engine = lab.scheduler.engine
    assert isinstance(engine, ClusterEngine)
    wakers: dict[str, Callable[[], None]] = {}
    name_of = {id(one): name for name, one in lab.engines.items()}
    monkeypatch.setattr(SimulatedEngine, "set_waker", lambda one, wake: wakers.update({name_of[id(one)]: wake}))
    engine.set_waker(lambda: None)
    engine.events()
    calls.clear()
    assert engine.events() == []
    assert calls == {"engines asked": 1}, "the head's own"
    calls.clear()
    wakers["n5"]()
    engine.events()
    assert calls == {"engines asked": 2}
    calls.clear()
    engine.events()
    assert calls == {"engines asked": 1}
