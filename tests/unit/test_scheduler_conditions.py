"""Conditions on where a job runs that can never be met are refused, with what there is instead."""

from __future__ import annotations

import pytest

from gpusched.model.cluster import GPUS_NOT_READ, HostSample, NodeView
from gpusched.model.planner_settings import CeilingSettings, OversubscribeSettings
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.infeasible import refusal, refuse_excluded
from gpusched.testing import gpu_view, node, request

GIB = 1024
LAB = [
    node(
        "n1",
        gpus=[gpu_view(index, "n1", link_group=index // 4) for index in range(8)],
        labels=("a100", "nvlink"),
        runtimes=("podman",),
    ),
    node("n2", gpus=4, labels=("a100", "coco"), resources=(("scratch", 4),), runtimes=("podman", "apptainer")),
    node("n3", labels=("coco",), resources=(("scratch", 2),)),
]
SETTINGS = replace(Settings(), license={"matlab": 3})
NO_MORE = "see what each node has with: ginfo"

GRANTED = {
    "a label": request(constraint="nvlink"),
    "one of two labels": request(constraint="h100|coco"),
    "no such label": request(constraint="!h100"),
    "a preference that no node fulfils": request(prefer="h100"),
    "all licenses": request(licenses=(("matlab", 3),)),
    "all of a resource": request(resources=(("scratch", 4),)),
    "as many nodes as there are": request(nodes=3),
    "GPUs on both nodes that have them": request(4, nodes=2),
    "a group of linked cards": request(4, is_linked=True),
    "all cards that are alike where there are no links": request(4, is_linked=True, constraint="coco"),
    "the nodes with a container runtime": request(4, nodes=2, runtime="podman"),
    "the node with the image": request(4, runtime="podman", image_nodes=("n2",)),
    "a node alone": request(8, is_exclusive=True),
    "an excluded node that is not there": request(exclude=("n9",)),
    "slices on linked cards": request(4, vram_mib=GIB, is_linked=True, constraint="nvlink"),
}


@pytest.mark.parametrize("wanted", GRANTED.values(), ids=GRANTED)
def test_possible_conditions_are_granted(wanted):
    assert refusal(wanted, LAB, SETTINGS) is None


REFUSED = {
    "more nodes than have the container runtime": (
        request(nodes=2, runtime="apptainer"),
        "asked for 2 nodes on nodes with apptainer; there is 1",
        "ask for at most that many: -N 1",
    ),
    "a node without the container runtime": (
        request(nodelist=("n3",), runtime="podman"),
        "asked for a node on node n3, with podman; there is none",
        "see the nodes and their labels with: ginfo",
    ),
    "more nodes than have the image": (
        request(nodes=2, runtime="podman", image_nodes=("n2",)),
        "asked for 2 nodes on nodes with podman, its image is on node n2; there is 1",
        "ask for at most that many: -N 1",
    ),
    "a label that no node has": (
        request(constraint="h100"),
        "asked for nodes with h100; no node has the label h100; the labels here are a100, coco and nvlink",
        "see the labels of each node with: ginfo; they are set by [node] labels in its config file",
    ),
    "two labels of which one is unknown": (
        request(constraint="a100&h100&v100"),
        "asked for nodes with a100&h100&v100; no node has the labels h100 and v100; the labels here are a100, coco "
        "and nvlink",
        "see the labels of each node with: ginfo; they are set by [node] labels in its config file",
    ),
    "labels that no node has together": (
        request(constraint="nvlink&coco"),
        "asked for nodes with nvlink&coco; no node has such labels together; the labels here are a100, coco and nvlink",
        "see the labels of each node with: ginfo; they are set by [node] labels in its config file",
    ),
    "labels that cannot be read": (
        request(constraint="a100&"),
        "asked for labels that cannot be read: 'a100&' is not a constraint: a label is missing after '&'",
        "for example: -C 'a100&nvlink|h100'",
    ),
    "a preference that cannot be read": (
        request(prefer="(a"),
        "asked for labels that cannot be read: '(a' is not a constraint: a ')' is missing",
        "for example: -C 'a100&nvlink|h100'",
    ),
    "a node that is not there": (
        request(nodelist=("n1", "n9")),
        "asked for node n9; the nodes here are n1, n2 and n3",
        "see the nodes with: ginfo",
    ),
    "all nodes excluded": (
        request(exclude=("n1", "n2", "n3")),
        "asked for a node that is not n1, n2 and n3; there are no others",
        "leave out one of those named with -x",
    ),
    "a node without the label": (
        request(nodelist=("n3",), constraint="nvlink"),
        "asked for a node on node n3, with nvlink; there is none",
        "see the nodes and their labels with: ginfo",
    ),
    "an unknown license": (
        request(licenses=(("ansys", 1),)),
        "asked for license ansys; the licenses here are matlab",
        "leave -L ansys out; licenses are listed under [license] of the config file",
    ),
    "more licenses than there are": (
        request(licenses=(("matlab", 4),)),
        "asked for 4 licenses matlab; there are 3 in all",
        "ask for less: -L matlab:3",
    ),
    "an unknown resource": (
        request(resources=(("fpga", 1),)),
        "asked for resource fpga; those here are scratch",
        "leave --res fpga out; nodes have what [node] resources in their config file says",
    ),
    "more of a resource than any node has": (
        request(resources=(("scratch", 5),)),
        "asked for 5 of scratch; the most any node can give is 4",
        "ask for less: --res scratch=4",
    ),
    "more of a resource than those nodes have": (
        request(resources=(("scratch", 3),), nodelist=("n3",)),
        "asked for 3 of scratch on node n3; the most any node can give is 2",
        "ask for less: --res scratch=2",
    ),
    "more nodes than there are": (
        request(nodes=4),
        "asked for 4 nodes; this scheduler has 3",
        "ask for at most that many: -N 3",
    ),
    "more nodes than have the label": (
        request(nodes=3, constraint="coco"),
        "asked for 3 nodes on nodes with coco; there are 2",
        "ask for at most that many: -N 2",
    ),
    "more nodes than have the GPUs": (
        request(8, nodes=2),
        "asked for 2 nodes with 8 GPUs and 1 CPU each; only 1 node has that",
        "ask for fewer: -N 1 --gpus-per-node 8; " + NO_MORE,
    ),
    "more GPUs on each node than any has": (
        request(9, nodes=2),
        "asked for 2 nodes with 9 GPUs each; the largest this scheduler can give on one node is -N 2 --gpus-per-node 8",
        "ask for at most that many: -N 2 --gpus-per-node 8",
    ),
    "more linked GPUs than a group has": (
        request(5, is_linked=True),
        "asked for 5 linked GPUs; the largest linked group has 4",
        "ask for at most that many: -g 4 --gpus-linked, or leave --gpus-linked out",
    ),
    "more linked GPUs than a node has cards": (
        request(9, is_linked=True),
        "asked for 9 linked GPUs; the largest linked group has 4",
        "ask for at most that many: -g 4 --gpus-linked",
    ),
    "GPUs of nodes without any": (
        request(1, nodelist=("n3",)),
        "asked for 1 GPU on node n3; there is no GPU",
        "see which GPUs each node has with: ginfo",
    ),
    "a type that those nodes do not have": (
        request(1, gpu_type="h100", constraint="coco"),
        "asked for a GPU of type 'h100' on nodes with coco; the types there are NVIDIA A100",
        "a part of the name is enough, in any case: see ginfo",
    ),
}


@pytest.mark.parametrize(("wanted", "text", "hint"), REFUSED.values(), ids=REFUSED)
def test_impossible_conditions_are_refused(wanted, text, hint):
    found = refusal(wanted, LAB, SETTINGS)
    assert found is not None
    assert (found.text, found.hint) == (text, hint)


EXCLUDED = {
    "nodes that are there": (("n1", "n3"), (), None),
    "a node that is not there": (("n9",), (), "asked to leave out node n9; the nodes here are n1, n2 and n3"),
    "two of them beside one that is": (
        ("n2", "n9", "n8"),
        (),
        "asked to leave out nodes n9 and n8; the nodes here are n1, n2 and n3",
    ),
    "a node that has gone since it was accepted": (("n9", "n2"), ("n9",), None),
    "another one beside it": (
        ("n9", "n8"),
        ("n9",),
        "asked to leave out node n8; the nodes here are n1, n2 and n3",
    ),
}


@pytest.mark.parametrize(("names", "kept", "text"), EXCLUDED.values(), ids=EXCLUDED)
def test_only_nodes_that_exist_are_left_out(names, kept, text):
    found = refuse_excluded(request(exclude=names), LAB, kept)
    assert (None if found is None else found.text) == text
    if found is not None:
        assert (found.hint, found.about) == ("see the nodes with: ginfo", "node")


UNREAD = node("n4", gpu_error=GPUS_NOT_READ)
UNREACHED = NodeView("n5", 0.0, 0, why_not="node n5 has not answered", gpu_error=GPUS_NOT_READ, is_unknown=True)


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        (request(8, nodelist=("n4",)), [UNREAD]),
        (request(8, nodes=2), [UNREAD]),
        (request(9, nodes=2), [UNREAD, UNREACHED]),
        (request(9, nodes=2, cpus=16), [UNREAD, UNREACHED]),
        (request(nodelist=("n5",)), [UNREACHED]),
        (request(cpus=1000, mem_mib=1 << 30), [UNREACHED]),
        (request(constraint="h100", gpu_type="h100", gpus=1), [UNREACHED]),
        (request(resources=(("fpga", 1),)), [UNREACHED]),
        (request(nodes=4), [UNREACHED]),
    ],
)
def test_nodes_whose_hardware_is_not_known_yet_may_have_what_a_job_needs(wanted, nodes):
    assert refusal(wanted, [*LAB, *nodes], SETTINGS) is None
    assert refusal(wanted, LAB, SETTINGS) is not None


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (request(9, exclude=("n4", "n5")), "the largest this scheduler can give on one node is -g 8"),
        (request(9, nodelist=("n1",)), "the largest this scheduler can give on one node is -g 8"),
        (request(1, nodelist=("n3",)), "asked for 1 GPU on node n3; there is no GPU"),
        (request(9, nodes=3), "only 2 nodes have that"),
        (request(nodes=6), "asked for 6 nodes; this scheduler has 5"),
        (request(cpus=1000, exclude=("n5",)), "asked for 1000 CPUs not on node n5; the most any node can give"),
        (request(1, cpus=1000, nodelist=("n4",)), "asked for 1000 CPUs on node n4; the most any node can give is 16"),
    ],
)
def test_a_node_that_is_not_known_yet_excuses_no_job_that_others_must_hold(wanted, text):
    found = refusal(wanted, [*LAB, UNREAD, UNREACHED], SETTINGS)
    assert found is not None
    assert text in found.text


def test_missing_licenses_labels_and_resources_are_reported():
    bare = [node()]
    texts = {
        "asked for license matlab; there are none here": request(licenses=(("matlab", 1),)),
        "asked for resource scratch; there are none here": request(resources=(("scratch", 1),)),
        "asked for nodes with a; no node has the label a, nor any other label": request(constraint="a"),
    }
    for text, wanted in texts.items():
        found = refusal(wanted, bare, Settings())
        assert found is not None
        assert found.text == text


def test_one_job_never_gets_more_than_the_capacity_despite_overbooking():
    twice = replace(Settings(), oversubscribe=OversubscribeSettings(cpus=2.0, mem=2.0, vram=2.0))
    nodes = [node(gpus=1)]
    assert refusal(request(cpus=16, mem_mib=1), nodes, twice) is None
    assert refusal(request(1, vram_mib=24 * GIB), nodes, twice) is None
    texts = {
        "asked for 17 CPUs; the most this scheduler can give is 16": request(cpus=17),
        "asked for 65G of memory; the most this scheduler can give is 64G": request(mem_mib=65 * GIB),
        "asked for 25G of VRAM; the largest slice of a card is 24G": request(1, vram_mib=25 * GIB),
    }
    for text, wanted in texts.items():
        found = refusal(wanted, nodes, twice)
        assert found is not None
        assert found.text == text


def test_the_default_ceiling_of_overbooked_memory_applies():
    load = HostSample(0.0, "n1", 16, 64 * GIB, 64 * GIB)
    over = replace(Settings(), oversubscribe=OversubscribeSettings(mem=1.5))
    assert refusal(request(mem_mib=57 * GIB), [node(load=load)], over) is None
    found = refusal(request(mem_mib=58 * GIB), [node(load=load)], over)
    assert found is not None
    assert "at most 90% of memory is in use" in found.text
    explicit = replace(over, ceiling=CeilingSettings(mem_fraction=1.0))
    assert refusal(request(mem_mib=58 * GIB), [node(load=load)], explicit) is None
