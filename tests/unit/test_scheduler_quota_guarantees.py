"""What queues are guaranteed: who goes first, who takes back what, who has lent to whom."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from quota_builders import GIB, amount, denied, queue, quotas_of, settings_of, terms

from gpusched.model.planner_settings import PreemptSettings
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.limits import quota_problems as problems
from gpusched.scheduler.quota import Quotas

# Guarantees

FOUR = queue("vision", guaranteed_gpus=4.0)
WITHIN = {
    "nothing is held": ([FOUR], {}, amount(4), True),
    "one too many": ([FOUR], {}, amount(4.5), False),
    "the rest of it": ([FOUR], {"vision": 3}, amount(1), True),
    "more than the rest": ([FOUR], {"vision": 3}, amount(2), False),
    "others hold all the machines": ([FOUR, queue("nlp")], {"nlp": 8}, amount(4), True),
    "no guarantee": ([queue("vision")], {}, amount(1), False),
    "a queue that is not configured": ([queue("nlp", guaranteed_gpus=8.0)], {}, amount(1), False),
    "cores are not guaranteed, so they do not matter": ([FOUR], {}, amount(1, cpus=999), True),
    "nothing that is guaranteed is needed": ([FOUR], {}, amount(cpus=1), False),
    "cores are guaranteed too, and too many": (
        [queue("vision", guaranteed_gpus=4.0, guaranteed_cpus=8.0)],
        {},
        amount(1, cpus=9),
        False,
    ),
    "GPUs are above the guarantee, cores are not, and only cores are needed": (
        [queue("vision", guaranteed_gpus=1.0, guaranteed_cpus=8.0)],
        {"vision": 2},
        amount(cpus=8),
        True,
    ),
    "memory": ([queue("vision", guaranteed_mem_mib=100)], {}, amount(mem_mib=101), False),
    "cells are GPUs that are guaranteed": ([queue("vision", cells=("4", "n1:2"))], {}, amount(6), True),
    "more than the cells": ([queue("vision", cells=("4", "n1:2"))], {}, amount(7), False),
    "cells are part of the guaranteed GPUs": (
        [queue("vision", cells=("4",), guaranteed_gpus=5.0)],
        {},
        amount(6),
        False,
    ),
    "lent down the tree": ([queue("lab", guaranteed_gpus=4.0), queue("vision", "lab")], {}, amount(4), True),
    "a sibling has used up what comes down the tree": (
        [queue("lab", guaranteed_gpus=4.0), queue("vision", "lab"), queue("speech", "lab")],
        {"speech": 3},
        amount(2),
        False,
    ),
    "beyond its own, within that of the queue above": (
        [queue("lab", guaranteed_gpus=4.0), queue("vision", "lab", guaranteed_gpus=1.0)],
        {"vision": 1},
        amount(3),
        True,
    ),
    "what siblings are guaranteed is there for all of them": (
        [queue("lab"), queue("vision", "lab"), queue("speech", "lab", guaranteed_gpus=4.0)],
        {},
        amount(4),
        True,
    ),
}


@pytest.mark.parametrize(("queues", "held", "needed", "is_within"), WITHIN.values(), ids=WITHIN)
def test_a_job_is_within_the_guarantee(queues, held, needed, is_within):
    assert quotas_of(*queues, held=held).is_within_guarantee("vision", needed) is is_within


def test_a_queue_has_a_guarantee():
    quotas = quotas_of(queue("lab", guaranteed_gpus=1.0), queue("a", "lab", guaranteed_gpus=2.0), queue("b", "lab"))
    assert [quotas.guaranteed(name).gpus for name in ("lab", "a", "b", "gone")] == [2, 2, 0, 0]


# Who goes first


def order_of(quotas: Quotas, *names: str, needed: float = 1.0) -> list[str]:
    return sorted(names, key=lambda name: quotas.rank(name, amount(needed)))


ORDERS = {
    "within the guarantee before beyond it": (
        [queue("a"), queue("b", guaranteed_gpus=4.0)],
        {},
        ["b", "a"],
    ),
    "of two within, the one that has had less of its own": (
        [queue("a", guaranteed_gpus=4.0), queue("b", guaranteed_gpus=2.0), queue("c", guaranteed_gpus=2.0)],
        {"a": 1, "b": 1},
        ["c", "a", "b"],
    ),
    "of two beyond, the one that has borrowed less": (
        [queue("a", guaranteed_gpus=1.0), queue("b", guaranteed_gpus=3.0)],
        {"a": 3, "b": 4},
        ["b", "a"],
    ),
    "who has the higher weight may borrow more": (
        [queue("a", weight=1.0), queue("b", weight=3.0)],
        {"a": 1, "b": 2},
        ["b", "a"],
    ),
    "who has no weight set has one": ([queue("a"), queue("b", weight=2.0)], {"a": 1, "b": 1}, ["b", "a"]),
    "who has no weight borrows last": ([queue("a", weight=0.0), queue("b")], {"b": 7}, ["b", "a"]),
    "equal queues go by name": ([queue("b"), queue("a"), queue("c")], {}, ["a", "b", "c"]),
    "no settings though others have them is last": (
        [queue("b")],
        {"b": 8},
        ["b", "a"],
    ),
    "no settings at all: who holds less": ([], {"a": 2, "b": 1}, ["b", "a"]),
    "beyond is beyond, however little is held": (
        [queue("a"), queue("b", guaranteed_gpus=4.0)],
        {"b": 3},
        ["b", "a"],
    ),
    "the queues above are compared first": (
        [
            queue("left", guaranteed_gpus=1.0),
            queue("a", "left"),
            queue("right", guaranteed_gpus=6.0),
            queue("b", "right"),
            queue("c", "right"),
        ],
        {"a": 1, "b": 4},
        ["c", "b", "a"],
    ),
}


@pytest.mark.parametrize(("queues", "held", "wanted"), ORDERS.values(), ids=ORDERS)
def test_the_first_queue_is(queues, held, wanted):
    assert order_of(quotas_of(*queues, held=held), *reversed(wanted)) == wanted


def test_a_job_that_does_not_fit_the_guarantee_goes_beyond_it():
    quotas = quotas_of(queue("a", guaranteed_gpus=4.0), queue("b", guaranteed_gpus=2.0), held={"a": 3})
    assert quotas.rank("a", amount(1))[0][0] == 0
    assert quotas.rank("a", amount(2))[0][0] == 1
    assert quotas.rank("b", amount(2)) < quotas.rank("a", amount(2))


def test_borrowing_is_counted_by_its_dominant_share():
    quotas = quotas_of(queue("cores"), queue("gpus"))
    quotas.add(terms("cores", "ann"), amount(cpus=32))
    quotas.add(terms("gpus", "ann"), amount(gpus=2, cpus=2))
    assert quotas.rank("cores", amount(1)) == ((1, 0.5, "cores"),)
    assert quotas.rank("gpus", amount(1)) == ((1, 0.25, "gpus"),)


def test_without_machines_the_name_decides():
    settings = settings_of(queue("a"), queue("b"))
    quotas = Quotas(settings, ClusterLayout([], settings))
    quotas.add(terms("a", "ann"), amount(1))
    assert order_of(quotas, "b", "a") == ["a", "b"]


# Taking back

A, B = queue("a", guaranteed_gpus=4.0), queue("b", guaranteed_gpus=4.0)
LEFT = (queue("left", guaranteed_gpus=4.0), queue("l1", "left", guaranteed_gpus=2.0), queue("l2", "left"))
RIGHT = (queue("right", guaranteed_gpus=4.0), queue("r1", "right", guaranteed_gpus=2.0), queue("r2", "right"))

RECLAIMS = {
    "what was lent": ([A, B], {"b": 8}, "a", 2, "b", 2, True),
    "all of it at once": ([A, B], {"b": 8}, "a", 4, "b", 4, True),
    "more than its own": ([A, B], {"b": 8}, "a", 5, "b", 4, False),
    "its own is in use already": ([A, B], {"a": 4, "b": 8}, "a", 1, "b", 1, False),
    "from a queue within its guarantee": ([A, B], {"b": 4}, "a", 1, "b", 1, False),
    "a job whose end would leave less than the guarantee": ([A, B], {"b": 5}, "a", 1, "b", 2, False),
    "from itself": ([A, B], {"a": 8}, "a", 1, "a", 1, False),
    "from a queue without guarantee": ([A, queue("b")], {"b": 8}, "a", 4, "b", 8, True),
    "from a queue that is not configured": ([A], {"gone": 8}, "a", 4, "gone", 4, True),
    "for a queue that is not configured": ([A, B], {"b": 8}, "gone", 1, "b", 1, False),
    "for a queue without guarantee": ([queue("a"), B], {"b": 8}, "a", 1, "b", 1, False),
    "from a queue that is not preemptible": ([A, replace(B, preemptible=False)], {"b": 8}, "a", 1, "b", 1, False),
    "from a queue below one that is not preemptible": (
        [A, replace(B, preemptible=False), queue("b1", "b")],
        {"b1": 8},
        "a",
        1,
        "b1",
        1,
        False,
    ),
    "across the tree": ([*LEFT, *RIGHT], {"r2": 8}, "l2", 4, "r2", 4, True),
    "across the tree what keeps the other side its guarantee": (
        [*LEFT, *RIGHT],
        {"r1": 3, "r2": 2},
        "l2",
        1,
        "r1",
        1,
        True,
    ),
    "across the tree below the guarantee of the leaf": ([*LEFT, *RIGHT], {"r1": 2, "r2": 6}, "l2", 1, "r1", 1, False),
    "across the tree while the other side holds no more than its own": (
        [*LEFT, *RIGHT],
        {"r1": 4},
        "l2",
        1,
        "r1",
        1,
        False,
    ),
    "across the tree while the own side holds all of its own": (
        [*LEFT, *RIGHT],
        {"l2": 4, "r2": 6},
        "l1",
        1,
        "r2",
        1,
        False,
    ),
    "from a sibling that uses what is guaranteed to this leaf": ([*LEFT], {"l2": 4}, "l1", 2, "l2", 2, True),
    "from a sibling, by a leaf without a guarantee of its own": ([*LEFT], {"l1": 4}, "l2", 1, "l1", 1, False),
    "from the queue above itself": ([*LEFT], {"left": 8}, "l1", 1, "left", 1, False),
}


@pytest.mark.parametrize(
    ("queues", "held", "claimant", "needed", "victim", "lost", "may"), RECLAIMS.values(), ids=RECLAIMS
)
def test_borrowed_resources_are_reclaimed(queues, held, claimant, needed, victim, lost, may):
    quotas = quotas_of(*queues, held=held)
    assert quotas.may_reclaim(claimant, amount(needed), victim, amount(lost)) is may


def test_no_resource_is_reclaimed_when_disabled():
    quotas = quotas_of(A, B, held={"b": 8}, preempt=PreemptSettings(reclaim=False))
    assert not quotas.may_reclaim("a", amount(1), "b", amount(1))


def test_cores_are_not_reclaimed_for_gpus():
    quotas = quotas_of(A, B)
    quotas.add(terms("b", "zoe"), amount(gpus=2, cpus=64))
    assert not quotas.may_reclaim("a", amount(1, cpus=8), "b", amount(cpus=64))


def test_a_job_on_guaranteed_gpus_is_not_reclaimed_for_its_cores():
    quotas = quotas_of(queue("a", guaranteed_gpus=4.0, guaranteed_cpus=16.0), B)
    quotas.add(terms("b", "zoe"), amount(gpus=4, cpus=64))
    assert not quotas.may_reclaim("a", amount(cpus=8), "b", amount(gpus=1, cpus=16))


def test_cores_are_reclaimed_where_they_are_guaranteed():
    quotas = quotas_of(queue("a", guaranteed_cpus=16.0), B)
    quotas.add(terms("b", "zoe"), amount(gpus=2, cpus=64))
    assert quotas.may_reclaim("a", amount(cpus=8), "b", amount(cpus=63))


def test_a_queue_below_its_guaranteed_cores_can_still_return_gpus():
    quotas = quotas_of(A, queue("b", guaranteed_gpus=4.0, guaranteed_cpus=32.0))
    quotas.add(terms("b", "zoe"), amount(gpus=6, cpus=6))
    assert quotas.may_reclaim("a", amount(1), "b", amount(gpus=1, cpus=1))


def test_queues_with_different_guarantees_do_not_reclaim_in_turns():
    quotas = quotas_of(queue("a", guaranteed_cpus=32.0), queue("b", guaranteed_gpus=4.0))
    both = amount(gpus=1, cpus=8)
    quotas.add(terms("a", "zoe"), both)
    quotas.add(terms("b", "zoe"), both)
    assert not quotas.may_reclaim("a", both, "b", both), "the GPU is within the guarantee of b"
    assert quotas.may_reclaim("b", both, "a", both), "a is guaranteed cores, and no GPU"


def test_a_queue_at_its_guaranteed_cores_can_return_gpus():
    quotas = quotas_of(A, queue("b", guaranteed_gpus=4.0, guaranteed_cpus=6.0))
    quotas.add(terms("b", "zoe"), amount(gpus=6, cpus=6))
    assert quotas.may_reclaim("a", amount(1), "b", amount(gpus=1, cpus=1))


CUTS = {
    "a job that is partly on borrowed GPUs": ({"b": 5}, 1, 2, True),
    "a job on all that its queue holds": ({"b": 8}, 4, 8, True),
    "a job of a queue within its guarantee": ({"b": 4}, 1, 1, False),
    "for more than is guaranteed": ({"b": 8}, 5, 8, False),
}


@pytest.mark.parametrize(("held", "needed", "lost", "may"), CUTS.values(), ids=CUTS)
def test_as_a_last_resort_the_victim_is(held, needed, lost, may):
    quotas = quotas_of(A, B, held=held)
    assert quotas.may_reclaim("a", amount(needed), "b", amount(lost), may_cut=True) is may


def test_resources_being_freed_are_not_reclaimed_twice():
    quotas = quotas_of(A, B)
    for _ in range(6):
        quotas.add(terms("b", "zoe"), amount(1))
    taken = 0
    while taken < 9 and quotas.may_reclaim("a", amount(1), "b", amount(1)):
        quotas.leave("b", amount(1))
        quotas.add(terms("a", "ann"), amount(1))
        taken += 1
    assert taken == 2


def test_room_being_made_for_a_queue_counts_against_its_guarantee():
    quotas = quotas_of(queue("a", guaranteed_gpus=2.0), queue("b"), held={"b": 8})
    for _ in range(2):
        assert quotas.may_reclaim("a", amount(1), "b", amount(1))
        quotas.leave("b", amount(1))
        quotas.add(terms("a", "ann"), amount(1))
    assert not quotas.may_reclaim("a", amount(1), "b", amount(1))


def test_resources_being_freed_still_count_against_limits():
    quotas = quotas_of(queue("lab", max_gpus=4.0), queue("vision", "lab", guaranteed_gpus=4.0), held={"vision": 4})
    quotas.leave("vision", amount(4))
    assert denied(quotas, amount(1)).facts["held"] == 4
    assert quotas.used("lab").gpus == 4
    assert quotas.is_within_guarantee("vision", amount(4))


@pytest.mark.parametrize("kind", ["gpus", "cpus", "mem_mib"])
def test_resources_being_freed_free_the_guarantee_of_every_kind(kind):
    quotas = quotas_of(queue("top", **{f"guaranteed_{kind}": 4}), queue("vision", "top"))
    four, one = Resources(**{kind: 4.0}), Resources(**{kind: 1.0})
    quotas.add(terms("vision", "zoe"), four)
    quotas.leave("vision", one)
    assert quotas.is_within_guarantee("vision", one)
    assert not quotas.is_within_guarantee("vision", one + one)


def test_a_copy_keeps_resources_being_freed():
    quotas = quotas_of(A, B, held={"b": 5})
    quotas.leave("b", amount(1))
    twin = quotas.copy()
    assert not twin.may_reclaim("a", amount(1), "b", amount(1))
    twin.leave("b", amount(4))
    assert quotas.is_within_guarantee("b", amount(1)) is False
    assert twin.is_within_guarantee("b", amount(4)) is True


# The ledger


def ledger(*queues: QueueSettings, held: Mapping[str, float]) -> list[tuple[str, str, float]]:
    return [(loan.lender, loan.borrower, loan.amount.gpus) for loan in quotas_of(*queues, held=held).ledger()]


LEDGERS = {
    "nobody holds anything": ([A, B], {}, []),
    "everybody holds their own": ([A, B], {"a": 4, "b": 4}, []),
    "one holds what the other leaves": ([A, B], {"a": 1, "b": 7}, [("a", "b", 3)]),
    "a queue that is not configured borrows too": ([A, B], {"a": 1, "gone": 6}, [("a", "gone", 3), ("b", "gone", 3)]),
    "what is promised to nobody is lent by nobody": (
        [queue("a", guaranteed_gpus=4.0), queue("b", guaranteed_gpus=2.0)],
        {"b": 4},
        [],
    ),
    "beyond what is promised to nobody it is a loan": (
        [queue("a", guaranteed_gpus=4.0), queue("b", guaranteed_gpus=2.0)],
        {"b": 5},
        [("a", "b", 1)],
    ),
    "lenders and borrowers go by name": (
        [queue("a", guaranteed_gpus=3.0), queue("b", guaranteed_gpus=5.0), queue("c"), queue("d")],
        {"c": 4, "d": 3},
        [("a", "c", 3), ("b", "c", 1), ("b", "d", 3)],
    ),
    "below one queue": (LEFT, {"l2": 3}, [("l1", "l2", 1)]),
    "below one queue while others lend to it": (
        [*LEFT, *RIGHT],
        {"l2": 6},
        [("right", "left", 2), ("l1", "l2", 2)],
    ),
    "no guarantee, no loan": ([queue("a"), queue("b")], {"a": 8}, []),
    "more promised than there is": (
        [queue("a", guaranteed_gpus=8.0), queue("b", guaranteed_gpus=8.0)],
        {"b": 8},
        [],
    ),
    "parts of a card": ([A, B], {"a": 3.5, "b": 4.5}, [("a", "b", 0.5)]),
}


@pytest.mark.parametrize(("queues", "held", "wanted"), LEDGERS.values(), ids=LEDGERS)
def test_the_ledger_balances_when(queues, held, wanted):
    assert ledger(*queues, held=held) == wanted


def test_all_kinds_between_two_queues_are_one_loan():
    quotas = quotas_of(queue("a", guaranteed_gpus=8.0, guaranteed_cpus=64.0, guaranteed_mem_mib=256 * GIB), queue("b"))
    quotas.add(terms("b", "zoe"), amount(1, 2.5, 300))
    (loan,) = quotas.ledger()
    assert (loan.lender, loan.borrower, loan.amount) == ("a", "b", amount(1, 2.5, 300))


# What the settings promise

TWO_EACH = (queue("a", "lab", guaranteed_gpus=2.0), queue("b", "lab", guaranteed_gpus=2.0))
PROMISES = {
    "nothing": ([], []),
    "just what there is": ([A, B], []),
    "more than there is": (
        [queue("a", guaranteed_gpus=9.0)],
        [("queue.a.guaranteed_gpus", "queue a is guaranteed 9 GPUs, but the machines have 8")],
    ),
    "together more than there is": (
        [A, queue("b", guaranteed_gpus=4.5)],
        [("queue.b.guaranteed_gpus", "queues are guaranteed 8.5 GPUs (a 4, b 4.5), but the machines have 8")],
    ),
    "cells count by their size": (
        [queue("a", cells=("4", "n1:2")), queue("b", cells=("4",))],
        [("queue.b.guaranteed_gpus", "queues are guaranteed 10 GPUs (a 6, b 4), but the machines have 8")],
    ),
    "cores": (
        [queue("a", guaranteed_cpus=65.0)],
        [("queue.a.guaranteed_cpus", "queue a is guaranteed 65 CPUs, but the machines have 64")],
    ),
    "memory": (
        [queue("a", guaranteed_mem_mib=300 * GIB)],
        [("queue.a.guaranteed_mem_mib", "queue a is guaranteed 300G of memory, but the machines have 256G")],
    ),
    "a guarantee and its parts count once": ([*LEFT, B], []),
    "parts that are just the whole, and just the most": (
        [queue("lab", guaranteed_gpus=4.0, max_gpus=4.0), *TWO_EACH],
        [],
    ),
    "parts that are more than the whole": (
        [queue("lab", guaranteed_gpus=3.0), *TWO_EACH],
        [("queue.lab.guaranteed_gpus", "the queues below lab are guaranteed 4 GPUs, but it has only 3")],
    ),
    "parts that are together more than the most": (
        [queue("lab", max_gpus=3.0), *TWO_EACH],
        [("queue.lab.max_gpus", "the queues below lab are guaranteed 4 GPUs, but it may hold at most 3")],
    ),
}


@pytest.mark.parametrize(("queues", "wanted"), PROMISES.values(), ids=PROMISES)
def test_the_settings_guarantee(queues, wanted):
    assert problems(settings_of(*queues), amount(8, 64, 256 * GIB)) == wanted


def test_without_machines_only_the_settings_are_compared():
    above = settings_of(queue("a", guaranteed_gpus=99.0), queue("b", "a", guaranteed_gpus=100.0))
    assert [path for path, _ in problems(above, None)] == ["queue.a.guaranteed_gpus"]
