"""Groups of linked cards that are promised whole: who may start where."""

from __future__ import annotations

import pytest

from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.cells import CellVeto, cell_problems, cells_of, groups_of, read_cell
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout
from gpusched.testing import gpu_view, node

EIGHT = (8,)
TWO_FOURS = (4, 4)


def machine(*sizes, name="n1", **parts):
    """A node whose cards are linked in groups of these sizes."""
    views, index = [], 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            views.append(gpu_view(index, name, link_group=None if size == 1 else group, **parts))
            index += 1
    return node(name, gpus=views)


def queues(**cells):
    """Queues by name, each with its cells in one text."""
    return Settings(queue={name: QueueSettings(name, cells=tuple(text.split())) for name, text in cells.items()})


def booking(*cards, where=0):
    return AllocationUnits(where, 1000, 1000, 0, tuple(CardShare(card, True) for card in cards))


def guard(sizes, settings, *held, where="n1"):
    layout = ClusterLayout([machine(*sizes, name=where)], settings)
    return CellVeto(layout, settings, [(queue, booking(*cards), removable) for queue, cards, removable in held])


def may(cells, queue, *cards, borrowed=False, requeue=True):
    """What the guard says to a job of this queue on these cards; None lets it pass."""
    return cells.veto_for(queue, borrowed, requeue).why_not(booking(*cards))


# --- who may start where ------------------------------------------------------------------------

VISION_4 = queues(vision="4", nlp="")
STARTS = {
    "a job that leaves the group alone": (TWO_FOURS, VISION_4, [], ("nlp", 0), True),
    "all of the other group": (TWO_FOURS, VISION_4, [], ("nlp", 0, 1, 2, 3), True),
    "one card of each group": (TWO_FOURS, VISION_4, [], ("nlp", 0, 4), False),
    "the last whole group": (TWO_FOURS, VISION_4, [("nlp", (4,), False)], ("nlp", 0), False),
    "a card of the group that is broken up already": (TWO_FOURS, VISION_4, [("nlp", (4,), False)], ("nlp", 5), True),
    "one job that can be made to give way is not in the way": (
        TWO_FOURS,
        VISION_4,
        [("nlp", (4, 5, 6, 7), True)],
        ("nlp", 0),
        True,
    ),
    "the queue itself in its group": (TWO_FOURS, VISION_4, [("nlp", (4,), False)], ("vision", 0), True),
    "the queue itself outside its group": (TWO_FOURS, VISION_4, [("nlp", (4,), False)], ("vision", 5), True),
    "the queue itself, in part of a group of others": (
        TWO_FOURS,
        queues(vision="4", nlp="4"),
        [("vision", (0,), False)],
        ("vision", 4),
        False,
    ),
    "the queue itself, more of its group": (
        TWO_FOURS,
        queues(vision="4", nlp="4"),
        [("vision", (0,), False)],
        ("vision", 1, 2),
        True,
    ),
    "another queue in a group that one has begun to use": (
        TWO_FOURS,
        queues(vision="4", nlp="4"),
        [("vision", (0,), False)],
        ("nlp", 1),
        False,
    ),
    "a cell in use counts as given": (
        TWO_FOURS,
        VISION_4,
        [("vision", (0, 1, 2, 3), False)],
        ("nlp", 4, 5, 6, 7),
        True,
    ),
    "a queue beyond its cells is as any other": (
        TWO_FOURS,
        queues(vision="4", nlp="4"),
        [("vision", (0, 1, 2, 3), False)],
        ("vision", 4),
        False,
    ),
    "a group of eight serves two cells of four": (EIGHT, queues(vision="4", nlp="4"), [], ("vision", 0), True),
    "a group of eight that serves two cells has no room beside": (
        EIGHT,
        queues(vision="4", nlp="4", other=""),
        [],
        ("other", 0),
        False,
    ),
    "a group of eight with one cell has room for four": (EIGHT, VISION_4, [], ("nlp", 0, 2, 4, 6), True),
    "and not for five": (EIGHT, VISION_4, [], ("nlp", 0, 1, 2, 3, 4), False),
    "several small cells fit beside a large one": (
        EIGHT,
        queues(vision="4 2", nlp="1"),
        [],
        ("other", 7),
        True,
    ),
    "cells move to other groups to make room": (
        (2, 4),
        queues(vision="2"),
        [("nlp", (4, 5), False)],
        ("nlp", 0),
        True,
    ),
    "small cells do not take the place of large ones": (
        (2, 4),
        queues(vision="4", nlp="2"),
        [],
        ("nlp", 2),
        False,
    ),
    "but have their own": ((2, 4), queues(vision="4", nlp="2"), [], ("nlp", 0), True),
    "cards without links are no group": ((1, 1, 1, 1, 2), queues(vision="2"), [], ("nlp", 0, 1, 2, 3), True),
    "nor does one of them serve a cell of two": ((1, 1, 1, 1, 2), queues(vision="2"), [], ("nlp", 4), False),
    "a cell of one is any card": ((1, 1), queues(vision="1"), [], ("nlp", 0), True),
    "and not none": ((1, 1), queues(vision="1"), [], ("nlp", 0, 1), False),
    "a job without cards": (TWO_FOURS, queues(vision="4", nlp="4"), [], ("other",), True),
}


@pytest.mark.parametrize(("sizes", "settings", "held", "claim", "passes"), STARTS.values(), ids=STARTS)
def test_a_job_starts_beside_cells(sizes, settings, held, claim, passes):
    text = may(guard(sizes, settings, *held), *claim)
    assert (text is None) is passes, text


GIVES_WAY = {
    "borrowed and may be run again": (True, True, True),
    "borrowed, but may not be ended": (True, False, False),
    "within the guarantee": (False, True, False),
}


@pytest.mark.parametrize(("borrowed", "requeue", "passes"), GIVES_WAY.values(), ids=GIVES_WAY)
def test_only_preemptible_jobs_may_break_up_cells(borrowed, requeue, passes):
    cells = guard(EIGHT, queues(vision="8", nlp=""))
    assert (may(cells, "nlp", 0, borrowed=borrowed, requeue=requeue) is None) is passes


def test_jobs_of_a_protected_queue_do_not_yield():
    settings = Settings(
        queue={"vision": QueueSettings("vision", cells=("8",)), "nlp": QueueSettings("nlp", preemptible=False)}
    )
    assert may(guard(EIGHT, settings), "nlp", 0, borrowed=True) is not None


def test_the_sentence_names_the_guarantee_of_another():
    cells = guard(EIGHT, queues(vision="4", nlp="4"), ("nlp", (0,), False))
    assert may(cells, "nlp", 1, 2, 3, 4) == "queue vision is promised 4 linked GPUs and could no longer get them"
    bound = guard(EIGHT, queues(vision="n1:8"))
    assert may(bound, "nlp", 1) == "queue vision is promised 8 linked GPUs on n1 and could no longer get them"
    one = guard((1,), queues(vision="1"))
    assert may(one, "nlp", 0) == "queue vision is promised 1 GPU and could no longer get them"


def test_starts_and_ends_within_a_cycle_count():
    cells = guard(TWO_FOURS, VISION_4)
    assert may(cells, "nlp", 4) is None
    cells.add("nlp", booking(0), False)
    assert may(cells, "nlp", 4) is not None
    cells.add("other", booking(0), False)
    cells.remove("nlp", booking(0), False)
    assert may(cells, "nlp", 4) is not None
    cells.remove("other", booking(0), False)
    assert may(cells, "nlp", 4) is None
    cells.add("nlp", booking(0), True)
    assert may(cells, "nlp", 4) is None


def test_a_gpu_shared_by_two_queues_belongs_to_neither():
    cells = guard((4,), queues(vision="4"), ("vision", (0,), False))
    assert may(cells, "vision", 0) is None
    assert may(cells, "nlp", 0) is not None


def test_gpus_to_avoid_are_those_of_guaranteed_groups():
    cells = guard(TWO_FOURS, VISION_4, ("nlp", (4,), False))
    assert cells.avoid("nlp") == {0, 1, 2, 3}
    assert cells.avoid("vision") == frozenset()
    assert guard(TWO_FOURS, VISION_4).avoid("nlp") == frozenset()
    assert guard(TWO_FOURS, queues(vision="")).avoid("nlp") == frozenset()


def test_without_cells_no_check_is_made():
    cells = guard(EIGHT, queues(vision="", nlp=""))
    assert not cells.is_needed
    assert may(cells, "nlp", *range(8)) is None
    assert guard(EIGHT, VISION_4).is_needed


def test_cells_of_a_node_stay_on_it():
    settings = queues(vision="n2:4")
    layout = ClusterLayout([machine(4, name="n1"), machine(4, name="n2")], settings)
    cells = CellVeto(layout, settings, [])
    first, second = (cells.veto_for("nlp", False, True).why_not(booking(card)) for card in (0, 4))
    assert first is None
    assert second is not None


def test_a_cell_of_a_node_precedes_one_of_any_node():
    settings = queues(vision="n1:2", nlp="4")
    layout = ClusterLayout([machine(4, name="n1"), machine(4, name="n2")], settings)
    cells = CellVeto(layout, settings, [])
    claim = cells.veto_for("other", False, True)
    assert claim.why_not(booking(0, 1)) is None
    assert claim.why_not(booking(4)) is not None


def test_a_gang_counts_on_all_of_its_nodes():
    settings = queues(vision="4")
    layout = ClusterLayout([machine(4, name="n1"), machine(4, name="n2")], settings)
    gang = AllocationUnits(
        0, 1000, 1000, 0, (CardShare(0, True),), others=(AllocationUnits(1, 1000, 1000, 0, (CardShare(4, True),)),)
    )
    assert CellVeto(layout, settings, []).veto_for("nlp", False, True).why_not(gang) is not None
    held = CellVeto(layout, settings, [("nlp", AllocationUnits(0, 1000, 0, 0, (CardShare(0, True),)), False)])
    assert held.avoid("nlp") == {4, 5, 6, 7}


# --- promises that cannot be kept ---------------------------------------------------------------


def test_as_many_cells_as_possible_are_kept():
    cells = guard(TWO_FOURS, queues(vision="4 4", nlp="4"), ("other", (0,), False))
    assert may(cells, "other", 1) is None
    assert may(cells, "other", 4) is not None


def test_a_lost_gpu_removes_its_group_from_the_guarantee():
    settings = queues(vision="4")
    views = [gpu_view(index, link_group=index // 4, is_present=index != 0) for index in range(8)]
    cells = CellVeto(ClusterLayout([node(gpus=views)], settings), settings, [])
    assert may(cells, "nlp", 1) is None
    assert may(cells, "nlp", 4) is not None


@pytest.mark.parametrize("fault", [{"why_not": "drained"}, {"why_not_whole": "foreign use"}])
def test_unavailable_gpus_are_not_counted_on(fault):
    settings = queues(vision="4")
    views = [gpu_view(index, link_group=index // 4, **(fault if index == 0 else {})) for index in range(8)]
    cells = CellVeto(ClusterLayout([node(gpus=views)], settings), settings, [])
    assert may(cells, "nlp", 4) is not None


# --- groups and queues ----------------------------------------------------------------------------


def test_groups_are_by_link_else_memory_else_node():
    views = [
        gpu_view(0, link_group=0, numa=0),
        gpu_view(1, link_group=0, numa=1),
        gpu_view(2, numa=0),
        gpu_view(3),
    ]
    beside = [gpu_view(index, "n2", numa=numa) for index, numa in enumerate((0, 0, 1, None))]
    layout = ClusterLayout([node("n1", gpus=views), node("n2", gpus=beside), node("n3", gpus=2)], Settings())
    found = sorted(sorted(group.cards) for group in groups_of(layout))
    assert found == [[0, 1], [2], [3], [4, 5], [6], [7], [8, 9]]


def tree(**parents_and_cells):
    return Settings(
        queue={
            name: QueueSettings(name, parent=parent, cells=tuple(cells.split()))
            for name, (parent, cells) in parents_and_cells.items()
        }
    )


def test_jobs_of_a_queue_count_to_its_parents_cells():
    settings = tree(lab=(None, "4"), vision=("lab", ""), nlp=(None, "4"))
    cells = guard(TWO_FOURS, settings, ("vision", (0,), False))
    assert may(cells, "vision", 1) is None
    assert may(cells, "lab", 2) is None
    assert may(cells, "nlp", 3) is not None


def test_cells_of_children_are_part_of_those_of_parents():
    found = cells_of(tree(lab=(None, "4 4"), vision=("lab", "4 2")).queue)
    assert [(cell.queue, cell.text) for cell in found] == [("lab", "4"), ("vision", "4"), ("vision", "2")]


@pytest.mark.parametrize(("text", "size", "where"), [("4", 4, None), ("n1:2", 2, "n1"), (" 8 ", 8, None)])
def test_a_cell_is_parsed(text, size, where):
    cell = read_cell("q", text)
    assert (cell.queue, cell.size, cell.node) == ("q", size, where)


@pytest.mark.parametrize("text", ["", "four", "0", "-4", ":4", "n1:", "n1:0", "4.5", "99999", "4:n1"])
def test_an_invalid_cell_is_refused(text):
    with pytest.raises(ValueError, match="is not a group of GPUs"):
        read_cell("q", text)


PROBLEMS = {
    "cells that are there": (TWO_FOURS, queues(vision="4", nlp="2 n1:2"), []),
    "a way that only trying finds": ((7, 6), queues(vision="4 3", nlp="3 3"), []),
    "no cell": (TWO_FOURS, queues(vision="four"), [("queue.vision.cells", "is not a group of GPUs")]),
    "a node that is not there": (TWO_FOURS, queues(vision="n9:2"), [("queue.vision.cells", "which is not one of n1")]),
    "larger than any group": (TWO_FOURS, queues(vision="8"), [("queue.vision.cells", "any node has at most 4")]),
    "larger than any group of the node": (
        TWO_FOURS,
        queues(vision="n1:5"),
        [("queue.vision.cells", "n1 has at most 4")],
    ),
    "more than there are": (
        TWO_FOURS,
        queues(vision="4 4", nlp="4"),
        [("queue.vision.cells", "the group 4 of queue vision is not available beside all other promised groups")],
    ),
    "small ones that the large ones leave no room for": (
        TWO_FOURS,
        queues(vision="3 3", nlp="2"),
        [("queue.nlp.cells", "the group 2 of queue nlp")],
    ),
}


@pytest.mark.parametrize(("sizes", "settings", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_problems_are_reported(sizes, settings, expected):
    found = cell_problems(settings, ClusterLayout([machine(*sizes, why_not="drained")], settings))
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert all(text in sentence for (_, sentence), (_, text) in zip(found, expected, strict=True))


def test_without_machines_only_the_syntax_is_checked():
    assert cell_problems(queues(vision="8 n9:2")) == []
    assert [path for path, _ in cell_problems(queues(vision="8 x", nlp="y"))] == [
        "queue.nlp.cells",
        "queue.vision.cells",
    ]
