"""What people and scripts are told about a job that waits."""

from __future__ import annotations

import json

import pytest
from scenario import HOUR, MINUTE, Scenario, load, running, settings, wants

from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, gpu_view, node

TWO = [node(gpus=2)]
GIB = 1024

FIRST = {
    "how many cards are free, and which job ends when": (
        [node(gpus=4)],
        [running(7, "n1:0,1,2", ends_in=12 * MINUTE)],
        wants(9, 2),
        "needs 2 GPUs, 1 of 4 free; expected in about 12 min, when job 7 ends",
    ),
    "the type it asked for": (
        [node(gpus=[gpu_view(0), gpu_view(1), gpu_view(2, name="T4")])],
        [running(7, "n1:0", ends_in=3 * HOUR)],
        wants(9, 2, gpu_type="A100"),
        "needs 2 A100, 1 of 2 free; expected in about 3 h, when job 7 ends",
    ),
    "the least VRAM it asked for": (
        [node(gpus=[gpu_view(0, vram_total_mib=80 * GIB), gpu_view(1)])],
        [running(7, "n1:0", ends_in=3 * 86400)],
        wants(9, 1, min_vram_mib=40 * GIB),
        "needs 1 GPU with 40G or more, none of 1 free; expected in about 3 days, when job 7 ends",
    ),
    "that the end of a job without a limit is unknown": (
        TWO,
        [running(7, "n1:0")],
        wants(9, 2),
        "needs 2 GPUs, 1 of 2 free; expected when job 7 ends (no time limit)",
    ),
    "the most that is free on one node": (
        [node("n1", gpus=4), node("n2", gpus=4)],
        [running(7, "n1:0", ends_in=30), running(8, "n2:0,1", ends_in=30)],
        wants(9, 4),
        "needs 4 GPUs on one node, the most free on one is 3 (5 of 8 in all); "
        "expected in less than a minute, when job 7 ends",
    ),
    "the room that a slice needs": (
        [node(gpus=2)],
        [
            running(7, "n1:0", ends_in=60, vram=20 * GIB),
            running(8, "n1:1", ends_in=60),
        ],
        wants(9, 1, vram_mib=8 * GIB),
        "needs 8G of VRAM on one card, the most room on one is 3.5G; expected in about 1 min, when job 7 ends",
    ),
    "that no card has room for a slice": (
        [node(gpus=1)],
        [running(7, "n1:0", ends_in=60)],
        wants(9, 1, vram_mib=8 * GIB),
        "needs 8G of VRAM on one card, none has room; expected in about 1 min, when job 7 ends",
    ),
    "how many cards have room for slices": (
        [node(gpus=2)],
        [running(7, "n1:0", ends_in=60)],
        wants(9, 2, vram_mib=8 * GIB),
        "needs 8G of VRAM on each of 2 GPUs, 1 of 2 cards have room; expected in about 1 min, when job 7 ends",
    ),
    "the largest free part of a card": (
        [node(gpus=1)],
        [running(7, "n1:0", ends_in=60, fraction=0.75)],
        wants(9, 1, gpu_fraction=0.5),
        "needs 0.5 of a GPU, the most free on one is 0.25; expected in about 1 min, when job 7 ends",
    ),
    "cores": (
        [node(cpus=16)],
        [running(7, "n1", cpus=14, ends_in=90 * MINUTE)],
        wants(9, cpus=8),
        "needs 8 CPUs, 2 of 16 free; expected in about 2 h, when job 7 ends",
    ),
    "memory": (
        [node(mem_mib=128 * GIB)],
        [running(7, "n1", mem_mib=118 * GIB, ends_in=60)],
        wants(9, mem_mib=64 * GIB),
        "needs 64G of memory, 10G of 128G free; expected in about 1 min, when job 7 ends",
    ),
    "everything that is missing": (
        [node(gpus=2, cpus=8)],
        [running(7, "n1:0,1", cpus=8, ends_in=60)],
        wants(9, 1, cpus=4),
        "needs 1 GPU, none of 2 free, and 4 CPUs, none of 8 free; expected in about 1 min, when job 7 ends",
    ),
    "nothing about what is free to the last core and MiB": (
        [node(gpus=1, cpus=8, mem_mib=2 * GIB)],
        [running(7, "n1:0", cpus=4, mem_mib=GIB, ends_in=60)],
        wants(9, 1, cpus=4, mem_mib=GIB),
        "needs 1 GPU, none of 1 free; expected in about 1 min, when job 7 ends",
    ),
    "nothing about cards that are free to the last one": (
        [node(gpus=2, cpus=8)],
        [running(7, "n1", cpus=8, ends_in=60)],
        wants(9, 2),
        "needs 1 CPU, none of 8 free; expected in about 1 min, when job 7 ends",
    ),
    "nothing about slices that have room on just enough cards": (
        [node(gpus=2, cpus=8)],
        [running(7, "n1", cpus=8, ends_in=60)],
        wants(9, 2, vram_mib=GIB),
        "needs 1 CPU, none of 8 free; expected in about 1 min, when job 7 ends",
    ),
    "the room that other users' slices leave, which is none": (
        [node(gpus=1)],
        [running(7, "n1:0", vram=GIB, uid=5, ends_in=60)],
        wants(9, 1, vram_mib=2 * GIB),
        "needs 2G of VRAM on one card, none has room; expected in about 1 min, when job 7 ends",
    ),
    "the part of a card that slices leave": (
        [node(gpus=1)],
        [running(7, "n1:0", vram=18_048, ends_in=60)],
        wants(9, 1, gpu_fraction=0.5),
        "needs 0.5 of a GPU, the most free on one is 0.25; expected in about 1 min, when job 7 ends",
    ),
    "that all is free but not in one place": (
        [node("n1", gpus=2, cpus=8), node("n2", gpus=2, cpus=8)],
        [running(7, "n1", cpus=8, ends_in=60), running(8, "n2:0,1", cpus=0, ends_in=120)],
        wants(9, 1, cpus=8),
        "needs 1 GPU and 8 CPUs, which is free, but not all of it on one node; "
        "expected in about 1 min, when job 7 ends",
    ),
    "a few of many jobs by name": (
        [node(gpus=8)],
        [running(number + 1, f"n1:{number}", ends_in=60) for number in range(8)],
        wants(9, 8),
        "needs 8 GPUs, none of 8 free; expected in about 1 min, when jobs 1, 2, 3 and 5 more end",
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "text"), FIRST.values(), ids=FIRST)
def test_the_first_blocked_job_shows_its_reason(nodes, held, waiting, text):
    outcome = Scenario(nodes, [waiting], held).outcome()
    assert outcome.codes == {9: "Resources"}
    assert outcome.text(9) == text


def test_the_facts_contain_figures_jobs_and_the_instant():
    held = [running(7, "n1:0,1,2", ends_in=12 * MINUTE)]
    reason = Scenario([node(gpus=4)], [wants(9, 2, cpus=20)], held).outcome().reasons[9]
    assert str(reason.code) == "ReqNodeNotAvail"
    reason = Scenario([node(gpus=4)], [wants(9, 2)], held).outcome().reasons[9]
    assert reason.facts == {
        "needed": {"gpus": 2},
        "free": {"gpus": 1},
        "total": {"gpus": 4},
        "rejected": {"GPU booked": 3, "not enough GPUs": 1},
        "expected_at": NOW + 12 * MINUTE,
        "jobs": ["7"],
    }


def test_every_filter_that_excluded_a_node_is_counted():
    cards = [
        gpu_view(0, name="T4"),
        gpu_view(1, vram_total_mib=8 * GIB),
        gpu_view(2, vram_total_mib=None),
        gpu_view(3, why_not="drained"),
        gpu_view(4, why_not_whole="bob"),
        gpu_view(5, is_present=False),
        gpu_view(6),
    ]
    waiting = wants(9, 1, gpu_type="a100", min_vram_mib=16 * GIB)
    reason = Scenario([node(gpus=cards)], [waiting], [running(1, "n1:6")]).outcome().reasons[9]
    assert reason.facts["rejected"] == {
        "GPU booked": 1,
        "GPU used without a booking": 1,
        "GPU lost": 1,
        "GPU not available": 1,
        "GPU of another type": 1,
        "GPU of unknown VRAM": 1,
        "GPU with less VRAM than requested": 1,
        "not enough GPUs": 1,
    }


def test_a_job_that_would_fit_names_the_job_it_waits_behind():
    outcome = Scenario([node(gpus=4)], [wants(41, 4), wants(42, 1)], [running(1, "n1:0", ends_in=60)]).outcome()
    assert outcome.codes[42] == "Priority"
    assert outcome.text(42) == "waits behind job 41, which needs 4 GPUs"
    assert outcome.reasons[42].facts["behind"] == "41"


def test_a_job_that_would_not_fit_either_names_the_missing_resources_and_the_job_in_front():
    outcome = Scenario([node(gpus=4)], [wants(41, 4), wants(42, 2)], [running(1, "n1:0,1,2")]).outcome()
    assert outcome.codes[42] == "Priority"
    assert outcome.text(42) == "needs 2 GPUs, 1 of 4 free; job 41, which needs 4 GPUs, goes first"


DESCRIPTIONS = {
    "16 CPUs": wants(8, cpus=16),
    "1 CPU and 60G of memory": wants(8, mem_mib=60 * GIB),
    "2 A100 GPUs": wants(8, 2, gpu_type="A100"),
    "20G of VRAM": wants(8, 1, vram_mib=20 * GIB),
    "0.75 of a GPU": wants(8, 1, gpu_fraction=0.75),
    "0.75 of one A100 GPU": wants(8, 1, gpu_fraction=0.75, gpu_type="A100"),
}


@pytest.mark.parametrize(("what", "first"), DESCRIPTIONS.items(), ids=DESCRIPTIONS)
def test_the_job_in_front_is_described_by(what, first):
    held = [running(1, "n1:0,1", cpus=8, mem_mib=32 * GIB)]
    outcome = Scenario(TWO, [first, wants(9, 1, cpus=12)], held).outcome()
    assert f"job 8, which needs {what}, goes first" in outcome.text(9)


def test_reasons_count_resources_free_after_this_cycle():
    held = [running(1, "n1:0", ends_in=60)]
    outcome = Scenario(TWO, [wants(8, 2), wants(9, 1, limit=60)], held).outcome()
    assert outcome.starts == {9: "n1:1"}
    assert outcome.text(8).startswith("needs 2 GPUs, none of 2 free;")
    assert outcome.reasons[8].facts["jobs"] == ["1"]


NOT_AVAILABLE = {
    "which card is drained and why": (
        [node(gpus=[gpu_view(0, why_not="drained: fan"), gpu_view(1)])],
        wants(9, 2),
        "needs 2 GPUs; not available: GPU 0 of node n1: drained: fan",
    ),
    "who holds the card": (
        [node(gpus=[gpu_view(0, why_not_whole="python (pid 7) of bob holds 9G")])],
        wants(9, 1),
        "needs 1 GPU; not available: GPU 0 of node n1: python (pid 7) of bob holds 9G",
    ),
    "that the card is lost": (
        [node(gpus=[gpu_view(0, is_present=False)])],
        wants(9, 1),
        "needs 1 GPU; not available: GPU 0 of node n1: lost",
    ),
    "that the node is drained": (
        [node(why_not="node n1 is drained: new disks")],
        wants(9),
        "needs 1 CPU; not available: node n1 is drained: new disks",
    ),
    "that the driver is broken": (
        [node(gpu_error="version mismatch, reboot needed")],
        wants(9, 1),
        "needs 1 GPU; not available: the GPU driver of node n1 does not work: version mismatch, reboot needed",
    ),
    "that a slice needs a card whose size can be read": (
        [node(gpus=[gpu_view(0, vram_total_mib=None)])],
        wants(9, 1, vram_mib=100),
        "needs 100M of VRAM; not available: GPU 0 of node n1: its VRAM cannot be read",
    ),
    "that a slice needs a card that can be shared": (
        [node(gpus=[gpu_view(0, can_share=False)])],
        wants(9, 1, vram_mib=100),
        "needs 100M of VRAM; not available: GPU 0 of node n1: it cannot be shared",
    ),
    "that the hardware has gone": (
        [node(gpus=1)],
        wants(9, 4),
        "needs 4 GPUs; no node has that now",
    ),
    "three of many cards": (
        [node(gpus=[gpu_view(index, why_not=f"fault {index}") for index in range(5)])],
        wants(9, 1),
        "needs 1 GPU; not available: GPU 0 of node n1: fault 0; GPU 1 of node n1: fault 1; "
        "GPU 2 of node n1: fault 2; and 2 more",
    ),
}


@pytest.mark.parametrize(("nodes", "waiting", "text"), NOT_AVAILABLE.values(), ids=NOT_AVAILABLE)
def test_a_job_with_unusable_hardware_says_so(nodes, waiting, text):
    outcome = Scenario(nodes, [waiting]).outcome()
    assert outcome.codes == {9: "ReqNodeNotAvail"}
    assert outcome.text(9) == text


def test_unavailable_gpus_are_listed_in_the_facts():
    nodes = [node(gpus=[gpu_view(0, why_not="drained: fan"), gpu_view(1, name="T4", why_not="x")])]
    reason = Scenario(nodes, [wants(9, 1, gpu_type="a100")]).outcome().reasons[9]
    why = "GPU 0 of node n1: drained: fan"
    assert reason.facts["unavailable"] == [{"node": "n1", "gpu": 0, "why": why}]


CEILINGS = {
    "the CPU load of node n1 is 90%, the ceiling is 50%": ({"cpu_fraction": 0.5}, load(cpu_fraction=0.9)),
    "the CPU load of node n1 is not known yet": ({"cpu_fraction": 0.5}, load(cpu_fraction=None)),
    "the load of node n1 is not known": ({"cpu_fraction": 0.5}, None),
    "memory in use on node n1 would be 75% with this job, the ceiling is 50%": (
        {"mem_fraction": 0.5},
        load(mem_available_mib=16 * GIB),
    ),
    "disk traffic of node n1 is 200 MiB/s, the ceiling is 100 MiB/s": (
        {"disk_mib_s": 100.0},
        load(disk_mib_s=200.0),
    ),
    "the network traffic of node n1 is not known yet": ({"net_mib_s": 100.0}, load(net_mib_s=None)),
}


@pytest.mark.parametrize(("text", "case"), CEILINGS.items(), ids=CEILINGS)
def test_a_job_blocked_only_by_load_says_so(text, case):
    ceiling, measured = case
    outcome = Scenario([node(load=measured)], [wants(9)], settings=settings(ceiling=ceiling)).outcome()
    assert outcome.codes == {9: "LoadCeiling"}
    assert outcome.text(9) == text
    assert outcome.reasons[9].facts["load"] == [text]
    assert outcome.reserved == {}


def test_a_job_blocked_by_load_does_not_block_jobs_that_fit_the_load():
    ceiling = settings(ceiling={"mem_fraction": 0.5})
    nodes = [node(load=load(mem_available_mib=40 * GIB))]
    outcome = Scenario(nodes, [wants(8, mem_mib=16 * GIB), wants(9)], settings=ceiling).outcome()
    assert outcome.starts == {9: "n1"}
    assert outcome.codes == {8: "LoadCeiling"}


def test_facts_are_json_values():
    held = [running(1, "n1:0", ends_in=60)]
    jobs = [wants(7, 2), wants(8, 1, vram_mib=30 * GIB), wants(9, 1)]
    for reason in Scenario(TWO, jobs, held).outcome().reasons.values():
        assert json.loads(json.dumps(dict(reason.facts))) == reason.facts


# --- licenses -----------------------------------------------------------------------------------------

MATLAB = (("matlab", 1),)
ONE_LICENSE = settings(license={"matlab": 1})


def test_a_license_wait_names_the_license_and_its_users():
    held = [running(7, "n1:0", licenses=MATLAB, user="ann", ends_in=2 * HOUR), running(8, "n1", ends_in=HOUR)]
    outcome = Scenario(TWO, [wants(9, 1, licenses=MATLAB)], held, ONE_LICENSE).outcome()
    assert outcome.codes == {9: "Licenses"}
    assert outcome.text(9) == (
        "needs 1 license matlab, none of 1 free (in use by job 7 of ann); expected in about 2 h, when job 7 ends"
    )
    assert outcome.reasons[9].facts["jobs"] == ["7"]


def test_a_license_used_on_another_node_is_waited_for():
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    held = [running(7, "n2:0", licenses=MATLAB, user="ann", ends_in=HOUR)]
    outcome = Scenario(nodes, [wants(9, 1, nodelist=("n1",), licenses=MATLAB)], held, ONE_LICENSE).outcome()
    assert outcome.text(9).endswith("expected in about 60 min, when job 7 ends")


def test_a_license_wait_does_not_name_a_job_in_front_that_needs_gpus():
    held = [running(7, "n1:0", licenses=MATLAB, user="ann", ends_in=HOUR)]
    waiting = [wants(8, 2, limit=HOUR), wants(9, licenses=MATLAB, limit=HOUR)]
    outcome = Scenario(TWO, waiting, held, ONE_LICENSE).outcome()
    assert outcome.codes == {8: "Resources", 9: "Licenses"}
    assert outcome.text(9) == "needs 1 license matlab, none of 1 free (in use by job 7 of ann)"


def test_a_license_taken_in_this_cycle_is_shown_as_in_use():
    waiting = [wants(8, licenses=MATLAB, user="ann"), wants(9, licenses=MATLAB, limit=HOUR)]
    outcome = Scenario(TWO, waiting, (), ONE_LICENSE).outcome()
    assert outcome.starts == {8: "n1"}
    assert outcome.text(9).startswith("needs 1 license matlab, none of 1 free (in use by job 8 of ann)")


def test_a_license_reserved_for_an_earlier_job_is_reported_as_such():
    held = [running(7, "n1:0,1", ends_in=HOUR)]
    waiting = [wants(8, 1, licenses=MATLAB, limit=HOUR), wants(9, licenses=MATLAB, limit=3 * HOUR)]
    outcome = Scenario(TWO, waiting, held, ONE_LICENSE).outcome()
    assert outcome.codes == {8: "Resources", 9: "Priority"}
    assert outcome.text(9) == "waits behind job 8, which needs 1 GPU and 1 license matlab"


def test_a_removed_license_is_reported_instead_of_hardware():
    outcome = Scenario(TWO, [wants(9, licenses=(("matlab", 2),))], (), ONE_LICENSE).outcome()
    assert outcome.codes == {9: "Licenses"}
    assert outcome.text(9) == "needs 2 licenses matlab; there is 1 in all"


# --- who is in front ----------------------------------------------------------------------------------


def test_a_job_names_the_reservation_it_would_delay_and_not_the_first():
    nodes = [node("n1", gpus=2), node("n2", gpus=2)]
    held = [running(1, "n1:0", ends_in=HOUR), running(2, "n2:0", ends_in=HOUR)]
    waiting = [
        wants(41, 2, nodelist=("n1",), limit=HOUR),
        wants(42, 2, nodelist=("n2",), limit=HOUR),
        wants(43, 1, nodelist=("n2",), limit=9 * HOUR),
    ]
    outcome = Scenario(nodes, waiting, held, settings(priority={"backfill_depth": 2})).outcome()
    assert outcome.text(43) == "waits behind job 42, which needs 2 GPUs"


def test_a_reserved_job_that_would_fit_names_the_job_it_waits_behind():
    held = [running(1, "n1:0", ends_in=HOUR)]
    waiting = [wants(41, 2, limit=HOUR), wants(42, 1, limit=9 * HOUR)]
    outcome = Scenario(TWO, waiting, held, settings(priority={"backfill_depth": 2})).outcome()
    assert outcome.reserved[42] == ("n1:0", 2 * HOUR)
    assert (outcome.codes[42], outcome.text(42)) == ("Priority", "waits behind job 41, which needs 2 GPUs")


def test_a_job_behind_reservations_names_the_job_that_runs_first():
    held = [running(1, "n1:0,1", ends_in=HOUR)]
    waiting = [wants(41, 2, limit=HOUR), wants(42, 2, limit=2 * HOUR)]
    outcome = Scenario(TWO, waiting, held, settings(priority={"backfill_depth": 2})).outcome()
    assert outcome.text(42) == "needs 2 GPUs, none of 2 free; expected in about 2 h, when job 41 ends"


APART = {
    "another resource": (
        [node("n1", gpus=2, resources=(("scratch", 1),))],
        [running(1, "n1:0", ends_in=HOUR, resources=(("scratch", 1),))],
        wants(43, resources=(("scratch", 1),), limit=9 * HOUR),
        "needs 1 of scratch, none of 1 free",
    ),
    "cards of another type": (
        [node(gpus=[gpu_view(0), gpu_view(1), gpu_view(2, name="T4")])],
        [running(1, "n1:0,2", ends_in=HOUR)],
        wants(43, 1, gpu_type="t4", limit=9 * HOUR),
        "needs 1 t4, none of 1 free",
    ),
    "cores of another node": (
        [node("n1", gpus=2), node("n2")],
        [running(1, "n1:0", ends_in=HOUR), running(2, "n2", cpus=16, ends_in=HOUR)],
        wants(43, nodelist=("n2",), limit=9 * HOUR),
        "needs 1 CPU, none of 16 free (on node n2)",
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "text"), APART.values(), ids=APART)
def test_an_unrelated_job_in_front_is_not_named(nodes, held, waiting, text):
    outcome = Scenario(nodes, [wants(41, 2, gpu_type="A100", limit=HOUR), waiting], held).outcome()
    assert outcome.codes == {41: "Resources", 43: "Resources"}
    assert outcome.text(43) == text


def test_a_job_behind_others_for_the_same_license_names_the_first():
    held = [running(7, "n1", licenses=MATLAB, user="ann", ends_in=HOUR)]
    waiting = [wants(8, licenses=MATLAB, limit=HOUR), wants(9, licenses=MATLAB, limit=2 * HOUR)]
    outcome = Scenario(TWO, waiting, held, ONE_LICENSE).outcome()
    assert outcome.codes == {8: "Licenses", 9: "Licenses"}
    assert outcome.text(9).endswith(
        "(in use by job 7 of ann); job 8, which needs 1 CPU and 1 license matlab, goes first"
    )


# --- preemption that is still forbidden ---------------------------------------------------------------

URGENT = {"urgent": {"tier": 1, "preempts": ("low",)}, "low": {}}
PROTECTED = settings(qos=URGENT, preempt={"min_run_s": 600.0})

YOUNG = {
    "the run that is protected and for how long": (
        [running(7, "n1:0,1", qos="low", since=60)],
        "needs 1 GPU, none of 2 free; may preempt job 7 in about 9 min, once its protected time (min_run_s) is over",
    ),
    "the one that is protected for the shortest time": (
        [running(7, "n1:0", qos="low", since=60), running(8, "n1:1", qos="low", since=300)],
        "needs 1 GPU, none of 2 free; may preempt job 8 in about 5 min, once its protected time (min_run_s) is over",
    ),
    "nothing of a preemption where a run ends before that": (
        [running(7, "n1:0,1", qos="low", since=60, ends_in=120)],
        "needs 1 GPU, none of 2 free; expected in about 2 min, when job 7 ends",
    ),
    "nothing of a preemption that is not its right": (
        [running(7, "n1:0,1", qos="urgent", since=60)],
        "needs 1 GPU, none of 2 free; expected when job 7 ends (no time limit)",
    ),
}


@pytest.mark.parametrize(("held", "text"), YOUNG.values(), ids=YOUNG)
def test_a_job_that_may_preempt_says_so(held, text):
    outcome = Scenario(TWO, [wants(9, 1, qos="urgent")], held, PROTECTED).outcome()
    assert outcome.preempts == {}
    assert (outcome.codes[9], outcome.text(9)) == ("Resources", text)


def test_all_protected_runs_in_the_way_are_waited_for():
    held = [running(7, "n1:0", qos="low", since=60), running(8, "n1:1", qos="low", since=300)]
    reason = Scenario(TWO, [wants(9, 2, qos="urgent")], held, PROTECTED).outcome().reasons[9]
    assert "may preempt jobs 7 and 8 in about 9 min, once their protected time (min_run_s) is over" in reason.text
    assert (reason.facts["preempt_at"], reason.facts["preempts"]) == (NOW + 540, ["7", "8"])


def test_a_future_reclaim_is_reported():
    queues = {"a": {"guaranteed_gpus": 1}, "b": {"guaranteed_gpus": 1}}
    rules = settings(queue=queues, preempt={"min_run_s": 600.0})
    held = [running(7, "n1:0", queue="b", since=60), running(8, "n1:1", queue="b", since=60)]
    outcome = Scenario(TWO, [wants(9, 1, queue="a")], held, rules).outcome()
    assert "may preempt job 8 in about 9 min" in outcome.text(9)


def test_a_job_waiting_for_runs_being_stopped_says_so():
    held = [running(number, f"n1:{number - 7}", is_stopping=True, grace_s=90.0 * (number - 6)) for number in (7, 8)]
    outcome = Scenario(TWO, [wants(9, 2, limit=HOUR)], held).outcome()
    assert outcome.text(9) == ("needs 2 GPUs, none of 2 free; expected in about 3 min: jobs 7 and 8 are being stopped")
    assert outcome.reasons[9].facts["expected_at"] == NOW + 180
    half = [held[0], running(8, "n1:1")]
    assert "(not all have a time limit)" in Scenario(TWO, [wants(9, 2, limit=HOUR)], half).outcome().text(9)


# --- ids ----------------------------------------------------------------------------------------------


def test_array_tasks_are_shown_by_their_display_ids():
    names = {7: "5_2", 8: "6_1", 9: "6_2"}
    held = [running(7, "n1:0,1", ends_in=HOUR)]
    made = Scenario(TWO, [wants(8, 2), wants(9, 1)], held).snapshot()
    reasons = decide(replace(made, name_of=lambda job_id: names[job_id]), settings()).reasons
    first, second = (reasons[waiting.key].render() for waiting in made.pending)
    assert (first.facts["jobs"], second.facts["behind"]) == (["5_2"], "6_1")
    assert "when job 5_2 ends" in first.text
    assert "job 6_1, which" in second.text
