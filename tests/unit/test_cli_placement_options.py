"""Options that say where, beside whom and on what terms a job runs: how they are read, and who wins over whom."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpusched.api.schema import SPEC_FIELDS, UPDATE_FIELDS
from gpusched.cli import gctl, submission
from gpusched.cli.job_options import UPDATES, gsub_table
from gpusched.cli.parse import parse
from gpusched.cli.submission import directives
from gpusched.errors import UsageError

PER_NODE = {"gpu_fraction": None}


def read(line: str) -> dict[str, Any]:
    return parse(gsub_table(), line.split())[0]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("-C a100&nvlink", {"constraint": "a100&nvlink"}),
        ("--constraint=a|b", {"constraint": "a|b"}),
        ("--prefer nvlink", {"prefer": "nvlink"}),
        ("--near data=imagenet", {"near": ("imagenet",)}),
        ("--near data=coco,imagenet,coco", {"near": ("coco", "imagenet")}),
        ("-w a,b[1-3]", {"nodelist": ("a", "b1", "b2", "b3")}),
        ("-w a --nodelist=c[08-10],c08", {"nodelist": ("c08", "c09", "c10")}),
        ("-x b[1,3]x", {"exclude": ("b1x", "b3x")}),
        ("--exclude r[1-2]n[1-2]", {"exclude": ("r1n1", "r1n2", "r2n1", "r2n2")}),
        ("--exclusive", {"exclusive": True}),
        ("-L matlab:2,ansys", {"licenses": {"matlab": 2, "ansys": 1}}),
        ("-L matlab=2 --licenses ansys:3 -L matlab", {"licenses": {"matlab": 1, "ansys": 3}}),
        ("-L flex@server:4", {"licenses": {"flex@server": 4}}),
        ("--res scratch=2 --res=fast=1", {"resources": {"scratch": 2, "fast": 1}}),
        ("--gpus-linked", {"gpus_linked": True}),
        ("--reservation course", {"reservation": "course"}),
        ("--qos high", {"qos": "high"}),
        ("-N 2", {"nodes": 2, "nodes_max": None}),
        ("--nodes 3-3", {"nodes": 3, "nodes_max": None}),
        ("--gpus-per-node 4", {**PER_NODE, "gpus_per_node": 4}),
        ("--gpus-per-node a100:4", {**PER_NODE, "gpus_per_node": 4, "gpu_type": "a100"}),
        ("--gpus-per-node 0.5", {"gpus_per_node": 1, "gpu_fraction": 0.5}),
        ("--gres gpu", {**PER_NODE, "gpus_per_node": 1}),
        ("--gres=gpu:3", {**PER_NODE, "gpus_per_node": 3}),
        ("--gres=gpu:a100:3", {**PER_NODE, "gpus_per_node": 3, "gpu_type": "a100"}),
        (
            "-g a100:4 --gpus-per-node 2",
            {**PER_NODE, "gpus": 4, "gpu_variants": None, "gpus_per_node": 2, "gpu_type": "a100"},
        ),
    ],
)
def test_requests_are_read(line: str, values: dict[str, Any]) -> None:
    assert read(line) == values


def test_a_deadline_is_an_instant_like_begin() -> None:
    assert abs(read("--deadline now+2h")["deadline_at"] - time.time() - 7200) < 60
    assert read("--deadline @1766600000")["deadline_at"] == 1766600000.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-N 0", "0 is out of range"),
        ("--tasks-per-node 0", "--tasks-per-node: 0 is out of range"),
        ("--ntasks-per-n=0", "--ntasks-per-node: 0 is out of range"),
        ("-N 4-2", "'4-2' is a range that ends before it begins"),
        ("-N 2-", "'2-' is not a whole number"),
        ("-N two", "'two' is not a whole number"),
        ("-w a[1-", "brackets in 'a[1-' do not pair"),
        ("-w a]", "do not pair"),
        ("-w a[[1]]", "do not pair"),
        ("-w a[3-1]", "the range 3-1 in 'a[3-1]' goes down; write 1-3"),
        ("-w a[x]", "'x' in 'a[x]' is neither a number nor a range"),
        ("-w ,", "no node is named"),
        ("-x n[1-100000]", "names more than 4096 nodes"),
        ("-x n[1-99]m[1-99]", "names more than 4096 nodes"),
        ("-L :2", "':2' is not NAME or NAME=N; write matlab:2,ansys"),
        ("-L a:", "'a:' is not NAME or NAME=N"),
        ("-L a:0", "0 is out of range"),
        ("-L a:2.5", "'2.5' is not a whole number"),
        ("--res =1", "write scratch=2"),
        ("--res a,,b", "'a,,b' is not NAME"),
        ("--exclusive=me", "'me' is neither user nor mcs"),
        ("--gres=mps:101", "101 is out of range; it must be from 1 to 100"),
        ("--gpus-per-node 1.5", "neither a number of GPUs nor a share of one"),
        ("--near imagenet", "'imagenet' does not say near to what; write data=imagenet"),
        ("--near disk=fast", "'disk=fast' does not say near to what; write data=imagenet"),
        ("--near data=,", "no data set is named; write data=imagenet"),
        ("--deadline soon", "'soon' is not an instant"),
    ],
)
def test_unreadable_requests_are_explained_in_a_sentence(line: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(line)
    assert says in raised.value.message
    assert raised.value.message.isprintable()


@pytest.mark.parametrize(
    ("script", "typed", "asked"),
    [
        ("--gres=gpu:2", "-g 1", {"gpus": 1}),
        ("--gres=gpu:a100:2", "--gpus-per-node 1", {"gpus_per_node": 1}),
        ("-g a100:4", "--gres=gpu:1", {"gpus_per_node": 1}),
        ("-g 0.5", "-g 2", {"gpus": 2}),
        ("-N 2 -g 4", "--nodes 1", {"gpus": 4, "nodes": 1}),
        ("-L a:1", "-L b:2", {"licenses": {"b": 2}}),
        ("-w a", "-w b,c", {"nodelist": ("b", "c")}),
        ("-C a", "", {"constraint": "a"}),
    ],
)
def test_the_command_line_overrides_the_script(script: str, typed: str, asked: dict[str, Any]) -> None:
    lines = "".join(f"#SBATCH {line.strip()}\n" for line in ("\n" + script.replace(" -", "\n-")).split("\n") if line)
    below = directives(gsub_table(), f"#!/bin/sh\n{lines}true\n".encode(), "x.sh")
    values = submission.over(below, read(typed))
    assert {key: value for key, value in values.items() if value is not None} == asked


def test_every_api_field_can_be_requested_and_updated_on_the_command_line() -> None:
    line = (
        "-N 2 -g 4 --gpus-per-node 2 --gpus-linked --res a=1 -L b -w c,d -x e -C f --prefer g --exclusive "
        "--qos h --reservation i --deadline @1766600000"
    )
    assert {key for key, value in read(line).items() if value is not None} <= set(SPEC_FIELDS)
    cleared = {key for name in UPDATES for key in gctl._changes([f"{name}="])}
    assert cleared | {"gpu_fraction", "gpu_type"} == set(UPDATE_FIELDS)


@pytest.mark.parametrize(
    ("pair", "changes"),
    [
        ("constraint=a100", {"constraint": "a100"}),
        ("constraint=", {"constraint": None}),
        ("nodelist=a[1-2]", {"nodelist": ("a1", "a2")}),
        ("exclude=", {"exclude": None}),
        ("licenses=a:2,b", {"licenses": {"a": 2, "b": 1}}),
        ("res=a=2", {"resources": {"a": 2}}),
        ("res=", {"resources": None}),
        ("exclusive=yes", {"exclusive": True}),
        ("gpus-linked=No", {"gpus_linked": False}),
        ("qos=high", {"qos": "high"}),
        ("deadline=@1766600000", {"deadline_at": 1766600000.0}),
        ("deadline=", {"deadline_at": None}),
        ("reservation=", {"reservation": None}),
        ("nodes=2", {"nodes": 2}),
        ("gpus_per_node=2", {"gpus_per_node": 2, "gpu_fraction": None}),
        ("min-vram=", {"min_vram_mib": None}),
    ],
)
def test_an_update_sends_its_fields(pair: str, changes: dict[str, Any]) -> None:
    assert gctl._changes([pair]) == changes


@pytest.mark.parametrize("pair", ["exclusive=maybe", "licenses=:", "nodes=0", "nodelist=[", "res=x=-1", "deadline=x"])
def test_an_unreadable_update_names_the_mistake(pair: str) -> None:
    with pytest.raises(UsageError) as raised:
        gctl._changes([pair])
    assert raised.value.message.startswith(pair.partition("=")[0])
