"""Queues, users and QOS: who may take how much more, and how it is counted."""

from __future__ import annotations

import pytest
from quota_builders import GIB, amount, denied, queue, quotas_of, terms

from gpusched.model.queue_settings import QosSettings
from gpusched.model.resources import NOTHING

# Limits

VISION = queue("vision", max_gpus=4.0)
TREE = (queue("lab", max_gpus=4.0), queue("vision", "lab"), queue("speech", "lab", max_gpus=3.0))
NIGHT = {"night": QosSettings("night", max_gpus=4.0, max_gpus_per_user=3.0, max_gpus_per_job=2.0)}

ALLOWED = {
    "no queue is configured": ([], {}, {}, terms(), amount(999)),
    "no queue is configured and others hold all": ([], {}, {"vision": 8}, terms(), amount(8)),
    "up to the maximum": ([VISION], {}, {"vision": 3}, terms(), amount(1)),
    "nothing of what is at its maximum": ([VISION], {}, {"vision": 4}, terms(), amount(cpus=9)),
    "nothing of what is above its maximum since it was lowered": ([VISION], {}, {"vision": 9}, terms(), amount(cpus=9)),
    "another queue is at its maximum": ([VISION, queue("nlp")], {}, {"vision": 4}, terms("nlp"), amount(8)),
    "a queue that is not configured has no maximum": ([VISION], {}, {"vision": 4}, terms("gone"), amount(99)),
    "three thirds of a card are one card": (
        [queue("vision", max_gpus=1.0)],
        {},
        {"vision": 2 / 3},
        terms(),
        amount(1 / 3),
    ),
    "a tenth ten times, with a maximum of one": (
        [queue("vision", max_gpus=1.0)],
        {},
        {"vision": sum([0.1] * 9)},
        terms(),
        amount(0.1),
    ),
    "the queue above has room": (TREE, {}, {"speech": 3}, terms(), amount(1)),
    "another user is at the limit of a user": (
        [queue("vision", max_gpus_per_user=2.0, max_running_per_user=1)],
        {},
        {"vision": 2},
        terms(),
        amount(2),
    ),
    "a QOS without limits": ([], {"night": QosSettings("night")}, {}, terms(qos="night"), amount(99)),
    "a QOS that is not configured": ([], NIGHT, {}, terms(qos="gone"), amount(99)),
    "another QOS is limited": ([], NIGHT, {}, terms(), amount(99)),
    "up to the limits of the QOS": ([], NIGHT, {}, terms(qos="night"), amount(2)),
}


@pytest.mark.parametrize(("queues", "qos", "held", "where", "needed"), ALLOWED.values(), ids=ALLOWED)
def test_a_job_may_start_when(queues, qos, held, where, needed):
    assert quotas_of(*queues, held=held, qos=qos).why_not(where, needed) is None


DENIED = {
    "the queue is at its maximum of GPUs": (
        [VISION],
        {"vision": 3},
        amount(2),
        "QueueMaxLimit",
        "queue vision may hold 4 GPUs and holds 3; this job needs 2",
    ),
    "one micro-card more is too much": (
        [queue("vision", max_gpus=1.0)],
        {"vision": 0.5},
        amount(0.500001),
        "QueueMaxLimit",
        "queue vision may hold 1 GPU and holds 0.5; this job needs 0.5",
    ),
    "the queue is at its maximum of cores": (
        [queue("vision", max_cpus=4.0)],
        {},
        amount(cpus=4.5),
        "QueueMaxLimit",
        "queue vision may hold 4 CPUs and holds 0; this job needs 4.5",
    ),
    "the queue is at its maximum of memory": (
        [queue("vision", max_mem_mib=64 * GIB)],
        {},
        amount(mem_mib=65 * GIB),
        "QueueMaxLimit",
        "queue vision may hold 64G of memory and holds 0M; this job needs 65G",
    ),
    "the queue may hold no GPU": (
        [queue("vision", max_gpus=0.0)],
        {},
        amount(1),
        "QueueMaxLimit",
        "queue vision may hold 0 GPUs and holds 0; this job needs 1",
    ),
    "the queue above is at its maximum": (
        TREE,
        {"speech": 3},
        amount(2),
        "QueueMaxLimit",
        "queue lab may hold 4 GPUs and holds 3; this job needs 2",
    ),
    "one job may not be so large": (
        [queue("vision", max_gpus_per_job=2.0)],
        {},
        amount(3),
        "QueueMaxPerJobLimit",
        "a job in queue vision may hold 2 GPUs; this job needs 3",
    ),
    "one job may not be so large for the queue above": (
        [queue("lab", max_gpus_per_job=1.0), queue("vision", "lab", max_gpus_per_job=2.0)],
        {},
        amount(2),
        "QueueMaxPerJobLimit",
        "a job in queue lab may hold 1 GPU; this job needs 2",
    ),
}


@pytest.mark.parametrize(("queues", "held", "needed", "code", "text"), DENIED.values(), ids=DENIED)
def test_a_job_waits_when(queues, held, needed, code, text):
    found = denied(quotas_of(*queues, held=held), needed)
    assert (str(found.code), found.text) == (code, text)


USERS = queue("vision", max_gpus_per_user=2.0, max_running_per_user=2)

DENIED_TO_ANN = {
    "she holds as many GPUs as a user may": (
        [USERS],
        {},
        [("vision", "", 1.5)],
        terms(),
        "QueueMaxPerUserLimit",
        "user ann in queue vision may hold 2 GPUs and holds 1.5; this job needs 1",
    ),
    "she runs as many jobs as a user may": (
        [USERS],
        {},
        [("vision", "", 0), ("vision", "", 0)],
        terms(),
        "QueueMaxPerUserLimit",
        "user ann in queue vision may run 2 jobs at once and runs 2",
    ),
    "she runs her one job": (
        [queue("vision", max_running_per_user=1)],
        {},
        [("vision", "", 0)],
        terms(),
        "QueueMaxPerUserLimit",
        "user ann in queue vision may run 1 job at once and runs 1",
    ),
    "what she holds in two queues counts in the one above": (
        [queue("lab", max_gpus_per_user=2.0), queue("vision", "lab"), queue("speech", "lab")],
        {},
        [("vision", "", 1), ("speech", "", 1)],
        terms(),
        "QueueMaxPerUserLimit",
        "user ann in queue lab may hold 2 GPUs and holds 2; this job needs 1",
    ),
    "a job of the QOS may not be so large": (
        [],
        {"night": QosSettings("night", max_gpus_per_job=0.5)},
        [],
        terms(qos="night"),
        "QOSMaxGRESPerJob",
        "a job of QOS night may hold 0.5 GPUs; this job needs 1",
    ),
    "she holds as much as a user may in the QOS, in whatever queue": (
        [],
        NIGHT,
        [("vision", "night", 2), ("speech", "night", 1)],
        terms(qos="night"),
        "QOSMaxGRESPerUser",
        "user ann in QOS night may hold 3 GPUs and holds 3; this job needs 1",
    ),
    "she runs as many jobs as a user may in the QOS": (
        [],
        {"night": QosSettings("night", max_running_per_user=1)},
        [("vision", "night", 0)],
        terms(qos="night"),
        "QOSMaxJobsPerUserLimit",
        "user ann in QOS night may run 1 job at once and runs 1",
    ),
    "all jobs of the QOS hold as much as they may": (
        [],
        {"night": QosSettings("night", max_gpus=1.0)},
        [("vision", "night", 1)],
        terms(qos="night"),
        "QOSGrpGRES",
        "QOS night may hold 1 GPU and holds 1; this job needs 1",
    ),
}


@pytest.mark.parametrize(("queues", "qos", "jobs", "where", "code", "text"), DENIED_TO_ANN.values(), ids=DENIED_TO_ANN)
def test_ann_waits_when(queues, qos, jobs, where, code, text):
    quotas = quotas_of(*queues, qos=qos)
    for name, of_qos, gpus in jobs:
        quotas.add(terms(name, "ann", of_qos), amount(gpus))
    found = quotas.why_not(where, amount(1))
    assert found is not None
    assert (str(found.code), found.text) == (code, text)


def test_a_user_above_a_lowered_limit_may_start_jobs_without_gpus():
    low = QosSettings("night", max_gpus_per_user=1.0, max_gpus=1.0)
    quotas = quotas_of(queue("vision", max_gpus_per_user=1.0), qos={"night": low})
    quotas.add(terms("vision", "ann", "night"), amount(3))
    assert quotas.why_not(terms(qos="night"), amount(cpus=1)) is None
    assert quotas.why_not(terms(qos="night"), amount(0.1)) is not None


def test_the_facts_match_the_numbers_of_the_sentence():
    found = denied(quotas_of(VISION, held={"vision": 3}), amount(2))
    assert found.facts == {"queue": "vision", "resource": "gpus", "limit": 4.0, "held": 3.0, "needed": 2.0}
    quotas = quotas_of(USERS)
    quotas.add(terms("vision", "ann"), amount(2))
    assert denied(quotas, amount(1)).facts == {
        "queue": "vision",
        "user": "ann",
        "resource": "gpus",
        "limit": 2.0,
        "held": 2.0,
        "needed": 1.0,
    }
    quotas.add(terms("vision", "ann"), amount())
    assert denied(quotas, amount()).facts == {
        "queue": "vision",
        "user": "ann",
        "resource": "jobs",
        "limit": 2,
        "held": 2,
        "needed": 1,
    }
    found = denied(quotas_of(qos=NIGHT), amount(9), qos="night")
    assert found.facts == {"qos": "night", "resource": "gpus", "limit": 2.0, "held": 0.0, "needed": 9.0}


EVERYTHING = queue("vision", max_gpus_per_job=1.0, max_gpus_per_user=1.0, max_gpus=1.0)
ALL_QOS = {"all": QosSettings("all", max_gpus_per_job=0.5, max_gpus_per_user=0.5, max_gpus=0.5)}


def test_limits_are_named_in_the_order_job_user_queue_qos():
    quotas = quotas_of(EVERYTHING, qos=ALL_QOS)
    quotas.add(terms("vision", "ann", "all"), amount(1))

    def code(gpus: float, user: str, qos: str = "all") -> str:
        return str(denied(quotas, amount(gpus), user=user, qos=qos).code)

    assert code(2, "ann") == "QueueMaxPerJobLimit"
    assert code(1, "ann") == "QueueMaxPerUserLimit"
    assert code(1, "bob") == "QueueMaxLimit"
    quotas.remove(terms("vision", "ann"), amount(1))
    assert code(1, "bob") == "QOSMaxGRESPerJob"
    assert code(0.25, "ann") == "QOSMaxGRESPerUser"
    assert code(0.25, "bob") == "QOSGrpGRES"


def test_the_nearest_queue_is_named_first():
    quotas = quotas_of(queue("lab", max_gpus=2.0), queue("vision", "lab", max_gpus=2.0), held={"vision": 2})
    assert denied(quotas, amount(1)).facts["queue"] == "vision"


# Counting


def test_usage_of_a_queue_counts_for_its_parents():
    quotas = quotas_of(queue("top"), queue("mid", "top"), queue("low", "mid"), queue("side", "top"), held={"low": 2})
    quotas.add(terms("side", "zoe"), amount(1, 4, 100))
    assert [quotas.used(name).gpus for name in ("low", "mid", "side", "top")] == [2, 2, 1, 3]
    assert quotas.used("top") == amount(3, 4, 100)
    assert [quotas.running(name) for name in ("low", "mid", "side", "top", "gone")] == [1, 1, 1, 2, 0]


def test_removing_leaves_nothing():
    quotas = quotas_of(VISION, qos=NIGHT)
    empty = quotas.copy()
    pieces = [amount(1 / 3, 0.1, 1.7), amount(0.7, 2 / 3, 5)]
    for piece in pieces:
        quotas.add(terms("vision", "ann", "night"), piece)
    for piece in pieces:
        quotas.remove(terms("vision", "ann", "night"), piece)
    assert quotas.used("vision") == NOTHING == empty.used("vision")
    assert quotas.running("vision") == 0
    assert quotas.why_not(terms(qos="night"), amount(2)) is None


def test_a_gang_counted_in_pieces_is_one_job():
    quotas = quotas_of(queue("vision", max_running_per_user=2))
    quotas.add(terms("vision", "ann"), amount(1))
    quotas.add(terms("vision", "ann"), amount(1), jobs=0)
    assert quotas.running("vision") == 1
    assert quotas.used("vision").gpus == 2
    assert quotas.why_not(terms(), amount(1)) is None


def test_a_copy_is_independent():
    quotas = quotas_of(VISION, qos=NIGHT)
    twin = quotas.copy()
    twin.add(terms("vision", "ann", "night"), amount(4))
    assert quotas.why_not(terms(qos="night"), amount(2)) is None
    assert twin.why_not(terms(), amount(1)) is not None
    assert twin.is_capacity == quotas.is_capacity
    quotas.add(terms("vision", "bob", "night"), amount(1))
    assert twin.used("vision").gpus == 4


def test_a_cycle_of_queues_counts_each_job_once():
    quotas = quotas_of(queue("a", "b", max_gpus=2.0), queue("b", "a"), held={"a": 1})
    assert quotas.used("a").gpus == 1
    assert quotas.used("b").gpus == 0
    assert quotas.why_not(terms("a"), amount(1)) is None
    assert quotas.why_not(terms("a"), amount(2)) is not None


DIVIDES = {
    "no queue": ([], False),
    "a queue with a maximum only": ([VISION], False),
    "guaranteed GPUs": ([queue("a", guaranteed_gpus=1.0)], True),
    "guaranteed cores": ([queue("a", guaranteed_cpus=1.0)], True),
    "guaranteed memory": ([queue("a", guaranteed_mem_mib=1)], True),
    "guaranteed cells": ([queue("a", cells=("n1:4",))], True),
    "a weight": ([queue("a"), queue("b", weight=1.0)], True),
    "an order of its own": ([queue("a", order="fifo")], True),
}


@pytest.mark.parametrize(("queues", "divides"), DIVIDES.values(), ids=DIVIDES)
def test_queues_divide_the_machines_with(queues, divides):
    assert quotas_of(*queues).is_capacity is divides
