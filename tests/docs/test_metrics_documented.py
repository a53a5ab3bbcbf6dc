"""The dashboard and the rules in the documentation ask for series and labels that the daemon tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from exposition_reader import values
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.meters import page
from gpusched.model import series
from gpusched.model.metrics import PROMETHEUS, MetricFamily
from gpusched.testing import NOW, request

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "reference" / "grafana-dashboard.json").read_text())
HOWTO = (DOCS / "howto" / "metrics.md").read_text()
FROM_PROMETHEUS = {"instance", "job", "le"}


def samples_of(family: MetricFamily) -> list[str]:
    if family.kind == "histogram":
        return [family.name + end for end in ("_bucket", "_count", "_sum")]
    return [family.sample]


FAMILY_OF = {sample: family for family in series.FAMILIES for sample in samples_of(family)}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]
    for rule in re.findall(r"^ +expr: (.*)$", HOWTO, re.M):
        yield "rule", rule


@pytest.mark.parametrize(("where", "text"), list(expressions()))
def test_every_query_uses_exported_metrics(where: str, text: str) -> None:
    names = re.findall(r"\bgpusched_[a-z_]+", text)
    assert names
    for name in names:
        assert name in FAMILY_OF, f"{where} asks for {name}"
    known = {label for name in names for label in FAMILY_OF[name].labels} | FROM_PROMETHEUS
    for name, selector in re.findall(r"\b(gpusched_[a-z_]+)\{([^}]*)\}", text):
        for label in re.findall(r"(\w+)(?:=~|!=|=)", selector):
            assert label in {*FAMILY_OF[name].labels, *FROM_PROMETHEUS}, (where, name, label)
    for group in re.findall(r"\bby \(([^)]*)\)", text):
        assert set(re.split(r", *", group)) <= known, (where, group)
    # What only grows is read as a rate, what does not is not.
    for name in names:
        is_rated = bool(re.search(rf"(rate|increase)\({name}\b", text))
        assert is_rated == (FAMILY_OF[name].kind in ("counter", "histogram")), (where, name)


def test_legends_name_remaining_labels() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"]
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = re.findall(r"\bby \(([^)]*)\)", expr)
            left = {word for group in groups for word in re.split(r", *", group)}
            if not groups:
                left = {label for name in re.findall(r"\bgpusched_[a-z_]+", expr) for label in FAMILY_OF[name].labels}
                left |= FROM_PROMETHEUS
            assert labels <= left, (panel["title"], labels, left)


def test_selected_label_values_exist() -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=100))
    for _ in range(4):
        lab.submit(request=request(gpus=1))
    lab.tick(1)
    facts = {"version": "1", "started_at": NOW, "database": "/nonexistent"}
    text = page(lab.scheduler, facts).text(PROMETHEUS)
    told = {(name, *mark) for name, marks in values(text) for mark in marks}
    picked = [
        (name, label, value)
        for _, expr in expressions()
        for name, selector in re.findall(r"\b(gpusched_[a-z_]+)\{([^}]*)\}", expr)
        for label, values_ in re.findall(r'(\w+)=~?"([^"]*)"', selector)
        for value in values_.split("|")
        if label != "instance"
    ]
    assert len(picked) > 8
    for one in picked:
        assert one in told


def test_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_dashboard_covers_every_part() -> None:
    asked = {FAMILY_OF[name].name for _, text in expressions() for name in re.findall(r"\bgpusched_[a-z_]+", text)}
    unseen = {family.name for family in series.FAMILIES} - asked
    assert unseen <= {
        *("gpusched_build", "gpusched_start_time_seconds", "gpusched_gpu", "gpusched_gpu_runs"),
        *("gpusched_node_drained", "gpusched_node_cpus", "gpusched_node_cpus_booked", "gpusched_node_memory_bytes"),
        *("gpusched_node_memory_booked_bytes", "gpusched_gpu_reading_timestamp_seconds"),
    }


def test_names_in_the_text_exist() -> None:
    for name in re.findall(r"`(gpusched_[a-z_]+)", HOWTO):
        assert name in FAMILY_OF, name
