"""Where, beside whom and on what terms: what the API takes, what it refuses, and how GPUs are spread over nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.api.validate import read_changes, read_submission
from gpusched.daemon.verbs.admission import completed
from gpusched.daemon.verbs.update import _changed
from gpusched.errors import Refused, UsageError
from gpusched.model.commands import Caller
from gpusched.model.hostlist import expand
from gpusched.model.job import Bundles, JobSpec, Request
from gpusched.model.queue_settings import QosSettings
from gpusched.model.request import gpus_of_each_node
from gpusched.model.settings import DefaultSettings, Settings, SlurmSettings
from gpusched.model.value import replace
from gpusched.testing import job

SETTINGS = Settings()


def gpus_over(count: int, nodes: int, nodes_max: int | None = None) -> Bundles:
    """So many GPUs over nodes that book one core each."""
    return Bundles(
        count=count,
        nodes_max=nodes_max or nodes,
        most=count - nodes + 1,
        gpus=1,
        tasks=0,
        cpus=0.0,
        mem_mib=0.0,
        node_cpus=1.0,
        node_mem_mib=0,
    )


def read(settings: Settings = SETTINGS, **spec: Any) -> JobSpec:
    return read_submission({"argv": ["true"], **spec}, None, settings, {}, 0.0).specs[0]


@pytest.mark.parametrize(
    ("spec", "request_"),
    [
        ({}, Request()),
        ({"gpus": 4, "nodes": 2}, Request(gpus=2, nodes=2, bundles=gpus_over(4, 2))),
        ({"gpus": 2, "nodes": 2}, Request(gpus=1, nodes=2)),
        ({"gpus": 3, "nodes": 2}, Request(gpus=2, nodes=2, bundles=gpus_over(3, 2))),
        ({"gpus": 4, "nodes": 1, "nodes_max": 3}, Request(gpus=4, bundles=gpus_over(4, 1, 3))),
        ({"gpus": 8, "gpus_per_node": 4, "nodes": 1, "nodes_max": 3}, Request(gpus=4, nodes=2)),
        ({"gpus_per_node": 2, "nodes": 2}, Request(gpus=2, nodes=2)),
        ({"gpus": 4, "gpus_per_node": 2}, Request(gpus=2, nodes=2)),
        ({"gpus": 4, "gpus_per_node": 4}, Request(gpus=4, nodes=1)),
        ({"gpus": 0, "nodes": 3}, Request(gpus=0, nodes=3)),
        ({"nodes": 3}, Request(nodes=3)),
        ({"gpu_fraction": 1}, Request(gpus=1)),
        ({"gpu_shards": 1}, Request(gpus=1, gpu_fraction=0.25)),
        ({"gpu_shards": 3, "gpus_per_node": 1, "nodes": 2}, Request(gpus=1, gpu_fraction=0.75, nodes=2)),
        ({"gpu_shards": 4, "gpus_per_node": 1}, Request(gpus=1)),
        ({"gpu_fraction": 0.5, "gpus_per_node": 1, "nodes": 2}, Request(gpus=1, gpu_fraction=0.5, nodes=2)),
        ({"vram_mib": 8192, "nodes": 2}, Request(gpus=1, vram_mib=8192, nodes=2)),
        ({"vram_mib": 8192, "nodes": 2, "gpus": 4}, Request(gpus=2, vram_mib=8192, nodes=2, bundles=gpus_over(4, 2))),
        ({"gpus": 2, "gpus_linked": True}, Request(gpus=2, is_linked=True)),
        ({"exclusive": True}, Request(is_exclusive=True)),
        ({"constraint": " a100 & nvlink | !old "}, Request(constraint="a100&nvlink|!old")),
        ({"constraint": "a100&(nvlink|!old)"}, Request(constraint="a100&(nvlink|!old)")),
        ({"constraint": " "}, Request()),
        ({"prefer": "ssd"}, Request(prefer="ssd")),
        ({"near": ["imagenet", "coco", "coco"]}, Request(near=("coco", "imagenet"))),
        ({"nodelist": ["a[1-2],c", "c"], "exclude": ["d"]}, Request(nodelist=("a1", "a2", "c"), exclude=("d",))),
        ({"licenses": {"b": 2, "a": 1}}, Request(licenses=(("a", 1), ("b", 2)))),
        ({"resources": {"y": 1, "x": 3}}, Request(resources=(("x", 3), ("y", 1)))),
    ],
)
def test_a_submission_is_validated(spec: dict[str, Any], request_: Request) -> None:
    assert read(**spec).request == request_


def test_the_settings_say_how_many_shards_a_gpu_has() -> None:
    settings = Settings(slurm=SlurmSettings(shards_per_gpu=10))
    assert read(settings, gpu_shards=3).request == Request(gpus=1, gpu_fraction=0.3)


def test_the_terms_are_part_of_the_job() -> None:
    spec = read(qos="high", deadline_at=2e9, reservation="course")
    assert (spec.qos, spec.deadline_at, spec.reservation) == ("high", 2e9, "course")


def test_a_job_gets_the_default_qos_unless_it_names_one() -> None:
    settings = Settings(
        default=DefaultSettings(qos="normal"), qos={name: QosSettings(name) for name in ("normal", "x")}
    )
    ada = Caller(1000, "ada")
    assert completed(read(settings), ada, settings).qos == "normal"
    assert completed(read(settings, qos="x"), ada, settings).qos == "x"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"gpus": 3, "nodes": 4}, "3 GPUs cannot be spread evenly over 4 nodes; the nearest that can: 4"),
        ({"gpus": 1, "nodes": 2}, "1 GPU cannot be spread evenly over 2 nodes; the nearest that can: 2"),
        ({"gpus": 4, "gpus_per_node": 3}, "4 GPUs in all and 3 on one node contradict each other"),
        ({"gpus": 4, "gpus_per_node": 2, "nodes": 4}, "4 GPUs in all and 2 on each of 4 nodes contradict each other"),
        ({"gpu_shards": 5}, "asked for 5 shards of a GPU, and a GPU has 4 here"),
        ({"gpu_shards": 1, "gpu_fraction": 0.5}, "a fraction of 0.5 and shards of a GPU cannot be combined"),
        ({"gpu_fraction": 0.5, "nodes": 2}, "a share of one card, 0.5, cannot be spread over 2 nodes"),
        ({"gpu_fraction": 0.5, "gpus_per_node": 2}, "a fraction of 0.5 refers to one card"),
        ({"nodes": 0}, "nodes is 0; it must be at least 1"),
        ({"gpus_linked": True}, "linked GPUs are requested, but no GPU"),
        ({"gpus_linked": "yes"}, "gpus_linked is 'yes'; it must be true or false"),
        ({"licenses": {"a": 0}}, "licenses.a is 0; it must be at least 1"),
        ({"licenses": {"a": 1.5}}, "licenses.a is 1.5; it must be a whole number"),
        ({"licenses": {"a": True}}, "must be a whole number"),
        ({"licenses": ["a"]}, "must be an object of names and whole numbers"),
        ({"licenses": {"a|b": 1}}, "'a|b' is not a name for licenses"),
        ({"resources": {"\x1b": 1}}, "is not a name for resources"),
        ({"resources": {"": 1}}, "'' is not a name for resources"),
        ({"constraint": "a&&b"}, "constraint: 'a&&b' is not a constraint: a label is missing after '&'"),
        ({"constraint": "a\nb"}, "constraint: 'a\\nb' is not a constraint: 'b' is not expected after 'a'"),
        ({"constraint": "[a|b]"}, "'[' cannot be in a label"),
        ({"constraint": "a" * 2000}, "has at most 1000 characters"),
        ({"near": ["a b"]}, "near: 'a b' is not a data set"),
        ({"near": ["a"] * 65}, "near names 65 data sets; at most 64 are read"),
        ({"prefer": "|a"}, "prefer: '|a' is not a constraint: a label is missing at its beginning"),
        ({"nodelist": ["a["]}, "nodelist: the brackets in 'a[' do not pair"),
        ({"nodelist": "a"}, "nodelist is 'a'; it must be a list of strings"),
        ({"nodelist": [f"{letter}[1-4096]" for letter in "ab"]}, "nodelist names 8192 nodes"),
        ({"nodelist": ["a"], "exclude": ["a"]}, "every requested node is also excluded"),
        ({"nodelist": ["a", "b"], "exclude": ["b"], "nodes": 2}, "2 nodes are requested, but only 1 may be used: a"),
        ({"qos": "two words"}, "qos is 'two words'; it must be one word"),
        ({"reservation": ""}, "reservation is ''; it must be one word"),
        ({"deadline_at": -1}, "deadline_at is -1; it must be at least 0"),
        ({"deadline_at": "soon"}, "must be a number"),
        ({"deadline": 5}, "unknown field 'deadline'"),
    ],
)
def test_an_invalid_submission_is_refused(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(**spec)
    assert says in raised.value.message
    assert raised.value.message.isprintable()
    assert raised.value.hint


def test_an_update_accepts_the_same_fields_and_null_resets() -> None:
    given = {"exclusive": True, "gpus_linked": False, "licenses": {"b": 1, "a": 2}, "nodelist": ["x[1-2]"]}
    assert read_changes(given, SETTINGS) == {
        "is_exclusive": True,
        "is_linked": False,
        "licenses": (("a", 2), ("b", 1)),
        "nodelist": ("x1", "x2"),
    }
    names = [
        "exclusive",
        "gpus_linked",
        "licenses",
        "resources",
        "nodelist",
        "exclude",
        "nodes",
        "constraint",
        "prefer",
    ]
    cleared = read_changes(dict.fromkeys(names), SETTINGS)
    before = Request(2, is_linked=True, is_exclusive=True, constraint="a", nodelist=("a",), licenses=(("a", 1),))
    assert replace(before, **cleared) == Request(2)
    terms = read_changes(dict.fromkeys(["qos", "deadline_at", "reservation"]), SETTINGS)
    assert terms == {"qos": "", "deadline_at": None, "reservation": None}


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({"gpus": 6}, Request(gpus=3, nodes=2, bundles=gpus_over(6, 2))),
        ({"gpus": 3}, Request(gpus=2, nodes=2, bundles=gpus_over(3, 2))),
        ({"nodes": 3, "gpus": 4}, Request(gpus=2, nodes=3, bundles=gpus_over(4, 3))),
        ({"gpus_per_node": 1}, Request(gpus=1, nodes=2)),
        ({"nodes": 4}, Request(gpus=2, nodes=4)),
        ({"nodes": 3, "gpus": 3}, Request(gpus=1, nodes=3)),
        ({"nodes": None}, Request(gpus=2)),
        ({"gpus": None}, Request(gpus=0, nodes=2)),
        ({"gpus_per_node": None}, Request(gpus=0, nodes=2)),
        ({"gpus": 4, "gpus_per_node": 4, "nodes": 1}, Request(gpus=4)),
    ],
)
def test_an_update_divides_gpus_over_the_future_nodes(changes: dict[str, Any], after: Request) -> None:
    before = job(request=Request(gpus=2, nodes=2))
    assert _changed(before, read_changes(changes, SETTINGS)).spec.request == after


@pytest.mark.parametrize("changes", [{"gpus": 1}, {"nodes": 5, "gpus": 4}, {"gpus": 4, "gpus_per_node": 1}])
def test_an_indivisible_update_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused) as raised:
        _changed(job(request=Request(gpus=2, nodes=2)), read_changes(changes, SETTINGS))
    assert "gpus-per-node=N" in raised.value.hint


@given(st.integers(0, 64), st.integers(1, 16))
def test_gpus_are_spread_evenly_or_the_nearest_divisible_numbers_named(total: int, nodes: int) -> None:
    try:
        each = gpus_of_each_node(total, None, nodes)
    except ValueError as error:
        assert total % nodes
        near = [int(word) for word in str(error).rpartition(": ")[2].split(" or ")]
        assert all(number % nodes == 0 and abs(number - total) < nodes and number for number in near)
    else:
        assert each is not None
        assert each * nodes == total


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_lists_of_nodes_keep_every_name_and_its_zeros(numbers: list[int], width: int) -> None:
    names = [f"gpu{number:0{width}d}" for number in numbers]
    assert expand(",".join(names)) == names
    assert expand(f"gpu[{','.join(name[3:] for name in names)}]") == names


@given(st.text())
def test_any_text_parses_to_a_list_of_nodes_or_a_sentence(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert names
    assert all(name and name.isprintable() and not {" ", ",", "[", "]"} & set(name) for name in names)
