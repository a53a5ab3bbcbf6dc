"""MIG instances as GPUs: who may have one, and who may not."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.model.cluster import GpuView
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.infeasible import refusal
from gpusched.scheduler.planner import decide
from gpusched.scheduler.usage import capacity_of
from gpusched.testing import gpu_view, job, node, request, snapshot

CARD = "NVIDIA A100-SXM4-80GB"


def instance(slot: int, profile: str, gib: int, **parts: Any) -> GpuView:
    fields = {"uuid": f"MIG-{slot}", "name": f"{CARD} MIG {profile}", "vram_total_mib": gib * 1024, "can_share": False}
    return gpu_view(1000 + slot, **{**fields, "mig_profile": profile, "mig_parent": "GPU-n1-0", **parts})


DIVIDED = gpu_view(
    0, name=CARD, vram_total_mib=81920, is_present=False, is_divided=True, can_share=False, why_not="MIG is on"
)
PARTS = [DIVIDED, instance(0, "3g.40gb", 40), instance(1, "1g.10gb", 10), instance(2, "1g.10gb", 10)]
WHOLE = gpu_view(1, name=CARD, vram_total_mib=81920)
MIXED = [*PARTS, WHOLE]

PLACED: dict[str, tuple[list[GpuView], dict[str, Any], list[str] | None]] = {
    # cards, what is asked for, what it gets; None: it is refused at submission
    "any GPU gets the smallest": (MIXED, {"gpus": 1}, ["MIG-1"]),
    "by profile": (MIXED, {"gpus": 1, "gpu_type": "3g.40gb"}, ["MIG-0"]),
    "by a part of the profile": (MIXED, {"gpus": 1, "gpu_type": "3g"}, ["MIG-0"]),
    "the card's type means whole cards": (MIXED, {"gpus": 1, "gpu_type": "a100"}, ["GPU-n1-1"]),
    "the type and the profile mean an instance": (MIXED, {"gpus": 1, "gpu_type": "A100-SXM4-80GB MIG 1g"}, ["MIG-1"]),
    "memory that only a larger instance has": (MIXED, {"gpus": 1, "min_vram_mib": 20480}, ["MIG-0"]),
    "memory that only a whole card has": (MIXED, {"gpus": 1, "min_vram_mib": 61440}, ["GPU-n1-1"]),
    "two GPUs are never two instances": (PARTS, {"gpus": 2}, None),
    "nor an instance and a card": (MIXED, {"gpus": 2}, None),
    "nor two of a profile": (PARTS, {"gpus": 2, "gpu_type": "1g.10gb"}, None),
    "a slice goes to a whole card": (MIXED, {"gpus": 1, "vram_mib": 4096}, ["GPU-n1-1"]),
    "and to no instance": (PARTS, {"gpus": 1, "vram_mib": 4096}, None),
    "nor does a fraction": (PARTS, {"gpus": 1, "gpu_fraction": 0.5}, None),
    "a whole card that is divided is none": (PARTS, {"gpus": 1, "gpu_type": "a100"}, None),
    "a card with MIG on and no instance is none": ([DIVIDED], {"gpus": 1}, None),
    "two whole cards beside instances": ([*PARTS, WHOLE, gpu_view(2)], {"gpus": 2}, ["GPU-n1-1", "GPU-n1-2"]),
}


def starts(cards: list[GpuView], **asked: Any) -> list[str]:
    seen = snapshot(node("n1", cards), waiting=[job(1, request=request(**asked))])
    return [share.uuid for start in decide(seen, Settings()).starts for share in start.placement.gpus]


@pytest.mark.parametrize("name", PLACED)
def test_instances_are_assigned(name: str) -> None:
    cards, asked, expected = PLACED[name]
    refused = refusal(request(**asked), [node("n1", cards)], Settings())
    assert (refused is None) is (expected is not None), refused
    assert starts(cards, **asked) == (expected or [])


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "two GPUs": (
        {"gpus": 2},
        "asked for 2 GPUs; only MIG instances would do, and a job can use only one",
        "-g 1;",
    ),
    "two of a profile": (
        {"gpus": 2, "gpu_type": "1g.10gb"},
        "asked for 2 1g.10gb GPUs; only MIG instances would do, and a job can use only one",
        "-g 1g.10gb:1;",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_requests_for_instances_are_described(name: str) -> None:
    asked, text, hint = REFUSED[name]
    refused = refusal(request(**asked), [node("n1", PARTS)], Settings())
    assert refused is not None
    assert refused.text == text
    assert hint in refused.hint


def test_a_pending_job_says_why_it_cannot_have_instances() -> None:
    cards = [*PARTS, gpu_view(1, why_not="drained: fan"), gpu_view(2)]
    seen = snapshot(node("n1", cards), waiting=[job(1, request=request(gpus=2))])
    reason = decide(seen, Settings()).reasons
    (found,) = reason.values()
    assert "GPU 0:0 of node n1: it is a MIG instance (3g.40gb), and a job can use only one" in found.text


def test_a_partitioned_gpu_has_no_capacity_and_each_instance_is_one_gpu() -> None:
    found = capacity_of(ClusterLayout((node("n1", MIXED),), Settings()))
    assert (found.gpus, found.vram_mib) == (4, (40 + 10 + 10 + 80) * 1024)
