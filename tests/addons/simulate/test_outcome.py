"""Where jobs ran: what is put down comes out again, in the order in which it happened, and is small."""

from __future__ import annotations

import tracemalloc

import pytest

from gpusched.addons.simulate import cluster, planner_run, policies
from gpusched.addons.simulate.event_loop import Walk, play
from gpusched.addons.simulate.outcome import RunLog
from gpusched.addons.simulate.trace import TraceJob
from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import GpuShare
from gpusched.model.snapshot import Placement
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare


def job(submit_s, run_s, gpus=1, **more):
    return TraceJob(f"{submit_s}", submit_s, run_s, run_s, gpus=gpus, **more)


def whole(node, *cards, cpus=0.0):
    return Placement(node, tuple(GpuShare(f"{node}-{card}", card) for card in cards), cpus, 0)


class Witness(Walk):
    """Writes down what happens at each instant."""

    def __init__(self, runs):
        super().__init__(runs)
        self.seen, self.ended, self.arrived, self.begun = [], [], [], []

    def end(self, run):
        self.ended.append(run)

    def arrive(self, job):
        self.arrived.append(job)

    def begin(self, run):
        self.begun.append(run)

    def settle(self, now):
        super().settle(now)
        self.seen.append((now, self.ended, self.arrived, self.begun))
        self.ended, self.arrived, self.begun = [], [], []


def told(runs, jobs):
    witness = Witness(runs)
    assert play([job.submit_s for job in jobs], witness) == len(witness.seen)
    return witness.seen


def test_held_resources_are_reconstructed():
    runs = RunLog(cluster.nodes_of("2x2"))
    runs.add(0, 0, 5, whole("node0", 1, cpus=1.5))
    gang = Placement("node0", whole("node0", 0, 1).gpus, 0, 64, others=(whole("node1", 1),))
    runs.add(1, 5, 9, gang, "preempted")
    assert runs.booking(0, 7) == AllocationUnits(0, 7, 1500, 0, (CardShare(1, True),))
    others = (AllocationUnits(1, 0, 0, 0, (CardShare(3, True),)),)
    assert runs.booking(1) == AllocationUnits(0, 0, 0, 64, (CardShare(0, True), CardShare(1, True)), others=others)
    assert (runs.how(0), runs.how(1)) == ("completed", "preempted")


def test_slices_are_distinguished_from_whole_gpus():
    node = NodeView("n", 8.0, 1024, (GpuView("u", 0, "A100", 1000),))
    runs = RunLog((node,))
    runs.add(0, 0, 1, Placement("n", (GpuShare("u", 0, 500, 0.5),), 1.0, 0))
    runs.add(1, 0, 1, Placement("n", (GpuShare("u", 0, 250),), 1.0, 0))
    assert runs.booking(0).parts == (CardShare(0, False, 500, 500_000),)
    assert runs.booking(1).parts == (CardShare(0, False, 250, 0),)


def test_an_instant_lists_ends_then_arrivals_then_starts():
    jobs = [job(0, 5), job(5, 3), job(5, 2)]
    runs = RunLog(cluster.nodes_of("1x2"))
    # Added by their ends, as a simulation does that learns only then how long they took.
    runs.add(2, 7, 9, whole("node0", 1))
    runs.add(0, 0, 5, whole("node0", 0))
    runs.add(1, 5, 8, whole("node0", 0))
    assert told(runs, jobs) == [
        (0, [], [0], [1]),
        (5, [1], [1, 2], [2]),
        (7, [], [], [0]),
        (8, [2], [], []),
        (9, [0], [], []),
    ]


def test_a_run_of_zero_length_begins_before_it_ends():
    runs = RunLog(cluster.nodes_of("1x1"))
    runs.add(0, 3, 3, whole("node0", 0))
    runs.add(1, 1, 3, whole("node0", 0))
    assert told(runs, [job(0, 1), job(1, 2)]) == [
        (0, [], [0], []),
        (1, [], [1], [1]),
        (3, [1], [], [0]),
        (3, [0], [], []),
    ]


def test_an_impossible_run_is_refused():
    runs = RunLog(cluster.nodes_of("1x1"))
    with pytest.raises(BrokenInvariant, match="before it begins"):
        runs.add(0, 3, 2, whole("node0", 0))
    with pytest.raises(BrokenInvariant, match="not a node of the simulation"):
        runs.add(0, 3, 4, whole("elsewhere", 0))


def test_a_simulation_records_placements_and_keeps_the_schedule():
    jobs = [job(0, 10, 12), job(1, 5, 2), job(2, 5, 8)]
    machines, settings = cluster.nodes_of("2x8"), policies.rules_of("fcfs+easy").settings()
    bare, known = (planner_run.run(jobs, machines, settings, keeps_places=keeps) for keeps in (False, True))
    assert bare.runs is None
    runs = known.runs
    assert runs is not None
    assert bare.start_s == known.start_s == [0, 1, 10]
    assert [runs.job[run] for run in range(len(runs))] == [0, 1, 2]
    wide = runs.booking(0)
    assert [(piece.node, len(piece.parts)) for piece in wide.pieces()] == [(0, 8), (1, 4)]
    assert (runs.booking(1).node, [part.card for part in runs.booking(1).parts]) == (1, [12, 13])
    assert list(runs.end_s) == [10, 6, 15]


def test_a_job_takes_less_than_a_kilobyte():
    machines, settings = cluster.nodes_of("16x8"), policies.rules_of("fcfs+easy").settings()
    count = 3000
    tracemalloc.start()
    jobs = [job(number * 40, 100 + number % 977, 1 + number % 8, user=f"u{number % 7}") for number in range(count)]
    outcome = planner_run.run(jobs, machines, settings, keeps_places=True)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome.runs is not None
    assert used / count < 1000
